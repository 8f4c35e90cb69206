"""Chains of kernels that follow one another and could be one, and the traffic that this would save.

A **chain** is as long a run as can be of kernels of one stream, with no other work of it between them and no longer
pause than ``max_gap_ns``, within one marked step and one replay of a CUDA graph: pointwise work, copies, norms and
reductions along rows, in front of them a product of matrices or a convolution if only pointwise work and copies follow,
which can then be its epilogue. Identical chains (the same classes of launches in the same order) are one, with a count.

**What fusing saves** follows from what each kernel reads and writes, as if the program evaluated an expression: results
lie on a stack, and a kernel takes from its top what its reads cover. What was taken need not be written nor read again:
its size twice. What is left on the stack was not read within the chain and is written by a fused kernel, too.
This takes each result for read once, by the chain alone. Where the graph of the model says that others read it, too
(``fusion_consumers.py``), it must be written in any case, and only reading it again is saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from spikeprof.analyzers.derived.fusion_bytes import SOURCES, Traffic
from spikeprof.analyzers.derived.groups import group_codes
from spikeprof.analyzers.derived.intervals import Bools, Ints, ints
from spikeprof.analyzers.derived.kernel_families import CHAINED, Work
from spikeprof.analyzers.derived.launch_shapes import Launches
from spikeprof.analyzers.derived.step_marks import marked_steps
from spikeprof.profiler.trace import Trace

#: A longer run is cut into chains of so many kernels.
MOST_MEMBERS = 64
#: Who reads what a kernel of a chain gives: no other, others as well, or it could not be looked up.
READERS = ("chain_only", "others_too", "not_checked")

#: Kinds of work that others can join as an epilogue.
HEADS = ("gemm", "conv")
_ALONG_ROWS = ("norm", "reduction")
#: Odd, so that multiplying by it loses nothing of a 64-bit number.
_MIX, _STEP = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


class Runs(NamedTuple):
    """All chains. ``row``: rows of ``kernels``, chain behind chain; ``first`` and ``length``: where each one lies.

    ``kind`` numbers identical chains alike; there are ``kinds_count`` of them.
    """

    row: Ints
    first: Ints
    length: Ints
    kind: Ints
    kinds_count: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Identical chains. Bytes and times are those of one run of the chain; None = not known."""

    members: tuple[int, ...]  # classes of launches
    rows: Ints  # rows of kernels of its first run
    runs_count: int
    total_ns: int  # of all runs together
    member_ns: tuple[float, ...]  # means over the runs
    traffic_bytes: float | None
    light_bytes: float | None  # of it, that of the kernels that a fused one replaces: all but the product in front
    saved_bytes: float | None
    spread_bytes: float
    source: str  # of SOURCES; the least sure of its members'
    read_by: tuple[str, ...] = ()  # of READERS: who reads what each member gives, but for the last

    @property
    def mean_ns(self) -> float:
        """The kernels' time of one run."""
        return self.total_ns / self.runs_count

    @property
    def saved_share(self) -> float | None:
        """Of its traffic, what fusing saves."""
        if self.saved_bytes is None or not self.traffic_bytes:
            return None
        return self.saved_bytes / self.traffic_bytes


def find_runs(trace: Trace, of: Launches, work: Sequence[Work], max_gap_ns: int) -> Runs:
    """All chains of two kernels or more. Needs ``kernels``; wants ``memory_ops``, ``ranges``, ``runtime_calls``."""
    order, joined = _in_order(trace, of, max_gap_ns)
    code = np.append(of.of_kernel, np.full(len(order) - len(of.of_kernel), -1))[order]
    kinds = [one.kind for one in work]
    chained, head, along = (_of_class(kinds, code, which) for which in (CHAINED, HEADS, _ALONG_ROWS))
    link = np.append(False, joined & chained[1:] & (chained[:-1] | head[:-1])) if len(order) else np.zeros(0, bool)
    begin = np.flatnonzero(~link)
    if len(begin):  # an epilogue sees a part of a row only
        cut = begin[head[begin] & (np.add.reduceat(along, begin) > 0)] + 1
        link[cut[cut < len(link)]] = False
    begin = np.flatnonzero(~link)
    place = np.arange(len(link)) - np.repeat(begin, np.diff(np.append(begin, len(link))))
    begin = np.flatnonzero(place % MOST_MEMBERS == 0)
    length = np.diff(np.append(begin, len(link)))
    mine = np.repeat(length >= 2, length)
    row, begin, length = order[mine], *_packed(length[length >= 2])
    kind, count = group_codes(_hashes(code[mine], begin, length), length) if len(begin) else (ints([]), 0)
    return Runs(ints(row), begin, length, kind, count)


def _of_class(kinds: Sequence[str], code: Ints, which: Sequence[str]) -> Bools:
    return np.append([kind in which for kind in kinds], False)[code].astype(bool)


def _packed(length: Ints) -> tuple[Ints, Ints]:
    return ints(np.cumsum(length) - length), ints(length)


