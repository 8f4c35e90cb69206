"""The terminal summary: truth line, verdict, where the time went, what was not measured. About a screen or two.

Made for 80 columns, and whole from 60 to as wide as one likes, with and without colour, piped into a file, and on
terminals that know nothing but ASCII. Names from traces reach the terminal as plain text: no markup, no escapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from spikeprof.analyzers.base import Finding, Result
from spikeprof.reports import caches, fusion, steps
from spikeprof.reports import format as fmt
from spikeprof.reports import model_graph as graphs
from spikeprof.reports import numerics as num
from spikeprof.reports import occupancy as occ
from spikeprof.reports import ownership as own
from spikeprof.reports import sentences as say
from spikeprof.reports import topology as links
from spikeprof.reports.class_names import class_names
from spikeprof.reports.kernel_names import clip, printable, short_names
from spikeprof.reports.model import PlainTable, Report, rows
from spikeprof.reports.truth_line import truth_line

MAX_WIDTH = 140
MAX_TEXT = 100  # longer lines of prose are hard to read
MAX_FINDINGS = 6
MAX_EVIDENCE = 3  # of one finding
MAX_KERNELS = 8
MAX_MISSING = 8
MAX_MODULES = 12
MAX_OPERATORS = 6
MAX_OCCUPANCIES = 5
MAX_CHAINS = 4
MAX_PARTS = 5
MAX_TENSORS = 8

#: Stands for the space between a number and its unit until lines are broken: a character that no name holds.
_GLUE = "\ue000"
_UNIT_GAP = re.compile(r"(?<=\d) (?=(?:[nµm]?s|min|h|%|[KMGT]?i?B|[kMGT]B/s|W|J|MHz|°C)(?:\W|$))")
_EIGHTHS = " ▏▎▍▌▋▊▉"

_MARKS = {"value": ("✓", "green"), "problem": ("!", "yellow"), "not_measured": ("?", "cyan"), "note": ("·", "dim")}
_SEVERITIES = {"critical": ("✗", "bold red"), "warning": ("!", "bold yellow"), "info": ("i", "bold blue")}


@dataclass(frozen=True, slots=True)
class _Screen:
    """Where to print, how wide, and whether nothing but ASCII can be shown. Lines never end in blanks."""

    console: Console
    width: int
    ascii: bool

    def text(self, content: str, style: str = "") -> Text:
        """Plain text in one style; nothing in it is markup, and no line breaks between a number and its unit."""
        glued = _UNIT_GAP.sub(_GLUE, content)
        plain = fmt.ascii_only(glued).replace(fmt.ascii_only(_GLUE), _GLUE) if self.ascii else glued
        return Text().append(plain, style or None)

    def line(self, *parts: Text) -> None:
        """One line of parts, printed as it is."""
        whole = Text().join(parts)
        whole.plain = whole.plain.replace(_GLUE, " ")
        whole.rstrip()
        self.console.print(whole, highlight=False, soft_wrap=True)

    def hanging(self, left: Text, right: Text, indent: int = 0) -> None:
        """Text beside a mark or label, wrapped so that its lines begin under one another."""
        room = min(self.width, MAX_TEXT) - indent
        for number, line in enumerate(right.wrap(self.console, room, overflow="fold")):
            start = left.copy() if number == 0 else Text()
            start.pad_right(indent - start.cell_len)
            self.line(start, line)

    def prose(self, content: str, style: str = "") -> None:
        """A paragraph no wider than is good to read."""
        self.hanging(Text(), self.text(content, style))

    def heading(self, content: str) -> None:
        """A blank line and a heading that is ruled to the right edge."""
        text = self.text(clip(content, self.width), "bold")
        rule = self.width - text.cell_len - 1
        self.console.print()
        self.line(text, Text(" " + ("-" if self.ascii else "─") * rule if rule > 0 else "", style="dim"))


def render_terminal(report: Report, console: Console) -> None:
    """Print the summary of a report. Never raises for what the report holds or lacks."""
    screen = _screen(console)
    _header(screen, report)
    _truth(screen, report)
    _verdict(screen, report)
    _steps(screen, report)
    _modules(screen, report)
    _kernels(screen, report)
    _caches(screen, report)
    _occupancy(screen, report)
    _fusion(screen, report)
    _numerics(screen, report)
    _idle(screen, report)
    _graph(screen, report)
    _links(screen, report)
    _missing(screen, report)


def _screen(console: Console) -> _Screen:
    plain = console.options.ascii_only or not console.encoding.lower().startswith("utf")
    return _Screen(console, max(40, min(console.width, MAX_WIDTH)), plain)


def _header(screen: _Screen, report: Report) -> None:
    screen.line(screen.text(clip(f"spikeprof {printable(report.trace_name)}", screen.width), "bold"))
    screen.prose(" · ".join(say.subtitle(report)), "dim")
    if report.manifest.command:
        screen.line(screen.text(clip(f"$ {fmt.command_line(report.manifest.command)}", screen.width), "dim"))


def _truth(screen: _Screen, report: Report) -> None:
    screen.heading("How far to trust this")
    items = truth_line(report)
    indent = max(len(item.label) for item in items) + 4
    for item in items:
        mark, style = _MARKS[item.state]
        screen.hanging(
            screen.text(mark, style).append_text(screen.text(f" {item.label}")), screen.text(item.text), indent
        )


def _verdict(screen: _Screen, report: Report) -> None:
    findings = report.findings()
    screen.heading(f"Verdict: {say.verdict(report)}")
    if not findings:
        screen.prose(say.nothing_found(report))
    for finding in findings[:MAX_FINDINGS]:
        _finding(screen, finding)
    if len(findings) > MAX_FINDINGS:
        screen.prose(f"… and {fmt.plural(len(findings) - MAX_FINDINGS, 'more finding')} in the full report", "dim")


def _finding(screen: _Screen, finding: Finding) -> None:
    mark, style = _SEVERITIES[finding.severity]
    head = screen.text(say.rule_title(finding.rule), "bold")
    where = f" ({fmt.scope(finding.scope, screen.width - 20)})" if finding.scope else ""
    head.append_text(screen.text(f"{where} [{printable(finding.rule)}]", "dim"))
    action = screen.text("→ " + printable(finding.recommendation), "green")
    if finding.saving is not None:
        action.append_text(screen.text(f" Saves {fmt.saving(finding.saving)}.", "dim"))
    screen.hanging(screen.text(mark, style), head, 2)
    screen.hanging(Text(), screen.text(fmt.evidence(finding.evidence, MAX_EVIDENCE)), 2)
    screen.hanging(Text(), action, 2)


# ---------------------------------------------------------------- tables


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of numbers: its key in the table, its heading, and the least screen width at which it is shown."""

    key: str
    heading: str
    from_width: int = 0


