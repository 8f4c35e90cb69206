"""Caches and DRAM in words and tables: made from the result of the analyzer ``cache-miss``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spikeprof.analyzers.base import Result
from spikeprof.reports import format as fmt
from spikeprof.reports.class_names import shapes, with_bounds
from spikeprof.reports.kernel_names import printable
from spikeprof.reports.model import PlainTable, Report, rows
from spikeprof.reports.screen import Column, Screen, print_classes

_MATCHES = {"exact": "exact", "class": "by class", "none": "not measured"}
_CLASS_COLUMNS = ("kernel", "grid", "device", "pattern", "match", "launches_count", "mean_ns", "l1_hit_share",
                  "l2_hit_share", "l2_sectors_count", "dram_read_bytes", "dram_written_bytes", "dram_peak_share",
                  "l2_per_dram_ratio", "dram_per_asked_ratio", "bank_conflict_share", "sm_active_share",
                  "tensor_active_share")  # fmt: skip
_LAUNCH_COLUMNS = ("kernel", "grid", "device", "start_ns", "duration_ns", "l1_hit_share", "l2_hit_share",
                   "l2_sectors_count", "dram_read_bytes", "dram_written_bytes", "dram_bytes_per_s",
                   "dram_peak_share")  # fmt: skip
_SCREEN_COLUMNS = (
    Column("l1_hit_share", "L1 hit", 110),
    Column("l2_hit_share", "L2 hit"),
    Column("dram_read_bytes", "DRAM read"),
    Column("dram_written_bytes", "Written", 70),
    Column("dram_peak_share", "Of peak"),
    Column("bank_conflict_share", "Conflicts", 100),
    Column("tensor_active_share", "Tensor", 100),
)
_MAX_CLASSES = 8
#: Filled sectors per lookup above which a hit rate of 0 is not the whole story.
_OVERFILLED_RATIO = 1.02
#: The clocks of samples and kernels agree to a microsecond: less than this share was left out on purpose.
_ALL_SHARE = 0.98


def summary(result: Result) -> str:
    """``9.65 GB read from DRAM, 3.20 GB written, 33.0 % of its peak``; empty when it was not counted."""
    read, written, share = (
        result.metric(name) for name in ("dram_read_bytes", "dram_written_bytes", "dram_peak_share")
    )
    if read is None or written is None:
        return ""
    rate = f", {fmt.share(share)} of its peak while kernels ran" if share is not None else ""
    part = result.metric("sampled_kernel_time_share")
    sampled = f"; sampled in {fmt.share(part)} of that time" if part is not None and part < _ALL_SHARE else ""
    limits = f"; {printable(result.reason)}" if result.reason else ""
    return f"{fmt.size(read)} read from DRAM, {fmt.size(written)} written{rate}{sampled}{limits}"


def tables(result: Result) -> dict[str, PlainTable]:
    """What stands below the figures: classes, single launches, where counts went; by name of their captions."""
    balance = dict(result.tables.get("balance", {}))
    if len(set(balance.get("device", []))) < 2:
        balance.pop("device", None)
    balance["idle_time_share"] = balance.pop("idle_share", [])
    balance["metric"] = [fmt.title(metric) for metric in balance.get("metric", [])]
    return {
        "cache-classes": _classes(result.tables.get("classes", {}), _CLASS_COLUMNS),
        "cache-launches": _classes(result.tables.get("launches", {}), _LAUNCH_COLUMNS),
        "cache-balance": {name: v for name, v in balance.items() if any(cell is not None for cell in v)},
    }


def _classes(table: PlainTable, columns: Sequence[str]) -> PlainTable:
    """The given columns with their bounds, the grid as one; the GPU only where there are several."""
    if not table.get("kernel"):
        return {}
    made: dict[str, list[Any]] = {**table, "grid": shapes(table, "grid")}
    if len(set(made["device"])) < 2:
        del made["device"]
    if "match" in made:
        made["match"] = [_MATCHES.get(match, match) for match in made["match"]]
    if not any(made.get("pattern", ())):
        made.pop("pattern", None)
    return with_bounds(made, columns)


def notes(result: Result) -> list[str]:
    """What a reader must know of these numbers: only what concerns this recording."""
    classes = rows(result.tables.get("classes", {}))
    found = []
    if any((row.get("l2_filled_ratio") or 0) > _OVERFILLED_RATIO for row in classes):
        found.append(
            "L2 hit rates of 0 %: where more sectors were filled than looked up, because DRAM brings 64 bytes for a "
            "32-byte sector, the rate would be below 0."
        )
    if any(row.get("l1_hit_share", 0) is None and row["match"] != "none" for row in classes):
        found.append("No L1 hit rate: the kernel's loads go past L1, as those of TMA and asynchronous copies do.")
    if any(row["match"] == "class" for row in classes):
        found.append(
            "By class: the launches are too short for samples of their own; their counts were solved for over all "
            "launches of one kernel, grid and block. ± is the bound that is further from the value."
        )
    return found


def longest(result: Result, most: int) -> PlainTable:
    """The classes that took most time, for a short table; empty where nothing that it shows was counted."""
    table = result.tables.get("classes", {})
    if not any(name in table for name in ("l2_hit_share", "dram_read_bytes", "bank_conflict_share")):
        return {}
    return {name: values[:most] for name, values in table.items()}


def print_section(screen: Screen, report: Report) -> None:
    """Counters per launch of the kernels that took most time; nothing where none were recorded."""
    result = report.result("cache-miss")
    table = longest(result, _MAX_CLASSES) if result else {}
    if result is None or not table:
        return
    screen.heading("Caches and DRAM, per launch")
    if text := summary(result):
        screen.prose(text, "dim")
    print_classes(screen, table, _SCREEN_COLUMNS, "dram_peak_share")
