"""Pairs of launches that follow one another on a stream, and what one kernel in place of both would need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spikeprof.analyzers.derived.counters import Floats
from spikeprof.analyzers.derived.groups import first_of_groups, group_codes
from spikeprof.analyzers.derived.intervals import Bools, Ints, ints
from spikeprof.analyzers.derived.launch_shapes import Launches
from spikeprof.analyzers.derived.occupancy import Occupancy, Shapes, occupancy
from spikeprof.profiler.trace import Trace

#: What a fused kernel may lack, in the order in which it is named.
SCARCE = ("thread_registers", "block_registers", "shared_memory")

#: What becomes of a pair: whether its resources allow one kernel. ``if_shared``: if the two share their shared memory.
VERDICTS = ("unknown", "fits", "if_shared", "too_large")


class Pairs(NamedTuple):
    """Distinct pairs of classes, one element per pair; ``total_ns`` is the time of both over all times they met."""

    first: Ints
    second: Ints
    met_count: Ints  # how often
    total_ns: Ints
    gap_ns: Floats  # mean; what overlaps has no gap


def neighbours(trace: Trace, of: Launches, max_gap_ns: int) -> Pairs:
    """All pairs with nothing between them on their stream, not even a copy, and at most ``max_gap_ns``."""
    tables = [name for name in ("kernels", "memory_ops") if name in trace]

    def gather(column: str) -> Ints:
        return ints(np.concatenate([trace.column(table, column) for table in tables]))

    start, end = gather("start_ns"), gather("end_ns")
    lane, _ = group_codes(*(gather(column) for column in ("rank", "device", "context_id", "stream")))
    codes = np.full(len(start), -1, np.int64)
    codes[: len(of.of_kernel)] = of.of_kernel
    order = np.lexsort((start, lane))
    before, after = order[:-1], order[1:]
    gap = np.maximum(start[after] - end[before], 0)
    met = (lane[before] == lane[after]) & (codes[before] >= 0) & (codes[after] >= 0) & (gap <= max_gap_ns)
    before, after, gap = before[met], after[met], gap[met]
    pair, count = group_codes(codes[before], codes[after])
    one = first_of_groups(pair, count)
    number = np.bincount(pair, minlength=count)
    both = (end - start)[before] + (end - start)[after]
    sums = np.bincount(pair, both, minlength=count), np.bincount(pair, gap, minlength=count)
    return Pairs(codes[before][one], codes[after][one], ints(number), ints(sums[0]), sums[1] / np.maximum(number, 1))


@dataclass(frozen=True, slots=True)
class Fused:
    """What one kernel in place of each pair would need, at most. ``lacking``: [SCARCE, pair]."""

    occupied: Occupancy  # with registers and shared memory added up
    shared_sum_bytes: Ints
    shared_max_bytes: Ints
    alone_share: Floats  # the lower of the occupancies of the two as they are
    lacking: Bools
    verdict: Ints  # index into VERDICTS
    one_alone: Bools  # one of the two is beyond a limit by itself

    def lacks(self, pair: int) -> list[str]:
        """The resources that would not suffice."""
        return [name for name, is_so in zip(SCARCE, self.lacking[:, pair], strict=True) if is_so]


def fused(pairs: Pairs, of: Launches, occupied: Occupancy, max_share: float, max_shared_bytes: int) -> Fused:
    """Upper bounds: registers of both threads together, the larger block, shared memory of both.

    A pair is too large when registers of a thread or of a block pass ``max_share`` of what there is, or the larger of
    the two shared memories passes ``max_shared_bytes``; it fits when also the sum of these does not.
    """
    a, b = (Shapes(*(column[side] for column in of.shapes)) for side in (pairs.first, pairs.second))
    together = Shapes(
        np.maximum(a.threads, b.threads),
        a.registers + b.registers,
        a.shared_bytes + b.shared_bytes,
        np.where(a.architecture == b.architecture, a.architecture, -1),
    )
    both = occupancy(together, of.architectures)
    shared_max = np.maximum(a.shared_bytes, b.shared_bytes)
    known = both.known & occupied.known[pairs.first] & occupied.known[pairs.second]
    lacking = np.stack(
        [both.thread_registers_share > max_share, both.registers_share > max_share, shared_max > max_shared_bytes]
    )
    too_large, fits = lacking.any(axis=0), together.shared_bytes <= max_shared_bytes
    alone = [_beyond(occupied, of, side, max_share, max_shared_bytes) for side in (pairs.first, pairs.second)]
    return Fused(
        both,
        together.shared_bytes,
        shared_max,
        np.fmin(occupied.share[pairs.first], occupied.share[pairs.second]),
        lacking & known,
        ints(np.select([~known, too_large, fits], [0, 3, 1], 2)),
        known & (alone[0] | alone[1]),
    )


def _beyond(occupied: Occupancy, of: Launches, rows: Ints, max_share: float, max_shared_bytes: int) -> Bools:
    """Whether launches are beyond a limit as they are."""
    registers = (occupied.thread_registers_share[rows] > max_share) | (occupied.registers_share[rows] > max_share)
    return np.asarray(registers | (of.shapes.shared_bytes[rows] > max_shared_bytes), np.bool_)
