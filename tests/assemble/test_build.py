"""A spool made by hand, and every row that it must become."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from assemble.spools import T0, events, frame, record, work, write

from spikeprof.profiler import store
from spikeprof.profiler.assemble import layouts as lay
from spikeprof.profiler.assemble import numerics
from spikeprof.profiler.assemble import records as rec
from spikeprof.profiler.assemble.build import EVENT_TABLES, Assembly, assemble
from spikeprof.profiler.errors import OutputError
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote, Manifest, Trace

GPU_A, GPU_B = (uuid.UUID(int=n) for n in (1, 2))

KERNEL_FIELDS = {
    "device": 0,
    "context": 1,
    "stream": 7,
    "correlation": 11,
    "name": 4096,
    "grid_x": 32768,
    "grid_y": 2,
    "grid_z": 3,
    "block_x": 128,
    "block_y": 4,
    "block_z": 5,
    "registers": 36,
    "shared_static": 16,
    "shared_dynamic": 49152,
    "local": 8,
}


def _built(folder: Path, ordinals: dict[str, int] | None = None) -> tuple[Assembly, Trace]:
    out = store.create_folder(folder / "trace")
    built = assemble(folder / "spool", out, T0, ordinals)
    store.write_manifest(out, Manifest("spikeprof", T0, built.end_ns, collectors={"activity": built.note}))
    return built, store.read_trace(out)


def _rows(trace: Trace, name: str, *columns: str) -> list[Any]:
    """Rows as dicts; of named columns as tuples, of one as values."""
    rows = trace.table(name).to_pylist()
    if not columns:
        return rows
    return [row[columns[0]] if len(columns) == 1 else tuple(row[c] for c in columns) for row in rows]


def _lines(*more: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    lines = events(**changes)
    return [*lines[:-2], *more, *lines[-2:]]


def _device(number: int, identity: uuid.UUID, **fields: Any) -> bytes:
    return record(lay.DEVICE, device=number, uuid=identity.bytes, **fields)


def test_every_table_of_one_process(tmp_path: Path) -> None:
    device = _device(
        0,
        GPU_A,
        name=64,
        sm_major=9,
        sm_minor=0,
        sm_count=132,
        l2_bytes=62_914_560,
        mem_bytes=150_000_000_000,
        mem_bandwidth_kb=4_800_000_000,
    )
    work_fields = {"device": 0, "context": 1, "stream": 7}
    first = [
        device,
        work(lay.RUNTIME, 500, 900, cbid=211, thread=1234, correlation=11),
        work(lay.KERNEL, 2000, 3000, **KERNEL_FIELDS),
        work(
            lay.KERNEL,
            1000,
            1500,
            **KERNEL_FIELDS | {"correlation": 10, "name": 8192, "graph": 3, "graph_node": 2**34 + 1},
        ),
    ]
    second = [
        work(lay.MEMCPY, 3100, 3300, copy_kind=1, src_kind=1, dst_kind=3, bytes=2**33, correlation=12, **work_fields),
        work(
            lay.MEMCPY_PEER, 3400, 3500, copy_kind=10, src_kind=3, dst_kind=3, bytes=64, correlation=13, **work_fields
        ),
        work(lay.MEMSET, 3350, 3360, bytes=4, correlation=14, graph=3, graph_node=9, **work_fields),
        work(lay.DRIVER, 400, 450, cbid=307, thread=1235, correlation=10, return_value=2),
        work(lay.RUNTIME, 950, 960, cbid=999_999, thread=1234, correlation=15),
        work(lay.OVERHEAD, 100, 200, overhead_kind=1 << 16, object_kind=2, process=41, thread=77),
        work(lay.OVERHEAD, 90, 95, overhead_kind=99, object_kind=3, thread=5),
        record(lay.SYNC),
        record(lay.EXTERNAL_CORRELATION),
    ]
    more = (
        {"ev": "names", "t": T0 + 300, "names": [[4096, "_Z4gemvPf"], [8192, "triton_mm"], [64, "NVIDIA H200"]]},
        {"ev": "graph_nodes", "t": T0 + 310, "nodes": [[9, 0, 2, T0 + 305], [2**34 + 1, 9, 3, T0 + 306]]},
        {
            "ev": "steps",
            "t": T0 + 320,
            "steps": [["forward", True, T0 + 400, 3000], ["forward", False, T0 + 350, 2000]],
        },
    )
    write(tmp_path / "spool", frames=[frame(b"".join(first)), frame(b"".join(second))], lines=_lines(*more, rank="2"))
    built, trace = _built(tmp_path)

    assert set(trace.tables) == {*EVENT_TABLES, "processes", "devices", "graph_nodes", "windows", "steps"}
    common = {"rank": 2, "device": 0, "context_id": 1, "stream": 7}
    launched = {"graph_id": 0, "graph_node_id": 0}
    shape = {"grid_x": 32768, "grid_y": 2, "grid_z": 3, "block_x": 128, "block_y": 4, "block_z": 5}
    shape |= {"registers_count": 36, "shared_static_bytes": 16, "shared_dynamic_bytes": 49152, "local_bytes": 8}
    assert _rows(trace, "kernels") == [
        {"kernel_id": 0, "correlation_id": 10, "graph_id": 3, "graph_node_id": 2**34 + 1, "name": "triton_mm"}
        | {"start_ns": 1000, "end_ns": 1500}
        | common
        | shape,
        {"kernel_id": 1, "correlation_id": 11, "name": "gemv(float*)", "start_ns": 2000, "end_ns": 3000}
        | launched
        | common
        | shape,
    ]
    assert _rows(trace, "memory_ops") == [
        common | launched | row
        for row in (
            {"op_id": 0, "correlation_id": 12, "kind": "HtoD", "src_memory": "pageable", "dst_memory": "device"}
            | {"size_bytes": 2**33, "start_ns": 3100, "end_ns": 3300},
            {"op_id": 1, "correlation_id": 14, "kind": "memset", "src_memory": "unknown", "dst_memory": "device"}
            | {"size_bytes": 4, "start_ns": 3350, "end_ns": 3360, "graph_id": 3, "graph_node_id": 9},
            {"op_id": 2, "correlation_id": 13, "kind": "PtoP", "src_memory": "device", "dst_memory": "device"}
            | {"size_bytes": 64, "start_ns": 3400, "end_ns": 3500},
        )
    ]
    columns = ("call_id", "rank", "thread_id", "correlation_id", "name", "start_ns", "end_ns", "return_code")
    assert _rows(trace, "runtime_calls", *columns) == [
        (0, 2, 1235, 10, "cuLaunchKernel", 400, 450, 2),
        (1, 2, 1234, 11, "cudaLaunchKernel", 500, 900, 0),
        (2, 2, 1234, 15, "another CUDA call", 950, 960, 0),
    ]
    assert _rows(trace, "overheads") == [
        {"rank": 2, "thread_id": 0, "kind": "unknown", "start_ns": 90, "end_ns": 95},
        {"rank": 2, "thread_id": 77, "kind": "buffer_flush", "start_ns": 100, "end_ns": 200},
    ]
    (gpu,) = _rows(trace, "devices")
    assert gpu.pop("peak_source")
    assert gpu.pop("mem_peak_bytes_per_s") == pytest.approx(4.8e12, rel=0.01)
    assert gpu == {
        "rank": 2,
        "device": 0,
        "process_device": 0,
        "uuid": "GPU-00000000-0000-0000-0000-000000000001",
        "name": "NVIDIA H200",
        "sm_arch": "sm_90",
        "sm_count": 132,
        "l2_bytes": 62_914_560,
        "mem_bytes": 150_000_000_000,
    }
    assert _rows(trace, "processes") == [
        {
            "rank": 2,
            "pid": 41,
            "parent_pid": 40,
            "command": "python x.py",
            "python_version": "3.12.3",
            "libcupti_version": "130001",
            "status": "traced",
            "reason": "",
        }
    ]
    assert _rows(trace, "windows") == [{"rank": 2, "state": "traced", "reason": "", "start_ns": 50, "end_ns": 10_000}]
    assert _rows(trace, "steps") == [
        {"step_id": 0, "rank": 2, "kind": "forward", "traced": False, "start_ns": 350, "duration_ns": 2000},
        {"step_id": 1, "rank": 2, "kind": "forward", "traced": True, "start_ns": 400, "duration_ns": 3000},
    ]
    assert _rows(trace, "graph_nodes") == [
        {"rank": 2, "graph_node_id": 9, "source_node_id": 0, "graph_id": 2, "t_ns": 305},
        {"rank": 2, "graph_node_id": 2**34 + 1, "source_node_id": 9, "graph_id": 3, "t_ns": 306},
    ]
    assert (built.note.state, built.note.reason, built.note.cost_ns) == ("ok", "", 10)
    # Two kernels, three memory operations, three calls, two overheads.
    assert (built.note.records_count, built.note.set_aside_count) == (10, 0)
    assert (built.kernels_count, built.end_ns, built.notes, built.undecoded) == (2, 3500, [], False)
    assert built.versions == {"libcupti": "130001", "torch": "2.11.0", "python": "3.12.3"}


def _kernel(start: int, end: int, **fields: Any) -> bytes:
    return work(lay.KERNEL, start, end, **KERNEL_FIELDS | fields)


def _simple(folder: Path, records: Iterable[bytes], *more: dict[str, Any], **changes: Any) -> None:
    write(folder / "spool", frames=[frame(b"".join(records))], lines=_lines(*more, **changes))


def test_broken_records_are_set_aside_by_reason(tmp_path: Path) -> None:
    second = 10**9
    _simple(
        tmp_path,
        [
            _kernel(1000, 1000, correlation=1),  # nothing wrong with lasting 0 ns
            record(lay.KERNEL, start=0, end=T0 + 5),
            record(lay.KERNEL, start=T0 + 5, end=0),
            record(lay.KERNEL, start=0, end=0),
            _kernel(3000, 2999),
            _kernel(-3 * second, 2000),  # the process began at 0; 2 s of slack
            _kernel(-second, 2000, correlation=2),
            _kernel(1000, 3 * second),
            record(lay.KERNEL, start=2**64 - 2, end=2**64 - 1),
            record(lay.KERNEL, start=5_000_000, end=5_001_000),  # processor ticks
            work(lay.MEMCPY, 9, 8),
            work(lay.RUNTIME, 9, 8, cbid=211),
            work(lay.OVERHEAD, 9, 8),
        ],
    )
    built, trace = _built(tmp_path)
    assert _rows(trace, "kernels", "correlation_id") == [2, 1]
    assert built.note.set_aside_reasons == {"no time": 3, "ends before it starts": 4, "outside the run": 4}
    assert built.note.set_aside_count == 11
    assert built.note.records_count == 13
    # The tables were collected; what was in them could not be true.
    assert [trace.table(name).num_rows for name in ("memory_ops", "runtime_calls", "overheads")] == [0, 0, 0]


def test_work_in_flight_when_recording_paused_is_set_aside(tmp_path: Path) -> None:
    windows = [
        {"ev": "window", "t": T0 + 2000, "state": "clean", "reason": "clean-steps"},
        {"ev": "window", "t": T0 + 4000, "state": "traced", "reason": ""},
    ]
    _simple(
        tmp_path,
        [
            _kernel(1000, 1900, correlation=1),
            _kernel(1950, 4000, correlation=2),
            _kernel(2050, 4000, correlation=4),  # launched while recording, begun a little later
            _kernel(4000, 4100, correlation=3),
            work(lay.RUNTIME, 1950, 4000, cbid=131),  # a wait of the host may well last so long
        ],
        *windows,
    )
    built, trace = _built(tmp_path)
    assert _rows(trace, "kernels", "correlation_id") == [1, 3]
    assert built.note.set_aside_reasons == {
        "in flight when recording paused": 1,
        "recorded while recording was off": 1,
    }
    assert trace.table("runtime_calls").num_rows == 1
    assert _rows(trace, "windows", "state", "start_ns", "end_ns") == [
        ("traced", 50, 2000),
        ("clean", 2000, 4000),
        ("traced", 4000, 10_000),
    ]


def test_a_replay_with_the_begin_of_one_and_the_end_of_another_is_set_aside(tmp_path: Path) -> None:
    """Seen on an H200: all kernels of the last replay before a pause end with the first one after the next pause."""
    windows = [
        {"ev": "window", "t": T0 + 50, "state": "off", "reason": "--window"},
        {"ev": "window", "t": T0 + 90, "state": "traced", "reason": ""},
    ]
    replay = [(0, 90), (100, 190), (200, 290)]  # three kernels of 90 ns each
    sound = [_kernel(1000 + a, 1000 + b, correlation=1, graph=3) for a, b in replay]
    sound += [_kernel(1400 + a, 1400 + b, correlation=2, graph=3) for a, b in replay]
    torn = [_kernel(1800 + a, 7000 + b, correlation=3, graph=3) for a, b in replay]
    # As long, and rightly: a graph of which nothing else is known, a kernel that waited for its turn, no graph.
    other = [_kernel(2000 + a, 7000 + b, correlation=4, graph=5) for a, b in replay]
    late = [_kernel(7400, 7490, correlation=5, graph=3), _kernel(7500, 9800, correlation=5, graph=3)]
    alone = [_kernel(2000, 9000, correlation=6)]
    _simple(tmp_path, [*sound, *torn, *other, *late, *alone], *windows)
    built, trace = _built(tmp_path)
    assert built.note.set_aside_reasons == {"in flight when recording paused": 3}
    kept = sorted(_rows(trace, "kernels", "correlation_id"))
    assert kept == [1, 1, 1, 2, 2, 2, 4, 4, 4, 5, 5, 6]


def test_a_clock_that_was_set_back_costs_no_record_and_is_told(tmp_path: Path) -> None:
    """The last window seems to begin before the first: nothing can be said of what lies in which."""
    lines = events()
    lines[-2]["t"] = lines[-1]["t"] = T0 - 3_600 * 10**9
    write(tmp_path / "spool", frames=[frame(_kernel(1000, 1900) + _kernel(2000, 2100))], lines=lines)
    built, trace = _built(tmp_path)
    assert _rows(trace, "kernels", "start_ns") == [1000, 2000]
    assert built.note.set_aside_count == 0
    assert built.notes[0] == "the clock was set back while process 41 was recorded: its times are uncertain"


def test_a_killed_process_keeps_what_was_on_disk(tmp_path: Path) -> None:
    """No farewell, half a line, half a frame: all whole records are there, and the last window ends with them."""
    lines = events()[:-2]
    whole = frame(_kernel(1000, 2000) + _kernel(3000, 4000), unix_ns=T0 + 10**12)
    half = frame(_kernel(5000, 5_000_000_000) * 2, unix_ns=T0 + 10**12)[:-5]
    path = write(tmp_path / "spool", frames=[whole, half], lines=lines)
    with path.open("ab") as file:
        file.write(b'{"ev":"names","names":[[40')
    built, trace = _built(tmp_path)
    assert _rows(trace, "kernels", "end_ns") == [2000, 4000, 5_000_000_000]
    assert built.note.set_aside_reasons == {"buffer not readable to its end": 1}
    assert _rows(trace, "windows", "start_ns", "end_ns") == [(50, 5_000_000_000)]
    ((status, reason),) = _rows(trace, "processes", "status", "reason")
    assert status == "partial"
    assert "killed" in reason


def test_the_last_window_of_a_killed_process_is_not_another_ones(tmp_path: Path) -> None:
    killed = events(pid=50, rank="0")[:-2]
    write(tmp_path / "spool", "50-1", frames=[frame(_kernel(1000, 2000))], lines=killed)
    write(tmp_path / "spool", "51-2", frames=[frame(_kernel(5000, 8000))], lines=events(pid=51, rank="1"))
    _, trace = _built(tmp_path)
    assert _rows(trace, "windows", "rank", "end_ns") == [(0, 2000), (1, 10_000)]


def test_gpus_are_numbered_by_uuid_over_all_processes(tmp_path: Path) -> None:
    """Each process sees its own GPU as 0. The machine calls them 3 and 1."""
    for pid, gpu in ((50, GPU_A), (51, GPU_B)):
        frames = [frame(_device(0, gpu) + _kernel(1000 + pid, 2000))]
        write(tmp_path / "spool", f"{pid}-1", frames=frames, lines=events(pid=pid, rank=str(pid - 50)))
    _, trace = _built(tmp_path, {f"GPU-{GPU_A}": 3, f"GPU-{GPU_B}": 1})
    assert _rows(trace, "devices", "rank", "device", "process_device") == [(0, 3, 0), (1, 1, 0)]
    assert _rows(trace, "kernels", "rank", "device") == [(0, 3), (1, 1)]


def test_two_processes_on_one_gpu_share_its_number(tmp_path: Path) -> None:
    """And a process's own numbers may be the other way round: CUDA_VISIBLE_DEVICES=1,0."""
    for pid, gpus in ((50, (GPU_A, GPU_B)), (51, (GPU_B, GPU_A))):
        devices = b"".join(_device(i, gpu) for i, gpu in enumerate(gpus))
        kernels = _kernel(pid, 100, device=0) + _kernel(pid, 200, device=1)
        write(
            tmp_path / "spool", f"{pid}-1", frames=[frame(devices + kernels)], lines=events(pid=pid, rank=str(pid - 50))
        )
    _, trace = _built(tmp_path)
    assert sorted(_rows(trace, "kernels", "rank", "end_ns", "device")) == [
        (0, 100, 0),
        (0, 200, 1),
        (1, 100, 1),
        (1, 200, 0),
    ]


