"""Calls within calls: which of many intervals of one thread encloses which, and the innermost around a moment.

Vectorised: no step is taken per interval. A *lane* is whatever holds intervals that nest: a thread of a process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Nesting:
    """Half-open intervals ``[start, end)`` in lanes. Arrays of one element per interval, in any order.

    Intervals that end no later than they start enclose nothing. Those that stick out of the one around them, as
    clocks of a microsecond make some, are still found by what lies in them.
    """

    def __init__(self, lane: npt.NDArray[Any], start: npt.NDArray[Any], end: npt.NDArray[Any]) -> None:
        lane, start, end = (np.asarray(values, np.int64) for values in (lane, start, end))
        self._count = len(start)
        whole = np.flatnonzero(end > start)
        # Of two that begin together, the longer is around the other.
        self._rows = whole[np.lexsort((-end[whole], start[whole], lane[whole]))]
        self._lane, self._start, self._end = lane[self._rows], start[self._rows], end[self._rows]
        self._parent = _parents(self._lane, self._start, self._end)

    def parents(self) -> Ints:
        """Per interval the one right around it, -1 for none."""
        out = np.full(self._count, -1, np.int64)
        out[self._rows] = self._original(self._parent)
        return out

    def innermost(self, lane: npt.NDArray[Any], time: npt.NDArray[Any]) -> Ints:
        """Per moment the innermost interval of its lane that contains it, -1 for none."""
        lane, time = np.asarray(lane, np.int64), np.asarray(time, np.int64)
        found = _last_started(self._lane, self._start, lane, time)
        open_ = np.flatnonzero(found >= 0)
        while len(open_):
            ended = self._end[found[open_]] <= time[open_]
            open_ = open_[ended]
            found[open_] = self._parent[found[open_]]
            open_ = open_[found[open_] >= 0]
        return self._original(found)

    def _original(self, places: Ints) -> Ints:
        if not len(self._rows):
            return np.full(len(places), -1, np.int64)
        return np.where(places >= 0, self._rows[places], -1)


def _last_started(lane: Ints, start: Ints, lanes: Ints, times: Ints) -> Ints:
    """Per moment the place of the last interval of its lane that began by then, -1 for none. Sorted by both."""
    order = np.lexsort((np.repeat([0, 1], [len(start), len(times)]), np.append(start, times), np.append(lane, lanes)))
    begun = np.cumsum(order < len(start)) - 1
    asked = order >= len(start)
    found = np.empty(len(times), np.int64)
    found[order[asked] - len(start)] = begun[asked]
    if not len(start):
        return np.full(len(times), -1, np.int64)
    return np.where((found >= 0) & (lane[np.maximum(found, 0)] == lanes), found, -1)


def _parents(lane: Ints, start: Ints, end: Ints) -> Ints:
    """Places of enclosing intervals; all sorted by lane, start, and length from the longest."""
    count = len(start)
    times, lanes = np.append(end, start), np.append(lane, lane)
    begins = np.repeat([0, 1], count)  # at one moment, what ends ends before anything begins
    order = np.lexsort((begins, times, lanes))  # stable: intervals that begin together keep their order
    begin = order >= count
    depth = np.cumsum(np.where(begin, 1, -1))
    parent = np.full(count, -1, np.int64)
    # In order of start, an interval's place is that of its begin among all begins.
    depth_of = depth[begin]
    by_depth = np.argsort(depth_of, kind="stable")
    edges = np.searchsorted(depth_of[by_depth], np.arange(1, int(depth_of.max(initial=0)) + 2))
    for outer, inner, stop in zip(edges[:-2], edges[1:-1], edges[2:], strict=True):
        around, within = by_depth[outer:inner], by_depth[inner:stop]
        parent[within] = around[np.searchsorted(around, within) - 1]
    return parent
