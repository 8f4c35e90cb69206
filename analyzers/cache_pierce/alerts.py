"""Alerts made of decisions: evidence, samples of keys, what is active, each once."""

from __future__ import annotations

import uuid
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.analyzers.cache_pierce.decide import unfilled
from spikeprof.analyzers.cache_pierce.evidence import Facts
from spikeprof.analyzers.cache_pierce.model import (
    EVERY,
    Alert,
    Baseline,
    Evidence,
    Kind,
    Rule,
    Severity,
    Share,
)
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.analyzers.cache_pierce.windows import Column
from spikeprof.profiler.lookups import Lookups

Ints = npt.NDArray[np.int64]

_TOP_COUNT = 5
_SEVERITY: dict[Rule, Severity] = {"penetration": "alert", "hot-missing-key": "warn", "illegal-keys": "critical"}


class Samples:
    """A few of the newest keys that missed and that nothing speaks for, by row."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._keys: dict[int, tuple[str, ...]] = {}

    def of(self, row: int) -> tuple[str, ...]:
        """Keys of one row, the newest first."""
        return self._keys.get(row, ())

    def forget(self, row: int) -> None:
        """The row is another pattern's now."""
        self._keys.pop(row, None)

    def take(self, batch: Lookups, facts: Facts, rows: Ints, look_ups: Ints) -> None:
        """Take samples of m pairs of row and look-up; where KnownKeys rules keys out, of these."""
        telling = facts.nowhere if facts.nowhere.any() else ~batch.hits & ~facts.existing
        found = np.flatnonzero(telling[look_ups])
        if not len(found):
            return
        found = found[np.argsort(rows[found], kind="stable")]
        ends = np.flatnonzero(np.diff(rows[found], append=-1)) + 1
        starts = np.concatenate([[0], ends[:-1]])
        count = self._options.sample_keys_count
        newest = [found[max(first, last - count) : last][::-1] for first, last in zip(starts, ends, strict=True)]
        places = look_ups[np.concatenate(newest)]
        texts = iter(batch.keys.take(pa.array(places)).to_pylist())
        for chosen in newest:
            row = int(rows[chosen[0]])
            keys = [next(texts)[: self._options.sample_key_chars_count] for _ in chosen]
            self._keys[row] = tuple(dict.fromkeys([*keys, *self.of(row)]))[:count]


class ActiveAlerts:
    """What was raised and has not recovered: one alert for each rule and place."""

    def __init__(self) -> None:
        self._active: dict[tuple[Rule, int], Alert] = {}

    def all(self) -> tuple[Alert, ...]:
        """All that is active, the oldest first."""
        return tuple(self._active.values())

    def raise_alert(
        self,
        rule: Rule,
        place: int,
        names: tuple[str, str],
        times_s: tuple[float, float],
        evidence: tuple[Evidence, ...],
        keys: tuple[str, ...],
        top: tuple[Share, ...] = (),
    ) -> Alert:
        """A new alert at ``place`` (a row, or a key's hash); ``times_s``: now, and since when."""
        now_s, since_s = times_s
        alert = Alert(
            "raised", _SEVERITY[rule], rule, *names, now_s, evidence, keys, since_s, uuid.uuid4().hex[:12], top
        )
        self._active[rule, place] = alert
        return alert

    def update(
        self,
        kind: Kind,
        rule: Rule,
        place: int,
        now_s: float,
        evidence: tuple[Evidence, ...],
        keys: tuple[str, ...] = (),
    ) -> Alert:
        """The active alert at ``place`` has got worse, or is over."""
        alert = self._active.pop((rule, place))
        alert = replace(alert, kind=kind, ts_s=now_s, evidence=evidence, keys=keys or alert.keys)
        if kind == "escalated":
            alert = replace(alert, severity="critical")
            self._active[rule, place] = alert
        return alert

    def of(self, rule: Rule, place: int) -> Alert:
        """The active alert at ``place``."""
        return self._active[rule, place]


