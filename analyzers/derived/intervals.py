"""Arithmetic on sets of half-open intervals ``[start, end)``, int64 nanoseconds, vectorised.

A *set* is a ``Spans``: disjoint, sorted, no empty interval, and no two that touch. ``union`` makes one
of anything; all other functions take sets and return sets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.errors import DamagedTrace

Ints = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]
Bools = npt.NDArray[np.bool_]

#: Bounds of the number line: far beyond any time, with room to subtract without overflow.
FIRST, LAST = -(2**62), 2**62


class Spans(NamedTuple):
    """A set of times: ``starts`` and ``ends`` (ns), of equal length, disjoint, ascending."""

    starts: Ints
    ends: Ints


def ints(values: object) -> Ints:
    """Anything array-like as int64."""
    return np.asarray(values, dtype=np.int64)


EMPTY = Spans(ints([]), ints([]))


def union(starts: Ints, ends: Ints) -> Spans:
    """The set covered by any intervals, in any order. Empty and reversed ones (``end <= start``) cover nothing."""
    whole = ends > starts
    if not whole.all():
        starts, ends = starts[whole], ends[whole]
    if not len(starts):
        return EMPTY
    if np.any(starts[1:] < starts[:-1]):
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    fresh = np.flatnonzero(starts[1:] > reach[:-1]) + 1
    return Spans(starts[np.append(0, fresh)], reach[np.append(fresh - 1, len(reach) - 1)])


def total(spans: Spans) -> int:
    """The length of a set in ns."""
    return int((spans.ends - spans.starts).sum())


def complement(spans: Spans) -> Spans:
    """All times not in the set, between ``FIRST`` and ``LAST``."""
    return Spans(np.append(FIRST, spans.ends), np.append(spans.starts, LAST))


def parts(starts: Ints, ends: Ints, spans: Spans) -> tuple[Ints, Ints, Ints]:
    """The parts of each query interval that lie in the set: their starts, ends, and the query's index.

    Queries may overlap and come in any order; the parts come query by query, ascending within each.
    """
    first = np.searchsorted(spans.ends, starts, side="right")
    stop = np.searchsorted(spans.starts, ends, side="left")
    counts = np.where(ends > starts, np.maximum(stop - first, 0), 0)
    source = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    which = first[source] + within
    return np.maximum(starts[source], spans.starts[which]), np.minimum(ends[source], spans.ends[which]), source


def intersect(a: Spans, b: Spans) -> Spans:
    """The times in both sets."""
    starts, ends, _ = parts(a.starts, a.ends, b)
    return Spans(starts, ends)


def subtract(a: Spans, b: Spans) -> Spans:
    """The times in ``a`` but not in ``b``."""
    return intersect(a, complement(b))


def overlap_with(starts: Ints, ends: Ints, spans: Spans) -> Ints:
    """How many ns of each query interval lie in the set. Queries may overlap and come in any order."""
    return np.where(ends > starts, _covered_before(ends, spans) - _covered_before(starts, spans), 0)


def _covered_before(times: Ints, spans: Spans) -> Ints:
    """How much of the set lies before each time."""
    if not len(spans.starts):
        return np.zeros(len(times), np.int64)
    reached = np.searchsorted(spans.starts, times, side="right")
    sums = np.append(0, np.cumsum(spans.ends - spans.starts))
    unfinished = np.maximum(spans.ends[np.maximum(reached - 1, 0)] - times, 0)
    return np.where(reached > 0, sums[reached] - unfinished, 0)


def covered_by_group(starts: Ints, ends: Ints, groups: Integers, count: int) -> Ints:
    """The length of the union of the intervals of each group (numbered from 0), in ns. None may be reversed.

    For any number of groups over any stretch of time, where ``Lanes`` would run out of numbers.
    """
    order = np.lexsort((starts, groups))
    starts, ends, group = starts[order], ends[order], groups[order].astype(np.int64)
    by_end = np.argsort(ends, kind="stable")
    place = np.empty(len(ends), np.int64)
    place[by_end] = np.arange(len(ends))
    # Groups ascend, so the largest place so far is one of the same group.
    reach = ends[by_end[np.maximum.accumulate(group * len(ends) + place) - group * len(ends)]]
    fresh = np.append(True, group[1:] != group[:-1])[: len(group)]
    before = np.where(fresh, starts, np.append(0, reach[:-1])[: len(group)])
    added = np.maximum(reach - np.maximum(starts, before), 0)
    return ints(np.bincount(group, added, minlength=count))


def hulls(windows: Spans, spans: Spans) -> Spans:
    """Per window, the stretch from the first to the last moment in the set; windows without any are left out."""
    starts, ends, source = parts(windows.starts, windows.ends, spans)
    if not len(source):
        return EMPTY
    fresh = np.flatnonzero(source[1:] != source[:-1]) + 1
    return Spans(starts[np.append(0, fresh)], ends[np.append(fresh - 1, len(ends) - 1)])


def bin_edges(first: int, last: int, count: int) -> Ints:
    """``count + 1`` ascending edges that cut ``[first, last)`` into bins of equal length to 1 ns.

    Fewer bins when the stretch has fewer nanoseconds than that; always at least one.
    """
    count = max(1, min(count, last - first))
    return ints([first + (last - first) * i // count for i in range(count + 1)])


class Lanes(NamedTuple):
    """Lays the times of many groups (threads, ranks, kernel names) behind one another on one number line.

    One vectorised operation then serves all groups at once. Lane coordinate = time + ``shift(group)``.
    """

    base: int
    stride: int

    @classmethod
    def of(cls, groups_count: int, *times: Ints) -> Lanes:
        """Lanes wide enough for all the times. Raises DamagedTrace when they cannot be on one clock."""
        present = [t for t in times if len(t)]
        low = min((int(t.min()) for t in present), default=0)
        high = max((int(t.max()) for t in present), default=0)
        stride = high - low + 2  # two apart, so that no lane touches the next
        if stride * max(groups_count, 1) >= LAST:
            raise DamagedTrace(
                f"the times in this trace span {(high - low) / 1e9:.3g} s: some cannot be on the session's clock; "
                "record again, or report the importer that let them pass"
            )
        return cls(low, stride)

    def shift(self, groups: Integers) -> Ints:
        """What to add to a time of each group."""
        return groups.astype(np.int64) * self.stride - self.base
