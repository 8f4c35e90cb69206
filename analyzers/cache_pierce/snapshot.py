"""How things stand: the rows of a Snapshot, from what the judge holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.cache_pierce.decide import unfilled
from spikeprof.analyzers.cache_pierce.judge import Judge
from spikeprof.analyzers.cache_pierce.known import KnownKeys
from spikeprof.analyzers.cache_pierce.model import Counts, HotKey, Level, Measure, PatternRow, Snapshot, State
from spikeprof.analyzers.cache_pierce.series import ALL, PATTERN, PREFIX, TENANT, SeriesBook
from spikeprof.analyzers.cache_pierce.windows import Column, EventClock

Floats = npt.NDArray[np.float64]

_LEVELS: dict[int, Level] = {PATTERN: "pattern", PREFIX: "prefix", TENANT: "tenant", ALL: "all"}
_NO_KNOWN = "no set of known keys is loaded"
_LOAD_KNOWN = "KnownKeys from a scan of the store, from a file, or learned"


def take_snapshot(
    judge: Judge, book: SeriesBook, clock: EventClock, known: KnownKeys | None, counted_late_count: int
) -> Snapshot:
    """How things stand now, the busiest row first; rows without any look-up are left out."""
    sums = judge.window()
    distinct, of_lookups = judge.distinct.counts(), judge.distinct.lookups_count
    ring = judge.windows.whole()
    states = _States(judge)
    rows = [
        _row(judge, states, at, sums[:, at], ring[:, at], (float(distinct[at]), int(of_lookups[at])), known is not None)
        for at in range(sums.shape[1])
        if judge.windows.totals[0, at] > 0 and not book.is_free(at)
    ]
    rows.sort(key=lambda row: -row.qps)
    window_s = judge.options.window_s
    illegal = float(sums[Column.NOWHERE, 0]) / window_s if sums.shape[1] else 0.0
    missing = Measure(None, _NO_KNOWN, _LOAD_KNOWN)
    return Snapshot(
        ts_s=None if judge.at is None else judge.now_s,
        rows=tuple(rows),
        hot_keys=tuple(
            HotKey(key.tenant, key.pattern, key.key, lookups, misses, key.alerting)
            for key, lookups, misses in judge.hot_keys.all()
        ),
        illegal_per_s=missing if known is None else Measure(illegal),
        known_keys_count=missing if known is None else Measure(float(known.added_count)),
        known_false_positive_share=missing if known is None else Measure(known.false_positive_share),
        counts=Counts(
            lookups_count=round(float(judge.windows.totals[0, :1].sum())),
            misses_count=round(float(judge.windows.totals[1, :1].sum())),
            late_count=clock.late_count + counted_late_count,
            early_count=clock.early_count,
            held_count=clock.held_count,
            bad_time_count=clock.bad_time_count,
            clock_jumps_count=clock.jumps_count,
            folded_away_count=book.folded_away_count,
        ),
        active=judge.active.all(),
    )


class _States:
    """States of all rows."""

    def __init__(self, judge: Judge) -> None:
        self._alerting = judge.decider.alerting
        self._suspect = judge.decider.suspect()
        self._learned = judge.baselines.rates()[2]

    def of(self, row: int) -> State:
        if self._alerting[row]:
            return "alerting"
        if not self._learned[row]:
            return "learning"
        return "suspect" if self._suspect[row] else "quiet"


def _row(
    judge: Judge,
    states: _States,
    at: int,
    sums: Floats,
    ring: Floats,
    distinct: tuple[float, int],
    has_known: bool,
) -> PatternRow:
    row, window_s = judge.book.rows[at], judge.options.window_s
    lookups, misses = float(sums[Column.LOOKUPS]), float(sums[Column.MISSES])
    mean_s, std_s = _ttl_spread(ring)
    has_keys = distinct[1] > 0

    def of_misses(value: float) -> float | None:
        return value / misses if misses > 0 and has_keys else None

    return PatternRow(
        tenant=row.tenant,
        pattern=row.pattern,
        qps=lookups / window_s,
        miss_rate=misses / lookups if lookups > 0 else None,
        misses_per_s=misses / window_s,
        distinct_count=min(distinct[0], distinct[1]) if has_keys else None,
        distinct_lookups_count=distinct[1],
        ttl_mean_s=mean_s,
        ttl_std_s=std_s,
        unfilled_share=of_misses(float(unfilled(sums))),
        first_seen_share=of_misses(float(sums[Column.FIRST_SEEN])),
        repeated_share=of_misses(float(sums[Column.REPEATED])),
        nowhere_share=of_misses(float(sums[Column.NOWHERE])) if has_known else None,
        baseline=judge.baselines.of(at),
        state=states.of(at),
        since_s=float(judge.decider.since_s[at]),
        lookups_count=round(float(judge.windows.totals[0, at])),
        misses_count=round(float(judge.windows.totals[1, at])),
        level=_LEVELS[row.level],
    )


def _ttl_spread(ring: Floats) -> tuple[float | None, float | None]:
    """Mean and standard deviation of the times to live in ``ring`` [columns], seconds."""
    count = float(ring[Column.TTLS])
    if count <= 0:
        return None, None
    mean_s = float(ring[Column.TTL_S]) / count
    variance = max(float(ring[Column.TTL_SQUARE_S2]) / count - mean_s**2, 0.0)
    return mean_s, variance**0.5
