"""Origins carried over from the launches that were attributed to all others, by what ran before them.

Python is asked for the origin of a few steps' launches only. Elsewhere a program does the same again: a kernel of
another step comes from where the kernel at the same place in the same sequence came from. The place is told by the
names of the kernels right before it on its stream, or right after it: the longest stretch of them that occurs at
attributed launches decides, and only if all that it fits have one origin. What is ambiguous stays unknown.

Stretches are told apart exactly, by doubling: two of length 2w are equal if both their halves are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]

#: Kernels in the longest stretch that is compared: more than a decode step of a large model launches.
LONGEST = 2048
#: In the shortest one that tells a place. In a shorter one a kernel must also have a grid that was seen there.
PLACE = 32

#: Of a kernel whose origin is to be found; -1 is an attributed launch of which nothing is known.
WANTED = -2


class Carried(NamedTuple):
    """Per kernel: what it was given, and by how long a stretch of kernels, itself included (0 = not found).

    ``origin`` is -1 where several origins of the same ``place`` would fit, or -1 with it where there is none.
    """

    place: Codes
    origin: Codes
    length: npt.NDArray[np.int16]


def carry(
    sequence: npt.NDArray[Any],
    token: npt.NDArray[Any],
    grid: npt.NDArray[Any],
    place: npt.NDArray[Any],
    origin: npt.NDArray[Any],
) -> Carried:
    """Find the place and origin of every kernel that has none yet.

    All arrays: one element per kernel, kernels of one ``sequence`` (process and stream) behind one another in the order
    in which they ran. Equal ``token`` (name, within a process) and equal ``grid`` are equal numbers from 0 on.
    ``place`` is the number of a module, line and operator, ``origin`` that of a place with the shapes of the inputs;
    ``WANTED`` in both where they are to be found.
    """
    arrays = [sequence, token, grid, place, origin]
    before = _one_way(*arrays)
    late = _one_way(*(values[::-1] for values in arrays))
    after = Carried(late.place[::-1], late.origin[::-1], late.length[::-1])
    # The longer stretch knows more, but a place that is ambiguous by one may still be told by the other.
    told = (after.length > before.length) | ((before.place < 0) & (after.length >= PLACE))
    take = told & (after.place >= 0)
    split = (after.length == before.length) & (after.place != before.place) & (after.place >= 0) & (before.place >= 0)
    np.copyto(before.place, after.place, where=take)
    np.copyto(before.origin, after.origin, where=take)
    np.copyto(before.length, after.length, where=take)
    before.place[split], before.origin[split] = -1, -1
    return before


def _one_way(
    sequence: npt.NDArray[Any],
    token: npt.NDArray[Any],
    grid: npt.NDArray[Any],
    place: npt.NDArray[Any],
    origin: npt.NDArray[Any],
) -> Carried:
    """What stretches that end at each kernel tell."""
    count = len(token)
    found = Carried(np.full(count, -1, np.int32), np.full(count, -1, np.int32), np.zeros(count, np.int16))
    known = np.flatnonzero(place != WANTED)
    wanted = np.flatnonzero(place == WANTED)
    if not len(known) or not len(wanted):
        return found
    place, origin, grid = place.astype(np.int64), origin.astype(np.int64), grid.astype(np.int64)
    depth = _places_in(sequence)
    stretch, width = token.astype(np.int64), 1
    while True:
        seen = known[depth[known] >= width - 1]
        asking = wanted[depth[wanted] >= width - 1]
        if not len(seen) or not len(asking):
            break
        _decide(found, stretch, width, seen, asking, grid, place, origin)
        if width >= LONGEST:
            break
        stretch = _doubled(stretch, width, depth)
        width *= 2
    return found


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


def _decide(
    found: Carried, stretch: Ints, width: int, seen: Ints, asking: Ints, grid: Ints, place: Ints, origin: Ints
) -> None:
    """Overwrite what shorter stretches gave for those kernels whose stretch of this width was seen."""
    occurs = np.zeros(int(stretch.max()) + 1, bool)
    occurs[stretch[seen]] = True
    asking = asking[occurs[stretch[asking]]]
    grids = int(grid.max()) + 1
    exact = _Seen(stretch[seen] * grids + grid[seen], place[seen], origin[seen])
    at = exact.find(stretch[asking] * grids + grid[asking])
    rest = asking[at < 0]
    asking, at = asking[at >= 0], at[at >= 0]
    found.place[asking], found.origin[asking] = exact.place[at], exact.origin[at]
    found.length[asking] = width
    if width >= PLACE and len(rest):
        # Never seen with this grid: as far as the place goes it is the same, but its shapes are others.
        named = _Seen(stretch[seen], place[seen], origin[seen])
        found.place[rest], found.origin[rest] = named.place[named.find(stretch[rest])], -1
        found.length[rest] = width


class _Seen:
    """Keys of attributed launches, each with the one place and origin that it stands for; -1: several."""

    def __init__(self, key: Ints, place: Ints, origin: Ints) -> None:
        order = np.argsort(key, kind="stable")
        self._keys, first = np.unique(key[order], return_index=True)
        self.place, self.origin = (_if_one(values[order], first) for values in (place, origin))
        self.origin[self.place < 0] = -1

    def find(self, key: Ints) -> Ints:
        """Where each key is among these, -1 for nowhere."""
        at = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        return np.where(self._keys[at] == key, at, -1)


def _if_one(values: Ints, first: Ints) -> Ints:
    low, high = np.minimum.reduceat(values, first), np.maximum.reduceat(values, first)
    return np.where(low == high, low, -1)