def test_a_gpu_that_nvml_does_not_know_takes_no_known_ones_number(tmp_path: Path) -> None:
    frames = [frame(_device(0, GPU_A) + _device(1, GPU_B) + _kernel(1, 2, device=0) + _kernel(3, 4, device=1))]
    write(tmp_path / "spool", frames=frames)
    _, trace = _built(tmp_path, {f"GPU-{GPU_B}": 0})
    assert _rows(trace, "kernels", "device") == [1, 0]


def test_kernels_before_the_device_records_get_the_same_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rec, "BATCH_BYTES", 1)
    frames = [frame(_kernel(1, 2)), frame(_device(0, GPU_A)), frame(_kernel(3, 4))]
    write(tmp_path / "spool", frames=frames)
    _, trace = _built(tmp_path, {f"GPU-{GPU_A}": 5})
    assert _rows(trace, "kernels", "device") == [5, 5]


def test_without_device_records_kernels_keep_cudas_number(tmp_path: Path) -> None:
    _simple(tmp_path, [_kernel(1, 2, device=1)])
    _, trace = _built(tmp_path)
    assert _rows(trace, "kernels", "device") == [1]
    assert trace.table("devices").num_rows == 0


def test_an_execd_process_is_two_rows_with_one_pid(tmp_path: Path) -> None:
    """The first life was replaced without a farewell; both used CUDA."""
    write(tmp_path / "spool", f"41-{T0}", frames=[frame(_kernel(1, 2, correlation=5))], lines=events()[:-2])
    later = events(argv=["python", "second.py"])
    later[0]["t"] = T0 + 20
    write(tmp_path / "spool", f"41-{T0 + 20}", frames=[frame(_kernel(30, 40, correlation=5))], lines=later)
    _, trace = _built(tmp_path)
    assert _rows(trace, "processes", "rank", "pid", "command", "status") == [
        (0, 41, "python x.py", "partial"),
        (1, 41, "python second.py", "traced"),
    ]
    # Correlation ids are scoped by rank: the two fives must not meet.
    assert _rows(trace, "kernels", "rank", "correlation_id") == [(0, 5), (1, 5)]


