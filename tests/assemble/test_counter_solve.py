"""The equations of the attribution and their solution, against the plainest way to do the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeprof.profiler.assemble.counter_linear import inverse, nonnegative, times
from spikeprof.profiler.assemble.counter_normal import SHAPES, SOLVED, WORK_SHARE_MIN, Normal, one_in
from spikeprof.profiler.assemble.counter_overlap import SHIFT_NS, Overlaps, Pieces, Samples, overlaps, shares
from spikeprof.profiler.assemble.counter_solve import solve

seeds = st.integers(0, 2**32 - 1)


def _case(random: np.random.Generator) -> tuple[Samples, Pieces]:
    """Some samples with gaps, pieces of any length anywhere, of up to five groups of which some are shaped."""
    edges = np.cumsum(random.integers(500, 4000, 40))
    kept = random.random(39) < 0.9
    start, end = edges[:-1][kept], edges[1:][kept]
    samples = Samples(start, end, random.gamma(1.0, 50.0, (len(start), 2)), ("dram_read_bytes", "sm_active_share"))
    count = int(random.integers(1, 60))
    begin = random.integers(-2000, int(edges[-1]) + 2000, count)
    group = random.integers(0, 5, count).astype(np.int32)
    length = random.integers(1, 9000, count)
    shaped = random.random(5) < 0.7
    return samples, Pieces(begin, begin + length, group, random.uniform(0.5, 2, count), shaped)


def _every(pairs: Overlaps) -> slice:
    return slice(0, len(pairs.sample))


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_all_pairs_that_meet_are_found_and_how_much_of_a_piece_lies_in_a_sample(seed: int) -> None:
    samples, pieces = _case(np.random.default_rng(seed))
    pairs = overlaps(samples, pieces)
    held = shares(samples, pieces, pairs, _every(pairs)).even
    found = {(s, p): e for s, p, e in zip(pairs.sample.tolist(), pairs.piece.tolist(), held.tolist(), strict=True)}
    assert len(found) == len(pairs.sample)
    for s in range(len(samples.start_ns)):
        for p in range(len(pieces.start_ns)):
            first, last = max(samples.start_ns[s], pieces.start_ns[p]), min(samples.end_ns[s], pieces.end_ns[p])
            share = max(last - first, 0) / (pieces.end_ns[p] - pieces.start_ns[p]) * pieces.size[p]
            assert found.get((s, p), 0.0) == pytest.approx(share, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 30_000))
def test_shapes_hold_a_whole_piece_in_all_samples_together(seed: int, length: int) -> None:
    """Even spread adds up to 1, what departs from it to 0: only the split between samples differs."""
    edges = np.append(0, np.cumsum(np.random.default_rng(seed).integers(400, 5000, 60)))
    samples = Samples(edges[:-1], edges[1:], np.zeros((60, 1)), ("x.sum",))
    pieces = Pieces(np.array([2000]), np.array([2000 + length]), np.zeros(1, np.int32), np.ones(1), np.ones(1, bool))
    pairs = overlaps(samples, pieces)
    held = shares(samples, pieces, pairs, _every(pairs))
    assert held.even.sum() == pytest.approx(1)
    assert held.shapes.shape == (SHAPES - 1, len(held.cut))
    assert held.shapes.sum(axis=1) == pytest.approx(np.zeros(SHAPES - 1), abs=1e-9)
    assert np.all(np.abs(held.shapes) <= 1 + 1e-9)


def test_shapes_of_a_piece_that_a_sample_cuts_in_half() -> None:
    """8 µs, cut at 4: by hand."""
    edges = np.array([0, 10_000, 20_000])
    samples = Samples(edges[:-1], edges[1:], np.zeros((2, 1)), ("x.sum",))
    pieces = Pieces(np.array([6000]), np.array([14_000]), np.zeros(1, np.int32), np.ones(1), np.ones(1, bool))
    pairs = overlaps(samples, pieces)
    held = shares(samples, pieces, pairs, _every(pairs))
    assert held.even.tolist() == [0.5, 0.5]
    assert held.cut.tolist() == [0, 1]
    # Shifted by 0.3 of 8 µs; all early; within a quarter or an eighth nothing is cut; all in the last or first moment.
    first = [-SHIFT_NS / 8000, 1, 0, 0, -0.5, 0.5, 0, 0, 0, 0]
    assert held.shapes[:, 0] == pytest.approx(first, abs=1e-12)
    assert held.shapes[:, 1] == pytest.approx(-np.array(first), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_normal_equations_are_those_of_the_dense_design(seed: int) -> None:
    samples, pieces = _case(np.random.default_rng(seed))
    pairs = overlaps(samples, pieces)
    normal = Normal.empty(5, 2)
    for block in pairs.blocks():
        normal.add(samples, pieces, pairs, block)
    held = shares(samples, pieces, pairs, _every(pairs))
    rows, group = len(samples.start_ns), pieces.group[pairs.piece]
    design = np.zeros((SHAPES, 5, rows))
    np.add.at(design[0], (group, pairs.sample), held.even)
    for shape in range(1, SHAPES):
        np.add.at(design[shape], (group[held.cut], pairs.sample[held.cut]), held.shapes[shape - 1])
    working = np.zeros(rows)
    meet = np.minimum(samples.end_ns[pairs.sample], pieces.end_ns[pairs.piece])
    meet -= np.maximum(samples.start_ns[pairs.sample], pieces.start_ns[pairs.piece])
    np.add.at(working, pairs.sample, np.maximum(meet, 0))
    weight = np.where(working > 0, 1 / np.maximum(working, WORK_SHARE_MIN * samples.length_ns), 0)
    counts = samples.values * np.stack((np.ones(rows), samples.length_ns), axis=1)
    square = np.einsum("agn,n,bhn->agbh", design[:SOLVED], weight, design)
    np.testing.assert_allclose(normal.matrix(), square, atol=1e-12)
    np.testing.assert_allclose(
        normal.right, np.einsum("agn,n,nm->agm", design[:SOLVED], weight, counts), rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(normal.squares, weight @ counts**2, rtol=1e-9)
    np.testing.assert_allclose(normal.pieces, design[0].sum(axis=1), atol=1e-12)
    assert normal.samples_count == np.count_nonzero(working)


def test_blocks_take_every_sample_and_every_pair_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import spikeprof.profiler.assemble.counter_overlap as module

    monkeypatch.setattr(module, "_BLOCK_SAMPLES", 7)
    monkeypatch.setattr(module, "_BLOCK_PAIRS", 5)
    samples, pieces = _case(np.random.default_rng(4))
    pairs = overlaps(samples, pieces)
    blocks = list(pairs.blocks())
    assert len(blocks) > 5
    assert np.concatenate([np.arange(rows.start, rows.stop) for rows, _ in blocks]).tolist() == list(
        range(len(samples.start_ns))
    )
    for rows, which in blocks:
        assert set(pairs.sample[which].tolist()) <= set(range(rows.start, rows.stop))
    assert sum(which.stop - which.start for _, which in blocks) == len(pairs.sample)


def test_work_for_the_equations_is_bounded() -> None:
    """500 launches in each of 10,000 samples: one block in 125 is enough."""
    pairs = Overlaps(np.zeros(0, np.int32), np.zeros(0, np.int32), np.arange(10_001) * 500)
    assert one_in(pairs) == 125
    assert one_in(Overlaps(np.zeros(0, np.int32), np.zeros(0, np.int32), np.arange(10_001) * 5)) == 1


@settings(max_examples=200, deadline=None)
@given(seeds, st.integers(1, 12), st.integers(0, 4))
def test_the_non_negative_minimum_meets_its_conditions(seed: int, bound: int, free: int) -> None:
    """Karush, Kuhn and Tucker: no element below 0, no slope down where one is 0, no slope where it is not."""
    random = np.random.default_rng(seed)
    size = bound + free
    root = random.normal(size=(size + 2, size)) * np.exp(random.normal(0, 1, size))
    matrix, right = root.T @ root + 1e-6 * np.eye(size), random.normal(size=size)
    x = nonnegative(np.linalg.inv(matrix), right, bound)
    slope = matrix @ x - right
    scale = np.abs(right).max()
    assert np.all(x[:bound] >= 0)
    assert np.all(slope[:bound] >= -1e-6 * scale)
    assert np.all(np.abs(slope[x > 0]) <= 1e-6 * scale)
    assert np.all(np.abs(slope[bound:]) <= 1e-6 * scale)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 200])
def test_products_and_inverses_in_tiles_are_those_of_numpy(size: int) -> None:
    random = np.random.default_rng(size)
    root, other = random.normal(size=(size, size + 70)), random.normal(size=(size + 70, 5))
    np.testing.assert_allclose(times(root, other), root @ other, rtol=1e-10, atol=1e-10)
    matrix = root @ root.T
    np.testing.assert_allclose(inverse(matrix) @ matrix, np.eye(size), atol=1e-8)


def test_the_solution_of_two_groups_that_only_differ_in_overlap() -> None:
    """Launches of 10 ns: alone 30 and 50 a launch, and each cut by samples in many ways: the counts come out."""
    random = np.random.default_rng(2)
    edges = np.arange(0, 300_001, 1000)
    begin = np.sort(random.choice(np.arange(2, 298), 250, replace=False)) * 1000 + random.integers(-500, 500, 250)
    group = random.integers(0, 2, 250).astype(np.int32)
    pieces = Pieces(begin, begin + 800, group, np.ones(250), np.zeros(2, bool))
    samples = Samples(edges[:-1], edges[1:], np.zeros((300, 1)), ("x.sum",))
    pairs = overlaps(samples, pieces)
    held = shares(samples, pieces, pairs, _every(pairs)).even
    samples.values[:, 0] = np.bincount(
        pairs.sample, held * np.array([30.0, 50.0])[pieces.group[pairs.piece]], minlength=300
    )
    normal = Normal.empty(2, 1)
    for block in pairs.blocks():
        normal.add(samples, pieces, pairs, block)
    found = solve(normal, np.array([800.0, 800.0]), pieces.shaped)
    assert found.shapes[0, :, 0] == pytest.approx([30, 50], rel=1e-4)
    assert np.all(found.sd[:, 0] < 0.1)
    # By time alone, launches that share samples are taken for more alike than they are.
    assert 30 < found.by_time[0, 0] < found.by_time[1, 0] < 50


def test_a_group_that_no_sample_holds_is_taken_for_a_mean_one_and_not_known() -> None:
    """The other one counts 5 in 800 ns, so this one, of 160 ns, 1."""
    samples = Samples(np.array([0, 1000]), np.array([1000, 2000]), np.array([[5.0], [0]]), ("x.sum",))
    pieces = Pieces(np.array([100]), np.array([900]), np.ones(1, np.int32), np.ones(1), np.ones(2, bool))
    pairs = overlaps(samples, pieces)
    normal = Normal.empty(2, 1)
    for block in pairs.blocks():
        normal.add(samples, pieces, pairs, block)
    found = solve(normal, np.array([160.0, 800.0]), pieces.shaped)
    assert found.shapes[0, :, 0] == pytest.approx([1, 5])
    assert found.sd[:, 0] == pytest.approx([3, 0], abs=0.1)
