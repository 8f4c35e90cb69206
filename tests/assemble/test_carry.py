"""Origins carried over: sequences small enough to follow by hand, and any sequence against a slow search."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from spikeprof.profiler.assemble import carry as module
from spikeprof.profiler.assemble.carry import LONGEST, PLACE, PLACE_AMONG_STRANGERS, WANTED, Carried, carry


def carried(
    tokens: list[int], places: list[int], grids: list[int] | None = None, sequence: list[int] | None = None
) -> Carried:
    """``places`` may be shorter: the rest is wanted."""
    rest = [WANTED] * (len(tokens) - len(places))
    arrays = (sequence or [0] * len(tokens), tokens, grids or [0] * len(tokens), places + rest)
    return carry(*(np.array(values, np.int64) for values in arrays))


STEP = [9, *[1, 2, 3] * 20, 8]  # twenty layers of three kernels between two that are there once
PLACES = list(range(len(STEP)))
BEFORE = [WANTED] * (2 * len(STEP))


def test_like_layers_are_told_apart_by_where_they_are_in_the_step() -> None:
    found = carried(STEP * 5, BEFORE + PLACES)
    for step in (0, 1, 3, 4):
        place, length = (part[step * len(STEP) : (step + 1) * len(STEP)] for part in found)
        assert place.tolist() == PLACES
        assert length.min() >= PLACE
    assert found.length[2 * len(STEP) : 3 * len(STEP)].tolist() == [0] * len(STEP)  # these were not asked


def test_the_last_step_is_known_by_what_precedes_it_and_the_first_by_what_follows() -> None:
    found = carried(STEP * 3, BEFORE[: len(STEP)] + PLACES)
    assert found.place[2 * len(STEP) :].tolist() == PLACES
    assert found.place[: len(STEP)].tolist() == PLACES


def test_a_kernel_that_is_there_once_is_known_without_a_place() -> None:
    found = carried([5, 6, 7, 5], [0, 1])
    assert found.place.tolist() == [-1, -1, -1, 0]
    assert found.length[3] < PLACE


def test_another_grid_is_another_kernel_unless_its_place_is_known() -> None:
    assert carried([5, 6, 7, 5], [0, 1], grids=[1, 1, 1, 2]).place.tolist() == [-1, -1, -1, -1]
    grids = [0] * len(STEP) * 3 + [i % 2 for i in range(len(STEP))]
    assert carried(STEP * 4, BEFORE + PLACES, grids).place[3 * len(STEP) :].tolist() == PLACES


def test_what_two_places_fit_stays_unknown() -> None:
    # However long a stretch: a step of one kernel, attributed as two.
    assert carried([1] * 300, [WANTED] * 100 + [0, 1] * 50).place.tolist() == [-1] * 300


def test_a_part_of_a_step_does_not_speak_for_the_rest() -> None:
    # Of forty like layers in one step the tenth to the twentieth were seen. All others are like those, and none is one.
    step = [9, *[1, 2, 3] * 40, 8]
    places = [p if 30 <= p < 60 else WANTED for p in range(len(step))]
    found = carried(step, places)
    assert set(found.place.tolist()) == {-1}


def test_an_attributed_launch_of_which_nothing_is_known_is_a_place_too() -> None:
    assert carried([1, 1, 2, 1], [0, -1]).place.tolist() == [-1] * 4
    assert carried([1, 2, 1], [-1]).place.tolist() == [-1] * 3


def test_a_changed_kernel_costs_its_neighbours_nothing() -> None:
    changed = list(STEP)
    changed[30] = 77  # another kernel in one layer
    found = carried(STEP * 4 + changed + STEP * 2, BEFORE + PLACES)
    assert found.place[4 * len(STEP) : 5 * len(STEP)].tolist() == [p if p != 30 else -1 for p in PLACES]
    assert found.place[5 * len(STEP) :].tolist() == PLACES * 2


def test_a_kernel_more_in_each_layer_takes_no_place_from_the_others() -> None:
    step = [9, *range(100, 108), *range(100, 108), *range(100, 108), *range(100, 108), 8]  # four layers of eight
    longer = [*step[:5], 77, *step[5:13], 77, *step[13:21], 77, *step[21:29], 77, *step[29:]]
    before = [WANTED] * len(step)
    seen = list(range(len(step)))
    found = carried(step * 8 + longer * 8, [*before * 5, *seen])
    places = [*seen[:5], -1, *seen[5:13], -1, *seen[13:21], -1, *seen[21:29], -1, *seen[29:]]
    for number in range(8):
        begin = 8 * len(step) + number * len(longer)
        assert found.place[begin : begin + len(longer)].tolist() == places
    assert PLACE_AMONG_STRANGERS in found.length[8 * len(step) + len(longer) :].tolist()
    # Of another grid they are other kernels, and so would be those of another model.
    grids = [0] * len(step) * 8 + [1] * len(longer) * 8
    found = carried(step * 8 + longer * 8, [*before * 5, *seen], grids)
    assert found.length[8 * len(step) + len(longer) : -len(longer)].max() < PLACE


def test_what_is_strange_for_the_most_part_has_no_place() -> None:
    # The same names in the same order, as another model may have them, a stranger after each third.
    longer = [t for layer in range(20) for t in (1, 2, 3, 77)]
    found = carried(STEP * 8 + [9, *longer, 8] * 8, [*BEFORE, *[WANTED] * len(STEP), *PLACES])
    begin = 8 * len(STEP) + len(longer)
    # Up to the first stranger the begin of a step is as ever, and known is what is there once.
    assert set(found.place[begin : -len(longer)].tolist()) == {-1, 0, 1, 2, 3, 61}


def test_sequences_do_not_run_into_one_another() -> None:
    # Of two places of 5 the second was seen after another 5. So is the last one, but on a stream of its own.
    assert carried([4, 5, 5, 4, 5, 5], [0, 1, 2]).place[3:].tolist() == [0, 1, 2]
    assert carried([4, 5, 5, 4, 5, 5], [0, 1, 2], sequence=[0, 0, 0, 0, 0, 1]).place[3:].tolist() == [0, 1, -1]


def test_nothing_to_find_and_nothing_to_find_it_by() -> None:
    assert carried([], []).place.tolist() == []
    assert carried([1, 2], []).place.tolist() == [-1, -1]
    assert carried([1, 2], [5, 6]).length.tolist() == [0, 0]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60, unique=True), st.integers(2, 5), st.data())
def test_any_step_of_different_kernels_is_mapped_exactly(step: list[int], times: int, data: st.DataObject) -> None:
    tokens = np.unique(np.array(step * times), return_inverse=True)[1]
    seen = data.draw(st.integers(0, times - 1))
    places = [p if i == seen else WANTED for i in range(times) for p in range(len(step))]
    found = carried(tokens.tolist(), places)
    for i in range(times):
        if i != seen:
            assert found.place[i * len(step) : (i + 1) * len(step)].tolist() == list(range(len(step)))


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Kernels of two sequences: sequence, token, grid, place."""
    rows = st.tuples(st.integers(0, 3), st.integers(0, 1), st.sampled_from([WANTED, WANTED, -1, 0, 1, 2]))
    return [(sequence, *row) for sequence in (0, 1) for row in draw(st.lists(rows, max_size=25))]


