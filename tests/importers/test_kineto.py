from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from importers.kineto_files import event, kernel, read, rows

from spikeprof.profiler import store
from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.schema import TABLES

BASE_NS = 1_751_410_836_000_000_000


def test_a_launch_and_its_kernel_become_rows_with_every_field(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            kernel(
                "gemm",
                12.5,
                3.25,
                device=1,
                stream=20,
                correlation=9,
                context=1,
                grid=[4, 8, 32],
                block=[128, 2, 1],
                **{"registers per thread": 80, "shared memory": 6400, "graph id": 5, "graph node id": 77},
            ),
            event("cuda_runtime", "cudaLaunchKernel", 10, 1.5, tid=101, correlation=9),
        ],
        baseTimeNanoseconds=BASE_NS,
        distributedInfo={"rank": 3, "world_size": 8, "backend": "nccl"},
    )
    assert trace.table("kernels").to_pylist() == [
        {
            "kernel_id": 0,
            "rank": 3,
            "device": 1,
            "context_id": 1,
            "stream": 20,
            "correlation_id": 9,
            "graph_id": 5,
            "graph_node_id": 77,
            "name": "gemm",
            "start_ns": 2500,
            "end_ns": 5750,
            "grid_x": 4,
            "grid_y": 8,
            "grid_z": 32,
            "block_x": 128,
            "block_y": 2,
            "block_z": 1,
            "registers_count": 80,
            "shared_static_bytes": 0,
            "shared_dynamic_bytes": 6400,
            "local_bytes": 0,
        }
    ]
    assert rows(trace, "runtime_calls", "rank", "thread_id", "correlation_id", "name", "start_ns", "end_ns") == [
        (3, 101, 9, "cudaLaunchKernel", 0, 1500)
    ]
    assert rows(trace, "processes", "rank", "pid", "status") == [(3, 100, "traced")]
    assert trace.manifest.t0_unix_ns == BASE_NS + 10_000
    assert trace.manifest.duration_ns == 5750
    assert trace.manifest.options["world_size"] == "8"
    assert trace.manifest.collectors["kineto"].state == "ok"
    assert trace.manifest.collectors["kineto"].records_count == 2
    assert trace.manifest.notes == ()


def test_tables_conform_to_the_schema_and_are_in_order_of_start(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            kernel("late", 50, 1),
            event("cpu_op", "aten::mm", 1, 60),
            kernel("early", 5, 1),
            event("gpu_memset", "Memset (Device)", 7, 1, device=0, stream=7, bytes=64),
            event("user_annotation", "ProfilerStep#4", 0, 70),
            event("cuda_sync", "Stream Sync", 8, 1, stream=7, cuda_sync_kind="Stream Sync"),
            event("overhead", "Lazy Function Loading", 9, 1, pid=-1, tid=0),
            event("cuda_driver", "cuLaunchKernel", 2, 1),
        ],
    )
    assert set(trace.tables) == {
        *("processes", "devices", "kernels", "memory_ops", "runtime_calls"),
        *("ops", "ranges", "syncs", "overheads", "origins", "kernel_owners"),
    }
    for name in trace.tables:
        assert trace.table(name).schema.equals(TABLES[name].arrow), name
    assert rows(trace, "kernels", "kernel_id", "name", "start_ns") == [(0, "early", 5000), (1, "late", 50_000)]
    assert rows(trace, "overheads", "kind", "start_ns") == [("lazy_function_loading", 9000)]


def test_the_trace_survives_the_folder_on_disk(tmp_path: Path) -> None:
    trace = read(tmp_path, [kernel("a", 1, 2), event("cpu_op", "aten::mm", 1, 2)])
    store.write_trace(store.create_folder(tmp_path / "folder"), trace)
    again = open_trace(tmp_path / "folder")
    assert again.manifest == trace.manifest
    for name in trace.tables:
        assert again.table(name).to_pylist() == trace.table(name).to_pylist(), name


def test_what_an_event_is_its_category_says_not_its_stream(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            kernel("real", 10, 20),
            event("cpu_op", "triton_poi_fused", 0, 90, stream=7, device=0, grid="grid(100,)"),
            event("cuda_sync", "Context Sync", 30, 500, pid=0, tid=7, stream=7, device=0),
            event("gpu_user_annotation", "nccl:all_reduce", 10, 400, pid=0, tid=7),
        ],
    )
    assert rows(trace, "kernels", "name") == [("real",)]
    assert len(trace.table("memory_ops")) == 0
    assert "1 gpu_user_annotation" in trace.manifest.notes[-1]


