"""Single keys that are missed again and again: followed one by one, a bounded number of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.cache_pierce.options import Options

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_CELLS_COUNT = 30  # in hot_key_s

#: Keys that may take another's place in one cell. A key that is missed on and on is asked about again and again.
_REPLACED_MAX = 64


@dataclass(slots=True)
class Followed:
    """One key that is followed. ``lookups`` and ``misses``: by cell, the last ``hot_key_s`` and what may come late."""

    key: str
    tenant: str
    pattern: str
    since_s: float  # when it began to be missed
    lookups: Floats
    misses: Floats
    missed_count: float = 0.0  # the sum of misses
    alerting: bool = False
    alert_id: str = ""
    quiet_cells: int = 0


@dataclass(slots=True)
class KeyMoves:
    """Keys (their hashes) that changed state."""

    raised: list[int] = field(default_factory=list)
    recovered: list[int] = field(default_factory=list)


class HotKeys:
    """The keys missed most in a row, and their look-ups over the last ``hot_key_s``, in cells of a thirtieth of it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.cell_s = options.hot_key_s / _CELLS_COUNT
        self._ring_count = _CELLS_COUNT + int(options.lateness_s // self.cell_s) + 2
        self._followed: dict[int, Followed] = {}
        self._sorted: Hashes = np.zeros(0, np.uint64)
        self._newest = 0
        self._is_begun = False
        self._least_count = 0.0  # none that could make room was missed less; grows until move_to
        self._replaced_count = 0

    def get(self, hashed: int) -> Followed:
        """One key that is followed."""
        return self._followed[hashed]

    def counts(self, hashed: int) -> tuple[int, int]:
        """Look-ups and misses of one key in the last ``hot_key_s``."""
        key = self._followed[hashed]
        cells = np.arange(self._newest - _CELLS_COUNT, self._newest) % self._ring_count
        return int(key.lookups[cells].sum()), int(key.misses[cells].sum())

    def all(self) -> list[tuple[Followed, int, int]]:
        """All keys that are followed, with look-ups and misses in the last ``hot_key_s``, most misses first."""
        rows = [(key, int(key.lookups.sum()), int(key.misses.sum())) for key in self._followed.values()]
        return sorted(rows, key=lambda row: -row[2])

    def restart(self, now_s: float) -> None:
        """Event time was set anew: keys stay followed, their counts begin anew."""
        for key in self._followed.values():
            key.lookups[:] = 0
            key.misses[:] = 0
            key.missed_count, key.since_s = 0.0, now_s
        self._least_count, self._replaced_count = 0.0, 0
        self._newest = int(now_s // self.cell_s)

    def count(self, hashes: Hashes, hits: npt.NDArray[np.bool_], ts_s: Floats) -> None:
        """Count look-ups of the keys that are followed; those behind the ring are left out."""
        if not len(self._sorted) or not len(hashes):
            return
        at = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        found = np.flatnonzero(self._sorted[at] == hashes)
        cells = (ts_s[found] // self.cell_s).astype(np.int64)
        fits = cells > self._newest - self._ring_count
        found, cells = found[fits], cells[fits]
        if not len(found):
            return
        codes = at[found] * (int(cells.max()) + 1 - (base := int(cells.min()))) + (cells - base)
        pairs, first, inverse, lookups = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
        misses = np.bincount(inverse, weights=~hits[found], minlength=len(pairs))
        for i, place in enumerate(first.tolist()):
            key = self._followed[int(self._sorted[at[found[place]]])]
            cell = int(cells[place]) % self._ring_count
            key.lookups[cell] += lookups[i]
            key.misses[cell] += misses[i]
            key.missed_count += misses[i]

    def may_follow(self, hashed: int, misses_count: int) -> bool:
        """Whether ``follow`` could take the key: thousands a second may ask when all are missed, and most in vain."""
        if hashed in self._followed:
            return False
        is_full = len(self._followed) >= self._options.max_hot_keys_count
        return not is_full or (misses_count > self._least_count and self._replaced_count < _REPLACED_MAX)

    def follow(self, hashed: int, key: Followed, misses_count: int, now_s: float) -> None:
        """Follow one more key, missed ``misses_count`` times in a row by now; the least missed one makes room."""
        if not self.may_follow(hashed, misses_count):
            return
        if len(self._followed) >= self._options.max_hot_keys_count:
            least, other = min(self._followed.items(), key=lambda item: (item[1].alerting, item[1].missed_count))
            if other.alerting or other.missed_count >= misses_count:
                self._least_count = float("inf") if other.alerting else other.missed_count
                return
            del self._followed[least]
            self._replaced_count += 1
        if not self._is_begun:
            self._newest, self._is_begun = int(now_s // self.cell_s), True
        cell = min(int(now_s // self.cell_s), self._newest) % self._ring_count
        key.lookups[cell] = key.misses[cell] = key.missed_count = misses_count
        self._followed[hashed] = key
        self._sorted = np.sort(np.fromiter(self._followed, np.uint64, len(self._followed)))

    def new(self, key: str, tenant: str, pattern: str, since_s: float) -> Followed:
        """A key to follow."""
        return Followed(key, tenant, pattern, since_s, np.zeros(self._ring_count), np.zeros(self._ring_count))

    def move_to(self, now_s: float, covered: frozenset[tuple[str, str]] = frozenset()) -> KeyMoves:
        """Event time has come to ``now_s``: which keys are hot and missing now, and which no longer.

        None is raised for the tenants and patterns in ``covered``: another alert is about all of their keys.
        """
        moves = KeyMoves()
        cell = int(now_s // self.cell_s)
        if not self._is_begun or cell <= self._newest:
            return moves
        for hashed, key in list(self._followed.items()):
            self._decide(hashed, key, moves, (key.tenant, key.pattern) in covered)
            for new in range(max(self._newest + 1, cell - self._ring_count + 1), cell + 1):
                key.lookups[new % self._ring_count] = 0
                key.misses[new % self._ring_count] = 0
            key.missed_count = float(key.misses.sum())
            if not key.alerting and not key.lookups.any():
                del self._followed[hashed]
        self._newest, self._least_count, self._replaced_count = cell, 0.0, 0
        self._sorted = np.sort(np.fromiter(self._followed, np.uint64, len(self._followed)))
        return moves

    def _decide(self, hashed: int, key: Followed, moves: KeyMoves, is_covered: bool) -> None:
        """Decide about one key, over the ``hot_key_s`` that end with the newest cell."""
        cells = np.arange(self._newest - _CELLS_COUNT + 1, self._newest + 1) % self._ring_count
        lookups, misses = float(key.lookups[cells].sum()), float(key.misses[cells].sum())
        is_missing = misses > self._options.hot_key_miss_rate * lookups
        is_hot = is_missing and lookups >= self._options.hot_key_min_lookups_count
        is_long = (self._newest + 1) * self.cell_s - key.since_s >= self._options.hot_key_s
        now = self._newest % self._ring_count
        quiet = key.misses[now] <= self._options.hot_key_miss_rate * key.lookups[now]  # no look-ups: quiet, too
        key.quiet_cells = key.quiet_cells + 1 if quiet else 0
        if not key.alerting:
            lasts = key.quiet_cells * self.cell_s < self._options.recover_s / 2
            if is_hot and is_long and lasts and not is_covered and self._has_room(key):
                key.alerting = True
                moves.raised.append(hashed)
        elif key.quiet_cells * self.cell_s >= self._options.recover_s:
            key.alerting, key.since_s = False, (self._newest + 1) * self.cell_s
            moves.recovered.append(hashed)

    def _has_room(self, key: Followed) -> bool:
        alerting = sum(
            other.alerting and (other.tenant, other.pattern) == (key.tenant, key.pattern)
            for other in self._followed.values()
        )
        return alerting < self._options.hot_keys_per_pattern_count
