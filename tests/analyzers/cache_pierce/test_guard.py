"""What the guard lets pass."""

from __future__ import annotations

import pytest

from spikeprof.analyzers.cache_pierce.guard import Guard, Limits
from spikeprof.analyzers.cache_pierce.known import KnownKeys
from spikeprof.analyzers.cache_pierce.model import GuardCounts
from spikeprof.profiler.errors import UsageError

KNOWN = KnownKeys(["user:1", "user:2"], 1000)


def test_off_by_default() -> None:
    guard = Guard(KNOWN)
    guard.watch(frozenset({"user:{n}"}))
    assert [guard.verdict(f"user:{i}", 0.0) for i in range(50)] == ["pass"] * 50
    assert guard.counts == GuardCounts(passed_count=50)


def test_keys_that_exist_nowhere_are_answered_at_once() -> None:
    guard = Guard(KNOWN, Limits(answer_nil=True))
    assert [guard.verdict(key) for key in ("user:1", "user:999", "other")] == ["pass", "nil", "nil"]
    assert guard.counts == GuardCounts(1, 2, 0)
    guard.known = None  # nothing can be ruled out any more
    assert guard.verdict("other") == "pass"


def test_a_pattern_under_an_alert_is_limited_by_a_bucket() -> None:
    guard = Guard(None, Limits(lookups_per_s=2.0))
    assert guard.verdict("user:5", 0.0) == "pass"
    guard.watch(frozenset({"user:{n}"}))
    assert [guard.verdict(f"user:{i}", 10.0) for i in range(4)] == ["pass", "pass", "limit", "limit"]
    assert guard.verdict("cart:5", 10.0) == "pass"
    assert [guard.verdict("user:9", at_s) for at_s in (10.25, 10.5, 10.75, 11.0)] == ["limit", "pass", "limit", "pass"]
    assert guard.verdict("user:9", 5.0) == "limit"  # a clock that goes back gives nothing
    guard.watch(frozenset())
    assert guard.verdict("user:9", 11.0) == "pass"
    assert guard.counts.limited_count == 5


@pytest.mark.parametrize("watched", ["user:{any}", "{any}"])
def test_wider_alerts_hold_for_their_keys(watched: str) -> None:
    guard = Guard(None, Limits(lookups_per_s=1.0))
    guard.watch(frozenset({watched}))
    assert [guard.verdict(key, 0.0) for key in ("user:abc", "user:9")] == ["pass", "limit"]


def test_watching_again_does_not_fill_the_bucket() -> None:
    guard = Guard(None, Limits(lookups_per_s=1.0))
    guard.watch(frozenset({"{any}"}))
    assert guard.verdict("a", 0.0) == "pass"
    guard.watch(frozenset({"{any}", "b:{n}"}))
    assert guard.verdict("a", 0.0) == "limit"


def test_known_keys_are_never_limited() -> None:
    guard = Guard(KNOWN, Limits(lookups_per_s=1.0))
    guard.watch(frozenset({"user:{n}"}))
    assert [guard.verdict(key, 0.0) for key in ("user:7", "user:1", "user:8")] == ["pass", "pass", "limit"]


def test_keys_being_written_are_known_and_doubt_lets_all_pass() -> None:
    guard = Guard(KnownKeys(["a"], 3), Limits(answer_nil=True))
    assert guard.verdict("b") == "nil"
    guard.wrote(["b"])
    assert [guard.verdict(key) for key in "abc"] == ["pass", "pass", "nil"]
    guard.wrote(None)  # a script
    assert guard.verdict("c") == "pass"
    guard.known = KnownKeys(["a"], 3)
    assert guard.verdict("c") == "nil"
    guard.wrote(["b", "c", "d"])  # the filter has no room for the last
    assert guard.verdict("d") == "pass"
    guard.known = None
    guard.wrote(["e"])
    assert guard.verdict("e") == "pass"


def test_a_limit_is_above_0() -> None:
    with pytest.raises(UsageError, match="lookups_per_s is 0"):
        Limits(lookups_per_s=0)