class IllegalKeys:
    """Look-ups per second of keys that exist nowhere, over all tenants and patterns: raised and recovered."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._passed: list[tuple[int, bool]] = []  # the last windows: cell, whether it passed
        self._last_warm = 0
        self.is_active = False
        self.since_s = 0.0

    def restart(self, cell: int) -> None:
        """Event time was set to ``cell``."""
        self._passed.clear()
        self._last_warm = cell

    def decide(self, cell: int, per_s: float) -> Kind | None:
        """Take in the window that ends with ``cell``; what follows from it."""
        options = self._options
        passed = per_s >= options.illegal_per_s
        recent = [(at, was) for at, was in self._passed if cell - options.raise_of_cells_count < at != cell]
        self._passed = [*recent, (cell, passed)]
        if per_s >= options.recover_ratio * options.illegal_per_s:
            self._last_warm = max(self._last_warm, cell)
        hot = [at for at, was in self._passed if was]
        if not self.is_active and len(hot) >= options.raise_cells_count:
            self.is_active = True
            self.since_s = (min(hot) + 1) * options.cell_s - options.window_s
            return "raised"
        if self.is_active and (cell - self._last_warm) * options.cell_s >= options.recover_s:
            self.is_active = False
            return "recovered"
        return None


def penetration_evidence(
    sums: npt.NDArray[np.float64],
    limits: tuple[float, float],
    baseline: Baseline,
    distinct: tuple[float, int],
    options: Options,
) -> tuple[Evidence, ...]:
    """The numbers behind an alert of one row: of ``sums`` [columns], ``limits`` of look-ups per second and miss rate.

    ``distinct``: different keys (estimated), of so many look-ups.
    """
    lookups, misses = float(sums[Column.LOOKUPS]), float(sums[Column.MISSES])
    open_count = float(unfilled(sums))
    found = [
        Evidence("lookups_per_s", lookups / options.window_s, limits[0], baseline.qps, "qps_ratio"),
        Evidence("miss_share", _share(misses, lookups), limits[1], baseline.miss_rate, "miss_rate_ratio"),
        Evidence("unfilled_share", _share(open_count, misses), options.min_unfilled_share, None, "min_unfilled_share"),
        Evidence("unfilled_per_s", open_count / options.window_s),
        Evidence("young_hits_per_s", float(sums[Column.YOUNG_HITS]) / options.window_s, basis="estimated"),
        Evidence("first_seen_share", _share(float(sums[Column.FIRST_SEEN]), misses), basis="estimated"),
        Evidence("repeated_share", _share(float(sums[Column.REPEATED]), misses)),
        Evidence("distinct_share", min(_share(*distinct), 1.0), basis="estimated"),
    ]
    if sums[Column.NOWHERE] > 0:
        found.append(Evidence("nowhere_share", _share(float(sums[Column.NOWHERE]), misses), basis="estimated"))
    return tuple(found)


def hot_key_evidence(lookups: int, misses: int, options: Options) -> tuple[Evidence, ...]:
    """The numbers behind an alert about one key, over the last ``hot_key_s``."""
    return (
        Evidence("miss_share", _share(misses, lookups), options.hot_key_miss_rate, None, "hot_key_miss_rate"),
        Evidence("lookups_count", lookups, options.hot_key_min_lookups_count, None, "hot_key_min_lookups_count"),
    )


def lasted(alert: Alert, now_s: float) -> Evidence:
    """How long an alert that is over has lasted."""
    return Evidence("lasted_s", now_s - alert.since_s)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def top_shares(names: list[tuple[str, str]], per_s: npt.NDArray[np.float64]) -> tuple[Share, ...]:
    """The places with most of it: ``per_s`` [n] of n names."""
    order = np.argsort(-per_s, kind="stable")[:_TOP_COUNT]
    return tuple(Share(names[at][0], names[at][1], float(per_s[at])) for at in order.tolist() if per_s[at] > 0)


#: Where an alert is about everything.
EVERYWHERE = (EVERY, EVERY)
