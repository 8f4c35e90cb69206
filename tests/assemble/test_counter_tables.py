"""Attributed counters as tables of the trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from tiny import table

from spikeprof.profiler.assemble.counter_overlap import Samples
from spikeprof.profiler.assemble.counter_tables import COLUMNS, counter_tables
from spikeprof.profiler.schema import TABLES

US = 1000
Rows = Iterable[Mapping[str, Any]]


def _samples(values: Sequence[Sequence[float]], metrics: Sequence[str], begin_us: int = 0) -> Samples:
    start = (begin_us + 10 * np.arange(len(values))) * US
    return Samples(start, start + 10 * US, np.array(values, float), tuple(metrics))


def _kernel(begin_us: float, end_us: float, name: str = "a", **more: Any) -> dict[str, Any]:
    return {"start_ns": int(begin_us * US), "end_ns": int(end_us * US), "name": name, **more}


def _tables(
    sampled: Sequence[tuple[int, Samples]], kernels: Rows, memory_ops: Rows = (), windows: Rows = ()
) -> dict[str, list[dict[str, Any]]]:
    inputs = [
        table(name, rows).select(COLUMNS[name])
        for name, rows in (("kernels", kernels), ("memory_ops", memory_ops), ("windows", windows))
    ]
    found = counter_tables(sampled, *inputs).tables
    for name, one in found.items():
        assert one.schema == TABLES[name].arrow, name
    return {name: one.to_pylist() for name, one in found.items()}


def test_a_class_and_a_launch_of_its_own() -> None:
    """Two short launches of one kernel, 70 and 90, and one of 40 µs of another, 400."""
    samples = _samples([[0], [70], [90], [0], [100], [100], [100], [100], [0]], ["dram_read_bytes"])
    kernels = [_kernel(12, 15), _kernel(22, 25), _kernel(40, 80, "b", grid_x=7)]
    found = _tables([(0, samples)], kernels)
    classes = [
        {k: row[k] for k in ("class_id", "device", "name", "grid_x", "block_x", "launches_count", "total_ns")}
        for row in found["kernel_classes"]
    ]
    assert classes == [
        {"class_id": 0, "device": 0, "name": "a", "grid_x": 1, "block_x": 128, "launches_count": 2, "total_ns": 6 * US},
        {
            "class_id": 1,
            "device": 0,
            "name": "b",
            "grid_x": 7,
            "block_x": 128,
            "launches_count": 1,
            "total_ns": 40 * US,
        },
    ]
    rows = [[row[k] for k in ("kernel_id", "class_id", "metric", "value", "match")] for row in found["counters"]]
    assert rows == [
        [-1, 0, "dram_read_bytes", 80, "class"],
        [-1, 1, "dram_read_bytes", 400, "exact"],
        [2, 1, "dram_read_bytes", 400, "exact"],
    ]
    assert all(row["low"] <= row["value"] <= row["high"] for row in found["counters"])
    balance = {row["place"]: (row["value"], row["time_ns"]) for row in found["counter_balance"]}
    assert balance == {
        "kernels": (560, 46 * US),
        "memory_ops": (0, 0),
        "not_traced": (0, 0),
        "idle": (0, 44 * US),
    }


def test_classes_differ_by_name_grid_and_block_alone() -> None:
    kinds = [
        {},
        {"name": "b"},
        *({f"{what}_{axis}": 3} for what in ("grid", "block") for axis in "xyz"),
        {"stream": 9, "registers_count": 99, "shared_dynamic_bytes": 5, "correlation_id": 3, "rank": 1},
    ]
    kernels = [_kernel(10 * i + 1, 10 * i + 5, **kind) for i, kind in enumerate(kinds)]
    found = _tables([(0, _samples([[5.0]] * 10, ["dram_read_bytes"]))], kernels)
    launches = [row["launches_count"] for row in found["kernel_classes"]]
    assert sorted(launches) == [1, 1, 1, 1, 1, 1, 1, 2]


def test_each_gpu_has_its_own_samples_kernels_and_classes() -> None:
    kernels = [_kernel(12, 15, device=0), _kernel(12, 15, device=3), _kernel(13, 16, device=1)]
    sampled = [
        (3, _samples([[0], [30], [0]], ["dram_read_bytes"])),
        (0, _samples([[0], [7], [0]], ["dram_read_bytes"])),
    ]
    found = _tables(sampled, kernels)
    assert [(row["class_id"], row["device"]) for row in found["kernel_classes"]] == [(0, 0), (1, 3)]
    assert [(row["class_id"], row["value"]) for row in found["counters"]] == [(0, 7), (1, 30)]
    kernel_balance = {r["device"]: r["value"] for r in found["counter_balance"] if r["place"] == "kernels"}
    assert kernel_balance == {0: 7, 3: 30}


def test_kernel_ids_are_rows_of_the_whole_table() -> None:
    kernels = [_kernel(0, 5, device=1), _kernel(0, 40, device=0), _kernel(41, 80, device=1)]
    found = _tables([(1, _samples([[1.0]] * 9, ["dram_read_bytes"]))], kernels)
    assert [row["kernel_id"] for row in found["counters"] if row["kernel_id"] >= 0] == [2]


def test_lists_of_metrics_that_take_turns_share_classes_and_count_launches_of_both() -> None:
    """Three launches in the first list's time, two in the second's."""
    first = _samples([[0, 0.0], [10, 0.2], [10, 0.2], [10, 0.2]], ["dram_read_bytes", "sm_active_share"])
    second = _samples([[0], [8], [8], [0]], ["instructions_count"], begin_us=1000)
    kernels = [_kernel(10 * i + 2, 10 * i + 6) for i in (1, 2, 3, 101, 102)]
    found = _tables([(0, first), (0, second)], kernels)
    assert [row["launches_count"] for row in found["kernel_classes"]] == [5]
    values = {row["metric"]: row["value"] for row in found["counters"]}
    assert values == {"dram_read_bytes": 10, "sm_active_share": 0.5, "instructions_count": 8}
    # Shares do not add up to anything.
    assert {row["metric"] for row in found["counter_balance"]} == {"dram_read_bytes", "instructions_count"}


def test_a_class_that_ran_while_nothing_was_sampled_says_so() -> None:
    found = _tables([(0, _samples([[0], [7], [0]], ["dram_read_bytes"]))], [_kernel(12, 15), _kernel(500, 505, "b")])
    assert [row["launches_count"] for row in found["kernel_classes"]] == [1, 0]
    rows = found["counters"]
    assert [(row["class_id"], row["match"]) for row in rows] == [(0, "class"), (1, "none")]
    assert all(np.isnan(rows[1][bound]) for bound in ("value", "low", "high"))


def test_copies_and_time_without_recording() -> None:
    windows = [
        {"rank": 0, "state": "traced", "start_ns": 0, "end_ns": 20 * US},
        {"rank": 0, "state": "clean", "start_ns": 20 * US, "end_ns": 30 * US},
        {"rank": 0, "state": "traced", "start_ns": 30 * US, "end_ns": 50 * US},
        {"rank": 1, "state": "off", "start_ns": 0, "end_ns": 50 * US},  # a process that has no kernels here
    ]
    ops = [{"start_ns": 30 * US, "end_ns": 40 * US, "kind": "HtoD"}, {"device": 1, "start_ns": 0, "end_ns": 40 * US}]
    found = _tables([(0, _samples([[1], [7], [50], [20], [3]], ["dram_read_bytes"]))], [_kernel(12, 15)], ops, windows)
    balance = {row["place"]: (row["value"], row["time_ns"]) for row in found["counter_balance"]}
    assert balance == {
        "kernels": (7, 3 * US),
        "memory_ops": (20, 10 * US),
        "not_traced": (50, 10 * US),
        "idle": (4, 27 * US),
    }


def test_samples_without_kernels_and_kernels_without_samples() -> None:
    found = _tables([(0, _samples([[5], [5]], ["dram_read_bytes"]))], [])
    assert (found["kernel_classes"], found["counters"]) == ([], [])
    assert [(row["place"], row["value"]) for row in found["counter_balance"]][-1] == ("idle", 10)
    empty = _tables([], [_kernel(12, 15)])
    assert empty == {"kernel_classes": [], "counters": [], "counter_balance": []}


def test_what_became_of_the_samples() -> None:
    start = np.array([-(10**9), 0, 10 * US])
    samples = Samples(start, np.append(start[1:], 20 * US), np.full((3, 1), 5.0), ("dram_read_bytes",))
    inputs = [table(name, rows) for name, rows in (("kernels", [_kernel(12, 15)]), ("memory_ops", []), ("windows", []))]
    (device,) = counter_tables([(2, samples)], *inputs).devices
    assert (device.device, device.samples_count, device.set_aside_count, device.skews.direct.skew_ns) == (2, 3, 1, 0)


def test_kernels_in_chunks_with_dictionaries_of_their_own() -> None:
    """As a Parquet file of several row groups is read: the same name has another code in each."""
    parts = [table("kernels", [_kernel(12, 15, "a"), _kernel(22, 25, "b")]), table("kernels", [_kernel(32, 35, "b")])]
    kernels = pa.concat_tables(parts)
    samples = _samples([[0], [7], [30], [40], [0]], ["dram_read_bytes"])
    found = counter_tables([(0, samples)], kernels, table("memory_ops", []), table("windows", [])).tables
    assert found["kernel_classes"]["name"].to_pylist() == ["a", "b"]
    assert found["counters"]["value"].to_pylist() == [7, 35]
