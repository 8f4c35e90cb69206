"""Origins carried over from the launches that were attributed to all others, by what ran before them.

Python is asked for the origin of a few steps' launches only. Elsewhere a program does the same again: a kernel of
another step comes from where the kernel at the same place in the same sequence came from. The place is told by the
names of the kernels right before it on its stream, or right after it: the longest stretch of them that occurs at
attributed launches decides, and only if all that it fits have one origin. What is ambiguous stays unknown; so does what
is not only because the recording begins within the stretch of another launch.

A program also goes on doing the same with a kernel more in between: attention that splits a longer context merges its
parts. What no long stretch has told is looked for once more in the sequences without such **strangers**, kernels that
were never attributed by name and grid, of which there may be few. It is given a place by long stretches only, of
kernels that have the grids, too, and only if what ran before it and what ran after it do not speak for two.

Stretches are told apart exactly, by doubling: two of length 2w are equal if both their halves are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler.origins import numbered

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]

#: Kernels in the longest stretch that is compared: more than a decode step of a large model launches.
LONGEST = 2048
#: In the shortest one that tells a place. In a shorter one a kernel must also have a grid that was seen there.
PLACE = 32
#: In the shortest one that tells a place where strangers are left out, and the kernels among which there may be one.
PLACE_AMONG_STRANGERS, KERNELS_A_STRANGER = 128, 8

#: Of a kernel whose origin is to be found; -1 is an attributed launch of which nothing is known.
WANTED = -2


class Carried(NamedTuple):
    """Per kernel: the place it was given, -1 for none, and by how long a stretch, itself included (0 = not found)."""

    place: Codes
    length: npt.NDArray[np.int16]


def carry(
    sequence: npt.NDArray[Any], token: npt.NDArray[Any], grid: npt.NDArray[Any], place: npt.NDArray[Any]
) -> Carried:
    """Find the place of every kernel that has none yet.

    All arrays: one element per kernel, kernels of one ``sequence`` (process and stream) behind one another in the order
    in which they ran. Equal ``token`` (name, within a process) and equal ``grid`` are equal numbers from 0 on.
    ``place`` is the number of a module, line and operator, ``WANTED`` where it is to be found.
    """
    found = _both_ways(sequence, token, grid, place)
    pair = numbered(token, grid).code
    is_known = np.zeros(int(pair.max(initial=0)) + 1, bool)
    is_known[pair[place != WANTED]] = True
    kept = np.flatnonzero(is_known[pair])
    wanted = (place[kept] == WANTED) & ((found.place[kept] < 0) | (found.length[kept] < PLACE))
    if len(kept) == len(token) or not wanted.any():
        return found
    again = _both_ways(sequence[kept], pair[kept], np.zeros(len(kept), np.int64), place[kept], agree=True)
    wanted &= (again.place >= 0) & (again.length >= PLACE_AMONG_STRANGERS)
    take = np.flatnonzero(wanted)
    take = take[_are_few(kept, sequence[kept], take, again.length[take].astype(np.int64))]
    found.place[kept[take]], found.length[kept[take]] = again.place[take], again.length[take]
    return found


def _are_few(kept: Ints, sequence: npt.NDArray[Any], at: Ints, length: Ints) -> npt.NDArray[np.bool_]:
    """Whether few strangers lie within a stretch that ends at each of these, and within one that begins there.

    ``at`` are places in ``kept``, the kernels that are none, by their places among all.
    """
    first = at - np.minimum(length - 1, _places_in(sequence)[at])
    last = at + np.minimum(length - 1, _places_in(sequence[::-1])[::-1][at])
    before, after = (kept[at] - kept[first]) - (at - first), (kept[last] - kept[at]) - (last - at)
    return np.asarray(np.maximum(before, after) * KERNELS_A_STRANGER <= length)


def _both_ways(
    sequence: npt.NDArray[Any],
    token: npt.NDArray[Any],
    grid: npt.NDArray[Any],
    place: npt.NDArray[Any],
    agree: bool = False,
) -> Carried:
    """What stretches that end, and those that begin, at each kernel tell; ``agree``: nothing where they are at odds."""
    before = _one_way(sequence, token, grid, place)
    late = _one_way(sequence[::-1], token[::-1], grid[::-1], place[::-1])
    after = Carried(late.place[::-1], late.length[::-1])
    # The longer stretch knows more, but a place that is ambiguous by one may still be told by the other.
    told = (after.length > before.length) | ((before.place < 0) & (after.length >= PLACE))
    take = told & (after.place >= 0)
    split = (after.place != before.place) & (after.place >= 0) & (before.place >= 0)
    split &= np.minimum(before.length, after.length) >= (PLACE if agree else np.maximum(before.length, after.length))
    np.copyto(before.place, after.place, where=take)
    np.copyto(before.length, after.length, where=take)
    before.place[split] = -1
    return before


def _one_way(
    sequence: npt.NDArray[Any], token: npt.NDArray[Any], grid: npt.NDArray[Any], place: npt.NDArray[Any]
) -> Carried:
    """What stretches that end at each kernel tell."""
    count = len(token)
    found = Carried(np.full(count, -1, np.int32), np.zeros(count, np.int16))
    known = np.flatnonzero(place != WANTED)
    wanted = np.flatnonzero(place == WANTED)
    if not len(known) or not len(wanted):
        return found
    place, grid = place.astype(np.int64), grid.astype(np.int64)
    depth = _places_in(sequence)
    half = stretch = token.astype(np.int64)
    cut, width = np.empty(0, np.int64), 1
    while True:
        seen = known[depth[known] >= width - 1]
        asking = wanted[depth[wanted] >= width - 1]
        if not len(seen) or not len(asking):
            break
        _decide(found, stretch, width, seen, asking, grid, place)
        if len(cut):
            _doubt(found, half, width, cut, asking, place)
        if width >= LONGEST:
            break
        cut = seen[depth[seen] < 2 * width - 1]
        half, stretch = stretch, _doubled(stretch, width, depth)
        width *= 2
    return found


def stretches(sequence: npt.NDArray[Any], token: npt.NDArray[Any]) -> Ints:
    """Number of the stretch of ``PLACE`` kernels that ends at each one, -1 where its sequence has begun since."""
    depth, stretch, width = _places_in(sequence), token.astype(np.int64), 1
    while width < PLACE:
        stretch = _doubled(stretch, width, depth)
        width *= 2
    return np.where(depth >= PLACE - 1, stretch, -1)


def _places_in(sequence: npt.NDArray[Any]) -> Codes:
    """How many kernels precede each one in its sequence."""
    place = np.arange(len(sequence), dtype=np.int32)
    fresh = np.append(True, sequence[1:] != sequence[:-1])
    return place - np.maximum.accumulate(np.where(fresh, place, 0))


def _doubled(stretch: Ints, width: int, depth: Codes) -> Ints:
    """Numbers of the stretches of twice the width that end at each kernel; those too near a sequence's begin: any."""
    pair = stretch.copy()
    pair[width:] = stretch[width:] * (int(stretch.max()) + 1) + stretch[:-width]
    pair[depth < 2 * width - 1] = 0
    return np.asarray(pa.array(pair).dictionary_encode().indices, np.int64)


