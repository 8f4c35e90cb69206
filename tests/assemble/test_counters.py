"""Attribution of counters on inputs small enough to work out by hand. A sample is 10 µs unless it says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from assemble.simulated_counters import EVEN, NOTHING, simulate, work_of

from spikeprof.profiler.assemble.counter_overlap import Samples
from spikeprof.profiler.assemble.counter_pieces import Work
from spikeprof.profiler.assemble.counter_skew import Skews
from spikeprof.profiler.assemble.counters import CLASS, EXACT, NONE, Attributed, attribute

US = 1000
NO_SKEW = Skews()
KERNELS, MEMORY_OPS, NOT_TRACED, IDLE = range(4)


def _samples(values: Sequence[float], metric: str = "dram_read_bytes", length_ns: int = 10 * US) -> Samples:
    start = np.arange(len(values)) * length_ns
    return Samples(start, start + length_ns, np.array(values, float)[:, None], (metric,))


def _spans(*spans: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    begin, end = zip(*spans, strict=True) if spans else ((), ())
    return (np.array(begin) * US).astype(np.int64), (np.array(end) * US).astype(np.int64)


def _work(*launches: tuple[float, float, int], copies: Sequence[tuple[float, float]] = (), off: Sequence = ()) -> Work:
    """Launches (begin µs, end µs, class), copies and spans in which recording was off (begin µs, end µs)."""
    begin, end = _spans(*((b, e) for b, e, _ in launches))
    kinds = np.array([c for _, _, c in launches], np.int64)
    ops = _spans(*copies)
    return Work(begin, end, kinds, *ops, np.zeros(len(copies), np.int64), *_spans(*off), np.zeros(len(kinds), bool))


def _attributed(samples: Samples, work: Work) -> Attributed:
    classes = int(work.kernel_class.max(initial=-1)) + 1
    return attribute(samples, work, classes, NO_SKEW)


def test_a_sample_belongs_to_the_one_kernel_in_it_idle_or_not() -> None:
    found = _attributed(_samples([0, 700, 0]), _work((12, 15, 0)))
    assert found.match.tolist() == [CLASS]
    assert found.classes.value.tolist() == [[700]]
    assert found.balance[:, 0].tolist() == [700, 0, 0, 0]
    assert found.balance_ns.tolist() == [3 * US, 0, 0, 27 * US]


def test_what_no_work_overlaps_is_idle_and_seen() -> None:
    """L2 is written back after a kernel: 30 bytes come when it is gone, and are not its."""
    found = _attributed(_samples([0, 700, 30], "dram_written_bytes"), _work((12, 15, 0)))
    assert found.classes.value.tolist() == [[700]]
    assert found.balance[:, 0].tolist() == [700, 0, 0, 30]


def test_a_long_launch_has_a_value_of_its_own_with_what_its_edges_hold() -> None:
    """Three whole samples of 100, edges of 40 and 70 in which nothing else runs."""
    found = _attributed(_samples([0, 40, 100, 100, 100, 70, 0]), _work((16, 57, 0)))
    assert found.match.tolist() == [EXACT]
    assert found.kernels.tolist() == [0]
    assert found.exact.value.tolist() == [[410]]
    assert found.classes.value.tolist() == [[410]]
    # Nobody else was there: nothing could belong elsewhere.
    assert (found.exact.low.tolist(), found.exact.high[0, 0]) == ([[410]], pytest.approx(410))


def test_two_whole_samples_are_too_few_for_a_value_of_its_own() -> None:
    found = _attributed(_samples([0, 40, 100, 100, 70, 0]), _work((16, 47, 0)))
    assert found.match.tolist() == [CLASS]
    assert found.kernels.tolist() == []
    assert found.classes.value.tolist() == [[310]]


def test_a_sample_shared_by_two_long_launches_is_split_by_their_rates() -> None:
    """100 and 300 a sample; the one they share holds 4 µs of the first and 6 µs of the second: 40 and 180."""
    values = [100, 100, 100, 100, 220, 300, 300, 300, 300, 0]
    found = _attributed(_samples(values), _work((0, 44, 0), (44, 90, 1)))
    assert found.exact.value[:, 0] == pytest.approx([440, 1380], rel=0.02)
    assert found.exact.value.sum() == pytest.approx(sum(values))
    assert np.all(found.exact.low[:, 0] <= [440, 1380])
    assert np.all(found.exact.high[:, 0] >= [440, 1380])
    # Of the shared sample, neither can have less than nothing or more than all.
    assert np.all(found.exact.low[:, 0] >= [400, 1200])
    assert np.all(found.exact.high[:, 0] <= [620.001, 1420.001])


def test_short_launches_of_two_classes_are_told_apart_over_many_samples() -> None:
    """4 µs each, back to back, in changing order: 900 and 100 a launch, spread evenly."""
    random = np.random.default_rng(5)
    kinds = random.integers(0, 2, 1000)
    begin = 40 * US + 4 * US * np.arange(1000)
    start = np.arange(420) * 10 * US
    values = np.zeros(420)
    for at, kind in zip(begin.tolist(), kinds.tolist(), strict=True):
        first, cut = at // (10 * US), max(at % (10 * US) - 6 * US, 0) / (4 * US)
        values[first] += (1 - cut) * (900, 100)[kind]
        values[first + 1] += cut * (900, 100)[kind]
    samples = Samples(start, start + 10 * US, values[:, None], ("dram_read_bytes",))
    found = _attributed(samples, work_of(begin, begin + 4 * US, kinds))
    assert found.match.tolist() == [CLASS, CLASS]
    assert found.classes.value[:, 0] == pytest.approx([900, 100], rel=0.01)
    assert found.classes.low[0, 0] <= 900 <= found.classes.high[0, 0]
    assert found.classes.low[1, 0] <= 100 <= found.classes.high[1, 0]
    assert np.all(found.classes.high - found.classes.low < 100)


def test_classes_that_always_run_together_are_split_by_time_with_bounds_that_say_so() -> None:
    """Each sample holds 2 µs of one and 6 µs of the other: 800 in all, 200 and 600 by time, who knows."""
    launches = [launch for i in range(200) for launch in ((10 * i + 1, 10 * i + 3, 0), (10 * i + 3, 10 * i + 9, 1))]
    found = _attributed(_samples([800] * 200), _work(*launches))
    assert found.classes.value[:, 0] == pytest.approx([200, 600])
    assert found.classes.low[:, 0] == pytest.approx([0, 0])
    assert np.all(found.classes.high[:, 0] > [300, 700])
    assert np.all(found.classes.high[:, 0] <= [801, 1201])


def test_launches_of_one_class_that_differ_in_duration_by_an_octave_may_count_differently() -> None:
    """2 and 8 µs, 100 and 1000: the mean is over both, and their neighbour, 50, does not pay for it."""
    launches = []
    for i in range(150):
        launches += [(20 * i + 0.5, 20 * i + 2.5, 0), (20 * i + 3, 20 * i + 4, 1), (20 * i + 11, 20 * i + 19, 0)]
    found = _attributed(_samples([150, 1000] * 150), _work(*launches))
    assert found.classes.value[0, 0] == pytest.approx(550, rel=0.05)
    assert found.classes.low[0, 0] <= 550 <= found.classes.high[0, 0]
    assert found.classes.low[1, 0] <= 50 <= found.classes.high[1, 0]


def test_overlapping_streams_are_split_by_what_each_counts_alone() -> None:
    """200 launches of each alone, 100 and 500, and 100 times both at once: 600 in a sample."""
    launches, values = [], []
    for i in range(500):
        kind = i % 5
        launches += [(10 * i + 2, 10 * i + 8, 0)] if kind in (0, 1, 4) else []
        launches += [(10 * i + 2, 10 * i + 8, 1)] if kind in (2, 3, 4) else []
        values.append({0: 100, 1: 100, 2: 500, 3: 500, 4: 600}[kind])
    found = _attributed(_samples(values), _work(*launches))
    assert found.classes.value[:, 0] == pytest.approx([100, 500], rel=0.01)


def test_long_launches_on_two_streams_that_nothing_tells_apart_say_so() -> None:
    """Two launches of 50 µs at once, 1000 in all: 500 each by time, and each could have it all."""
    found = _attributed(_samples([0, 200, 200, 200, 200, 200, 0]), _work((10, 60, 0), (10, 60, 1)))
    assert found.match.tolist() == [EXACT, EXACT]
    assert found.exact.value[:, 0] == pytest.approx([500, 500])
    assert np.all(found.exact.low[:, 0] < 100)
    assert np.all(found.exact.high[:, 0] > 900)
    assert np.all(found.exact.high[:, 0] < 1001)


def test_a_mean_counts_its_time_and_idle_is_none() -> None:
    """SMs work for 20 % of a sample of 10 µs: 2 µs, half of a launch of 4 µs; and 90 % of a long one."""
    samples = _samples([0.2, 0, 0.9, 0.9, 0.9, 0.9, 0], "sm_active_share")
    found = _attributed(samples, _work((3, 7, 0), (20, 60, 1)))
    assert found.classes.value[:, 0] == pytest.approx([0.5, 0.9])
    assert found.exact.value[:, 0] == pytest.approx([0.9])


def test_no_share_is_above_one() -> None:
    """4 µs of work in a launch that was recorded as 3 µs."""
    found = _attributed(_samples([0.4, 0], "sm_active_share"), _work((3, 6, 0)))
    assert (found.classes.value[0, 0], found.classes.high[0, 0]) == (1, 1)


def test_copies_take_their_share_and_are_no_kernels() -> None:
    """A copy alone, 500 in 10 µs; a kernel alone, 80."""
    found = _attributed(_samples([500, 80, 0]), _work((12, 18, 0), copies=[(0, 10)]))
    assert found.balance[:, 0].tolist() == [80, 500, 0, 0]
    assert found.balance_ns.tolist() == [6 * US, 10 * US, 0, 14 * US]
    assert found.classes.value.tolist() == [[80]]


def test_time_in_which_recording_was_off_takes_its_share() -> None:
    found = _attributed(_samples([0, 70, 900, 900, 0]), _work((12, 18, 0), off=[(20, 40)]))
    assert found.balance[:, 0].tolist() == [70, 0, 1800, 0]
    assert found.balance_ns.tolist() == [6 * US, 0, 20 * US, 24 * US]


def test_overlapping_spans_without_recording_are_counted_once() -> None:
    """Two processes on one GPU, each off for a while."""
    found = _attributed(_samples([100] * 5), _work(off=[(10, 30), (20, 40), (12, 14)]))
    assert found.balance_ns.tolist() == [0, 0, 30 * US, 20 * US]
    assert found.balance[:, 0].tolist() == [0, 0, 300, 200]


def test_a_launch_that_was_sampled_in_part_is_scaled_and_not_exact() -> None:
    """60 µs of which 30 were lost: 300 were counted in the others."""
    start = np.array([0, 10, 20, 60, 70]) * US
    samples = Samples(start, start + 10 * US, np.array([[0.0], [100], [100], [100], [0]]), ("dram_read_bytes",))
    found = _attributed(samples, _work((10, 70, 0)))
    assert found.match.tolist() == [CLASS]
    assert found.kernels.tolist() == []
    assert found.covered.tolist() == [0.5]
    assert found.classes.value[0, 0] == pytest.approx(600)
    # What was not seen may have been nothing, or twice as much.
    assert found.classes.low[0, 0] <= 300
    assert found.classes.high[0, 0] >= 900
    assert found.balance[:, 0].tolist() == [300, 0, 0, 0]


def test_a_class_of_which_less_than_half_a_launch_was_sampled_has_no_value() -> None:
    found = _attributed(_samples([0, 70]), _work((18, 30, 0), (40, 50, 1)))
    assert found.match.tolist() == [NONE, NONE]
    assert np.isnan(found.classes.value).all()
    assert np.isnan(found.classes.low).all()
    assert np.isnan(found.classes.high).all()
    assert found.balance[:, 0].tolist() == [70, 0, 0, 0]


def test_launches_without_duration_and_thousands_in_one_sample() -> None:
    """1000 launches of 5 ns, 1000 of none, of which a sample that they have for themselves tells 3 each."""
    begin = 20 * US + 5 * np.arange(2000)
    end = begin + np.repeat([5, 0], 1000)
    samples = _samples([0, 0, 6000, 0])
    found = _attributed(samples, work_of(begin, end, np.zeros(2000, np.int64)))
    assert found.classes.value[0, 0] == pytest.approx(3)
    assert found.balance[:, 0] == pytest.approx([6000, 0, 0, 0])


def test_samples_that_cannot_be_used_are_set_aside() -> None:
    """The first, from time 0; one without length; one that begins before the last one ends; one without a number."""
    start = np.array([-9_000_000, 1_000_000, 1_010_000, 1_010_000, 1_015_000, 1_020_000, 1_030_000])
    end = np.array([1_000_000, 1_010_000, 1_010_000, 1_020_000, 1_020_000, 1_030_000, 1_040_000])
    values = np.array([9e9, 50, 9e9, 60, 9e9, 70, np.nan])[:, None]
    found = _attributed(Samples(start, end, values, ("dram_read_bytes",)), _work((1005, 1025, 0)))
    assert found.set_aside_count == 4
    assert found.balance[:, 0].sum() == 180


def test_a_sample_that_begins_a_hundredth_early_is_used_from_where_the_last_one_ends() -> None:
    """As CUPTI gives them where it sets its clock right; the counts are all there."""
    start = np.array([1_000_000, 1_009_884, 1_020_000])
    samples = Samples(
        start, np.array([1_010_000, 1_020_000, 1_030_000]), np.array([[0.0], [80], [0]]), ("dram_read_bytes",)
    )
    found = _attributed(samples, _work((1012, 1016, 0)))
    assert found.set_aside_count == 0
    assert found.balance[:, 0].sum() == 80
    assert found.classes.value.tolist() == [[80]]


def test_samples_in_any_order() -> None:
    samples = _samples([0, 40, 100, 100, 100, 70, 0])
    mixed = np.array([3, 0, 6, 2, 5, 1, 4])
    shuffled = Samples(samples.start_ns[mixed], samples.end_ns[mixed], samples.values[mixed], samples.metrics)
    assert _attributed(shuffled, _work((16, 57, 0))).exact.value.tolist() == [[410]]


def test_a_metric_without_a_number_is_left_out() -> None:
    samples = _samples([0, 70, 0])
    values = np.append(samples.values, np.full((3, 1), np.nan), axis=1)
    found = _attributed(
        Samples(samples.start_ns, samples.end_ns, values, ("dram_read_bytes", "x.sum")), _work((12, 15, 0))
    )
    assert (found.metrics, found.set_aside_count) == (("dram_read_bytes",), 0)
    assert found.classes.value.tolist() == [[70]]


def test_counts_below_zero_are_kept() -> None:
    """CUPTI's real-time hit rate falls below 0 where more is fetched than was looked up."""
    found = _attributed(_samples([0, -7, -20, -20, -20, -6, 0], "l2_hit_sectors_count"), _work((16, 57, 0)))
    assert found.exact.value.tolist() == [[-73]]
    assert found.balance[:, 0].tolist() == [-73, 0, 0, 0]