def test_the_array_form_and_titles_of_torch_1_8(tmp_path: Path) -> None:
    path = tmp_path / "worker0.pt.trace.json"
    path.write_text(
        json.dumps(
            [
                event("Operator", "ProfilerStep#2", 1606910596288080, 500, tid="4093687616"),
                event("Operator", "aten::empty", 1606910596288090, 13, tid="4093687616", **{"Input dims": [[2, 3]]}),
                event("Runtime", "cudaLaunchKernel", 1606910596288095, 5, tid="4093687616", correlation=1),
                event("Kernel", "k", 1606910596288110, 4, pid=0, tid="stream 7", device=0, stream=7, correlation=1),
                event("Memcpy", "Memcpy HtoD (Pageable -> Device)", 1606910596288120, 2, pid=0, tid="stream 9"),
                event("Memset", "Memset (Device)", 1606910596288130, 1, pid=2, tid="stream 11"),
            ]
        )
    )
    trace = open_trace(path)
    assert rows(trace, "ranges", "kind", "name", "thread_id") == [("step", "ProfilerStep#2", 4093687616)]
    assert rows(trace, "ops", "name", "input_shapes") == [("aten::empty", "[[2, 3]]")]
    assert rows(trace, "kernels", "stream", "start_ns") == [(7, 30_000)]
    assert rows(trace, "memory_ops", "kind", "src_memory", "device", "stream") == [
        ("HtoD", "pageable", 0, 9),
        ("memset", "unknown", 2, 11),
    ]
    assert trace.manifest.t0_unix_ns == 1606910596288080_000
    assert len(trace.table("runtime_calls")) == 1


def test_ranges_are_steps_modules_and_what_the_user_named(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            event("user_annotation", "ProfilerStep#1", 0, 9),
            event("python_function", "nn.Module: Linear_0", 1, 2),
            event("python_function", "torch/nn/modules/module.py(1511): _call_impl", 1, 3),
            event("user_annotation", "## forward ##", 2, 5),
        ],
    )
    assert rows(trace, "ranges", "kind", "name") == [
        ("step", "ProfilerStep#1"),
        ("module", "Linear_0"),
        ("user", "## forward ##"),
    ]
    assert not any("left out" in note for note in trace.manifest.notes)  # of functions, stacks are made


def test_absolute_times_keep_every_nanosecond(tmp_path: Path) -> None:
    # As floats, both starts would be 1751410836000000.25 and .0: 250 ns steps.
    path = tmp_path / "t.json"
    path.write_text(
        '{"schemaVersion": 1, "traceEvents": ['
        '{"ph":"X","cat":"kernel","name":"a","pid":0,"tid":7,"ts":1751410836000000.141,"dur":0.007},'
        '{"ph":"X","cat":"kernel","name":"b","pid":0,"tid":7,"ts":1751410836000000.148,"dur":1.001}]}'
    )
    trace = open_trace(path)
    assert trace.manifest.t0_unix_ns == 1751410836000000_141
    assert rows(trace, "kernels", "start_ns", "end_ns") == [(0, 7), (7, 1008)]


def test_a_file_without_gpu_events_is_no_error(tmp_path: Path) -> None:
    trace = read(tmp_path, [event("cpu_op", "aten::mm", 1, 2)], baseTimeNanoseconds=BASE_NS)
    assert len(trace.table("kernels")) == len(trace.table("memory_ops")) == 0
    assert "no GPU events" in " ".join(trace.manifest.notes)
    assert rows(trace, "processes", "status") == [("no_cuda",)]


