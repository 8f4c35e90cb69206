"""Sentences about a report that every renderer says alike: headings, verdicts, what was not measured.

Text for people is made in ``format.py`` (numbers, names), ``finding_text.py``, ``truth_line.py``, here, and in the
modules about one analyzer's answer each; nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.runner import DOCTOR
from spikeprof.profiler.units import unit_of
from spikeprof.reports import format as fmt
from spikeprof.reports.finding_text import verdict_counts
from spikeprof.reports.kernel_names import printable
from spikeprof.reports.model import Report, rows

#: Titles of analyzers as headings.
_ANALYZER_TITLES = {
    "truth": "Truth",
    "steps": "Steps",
    "kernel-latency": "Kernel latency",
    "ownership": "Time by module",
    "launch-gaps": "Launch gaps",
    "late-compilation": "Compilation",
    "cache-miss": "Caches and DRAM",
    "fusion-boundary": "Occupancy and neighbours",
    "fusion-coverage": "Fusion",
    "model-graph": "Model graph",
    "overflow": "Numerics",
}

#: Collectors that a doctor cannot help with: what they lack lies in the program.
_OF_THE_PROGRAM = ("model_graph", "numerics", "ownership")

_SOURCES = {"torch.profiler": "imported from torch.profiler", "nsys": "imported from Nsight Systems"}


@dataclass(frozen=True, slots=True)
class Missing:
    """One thing that was not measured, why, and what would measure it (empty = not known)."""

    what: str
    why: str
    how: str
    in_truth_line: bool = False


def analyzer_title(analyzer: str) -> str:
    """``launch-gaps`` -> ``Launch gaps``."""
    return _ANALYZER_TITLES.get(analyzer) or fmt.title(printable(analyzer))


def rule_title(rule: str) -> str:
    """A rule's title from the registry; its name in words for a rule that this version does not know."""
    from spikeprof.analyzers.registry import rules

    known = rules().get(rule)
    return known[1].title if known else fmt.title(printable(rule))


def subtitle(report: Report) -> list[str]:
    """What was recorded, in short parts: source, GPUs, processes, length, date."""
    manifest = report.manifest
    parts = [] if manifest.source == "spikeprof" else [_SOURCES.get(manifest.source, printable(manifest.source))]
    devices = report.tables.get("devices", {})
    if used := gpus(rows(devices)):
        parts.append(used)
    ranks = report.tables.get("processes", {}).get("rank", [])
    if ranks:
        parts.append(fmt.plural(len(ranks), "process", "processes"))
    if manifest.duration_ns > 0:
        parts.append(f"{fmt.duration(manifest.duration_ns)} long")
    if manifest.t0_unix_ns > 0 and (when := fmt.date(manifest.t0_unix_ns)):
        parts.append(when)
    if manifest.exit_code:
        parts.append(f"exit code {manifest.exit_code}")
    return parts


