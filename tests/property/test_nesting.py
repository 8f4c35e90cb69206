"""Calls within calls against a search through all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.profiler.nesting import Nesting

Call = tuple[int, int, int]  # lane, start, end


@st.composite
def calls(draw: st.DrawFn) -> list[Call]:
    """Calls of two threads, each inside or beside the others of its thread; no two alike."""
    found: set[Call] = set()
    for lane in (3, -(2**40)):
        now, open_ = 0, [0]
        for step in draw(st.lists(st.integers(0, 3), max_size=30)):
            if step == 0:
                open_.append(now)
            elif step == 1 and len(open_) > 1:
                found.add((lane, open_.pop(), now))
            else:
                now += step
        now += 1
        found |= {(lane, start, now) for start in open_[1:]}
    return draw(st.permutations(sorted(call for call in found if call[2] > call[1])))


def arrays(rows: list[Call]) -> list[np.ndarray]:
    return [np.array([row[i] for row in rows], np.int64) for i in range(3)]


@given(calls())
def test_the_innermost_is_the_shortest_that_contains_the_moment(rows: list[Call]) -> None:
    nesting = Nesting(*arrays(rows))
    moments = [(lane, t) for lane in (3, -(2**40), 0) for t in range(-1, 70)]
    found = nesting.innermost(np.array([m[0] for m in moments]), np.array([m[1] for m in moments]))
    for (lane, t), row in zip(moments, found.tolist(), strict=True):
        around = [i for i, (of, start, end) in enumerate(rows) if of == lane and start <= t < end]
        assert row == min(around, key=lambda i: rows[i][2] - rows[i][1], default=-1)


@given(calls())
def test_the_parent_is_the_shortest_that_encloses_it(rows: list[Call]) -> None:
    for i, row in enumerate(Nesting(*arrays(rows)).parents().tolist()):
        lane, start, end = rows[i]
        around = [j for j, (of, s, e) in enumerate(rows) if j != i and of == lane and s <= start and end <= e]
        assert row == min(around, key=lambda j: rows[j][2] - rows[j][1], default=-1)


def test_empty_calls_enclose_nothing_and_those_that_stick_out_lose_nothing() -> None:
    # The second ends 1 ns after the one around it, as rounded clocks have it; the third lasts no time.
    nesting = Nesting(np.zeros(3), np.array([0, 10, 5]), np.array([20, 21, 5]))
    assert nesting.innermost(np.zeros(5), np.array([5, 12, 19, 20, 21])).tolist() == [0, 1, 1, 1, -1]
    assert nesting.parents().tolist() == [-1, 0, -1]


def test_nothing_is_around_nothing() -> None:
    none = np.empty(0, np.int64)
    assert Nesting(none, none, none).innermost(np.array([1]), np.array([1])).tolist() == [-1]
    assert Nesting(none, none, none).parents().tolist() == []
    assert Nesting(np.zeros(1), np.zeros(1), np.ones(1)).innermost(none, none).tolist() == []
