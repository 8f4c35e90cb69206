"""What is remembered of keys: bounds and errors as stated."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from spikeprof.analyzers.cache_pierce.known import KnownKeys
from spikeprof.analyzers.cache_pierce.sketch import (
    HIT_FALSE_POSITIVE_SHARE,
    DistinctCounts,
    HitMemory,
    KeyHash,
    MissMemory,
    RoughCounts,
)
from spikeprof.profiler.errors import UsageError


def hashes(first: int, last: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 2**64, last, np.uint64)[first:]


def test_hashes_differ_between_secrets_only() -> None:
    keys = pa.array(["a", "b", "a"])
    one, other = KeyHash(), KeyHash()
    assert one(keys).tolist() == one(keys).tolist()
    assert one(keys)[0] == one(keys)[2] != one(keys)[1]
    assert one(keys)[0] != other(keys)[0]


@pytest.mark.parametrize("count", [0, 1, 50, 1000, 5000, 100_000])
def test_distinct_counts_are_within_four_standard_errors(count: int) -> None:
    sketch = DistinctCounts()
    sketch.grow(3)
    keys = hashes(0, count)
    rows = np.ones(2 * count, np.int64)
    sketch.add(rows, np.concatenate([keys, keys]))  # each twice
    assert sketch.count(1) == pytest.approx(count, rel=4 * 0.033, abs=0.5)
    assert sketch.count(0) == sketch.count(2) == 0
    assert sketch.lookups_count.tolist() == [0, 2 * count, 0]


def test_distinct_counts_keep_two_generations() -> None:
    sketch = DistinctCounts()
    sketch.grow(1)
    for at in range(3):
        sketch.add(np.zeros(100, np.int64), hashes(0, 300)[at * 100 : at * 100 + 100])
        sketch.turn()
    assert sketch.lookups_count[0] == 100  # the newest is empty, the one before has a hundred


def test_hits_are_remembered_and_the_oldest_forgotten() -> None:
    memory = HitMemory(1000)
    keys = hashes(0, 3000)
    for at in range(0, 3000, 100):
        memory.add(keys[at : at + 100])
    assert memory.contains(keys[2000:]).all()  # the last 1,000 always
    assert memory.contains(keys[:500]).mean() < 0.05
    others = np.random.default_rng(8).integers(0, 2**64, 20_000, np.uint64)
    assert memory.contains(others).mean() < 3 * HIT_FALSE_POSITIVE_SHARE


def test_misses_in_a_row_stay_over_random_keys() -> None:
    memory = MissMemory(4)
    repeated = np.array([1], np.uint64)
    memory.store(repeated, np.array([5], np.int32), np.array([100.0]), np.array([104.0]))
    flood = np.arange(2, 42, dtype=np.uint64)  # ten for each place
    ones = np.ones(40)
    memory.store(flood, ones.astype(np.int32), ones * 105, ones * 105)
    past = memory.past(repeated)
    assert (past.is_there[0], past.misses_count[0], past.missing_since_s[0]) == (True, 5, 100.0)
    memory.store(flood, ones.astype(np.int32), ones * 120, ones * 120)  # more than 10 s after its last miss
    assert not memory.past(repeated).is_there[0]


def test_a_hit_ends_the_misses_of_a_key_only() -> None:
    memory = MissMemory(8)
    key, other = np.array([3], np.uint64), np.array([11], np.uint64)  # of one place
    memory.store(key, np.array([2], np.int32), np.array([1.0]), np.array([2.0]))
    memory.store(other, np.array([0], np.int32), np.array([3.0]), np.array([3.0]))  # a hit takes no place
    assert memory.past(key).misses_count[0] == 2
    memory.store(key, np.array([0], np.int32), np.array([3.0]), np.array([3.0]))
    assert memory.past(key).misses_count[0] == 0


def test_rough_counts_are_never_too_few() -> None:
    counts = RoughCounts()
    texts = [f"pattern {i}" for i in range(2000)]
    times = np.arange(2000) % 7 + 1
    seen = counts.add(texts, times)
    assert (seen >= times).all()
    assert (seen == times).mean() > 0.99
    assert (counts.add(texts[:5], times[:5]) >= 2 * times[:5]).all()


def test_rough_counts_of_many_texts_do_not_add_up() -> None:
    counts = RoughCounts()
    for block in range(40):
        seen = counts.add([f"{block} {i}" for i in range(20_000)], np.ones(20_000, np.int64))
    assert (seen >= 20).mean() < 0.02  # which is when a pattern gets a row


def test_known_keys_are_never_denied_and_others_seldom_taken_for_known() -> None:
    known = KnownKeys((f"user:{i}" for i in range(50_000)), 50_000, 0.001)
    assert known.contains(pa.array([f"user:{i}" for i in range(50_000)])).all()
    wrong = known.contains(pa.array([f"other:{i}" for i in range(100_000)])).mean()
    assert wrong < 2 * known.false_positive_share
    assert "user:7" in known
    assert known.added_count == pytest.approx(50_000, rel=0.001)


def test_known_keys_take_no_more_than_they_have_room_for() -> None:
    known = KnownKeys(["a", "b"], 3)
    known.learn(["a", "c", "d", "e"])
    assert (known.added_count, known.not_taken_count) == (3, 2)
    assert "c" in known


@pytest.mark.parametrize(("capacity", "share"), [(0, 0.1), (10, 0.0), (10, 1.0)])
def test_known_keys_refuse_what_cannot_be(capacity: int, share: float) -> None:
    with pytest.raises(UsageError, match="capacity_count"):
        KnownKeys([], capacity, share)