@pytest.mark.parametrize("length", [0, 1, 2])
def test_hardly_any_samples(length: int) -> None:
    found = attribute(_samples([5.0] * length), _work((0, 3, 0)), 1)
    assert found.balance[:, 0].sum() == 5 * length
    assert (found.skews.direct.skew_ns, np.isnan(found.skews.direct.sd_ns)) == (0, True)


def test_no_work_at_all() -> None:
    found = _attributed(_samples([5, 6, 7]), work_of(NOTHING, NOTHING, NOTHING))
    assert found.balance[:, 0].tolist() == [0, 0, 0, 18]
    assert found.classes.value.shape == (0, 1)


def test_a_metric_that_counts_nothing() -> None:
    found = _attributed(_samples([0, 0, 0]), _work((12, 15, 0)))
    assert found.classes.value.tolist() == [[0]]
    assert found.classes.high.tolist() == [[0]]


def test_samples_of_other_lengths_beside_each_other() -> None:
    """Ten of 5 µs, then ten of 10 µs: a launch of 40 µs across has 2 of one kind and 3 of the other, all told."""
    start = np.append(np.arange(10) * 5, 50 + np.arange(10) * 10) * US
    end = np.append(start[1:], 150 * US)
    samples = Samples(start, end, ((end - start) / US)[:, None], ("dram_read_bytes",))
    found = _attributed(samples, _work((40, 80, 0)))
    assert found.exact.value.tolist() == [[40]]


def test_more_classes_than_are_solved_for_still_add_up() -> None:
    """700 classes of one launch each: those beyond the longest-running 511 are shared out as one, by time."""
    random = np.random.default_rng(1)
    begin = np.cumsum(random.integers(1500, 6000, 700))
    sim = simulate(begin, begin + 1400, random.permutation(700), 10 * US, random, EVEN)
    found = attribute(sim.samples, sim.work, 700, NO_SKEW)
    np.testing.assert_allclose(found.balance.sum(axis=0), sim.samples.values.sum(axis=0), rtol=1e-12)
    assert np.isfinite(found.classes.value).all()
    inside = (found.classes.low <= sim.class_means()) & (sim.class_means() <= found.classes.high)
    assert inside.mean() > 0.9
