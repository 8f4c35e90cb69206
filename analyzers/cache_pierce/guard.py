"""Guard: what a proxy may answer without asking the cache."""

from __future__ import annotations

from dataclasses import dataclass

from spikeprof.analyzers.cache_pierce.known import KnownKeys
from spikeprof.analyzers.cache_pierce.model import GuardCounts, Verdict


@dataclass(frozen=True, slots=True)
class Limits:
    """What to hold back. Both are off by default."""

    answer_nil: bool = False  # for keys that KnownKeys says exist nowhere
    lookups_per_s: float | None = None  # of each pattern under an alert; more are limited


class Guard:
    """Protection for a proxy."""

    def __init__(self, known: KnownKeys | None = None, limits: Limits = Limits()) -> None:
        self.known = known
        raise NotImplementedError

    def watch(self, patterns: frozenset[str]) -> None:
        """The patterns under an alert: those that ``lookups_per_s`` holds for."""
        raise NotImplementedError

    def verdict(self, key: str, now_s: float | None = None) -> Verdict:
        """What to do with one look-up made at ``now_s`` (default: now, on the monotonic clock)."""
        raise NotImplementedError

    @property
    def counts(self) -> GuardCounts:
        """What was done so far."""
        raise NotImplementedError
