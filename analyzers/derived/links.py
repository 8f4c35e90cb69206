"""Facts that follow from the table ``topology``: what each GPU's links carry, and which GPUs NVLink joins.

All rates are theoretical, in one direction, in bytes per second; None = unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from spikeprof.profiler.trace import Trace

HOST = -1
_NVLINK_KINDS = ("nvlink", "nvswitch")
_RATES = ("peak_bytes_per_s", "measured_bytes_per_s")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """What tensor parallelism would use; a level doubles the group.

    ``fabric`` is nvswitch, nvlink, pcie, none, or unknown, of which nothing else can be said.
    """

    fabric: str
    gpus: list[int]  # which the fabric joins
    both_ways_bytes_per_s: float | None  # all NVLinks of a GPU
    levels_count: int | None  # that the links suit
    group_gpus_count: int | None  # that the GPUs here fill


@dataclass(frozen=True)
class Links:
    """The rows of ``topology``, one per pair and direction."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, trace: Trace) -> Links:
        """The topology of a trace that holds the table. Rows from a GPU or host to itself mean nothing.

        Rates that are no number, or not above 0, are unknown.
        """
        rows = trace.table("topology").to_pylist()
        for row in rows:
            row |= {name: None for name in _RATES if not (row[name] and 0 < row[name] < inf)}
        return cls(tuple(row for row in rows if row["src_device"] != row["dst_device"]))

    @cached_property
    def gpus(self) -> list[int]:
        """All devices, ascending."""
        ends = {end for row in self.rows for end in (row["src_device"], row["dst_device"])}
        return sorted(end for end in ends if end >= 0)

    @cached_property
    def pairs(self) -> list[Row]:
        """The rows of two GPUs."""
        return [row for row in self.rows if row["src_device"] >= 0 and row["dst_device"] >= 0]

    @cached_property
    def by_ends(self) -> dict[tuple[int, int], Row]:
        """Each row by (source, destination)."""
        return {(row["src_device"], row["dst_device"]): row for row in self.rows}

    def host(self, device: int) -> Row | None:
        """The row from a GPU to the host."""
        return self.by_ends.get((device, HOST))

    def nvlinks(self, device: int) -> tuple[int | None, float | None]:
        """(NVLinks in use, what they carry together); (0, 0.0) for a GPU without.

        Through a switch all links of a GPU serve each peer; direct links add up over the peers.
        """
        mine = [row for row in self.pairs if row["src_device"] == device and row["kind"] in _NVLINK_KINDS]
        switched = [row for row in mine if row["kind"] == "nvswitch"]
        if not mine:
            return 0, 0.0
        if switched:
            best = max(switched, key=lambda row: row["peak_bytes_per_s"] or 0.0)
            return best["links_count"], best["peak_bytes_per_s"]
        counts, rates = ([row[name] for row in mine] for name in ("links_count", "peak_bytes_per_s"))
        return (None if None in counts else sum(counts)), (None if None in rates else sum(rates))

    def pcie(self, device: int) -> float | None:
        """What a GPU's PCIe link carries."""
        row = self.host(device)
        return row["peak_bytes_per_s"] if row else None

    def is_joined(self, a: int, b: int) -> bool:
        """Whether NVLink joins two GPUs in both directions."""
        return all(self.by_ends.get(ends, {}).get("kind") in _NVLINK_KINDS for ends in ((a, b), (b, a)))

    def has_access(self, a: int, b: int) -> bool:
        """Whether two GPUs reach one another's memory, as the driver says."""
        return all(self.by_ends.get(ends, {}).get("peer_access") == "ok" for ends in ((a, b), (b, a)))

    @cached_property
    def nvlink_group(self) -> list[int]:
        """A largest set of GPUs of which NVLink joins every two; empty when it joins none.

        Grown from each GPU in turn: exact for switches and meshes as they are built.
        """
        groups = [self._grown([first]) for first in self.gpus]
        largest = max(groups, key=len, default=[])
        return sorted(largest) if len(largest) > 1 else []

    def _grown(self, group: list[int]) -> list[int]:
        for gpu in self.gpus:
            if gpu not in group and all(self.is_joined(gpu, other) for other in group):
                group.append(gpu)
        return group

    @cached_property
    def access_group(self) -> list[int]:
        """The first two GPUs that reach one another's memory; empty when there are none."""
        return next(([a, b] for a in self.gpus for b in self.gpus if a < b and self.has_access(a, b)), [])

    def hierarchy(self, two_levels_bytes_per_s: float, three_levels_bytes_per_s: float) -> Hierarchy | None:
        """How many levels of tensor parallelism the links suit, by what the NVLinks of a GPU carry in both directions.

        NVLinks of an unknown rate suit one level, and so does PCIe between GPUs that reach each other's memory.
        None for fewer than two GPUs.
        """
        if len(self.gpus) < 2:
            return None
        group = self.nvlink_group
        one_way = lowest([self.nvlinks(gpu)[1] for gpu in group])
        both_ways = None if one_way is None else 2 * one_way
        if group:
            rate = both_ways or 0.0
            levels = 3 if rate >= three_levels_bytes_per_s else 2 if rate >= two_levels_bytes_per_s else 1
            switched = all(self.by_ends[a, b]["kind"] == "nvswitch" for a in group for b in group if a != b)
            fabric = "nvswitch" if switched else "nvlink"
        elif group := self.access_group:
            fabric, levels = "pcie", 1
        elif any(row["peer_access"] == "" for row in self.pairs):
            return Hierarchy("unknown", [], None, None, None)
        else:
            fabric, levels = "none", 0
        fitting = min(levels, max(len(group), 1).bit_length() - 1)  # of 6 GPUs a group takes 4
        return Hierarchy(fabric, group, both_ways, levels, 2**fitting)


def lowest(values: Sequence[float | None]) -> float | None:
    """The lowest of the values; None when one is unknown, or there are none."""
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None