def _in_order(trace: Trace, of: Launches, max_gap_ns: int) -> tuple[Ints, Bools]:
    """(places of kernels and copies, stream behind stream; whether each is joined to the one before it).

    The second has one element less.
    """
    tables = [name for name in ("kernels", "memory_ops") if name in trace]

    def gather(column: str) -> Ints:
        return ints(np.concatenate([trace.column(table, column) for table in tables]))

    start, end = gather("start_ns"), gather("end_ns")
    lane, _ = group_codes(*(gather(column) for column in ("rank", "device", "context_id", "stream")))
    graph = gather("graph_id")
    replay = np.where(graph != 0, gather("correlation_id"), 0)
    step = np.full(len(start), -1, np.int64)
    count = len(of.of_kernel)
    if count and (marked := marked_steps(trace, np.arange(count))) is not None:
        step[:count] = marked.of_kernel
    order = np.lexsort((start, lane))
    before, after = order[:-1], order[1:]
    joined = start[after] - end[before] <= max_gap_ns
    for same in (lane, graph, replay, step):
        joined &= same[before] == same[after]
    return order, joined


def _hashes(code: Ints, first: Ints, length: Ints) -> Ints:
    """A number per chain that hangs on its classes and their order."""
    place = np.arange(len(code)) - np.repeat(first, length)
    powers = np.cumprod(np.full(MOST_MEMBERS, _STEP))
    mixed = (code.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    return np.add.reduceat(mixed * powers[place], first).view(np.int64)


def chains(trace: Trace, of: Launches, work: Sequence[Work], moved: Traffic, runs: Runs, most: int) -> list[Chain]:
    """The ``most`` chains that took most time, the longest first. What fusing saves is not worked out: ``settled``."""
    if not runs.kinds_count:
        return []
    length_ns = (trace.column("kernels", "end_ns") - trace.column("kernels", "start_ns"))[runs.row]
    per_run = np.add.reduceat(length_ns, runs.first)
    total = ints(np.bincount(runs.kind, per_run, minlength=runs.kinds_count))
    number = np.bincount(runs.kind, minlength=runs.kinds_count)
    by_kind, before = np.argsort(runs.kind, kind="stable"), np.append(0, np.cumsum(number))
    found = []
    for kind in np.argsort(-total, kind="stable")[:most].tolist():
        each = by_kind[before[kind] : before[kind + 1]]
        size = int(runs.length[each[0]])
        rows = runs.row[runs.first[each[0]] : runs.first[each[0]] + size]
        members = of.of_kernel[rows]
        member_ns = length_ns[runs.first[each][:, None] + np.arange(size)].mean(axis=0)
        source = SOURCES[int(moved.source[members].min())]
        known = source != SOURCES[0]
        found.append(
            Chain(
                tuple(members.tolist()),
                rows,
                int(number[kind]),
                int(total[kind]),
                tuple(member_ns.tolist()),
                float(moved.both[members].sum()) if known else None,
                float(moved.both[members[_vanishing(members, work)]].sum()) if known else None,
                None,
                float(moved.spread[members].sum()),
                source,
            )
        )
    return found


def settled(chain: Chain, moved: Traffic, read_by: Sequence[str], min_read_share: float) -> Chain:
    """The chain with what fusing it saves, now that it is known who reads its results."""
    one = replace(chain, read_by=tuple(read_by))
    spared = spared_bytes(one, moved, min_read_share)
    return one if spared is None else replace(one, saved_bytes=sum(spared))


def spared_bytes(chain: Chain, moved: Traffic, min_read_share: float) -> list[float] | None:
    """What fusing saves of the traffic of each member and of what it takes from others; None where it is not known."""
    if chain.traffic_bytes is None:
        return None
    members = list(chain.members)
    kept = [answer == "others_too" for answer in chain.read_by]
    return saved(moved.read[members].tolist(), moved.written[members].tolist(), min_read_share, kept)


def saved(
    read: Sequence[float], written: Sequence[float], min_read_share: float, kept: Sequence[bool] = ()
) -> list[float]:
    """By kernel of a chain, the bytes of its reads and of their writes that a fused kernel does without.

    A result is taken by a kernel whose reads, less what it took before, are at least ``min_read_share`` of it.
    ``kept``: of each kernel, whether its result is to be written in any case.
    """
    stack: list[tuple[float, bool]] = []
    found = []
    for place, (reads, writes) in enumerate(zip(read, written, strict=True)):
        left, total = reads, 0.0
        while stack and left >= min_read_share * stack[-1][0]:
            size, is_kept = stack.pop()
            total += min(size, left) + (0.0 if is_kept else size)
            left -= min(size, left)
        found.append(total)
        stack.append((writes, place < len(kept) and kept[place]))
    return found


def bound_ns(chain: Chain, work: Sequence[Work], moved: Traffic, peak: float) -> float:
    """At most so much of one run's time does fusing save: the saved bytes at the rate of the kernels that vanish.

    What is left is no less than the product in front, nor than the fused kernel's traffic or that of the largest member
    takes at DRAM's peak (``peak`` in bytes per second, NaN = unknown).
    """
    if not chain.saved_bytes or not chain.traffic_bytes:
        return 0.0
    their_ns = sum(light_ns(chain, work))
    if not chain.light_bytes:
        return 0.0
    floor_bytes = max(chain.traffic_bytes - chain.saved_bytes, float(moved.both[list(chain.members)].max()))
    floor_ns = 1e9 * floor_bytes / peak if peak > 0 else 0.0
    return max(min(chain.saved_bytes / chain.light_bytes * their_ns, their_ns, chain.mean_ns - floor_ns), 0.0)


def light_ns(chain: Chain, work: Sequence[Work]) -> list[float]:
    """Mean durations of the members that a fused kernel replaces: all but the product in front."""
    which = _vanishing(chain.members, work)
    return [ns for ns, is_so in zip(chain.member_ns, which, strict=True) if is_so]


def _vanishing(members: Iterable[int], work: Sequence[Work]) -> list[bool]:
    return [work[member].kind not in HEADS for member in members]
