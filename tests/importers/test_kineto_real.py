"""Other people's torch.profiler files, against numbers worked out without this project."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable
from decimal import ROUND_HALF_EVEN, Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from importers.kineto_files import rows
from paths import SHARED, needs_shared

from spikeprof.profiler.errors import DamagedTrace, ForeignFile, InputError, TraceNotFound
from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.trace import Trace

TRACES = SHARED / "traces"
REPROS = TRACES / "bug_repros"
GPU_CATEGORIES = {"kernel": "kernels"} | dict.fromkeys(["gpu_memcpy", "gpu_memset", "memcpy", "memset"], "memory_ops")

Interval = tuple[int, int]


def union_ns(intervals: Iterable[Interval]) -> int:
    """Length of the union, one interval after the other: slow, and nobody else's code."""
    total, reach = 0, None
    for start, end in sorted(intervals):
        if reach is None or start > reach:
            total, reach = total + end - start, end
        elif end > reach:
            total, reach = total + end - reach, end
    return total


def intervals(trace: Trace, table: str) -> list[Interval]:
    return list(zip(trace.column(table, "start_ns").tolist(), trace.column(table, "end_ns").tolist(), strict=True))


def _oracle() -> list[Any]:
    path = TRACES / "busy_oracle.tsv"
    if not path.is_file():
        return [pytest.param({}, id="absent", marks=pytest.mark.skip("the folder of shared real inputs is not here"))]
    with path.open() as lines:
        return [pytest.param(row, id=row["file"][-70:]) for row in csv.DictReader(lines, delimiter="\t")]


@pytest.mark.parametrize("expected", _oracle())
def test_busy_times_match_three_other_tools(expected: dict[str, str]) -> None:
    trace = open_trace(TRACES / expected["file"])
    kernels, copies = intervals(trace, "kernels"), intervals(trace, "memory_ops")
    both = kernels + copies
    found_us = {
        "busy_union_all_us": union_ns(both) / 1e3,
        "span_us": (max(end for _, end in both) - min(start for start, _ in both)) / 1e3,
        "kernel_union_us": union_ns(kernels) / 1e3,
        "mem_union_us": union_ns(copies) / 1e3,
    }
    assert found_us == {name: pytest.approx(float(expected[name]), rel=1e-3, abs=1e-9) for name in found_us}
    assert trace.manifest.collectors["kineto"].set_aside_count == 0


@lru_cache(maxsize=1)
def _manifest() -> dict[str, dict[str, str]]:
    with (TRACES / "MANIFEST.tsv").open() as lines:
        return {row["path"]: row for row in csv.DictReader(lines, delimiter="\t")}


@pytest.mark.parametrize("expected", _oracle())
def test_counts_match_the_manifest(expected: dict[str, str]) -> None:
    stated = _manifest()[expected["file"]]
    trace = open_trace(TRACES / expected["file"])
    kinds = trace.table("memory_ops").column("kind").to_pylist()
    assert len(trace.table("kernels")) == int(stated["n_kernel"])
    assert sum(kind != "memset" for kind in kinds) == int(stated["n_memcpy"])
    assert sum(kind == "memset" for kind in kinds) == int(stated["n_memset"])
    assert "unknown" not in kinds
    assert len(trace.table("runtime_calls")) == int(stated["cuda_runtime_ev"])  # the driver's included


@needs_shared
@pytest.mark.parametrize(
    "name",
    [
        "AMD-AGI+TraceLens/tests/traces/mi210/gpu_only_trace/gpu_only_trace.json.gz",  # ts beyond what a float can hold
        "AMD-AGI+TraceLens/tests/traces/b200/eager_trace.json.gz",
        "facebookresearch+HolisticTraceAnalysis/tests/data/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
        "tugot17+tokenomics-from-first-principles/trace1.json",
        "pytorch+torchrec/examples/golden_training/trace/sst_long_a2a_optimizer/"
        "ip-172-31-16-248.us-east-2.compute.internal_21147.1698955063520869240.pt.trace.json.gz",
    ],
)
def test_every_gpu_event_is_there_to_the_nanosecond(name: str) -> None:
    """Names, devices, streams, links and times of all rows, against a plain reading with decimal numbers."""
    path = TRACES / name
    data = path.read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    document = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    trace = open_trace(path)
    origin = trace.manifest.t0_unix_ns - int(document.get("baseTimeNanoseconds", 0))

    def whole(us: Decimal) -> int:
        return int((us * 1000).quantize(Decimal(1), ROUND_HALF_EVEN))

    expected: dict[str, list[tuple[Any, ...]]] = {"kernels": [], "memory_ops": []}
    for e in document["traceEvents"]:
        table = GPU_CATEGORIES.get(str(e.get("cat", "")).lower())
        if table:
            start, a = whole(e["ts"]), e["args"]
            label = (e["name"],) if table == "kernels" else (int(a.get("bytes", 0)),)
            link = (int(a["device"]), int(a["stream"]), int(a["correlation"]))
            expected[table].append((start - origin, start + whole(e["dur"]) - origin, *link, *label))
    columns = ("start_ns", "end_ns", "device", "stream", "correlation_id")
    assert sorted(rows(trace, "kernels", *columns, "name")) == sorted(expected["kernels"])
    assert sorted(rows(trace, "memory_ops", *columns, "size_bytes")) == sorted(expected["memory_ops"])


