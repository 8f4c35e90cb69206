"""The work of one GPU cut to the pieces that samples of hardware counters are shared out to.

A launch is one piece, of the group of its class (identical name, grid and block). Two things make it more:

* Launches of one class that differ in duration by an octave or more do not do the same: each octave is a group.
* A launch that holds three whole samples or more has counts of its own. Its begin and its end, one sampling
  interval each, share samples with other work; what lies between does not, unless streams overlap. They are
  groups of their own, so that what happens at its edges is not taken from its middle.

Copies and memsets, and time in which recording was off, are pieces at a steady rate per group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.assemble.counter_overlap import Bools, Floats, Indices, Ints, Pieces, Samples, totals

#: Whole samples that a launch must hold for counts of its own.
WHOLE_SAMPLES_MIN = 3

#: Groups that are solved for, the longest-running ones; the others are one group at a steady rate.
GROUPS_MAX = 512

KERNELS, MEMORY_OPS, NOT_TRACED = range(3)
_KINDS = 8
_LAUNCH, _BEGIN, _MIDDLE, _END, _OP, _NOT_TRACED, _MERGED = range(_KINDS - 1)
_OCTAVES = 128  # of a duration in ns, from below the class's mean to above


@dataclass(frozen=True, slots=True)
class Work:
    """All work on one GPU, in ns on one clock. Intervals are half open, in any order, and may overlap.

    ``kernel_class`` numbers identical launches from 0, ``op_kind`` kinds of copies likewise. In the ``not_traced``
    spans nothing is known about what ran. ``in_graph`` says of each kernel whether a CUDA graph launched it.
    """

    kernel_start_ns: Ints
    kernel_end_ns: Ints
    kernel_class: npt.NDArray[np.integer]
    op_start_ns: Ints
    op_end_ns: Ints
    op_kind: npt.NDArray[np.integer]
    not_traced_start_ns: Ints
    not_traced_end_ns: Ints
    in_graph: Bools

    def shifted(self, ns: Ints) -> Work:
        """The same work with these times added to those of its kernels."""
        begin, end = self.kernel_start_ns + ns, self.kernel_end_ns + ns
        return replace(self, kernel_start_ns=begin, kernel_end_ns=end)


@dataclass(frozen=True, slots=True)
class Cut:
    """The pieces, and what each belongs to."""

    pieces: Pieces
    place: npt.NDArray[np.int8]  # KERNELS, MEMORY_OPS or NOT_TRACED
    kernel: Indices  # row of the kernels, -1 for other work
    mean_ns: Floats  # by group
    begins: Bools  # by group: its pieces begin where their launch does
    ends: Bools  # by group: they end where it does
    merged: Bools  # by group: it joins classes that were too many to solve for
    exact: Ints  # rows of the kernels that have counts of their own
    covered: Floats  # by kernel: the share of its time that was sampled


def cut(work: Work, samples: Samples) -> Cut:
    """Cut the work for these samples."""
    begin, end = work.kernel_start_ns, np.maximum(work.kernel_end_ns, work.kernel_start_ns + 1)
    covered = sampled_ns(samples, begin, end) / (end - begin)
    last = np.searchsorted(samples.end_ns, end, side="right")
    long = last - np.searchsorted(samples.start_ns, begin, side="left") >= WHOLE_SAMPLES_MIN
    edge_ns = int(np.median(samples.length_ns)) if len(samples.start_ns) else 0
    parts = [
        _short_launches(work, begin, end, np.flatnonzero(~long & (covered > 0))),
        *_long_launches(work, begin, end, np.flatnonzero(long), edge_ns),
        _copies(work, samples),
        _not_traced(work, samples),
    ]
    return _grouped(parts, np.flatnonzero(long & (covered >= 1)), covered)


def sampled_ns(samples: Samples, start_ns: Ints, end_ns: Ints) -> Ints:
    """How much of each interval was sampled."""
    if not len(samples.start_ns):
        return np.zeros(len(start_ns), np.int64)
    sums = np.append(0, np.cumsum(samples.length_ns))

    def before(times: Ints) -> Ints:
        reached = np.searchsorted(samples.start_ns, times, side="right")
        beyond = np.maximum(samples.end_ns[np.maximum(reached - 1, 0)] - times, 0)
        return np.where(reached > 0, sums[reached] - beyond, 0)

    return before(end_ns) - before(start_ns)


@dataclass(frozen=True, slots=True)
class _Part:
    """Pieces of one kind. ``number`` tells its groups apart; ``kernel`` is empty for other work."""

    kind: int
    start_ns: Ints
    end_ns: Ints
    number: Ints
    kernel: Ints


_NO_KERNEL = np.zeros(0, np.int64)


def _short_launches(work: Work, begin: Ints, end: Ints, rows: Ints) -> _Part:
    class_id, octaves = work.kernel_class[rows].astype(np.int64), np.log2((end - begin)[rows])
    mean = np.bincount(class_id, octaves) / np.maximum(np.bincount(class_id), 1)
    number = class_id * _OCTAVES + np.rint(octaves - mean[class_id]).astype(np.int64)
    return _Part(_LAUNCH, begin[rows], end[rows], number, rows)


def _long_launches(work: Work, begin: Ints, end: Ints, rows: Ints, edge_ns: int) -> list[_Part]:
    number, begin, end = work.kernel_class[rows].astype(np.int64), begin[rows], end[rows]
    edge = np.minimum(edge_ns, (end - begin) // 3)
    return [
        _Part(_BEGIN, begin, begin + edge, number, rows),
        _Part(_MIDDLE, begin + edge, end - edge, number, rows),
        _Part(_END, end - edge, end, number, rows),
    ]


def _copies(work: Work, samples: Samples) -> _Part:
    rows = np.flatnonzero(sampled_ns(samples, work.op_start_ns, work.op_end_ns) > 0)
    return _Part(_OP, work.op_start_ns[rows], work.op_end_ns[rows], work.op_kind[rows].astype(np.int64), _NO_KERNEL)


def _not_traced(work: Work, samples: Samples) -> _Part:
    starts, ends = union(work.not_traced_start_ns, work.not_traced_end_ns)
    rows = np.flatnonzero(sampled_ns(samples, starts, ends) > 0)
    return _Part(_NOT_TRACED, starts[rows], ends[rows], np.zeros(len(rows), np.int64), _NO_KERNEL)


def union(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """The time that any of the intervals covers, as disjoint ascending ones."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    fresh = np.flatnonzero(np.append(True, starts[1:] > reach[:-1]))
    return starts[fresh], reach[np.append(fresh[1:] - 1, len(reach) - 1)]


