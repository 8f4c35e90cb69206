"""Which single keys are followed when there are more of them than room."""

from __future__ import annotations

from spikeprof.analyzers.cache_pierce.hotkeys import _REPLACED_MAX, HotKeys
from spikeprof.analyzers.cache_pierce.options import Options

NOW_S = 1e9


def full(room: int, misses: int) -> HotKeys:
    keys = HotKeys(Options(max_hot_keys_count=room))
    for number in range(room):
        keys.follow(number, keys.new(f"k{number}", "", "k{n}", NOW_S), misses, NOW_S)
    return keys


def followed(keys: HotKeys) -> set[str]:
    return {key.key for key, _, _ in keys.all()}


def test_the_least_missed_makes_room_for_one_that_is_missed_more() -> None:
    keys = full(3, 5)
    keys.follow(2, keys.new("k2", "", "k{n}", NOW_S), 9, NOW_S)  # it is followed already
    keys.follow(10, keys.new("same", "", "k{n}", NOW_S), 5, NOW_S)
    assert followed(keys) == {"k0", "k1", "k2"}
    keys.follow(11, keys.new("more", "", "k{n}", NOW_S), 6, NOW_S)
    assert len(followed(keys)) == 3
    assert "more" in followed(keys)


def test_a_flood_of_missing_keys_replaces_no_more_than_some_in_a_cell() -> None:
    keys = full(256, 1)
    for number in range(1000, 3000):
        keys.follow(number, keys.new(f"new{number}", "", "k{n}", NOW_S), 2, NOW_S)
    assert sum(key.startswith("new") for key in followed(keys)) == _REPLACED_MAX
    keys.move_to(NOW_S + 1.5)
    for number in range(3000, 5000):
        keys.follow(number, keys.new(f"new{number}", "", "k{n}", NOW_S), 2, NOW_S + 1.5)
    assert sum(key.startswith("new") for key in followed(keys)) == 2 * _REPLACED_MAX
