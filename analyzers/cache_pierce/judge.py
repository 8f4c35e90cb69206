"""Counts in, alerts out: closes cells of event time one by one, and decides about each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.cache_pierce.alerts import (
    EVERYWHERE,
    ActiveAlerts,
    IllegalKeys,
    Samples,
    hot_key_evidence,
    lasted,
    penetration_evidence,
    top_shares,
)
from spikeprof.analyzers.cache_pierce.baseline import BaselineRow, Baselines
from spikeprof.analyzers.cache_pierce.decide import Decider
from spikeprof.analyzers.cache_pierce.hotkeys import HotKeys
from spikeprof.analyzers.cache_pierce.model import Alert, Evidence, Kind
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.analyzers.cache_pierce.series import ALL, NO_ROW, PATTERN, TENANT, SeriesBook
from spikeprof.analyzers.cache_pierce.sketch import DistinctCounts
from spikeprof.analyzers.cache_pierce.tally import Tally
from spikeprof.analyzers.cache_pierce.windows import Column, Windows

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_DISTINCT_S = 10.0  # one generation of distinct counts


class Judge:
    """Rows of the book, their counts, baselines and states."""

    def __init__(self, options: Options, book: SeriesBook, kept: Iterable[BaselineRow]) -> None:
        self.options = options
        self.book = book
        kept_cells = options.lateness_cells_count + options.window_cells_count + options.raise_of_cells_count
        self.windows = Windows(kept_cells + 1)
        self.baselines = Baselines(options, kept)
        self.decider = Decider(options)
        self.hot_keys = HotKeys(options)
        self.distinct = DistinctCounts()
        self.samples = Samples(options)
        self.active = ActiveAlerts()
        self.illegal = IllegalKeys(options)
        self.at: int | None = None  # the cell that is open
        self._dirty: int | None = None  # the oldest closed cell that look-ups came in for since it was
        self._parents: Ints = np.zeros(0, np.int64)
        self._born_s: Floats = np.zeros(0)
        self._is_young: Flags = np.zeros(0, np.bool_)  # patterns that do not count for wider rows yet
        # so many empty cells later, nothing changes any more
        self._idle_cells = kept_cells + round((options.recover_s + options.hot_key_s) / options.cell_s)

    @property
    def now_s(self) -> float:
        """Event time up to which cells are closed, Unix seconds."""
        return (self.at or 0) * self.options.cell_s

    def busy(self) -> frozenset[int]:
        """Rows that an alert is about."""
        return frozenset(np.flatnonzero(self.decider.alerting).tolist())

    def is_young(self, rows: Ints) -> Flags:
        """Whether the pattern in row ``rows[i]`` is new among others, and still learned, bool [n]; NO_ROW is not."""
        return np.asarray(self._is_young[rows] & (rows != NO_ROW))

    def grow(self) -> None:
        """Take over the rows of the book that are new, or another pattern's now."""
        rows = self.book.rows
        count, had = len(rows), len(self._parents)
        fresh = [*range(had, count), *self.book.reused]
        self.book.reused.clear()
        if not fresh:
            return
        for part in (self.windows, self.baselines, self.decider, self.distinct):
            part.grow(count)
        self._parents = np.fromiter((row.parent for row in rows), np.int64, count)
        self._born_s = np.fromiter((row.born_s for row in rows), np.float64, count)
        self._is_young = np.concatenate([self._is_young, np.zeros(count - had, np.bool_)])
        for at in fresh:
            row = rows[at]
            self.windows.clear(at)
            self.distinct.clear(at)
            self.samples.forget(at)
            self.baselines.begin(at, row.tenant, row.pattern, row.born_s)
            self.decider.begin(at, row.level, row.born_s)
            self._is_young[at] = self._comes_late(at) and not self.baselines.is_kept(at)
        self.decider.set_limits(self.baselines, self._born_s, self.now_s)

    def restart(self, cell: int) -> None:
        """Event time begins, or is set anew, at ``cell``: counts are forgotten, baselines and alerts stay."""
        self.at, self._dirty = cell, None
        self.windows.restart(cell)
        self.baselines.restart()
        self.decider.restart(cell)
        self.illegal.restart(cell)
        self.hot_keys.restart(cell * self.options.cell_s)

    def add(self, new: Tally) -> list[Alert]:
        """Add counts, none older than the lateness allowed; alerts of the cells that close meanwhile."""
        assert self.at is not None
        alerts: list[Alert] = []
        for cell, part in new.by_cell():
            alerts += self.move_to(cell)
            if cell < self.at:
                self._dirty = cell if self._dirty is None else min(self._dirty, cell)
            self.windows.add(part.rows, cell, part.counts)
            lookups, misses = part.counts[Column.LOOKUPS], part.counts[Column.MISSES]
            self.baselines.add(part.rows, cell * self.options.cell_s, lookups, misses)
        return alerts

    def move_to(self, cell: int) -> list[Alert]:
        """Close all cells before ``cell``."""
        assert self.at is not None
        alerts: list[Alert] = []
        stop = min(cell, self.at + self._idle_cells)
        while self.at < stop:
            alerts += self._close(self.at)
        if self.at < cell:
            self.at = cell
            self.windows.move_to(cell)
            self._keep_house(cell - self._idle_cells, cell)
        return alerts

    def baseline_rows(self) -> list[BaselineRow]:
        """Baselines to keep for the next run."""
        rows = (
            self.baselines.to_row(at, row.tenant, row.pattern, self.now_s)
            for at, row in enumerate(self.book.rows[: len(self._parents)])
            if not self.book.is_free(at)
        )
        return [row for row in rows if row is not None]

    def window(self) -> Floats:
        """Sums over the newest closed window, [columns, rows]."""
        count = len(self._parents)
        if self.at is None:
            return np.zeros((len(Column), count))
        return self.windows.sums(self.at - 1, self.options.window_cells_count)[:, :count]

    def _close(self, cell: int) -> list[Alert]:
        """Close the open cell: decide about it, and again about those before it that look-ups came late for."""
        now_s = (cell + 1) * self.options.cell_s
        first = cell if self._dirty is None else max(self._dirty, cell - self.options.lateness_cells_count)
        self._dirty = None
        alerts: list[Alert] = []
        for at in range(first, cell + 1):
            sums = self.windows.sums(at, self.options.window_cells_count)
            moves, is_odd = self.decider.decide(at, sums, self._parents)
            self._taint(is_odd, at)
            alerts += [self._raised(row, sums, now_s) for row in moves.raised]
            alerts += [self._updated("escalated", row, sums, now_s) for row in moves.escalated]
            alerts += [self._updated("recovered", row, sums, now_s) for row in moves.recovered]
            alerts += self._illegal(at, sums, now_s)
        self.at = cell + 1
        self.windows.move_to(self.at)
        alerts += self._hot_keys(now_s)
        self._keep_house(cell, cell + 1)
        return alerts

    def _keep_house(self, was_at: int, cell: int) -> None:
        """What is to be done now and then, as event time goes from cell to cell."""
        cell_s = self.options.cell_s

        def passes(step_s: float) -> bool:
            return int(was_at * cell_s // step_s) != int(cell * cell_s // step_s)

        if passes(self.options.baseline_cell_s) and self.baselines.close(cell * cell_s, self._born_s):
            self._grow_up()
            self.decider.set_limits(self.baselines, self._born_s, cell * cell_s)
        if passes(_DISTINCT_S):
            self.distinct.turn()

    def _comes_late(self, row: int) -> bool:
        """Whether the row is a pattern that came to a tenant already learned."""
        tenant = self._parents[row]
        while self.book.rows[tenant].level not in (TENANT, ALL):
            tenant = self._parents[tenant]
        age_s = self._born_s[row] - self._born_s[tenant]
        return self.book.rows[row].level == PATTERN and age_s >= self.options.cold_start_s

    def _grow_up(self) -> None:
        """Patterns that were learned long enough count for the wider rows from now on, which must expect them."""
        for row in np.flatnonzero(self._is_young & self.baselines.learned()).tolist():
            self._is_young[row] = False
            above = int(self._parents[row])
            while above > 0:
                self.baselines.merge(row, above)
                above = int(self._parents[above])

    def _taint(self, is_odd: Flags, cell: int) -> None:
        """Keep what is odd out of the baselines of its rows and of all that are wider."""
        if not is_odd.any():
            return
        tainted = is_odd.copy()
        for row in np.flatnonzero(is_odd).tolist():
            above = int(self._parents[row])
            while above >= 0 and not tainted[above]:
                tainted[above] = True
                above = int(self._parents[above])
        for at in (cell - self.options.window_cells_count + 1, cell):
            self.baselines.taint(tainted, at * self.options.cell_s)

    def _raised(self, row: int, sums: Floats, now_s: float) -> Alert:
        names = self.book.rows[row].tenant, self.book.rows[row].pattern
        times_s = now_s, self.decider.first_passed_s(row)
        return self.active.raise_alert(
            "penetration", row, names, times_s, self._evidence(row, sums), self.samples.of(row)
        )

    def _updated(self, kind: Kind, row: int, sums: Floats, now_s: float) -> Alert:
        evidence = self._evidence(row, sums)
        if kind == "recovered":
            evidence += (lasted(self.active.of("penetration", row), now_s),)
        return self.active.update(kind, "penetration", row, now_s, evidence, self.samples.of(row))

    def _evidence(self, row: int, sums: Floats) -> tuple[Evidence, ...]:
        limits = float(self.decider.qps_limit[row]), float(self.decider.rate_limit[row])
        distinct = self.distinct.count(row), int(self.distinct.lookups_count[row])
        return penetration_evidence(sums[:, row], limits, self.baselines.of(row), distinct, self.options)

    def _illegal(self, cell: int, sums: Floats, now_s: float) -> list[Alert]:
        """Decide about keys that exist nowhere: those of row 0."""
        per_s = sums[Column.NOWHERE] / self.options.window_s
        kind = self.illegal.decide(cell, float(per_s[0]))
        if kind is None:
            return []
        evidence: tuple[Evidence, ...] = (
            Evidence("illegal_per_s", float(per_s[0]), self.options.illegal_per_s, None, "illegal_per_s", "estimated"),
        )
        if kind == "recovered":
            evidence += (lasted(self.active.of("illegal-keys", 0), now_s),)
            return [self.active.update(kind, "illegal-keys", 0, now_s, evidence)]
        rows = [at for at, row in enumerate(self.book.rows[: len(per_s)]) if row.level == PATTERN]
        names = [(self.book.rows[at].tenant, self.book.rows[at].pattern) for at in rows]
        top = top_shares(names, per_s[rows])
        times_s, keys = (now_s, self.illegal.since_s), self.samples.of(0)
        return [self.active.raise_alert("illegal-keys", 0, EVERYWHERE, times_s, evidence, keys, top)]

    def _hot_keys(self, now_s: float) -> list[Alert]:
        covered = ((self.book.rows[row].tenant, self.book.rows[row].pattern) for row in self.busy())
        moves = self.hot_keys.move_to(now_s, frozenset(covered))
        alerts = []
        for hashed in moves.raised:
            key = self.hot_keys.get(hashed)
            times_s, names = (now_s, key.since_s), (key.tenant, key.pattern)
            evidence = hot_key_evidence(*self.hot_keys.counts(hashed), self.options)
            alerts.append(self.active.raise_alert("hot-missing-key", hashed, names, times_s, evidence, (key.key,)))
        for hashed in moves.recovered:
            evidence = hot_key_evidence(*self.hot_keys.counts(hashed), self.options)
            evidence += (lasted(self.active.of("hot-missing-key", hashed), now_s),)
            alerts.append(self.active.update("recovered", "hot-missing-key", hashed, now_s, evidence))
        return alerts
