"""The rule of penetration, for all rows at once: limits from baselines, windows over them, states with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.cache_pierce.baseline import Baselines
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.analyzers.cache_pierce.series import PATTERN
from spikeprof.analyzers.cache_pierce.windows import Column

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_NEVER = np.iinfo(np.int64).min // 2
_SETTLE_WINDOWS_COUNT = 3  # after raising: the worst of so many is what escalation is held against


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows that changed state with one cell."""

    raised: list[int]
    escalated: list[int]
    recovered: list[int]


def miss_rate_limit(baseline: Floats, options: Options) -> Floats:
    """The miss rate to be passed over each baseline.

    ``miss_rate_ratio`` times the baseline (floored). Where that leaves less room than the hit rate falling to one
    part in ``miss_rate_ratio`` (for 3: above a baseline of 1/4), the latter: three times 0.4 would never be reached.
    """
    usual = np.maximum(baseline, options.baseline_miss_rate_floor)
    ratio = options.miss_rate_ratio
    return np.asarray(np.maximum(np.minimum(ratio * usual, 1 - (1 - usual) / ratio), options.min_miss_rate))


def unfilled(sums: Floats) -> Floats:
    """Misses that nothing speaks for, of sums [columns, …]."""
    return np.asarray(np.maximum(sums[Column.MISSES] - sums[Column.EXISTING] - sums[Column.FILLED], 0.0))


