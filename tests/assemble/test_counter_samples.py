"""Samples as the samplers wrote them to rows of a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from spikeprof.profiler import store
from spikeprof.profiler.assemble.counter_samples import write_counter_samples
from spikeprof.profiler.collectors.pm_files import SampledSet
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import Manifest

T0 = 1_790_000_000_000_000_000


def sampled(folder: Path, number: int, device: int, metrics: tuple[str, ...], begins: list[int]) -> SampledSet:
    path = folder / f"pm-{device}-{number}.bin"
    times = np.array([[T0 + begin, T0 + begin + 10] for begin in begins], np.int64)
    values = np.arange(len(begins) * len(metrics), dtype=np.float64).reshape(len(begins), -1) + 100 * number
    path.write_bytes(np.concatenate([times.view(np.float64), values], axis=1).tobytes())
    return SampledSet(device, metrics, 10, path)


@pytest.mark.parametrize("row_group_rows", [1, 3, 1000])
def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group_rows: int) -> None:
    monkeypatch.setattr(store, "ROW_GROUP_ROWS", row_group_rows)
    folder = store.create_folder(tmp_path / "t")
    sets = [
        sampled(tmp_path, 0, 0, ("a", "b"), [0, 10, 40]),
        sampled(tmp_path, 1, 0, ("c",), [20, 30]),
        sampled(tmp_path, 2, 1, ("b",), [5]),
        SampledSet(1, ("d",), 10, tmp_path / "never.bin"),
    ]
    assert write_counter_samples(folder, sets, T0) == 6
    rows = pq.read_table(folder / "counter_samples.parquet").to_pylist()
    assert [(r["device"], r["start_ns"], r["end_ns"], r["metric"], r["value"]) for r in rows] == [
        (0, 0, 10, "a", 0.0),
        (0, 0, 10, "b", 1.0),
        (1, 5, 15, "b", 200.0),
        (0, 10, 20, "a", 2.0),
        (0, 10, 20, "b", 3.0),
        (0, 20, 30, "c", 100.0),
        (0, 30, 40, "c", 101.0),
        (0, 40, 50, "a", 4.0),
        (0, 40, 50, "b", 5.0),
    ]


def test_nothing_sampled_is_an_empty_table(tmp_path: Path) -> None:
    folder = store.create_folder(tmp_path / "t")
    assert write_counter_samples(folder, [], T0) == 0
    table = pq.read_table(folder / "counter_samples.parquet")
    assert table.num_rows == 0
    assert table.column_names == TABLES["counter_samples"].arrow.names


def test_times_that_cannot_be_true_are_left_out(tmp_path: Path) -> None:
    """What a power cut leaves: zeros. And samples that end as they begin, or before, or at another time altogether."""
    one = sampled(tmp_path, 0, 0, ("a",), [0, 10, 20, 30, 40, 50])
    rows = np.fromfile(one.path).reshape(-1, 3)
    rows[1] = 0
    rows.view(np.int64)[2, 1] -= 10
    rows.view(np.int64)[3, 1] -= 11
    rows.view(np.int64)[4, :2] += 2**54
    rows.tofile(one.path)
    folder = store.create_folder(tmp_path / "t")
    assert write_counter_samples(folder, [one], T0) == 2
    assert pq.read_table(folder / "counter_samples.parquet").column("start_ns").to_pylist() == [0, 50]
    store.write_manifest(folder, Manifest("spikeprof", T0, 60))
    assert store.read_trace(folder).sound().damaged == {}
