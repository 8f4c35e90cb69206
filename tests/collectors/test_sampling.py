from __future__ import annotations

import numpy as np
import pytest

from spikeprof.profiler.collectors.sampling import Series, joined_samples, samples_table, together
from spikeprof.profiler.schema import TABLES

NAN = float("nan")


class Known(Series):
    def __init__(self, device: int, metrics: tuple[str, ...], readings: dict[int, list[float]]) -> None:
        super().__init__(f"GPU {device}", device)
        self.metrics = metrics
        for t_ns, row in readings.items():
            self.times.append(t_ns)
            self.values.extend(row)

    def read(self) -> None:
        return None


def test_a_row_for_each_value_that_is_one() -> None:
    series = [
        Known(0, ("power_w", "gpu_busy_share"), {10: [700.0, 0.5], 30: [NAN, 0.25]}),
        Known(2, ("gpu_busy_share",), {20: [1.0]}),
        Known(3, (), {}),
    ]
    table = samples_table(series)
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (0, 10, "power_w", 700.0),
        (0, 10, "gpu_busy_share", 0.5),
        (2, 20, "gpu_busy_share", 1.0),
        (0, 30, "gpu_busy_share", 0.25),
    ]
    assert table.schema == TABLES["samples"].arrow


def test_tables_of_several_collectors_are_one() -> None:
    first = samples_table([Known(0, ("power_w",), {10: [1.0], 30: [3.0]})])
    second = samples_table([Known(0, ("gpm_dram_share",), {20: [0.5]})])
    table = joined_samples([first, second, TABLES["samples"].empty()])
    assert table.schema == TABLES["samples"].arrow
    assert table["t_ns"].to_pylist() == [10, 20, 30]
    assert table["metric"].to_pylist() == ["power_w", "gpm_dram_share", "power_w"]


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([[1.0], [2.0], [3.0]], [1.0, 3.0]),
        ([[1.0], [2.0], [3.0], [4.0]], [1.0, 3.0]),
        ([[NAN], [2.0], [3.0], [NAN], [NAN]], [2.0, 3.0, NAN]),  # what only the later of two holds is kept
    ],
)
def test_thinning_makes_one_reading_of_two(rows: list[list[float]], kept: list[float]) -> None:
    series = Known(0, ("power_w",), {10 * i: row for i, row in enumerate(rows)})
    assert series.thin() == len(rows) - len(kept)
    assert series.times.tolist() == [20 * i for i in range(len(kept))]
    np.testing.assert_array_equal(series.rows()[:, 0], kept)


def test_the_same_clause_of_several_is_told_once() -> None:
    clauses = [("no a", "GPU 0"), ("no b", "GPU 1"), ("no a", "GPU 1"), ("no a", "GPU 1")]
    assert together(clauses) == ["GPU 0, GPU 1: no a", "GPU 1: no b"]
