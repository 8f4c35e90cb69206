"""What is usual for each row: a short view of the last five minutes, a slow reference, and the lower of both.

The short view is the median of look-ups per second over cells of ``baseline_cell_s``, and the misses over the
look-ups of the middle half of the cells by miss rate: up to a quarter of odd cells do not move it. The reference is a
running mean, later an exponential one with the time constant ``reference_s``: an attack that ramps up slowly drags the
short view along, but hardly this. Cells in which a row was suspect or alerting are not taken in at all, nor cells in
which nothing at all was looked up: then nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.cache_pierce.model import Baseline
from spikeprof.analyzers.cache_pierce.options import Options

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_MIN_LOOKUPS_COUNT = 200  # fewer give no miss rate: that of all rows is taken
_HIGH_RATIO, _HIGH_SIGMAS = 1.5, 3.0  # misses of a cell over the usual ones, and over their spread (Poisson)
_HISTORY = ("qps", "lookups", "misses")


@dataclass(frozen=True, slots=True)
class BaselineRow:
    """One pattern's baseline as it is kept on disk: plain values only."""

    tenant: str
    pattern: str
    qps: float  # median of the last baseline_s
    miss_rate: float  # 0-1
    reference_qps: float  # the slow reference
    reference_miss_rate: float
    learned_s: float  # how long it was learned
    updated_s: float  # Unix seconds of event time


