"""Kernels by time in words and a table: made from the result of the analyzer ``kernel-latency``."""

from __future__ import annotations

from functools import partial

from spikeprof.analyzers.base import Result
from spikeprof.reports import format as fmt
from spikeprof.reports import ownership
from spikeprof.reports.kernel_names import short_names
from spikeprof.reports.model import PlainTable, Report, rows
from spikeprof.reports.screen import Column, Screen, print_table

_MAX_KERNELS = 8
_COLUMNS = (
    Column("launches_count", "Launches"),
    Column("total_ns", "Total"),
    Column("mean_ns", "Mean", 74),
    Column("p50_ns", "p50", 110),
    Column("p99_ns", "p99", 94),
    Column("max_ns", "Longest", 120),
    Column("gpu_time_share", "Share"),
)


def print_section(screen: Screen, report: Report) -> None:
    """The kernels that took most time, under each its owner where that is known; nothing where none ran."""
    result = report.result("kernel-latency")
    table = result.tables.get("kernels", {}) if result else {}
    entries = rows(table)[:_MAX_KERNELS]
    if result is None or not entries:
        return
    screen.heading(_heading(result, table, len(entries)))
    names = [str(e["name"]) for e in entries]
    owners = ownership.owners(report.result("ownership"))
    below = [ownership.owner(owners[name], screen.width - 2) if name in owners else "" for name in names]
    print_table(screen, "Kernel", _COLUMNS, entries, partial(short_names, names), "gpu_time_share", below)


def _heading(result: Result, table: PlainTable, shown: int) -> str:
    """``Kernels by time: 10 of 45, 96.2 % of kernel time``."""
    number = result.metric("distinct_kernels_count") or len(table["name"])
    shares = [s for s in table.get("gpu_time_share", [])[:shown] if fmt.is_number(s)]
    part = f", {fmt.share(min(sum(shares), 1.0))} of kernel time" if shown < number else ""
    return f"Kernels by time: {fmt.count(shown)} of {fmt.count(number)}{part}"
