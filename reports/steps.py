"""Steps in words, tables and a figure: made from the result of the analyzer ``steps``."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from spikeprof.analyzers.base import Result
from spikeprof.reports import format as fmt
from spikeprof.reports.figure_parts import Plotly, time_unit
from spikeprof.reports.kernel_names import clip, printable
from spikeprof.reports.model import PlainTable, Report, rows
from spikeprof.reports.panels import Line, Panel, stacked
from spikeprof.reports.screen import Column, Screen, clipped, print_table

_SOURCES = {"marked": "marked by the program", "found": "found by the period of the kernels"}
_NAME_CHARS = 20  # of a kind in the figure
_LOG_FROM = 4  # times the median: what lasts that long would press all else flat
_SCREEN_COLUMNS = (
    Column("steps_count", "Steps"),
    Column("p50_ns", "p50"),
    Column("p90_ns", "p90", 94),
    Column("p99_ns", "p99", 60),
    Column("max_ns", "Longest"),
    Column("jitter_ns", "Jitter", 110),
    Column("step_kernels_count", "Kernels", 70),
    Column("wait_ns", "Wait", 76),
    Column("busy_share", "GPU busy"),
)


def summary(result: Result) -> str:
    """``76 steps, found by the period of the kernels: 99.3 % of them accounted for``; empty without steps."""
    number, explained = result.metric("steps_count"), result.metric("explained_share")
    if not number or explained is None:
        return ""
    sources = dict.fromkeys(s for s in result.tables.get("processes", {}).get("steps_from", []) if s in _SOURCES)
    how = fmt.joined([_SOURCES[source] for source in sources])
    parts = [fmt.plural(number, "step"), *([how] if how else [])]
    return f"{', '.join(parts)}: {fmt.share(explained)} of the kernels accounted for"


def notes(result: Result) -> list[str]:
    """What a reader must know of these numbers."""
    if not result.metric("steps_count"):
        return []
    found = [
        "A step lasts from the start of its first kernel to the end of its last one; the wait is from the end of the "
        "step before, where it directly follows."
    ]
    kinds = result.tables.get("kinds", {}).get("kind", [])
    if {"prefill", "decode"} <= set(kinds) and "found" in result.tables.get("processes", {}).get("steps_from", []):
        found.append("Prefill and decode are told apart by names of attention kernels, or by the sizes of grids.")
    elif "unknown" in kinds:
        found.append("Of what kind the unknown ones are, neither their marks nor names and grids of kernels say.")
    if steady := _steady(result):
        found.append(steady)
    if result.reason and result.status in ("ok", "findings"):
        found.append(fmt.sentence(printable(result.reason)))
    return found


def _steady(result: Result) -> str:
    begin, share = result.metric("steady_begin_ns"), result.metric("start_up_share")
    if begin is None or share is None:
        return ""
    return f"The steady part begins at {fmt.moment(begin)}, after {fmt.share(share)} of the active time."


def kinds(result: Result) -> PlainTable:
    """The table of kinds with their names as they are shown."""
    table = dict(result.tables.get("kinds", {}))
    return table | {"kind": [fmt.label(str(kind)) for kind in table["kind"]]} if table.get("kind") else {}


def tables(result: Result) -> dict[str, PlainTable]:
    """What stands in the section, by name of their captions."""
    slowest, processes = dict(result.tables.get("slowest", {})), dict(result.tables.get("processes", {}))
    several = len(processes.get("rank", [])) > 1
    if not several:
        slowest = {name: values for name, values in slowest.items() if name not in ("rank", "device")}
    if not any(processes.get("why_not", [])):
        processes.pop("why_not", None)
    return {
        "step-kinds": kinds(result),
        "step-slowest": slowest | {"kind": [fmt.label(str(k)) for k in slowest["kind"]]} if "kind" in slowest else {},
        "step-processes": processes if several else {},
    }


def figure(result: Result, unit: tuple[float, str]) -> Plotly | None:
    """Durations over time, a panel per kind: a dot per step, or the median and the longest of several in a row.

    ``unit`` is that of the time axis. None without steps.
    """
    table = result.tables.get("durations", {})
    names = list(dict.fromkeys(table.get("kind", [])))
    if not names:
        return None
    panels = [_panel(name, table, [i for i, kind in enumerate(table["kind"]) if kind == name]) for name in names]
    made = stacked(panels, unit)
    for trace in made["data"]:
        trace |= {"mode": "markers", "marker": {"color": trace.pop("line")["color"], "size": 5}}
    for number, panel in enumerate(panels):
        values = sorted(v for line in panel.lines for v in line.values if v)
        if values and values[-1] > _LOG_FROM * values[len(values) // 2]:
            axis: dict[str, Any] = made["layout"][f"yaxis{number + 1 if number else ''}"]
            ticks = _ticks(values[0] / panel.divisor, values[-1] / panel.divisor)
            axis |= {"type": "log", "rangemode": "normal", "tickvals": ticks, "ticktext": [f"{t:g}" for t in ticks]}
            axis["title"]["text"] = axis["title"]["text"].removesuffix(")") + ", log)"
    made["meta"] = {}  # an axis of its own: steps take up but a part of most recordings
    return made


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, 20 … around the values of a logarithmic axis; only powers of ten over more than two of them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low <= 100 else (1,)
    return [step * 10.0**decade for decade in decades for step in steps]


def _panel(name: str, table: PlainTable, picked: list[int]) -> Panel:
    times, middle, longest = ([table[c][i] for i in picked] for c in ("start_ns", "duration_ns", "max_ns"))
    divisor, shown = time_unit(2 * max(middle))
    label = clip(fmt.label(str(name)), _NAME_CHARS)
    lines = [Line(label, "duration_ns", times, middle)]
    if longest != middle:
        lines = [
            Line(f"{label}, longest of several", "duration_ns", times, longest),
            Line(f"{label}, median of several", "duration_ns", times, middle),
        ]
    return Panel(label, divisor, shown, lines)


def print_section(screen: Screen, report: Report) -> None:
    """How long steps of each kind take; nothing where none are known."""
    result = report.result("steps")
    table = kinds(result) if result else {}
    if result is None or not table:
        return
    screen.heading("Steps")
    screen.prose(summary(result), "dim")
    print_table(screen, "Kind", _SCREEN_COLUMNS, rows(table), partial(clipped, table["kind"]))
