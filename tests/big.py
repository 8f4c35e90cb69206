"""A synthetic trace of a million kernels, and how long the analyzers take on it: ``python tests/big.py [KERNELS]``.

It is shaped like eager decoding: steps of 385 small kernels launched one by one from one thread, a copy and a wait
at the end of each, every tenth step a graph replay instead, 64 kernel names.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote, Manifest, Trace

STEP_KERNELS = 385


def big_trace(kernels_count: int = 1_000_000, devices_count: int = 1, seed: int = 1) -> Trace:
    """The trace. Each device has a process of its own with a share of the kernels."""
    random = np.random.default_rng(seed)
    parts = [_process(rank, kernels_count // devices_count, random) for rank in range(devices_count)]
    tables = {
        name: pa.concat_tables([part[name] for part in parts]).unify_dictionaries().sort_by("start_ns")
        for name in ("kernels", "memory_ops", "runtime_calls", "overheads", "windows")
    }
    duration = max(int(np.asarray(tables["windows"]["end_ns"]).max()), 1)
    notes = {"activity": CollectorNote("ok", records_count=sum(t.num_rows for t in tables.values()))}
    return Trace(Manifest("spikeprof", 1_700_000_000_000_000_000, duration, collectors=notes), tables)


def _process(rank: int, count: int, random: np.random.Generator) -> dict[str, pa.Table]:
    place = np.arange(count) % STEP_KERNELS
    step = np.arange(count) // STEP_KERNELS
    replay = step % 10 == 9
    call_start = np.cumsum(np.where(replay, 0, random.integers(4_000, 9_000, count)) + np.where(place == 0, 60_000, 0))
    call_end = call_start + random.integers(2_000, 3_500, count)
    length = random.integers(1_000, 5_000, count)
    # A stream runs in order: each kernel starts after its launch and after the one before it.
    ready = call_start + 4_000
    before = np.append(0, np.cumsum(length + 800)[:-1])
    start = before + np.maximum.accumulate(ready - before)
    ends = np.flatnonzero(place == STEP_KERNELS - 1)  # the last kernel of each step
    correlation = np.where(replay, count + 1 + step, np.arange(count) + 1)
    kernels = {
        "device": rank,
        "stream": 7,
        "context_id": 1,
        "correlation_id": correlation,
        "graph_id": np.where(replay, 5, 0),
        "graph_node_id": np.where(replay, 5 * 2**32 + place, 0),
        "name": place % 64,
        "start_ns": start,
        "end_ns": start + length,
        "grid_x": 1 + place % 7,
        "block_x": 128,
    }
    copy_end = start[ends] + length[ends] + 3_000
    copies = {
        "device": rank,
        "stream": 7,
        "context_id": 1,
        "correlation_id": 2 * count + step[ends],
        "size_bytes": 8,
        "start_ns": copy_end - 1_500,
        "end_ns": copy_end,
    }
    launches = np.flatnonzero(~replay | (place == 0))
    calls = {
        "thread_id": 100,
        "correlation_id": np.concatenate([correlation[launches], 2 * count + step[ends], 3 * count + step[ends]]),
        "name": np.concatenate([np.where(replay[launches], 1, 0), np.full(len(ends), 2), np.full(len(ends), 3)]),
        "start_ns": np.concatenate([call_start[launches], call_end[ends] + 1_000, call_end[ends] + 4_000]),
        "end_ns": np.concatenate([call_end[launches], call_end[ends] + 3_000, copy_end + 2_000]),
    }
    last = int(start[-1] + length[-1]) + 10_000
    flush = np.arange(0, last, 100_000_000)
    return {
        "kernels": _table("kernels", rank, kernels, {"name": [f"kernel_{i}<float, {i}>" for i in range(64)]}),
        "memory_ops": _table("memory_ops", rank, copies, {"kind": ["DtoH"]}),
        "runtime_calls": _table(
            "runtime_calls",
            rank,
            calls,
            {"name": ["cudaLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaStreamSynchronize"]},
        ),
        "overheads": _table(
            "overheads", rank, {"start_ns": flush, "end_ns": flush + 300_000}, {"kind": ["buffer_flush"]}
        ),
        "windows": _table(
            "windows", rank, {"start_ns": np.array([0]), "end_ns": np.array([last])}, {"state": ["traced"]}
        ),
    }


def _table(name: str, rank: int, columns: dict[str, object], texts: dict[str, list[str]]) -> pa.Table:
    """A table from numbers: a column that is left out is 0, a text column is codes into ``texts``."""
    rows = len(columns["start_ns"])  # type: ignore[arg-type]
    columns = {"rank": rank, **columns}
    arrays = []
    for field in TABLES[name].arrow:
        values = np.broadcast_to(np.asarray(columns.get(field.name, 0)), rows)
        if pa.types.is_dictionary(field.type):
            codes = pa.array(values.astype(np.int32))
            arrays.append(pa.DictionaryArray.from_arrays(codes, pa.array(texts.get(field.name, [""]))))
        else:
            arrays.append(pa.array(values).cast(field.type))
    return pa.table(arrays, schema=TABLES[name].arrow)


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that the work takes, and MiB by which resident memory peaks above its level at the start (Linux)."""

    def status(key: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(key))) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    level = status("VmRSS")
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin, max(status("VmHWM") - level, 0.0)


def main() -> None:
    """Print a line per analyzer."""
    from spikeprof.analyzers.registry import ANALYZERS
    from spikeprof.analyzers.runner import run_one

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    for devices in (1, 8):
        trace = big_trace(count, devices)
        rows = {name: trace.table(name).num_rows for name in trace.tables}
        print(f"{devices} device(s): {rows}")
        for analyzer in ANALYZERS:
            seconds, mebibytes = measured(lambda a=analyzer, t=trace: run_one(t, a))
            result = run_one(trace, analyzer)
            print(f"  {analyzer.info.id:16} {seconds:6.2f} s {mebibytes:6.0f} MiB  {result.status} {result.reason}")


if __name__ == "__main__":
    main()
