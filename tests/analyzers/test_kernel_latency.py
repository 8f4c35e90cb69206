"""kernel-latency on traces small enough to work out by hand. Times in ns."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tiny
from big import _table
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.kernel_latency import KernelLatency
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.trace import Trace


def kernel(start: int, end: int, name: str = "k", **more: Any) -> dict[str, Any]:
    return {"start_ns": start, "end_ns": end, "name": name, **more}


def trace(kernels: list[dict], **more: Any) -> Trace:
    return tiny.trace(kernels=sorted(kernels, key=lambda k: k["start_ns"]), **{"memory_ops": [], **more})


def row(table: dict[str, list], name: str) -> dict[str, Any]:
    i = table["name"].index(name)
    return {column: values[i] for column, values in table.items()}


def test_statistics_per_kernel():
    # a lasts 10, 20, …, 100; b lasts 550 once, on another stream at the same time as all of a
    kernels = [kernel(i * 100, i * 100 + 10 * (i + 1), "a") for i in range(10)] + [kernel(0, 550, "b", stream=8)]
    table = KernelLatency().analyze(trace(kernels)).tables["kernels"]
    assert row(table, "a") == {
        "name": "a",
        "launches_count": 10,
        "total_ns": 550,
        "mean_ns": 55.0,
        "p50_ns": 50,  # nearest rank: the 5th, 9th and 10th of ten
        "p90_ns": 90,
        "p99_ns": 100,
        "min_ns": 10,
        "max_ns": 100,
        "gpu_time_share": 0.5,
        "wall_share": 0.55,  # the wall is 0–1000
        "devices_count": 1,
    }
    assert row(table, "b")["wall_share"] == 0.55


def test_a_kernel_beside_itself_counts_its_wall_once_and_its_time_twice():
    kernels = [kernel(0, 100, "a", stream=1), kernel(50, 150, "a", stream=2), kernel(150, 200, "b")]
    found = KernelLatency().analyze(trace(kernels))
    a = row(found.tables["kernels"], "a")
    assert (a["total_ns"], a["gpu_time_share"], a["wall_share"]) == (200, 0.8, 0.75)
    assert (found.metric("kernel_time_ns"), found.metric("busy_ns"), found.metric("busy_share")) == (250, 200, 1.0)


def test_busy_is_per_device_and_includes_copies():
    kernels = [kernel(0, 100, device=0), kernel(300, 400, device=0), kernel(0, 50, device=1, stream=7)]
    found = KernelLatency().analyze(trace(kernels, memory_ops=[{"start_ns": 90, "end_ns": 200}]))
    assert found.tables["devices"] == {
        "device": [0, 1],
        "kernels_count": [2, 1],
        "wall_ns": [400, 50],
        "busy_ns": [300, 50],
        "idle_ns": [100, 0],
        "busy_share": [0.75, 1.0],
    }
    assert row(found.tables["kernels"], "k")["devices_count"] == 2
    assert row(found.tables["kernels"], "k")["wall_share"] == 250 / 450


def test_time_that_was_not_recorded_does_not_lower_the_busy_share():
    windows = [
        {"start_ns": 0, "end_ns": 200, "state": "traced"},
        {"start_ns": 200, "end_ns": 900, "state": "clean"},
        {"start_ns": 900, "end_ns": 1000, "state": "traced"},
    ]
    found = KernelLatency(bins_count=5).analyze(trace([kernel(0, 200), kernel(900, 1000)], windows=windows))
    assert (found.metric("wall_ns"), found.metric("busy_share")) == (300, 1.0)
    assert found.tables["heatmap"]["busy_ns"] == [200, None, None, None, 100]  # no value is not zero


def test_graph_kernels_are_grouped_by_node_of_one_executable_graph_of_one_process():
    nodes = [(0, 1, 7, 10), (0, 1, 7, 30), (0, 1, 8, 5), (0, 2, 7, 50), (1, 1, 7, 9), (0, 0, 0, 99)]
    kernels = [
        kernel(i * 100, i * 100 + ns, rank=rank, graph_id=graph, graph_node_id=node)
        for i, (rank, graph, node, ns) in enumerate(nodes)
    ]
    assert KernelLatency(nodes_count=3).analyze(trace(kernels)).tables["nodes"] == {
        "rank": [0, 0, 1],
        "graph_id": [2, 1, 1],
        "graph_node_id": [7, 7, 7],
        "name": ["k", "k", "k"],
        "launches_count": [1, 2, 1],
        "total_ns": [50, 40, 9],
        "p50_ns": [50, 10, 9],
    }


def test_the_heatmap_shares_a_kernel_out_over_the_bins_it_overlaps():
    kernels = [kernel(0, 35, "a"), kernel(35, 36, "b"), kernel(39, 40, "c")]
    table = KernelLatency(bins_count=4, top_count=1).analyze(trace(kernels)).tables["heatmap"]
    assert table == {
        "kernel": ["a"] * 4 + ["other"] * 4,
        "bin_start_ns": [0, 10, 20, 30] * 2,
        "busy_ns": [10, 10, 10, 5, 0, 0, 0, 2],
    }


spans = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 120), st.sampled_from("abcd")), min_size=1, max_size=30)


@given(spans, st.integers(1, 70), st.integers(1, 4))
def test_the_heatmap_conserves_every_nanosecond(rows, bins, top):
    kernels = [kernel(start, start + length, name) for start, length, name in rows]
    result = KernelLatency(bins_count=bins, top_count=top).analyze(trace(kernels, duration_ns=500))
    table = result.tables["heatmap"]
    shown: Counter[str] = Counter()
    per_bin: Counter[int] = Counter()
    for name, start, ns in zip(*table.values(), strict=True):
        shown[name] += ns or 0
        per_bin[start] += ns or 0
    first = {name: sum(length for _, length, n in rows if n == name) for name in result.tables["kernels"]["name"]}
    assert {name: ns for name, ns in shown.items() if name != "other"} == first
    assert shown.total() == sum(length for _, length, _ in rows) == result.metric("kernel_time_ns")
    edges = [*sorted(per_bin), max(k["end_ns"] for k in kernels)]
    for low, high in pairwise(edges):
        assert per_bin[low] == sum(max(0, min(high, k["end_ns"]) - max(low, k["start_ns"])) for k in kernels)


def test_only_the_largest_kernels_are_listed_and_the_rest_is_other():
    kernels = [kernel(i * 100, i * 100 + 10 + i, f"k{i}") for i in range(5)]
    found = KernelLatency(top_count=2).analyze(trace(kernels))
    assert found.tables["kernels"]["name"] == ["k4", "k3"]
    assert found.metric("distinct_kernels_count") == 5
    assert set(found.tables["heatmap"]["kernel"]) == {"k4", "k3", "other"}


def test_kernels_of_no_length_count_and_reversed_ones_do_not():
    found = KernelLatency().analyze(trace([kernel(0, 0), kernel(10, 30), kernel(50, 40)]))
    assert row(found.tables["kernels"], "k")["launches_count"] == 2
    assert (found.metric("kernels_count"), found.metric("kernel_time_ns")) == (2, 20)
    only = KernelLatency().analyze(trace([kernel(5, 5)]))
    assert (only.metric("kernels_count"), only.metric("tiny_time_share"), only.metric("busy_share")) == (1, None, None)


def test_without_copies_busy_time_is_not_given():
    whole = trace([kernel(0, 100)])
    found = KernelLatency().analyze(replace(whole, tables={"kernels": whole.table("kernels")}))
    metric = next(m for m in found.metrics if m.name == "busy_share")
    assert metric.value is None
    assert "copies were not recorded" in metric.reason


# -- rules ---------------------------------------------------------------------------------------------------------


def rules(result: Result) -> list[str]:
    return [finding.rule for finding in result.findings]


def test_many_tiny_kernels():
    kernels = [kernel(i * 10_000, i * 10_000 + 2_000) for i in range(100)]
    (finding,) = KernelLatency().analyze(trace(kernels)).findings
    values = {e.metric: e.value for e in finding.evidence}
    assert finding.rule == "many-tiny-kernels"
    assert values["tiny_launches_share"] == values["tiny_time_share"] == 1.0
    assert values["short_gaps_share"] == pytest.approx(99 * 8_000 / 992_000)
    assert finding.saving.upper_bound_ns == 992_000
    assert "CUDA graph" in finding.recommendation


def test_long_gaps_are_not_blamed_on_tiny_kernels():
    # two tiny kernels and one long one every millisecond: 66 % of the launches, 1 % of the time, idle for long
    kernels = [
        kernel(i * 1_000_000 + at, i * 1_000_000 + at + ns)
        for i in range(100)
        for at, ns in ((0, 2_000), (2_000, 2_000), (4_000, 300_000))
    ]
    found = KernelLatency(tail_ratio=1e9).analyze(trace(kernels, duration_ns=100_000_000))
    assert rules(found) == []
    assert found.metric("busy_share") < 0.4
    patient = KernelLatency(tail_ratio=1e9, short_gap_ns=1_000_000).analyze(trace(kernels, duration_ns=100_000_000))
    assert rules(patient) == ["many-tiny-kernels"]


def test_tiny_kernels_of_a_graph_are_to_be_fused():
    kernels = [kernel(i * 10_000, i * 10_000 + 2_000, graph_id=1, graph_node_id=i + 1) for i in range(100)]
    (finding,) = KernelLatency().analyze(trace(kernels)).findings
    assert finding.recommendation.startswith("Fuse")


def test_tiny_kernels_beside_long_ones_on_a_busy_device_are_no_problem():
    kernels = [kernel(i * 100_000, i * 100_000 + 98_000, "gemm", grid_x=i) for i in range(100)]
    kernels += [kernel(i * 100_000 + 98_000, i * 100_000 + 100_000, "tiny") for i in range(100)]
    assert rules(KernelLatency(dominant_share=1.0).analyze(trace(kernels))) == []


def test_long_tail():
    # 196 of 10 µs, 4 of 50 µs: p99 of 200 is the 198th
    kernels = [kernel(i * 60_000, i * 60_000 + (50_000 if i >= 196 else 10_000)) for i in range(200)]
    (finding,) = KernelLatency().analyze(trace(kernels)).findings
    values = {e.metric: e.value for e in finding.evidence}
    assert finding.rule == "long-tail"
    assert (values["p50_ns"], values["p99_ns"], values["p99_over_p50_ratio"]) == (10_000, 50_000, 5.0)
    assert (finding.saving.upper_bound_ns, finding.saving.of) == (4 * 40_000, "local")
    assert finding.scope["kernel"] == "k"


def test_one_kernel_on_two_sizes_of_input_is_not_unsteady():
    kernels = [kernel(i * 60_000, i * 60_000 + (50_000 if i % 2 else 10_000), grid_x=i % 2) for i in range(400)]
    assert rules(KernelLatency().analyze(trace(kernels))) == []


def test_one_slow_execution_in_a_hundred_is_not_a_tail():
    kernels = [kernel(i * 60_000, i * 60_000 + (50_000 if i == 7 else 10_000)) for i in range(100)]
    assert rules(KernelLatency().analyze(trace(kernels))) == []  # p99 of 100 is the 99th


def test_dominant_kernel():
    kernels = [kernel(0, 51_000, "attention"), kernel(51_000, 100_000, "gemm")]
    (finding,) = KernelLatency().analyze(trace(kernels)).findings
    assert (finding.rule, finding.severity, finding.scope) == ("dominant-kernel", "info", {"kernel": "attention"})
    assert finding.evidence[0].value == 0.51
    half = [kernel(0, 50_000, "attention"), kernel(50_000, 100_000, "gemm")]
    assert rules(KernelLatency().analyze(trace(half))) == []


def test_the_share_of_the_wall_counts_recorded_time_only():
    """A kernel that runs on while recording is off has no more of the wall than there is."""
    windows = [{"start_ns": 0, "end_ns": 100}, {"start_ns": 100, "end_ns": 10_000, "state": "off"}]
    kernels = [{"start_ns": 50, "end_ns": 9_000, "name": "long"}, {"start_ns": 0, "end_ns": 25, "name": "short"}]
    trace = tiny.trace(kernels=sorted(kernels, key=lambda k: k["start_ns"]), memory_ops=[], windows=windows)
    table = KernelLatency().analyze(trace).tables["kernels"]
    assert dict(zip(table["name"], table["wall_share"], strict=True)) == {"long": 0.5, "short": 0.25}
    assert dict(zip(table["name"], table["total_ns"], strict=True)) == {"long": 8_950, "short": 25}


def test_many_kernels_on_many_devices_in_a_recording_of_a_day():
    """Too many names, devices and nanoseconds to lay them behind one another on one number line of 64 bits."""
    day, names, devices = 86_400 * 10**9, 5_000, 200
    at = np.sort(np.random.default_rng(1).integers(0, day, names * 20))
    number = np.arange(len(at))
    columns = {"start_ns": at, "end_ns": at + 1000, "name": number % names, "device": number // names * 10 % devices}
    kernels = _table("kernels", 0, columns, {"name": [f"k{i}" for i in range(names)]})
    whole = tiny.trace(duration_ns=2 * day, memory_ops=[])
    result = run_one(replace(whole, tables={**whole.tables, "kernels": kernels}), KernelLatency())
    assert result.status == "findings", result.reason  # they are tiny
    assert result.tables["kernels"]["devices_count"] == [20] * 20
    assert result.tables["kernels"]["wall_share"] == [20 * 1000 / result.metric("wall_ns")] * 20
