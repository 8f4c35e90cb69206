"""Guard: what a proxy may answer without asking the cache. Off unless limits are given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spikeprof.analyzers.cache_pierce.known import KnownKeys
from spikeprof.analyzers.cache_pierce.model import GuardCounts, Verdict
from spikeprof.analyzers.cache_pierce.patterns import ANY, fold_one, prefix_of
from spikeprof.profiler.errors import UsageError


@dataclass(frozen=True, slots=True)
class Limits:
    """What to hold back. Both are off by default. Raises UsageError for a rate that is not above 0."""

    answer_nil: bool = False  # for keys that KnownKeys says exist nowhere
    lookups_per_s: float | None = None  # of each pattern under an alert; more are limited

    def __post_init__(self) -> None:
        if self.lookups_per_s is not None and not self.lookups_per_s > 0:
            raise UsageError(f"lookups_per_s is {self.lookups_per_s}: it must be above 0; None limits nothing")


@dataclass(slots=True)
class _Bucket:
    """Look-ups that a pattern has left: it fills up at the limit, to at most one second's worth, at least one."""

    left: float
    at_s: float


class Guard:
    """Protection for a proxy.

    ``known`` may be replaced at any time; where it is None no key is answered with nil, and none is exempt from limits.
    Where it is not complete, no key is answered with nil either.
    """

    def __init__(self, known: KnownKeys | None = None, limits: Limits | None = None) -> None:
        self.known = known
        self.limits = limits or Limits()
        self._buckets: dict[str, _Bucket] = {}
        self._counts = GuardCounts()

    def watch(self, patterns: frozenset[str]) -> None:
        """The patterns under an alert, as alerts name them: those that ``lookups_per_s`` holds for."""
        most = max(self.limits.lookups_per_s or 0.0, 1.0)
        self._buckets = {pattern: self._buckets.get(pattern) or _Bucket(most, float("-inf")) for pattern in patterns}

    def wrote(self, keys: Sequence[str] | None) -> None:
        """Keys are being written: they are known from now on. None: which ones cannot be told."""
        if self.known is None:
            return
        if keys is None:
            self.known.doubt()
        else:
            self.known.learn(keys)

    def verdict(self, key: str, now_s: float | None = None) -> Verdict:
        """What to do with one look-up made at ``now_s`` (default: now, on the monotonic clock).

        ``nil``: answer that there is no such key. ``limit``: refuse it; keys that are known are never limited.
        """
        verdict = self._decide(key, now_s)
        field = {"pass": "passed_count", "nil": "nil_count", "limit": "limited_count"}[verdict]
        self._counts = replace(self._counts, **{field: getattr(self._counts, field) + 1})
        return verdict

    @property
    def counts(self) -> GuardCounts:
        """What was done so far."""
        return self._counts

    def _decide(self, key: str, now_s: float | None) -> Verdict:
        if self.known is not None and (self.limits.answer_nil or self._buckets):
            if key in self.known:
                return "pass"
            if self.limits.answer_nil and self.known.is_complete:
                return "nil"
        per_s = self.limits.lookups_per_s
        if per_s is None or not self._buckets:
            return "pass"
        pattern = fold_one(key)
        bucket = next(
            (self._buckets[name] for name in (pattern, prefix_of(pattern) + ANY, ANY) if name in self._buckets), None
        )
        if bucket is None:
            return "pass"
        now_s = time.monotonic() if now_s is None else now_s
        passed_s = max(now_s - bucket.at_s, 0.0)
        bucket.left = min(bucket.left + passed_s * per_s, max(per_s, 1.0))
        bucket.at_s = now_s
        if bucket.left < 1:
            return "limit"
        bucket.left -= 1
        return "pass"