def _decide(found: Carried, stretch: Ints, width: int, seen: Ints, asking: Ints, grid: Ints, place: Ints) -> None:
    """Overwrite what shorter stretches gave for those kernels whose stretch of this width was seen."""
    occurs = np.zeros(int(stretch.max()) + 1, bool)
    occurs[stretch[seen]] = True
    asking = asking[occurs[stretch[asking]]]
    grids = int(grid.max()) + 1
    exact = Only(stretch[seen] * grids + grid[seen], place[seen])
    at = exact.find(stretch[asking] * grids + grid[asking])
    rest = asking[at < 0]
    asking, at = asking[at >= 0], at[at >= 0]
    found.place[asking] = exact.value[at]
    found.length[asking] = width
    if width >= PLACE and len(rest):  # never seen with this grid, but the place is the same
        named = Only(stretch[seen], place[seen])
        found.place[rest] = named.value[named.find(stretch[rest])]
        found.length[rest] = width


def _doubt(found: Carried, half: Ints, width: int, cut: Ints, asking: Ints, place: Ints) -> None:
    """Take back what launches at other places cannot be told from: the recording begins within their stretch."""
    rows = asking[(found.length[asking] == width) & (found.place[asking] >= 0)]
    others = Only(half[cut], place[cut])
    at = others.find(half[rows])
    found.place[rows[(at >= 0) & (others.value[at] != found.place[rows])]] = -1


class Only:
    """Distinct keys, each with the one ``value`` that it stands for (-1 if several), and how often it occurs."""

    def __init__(self, key: Ints, value: Ints) -> None:
        order = np.argsort(key, kind="stable")
        self._keys, first, self.count = np.unique(key[order], return_index=True, return_counts=True)
        values = value[order]
        low, high = np.minimum.reduceat(values, first), np.maximum.reduceat(values, first)
        self.value = np.where(low == high, low, -1)

    def find(self, key: Ints) -> Ints:
        """Where each key is among these, -1 for nowhere."""
        at = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        return np.where(self._keys[at] == key, at, -1)