def test_names_that_were_never_read_are_shown_by_address_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rec, "BATCH_BYTES", 1)
    write(tmp_path / "spool", frames=[frame(_kernel(i, i + 1, name=4096)) for i in range(3)])
    built, trace = _built(tmp_path)
    assert set(_rows(trace, "kernels", "name")) == {"kernel at 0x1000 (name not read)"}
    assert built.notes == ["1 kernel name(s) were never read from the process and are shown by address"]


def test_rows_are_sorted_by_start_over_buffers_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rec, "BATCH_BYTES", 1)
    monkeypatch.setattr(store, "ROW_GROUP_ROWS", 4)
    for pid in (50, 51, 52):
        frames = [frame(_kernel(100 * i + pid, 100 * i + pid + 5, correlation=i)) for i in (3, 1, 2, 0)]
        write(tmp_path / "spool", f"{pid}-1", frames=frames, lines=events(pid=pid, rank=str(pid - 50)))
    _, trace = _built(tmp_path)
    assert _rows(trace, "kernels", "kernel_id", "rank", "correlation_id") == [(i, i % 3, i // 3) for i in range(12)]


def test_the_largest_values_survive(tmp_path: Path) -> None:
    """Columns are narrowed while they wait: batches of small and of large values must not hurt each other."""
    big = {"grid_x": 2**31 - 1, "correlation": 2**32 - 1, "graph_node": 2**63 - 1, "graph": 2**31 - 1, "registers": 255}
    small = {"grid_x": 1, "correlation": 1, "graph_node": 1, "graph": 1, "registers": 16}
    write(tmp_path / "spool", frames=[frame(_kernel(1, 2, **small) + _kernel(3, 4, **big))])
    _, trace = _built(tmp_path)
    names = ("grid_x", "correlation_id", "graph_node_id", "graph_id", "registers_count")
    assert _rows(trace, "kernels", *names) == [tuple(small.values()), tuple(big.values())]


def test_small_and_large_values_in_different_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rec, "BATCH_BYTES", 1)
    values = [1, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1]
    write(tmp_path / "spool", frames=[frame(_kernel(i + 1, i + 2, correlation=v)) for i, v in enumerate(values)])
    _, trace = _built(tmp_path)
    assert _rows(trace, "kernels", "correlation_id") == values


# -- what is told when there is nothing ---------------------------------------------------------------------


def test_an_empty_spool(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    built, trace = _built(tmp_path)
    assert set(trace.tables) == {"processes"}
    assert (built.note.state, built.note.reason) == ("refused", "no Python process reported")


def test_processes_that_never_used_cuda(tmp_path: Path) -> None:
    write(tmp_path / "spool", frames=None, lines=events()[:1])
    built, trace = _built(tmp_path)
    assert set(trace.tables) == {"processes"}
    assert (built.note.state, built.note.reason) == ("refused", "no process used CUDA")
    assert _rows(trace, "processes", "status", "reason") == [("no_cuda", "it never used CUDA")]


def test_recorded_but_nothing_happened_is_an_empty_table(tmp_path: Path) -> None:
    write(tmp_path / "spool", frames=None)
    built, trace = _built(tmp_path)
    assert built.note.state == "ok"
    for name in EVENT_TABLES:
        assert trace.table(name).schema == TABLES[name].arrow
        assert trace.table(name).num_rows == 0


def test_never_switched_on_is_an_absent_table(tmp_path: Path) -> None:
    lines = events()
    lines[1] = {"ev": "window", "t": T0 + 50, "state": "off", "reason": "before cudaProfilerStart"}
    write(tmp_path / "spool", frames=None, lines=lines)
    built, trace = _built(tmp_path)
    assert set(trace.tables) == {"processes", "windows"}
    assert built.note.state == "refused"
    assert built.note.reason == "recording was never on: before cudaProfilerStart"


def test_a_fault_at_the_start_is_an_absent_table_with_its_reason(tmp_path: Path) -> None:
    lines = events(version=None)
    lines[1] = {"ev": "fault", "t": T0 + 50, "where": "activate", "text": "CuptiError: no libcupti found"}
    write(tmp_path / "spool", frames=None, lines=lines)
    built, trace = _built(tmp_path)
    assert "kernels" not in trace
    assert (built.note.state, built.note.reason) == ("refused", "activate: CuptiError: no libcupti found")
    assert _rows(trace, "processes", "status") == ["not_traced"]


def test_a_fault_later_on_is_degraded(tmp_path: Path) -> None:
    _simple(tmp_path, [_kernel(1, 2)], {"ev": "fault", "t": T0 + 60, "where": "steps", "text": "ValueError: x"})
    built, trace = _built(tmp_path)
    assert (built.note.state, built.note.reason) == ("degraded", "steps: ValueError: x")
    assert _rows(trace, "processes", "status", "reason") == [("partial", "steps: ValueError: x")]
    assert built.kernels_count == 1


def test_a_layout_that_is_not_known_leaves_the_records_in_the_spool(tmp_path: Path) -> None:
    _simple(tmp_path, [_kernel(1, 2)], version=150_000)
    built, trace = _built(tmp_path)
    assert built.undecoded
    assert "kernels" not in trace
    assert built.note.state == "refused"
    assert "libcupti 150000 lays them out in a way not known here" in built.note.reason
    assert built.notes == [built.note.reason]
    assert _rows(trace, "processes", "status") == ["partial"]


def test_one_undecoded_process_does_not_hide_the_others(tmp_path: Path) -> None:
    write(tmp_path / "spool", "50-1", frames=[frame(_kernel(1, 2))], lines=events(pid=50, version=150_000))
    write(tmp_path / "spool", "51-1", frames=[frame(_kernel(1, 2))], lines=events(pid=51))
    built, trace = _built(tmp_path)
    assert (built.undecoded, built.kernels_count, built.note.state) == (True, 1, "degraded")
    assert sorted(_rows(trace, "processes", "pid", "status")) == [(50, "partial"), (51, "traced")]
    assert trace.table("kernels").num_rows == 1


def test_sizes_that_the_library_told_are_used(tmp_path: Path) -> None:
    larger = lay.layout_for(150_000, {lay.KERNEL: 264})
    assert larger is not None
    kernels = b"".join(record(lay.KERNEL, larger, start=T0 + i, end=T0 + i + 1, correlation=i) for i in (1, 2))
    write(tmp_path / "spool", frames=[frame(kernels)], lines=events(version=150_000, sizes={"10": 264}))
    _, trace = _built(tmp_path)
    assert _rows(trace, "kernels", "correlation_id") == [1, 2]


def test_bytes_that_are_no_records_are_counted(tmp_path: Path) -> None:
    unknown = record(lay.KERNEL)
    unknown = b"\x4d\0\0\0" + unknown[4:]  # kind 77
    frames = [frame(_kernel(1, 2) + unknown + _kernel(3, 4)), b"foreign", frame(_kernel(5, 6))]
    write(tmp_path / "spool", frames=frames)
    built, trace = _built(tmp_path)
    assert _rows(trace, "kernels", "start_ns") == [1, 5]
    assert built.note.set_aside_reasons == {"buffer not readable to its end": 2}


def test_dropped_records_are_passed_on(tmp_path: Path) -> None:
    _simple(tmp_path, [_kernel(1, 2)], {"ev": "dropped", "t": T0 + 60, "records": 9})
    built, _ = _built(tmp_path)
    assert built.note.dropped_count == 9


def test_progress_ends_at_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rec, "BATCH_BYTES", 300)
    write(tmp_path / "spool", frames=[frame(_kernel(i, i + 1)) for i in range(1, 9)])
    seen: list[tuple[int, int]] = []
    assemble(tmp_path / "spool", store.create_folder(tmp_path / "trace"), T0, progress=lambda d, t: seen.append((d, t)))
    total = (tmp_path / "spool" / f"41-{T0}.act").stat().st_size
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    _simple(tmp_path, [_kernel(1, 2)])
    with pytest.raises(OutputError, match="cannot write"):
        assemble(tmp_path / "spool", tmp_path / "not there", T0)
    assert (tmp_path / "spool" / f"41-{T0}.act").exists()


def test_scans_that_cannot_be_read_cost_no_more_than_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path, *_: object) -> None:
        (folder / "tensor_stats.parquet").write_bytes(b"half")
        raise ValueError("a record of another version")

    monkeypatch.setattr(numerics, "write_stats", fails)
    write(tmp_path / "spool", frames=[])
    out = store.create_folder(tmp_path / "trace")
    note = assemble(tmp_path / "spool", out, T0).numerics
    assert note == CollectorNote("refused", "could not be read: ValueError: a record of another version")
    assert not (out / "tensor_stats.parquet").exists()
    assert (out / "processes.parquet").exists()
