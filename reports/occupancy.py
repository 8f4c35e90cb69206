"""Occupancy and fusion in words and tables: made from the result of the analyzer ``fusion-boundary``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spikeprof.analyzers.base import Result
from spikeprof.reports import format as fmt
from spikeprof.reports.class_names import shapes, with_bounds
from spikeprof.reports.kernel_names import printable
from spikeprof.reports.model import PlainTable, Report
from spikeprof.reports.screen import Column, Screen, print_classes
from spikeprof.reports.titles import VERDICTS

_CLASS_COLUMNS = ("kernel", "grid", "block", "device", "gpu_time_share", "registers_count", "shared_bytes",
                  "occupancy_share", "limiter", "waves_ratio", "sm_active_share", "expected_sm_active_share",
                  "instructions_per_cycle_ratio", "utilisation_ratio", "tail_share", "active_blocks_count",
                  "unknown")  # fmt: skip
_PAIR_COLUMNS = ("kernel", "next_kernel", "device", "met_count", "pair_time_share", "gap_ns", "verdict",
                 "thread_registers_share", "block_registers_share", "shared_sum_bytes", "shared_max_bytes",
                 "alone_occupancy_share", "fused_occupancy_share")  # fmt: skip
_SCREEN_COLUMNS = (
    Column("registers_count", "Registers", 140),
    Column("shared_bytes", "Shared", 100),
    Column("occupancy_share", "Occupancy"),
    Column("limiter", "Limited by", 60),
    Column("waves_ratio", "Waves", 70),
    Column("sm_active_share", "SMs busy", 74),
    Column("expected_sm_active_share", "Expected", 94),
    Column("instructions_per_cycle_ratio", "IPC", 120),
    Column("utilisation_ratio", "U", 120),
)
_MAX_CLASSES = 5


def summary(result: Result) -> str:
    """``occupancy 59.7 % at most; SMs at work 22.9 % of the time, 33.6 % expected``; empty where nothing is known."""
    share, expected, measured = (
        result.metric(name) for name in ("occupancy_share", "expected_sm_active_share", "sm_active_share")
    )
    if share is None:
        return ""
    parts = [f"occupancy {fmt.share(share)} at most, averaged over the kernels' time"]
    if expected is not None:
        seen = f"{fmt.share(measured)}, " if measured is not None else ""
        parts.append(f"SMs at work {seen}{fmt.share(expected)} expected from the grids")
    return "; ".join(parts)


def notes(result: Result) -> list[str]:
    """What a reader must know of these numbers: only what concerns this recording."""
    if result.metric("occupancy_share") is None:
        return []
    found = ["Occupancy and waves are theoretical: from registers, shared memory and the sizes of blocks and grids."]
    held, expected, time_ns = (
        result.metric(name) for name in ("held_warps_share", "expected_held_warps_share", "held_warps_ns")
    )
    if held is not None and expected is not None and time_ns is not None:
        found.append(
            f"Over {fmt.duration(time_ns)} in which the driver measured warps, idle time included, SMs held "
            f"{fmt.share(held)} of those they have slots for; theory lets expect at most {fmt.share(expected)}."
        )
    if result.metric("utilisation_ratio") is not None:
        found.append("U = (warps × IPC / slots for warps) × (1 - registers of a block / registers of an SM)².")
    if result.reason:
        found.append(fmt.sentence(printable(result.reason)))
    return found


def tables(result: Result) -> dict[str, PlainTable]:
    """What stands in the section: classes of launches, pairs of neighbours; by name of their captions."""
    return {
        "occupancy": _kept(result.tables.get("classes", {}), _CLASS_COLUMNS),
        "neighbours": _kept(result.tables.get("pairs", {}), _PAIR_COLUMNS),
    }


def _kept(table: PlainTable, columns: Sequence[str]) -> PlainTable:
    """The given columns with their bounds and in words; the GPU only where there are several."""
    if not table.get("kernel"):
        return {}
    made: dict[str, list[Any]] = dict(table)
    if "grid_x" in table and "block_x" in table:
        made |= {"grid": shapes(table, "grid"), "block": shapes(table, "block")}
    if len(set(made.get("device", ()))) < 2:
        made.pop("device", None)
    if "limiter" in made:
        made["limiter"] = [fmt.resources(cell) for cell in made["limiter"]]
    if "verdict" in made:
        made["verdict"] = [_verdict(*cells) for cells in zip(made["verdict"], made["lacking"], strict=True)]
    if not any(made.get("unknown", ())):
        made.pop("unknown", None)
    return with_bounds(made, columns)


def _verdict(verdict: str, lacking: str) -> str:
    """``too large: registers and shared memory``."""
    return VERDICTS.get(verdict, verdict) + (f": {fmt.resources(lacking)}" if lacking else "")


def longest(result: Result, most: int) -> PlainTable:
    """The classes that took most time, for a short table; empty where no occupancy is known."""
    table = result.tables.get("classes", {})
    if not any(share is not None for share in table.get("occupancy_share", ())):
        return {}
    cut = {name: values[:most] for name, values in table.items()}
    return cut | {"limiter": [fmt.resources(cell, short=True) for cell in cut["limiter"]]}


def print_section(screen: Screen, report: Report) -> None:
    """Theoretical occupancy and waves of the kernels that took most time; nothing where none is known."""
    result = report.result("fusion-boundary")
    table = longest(result, _MAX_CLASSES) if result else {}
    if result is None or not table:
        return
    screen.heading("Occupancy and waves")
    screen.prose(summary(result), "dim")
    bar = "sm_active_share" if "sm_active_share" in table else "expected_sm_active_share"
    print_classes(screen, table, _SCREEN_COLUMNS, bar)