_KERNEL_COLUMNS = (
    _Column("launches_count", "Launches"),
    _Column("total_ns", "Total"),
    _Column("mean_ns", "Mean", 74),
    _Column("p50_ns", "p50", 110),
    _Column("p99_ns", "p99", 94),
    _Column("max_ns", "Longest", 120),
    _Column("gpu_time_share", "Share"),
)


def _bar(screen: _Screen, value: float, width: int) -> str:
    """A bar for a share from 0 to 1; the smallest amount still shows."""
    if not value > 0:
        return ""
    if screen.ascii:
        return "#" * max(1, round(min(value, 1) * width))
    eighths = max(1, round(min(value, 1) * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _print_table(
    screen: _Screen,
    first: str,
    columns: Sequence[_Column],
    entries: Sequence[dict[str, Any]],
    names_in: Callable[[int], Sequence[str]],
    bar_of: str,
    below: Sequence[str] = (),
) -> None:
    """Names in what room there is, numbers right-aligned, at the end a bar for the column ``bar_of``.

    ``names_in`` gives the names of the entries in so many characters; ``below`` a line under each, none where empty.
    """
    kept = [c for c in columns if screen.width >= c.from_width]
    cells = [[fmt.quantity(c.key, row.get(c.key)) for row in entries] for c in kept]
    widths = [max(len(c.heading), *map(len, values)) for c, values in zip(kept, cells, strict=True)]
    bar_width = 0 if screen.width < 70 else 8 if screen.width < 110 else 20
    room = screen.width - sum(w + 2 for w in widths) - (bar_width + 1 if bar_width else 0)
    names = names_in(room)
    room = min(room, max(24, *map(len, names)))
    heading = first.ljust(room) + "".join(f"  {c.heading:>{w}}" for c, w in zip(kept, widths, strict=True))
    screen.line(screen.text(heading, "dim"))
    largest = max((row[bar_of] for row in entries if fmt.is_number(row.get(bar_of))), default=0) or 1
    for i, name in enumerate(names):
        numbers = "".join(f"  {values[i]:>{w}}" for values, w in zip(cells, widths, strict=True))
        value = entries[i].get(bar_of)
        bar = _bar(screen, value / largest, bar_width) if bar_width and value is not None else ""
        screen.line(screen.text(name.ljust(room)), screen.text(numbers), screen.text(f" {bar}", "blue"))
        if i < len(below) and below[i]:
            screen.line(screen.text(f"  {below[i]}", "dim"))


_STEP_COLUMNS = (
    _Column("steps_count", "Steps"),
    _Column("p50_ns", "p50"),
    _Column("p90_ns", "p90", 94),
    _Column("p99_ns", "p99", 60),
    _Column("max_ns", "Longest"),
    _Column("jitter_ns", "Jitter", 110),
    _Column("step_kernels_count", "Kernels", 70),
    _Column("wait_ns", "Wait", 76),
    _Column("busy_share", "GPU busy"),
)


def _steps(screen: _Screen, report: Report) -> None:
    """How long steps of each kind take; nothing where none are known."""
    result = report.result("steps")
    table = steps.kinds(result) if result else {}
    if result is None or not table:
        return
    screen.heading("Steps")
    screen.prose(steps.summary(result), "dim")
    names = table["kind"]
    _print_table(screen, "Kind", _STEP_COLUMNS, rows(table), lambda room: [clip(n, room) for n in names], "")


_MODULE_COLUMNS = (
    _Column("modules_count", "Modules", 70),
    _Column("launches_count", "Launches", 60),
    _Column("inclusive_ns", "Total"),
    _Column("exclusive_ns", "Own", 94),
    _Column("inclusive_share", "Share"),
)
_OPERATOR_COLUMNS = (
    _Column("launches_count", "Launches"),
    _Column("total_ns", "Total"),
    _Column("gpu_time_share", "Share"),
)


def _modules(screen: _Screen, report: Report) -> None:
    """Kernel time by module, else by operator; nothing where neither is known."""
    result = report.result("ownership")
    summary = own.summary(result) if result else ""
    if result is None or not summary:
        return
    modules, operators = own.main_modules(result, MAX_MODULES), own.main_operators(result, MAX_OPERATORS)
    screen.heading("Time by module" if modules else "Time by operator")
    screen.prose(summary, "dim")
    if modules:
        _print_table(screen, "Module", _MODULE_COLUMNS, modules, partial(own.named, modules), "inclusive_share")
    elif operators:
        _print_table(screen, "Operator", _OPERATOR_COLUMNS, operators, partial(own.named, operators), "gpu_time_share")


def _kernels(screen: _Screen, report: Report) -> None:
    result = report.result("kernel-latency")
    table = result.tables.get("kernels", {}) if result else {}
    entries = rows(table)[:MAX_KERNELS]
    if result is None or not entries:
        return
    screen.heading(_kernel_heading(result, table, len(entries)))
    names = [str(e["name"]) for e in entries]
    owners = own.owners(report.result("ownership"))
    below = [own.owner(owners[name], screen.width - 2) if name in owners else "" for name in names]
    room_for = partial(short_names, names)
    _print_table(screen, "Kernel", _KERNEL_COLUMNS, entries, room_for, "gpu_time_share", below)


def _kernel_heading(result: Result, table: PlainTable, shown: int) -> str:
    """``Kernels by time: 10 of 45, 96.2 % of kernel time``."""
    number = result.metric("distinct_kernels_count") or len(table["name"])
    shares = [s for s in table.get("gpu_time_share", [])[:shown] if fmt.is_number(s)]
    part = f", {fmt.share(min(sum(shares), 1.0))} of kernel time" if shown < number else ""
    return f"Kernels by time: {fmt.count(shown)} of {fmt.count(number)}{part}"


_CACHE_COLUMNS = (
    _Column("l1_hit_share", "L1 hit", 110),
    _Column("l2_hit_share", "L2 hit"),
    _Column("dram_read_bytes", "DRAM read"),
    _Column("dram_written_bytes", "Written", 70),
    _Column("dram_peak_share", "Of peak"),
    _Column("bank_conflict_share", "Conflicts", 100),
    _Column("tensor_active_share", "Tensor", 100),
)


def _caches(screen: _Screen, report: Report) -> None:
    """Counters per launch of the kernels that took most time; nothing where none were recorded."""
    result = report.result("cache-miss")
    table = caches.longest(result, MAX_KERNELS) if result else {}
    if result is None or not table:
        return
    screen.heading("Caches and DRAM, per launch")
    if summary := caches.summary(result):
        screen.prose(summary, "dim")
    _print_classes(screen, table, _CACHE_COLUMNS, "dram_peak_share")


_OCCUPANCY_COLUMNS = (
    _Column("registers_count", "Registers", 140),
    _Column("shared_bytes", "Shared", 100),
    _Column("occupancy_share", "Occupancy"),
    _Column("limiter", "Limited by", 60),
    _Column("waves_ratio", "Waves", 70),
    _Column("sm_active_share", "SMs busy", 74),
    _Column("expected_sm_active_share", "Expected", 94),
    _Column("instructions_per_cycle_ratio", "IPC", 120),
    _Column("utilisation_ratio", "U", 120),
)


def _occupancy(screen: _Screen, report: Report) -> None:
    """Theoretical occupancy and waves of the kernels that took most time; nothing where none is known."""
    result = report.result("fusion-boundary")
    table = occ.longest(result, MAX_OCCUPANCIES) if result else {}
    if result is None or not table:
        return
    screen.heading("Occupancy and waves")
    screen.prose(occ.summary(result), "dim")
    bar = "sm_active_share" if "sm_active_share" in table else "expected_sm_active_share"
    _print_classes(screen, table, _OCCUPANCY_COLUMNS, bar)


_CHAIN_COLUMNS = (
    _Column("runs_count", "Runs", 90),
    _Column("total_ns", "Total"),
    _Column("traffic_bytes", "Traffic", 74),
    _Column("saved_share", "Saved", 60),
    _Column("saving_ns", "At most", 100),
    _Column("gpu_time_share", "Share"),
)


def _fusion(screen: _Screen, report: Report) -> None:
    """How much is fused, and the chains that took most time; nothing where no kernel ran."""
    result = report.result("fusion-coverage")
    summary = fusion.summary(result) if result else ""
    if result is None or not summary:
        return
    screen.heading("Fusion")
    screen.prose(f"{summary}. {fusion.details(result)}".strip(), "dim")
    entries = rows(fusion.longest(result, MAX_CHAINS))
    if entries:
        names = [str(entry["chain"]) for entry in entries]
        columns = [c for c in _CHAIN_COLUMNS if any(entry.get(c.key) is not None for entry in entries)]
        _print_table(screen, "Chain", columns, entries, lambda room: [clip(n, room) for n in names], "gpu_time_share")


def _print_classes(screen: _Screen, table: PlainTable, known: Sequence[_Column], bar: str) -> None:
    """A row for each class of launches, with those of the columns that have a value anywhere."""
    entries = rows(table)
    columns = [c for c in known if any(row.get(c.key) is not None for row in entries)]
    _print_table(screen, "Kernel", columns, entries, lambda room: class_names(table, room)[0], bar)


_TENSOR_COLUMNS = (
    _Column("dtype", "Type", 60),
    _Column("amax_value", "amax"),
    _Column("headroom_bits", "Headroom"),
    _Column("bad_elements_count", "Inf, NaN"),
    _Column("saturated_share", "Saturated", 110),
    _Column("zero_share", "Zeros", 74),
    _Column("subnormal_share", "Subnormal", 94),
)


def _numerics(screen: _Screen, report: Report) -> None:
    """The watched tensors that are worst off; nothing where none were scanned."""
    result = report.result("overflow")
    table = num.worst(result, MAX_TENSORS) if result else {}
    if result is None or not table:
        return
    screen.heading("Numerics")
    for text in (num.summary(result), *num.notes(result)):
        screen.prose(text, "dim")
    entries = rows(table)
    columns = [c for c in _TENSOR_COLUMNS if any(row.get(c.key) is not None for row in entries)]
    names = table["module"]
    _print_table(screen, "Module", columns, entries, lambda room: [num.tail(name, room) for name in names], "")


_IDLE_COLUMNS = (_Column("total_ns", "Total"), _Column("idle_share", "Share"))


def _idle(screen: _Screen, report: Report) -> None:
    result = report.result("launch-gaps")
    summary = say.idle_summary(result) if result else ""
    if result is None or not summary:
        return
    screen.heading(f"GPU idle: {summary}")
    if gaps := say.gaps_summary(result):
        screen.prose(gaps, "dim")
    classes = say.idle_classes(result)
    if not classes:
        if result.status == "not_measured":
            screen.prose(f"By cause: {fmt.not_measured(result.reason)}")
        return
    wide = screen.width >= 70
    names = [f"{c.name}: {c.meaning}" if wide and c.meaning else c.name for c in classes]
    entries = [{"total_ns": c.total_ns, "idle_share": c.share} for c in classes]
    _print_table(screen, "Class", _IDLE_COLUMNS, entries, lambda room: [clip(n, room) for n in names], "idle_share")


_PART_COLUMNS = (
    _Column("layers_count", "Layers", 70),
    _Column("nodes_count", "Nodes"),
    _Column("total_ns", "Total"),
    _Column("part_time_share", "Share"),
)
_NODE_COLUMNS = (
    _Column("launches_count", "Launches", 94),
    _Column("gpu_time_ns", "GPU time"),
    _Column("latency_ns", "Latency"),
    _Column("host_ns", "On host", 76),
    _Column("heat_share", "Heat"),
)
_HELD_COLUMNS = (
    _Column("shape", "Shape"),
    _Column("dtype", "Type", 70),
    _Column("storage_bytes", "Held"),
    _Column("peak_share", "Of peak"),
)


def _graph(screen: _Screen, report: Report) -> None:
    """The model's graph in short; nothing where none was read."""
    result = report.result("model-graph")
    if result is None or not (summary := graphs.summary(result)):
        return
    screen.heading(f"Model graph: {summary}")
    for text in graphs.notes(result):
        screen.prose(text, "dim")
    _graph_table(screen, result, "parts", "Part", _PART_COLUMNS, MAX_PARTS)
    if result.tables["nodes"].get("kernel"):
        _graph_table(screen, result, "nodes", "Node", _NODE_COLUMNS, MAX_PARTS)


def _graph_table(
    screen: _Screen, result: Result, table: str, first: str, columns: Sequence[_Column], most: int
) -> None:
    """The first rows of one of the tables about a graph, with those of the columns that have a value anywhere."""
    entries = rows(result.tables.get(table, {}))[:most]
    if not entries:
        return
    kept = [c for c in columns if any(row.get(c.key) is not None for row in entries)]
    names = [graphs.in_module(row, first.lower()) for row in entries]
    _print_table(screen, first, kept, entries, lambda room: [clip(n, room) for n in names], columns[-1].key)


def render_graph(result: Result, console: Console) -> None:
    """Print the answer of the analyzer ``model-graph`` alone: memory, time, layers × parts, findings."""
    screen = _screen(console)
    screen.line(screen.text(clip(graphs.title(result), screen.width), "bold"))
    for text in (graphs.summary(result), graphs.remark(result)):
        if text:
            screen.prose(text, "dim")
    if memory := graphs.memory(result):
        screen.heading("Memory")
        screen.prose(memory)
        _graph_table(screen, result, "peak_tensors", "Node", _HELD_COLUMNS, MAX_KERNELS)
    if times := " ".join(text for text in (graphs.times(result), graphs.joined(result)) if text):
        screen.heading("Time")
        screen.prose(times)
        _graph_table(screen, result, "parts", "Part", _PART_COLUMNS, MAX_KERNELS)
        screen.console.print()
        _graph_table(screen, result, "nodes", "Node", _NODE_COLUMNS, MAX_KERNELS)
    if lines := graphs.heat_lines(result, screen.width, screen.ascii):
        screen.heading(f"Heat by part and layer{graphs.stack_of(result)}")
        for line in lines:
            screen.line(screen.text(line))
    if result.findings:
        screen.heading("Findings")
    for finding in result.findings:
        _finding(screen, finding)
    _graph_missing(screen, result)


def _graph_missing(screen: _Screen, result: Result) -> None:
    items = say.missing_metrics(result)
    if items:
        screen.heading("Not measured")
    for item in items:
        screen.hanging(screen.text("?", "cyan"), screen.text(f"{item.what}: {item.why}"), 2)


def _links(screen: _Screen, report: Report) -> None:
    """How the GPUs are joined; nothing for one GPU."""
    result = report.result("topology")
    if result is not None and _matrices(screen, result):
        screen.prose(links.suits(result))


def _matrices(screen: _Screen, result: Result) -> bool:
    """The matrix of GPUs under its heading, with what its words mean; whether there is one."""
    matrices = links.matrices(result, screen.width)
    for heading, table in matrices:
        screen.heading(heading)
        _lines(screen, table)
    for text in links.legend(result) if matrices else ():
        screen.prose(text, "dim")
    return bool(matrices)


def _lines(screen: _Screen, table: PlainTable) -> None:
    for number, line in enumerate(links.table_lines(table, screen.width)):
        screen.line(screen.text(line, "" if number else "dim"))


def render_topology(result: Result, names: Sequence[str], problem: str, console: Console) -> None:
    """Print the answer of the analyzer ``topology`` alone: matrix, links to the host, what they suit, findings.

    ``names`` are the GPUs' products; ``problem`` is what could not be read, and why, or empty.
    """
    screen = _screen(console)
    screen.line(screen.text(clip(say.gpus([{"name": name} for name in names]), screen.width), "bold"))
    _matrices(screen, result)
    screen.heading(
        f"GPU and host, in one direction: {'measured/' if links.is_measured(result) else ''}theoretical GB/s"
    )
    _lines(screen, links.hosts(result))
    screen.heading("What it suits")
    screen.prose(links.suits(result))
    for finding in result.findings:
        screen.console.print()
        _finding(screen, finding)
    screen.heading("Where the rates come from")
    for text in links.sources(result):
        screen.hanging(screen.text("·", "dim"), screen.text(text), 2)
    for text in links.not_measured(result):
        screen.hanging(screen.text("?", "cyan"), screen.text(f"Not measured: {text}"), 2)
    if problem:
        screen.hanging(screen.text("?", "cyan"), screen.text(printable(problem)), 2)


def _missing(screen: _Screen, report: Report) -> None:
    items = [item for item in say.missing(report) if not item.in_truth_line]
    if not items:
        return
    screen.heading("Not measured")
    for item in items[:MAX_MISSING]:
        text = screen.text(item.what, "bold").append_text(screen.text(f": {item.why}"))
        if item.how:
            text.append_text(screen.text(f" → {item.how}", "green"))
        screen.hanging(screen.text("?", "cyan"), text, 2)
    if len(items) > MAX_MISSING:
        screen.prose(f"… and {len(items) - MAX_MISSING} more in the full report", "dim")
