"""Where counts went that were sampled: into kernels, copies, idle time, or time in which nothing was recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spikeprof.profiler.trace import Trace

PLACES = ("kernels", "memory_ops", "idle", "not_traced")


@dataclass(frozen=True, slots=True)
class Balance:
    """One metric of one GPU: its counts and the sampled time (ns), both by place."""

    device: int
    metric: str
    counts: dict[str, float]
    time_ns: dict[str, int]

    @property
    def total(self) -> float:
        """All that was sampled."""
        return sum(self.counts.values())

    def share(self, place: str) -> float | None:
        """The part that went to a place; None when nothing was counted."""
        return self.counts.get(place, 0.0) / self.total if self.total > 0 else None


def balances(trace: Trace) -> list[Balance]:
    """All metrics of all GPUs, in the table's order; none when it was not collected.

    A metric of several sets, which were sampled in turns, is taken together.
    """
    found: dict[tuple[int, str], Balance] = {}
    for row in trace.table("counter_balance").to_pylist() if "counter_balance" in trace else ():
        key = row["device"], row["metric"]
        one = found.setdefault(key, Balance(*key, {}, {}))
        one.counts[row["place"]] = one.counts.get(row["place"], 0.0) + row["value"]
        one.time_ns[row["place"]] = one.time_ns.get(row["place"], 0) + row["time_ns"]
    return list(found.values())


def balance_table(found: list[Balance]) -> dict[str, list[Any]]:
    """One row per GPU and metric: the total in its unit, and the share of each place."""
    totals = {unit: [b.total if b.metric.endswith(f"_{unit}") else None for b in found] for unit in ("bytes", "count")}
    return {
        "metric": [b.metric for b in found],
        "device": [b.device for b in found],
        **{f"total_{unit}": values for unit, values in totals.items()},
        **{f"{place}_share": [b.share(place) for b in found] for place in PLACES},
    }
