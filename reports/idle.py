"""Idle time of the GPU in words and a table: made from the result of the analyzer ``launch-gaps``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from spikeprof.analyzers.base import Result
from spikeprof.reports import format as fmt
from spikeprof.reports.model import Report
from spikeprof.reports.screen import Column, Screen, clipped, print_table
from spikeprof.reports.titles import IDLE_CLASSES

_COLUMNS = (Column("total_ns", "Total"), Column("idle_share", "Share"))
_MEANINGS_FROM_WIDTH = 70


@dataclass(frozen=True, slots=True)
class Idle:
    """One class of idle time, over all devices."""

    name: str
    meaning: str
    total_ns: float
    share: float  # of all idle time, 0 to 1


def classes(result: Result) -> list[Idle]:
    """The measured classes of idle time that are not nothing, the largest first."""
    whole = result.metric("idle_ns")
    found = []
    for key in dict.fromkeys((*IDLE_CLASSES, *result.tables.get("over_time", {}).get("class", []))):
        value = result.metric(f"idle_{key}_ns")
        if whole and value:
            found.append(Idle(*IDLE_CLASSES.get(key, (fmt.label(key), "")), value, value / whole))
    return sorted(found, key=lambda idle: -idle.total_ns)


def summary(result: Result) -> str:
    """``74.6 % of 283 ms active time``; empty when idle time is not known."""
    share, wall = result.metric("idle_share"), result.metric("wall_ns")
    if share is None or wall is None:
        return ""
    return f"{fmt.share(share)} of {fmt.duration(wall)} active time"


def gaps(result: Result) -> str:
    """``13,475 gaps, the median one 4.67 µs``; empty when there are none."""
    number, median = result.metric("gaps_count"), result.metric("median_gap_ns")
    if not number:
        return ""
    return fmt.plural(number, "gap") + (f", the median one {fmt.duration(median)}" if median is not None else "")


def print_section(screen: Screen, report: Report) -> None:
    """How long the GPU was idle, and what it waited for; nothing where that is not known."""
    result = report.result("launch-gaps")
    text = summary(result) if result else ""
    if result is None or not text:
        return
    screen.heading(f"GPU idle: {text}")
    if number := gaps(result):
        screen.prose(number, "dim")
    found = classes(result)
    if not found:
        if result.status == "not_measured":
            screen.prose(f"By cause: {fmt.not_measured(result.reason)}")
        return
    wide = screen.width >= _MEANINGS_FROM_WIDTH
    names = [f"{c.name}: {c.meaning}" if wide and c.meaning else c.name for c in found]
    entries = [{"total_ns": c.total_ns, "idle_share": c.share} for c in found]
    print_table(screen, "Class", _COLUMNS, entries, partial(clipped, names), "idle_share")