class Baselines:
    """Baselines of many rows. Cells are numbered in ``baseline_cell_s`` of Unix time."""

    def __init__(self, options: Options, kept: Iterable[BaselineRow] = ()) -> None:
        self._options = options
        self._cells_count = round(options.baseline_s / options.baseline_cell_s)
        self._pending_count = int(options.lateness_s // options.baseline_cell_s) + 3
        self._kept = {(row.tenant, row.pattern): row for row in kept}
        self._pending = np.zeros((2, 0, self._pending_count))  # look-ups and misses of cells not yet taken in
        self._tainted = np.zeros((0, self._pending_count), np.bool_)
        self._history = np.full((len(_HISTORY), 0, self._cells_count), np.nan)
        self._taken_count = np.zeros(0, np.int64)
        self._reference = np.zeros((len(_HISTORY), 0))
        self._kept_rates = np.full((2, 0), np.nan)  # short view of the earlier run
        self._short = np.full((2, 0), np.nan)  # look-ups per second, miss rate
        self._rates: tuple[Floats, Floats, Flags] | None = None  # until something changes
        self._open: int | None = None  # the oldest cell that is not taken in

    def grow(self, rows_count: int) -> None:
        """Make room for so many rows."""
        more = rows_count - len(self._taken_count)
        if more <= 0:
            return
        self._rates = None
        self._pending = np.concatenate([self._pending, np.zeros((2, more, self._pending_count))], axis=1)
        self._tainted = np.concatenate([self._tainted, np.zeros((more, self._pending_count), np.bool_)])
        empty = np.full((len(_HISTORY), more, self._cells_count), np.nan)
        self._history = np.concatenate([self._history, empty], axis=1)
        self._taken_count = np.concatenate([self._taken_count, np.zeros(more, np.int64)])
        self._reference = np.concatenate([self._reference, np.zeros((len(_HISTORY), more))], axis=1)
        self._kept_rates = np.concatenate([self._kept_rates, np.full((2, more), np.nan)], axis=1)
        self._short = np.concatenate([self._short, np.full((2, more), np.nan)], axis=1)

    def begin(self, row: int, tenant: str, pattern: str, now_s: float) -> None:
        """Row ``row`` is that pattern's from now on: nothing is usual yet, but what an earlier run kept."""
        self._rates = None
        self._pending[:, row] = 0
        self._tainted[row] = False
        self._history[:, row] = np.nan
        self._taken_count[row] = 0
        self._reference[:, row] = 0
        self._kept_rates[:, row] = np.nan
        self._short[:, row] = np.nan
        kept = self._kept.get((tenant, pattern))
        if kept is None or abs(now_s - kept.updated_s) > self._options.baseline_max_age_s:
            return
        self._taken_count[row] = max(round(kept.learned_s / self._options.baseline_cell_s), 1)
        cell_lookups = kept.reference_qps * self._options.baseline_cell_s
        self._reference[:, row] = kept.reference_qps, cell_lookups, cell_lookups * kept.reference_miss_rate
        self._kept_rates[:, row] = self._short[:, row] = kept.qps, kept.miss_rate

    def is_kept(self, row: int) -> bool:
        """Whether an earlier run kept what is usual for the row."""
        return not np.isnan(self._kept_rates[0, row])

    def restart(self) -> None:
        """Event time was set anew: what is pending is dropped, what is usual stays."""
        self._pending[:] = 0
        self._tainted[:] = False
        self._open = None

    def add(self, rows: Ints, ts_s: float, lookups: Floats, misses: Floats) -> None:
        """Add counts of n different rows at time ``ts_s``."""
        cell = self._cell(ts_s)
        if self._open is None:
            self._open = cell
        if cell >= self._open:  # else: late by less than the lateness, but its cell was skipped as empty
            self._pending[0, rows, cell % self._pending_count] += lookups
            self._pending[1, rows, cell % self._pending_count] += misses

    def taint(self, is_tainted: Flags, ts_s: float) -> None:
        """Do not take in the cell of time ``ts_s`` for the rows of ``is_tainted`` [rows]."""
        cell = self._cell(ts_s)
        if self._open is None or cell >= self._open:
            self._tainted[: len(is_tainted), cell % self._pending_count] |= is_tainted

    def close(self, now_s: float, born_s: Floats) -> bool:
        """Take in the cells that nothing more can come for; rows born within a cell wait. True: something changed."""
        if self._open is None:
            return False
        last = self._cell(now_s - self._options.lateness_s)
        changed = False
        while self._open < last:
            at = self._open % self._pending_count
            if self._pending[0, :, at].any():
                start_s = self._open * self._options.baseline_cell_s
                self._take_in(at, ~self._tainted[: len(born_s), at] & (born_s <= start_s))
                changed = True
            self._pending[:, :, at] = 0
            self._tainted[:, at] = False
            # with no look-ups pending anywhere, nothing is left to take in before `last`
            self._open = self._open + 1 if self._pending.any() else last
        if changed:
            self._update_short()
        return changed

    def rates(self) -> tuple[Floats, Floats, Flags]:
        """Usual look-ups per second and miss rate of each row, and whether these were learned long enough, [rows].

        Where a row is too quiet for a miss rate of its own, that of all learned rows together stands in, if higher.
        Rates are NaN where there are none.
        """
        if self._rates is None:
            self._rates = self._make_rates()
        return self._rates

    def _make_rates(self) -> tuple[Floats, Floats, Flags]:
        with np.errstate(invalid="ignore", divide="ignore"):
            reference_rate = self._reference[2] / self._reference[1]
        qps = np.fmin(self._short[0], np.where(self._taken_count > 0, self._reference[0], np.nan))
        rate = np.fmin(self._short[1], reference_rate)
        learned = self.learned()
        overall = self.overall_miss_rate(learned)
        looked_up = np.nansum(self._history[1], axis=1)
        is_sparse = (looked_up < _MIN_LOOKUPS_COUNT) & np.isnan(self._kept_rates[0])
        rate = np.where(is_sparse, np.fmax(rate, overall), rate)
        return qps, rate, learned & ~np.isnan(rate) & ~np.isnan(qps)

    def learned(self) -> Flags:
        """Rows that were learned for ``cold_start_s``, or by an earlier run, [rows]."""
        learned_s = self._taken_count * self._options.baseline_cell_s
        return np.asarray((learned_s >= self._options.cold_start_s) | ~np.isnan(self._kept_rates[0]))

    def merge(self, row: int, into: int) -> None:
        """From now on row ``into`` counts what ``row`` counts, too: expect its usual look-ups there as well."""
        usual = np.nanmean(self._history[:, row], axis=1)
        self._history[:, into] += usual[:, None]
        self._reference[:, into] += self._reference[:, row]
        self._kept_rates[0, into] += usual[0]
        self._update_short()

    def overall_miss_rate(self, learned: Flags) -> float:
        """The miss rate of all learned rows together, by their references; NaN where there is none."""
        lookups = float(self._reference[1][learned].sum())
        return float(self._reference[2][learned].sum()) / lookups if lookups > 0 else float("nan")

    def of(self, row: int) -> Baseline:
        """One row's baseline."""
        qps, rate, learned = self.rates()
        if not learned[row]:
            return Baseline(None, None, learned_s=self._learned_s(row))
        return Baseline(
            qps=float(qps[row]),
            miss_rate=float(rate[row]),
            short_qps=_number(self._short[0, row]),
            short_miss_rate=_number(self._short[1, row]),
            reference_qps=float(self._reference[0, row]),
            reference_miss_rate=self._reference_rate(row),
            learned_s=self._learned_s(row),
        )

    def to_row(self, row: int, tenant: str, pattern: str, now_s: float) -> BaselineRow | None:
        """One row's baseline to keep; None while there is none."""
        reference_rate = self._reference_rate(row)
        if not self.rates()[2][row] or reference_rate is None:
            return None
        short_rate = _number(self._short[1, row])
        return BaselineRow(
            tenant,
            pattern,
            float(self._short[0, row]),
            reference_rate if short_rate is None else short_rate,
            float(self._reference[0, row]),
            reference_rate,
            float(self._taken_count[row] * self._options.baseline_cell_s),
            now_s,
        )

    def _cell(self, ts_s: float) -> int:
        return math.floor(ts_s / self._options.baseline_cell_s + 1e-9)

    def _learned_s(self, row: int) -> float:
        return min(float(self._taken_count[row] * self._options.baseline_cell_s), self._options.baseline_s)

    def _reference_rate(self, row: int) -> float | None:
        lookups = self._reference[1, row]
        return float(self._reference[2, row] / lookups) if lookups > 0 else None

    def _take_in(self, at: int, is_taken: Flags) -> None:
        rows = np.flatnonzero(is_taken)
        lookups, misses = self._pending[0, rows, at], self._pending[1, rows, at]
        values = np.stack([lookups / self._options.baseline_cell_s, lookups, misses])
        count = self._taken_count[rows]
        self._history[:, rows, count % self._cells_count] = values
        steps_count = self._options.reference_s / self._options.baseline_cell_s
        # a cell with more misses than usual counts as little from the beginning as it does later, and no more of its
        # misses than are just not too many: a ramp may have begun
        usual = self._reference[2, rows] / np.maximum(self._reference[1, rows], 1.0) * lookups
        most = _HIGH_RATIO * usual + _HIGH_SIGMAS * np.sqrt(usual + 1)
        is_high = (misses > most) & (count > 0)
        values[2, is_high] = most[is_high]
        weight = 1 / np.where(is_high, steps_count, np.minimum(count + 1, steps_count))
        self._reference[:, rows] += weight * (values - self._reference[:, rows])
        self._taken_count[rows] = count + 1

    def _update_short(self) -> None:
        self._rates = None
        qps, lookups, misses = self._history
        taken = np.isfinite(qps).sum(axis=1)
        own = np.flatnonzero(taken * self._options.baseline_cell_s >= self._options.cold_start_s)
        some = np.flatnonzero((taken > 0) & np.isnan(self._kept_rates[0]))
        for rows in (own, np.setdiff1d(some, own)):
            if len(rows):
                self._short[0, rows] = np.nanmedian(qps[rows], axis=1)
                self._short[1, rows] = _middle_rates(lookups[rows], misses[rows])


def _middle_rates(lookups: Floats, misses: Floats) -> Floats:
    """Misses over look-ups in the middle half of the cells with look-ups, by miss rate: [rows] of [rows, cells]."""
    has_some = lookups > 0
    rate = np.where(has_some, misses / np.where(has_some, lookups, 1.0), np.inf)
    order = np.argsort(rate, axis=1)
    count = has_some.sum(axis=1)[:, None]
    rank = np.arange(rate.shape[1])[None, :]
    middle = (rank >= count // 4) & (rank < count - count // 4)
    total = np.where(middle, np.take_along_axis(lookups, order, axis=1), 0.0).sum(axis=1)
    missed = np.where(middle, np.take_along_axis(misses, order, axis=1), 0.0).sum(axis=1)
    return np.where(total > 0, missed / np.where(total > 0, total, 1.0), np.nan)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