@given(sequences())
@example([(1, 2, 0, -2), (1, 2, 0, 0), (1, 2, 0, -2), (1, 2, 0, -2), (1, 2, 0, -1), (1, 2, 1, -1)])
def test_any_sequence_against_a_slow_search(rows: list[tuple[int, int, int, int]]) -> None:
    columns = [np.array([row[i] for row in rows], np.int64) for i in range(4)]
    with (
        mock.patch.object(module, "LONGEST", 8),
        mock.patch.object(module, "PLACE", 4),
        mock.patch.object(module, "PLACE_AMONG_STRANGERS", 4),
        mock.patch.object(module, "KERNELS_A_STRANGER", 4),
    ):
        found = carry(*columns)
    known = {row[1:3] for row in rows if row[3] != WANTED}
    kept = [i for i, row in enumerate(rows) if row[1:3] in known]
    without = [(rows[i][0], 2 * rows[i][1] + rows[i][2], 0, rows[i][3]) for i in kept]
    for i, row in enumerate(rows):
        if row[3] != WANTED:
            assert found.length[i] == 0
            continue
        place, length = slowly(rows, i)
        if (place < 0 or length < 4) and i in kept and len(kept) < len(rows):  # without strangers there is one look
            at = kept.index(i)
            again, width = slowly(without, at, agree=True)
            mine = [k for k in range(len(kept)) if without[k][0] == row[0]]
            first, last = max(at - width + 1, mine[0]), min(at + width - 1, mine[-1])
            strangers = max(i - kept[first] - (at - first), kept[last] - i - (last - at))
            place = again if width >= 4 and again >= 0 and 4 * strangers <= width else place
        assert found.place[i] == place, i


def slowly(rows: list[tuple[int, int, int, int]], i: int, agree: bool = False) -> tuple[int, int]:
    (before, width), (after, later) = one_way(rows, i), one_way(rows[::-1], len(rows) - 1 - i)
    at_odds = min(width, later) >= 4 if agree else width == later
    if at_odds and before != after and min(before, after) >= 0:
        return -1, width
    told = later > width or (before < 0 and later >= 4)
    return (after, later) if told and after >= 0 else (before, width)


def one_way(rows: list[tuple[int, int, int, int]], i: int) -> tuple[int, int]:
    """The place by the longest stretch that occurs, and how long that is."""
    for width in (8, 4, 2, 1):
        stretch = stretch_to(rows, i, width)
        if stretch is None:
            continue
        like = [rows[j] for j in range(len(rows)) if rows[j][3] != WANTED and stretch_to(rows, j, width) == stretch]
        same = [row for row in like if row[2] == rows[i][2]]
        chosen = {row[3] for row in same or (like if width >= 4 else [])}
        if chosen:
            # Launches with as much of the stretch as there is before them cannot be ruled out.
            half = stretch_to(rows, i, width // 2)
            cut = [j for j in range(len(rows)) if stretch_to(rows, j, width) is None and rows[j][3] != WANTED]
            chosen |= {rows[j][3] for j in cut if half and stretch_to(rows, j, width // 2) == half}
            return (chosen.pop() if len(chosen) == 1 else -1), width
    return -1, 0


def stretch_to(rows: list[tuple[int, int, int, int]], i: int, width: int) -> list[int] | None:
    """The tokens of so many kernels up to one, None where its sequence has not that many."""
    part = rows[max(i - width + 1, 0) : i + 1]
    return [row[1] for row in part] if len(part) == width and len({row[0] for row in part}) == 1 else None


def test_the_lengths_are_powers_of_two() -> None:
    assert LONGEST & (LONGEST - 1) == 0
    assert PLACE & (PLACE - 1) == 0
