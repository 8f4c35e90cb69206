"""What is usual: numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from spikeprof.analyzers.cache_pierce.baseline import BaselineRow, Baselines
from spikeprof.analyzers.cache_pierce.decide import miss_rate_limit
from spikeprof.analyzers.cache_pierce.options import Options

OPTIONS = Options(cold_start_s=15.0, baseline_s=50.0)  # cells of 5 s: 3 make a baseline, 10 are kept
BORN_S = np.array([0.0])


def learn(cells: list[tuple[float, float]], baselines: Baselines | None = None, first_s: float = 0.0) -> Baselines:
    """One row that saw (look-ups, misses) in cells of 5 s."""
    if baselines is None:
        baselines = Baselines(OPTIONS)
        baselines.grow(1)
        baselines.begin(0, "t", "p", 0.0)
    for at, (lookups, misses) in enumerate(cells):
        now_s = first_s + 5.0 * at
        baselines.close(now_s, BORN_S)
        if lookups:
            baselines.add(np.array([0]), now_s, np.array([lookups]), np.array([misses]))
    baselines.close(first_s + 5.0 * len(cells) + 10, BORN_S)
    return baselines


def test_the_short_view_is_a_median_and_the_misses_of_the_middle_cells() -> None:
    # rates of 10, 20, 30, 40 per second; the middle half of the miss rates 0, 10, 20, 80 % is 10 and 20 %
    of_row = learn([(50, 0), (100, 10), (150, 30), (200, 160)]).of(0)
    assert of_row.short_qps == 25
    assert of_row.short_miss_rate == pytest.approx(40 / 250)
    assert of_row.learned_s == 20


def test_nothing_is_usual_before_the_cold_start_is_over() -> None:
    assert learn([(100, 10)] * 2).of(0).qps is None
    assert learn([(100, 10)] * 3).of(0).qps == 20


def test_one_burst_does_not_move_it() -> None:
    of_row = learn([(500, 50)] * 8 + [(50_000, 49_000)]).of(0)
    assert of_row.short_qps == 100
    assert of_row.miss_rate == pytest.approx(0.1)


def test_tainted_cells_are_left_out() -> None:
    baselines = learn([(500, 50)] * 4)
    baselines.add(np.array([0]), 40.0, np.array([5000.0]), np.array([5000.0]))
    baselines.taint(np.array([True]), 42.0)
    before = baselines.of(0)
    baselines.add(np.array([0]), 50.0, np.array([500.0]), np.array([50.0]))
    baselines.close(70.0, BORN_S)
    after = baselines.of(0)
    assert (before.reference_qps, after.reference_qps) == (100, 100)
    assert after.learned_s == 25


def test_cells_in_which_nothing_was_looked_up_at_all_say_nothing() -> None:
    baselines = learn([(500, 50)] * 4)
    learn([(500, 50)], baselines, first_s=10_000.0)
    assert baselines.of(0).qps == 100
    assert baselines.of(0).learned_s == 25


def test_a_ramp_drags_the_short_view_but_not_the_reference() -> None:
    baselines = learn([(1000, 50)] * 12)
    ramp = [(1000 + 200 * at, 50 + 200 * at) for at in range(1, 25)]
    of_row = learn(ramp, baselines, first_s=60.0).of(0)
    assert of_row.short_qps is not None
    assert of_row.short_qps > 800  # the last 10 cells: the median of 20·(16…25) more
    assert of_row.qps == pytest.approx(200, rel=0.12)
    assert of_row.miss_rate == pytest.approx(0.05, rel=0.12)


def test_a_quiet_row_takes_the_miss_rate_of_all() -> None:
    baselines = Baselines(OPTIONS)
    baselines.grow(2)
    for row in (0, 1):
        baselines.begin(row, "t", str(row), 0.0)
    for at in range(4):
        baselines.close(5.0 * at, np.zeros(2))
        baselines.add(np.array([0, 1]), 5.0 * at, np.array([1000.0, 2.0]), np.array([100.0, 0.0]))
    baselines.close(40.0, np.zeros(2))
    assert baselines.of(1).miss_rate == pytest.approx(400 / 4008)


def test_rows_make_the_same_baseline_again() -> None:
    row = learn([(500, 50)] * 6).to_row(0, "t", "p", 30.0)
    assert row == BaselineRow("t", "p", 100.0, 0.1, 100.0, 0.1, 30.0, 30.0)
    restored = Baselines(OPTIONS, [row])
    restored.grow(2)
    restored.begin(0, "t", "p", 40.0)
    restored.begin(1, "t", "other", 40.0)
    assert (restored.of(0).qps, restored.of(0).miss_rate) == (100, pytest.approx(0.1))
    assert restored.is_kept(0)
    assert restored.of(1).qps is None


def test_an_old_row_is_not_used() -> None:
    restored = Baselines(OPTIONS, [BaselineRow("t", "p", 100.0, 0.1, 100.0, 0.1, 30.0, 30.0)])
    restored.grow(1)
    restored.begin(0, "t", "p", 30.0 + 8 * 86400)
    assert restored.of(0).qps is None


def test_a_row_is_expected_in_a_wider_one_once_merged() -> None:
    baselines = Baselines(OPTIONS)
    baselines.grow(2)
    for row in (0, 1):
        baselines.begin(row, "t", str(row), 0.0)
    for at in range(4):
        baselines.close(5.0 * at, np.zeros(2))
        baselines.add(np.array([0, 1]), 5.0 * at, np.array([1000.0, 500.0]), np.array([100.0, 200.0]))
    baselines.close(40.0, np.zeros(2))
    baselines.merge(1, 0)
    assert baselines.of(0).qps == 300
    assert baselines.of(0).miss_rate == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("usual", "limit"), [(0.0, 0.05), (0.01, 0.05), (0.05, 0.15), (0.2, 0.6), (0.25, 0.75), (0.4, 0.8), (0.7, 0.9)]
)
def test_limits_of_the_miss_rate(usual: float, limit: float) -> None:
    # three times as much; from 1/4 on a hit rate of a third: 1 - (1 - 0.4) / 3 = 0.8; at least 5 %
    assert miss_rate_limit(np.array([usual]), Options())[0] == pytest.approx(limit)