def gpus(devices: list[dict[str, Any]]) -> str:
    """``2 × NVIDIA H200 (2 of 8)``: the GPUs that worked, of those that the program could see."""
    used = [d for d in devices if d.get("kernels_count") or d.get("memory_ops_count")] or devices
    names = [printable(str(d.get("name") or "")) for d in used]
    kinds = [f"{names.count(n)} × {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names)]
    if not all(names):
        kinds = [fmt.plural(len(used), "GPU")] if used else []
    return fmt.joined(kinds) + (f" ({len(used)} of {len(devices)})" if len(used) < len(devices) else "")


# ---------------------------------------------------------------- what was not measured


def missing(report: Report) -> list[Missing]:
    """Everything that was not measured: whole questions, single numbers, collectors that did not run.

    What has one reason and one remedy is one item.
    """
    found: dict[Missing, list[str]] = {}
    for item in _missing(report):
        named = found.setdefault(replace(item, what=""), [])
        if item.what not in named:
            named.append(item.what if not named else fmt.within(item.what))
    return [replace(item, what=", ".join(named)) for item, named in found.items()]


def _missing(report: Report) -> Iterator[Missing]:
    for result in report.results:
        what = analyzer_title(result.analyzer)
        if result.status == "not_measured":
            yield Missing(what, printable(result.reason), printable(result.collect_with))
        elif result.status == "error":
            why = f"failed with an internal error: {printable(result.reason)}"
            yield Missing(what, why, "please report this as a bug")
        else:
            yield from _missing_metrics(result)
    for name, note in report.manifest.collectors.items():
        if note.state in ("refused", "degraded"):
            what = f"Collector {fmt.label(name)} ({printable(note.state)})"
            how = "" if name in _OF_THE_PROGRAM else DOCTOR
            yield Missing(what, printable(note.reason) or "no reason was recorded", how)


def missing_metrics(result: Result) -> list[Missing]:
    """What one analyzer could not measure though it has an answer."""
    return list(_missing_metrics(result))


def _missing_metrics(result: Result) -> Iterator[Missing]:
    """Metrics without a value, those with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for metric in result.metrics:
        if metric.value is None or (unit_of(metric.name) and not fmt.is_number(metric.value)):
            by_reason.setdefault(metric.reason, []).append(fmt.within(fmt.title(metric.name)))
    for reason, names in by_reason.items():
        text = fmt.joined(list(dict.fromkeys(names)))
        how = printable(result.collect_with)
        why = printable(reason) or "no reason was recorded"
        yield Missing(text[:1].upper() + text[1:], why, how, result.analyzer == "truth")


# ---------------------------------------------------------------- figures and sections


_CAPTIONS = {
    "kernel-time": ("Kernels over time", "Colour: how much of each time slice the kernel ran."),
    "idle-over-time": ("GPU idle over time", "Share of each time slice, by what the GPU waited for."),
    "gauges": ("Power, clocks and utilisation", "As the driver reports them, averaged over short stretches."),
    "counter-timeline": ("Caches and DRAM over time", "Hardware counters of the whole GPU, averaged over each slice."),
    "cache-matrix": (
        "Caches and DRAM by kernel",
        "Per launch. Colour: shares from 0 to 100 %, all else from 0 to the largest of its column.",
    ),
    "memory-roof": ("DRAM bandwidth by kernel", ""),
    "roofline": ("Roofline", "FLOP/s inferred from the activity of the tensor pipes, as if all were dense fp16."),
    "cache-classes": ("Kernels by time, with their counters per launch", ""),
    "cache-launches": ("Single launches that read most from DRAM", ""),
    "cache-balance": ("Where the counts went", ""),
    "occupancy": ("Kernels by time, with their theoretical occupancy", ""),
    "neighbours": ("Neighbours by time, and what one kernel in place of two would need at most", ""),
    "fusion-chains": ("Chains by time, with what fusing them would save", ""),
    "fusion-members": ("Kernels of these chains, per launch", ""),
    "fusion-verdicts": ("Kernels by what they do in one launch", ""),
    "fusion-kernels": ("Kernels by time, and whether they are fused", ""),
    "link-use": ("Use of links over time", "Share of the link's rate, by the GPU that used it most."),
    "link-matrix": ("GPU to GPU", ""),
    "link-hosts": ("GPU and host", ""),
    "link-totals": ("Use of links", ""),
    "kernel_links": ("Kernels by bytes over links", ""),
    "headroom": (
        "Headroom by module and step",
        "Modules in execution order, by step. Colour: the least of each cell; 16 bits and more are alike.",
    ),
    "numerics-around": ("The first step with Inf or NaN, around the first bad scan", ""),
    "numerics-bad-steps": ("Steps with Inf or NaN, with what was bad first in each", ""),
    "numerics-leaks": (
        "Rows of the batch that turned bad by others",
        "Inferred: with little headroom before, a row may have overflowed by itself.",
    ),
    "numerics-operator": ("The first operator with Inf or NaN from fine inputs, and its tensors", ""),
    "numerics-tensors": ("Watched tensors, the worst first", ""),
    "numerics-trends": ("Magnitudes that grow towards the limit", ""),
    "node-heat": ("Layers × parts", "Colour: time there, as a share of the hottest."),
    "live-bytes": ("Memory held while nodes run", "Without weights and inputs."),
    "graph-cycle": ("Nodes of the cycle", ""),
    "graph-peak": ("Tensors held at the peak", ""),
    "graph-nodes": ("Nodes by heat", ""),
    "graph-parts": ("Parts of the model by time", ""),
    "graph-unaligned": ("Large tensors whose rows are not aligned", ""),
    "ownership-icicle": (
        "Kernel time by module, operator and kernel",
        "As wide as its time: modules blue, operators orange, kernels green. A click shows what is in a part.",
    ),
    "ownership-modules": ("Modules by kernel time; modules that are alike are one row", ""),
    "ownership-operators": ("Operators by kernel time", ""),
    "ownership-inputs": ("Operators by the shapes of their inputs", ""),
    "ownership-lines": ("Lines that launch the kernels", ""),
    "step-durations": ("Durations of steps over time", "A dot is where a step begins and how long it lasts."),
    "step-kinds": ("Steps by kind", ""),
    "step-slowest": ("Steps of the steady part that lasted longest beyond the usual of their kind", ""),
    "step-processes": ("Steps by process and GPU", ""),
    "kernels": ("Kernels by time", ""),
    "nodes": ("Nodes of CUDA graphs by time", ""),
    "idle-classes": ("Idle time by cause", ""),
    "idle-devices": ("Idle time by GPU and cause", ""),
    "longest": ("Longest gaps", ""),
    "compile-stalls": ("Launches that waited for their kernel to be compiled or loaded", ""),
    "devices": ("GPUs", ""),
    "processes": ("Processes", ""),
    "missing": ("What, why, and what would measure it", ""),
    "versions": ("Versions", ""),
    "options": ("Recording options", ""),
    "collectors": ("Collectors", ""),
    "set_aside": ("Records set aside", ""),
    "not_measured_windows": ("Windows that were not recorded", ""),
    "libcupti_faults": ("Known faults of this libcupti", ""),
    "damaged_tables": ("Damaged tables", ""),
    "inventory": ("Tables of the trace", ""),
}


def caption(name: str) -> tuple[str, str]:
    """Heading and note of a figure or table."""
    return _CAPTIONS.get(name, (fmt.title(printable(name)), ""))


def notice(result: Result) -> str:
    """Why an analyzer has no, or not the whole, answer; empty when it has."""
    if result.status in ("ok", "findings"):
        return ""
    what = {"not_measured": "Not measured", "not_applicable": "Does not apply", "error": "Failed"}[result.status]
    how = f" To measure it: {printable(result.collect_with)}" if result.collect_with else ""
    if result.collect_with == DOCTOR:
        how = f" Ask {DOCTOR} what can be recorded here."
    return f"{what}: {printable(result.reason) or 'no reason was given'}.{how}"


def verdict(report: Report) -> str:
    """``1 critical and 2 warnings``. Without findings, whether anything could be looked at: not seen is not healthy."""
    counts = verdict_counts(report.findings())
    if counts:
        return counts
    states = {r.status for r in report.results if r.analyzer != "truth"}
    return "nothing found" if "ok" in states else "nothing to judge" if "not_applicable" in states else "not measured"


def nothing_found(report: Report) -> str:
    """What stands in place of findings: what was looked at, what not, and why not."""
    asked = {r.analyzer: r for r in report.results if r.analyzer != "truth"}
    named = {status: [a for a, r in asked.items() if r.status == status] for status in ("ok", "not_applicable")}
    unseen = [a for a, r in asked.items() if r.status in ("not_measured", "error")]
    parts = []
    if named["ok"]:
        parts.append(f"Looked at: {fmt.joined([fmt.within(analyzer_title(a)) for a in named['ok']])}.")
    parts += [f"{analyzer_title(a)} does not apply: {printable(asked[a].reason)}." for a in named["not_applicable"]]
    if unseen:
        parts.append(f"Could not be looked at: {fmt.joined([fmt.within(analyzer_title(a)) for a in unseen])}.")
    return " ".join(parts) or "No question was asked."


_COMPONENTS = {"driver": "Driver", "cuda": "CUDA", "python": "Python", "torch": "PyTorch"}


def facts(report: Report) -> list[tuple[str, str]]:
    """The manifest in short, as pairs of name and value; unknown values are left out."""
    manifest = report.manifest
    pairs = [
        ("Trace", printable(report.trace_name)),
        ("Source", _SOURCES.get(manifest.source, printable(manifest.source))),
        ("Host", printable(manifest.host)),
        ("Started", fmt.date(manifest.t0_unix_ns)),
        ("Length", fmt.duration(manifest.duration_ns)),
        ("Exit code", "" if manifest.exit_code is None else str(manifest.exit_code)),
        *((_COMPONENTS.get(n, printable(n)), fmt.quantity(n, v)) for n, v in manifest.versions.items()),
        *((f"Option {fmt.label(name)}", _option(name, value)) for name, value in manifest.options.items()),
    ]
    return [(name, value) for name, value in pairs if value]


def _option(name: str, value: str) -> str:
    """Options are recorded as Python writes them: sizes in bytes, ``True``, ``['output', 'input']``."""
    if unit_of(name) == "bytes" and value.isdecimal():
        return fmt.quantity(name, int(value))
    if value in ("True", "False"):
        return "yes" if value == "True" else "no"
    if value.startswith("[") and value.endswith("]"):
        return ", ".join(word.strip().strip("'") for word in printable(value[1:-1]).split(","))
    return printable(value)