def _grouped(parts: list[_Part], exact: Ints, covered: Floats) -> Cut:
    start = np.concatenate([part.start_ns for part in parts])
    end = np.concatenate([part.end_ns for part in parts])
    kernel = np.concatenate([part.kernel if len(part.kernel) else np.full(len(part.start_ns), -1) for part in parts])
    kind = np.repeat([part.kind for part in parts], [len(part.start_ns) for part in parts])
    number = np.concatenate([part.number for part in parts])
    keys, group = np.unique(number * _KINDS + kind, return_inverse=True)
    length = (end - start).astype(np.float64)
    group, kinds = _merged(group, length, keys % _KINDS)
    mean = totals(group, length, len(kinds)) / np.bincount(group, minlength=len(kinds))
    launches = np.isin(kinds, (_LAUNCH, _BEGIN, _END))
    size = np.where(launches[group], 1.0, length / mean[group])
    place = np.full(len(kind), KERNELS, np.int8)
    place[kind == _OP], place[kind == _NOT_TRACED] = MEMORY_OPS, NOT_TRACED
    pieces = Pieces(start, end, group.astype(np.int32), size, launches)
    return Cut(
        pieces=pieces,
        place=place,
        kernel=kernel.astype(np.int32),
        mean_ns=mean,
        begins=np.isin(kinds, (_LAUNCH, _BEGIN)),
        ends=np.isin(kinds, (_LAUNCH, _END)),
        merged=kinds == _MERGED,
        exact=exact,
        covered=covered,
    )


def _merged(group: Ints, length: Floats, kinds: Ints) -> tuple[Ints, Ints]:
    """The groups of the pieces and their kinds, with those that are too many to solve for made one."""
    if len(kinds) <= GROUPS_MAX:
        return group, kinds
    kept = np.argsort(-np.bincount(group, length), kind="stable")[: GROUPS_MAX - 1]
    number = np.full(len(kinds), GROUPS_MAX - 1)
    number[kept] = np.arange(GROUPS_MAX - 1)
    return number[group], np.append(kinds[kept], _MERGED)
