"""Attribution where every true count is known: simulated GPUs, with launches as LLM decoding has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from assemble.simulated_counters import EVEN, Habits, Simulated, recorded_launches, simulate, steps

from spikeprof.profiler.assemble.counter_overlap import Samples
from spikeprof.profiler.assemble.counters import Attributed, attribute

US = 1000
intervals = pytest.mark.parametrize("interval_ns", [5 * US, 10 * US])


class Judged(NamedTuple):
    """Over all classes of 100 launches and more of 3 to 20 µs, and all metrics."""

    inside: float  # share of true values inside the bounds
    within_tenth: float  # share of values within 10 % of the true one, where there is one
    error: float  # median, as a share of the true value
    half_width: float  # likewise, of the bounds


def _attributed(simulated: Simulated) -> Attributed:
    return attribute(simulated.samples, simulated.work, simulated.classes_count)


def _judged(cases: Iterable[Simulated]) -> Judged:
    inside, errors, widths = [], [], []
    for case in cases:
        found, truth, work = _attributed(case).classes, case.class_means(), case.work
        launches = np.bincount(work.kernel_class)
        mean_ns = np.bincount(work.kernel_class, work.kernel_end_ns - work.kernel_start_ns) / np.maximum(launches, 1)
        chosen = (launches >= 100) & (mean_ns >= 3 * US) & (mean_ns < 20 * US)
        value, low, high, truth = (a[chosen] for a in (found.value, found.low, found.high, truth))
        rounding = 1e-9 * np.abs(truth) + 1e-9
        inside.append(((low <= truth + rounding) & (truth - rounding <= high)).ravel())
        some = truth > 0
        errors.append((np.abs(value - truth)[some] / truth[some]).ravel())
        widths.append(((high - low)[some] / 2 / truth[some]).ravel())
    error, width, within = np.concatenate(errors), np.concatenate(widths), np.concatenate(inside)
    assert len(within) >= 50
    return Judged(within.mean(), (error < 0.1).mean(), float(np.median(error)), float(np.median(width)))


def _recorded(name: str, interval_ns: int, count: int, seeds: int, habits: Habits | None = None) -> Iterable[Simulated]:
    """Counts drawn anew for each seed, on four stretches of the recording in turn: few seeds scatter by 3 points."""
    for seed in range(seeds):
        launches = recorded_launches(name, count, skip=seed % 4 * count)
        yield simulate(*launches, interval_ns, np.random.default_rng(seed), habits)


@intervals
def test_decoding_in_a_cuda_graph(interval_ns: int) -> None:
    """A step of 440 launches of 2 µs without gaps, as recorded on an H200, so that samples hold four or five."""
    judged = _judged(_recorded("h200_graph_decode", interval_ns, 25_000, 24))
    assert judged.inside >= 0.95
    assert judged.within_tenth >= 0.95
    assert judged.error < 0.02
    assert judged.half_width < 0.08


@intervals
def test_eager_decoding(interval_ns: int) -> None:
    """15 µs between launches: most samples have one launch, and say all."""
    judged = _judged(_recorded("h200_eager_decode", interval_ns, 12_000, 4))
    assert judged.inside >= 0.95
    assert judged.within_tenth == 1
    assert judged.error < 0.001
    assert judged.half_width < 0.03


@intervals
def test_launches_that_vary_by_a_fifth_and_keep_odd_hours(interval_ns: int) -> None:
    habits = Habits(lead_ns=(0, 1000), tail_ns=(300, 1600), slope=0.95, noise=0.2)
    judged = _judged(_recorded("h200_graph_decode", interval_ns, 25_000, 24, habits))
    assert judged.inside >= 0.95
    assert judged.within_tenth >= 0.9
    assert judged.half_width < 0.15


@intervals
@pytest.mark.parametrize("jitter_ns", [0, 50])
def test_steps_that_last_a_whole_number_of_intervals(interval_ns: int, jitter_ns: int) -> None:
    """Samples cut every step at the same places: fewer equations, and no chance that errors cancel."""
    random = [np.random.default_rng(seed) for seed in range(8)]
    judged = _judged(simulate(*steps(r, 40, interval_ns, jitter_ns=jitter_ns), interval_ns, r) for r in random)
    assert judged.inside >= 0.95
    assert judged.within_tenth >= 0.8
    assert judged.half_width < 0.2


@intervals
def test_layers_that_last_a_whole_number_of_intervals_cannot_be_solved_and_say_so(interval_ns: int) -> None:
    """All layers of all steps are cut at the same places: some ten equations for some twenty unknowns."""
    random = [np.random.default_rng(seed) for seed in range(8)]
    judged = _judged(simulate(*steps(r, 40, interval_ns, locked_layers=True), interval_ns, r) for r in random)
    assert judged.inside >= 0.95
    assert judged.half_width > 0.25


@pytest.mark.parametrize("gaps_ns", [(600, 601), (600, 40 * US)], ids=["back to back", "with gaps"])
@pytest.mark.parametrize("interval_ns", [2 * US, 5 * US, 10 * US])
def test_launches_with_values_of_their_own(interval_ns: int, gaps_ns: tuple[int, int]) -> None:
    """From 1.3 to 20 intervals long: each of those that hold three whole samples."""
    inside, errors, widths = [], [], []
    for seed in range(4):
        random = np.random.default_rng(seed)
        class_id = random.integers(0, 12, 1000)
        duration = random.uniform(1.3, 20, 12)[class_id] * interval_ns * random.normal(1, 0.01, 1000)
        begin = np.append(0, np.cumsum(duration + random.integers(*gaps_ns, 1000))[:-1]).astype(np.int64)
        # The last flush is of a size, whatever the launch's.
        case = simulate(begin, begin + duration.astype(np.int64), class_id, interval_ns, random, Habits(flushed=0.003))
        found = _attributed(case)
        truth = case.counts[found.kernels]
        some = truth > 0
        inside.append(((found.exact.low <= truth * (1 + 1e-9)) & (truth * (1 - 1e-9) <= found.exact.high)).ravel())
        errors.append((np.abs(found.exact.value - truth)[some] / truth[some]).ravel())
        widths.append(((found.exact.high - found.exact.low)[some] / 2 / truth[some]).ravel())
    assert len(np.concatenate(inside)) > 5000
    assert np.concatenate(inside).mean() >= 0.95
    assert np.median(np.concatenate(errors)) < 0.005
    assert np.quantile(np.concatenate(errors), 0.95) < 0.05
    assert np.median(np.concatenate(widths)) < 0.04


def test_counts_that_spread_evenly_are_found_exactly() -> None:
    case = simulate(*recorded_launches("h200_graph_decode", 20_000), 5 * US, np.random.default_rng(3), EVEN)
    found, truth = _attributed(case).classes.value, case.class_means()
    often = np.bincount(case.work.kernel_class) >= 100
    assert np.all(np.abs(found - truth)[often] < 0.02 * truth.mean())


@pytest.mark.parametrize("skew_ns", [-700, 700])
def test_a_skew_is_found(skew_ns: int) -> None:
    case = simulate(*recorded_launches("h200_graph_decode", 20_000), 10 * US, np.random.default_rng(1), EVEN)
    found = attribute(case.samples.shifted(skew_ns), case.work, case.classes_count)
    assert found.skews.direct.skew_ns == pytest.approx(skew_ns, abs=50)
    assert found.skews.direct.sd_ns < 50
    truth = case.class_means()
    often = (np.bincount(case.work.kernel_class) >= 100)[:, None] & (truth > 0)
    assert np.median(np.abs(found.classes.value[often] / truth[often] - 1)) < 0.01


def test_a_microsecond_of_silence_before_a_recorded_end_is_no_skew() -> None:
    found = _attributed(next(iter(_recorded("h200_graph_decode", 5 * US, 20_000, 1))))
    assert found.skews.direct.skew_ns == 0
    assert -200 <= found.skews.direct.begin_ns <= 500
    assert 500 <= found.skews.direct.end_ns <= 1200


def test_kernels_of_cuda_graphs_have_a_skew_of_their_own() -> None:
    """First launched one by one, then in a graph, whose recorded times are 0.75 µs late."""
    begin, end, class_id = recorded_launches("h200_graph_decode", 40_000)
    case = simulate(begin, end, class_id, 10 * US, np.random.default_rng(1), EVEN)
    in_graph = np.arange(len(begin)) >= 20_000
    late = replace(case.work.shifted(np.where(in_graph, 750, 0)), in_graph=in_graph)
    found = attribute(case.samples, late, case.classes_count)
    assert found.skews.direct.skew_ns == 0
    assert found.skews.graph.skew_ns == pytest.approx(-750, abs=50)
    truth = case.class_means()
    often = (np.bincount(class_id) >= 100)[:, None] & (truth > 0)
    assert np.median(np.abs(found.classes.value[often] / truth[often] - 1)) < 0.01


def test_counts_without_any_tie_to_the_work_tell_no_skew() -> None:
    case = simulate(*recorded_launches("h200_graph_decode", 20_000), 10 * US, np.random.default_rng(1))
    noise = np.random.default_rng(2).gamma(2.0, 100.0, case.samples.values.shape)
    found = attribute(_with(case, noise), case.work, case.classes_count)
    assert found.skews.direct.skew_ns == 0
    assert not found.skews.direct.sd_ns < 200


def _with(case: Simulated, values: np.ndarray) -> Samples:
    return Samples(case.samples.start_ns, case.samples.end_ns, values, case.samples.metrics)


def _without(case: Simulated, lost: np.ndarray) -> Simulated:
    s = case.samples
    return case._replace(samples=Samples(s.start_ns[~lost], s.end_ns[~lost], s.values[~lost], s.metrics))


def test_a_fifth_of_the_samples_lost_here_and_there() -> None:
    cases = _recorded("h200_graph_decode", 10 * US, 25_000, 12)
    random = np.random.default_rng(0)
    judged = _judged(_without(c, random.random(len(c.samples.start_ns)) < 0.2) for c in cases)
    assert judged.inside >= 0.95
    assert judged.within_tenth >= 0.93


def test_sampling_in_stretches_with_as_long_gaps() -> None:
    """As lists of metrics take turns, or decoding catches up: 100 ms on, 100 ms off."""
    cases = _recorded("h200_graph_decode", 10 * US, 25_000, 12)
    judged = _judged(_without(c, c.samples.start_ns // 100_000_000 % 2 == 0) for c in cases)
    assert judged.inside >= 0.95
    assert judged.within_tenth >= 0.9


def test_time_grows_no_faster_than_the_input() -> None:
    """Eight times the samples and launches in less than sixteen times the time."""

    def seconds(count: int) -> float:
        case = simulate(*steps(np.random.default_rng(1), count, 5 * US), 5 * US, np.random.default_rng(1))
        _attributed(case)
        return min(_timed(lambda: _attributed(case)) for _ in range(3))

    assert seconds(320) < 16 * seconds(40)


def _timed(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin
