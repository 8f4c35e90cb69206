"""Event time: cells of it, sliding sums over them, and look-ups that come late, early or out of order."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.profiler.lookups import Lookups

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FURTHEST_S = 1e12  # a time beyond is none (the year 33658)
_MAX_HELD_COUNT = 65_536


class Column(IntEnum):
    """What is counted in each cell of each row."""

    LOOKUPS = 0
    MISSES = 1
    EXISTING = 2  # misses of keys that exist: known, or hit lately
    FILLED = 3  # earlier misses of a key that now hit for the first time
    FIRST_SEEN = 4  # misses of keys never seen before
    REPEATED = 5  # misses of keys whose last look-up missed, too
    YOUNG_HITS = 6  # hits of keys first filled lately
    NOWHERE = 7  # misses of keys that exist nowhere
    TTLS = 8  # hits whose time to live is known
    TTL_S = 9  # the sum of those times
    TTL_SQUARE_S2 = 10  # the sum of their squares


class Windows:
    """Counts by row and cell: a ring of the last cells, float64 [columns, rows, cells]."""

    def __init__(self, cells_count: int) -> None:
        self.cells_count = cells_count
        self._ring = np.zeros((len(Column), 0, cells_count))
        self._newest = 0  # the newest cell of the ring
        self.totals = np.zeros((2, 0))  # look-ups and misses of each row since it was begun

    def grow(self, rows_count: int) -> None:
        """Make room for so many rows."""
        columns, rows, cells = self._ring.shape
        if rows_count > rows:
            self._ring = np.concatenate([self._ring, np.zeros((columns, rows_count - rows, cells))], axis=1)
            self.totals = np.concatenate([self.totals, np.zeros((2, rows_count - rows))], axis=1)

    def clear(self, row: int) -> None:
        """Forget one row."""
        self._ring[:, row] = 0
        self.totals[:, row] = 0

    def restart(self, cell: int) -> None:
        """Forget everything: ``cell`` is the newest now."""
        self._ring[:] = 0
        self._newest = cell

    def move_to(self, cell: int) -> None:
        """Make ``cell`` the newest: cells that come in are empty."""
        if cell - self._newest >= self.cells_count:
            self.restart(cell)
        while self._newest < cell:
            self._newest += 1
            self._ring[:, :, self._newest % self.cells_count] = 0

    def add(self, rows: Ints, cell: int, counts: Floats) -> None:
        """Add ``counts`` [columns, n] to n different rows, in a cell of the ring."""
        self._ring[:, rows, cell % self.cells_count] += counts
        self.totals[:, rows] += counts[: Column.MISSES + 1]

    def whole(self) -> Floats:
        """Sums over all cells that are kept, [columns, rows]."""
        return np.asarray(self._ring.sum(axis=2))

    def sums(self, cell: int, cells_count: int) -> Floats:
        """Sums over the ``cells_count`` cells that end with ``cell``, [columns, rows]."""
        first = (cell - cells_count + 1) % self.cells_count
        last = first + cells_count
        if last <= self.cells_count:
            return np.asarray(self._ring[:, :, first:last].sum(axis=2))
        return np.asarray(
            self._ring[:, :, first:].sum(axis=2) + self._ring[:, :, : last - self.cells_count].sum(axis=2)
        )


class EventClock:
    """How far event time has come, and which look-ups belong to it.

    The newest look-up sets it, except one that is ahead of all others by more than ``max_ahead_s``: such are held back
    until ``clock_quorum_count`` have come. Where as many in a row are late, time was set back, and the clock with it;
    not so once ``follow`` was called: then that time is what counts.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._held: Lookups | None = None
        self._late_run_count = 0
        self._is_followed = False
        self.cell: int | None = None  # the newest cell, still open
        self.late_count = 0
        self.early_count = 0
        self.bad_time_count = 0
        self.jumps_count = 0
        self.is_set_back = False  # by the last call: what is known of cells holds no longer

    @property
    def held_count(self) -> int:
        """Look-ups held back."""
        return 0 if self._held is None else len(self._held)

    def cells_of(self, ts_s: Floats) -> Ints:
        """The cell of each time, int64 [n]."""
        return np.floor(ts_s / self._options.cell_s).astype(np.int64)

    def reach(self, cell: int) -> None:
        """Counts without keys have come up to ``cell``."""
        self.cell = cell if self.cell is None else max(self.cell, cell)

    def follow(self, now_s: float) -> Lookups | None:
        """Event time has come to ``now_s``. Returns look-ups that were held back and are due now."""
        cell = int(np.floor(now_s / self._options.cell_s))
        self._is_followed = True
        self.is_set_back = (
            self.cell is not None and (self.cell - cell) * self._options.cell_s > self._options.max_ahead_s
        )
        if self.is_set_back:
            self.jumps_count += 1
        if self.cell is None or self.is_set_back:
            self.cell = cell
        self.cell = max(self.cell, cell)
        held = self._held
        if held is None or not (held.ts_s <= now_s + self._options.max_ahead_s).any():
            return None
        return self.sift(_take(held, np.arange(0)))

    def finish(self) -> Lookups | None:
        """No more will come: what was held back is taken, but for single stray ones, which are counted as early."""
        held, self._held = self._held, None
        if held is None:
            return None
        parts = self._parts(held.ts_s)
        sizes = np.bincount(parts)
        is_stray = (sizes < self._options.clock_quorum_count)[parts] & (sizes.max() >= self._options.clock_quorum_count)
        self.early_count += int(is_stray.sum())
        return _take(held, np.flatnonzero(~is_stray))

    def sift(self, batch: Lookups) -> Lookups:
        """The look-ups of ``batch`` and of those held back that count now, sorted by time (stable)."""
        self.is_set_back = False
        good = np.isfinite(batch.ts_s) & (np.abs(batch.ts_s) < _FURTHEST_S)
        if not good.all():
            self.bad_time_count += int((~good).sum())
            batch = _take(batch, np.flatnonzero(good))
        if self._held is not None:
            batch, self._held = _join(self._held, batch), None
        if not len(batch):
            return batch
        if (np.diff(batch.ts_s) < 0).any():
            batch = _take(batch, np.argsort(batch.ts_s, kind="stable"))
        if self.cell is None:
            self.cell = self._start(batch.ts_s)
        was_at = self.cell
        batch = self._hold(batch)
        return self._drop_late(batch, was_at)

    def _parts(self, ts_s: Floats) -> Ints:
        """Which part each of the sorted times belongs to: parts are more than ``max_ahead_s`` apart."""
        return np.concatenate([[0], np.cumsum(np.diff(ts_s) > self._options.max_ahead_s)])

    def _start(self, ts_s: Floats) -> int:
        """The cell to begin with: the first of the first part that is no stray."""
        parts = self._parts(ts_s)
        sizes = np.bincount(parts)
        first = int(np.argmax(sizes >= min(self._options.clock_quorum_count, sizes.max())))
        return int(self.cells_of(ts_s[parts == first][:1])[0])

    def _hold(self, batch: Lookups) -> Lookups:
        """Hold back what is far ahead of the rest, and set the clock to the newest of the rest."""
        assert self.cell is not None
        newest_s = (self.cell + 1) * self._options.cell_s
        # parts of what is ahead of the clock, counted from where the clock is
        ahead = int(np.searchsorted(batch.ts_s, newest_s))
        parts = self._parts(np.concatenate([[newest_s], batch.ts_s[ahead:]]))[1:]
        far_count = int((parts > 0).sum())
        take = len(batch)
        if far_count and not self._is_agreed(parts, far_count):
            take = len(batch) - far_count
        elif far_count:
            # the last part may be a stray one: it waits until it is large enough itself
            last_count = int((parts == parts[-1]).sum())
            if last_count < self._options.clock_quorum_count:
                take = len(batch) - last_count
            self.jumps_count += int(take > ahead + int((parts == 0).sum()))
        if take < len(batch):
            self._keep(_take(batch, np.arange(take, len(batch))))
            batch = _take(batch, np.arange(take))
        if len(batch):
            self.cell = max(self.cell, int(self.cells_of(batch.ts_s[-1:])[0]))
        return batch

    def _is_agreed(self, parts: Ints, far_count: int) -> bool:
        near_count = int((parts == 0).sum())
        return far_count >= self._options.clock_quorum_count and far_count > near_count and not self._is_followed

    def _keep(self, held: Lookups) -> None:
        over = len(held) - _MAX_HELD_COUNT
        if over > 0:
            self.early_count += over
            held = _take(held, np.arange(_MAX_HELD_COUNT))
        self._held = held

    def _drop_late(self, batch: Lookups, was_at: int) -> Lookups:
        """Leave out what is late, seen from where the clock was before."""
        cells = self.cells_of(batch.ts_s)
        late_count = int(np.searchsorted(cells, was_at - self._options.lateness_cells_count))
        if not late_count:
            self._late_run_count = 0
            return batch
        self._late_run_count = self._late_run_count + late_count if late_count == len(batch) else 0
        if self._late_run_count >= self._options.clock_quorum_count and not self._is_followed:
            self.cell, self.is_set_back, self._late_run_count = int(cells[-1]), True, 0
            self.jumps_count += 1
            return batch
        self.late_count += late_count
        return _take(batch, np.arange(late_count, len(batch)))


def _take(batch: Lookups, index: npt.NDArray[np.int64]) -> Lookups:
    places = pa.array(index)
    return Lookups(
        batch.ts_s[index], batch.keys.take(places), batch.hits[index], batch.ttls_s[index], batch.tenants.take(places)
    )


def _join(first: Lookups, second: Lookups) -> Lookups:
    tenants = pa.chunked_array([first.tenants, second.tenants]).unify_dictionaries()
    return Lookups(
        np.concatenate([first.ts_s, second.ts_s]),
        pa.concat_arrays([first.keys, second.keys]),
        np.concatenate([first.hits, second.hits]),
        np.concatenate([first.ttls_s, second.ttls_s]),
        pa.concat_arrays(tenants.chunks),
    )