@needs_shared
def test_resnet50_kernel_table_of_the_tensorboard_plugin() -> None:
    trace = open_trace(
        TRACES / "pytorch+kineto/tb_plugin/samples/resnet50_num_workers_0/worker0.1623143089861.pt.trace.json.gz"
    )
    assert sum(end - start for start, end in intervals(trace, "kernels")) == 591_532_000
    assert len(set(trace.table("kernels").column("name").to_pylist())) == 67
    assert trace.table("devices").column("name").to_pylist() == ["Tesla V100-DGXS-32GB"] * 4


@needs_shared
@pytest.mark.parametrize("index", range(4))
def test_ranks_of_four_files(index: int) -> None:
    folder = TRACES / "pytorch+torchrec/examples/golden_training/trace/sst_long_a2a_optimizer"
    trace = open_trace(sorted(folder.glob("*.gz"))[index])
    assert set(trace.column("kernels", "rank").tolist()) == {index}
    assert trace.manifest.options["world_size"] == "4"
    assert "no rank" not in " ".join(trace.manifest.notes)


@needs_shared
def test_host_only_files_are_normal() -> None:
    for path in sorted((TRACES / "facebookresearch+HolisticTraceAnalysis/tests/data/cpu_only").glob("*.gz")):
        trace = open_trace(path)
        assert len(trace.table("kernels")) == 0
        assert len(trace.table("ops")) > 0
        assert trace.table("processes").column("rank").to_pylist() == [34]


@needs_shared
def test_modules_and_shapes_are_read() -> None:
    trace = open_trace(TRACES / "pytorch+kineto/tb_plugin_inline/test_build_module_hierarchy.json")
    assert {"module"} == set(trace.table("ranges").column("kind").to_pylist())
    normal = open_trace(TRACES / "AMD-AGI+TraceLens/tests/traces/b200/eager_trace.json.gz")
    shapes = [json.loads(text) for text in normal.table("ops").column("input_shapes").to_pylist() if text]
    assert [[512], [], [], [], []] in shapes


# --- small inputs, each modelled on a public bug thread -----------------------------------------------------------


def _linked(trace: Trace) -> int:
    launches = set(trace.column("runtime_calls", "correlation_id").tolist()) - {0}
    return sum(c in launches for c in trace.column("kernels", "correlation_id").tolist())


def _busy(trace: Trace) -> int:
    return union_ns(intervals(trace, "kernels") + intervals(trace, "memory_ops"))


def b03(t: Trace) -> None:
    assert (len(t.table("kernels")), _busy(t)) == (1, 20_000)


def b04(t: Trace) -> None:
    assert rows(t, "ops", "name", "start_ns", "end_ns") == [("aten::mul", 0, 54_000), ("aten::mul", 92_000, 99_000)]
    assert (len(t.table("kernels")), _busy(t)) == (0, 0)


def b05(t: Trace) -> None:
    assert (_busy(t), intervals(t, "kernels")) == (100_000, [(30_000, 130_000)])
    assert t.manifest.collectors["kineto"].set_aside_count == 1


def b07(t: Trace) -> None:
    assert sum(end - start for start, end in intervals(t, "ops")) == 80_000
    assert len(t.table("stacks")) == 0  # functions ran, but launched nothing


def b08(t: Trace) -> None:
    kept = intervals(t, "ops") + intervals(t, "ranges")
    assert (len(kept), union_ns(kept)) == (3, 160_000)


def b10(t: Trace) -> None:
    spans = intervals(t, "kernels")
    assert (len(spans), sum(e - s for s, e in spans), _busy(t)) == (2, 40_000, 38_000)


def b12(t: Trace) -> None:
    assert t.table("ranges").column("kind").to_pylist() == ["step"] * 8
    assert (len(t.table("runtime_calls")), _linked(t), _busy(t)) == (8, 2, 6_950_000)


def b13(t: Trace) -> None:
    assert t.table("runtime_calls").column("name").to_pylist() == ["cudaGraphLaunch"] * 10
    assert _linked(t) == 1


def b14(t: Trace) -> None:
    assert t.column("kernels", "start_ns")[0] - t.column("runtime_calls", "start_ns")[0] == -2000


def b15(t: Trace) -> None:
    assert (_busy(t), _linked(t)) == (10_000, 0)
    assert rows(t, "memory_ops", "size_bytes", "start_ns", "end_ns") == [(4096, 25_000, 25_000)]


def b16(t: Trace) -> None:
    assert t.table("ranges").column("name").to_pylist() == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]
    assert _busy(t) == 150_000


def b17(t: Trace) -> None:
    assert "names no rank" in t.manifest.notes[0]
    assert (_busy(t), t.column("kernels", "rank").tolist()) == (20_000, [0])


