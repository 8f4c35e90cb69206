"""A spool as a traced program leaves it, made without a GPU: any number of kernels, timed as LLM decoding is.

A step is 16 layers of 24 kernels and one more, about 5.5 ms when launched eagerly. Eager: one launch record a
kernel, the GPU waits for the host. Graph: one launch record a step, the GPU works without gaps. Launch delays
and durations jitter as seen on an H200 (durations are multiples of 32 ns, give or take one). Buffers are
delivered every 0.1 s, or when 4 MiB are full; kernel and call records alternate inside as they complete.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.assemble.layouts import DEVICE, KERNEL, MEMCPY, OVERHEAD, RUNTIME, Layout, layout_for
from spikeprof.profiler.inject import FRAME_FORMAT, FRAME_HEADER_BYTES, FRAME_MAGIC

LAYERS, LAYER_KERNELS = 16, 24
STEP_KERNELS = LAYERS * LAYER_KERNELS + 1
DISTINCT = 30

VERSION = 130001
BUFFER_BYTES = 4 << 20
DELIVERY_NS = 100_000_000
T0_UNIX_NS = 1_790_000_000_000_000_000
STEPS_AT_A_TIME = 500

CBID_MEMCPY_ASYNC, CBID_STREAM_SYNC, CBID_LAUNCH, CBID_GRAPH_LAUNCH = 41, 131, 211, 311

Ints = npt.NDArray[np.int64]


@dataclass
class _Program:
    """The kernels of one step, in order: which of the distinct ones, and how each looks."""

    kernel: Ints  # (STEP_KERNELS,) index into the distinct kernels
    correlation_step: Ints  # (STEP_KERNELS,) CUDA calls from one launch to the next
    names: list[str]
    base_ns: Ints  # (DISTINCT,)
    shape: Ints  # (DISTINCT, 4): grid x, grid y, block x, dynamic shared memory


def _program(random: np.random.Generator) -> _Program:
    layer = random.integers(0, DISTINCT - 2, LAYER_KERNELS)
    kernel = np.append(np.tile(layer, LAYERS), DISTINCT - 1)
    steps = np.append(np.tile(random.choice([2, 10, 11, 12, 13, 15, 18], LAYER_KERNELS), LAYERS), 65)
    words = ("rms_norm", "rotary", "gemv", "softmax", "silu_mul", "copy", "add", "reduce", "index_select", "attention")
    names = [f"_ZN5model{len(w := words[i % 10])}{w}ILi{i}EEvPKfPfi" for i in range(DISTINCT)]
    base = 832 + 32 * (random.gamma(1.2, 1400, DISTINCT) / 32).astype(np.int64)
    shape = np.stack(
        [
            random.choice([1, 8, 32, 64, 128, 132, 264, 1024], DISTINCT),
            random.choice([1, 1, 1, 16], DISTINCT),
            random.choice([64, 128, 256, 512], DISTINCT),
            random.choice([0, 0, 4096, 49152], DISTINCT),
        ],
        axis=1,
    )
    return _Program(kernel, steps, names, base, shape)


def write_spool(folder: Path, kernels_count: int, *, graph: bool = False, rank: int = 0, seed: int = 1) -> None:
    """Write the two files of one process that ran about this many kernels (whole steps, at least one)."""
    random = np.random.default_rng([seed, rank])
    program = _program(random)
    layout = layout_for(VERSION)
    assert layout is not None
    stem = folder / f"{4000 + rank}-{T0_UNIX_NS + rank}"
    steps_count = max(1, kernels_count // STEP_KERNELS)
    now, correlation = T0_UNIX_NS + 2_000_000_000, 1000
    with Path(f"{stem}.act").open("wb") as file:
        first = _device_records(layout)
        sequence = _write_frame(file, first[0].view(np.uint64).reshape(-1), now, 0)
        for begin in range(0, steps_count, STEPS_AT_A_TIME):
            count = min(STEPS_AT_A_TIME, steps_count - begin)
            made = _steps(program, random, layout, count, now, correlation, graph=graph)
            sequence = _write_frames(file, made.records, sequence)
            now, correlation = made.now, made.correlation
    _write_events(Path(f"{stem}.jsonl"), program, rank, now)


@dataclass
class _Made:
    """Records of a stretch: (completion times, rows of words) for each size, and where the next one begins."""

    records: list[tuple[Ints, npt.NDArray[np.uint64]]]
    now: int
    correlation: int


def _steps(
    program: _Program,
    random: np.random.Generator,
    layout: Layout,
    steps: int,
    now: int,
    correlation: int,
    *,
    graph: bool,
) -> _Made:
    """Some whole steps from ``now`` on."""
    count = steps * STEP_KERNELS
    kernel = np.tile(program.kernel, steps)
    place = np.tile(np.arange(STEP_KERNELS), steps)
    length = program.base_ns[kernel] + 32 * np.rint(random.gamma(0.6, 2.0, count)).astype(np.int64)
    length += random.choice([0, 0, 0, 0, 1, -1], count)
    launches = np.flatnonzero(place == 0) if graph else np.arange(count)
    between = random.gamma(3.0, 900.0, len(launches)) + (5_400_000 if graph else 11_300)
    late = random.random(len(launches)) < 0.01  # the host was busy elsewhere
    between[late] += random.gamma(1.0, 60_000.0, int(late.sum()))
    call_start = now + np.cumsum(between).astype(np.int64)
    call_end = call_start + 4_200 + random.gamma(2.0, 1_000.0, len(launches)).astype(np.int64)
    # A stream runs in order: each kernel starts after its launch and after the one before it.
    launch_of = np.repeat(np.arange(len(launches)), STEP_KERNELS) if graph else launches
    ready = call_end[launch_of] + 900 + random.gamma(2.0, 400.0, count).astype(np.int64)
    space = length + 736 + 32 * random.integers(0, 14, count)
    before = np.append(0, np.cumsum(space)[:-1])
    start = before + np.maximum.accumulate(ready - before)
    number = correlation + np.cumsum(np.tile(program.correlation_step, steps))
    if graph:
        number = np.repeat(number[launches], STEP_KERNELS)
    kernels = _rows(layout, KERNEL, count)
    shape = program.shape[kernel]
    _fill(
        kernels[1],
        start=start,
        end=start + length,
        correlation=number,
        context=1,
        stream=7,
        name=0x7F0000000000 + 64 * kernel,
        grid_x=shape[:, 0],
        grid_y=shape[:, 1],
        grid_z=1,
        block_x=shape[:, 2],
        block_y=1,
        block_z=1,
        shared_dynamic=shape[:, 3],
        registers=16 + 8 * (kernel % 12),
        graph=2 if graph else 0,
        graph_node=(2 << 32) + place if graph else 0,
    )
    calls = _rows(layout, RUNTIME, len(launches))
    cbid = CBID_GRAPH_LAUNCH if graph else CBID_LAUNCH
    _fill(calls[1], cbid=cbid, start=call_start, end=call_end, thread=529559872, correlation=number[launches])
    last = np.arange(STEP_KERNELS - 1, count, STEP_KERNELS)
    ended = start[last] + length[last]
    copies = _rows(layout, MEMCPY, steps)
    copy = {"copy_kind": 2, "src_kind": 3, "dst_kind": 1, "bytes": 8, "context": 1, "stream": 7}
    _fill(copies[1], start=ended + 2_000, end=ended + 3_400, correlation=number[last] + 3, **copy)
    waits = _rows(layout, RUNTIME, 2 * steps)
    called = np.repeat(ended - 5_000, 2) + np.tile([0, 4_000], steps)
    _fill(
        waits[1],
        cbid=np.tile([CBID_MEMCPY_ASYNC, CBID_STREAM_SYNC], steps),
        start=called,
        end=called + np.tile([3_000, 7_000], steps),
        thread=529559872,
        correlation=np.repeat(number[last] + 3, 2) + np.tile([0, 1], steps),
    )
    until = int(max(ended[-1] + 20_000, call_end[-1] + 20_000))
    flushes = np.arange(now + DELIVERY_NS, until, DELIVERY_NS)
    overheads = _rows(layout, OVERHEAD, len(flushes))
    _fill(overheads[1], overhead_kind=1 << 16, object_kind=2, thread=99, start=flushes, end=flushes + 300_000)
    records = [
        (_ends(view), raw.view(np.uint64).reshape(len(raw), -1))
        for raw, view in (kernels, calls, copies, waits, overheads)
    ]
    return _Made(records, until, int(number[-1]) + 10)


def _rows(layout: Layout, kind: int, count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.void]]:
    """Zeroed records of a kind: as bytes, and as the fields of its layout over the same memory."""
    raw = np.zeros((count, layout.size_of[kind]), np.uint8)
    raw.view(np.uint32)[:, 0] = kind
    return raw, raw.view(layout.dtype_of[kind]).reshape(-1)


def _fill(view: npt.NDArray[np.void], **fields: Any) -> None:
    for name, values in fields.items():
        view[name] = values


def _ends(view: npt.NDArray[np.void]) -> Ints:
    return view["end"].astype(np.int64)


def _device_records(layout: Layout) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.void]]:
    rows = _rows(layout, DEVICE, 1)
    _fill(rows[1], sm_count=132, sm_major=9, mem_bytes=150_000_000_000, l2_bytes=62_914_560, name=0x7F00FFFF0000)
    rows[1]["uuid"] = np.void(bytes(range(16)))
    return rows


def _write_frames(file: Any, records: list[tuple[Ints, npt.NDArray[np.uint64]]], sequence: int) -> int:
    """All records in order of completion, cut into buffers by time and by size."""
    times = np.concatenate([at for at, _ in records])
    words = np.concatenate([np.full(len(rows), rows.shape[1]) for _, rows in records])
    order = np.argsort(times, kind="stable")
    times, ends = times[order], np.cumsum(words[order])
    begins = ends - words[order]
    stream = np.empty(int(ends[-1]), np.uint64)
    place = np.empty(len(order), np.int64)
    place[order] = begins
    at = 0
    for _, rows in records:
        stream[place[at : at + len(rows), None] + np.arange(rows.shape[1])] = rows
        at += len(rows)
    first = 0
    while first < len(times):
        by_time = np.searchsorted(times, times[first] + DELIVERY_NS)
        by_size = np.searchsorted(ends, begins[first] + BUFFER_BYTES // 8, side="right")
        behind = int(max(first + 1, min(by_time, by_size)))
        sequence = _write_frame(file, stream[begins[first] : ends[behind - 1]], int(times[behind - 1]), sequence)
        first = behind
    return sequence


def _write_frame(file: Any, words: npt.NDArray[np.uint64], unix_ns: int, sequence: int) -> int:
    header = struct.pack(FRAME_FORMAT, FRAME_MAGIC, words.nbytes, unix_ns, sequence)
    file.write(header.ljust(FRAME_HEADER_BYTES, b"\0"))
    file.write(words.tobytes())
    return sequence + 1


def _write_events(path: Path, program: _Program, rank: int, until: int) -> None:
    names: list[list[object]] = [[0x7F0000000000 + 64 * i, name] for i, name in enumerate(program.names)]
    names.append([0x7F00FFFF0000, "NVIDIA H200"])
    begin = T0_UNIX_NS + 1_000_000_000
    hello = {"pid": 4000 + rank, "ppid": 1, "argv": ["python", "infer.py"], "python": "3.12.3", "rank": str(rank)}
    activated = {
        "libcupti": "libcupti.so.13",
        "version": VERSION,
        "sizes": {},
        "torch": "2.11.0",
        "cost_ns": 11_000_000,
    }
    events = [
        {"ev": "hello", **hello, "t": begin},
        {"ev": "window", "state": "traced", "reason": "", "t": begin},
        {"ev": "activated", **activated, "t": begin},
        {"ev": "names", "names": names, "t": begin},
        {"ev": "window", "state": "stopped", "reason": "the program ended", "t": until},
        {"ev": "finished", "cost_ns": 1_000_000, "t": until},
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
