"""Interval arithmetic against the obvious: a bitmap of 64 ns, and loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.analyzers.derived import (
    EMPTY,
    Lanes,
    Spans,
    bin_edges,
    complement,
    covered_by_group,
    first_of_groups,
    group_codes,
    group_percentile,
    hulls,
    intersect,
    ints,
    overlap_with,
    parts,
    sorted_in_groups,
    subtract,
    total,
    union,
)
from spikeprof.profiler.errors import DamagedTrace

SIZE = 64
times = st.integers(0, SIZE)
raw = st.lists(st.tuples(times, times), max_size=12)
groups_and_values = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=40)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return ints([a for a, _ in pairs]), ints([b for _, b in pairs])


def bitmap(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    bits = np.zeros(SIZE, bool)
    for a, b in zip(starts, ends, strict=True):
        bits[a:b] = True  # nothing where b <= a
    return bits


def check_set(spans: Spans, bits: np.ndarray) -> None:
    """It covers those bits, and it is a set: ascending, disjoint, none empty, none touching."""
    assert (bitmap(*spans) == bits).all()
    assert (spans.ends > spans.starts).all()
    assert (spans.starts[1:] > spans.ends[:-1]).all()
    assert spans.starts.dtype == spans.ends.dtype == np.int64
    assert total(spans) == bits.sum()


@given(raw)
def test_union_covers_what_any_interval_covers(pairs):
    check_set(union(*arrays(pairs)), bitmap(*arrays(pairs)))


@given(raw, raw)
def test_intersect_and_subtract(one, other):
    a, b = union(*arrays(one)), union(*arrays(other))
    check_set(intersect(a, b), bitmap(*a) & bitmap(*b))
    check_set(subtract(a, b), bitmap(*a) & ~bitmap(*b))


@given(raw, raw)
def test_a_set_and_its_complement_share_nothing_and_miss_nothing(one, queries):
    spans = union(*arrays(one))
    assert total(intersect(spans, complement(spans))) == 0
    starts, ends = arrays(queries)
    inside, outside = overlap_with(starts, ends, spans), overlap_with(starts, ends, complement(spans))
    assert (inside + outside == np.maximum(ends - starts, 0)).all()


@given(raw, raw)
def test_overlap_and_parts_of_queries(one, queries):
    spans = union(*arrays(one))
    starts, ends = arrays(queries)
    bits = bitmap(*spans)
    expected = [int(bits[a:b].sum()) for a, b in queries]
    assert overlap_with(starts, ends, spans).tolist() == expected
    part_starts, part_ends, source = parts(starts, ends, spans)
    assert np.bincount(source, part_ends - part_starts, minlength=len(queries)).tolist() == expected
    for i, (a, b) in enumerate(queries):
        mine = source == i
        wanted = np.zeros(SIZE, bool)
        wanted[a:b] = bits[a:b]
        check_set(Spans(part_starts[mine], part_ends[mine]), wanted)


@given(raw, raw)
def test_hulls_reach_from_the_first_to_the_last_moment_inside_each_window(windows, one):
    frame, spans = union(*arrays(windows)), union(*arrays(one))
    expected = []
    for a, b in zip(*frame, strict=True):
        inside = np.flatnonzero(bitmap(*spans)[a:b])
        if len(inside):
            expected.append((a + inside[0], a + inside[-1] + 1))
    assert list(zip(*hulls(frame, spans), strict=True)) == expected


@given(st.lists(st.tuples(st.integers(0, 3), times, times), max_size=20))
def test_lanes_keep_groups_apart(rows):
    group, (starts, ends) = ints([g for g, _, _ in rows]), arrays([(a, b) for _, a, b in rows])
    lanes = Lanes.of(4, starts, ends)
    shift = lanes.shift(group)
    spans = union(starts + shift, ends + shift)
    for g in range(4):
        back = lanes.shift(ints([g]))[0]
        mine = spans.starts // lanes.stride == g
        check_set(
            Spans(spans.starts[mine] - back, spans.ends[mine] - back), bitmap(starts[group == g], ends[group == g])
        )


def test_times_that_cannot_be_on_one_clock_are_refused():
    with pytest.raises(DamagedTrace, match="session's clock"):
        Lanes.of(1000, ints([0, 2**60]))


@given(st.integers(-100, 100), st.integers(0, 200), st.integers(1, 70))
def test_bins_cut_the_stretch_without_gap_or_overlap(first, length, count):
    edges = bin_edges(first, first + length, count)
    assert (edges[0], edges[-1]) == (first, first + length)
    widths = np.diff(edges)
    assert len(widths) == max(1, min(count, length))
    assert widths.max() - widths.min() <= 1


def test_an_empty_set_is_harmless():
    assert total(EMPTY) == 0
    assert overlap_with(ints([0]), ints([9]), EMPTY).tolist() == [0]
    assert overlap_with(ints([]), ints([]), union(ints([1]), ints([2]))).tolist() == []


@given(groups_and_values, st.integers(1, 100))
def test_percentiles_are_nearest_rank_values_that_occurred(rows, percent):
    codes, count = group_codes(ints([g for g, _ in rows]))
    values = ints([v for _, v in rows])
    ordered, offsets = sorted_in_groups(codes, values, count)
    for got, code in zip(group_percentile(ordered, offsets, percent), range(count), strict=True):
        mine = sorted(values[codes == code].tolist())
        wanted = next(v for v in mine if sum(x <= v for x in mine) * 100 >= percent * len(mine))
        assert got == wanted


@given(groups_and_values)
def test_sorting_in_groups_does_not_depend_on_the_size_of_values(rows):
    codes, values = ints([g for g, _ in rows]), ints([v for _, v in rows])
    small, offsets = sorted_in_groups(codes, values, 5)
    large, same = sorted_in_groups(codes, values * 2**59, 5)  # too large for the short way
    assert (small * 2**59 == large).all()
    assert (offsets == same).all()


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(2**40, 2**40 + 2)), max_size=30))
def test_group_codes_number_combinations(rows):
    codes, count = group_codes(ints([a for a, _ in rows]), ints([b for _, b in rows]))
    assert count == len(set(rows))
    assert len(set(zip(codes.tolist(), rows, strict=True))) == count
    first = first_of_groups(codes, count)
    assert [rows[i] for i in first] == list(dict.fromkeys(rows))


@given(st.lists(st.tuples(st.integers(0, 4), times, times), max_size=20))
def test_the_cover_of_each_group_is_that_of_its_union(rows):
    rows = [(g, min(a, b), max(a, b)) for g, a, b in rows]
    groups, (starts, ends) = ints([g for g, _, _ in rows]), arrays([(a, b) for _, a, b in rows])
    expected = [bitmap(starts[groups == g], ends[groups == g]).sum() for g in range(6)]
    assert covered_by_group(starts, ends, groups, 6).tolist() == expected