def test_a_file_without_events_opens(tmp_path: Path) -> None:
    trace = read(tmp_path, [])
    assert trace.manifest.duration_ns == 0
    assert {name: len(trace.table(name)) for name in trace.tables} == {
        "processes": 1,
        "devices": 0,
        "kernels": 0,
        "memory_ops": 0,
        "runtime_calls": 0,
    }


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"ts": 5, "dur": -1}, "ends before it starts"),
        ({"dur": 1}, "no start"),
        ({"ts": 5}, "no duration"),
        ({"ts": "soon", "dur": 1}, "unreadable ts"),
        ({"ts": 5, "dur": [1]}, "unreadable dur"),
        ({"ts": 1e300, "dur": 1}, "time out of range"),
        ({"ts": "NaN", "dur": 1}, "time out of range"),
        ({"ts": 5, "dur": 1, "args": "none"}, "unreadable args"),
    ],
)
def test_broken_events_are_set_aside_and_counted(tmp_path: Path, broken: dict[str, Any], reason: str) -> None:
    bad = {"ph": "X", "cat": "kernel", "name": "bad", "pid": 0, "tid": 7} | broken
    trace = read(tmp_path, [kernel("good", 10, 5), bad])
    note = trace.manifest.collectors["kineto"]
    assert (note.state, note.set_aside_count, dict(note.set_aside_reasons)) == ("degraded", 1, {reason: 1})
    assert rows(trace, "kernels", "name", "start_ns") == [("good", 0)]
    assert trace.manifest.duration_ns == 5000


def test_odd_events_that_are_no_slices_cost_nothing(tmp_path: Path) -> None:
    trace = read(tmp_path, [kernel("k", 1, 1), {"ph": "M", "name": "x", "args": 3}, {"ph": "f", "ts": "x", "id": 1}])
    assert trace.manifest.collectors["kineto"].set_aside_count == 0


def test_a_zero_start_among_absolute_times_is_a_record_never_filled_in(tmp_path: Path) -> None:
    trace = read(tmp_path, [kernel("never", 0, 0), kernel("real", 1615207264505030, 100)])
    assert rows(trace, "kernels", "name", "start_ns") == [("real", 0)]
    assert dict(trace.manifest.collectors["kineto"].set_aside_reasons) == {"start is 0": 1}
    # In a file that counts from its own start, 0 is a time like any other.
    assert len(read(tmp_path, [kernel("first", 0, 1), kernel("second", 100, 1)]).table("kernels")) == 2


def test_correlation_none_is_zero_however_written(tmp_path: Path) -> None:
    trace = read(tmp_path, [kernel("a", i, 1, correlation=c) for i, c in enumerate([-1, 0, "12", None, 2**40])])
    assert trace.column("kernels", "correlation_id").tolist() == [0, 0, 12, 0, 2**40]


def test_nan_in_args_is_repaired_and_names_keep_the_word(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '{"schemaVersion":1,"traceEvents":[{"ph":"X","cat":"kernel","name":"f(x: NaN, \\"Infinity\\")","pid":0,"tid":7,'
        '"ts":10,"dur":20,"args":{"stream":7,"registers per thread":NaN,"x":-Infinity}}]}'
    )
    trace = open_trace(path)
    assert rows(trace, "kernels", "name", "end_ns", "registers_count") == [('f(x: NaN, "Infinity")', 20_000, 0)]
    assert trace.manifest.collectors["kineto"].repaired_count == 2


def test_two_launching_processes_never_share_a_rank(tmp_path: Path) -> None:
    launches = [
        event("cuda_runtime", "cudaLaunchKernel", i, 1, pid=pid, correlation=1) for i, pid in enumerate([7, 9, 9])
    ]
    trace = read(tmp_path, [*launches, kernel("k", 5, 1, correlation=1)])
    assert rows(trace, "processes", "rank", "pid") == [(0, 9), (1, 7)]
    assert trace.column("runtime_calls", "rank").tolist() == [1, 0, 0]
    assert trace.column("kernels", "rank").tolist() == [0]
    assert any("2 processes launch work" in note for note in trace.manifest.notes)


def test_the_head_gives_devices_and_versions(tmp_path: Path) -> None:
    stated = {"totalGlobalMem": 150_000_000_000, "computeMajor": 9, "computeMinor": 0, "numSms": 132, "warpSize": 32}
    trace = read(
        tmp_path,
        [kernel("k", 1, 1, device=2)],
        deviceProperties=[
            {"id": 0, "name": "NVIDIA H200", **stated},
            {"id": 1, "name": "NVIDIA H200 MIG 1g", **stated},
        ],
        cuda_runtime_version=12040,
        cuda_driver_version=13000,
        cupti_version=22,
        host_name="box",
        with_stack=1,
        WARNING=["WARNING: dropped", "again"],
    )
    assert rows(trace, "devices", "device", "name", "sm_arch", "sm_count", "l2_bytes", "mem_peak_bytes_per_s") == [
        (0, "NVIDIA H200", "sm_90", 132, 62914560, 4.8e12),
        (1, "NVIDIA H200 MIG 1g", "sm_90", 132, None, None),
        (2, "", "", None, None, None),
    ]
    assert trace.table("devices").column("peak_source").to_pylist() == ["NVIDIA H200 Tensor Core GPU datasheet", "", ""]
    assert trace.manifest.versions == {"cuda": "12.4", "cuda_driver": "13.0", "libcupti": "22"}
    assert trace.manifest.host == "box"
    assert trace.manifest.options == {"with_stack": "1"}
    assert any("logged 2 warnings" in note and "dropped" in note for note in trace.manifest.notes)


