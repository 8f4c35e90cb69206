"""Event time: cells, sums, late and early look-ups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.analyzers.cache_pierce.windows import Column, EventClock, Windows
from spikeprof.profiler.errors import UsageError
from spikeprof.profiler.lookups import Lookups, lookups

OPTIONS = Options()  # cells of 0.25 s, 5 s late, 30 s ahead, 32 agree


def at(*ts_s: float) -> Lookups:
    return lookups(list(ts_s), ["k"] * len(ts_s), [True] * len(ts_s))


def test_sums_over_cells_by_hand() -> None:
    windows = Windows(4)
    windows.grow(2)
    windows.restart(10)
    for cell, lookups_count in ((10, 1.0), (11, 2.0), (12, 4.0), (13, 8.0), (14, 16.0)):
        windows.move_to(cell)
        counts = np.zeros((len(Column), 1))
        counts[Column.LOOKUPS] = lookups_count
        windows.add(np.array([1]), cell, counts)
    assert windows.sums(14, 2)[Column.LOOKUPS].tolist() == [0, 24]
    assert windows.sums(13, 3)[Column.LOOKUPS].tolist() == [0, 14]
    assert windows.whole()[Column.LOOKUPS].tolist() == [0, 30]  # cell 10 has left
    assert windows.totals[0].tolist() == [0, 31]
    windows.move_to(100)
    assert windows.sums(100, 4)[Column.LOOKUPS].tolist() == [0, 0]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=40), st.integers(1, 6))
def test_sums_are_those_of_the_cells(moves: list[tuple[int, int]], width: int) -> None:
    windows, kept, cell = Windows(8), {}, 100
    windows.grow(1)
    windows.restart(cell)
    for step, count in moves:
        cell += step
        windows.move_to(cell)
        counts = np.zeros((len(Column), 1))
        counts[Column.LOOKUPS] = count
        windows.add(np.array([0]), cell, counts)
        kept[cell] = kept.get(cell, 0) + count
    expected = sum(count for at_cell, count in kept.items() if cell - width < at_cell <= cell)
    assert windows.sums(cell, width)[Column.LOOKUPS, 0] == expected


def test_out_of_order_look_ups_are_sorted_and_late_ones_counted() -> None:
    clock = EventClock(OPTIONS)
    assert clock.sift(at(100.0, 102.0, 101.0)).ts_s.tolist() == [100, 101, 102]
    assert clock.sift(at(110.0)).ts_s.tolist() == [110]
    assert clock.sift(at(105.1, 104.9, 110.2)).ts_s.tolist() == [105.1, 110.2]  # 110 less 5
    assert (clock.late_count, clock.cell) == (1, 440)


def test_a_first_block_has_no_late_ones() -> None:
    clock = EventClock(OPTIONS)
    assert len(clock.sift(at(*np.arange(0.0, 600.0, 10.0)))) == 60


def test_times_that_are_none_are_counted() -> None:
    clock = EventClock(OPTIONS)
    assert len(clock.sift(at(float("nan"), float("inf"), 5.0, 1e300))) == 1
    assert clock.bad_time_count == 3


def test_one_from_the_future_waits_and_is_dropped_in_the_end() -> None:
    clock = EventClock(OPTIONS)
    usual = [100 + i / 10 for i in range(50)]
    assert len(clock.sift(at(*usual, 4e9))) == 50
    assert clock.held_count == 1
    assert clock.sift(at(105.5)).ts_s.tolist() == [105.5]
    for start in range(0, 400, 20):
        clock.sift(at(*(106 + start + i / 2 for i in range(40))))
    assert (clock.held_count, clock.late_count, clock.jumps_count) == (1, 0, 0)
    assert clock.finish() is not None


def test_after_a_pause_enough_look_ups_agree() -> None:
    clock = EventClock(OPTIONS)
    clock.sift(at(100.0))
    assert len(clock.sift(at(*(5000 + i / 100 for i in range(20))))) == 0
    assert clock.held_count == 20
    assert len(clock.sift(at(*(5001 + i / 100 for i in range(20))))) == 40
    assert (clock.held_count, clock.jumps_count) == (0, 1)


def test_time_set_back_is_followed_once_enough_agree() -> None:
    clock = EventClock(OPTIONS)
    clock.sift(at(5000.0))
    assert len(clock.sift(at(*(100 + i / 10 for i in range(20))))) == 0
    assert (clock.late_count, clock.is_set_back) == (20, False)
    assert len(clock.sift(at(*(102 + i / 10 for i in range(20))))) == 20
    assert clock.is_set_back
    assert clock.cell == int(103.9 / 0.25)


def test_a_followed_clock_is_not_set_back_by_late_look_ups() -> None:
    clock = EventClock(OPTIONS)
    clock.follow(5000.0)
    assert len(clock.sift(at(*(100 + i / 10 for i in range(100))))) == 0
    assert (clock.late_count, clock.jumps_count) == (100, 0)
    clock.follow(100.0)  # the machine's clock itself was set back
    assert (clock.is_set_back, clock.jumps_count) == (True, 1)


def test_held_ones_come_when_the_clock_gets_there() -> None:
    clock = EventClock(OPTIONS)
    clock.follow(100.0)
    clock.sift(at(150.0))
    assert clock.held_count == 1
    assert clock.follow(110.0) is None
    due = clock.follow(125.0)
    assert due is not None
    assert due.ts_s.tolist() == [150.0]


@given(
    st.lists(st.lists(st.sampled_from([0.0, 50.0, 100.0, 101.0, 103.0, 200.0, 1e6, 4e9, float("nan")]), max_size=50))
)
def test_no_look_up_is_lost_silently(blocks: list[list[float]]) -> None:
    clock = EventClock(OPTIONS)
    passed = sum(len(clock.sift(at(*block))) for block in blocks)
    rest = clock.finish()
    passed += 0 if rest is None else len(rest)
    gone = clock.late_count + clock.early_count + clock.bad_time_count
    assert clock.held_count == 0
    assert passed + gone == sum(map(len, blocks))


@pytest.mark.parametrize(
    "wrong",
    [
        {"window_s": 0.3},
        {"cell_s": 0.0},
        {"raise_cells_count": 5},
        {"key_memory_count": 1000},
        {"baseline_s": 299.0},
        {"min_qps": -1.0},
    ],
)
def test_options_that_contradict_each_other(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Options(**wrong)  # type: ignore[arg-type]