class Decider:
    """States of all rows."""

    def __init__(self, options: Options) -> None:
        self._options = options
        # as many cells as may be decided again because of late look-ups, and those before that count with them
        self._cells_count = options.lateness_cells_count + options.raise_of_cells_count + 2
        self.alerting = np.zeros(0, np.bool_)
        self.since_s = np.zeros(0)  # when the row entered its state
        self._passed = np.zeros((0, self._cells_count), np.bool_)  # window ending with each cell passed all limits
        self._newest = _NEVER
        self._first_passed = np.zeros(0, np.int64)
        self._last_warm = np.full(0, _NEVER, np.int64)
        self._raised_cell = np.full(0, _NEVER, np.int64)
        self._worst_per_s = np.zeros(0)
        self._has_escalated = np.zeros(0, np.bool_)
        self.qps_limit = np.zeros(0)
        self.rate_limit = np.zeros(0)
        self._may_raise = np.zeros(0, np.bool_)
        self._is_pattern = np.zeros(0, np.bool_)

    def grow(self, rows_count: int) -> None:
        """Make room for so many rows."""
        more = rows_count - len(self.alerting)
        if more <= 0:
            return
        self._passed = np.concatenate([self._passed, np.zeros((more, self._cells_count), np.bool_)])
        for name, value in self._fresh().items():
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.full(more, value, old.dtype)]))

    def begin(self, row: int, level: int, now_s: float) -> None:
        """Row ``row`` is a new pattern's."""
        self._passed[row] = False
        for name, value in self._fresh().items():
            getattr(self, name)[row] = value
        self.since_s[row] = now_s
        self._is_pattern[row] = level == PATTERN

    @staticmethod
    def _fresh() -> dict[str, float | int | bool]:
        return {
            "alerting": False,
            "since_s": 0.0,
            "_first_passed": 0,
            "_last_warm": _NEVER,
            "_raised_cell": _NEVER,
            "_worst_per_s": 0.0,
            "_has_escalated": False,
            "qps_limit": np.inf,
            "rate_limit": np.inf,
            "_may_raise": False,
            "_is_pattern": False,
        }

    def restart(self, cell: int) -> None:
        """Event time was set to ``cell``: alerts stay, and must be quiet for ``recover_s`` from now."""
        self._passed[:] = False
        self._newest = cell
        self._last_warm = np.minimum(self._last_warm, cell)
        self._raised_cell = np.minimum(self._raised_cell, cell)
        self._last_warm[self.alerting] = cell

    def set_limits(self, baselines: Baselines, born_s: Floats, now_s: float) -> None:
        """Limits of all rows from their baselines. A row that is alerting keeps those that it was raised with."""
        count = len(born_s)
        qps, rate, learned = baselines.rates()
        overall = baselines.overall_miss_rate(learned)
        options = self._options
        age_s = now_s - born_s
        # an older row that is not learned: what it does was odd from its first look-up on
        is_odd = ~learned & (age_s >= options.cold_start_s + options.lateness_s + 2 * options.baseline_cell_s)
        rate = np.where(learned, rate, overall)
        qps_limit = np.maximum(options.qps_ratio * np.where(np.isnan(qps), 0.0, qps), options.min_qps)
        rate_limit = np.where(np.isnan(rate), np.inf, miss_rate_limit(np.where(np.isnan(rate), 1.0, rate), options))
        change = ~self.alerting[:count]
        self.qps_limit[:count][change] = qps_limit[change]
        self.rate_limit[:count][change] = rate_limit[change]
        self._may_raise[:count] = learned | (is_odd & self._is_pattern[:count])
        self._may_raise[0] = False  # everything together: for what is illegal, not for this rule

    def passed(self, sums: Floats, ratio: float = 1.0) -> Flags:
        """Whether the window ``sums`` [columns, rows] passes ``ratio`` of the limits, [rows]."""
        options = self._options
        lookups, misses = sums[Column.LOOKUPS], sums[Column.MISSES]
        count = len(lookups)
        return np.asarray(
            (lookups > ratio * self.qps_limit[:count] * options.window_s)
            & (misses > np.minimum(ratio * self.rate_limit[:count], 1.0) * lookups)
            & (misses >= options.min_misses_count * ratio)
            & (unfilled(sums) >= options.min_unfilled_share * misses)
            & (unfilled(sums) > options.young_hits_ratio * sums[Column.YOUNG_HITS])
        )

    def decide(self, cell: int, sums: Floats, parents: Ints) -> tuple[Moves, Flags]:
        """Take in the window that ends with ``cell`` (again, where late ones came); moves, and which rows passed."""
        options = self._options
        self._move_to(cell)
        passed = self.passed(sums)
        count = len(passed)
        at = cell % self._cells_count
        self._passed[:count, at] = passed
        warm = self.passed(sums, options.recover_ratio)
        self._last_warm[:count][warm] = np.maximum(self._last_warm[:count][warm], cell)
        moves = Moves([], [], [])
        if passed.any():
            moves = Moves(self._raise(cell, passed, parents, sums), self._escalate(cell, sums), [])
        if self.alerting.any():
            quiet_cells = options.recover_s / options.cell_s
            over = self.alerting & (self._newest - self._last_warm >= quiet_cells)
            moves.recovered.extend(np.flatnonzero(over).tolist())
            for row in moves.recovered:
                self.alerting[row] = False
                self.since_s[row] = (cell + 1) * options.cell_s
        return moves, passed | self.alerting[:count]

    def suspect(self) -> Flags:
        """Rows of which one of the last windows passed."""
        return np.asarray(self._passed[:, self._recent(self._newest)].any(axis=1) & ~self.alerting)

    def first_passed_s(self, row: int) -> float:
        """When the look-ups that raised the row's alert began."""
        return float((self._first_passed[row] + 1) * self._options.cell_s - self._options.window_s)

    def _recent(self, cell: int) -> Ints:
        return np.arange(cell - self._options.raise_of_cells_count + 1, cell + 1) % self._cells_count

    def _move_to(self, cell: int) -> None:
        if cell - self._newest > self._cells_count:
            self._passed[:] = False
            self._newest = cell
        while self._newest < cell:
            self._newest += 1
            self._passed[:, self._newest % self._cells_count] = False

    def _raise(self, cell: int, passed: Flags, parents: Ints, sums: Floats) -> list[int]:
        count = len(passed)
        recent = self._recent(cell)
        often = self._passed[:count, recent].sum(axis=1)
        # a wider row waits until all of its windows passed: its pattern's own alert says more
        needed = np.where(self._is_pattern[:count], self._options.raise_cells_count, self._options.raise_of_cells_count)
        ripe = (often >= needed) & ~self.alerting[:count] & self._may_raise[:count]
        raised = []
        for row in np.flatnonzero(ripe & self._is_pattern[:count]).tolist():
            raised.append(row)
            self._start(row, cell, recent, sums)
        wider = np.flatnonzero(ripe & ~self._is_pattern[:count]).tolist()
        if wider:
            covered = self._covered(parents, count)
            for row in sorted(
                wider, key=lambda row: -int(parents[row])
            ):  # the narrower first: a tenant's parent is row 0
                if not covered[row]:
                    raised.append(row)
                    self._start(row, cell, recent, sums)
                    covered = self._covered(parents, count)
        return raised

    def _covered(self, parents: Ints, count: int) -> Flags:
        """Rows below which one is alerting."""
        covered = np.zeros(count, np.bool_)
        for row in np.flatnonzero(self.alerting[:count]).tolist():
            above = int(parents[row])
            while above >= 0:
                covered[above] = True
                above = int(parents[above])
        return covered

    def _start(self, row: int, cell: int, recent: Ints, sums: Floats) -> None:
        self.alerting[row] = True
        self.since_s[row] = (cell + 1) * self._options.cell_s
        self._first_passed[row] = cell - len(recent) + 1 + int(np.argmax(self._passed[row, recent]))
        self._raised_cell[row] = cell
        self._has_escalated[row] = False
        self._worst_per_s[row] = float(unfilled(sums)[row]) / self._options.window_s
        self._last_warm[row] = max(self._last_warm[row], cell)

    def _escalate(self, cell: int, sums: Floats) -> list[int]:
        count = sums.shape[1]
        per_s = unfilled(sums) / self._options.window_s
        settle_cells = _SETTLE_WINDOWS_COUNT * self._options.window_cells_count
        alerting = self.alerting[:count]
        settling = alerting & (cell - self._raised_cell[:count] <= settle_cells)
        self._worst_per_s[:count][settling] = np.maximum(self._worst_per_s[:count], per_s)[settling]
        worse = alerting & ~settling & ~self._has_escalated[:count]
        worse &= per_s >= self._options.escalate_ratio * self._worst_per_s[:count]
        self._has_escalated[:count] |= worse
        return [int(row) for row in np.flatnonzero(worse)]