def test_rocm_versions_and_names(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            event("cuda_runtime", "hipMemcpyWithStream", 1, 2, stream="0x0", kind="1", correlation=117),
            event(
                "gpu_memcpy", "Memcpy HtoD (Host -> Device)", 2, 3, pid=2, tid=0, device=2, stream=0, correlation=117
            ),
        ],
        hip_runtime_version="60443483",
        roctracer_version=4.1,
        deviceProperties=[
            {"id": 2, "name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4, "warpSize": 64}
        ],
    )
    assert rows(trace, "memory_ops", "kind", "src_memory", "dst_memory", "device", "size_bytes") == [
        ("HtoD", "unknown", "device", 2, 0)
    ]
    assert trace.manifest.versions == {"hip": "6.4.43483", "roctracer": "4.1"}
    assert rows(trace, "devices", "sm_arch", "mem_peak_bytes_per_s") == [("gfx94", 5.3e12)]
    assert "1 of 1 copies state no size: their bytes count as 0." in trace.manifest.notes


def test_sync_kinds_and_streams(tmp_path: Path) -> None:
    kinds = ["Stream Wait Event", "Event Sync", "Stream Sync", "Context Sync", "Something New"]
    events = [event("cuda_sync", k, i, 1, cuda_sync_kind=k, stream=2**32 - 1) for i, k in enumerate(kinds)]
    trace = read(tmp_path, events)
    assert rows(trace, "syncs", "kind", "stream") == [
        ("stream_wait_event", -1),
        ("event", -1),
        ("stream", -1),
        ("context", -1),
        ("unknown", -1),
    ]


def test_threads_with_names_stay_apart(tmp_path: Path) -> None:
    events = [event("cpu_op", "op", i, 1, tid=tid) for i, tid in enumerate(["main", "7", "worker", 7])]
    assert read(tmp_path, events).column("ops", "thread_id").tolist() == [-1, 7, -2, 7]


def test_more_events_than_one_chunk_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spikeprof.profiler.importers.chrome._CHUNK_EVENTS", 2)
    trace = read(tmp_path, [kernel(f"k{i % 3}", 10 - i, 1, grid=[i, 1, 1]) for i in range(7)])
    assert rows(trace, "kernels", "name", "grid_x") == [(f"k{i % 3}", i) for i in reversed(range(7))]


def test_events_far_from_all_others_are_set_aside(tmp_path: Path) -> None:
    events = [kernel("k", 1e9 + 10 * i, 5) for i in range(9)]
    trace = read(tmp_path, [*events, kernel("early", -5e12, 5), kernel("late", 9e12, 5), kernel("endless", 1e9, 5e12)])
    assert trace.table("kernels").num_rows == 9
    assert trace.manifest.duration_ns == 85_000
    assert trace.manifest.collectors["kineto"].set_aside_reasons == {"time out of range": 3}


@pytest.mark.parametrize("number", [True, 2**31, 2**63, 2**64, -1, "1", None, 1.5, []])
def test_a_device_described_by_what_is_no_number_is_not_one(tmp_path: Path, number: Any) -> None:
    stated = [{"id": number, "name": "X"}, {"id": 0, "name": "Y", "numSms": number, "totalGlobalMem": number}]
    trace = read(tmp_path, [kernel("k", 1, 1)], deviceProperties=stated)
    (device,) = trace.table("devices").to_pylist()
    assert (device["device"], device["name"]) == (0, "Y")
    assert device["mem_bytes"] in (None, number)


@pytest.mark.parametrize("version", ["²", "9" * 5000, True, "12040"])
def test_a_version_that_is_no_number_is_left_out(tmp_path: Path, version: Any) -> None:
    trace = read(tmp_path, [kernel("k", 1, 1)], cuda_runtime_version=version)
    assert trace.manifest.versions.get("cuda", "") == ("12.4" if version == "12040" else "")
