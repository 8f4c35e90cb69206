"""What must hold of attributed counters, whatever ran and however it was sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from assemble.simulated_counters import EVEN, simulate
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spikeprof.profiler.assemble.counter_overlap import Samples
from spikeprof.profiler.assemble.counter_pieces import Work
from spikeprof.profiler.assemble.counter_skew import Skews
from spikeprof.profiler.assemble.counters import NONE, Attributed, attribute

NO_SKEW = Skews()
METRICS = ("dram_read_bytes", "sm_active_share")
CLASSES = 4

seeds = st.integers(0, 2**32 - 1)


def _spans(random: np.random.Generator, most: int, longest: float) -> tuple[np.ndarray, np.ndarray]:
    """Any intervals within 1 ms and around, also overlapping, also without length."""
    count = int(random.integers(0, most + 1))
    begin = random.integers(-50_000, 1_050_000, count)
    length = np.exp(random.uniform(0, np.log(longest), count)) * (random.random(count) < 0.95)
    return begin, begin + length.astype(np.int64)


def _case(seed: int) -> tuple[Samples, Work]:
    random = np.random.default_rng(seed)
    edges = np.append(0, np.cumsum(random.integers(2000, 12_000, 120)))
    kept = np.flatnonzero(random.random(120) < random.choice([1.0, 0.9, 0.4]))
    values = random.gamma(0.3, 1000, (120, 2)) * (random.random((120, 1)) < 0.8)
    values[:, 1] = np.minimum(values[:, 1], 1)
    samples = Samples(edges[:-1][kept], edges[1:][kept], values[kept], METRICS)
    kernels = _spans(random, int(random.choice([3, 40, 400])), float(random.choice([2000, 200_000])))
    ops = _spans(random, 5, 50_000)
    class_id, kind = (random.integers(0, CLASSES, len(spans[0])) for spans in (kernels, ops))
    return samples, Work(
        *kernels, class_id, *ops, kind, *_spans(random, 3, 300_000), random.random(len(class_id)) < 0.5
    )


def _attributed(samples: Samples, work: Work) -> Attributed:
    return attribute(samples, work, CLASSES, NO_SKEW)


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_nothing_is_lost_or_made(seed: int) -> None:
    samples, work = _case(seed)
    found = _attributed(samples, work)
    total = samples.values[:, 0].sum()
    assert found.balance[:, 0].sum() == pytest.approx(total, rel=1e-12, abs=1e-9)
    assert np.all(found.balance[:, 0] >= 0)
    assert found.balance_ns.sum() == samples.length_ns.sum()
    assert np.all(found.balance_ns >= 0)


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_bounds_enclose_values_and_only_what_was_not_sampled_has_none(seed: int) -> None:
    samples, work = _case(seed)
    found = _attributed(samples, work)
    for estimates in (found.exact, found.classes):
        known = np.isfinite(estimates.value)
        assert np.array_equal(known, np.isfinite(estimates.low))
        assert np.array_equal(known, np.isfinite(estimates.high))
        assert np.all((estimates.low <= estimates.value)[known])
        assert np.all((estimates.value <= estimates.high)[known])
        assert np.all(estimates.low[known] >= 0)
        assert np.all(estimates.high[:, 1][known[:, 1]] <= 1)
    assert np.isfinite(found.exact.value).all()
    sampled = np.bincount(work.kernel_class, found.covered, minlength=CLASSES) >= 0.5
    assert np.array_equal(found.match != NONE, sampled)
    assert np.array_equal(np.isfinite(found.classes.value), np.repeat(sampled[:, None], 2, axis=1))


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_a_class_is_the_mean_of_its_launches_and_classes_are_all_that_kernels_count(seed: int) -> None:
    samples, work = _case(seed)
    found = _attributed(samples, work)
    covered = np.bincount(work.kernel_class, found.covered, minlength=CLASSES)
    known = found.match != NONE
    if np.all(known | (covered == 0)):
        total = (found.classes.value[known, 0] * covered[known]).sum()
        assert total == pytest.approx(found.balance[0, 0], rel=1e-9, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_the_order_of_launches_and_the_numbers_of_classes_do_not_matter(seed: int) -> None:
    samples, work = _case(seed)
    random = np.random.default_rng(seed)
    order, number = random.permutation(len(work.kernel_start_ns)), random.permutation(CLASSES)
    other = replace(
        work,
        kernel_start_ns=work.kernel_start_ns[order],
        kernel_end_ns=work.kernel_end_ns[order],
        kernel_class=number[work.kernel_class[order]],
        in_graph=work.in_graph[order],
    )
    one, two = _attributed(samples, work), _attributed(samples, other)
    scale = samples.values.max(axis=0) + 1
    np.testing.assert_allclose(two.balance / scale, one.balance / scale, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(two.classes.value[number] / scale, one.classes.value / scale, rtol=1e-5, atol=1e-5)
    assert sorted(order[two.kernels].tolist()) == one.kernels.tolist()
    back = np.argsort(order[two.kernels])
    np.testing.assert_allclose(two.exact.value[back] / scale, one.exact.value / scale, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(-(10**15), 10**15), st.floats(1e-3, 1e6))
def test_neither_the_time_of_day_nor_the_unit_matters(seed: int, shift_ns: int, unit: float) -> None:
    samples, work = _case(seed)
    moved = Work(
        *(part + shift_ns * (not kind) for part, kind in zip(_parts(work), (0, 0, 1, 0, 0, 1, 0, 0), strict=True)),
        work.in_graph,
    )
    scaled = replace(samples.shifted(shift_ns), values=samples.values * [unit, 1])
    one, two = _attributed(samples, work), _attributed(scaled, moved)
    scale = samples.values.max(axis=0) + 1
    assert two.kernels.tolist() == one.kernels.tolist()
    for name in ("value", "low", "high"):
        ours, theirs = getattr(one.classes, name), getattr(two.classes, name) / [unit, 1]
        np.testing.assert_allclose(theirs / scale, ours / scale, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(two.balance[:, 0] / unit, one.balance[:, 0], rtol=1e-6, atol=1e-6 * scale[0])


def _parts(work: Work) -> tuple[np.ndarray, ...]:
    return (
        work.kernel_start_ns,
        work.kernel_end_ns,
        work.kernel_class,
        work.op_start_ns,
        work.op_end_ns,
        work.op_kind,
        work.not_traced_start_ns,
        work.not_traced_end_ns,
    )


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(2000, 20_000))
@example(597, 2000)
def test_launches_that_stand_alone_have_their_own_counts_however_they_spread(seed: int, interval_ns: int) -> None:
    """Far enough apart that no sample holds two: the mean of a class is exact."""
    random = np.random.default_rng(seed)
    class_id = np.append(np.arange(CLASSES), random.integers(0, CLASSES, 60))
    duration = random.integers(1500, 4000, CLASSES)[class_id]
    end = np.cumsum(duration + 2 * interval_ns + random.integers(0, 9000, len(class_id)))
    case = simulate(end - duration, end, class_id, interval_ns, random)
    found = attribute(case.samples, case.work, CLASSES, NO_SKEW)
    np.testing.assert_allclose(found.classes.value, case.class_means(), rtol=1e-9, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(seeds, st.sampled_from([5000, 10_000]))
def test_even_counts_of_launches_that_share_samples_lie_within_the_bounds(seed: int, interval_ns: int) -> None:
    random = np.random.default_rng(seed)
    class_id = random.integers(0, CLASSES, 1500)
    duration = random.integers(1000, 15_000, CLASSES)[class_id]
    begin = np.cumsum(duration + random.integers(300, 2000, 1500))
    case = simulate(begin - duration, begin, class_id, interval_ns, random, EVEN)
    found, truth = attribute(case.samples, case.work, CLASSES, NO_SKEW), case.class_means()
    rounding = 1e-6 * truth.max(axis=0)
    assert np.all(found.classes.low <= truth + rounding)
    assert np.all(found.classes.high >= truth - rounding)