def b20(t: Trace) -> None:
    assert _busy(t) == 20_000


def b21b(t: Trace) -> None:
    assert (t.manifest.duration_ns, len(t.table("kernels"))) == (0, 0)


def b22(t: Trace) -> None:
    assert (sum(e - s for s, e in intervals(t, "kernels")), _busy(t)) == (200_000, 100_000)


def b23(t: Trace) -> None:
    keys = rows(t, "kernels", "rank", "device", "context_id", "stream")
    assert len(set(keys)) == 3


def b31(t: Trace) -> None:
    assert (_busy(t), [e - s for s, e in intervals(t, "kernels")]) == (1600, [400] * 4)


def b33(t: Trace) -> None:
    communication = [
        i
        for i, n in zip(intervals(t, "kernels"), t.table("kernels").column("name").to_pylist(), strict=True)
        if n != "gemm"
    ]
    assert union_ns(communication) == 40_000


def b39(t: Trace) -> None:
    assert (_linked(t), len(t.table("kernels")), _busy(t)) == (0, 2, 20_000)


def b40(t: Trace) -> None:
    assert _busy(t) == 20_000
    assert json.loads(msgspec.json.encode(t.manifest))["collectors"]["kineto"]["repaired_count"] == 2


def b43(t: Trace) -> None:
    assert (_busy(t), rows(t, "syncs", "kind", "end_ns")) == (20_000, [("stream_wait_event", 530_000)])


GOOD: dict[str, Callable[[Trace], None]] = {
    "B03_bracket_in_traceName.json": b03,
    "B04_top_level_array_string_pid.json": b04,
    "B05_zero_ts_zero_dur_kernels.json": b05,
    "B07_all_end_at_profiler_stop.json": b07,
    "B08_overlapping_non_nested_X.json": b08,
    "B10_pdl_overlap_same_stream.json": b10,
    "B12_gpu_events_in_2_of_8_steps.json": b12,
    "B13_graph_launch_without_kernels.json": b13,
    "B14_kernel_before_launch.json": b14,
    "B15_unlinked_kernel_and_zero_dur_memcpy.json": b15,
    "B16_last_step.json": b16,
    "B17_no_distributedInfo.json": b17,
    "B20_gzip_in_gzip.pt.trace.json.gz": b20,
    "B21b_no_events.json": b21b,
    "B22_sum_over_100pct.json": b22,
    "B23_same_stream_id_on_3_devices.json": b23,
    "B31_sub_us_kernels.json": b31,
    "B33_nccl_names.json": b33,
    "B39_correlation_minus1.json": b39,
    "B40_nan_inf.json": b40,
    "B43_cuda_sync_events_on_stream.json": b43,
}
REFUSED: dict[str, tuple[type[Exception], str]] = {
    "B01_unescaped_quote_in_name.json": (DamagedTrace, "line 2, column 45"),
    "B19_two_ranks_wrote_one_file.json": (DamagedTrace, "at byte 410"),
    "B20c_truncated.json.gz": (DamagedTrace, "truncated at byte 290"),
    "B21_empty.json": (TraceNotFound, "empty"),
    "B21c_lfs_pointer.json": (ForeignFile, "git lfs pull"),
    "B26_nvtx_V3_only.sqlite": (ForeignFile, "Nsight Systems SQLite is not read yet"),
    "B28_graph_trace_only.sqlite": (ForeignFile, "Nsight Systems SQLite is not read yet"),
}
#: What only a later issue reads.
LATER = {
    "B01_unescaped_quote_in_name.json": "later issue: reading around broken escapes",
    "B26_nvtx_V3_only.sqlite": "later issue: Nsight Systems SQLite",
    "B28_graph_trace_only.sqlite": "later issue: Nsight Systems SQLite",
    "B29_float_rounding_nesting.json": "later issue: a table for Python frames",
}


@needs_shared
@pytest.mark.parametrize("name", GOOD)
def test_reproduced_bugs_give_the_right_answer(name: str) -> None:
    GOOD[name](open_trace(REPROS / name))


@needs_shared
@pytest.mark.parametrize("name", REFUSED)
def test_reproduced_damage_is_named(name: str) -> None:
    error, words = REFUSED[name]
    with pytest.raises(error, match=words) as caught:
        open_trace(REPROS / name)
    assert "\n" not in str(caught.value)


def _read_in_full(path: Path) -> None:
    trace = open_trace(path)
    if path.name.startswith("B29"):
        parent, child = intervals(trace, "frames")
        assert child[1] == parent[1]
    else:
        assert _busy(trace) > 0


@needs_shared
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.xfail(reason=why, strict=True, raises=InputError)) for n, why in LATER.items()],
)
def test_what_a_later_issue_reads(name: str) -> None:
    _read_in_full(REPROS / name)


@needs_shared
def test_every_reproduced_bug_is_looked_at() -> None:
    assert set(json.loads((REPROS / "EXPECTED.json").read_text())) == set(GOOD) | set(REFUSED) | set(LATER)
