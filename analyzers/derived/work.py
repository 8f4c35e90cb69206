"""GPU work, measured and busy time, and the calls that launched work. Definitions: ``derived/__init__.py``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from spikeprof.analyzers.derived.groups import encoded
from spikeprof.analyzers.derived.intervals import (
    EMPTY,
    Bools,
    Integers,
    Ints,
    Spans,
    hulls,
    ints,
    subtract,
    total,
    union,
)
from spikeprof.profiler.schema import GPU_WORK_TABLES
from spikeprof.profiler.trace import Trace


@dataclass(frozen=True, slots=True)
class GpuWork:
    """GPU work of all devices, ascending by start. All arrays have one element per piece of work."""

    rank: Integers
    device: Integers
    start: Ints
    end: Ints
    is_copy: Bools  # from memory_ops: a copy or a memset
    row: Integers  # in kernels or memory_ops


def gpu_work(trace: Trace) -> GpuWork:
    """Kernels and memory operations together. A table that was not collected adds nothing."""
    tables = [name for name in GPU_WORK_TABLES if name in trace]
    lengths = [trace.table(name).num_rows for name in tables]

    def gather(column: str) -> Integers:
        found: list[Integers] = [trace.column(name, column) for name in tables]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    start, end = ints(gather("start_ns")), ints(gather("end_ns"))
    order = np.argsort(start, kind="stable").astype(np.int32)
    order = order[end[order] > start[order]]
    is_copy = np.repeat(np.array([name == "memory_ops" for name in tables], bool), lengths)[order]
    row = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths] or [np.empty(0, np.int32)])[order]
    return GpuWork(gather("rank")[order], gather("device")[order], start[order], end[order], is_copy, row)


def work_column(trace: Trace, work: GpuWork, column: str, pieces: Integers | slice = slice(None)) -> Ints:
    """A numeric column that both tables of GPU work have, for the chosen pieces of work (all by default)."""
    row, is_copy = work.row[pieces], work.is_copy[pieces]
    values = np.zeros(len(row), np.int64)
    for table, chosen in (("kernels", ~is_copy), ("memory_ops", is_copy)):
        if table in trace:
            values[chosen] = trace.column(table, column)[row[chosen]]
    return values


def measured_spans(trace: Trace, ranks: Iterable[int]) -> Spans:
    """The time in which all work of these processes was being recorded.

    A trace without the table ``windows`` (an import) was recorded for its whole duration, and so was a
    process that has no window in it. When the table is damaged, no time is known to have been recorded.
    """
    if "windows" in trace.damaged:
        return EMPTY
    ranks = list(ranks)
    whole = Spans(ints([0]), ints([max(trace.manifest.duration_ns, 0)]))
    if "windows" not in trace:
        return whole
    codes, labels = trace.codes("windows", "state")
    rank = trace.column("windows", "rank")
    start, end = trace.column("windows", "start_ns"), trace.column("windows", "end_ns")
    known = np.isin(rank, ranks)
    if not set(ranks) <= set(rank[known].tolist()):
        return whole
    traced = np.isin(codes, [i for i, label in enumerate(labels) if label == "traced"])
    return subtract(
        union(start[known & traced], end[known & traced]), union(start[known & ~traced], end[known & ~traced])
    )


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Where the time of one device went. ``wall = busy + idle``, exactly, all inside ``active``."""

    device: int
    measured: Spans
    active: Spans
    busy: Spans  # whole pieces of work, also where they stick out of ``active``
    idle: Spans

    @property
    def wall_ns(self) -> int:
        """Length of the active time."""
        return total(self.active)

    @property
    def idle_ns(self) -> int:
        """Active time without any work."""
        return total(self.idle)

    @property
    def busy_ns(self) -> int:
        """Active time with work."""
        return self.wall_ns - self.idle_ns


def device_times(trace: Trace, work: GpuWork) -> list[DeviceTime]:
    """One entry per device with GPU work, ascending by device."""
    result = []
    for device in np.unique(work.device).tolist():
        mine = work.device == device
        busy = union(work.start[mine], work.end[mine])
        measured = measured_spans(trace, np.unique(work.rank[mine]).tolist())
        active = hulls(measured, busy)
        result.append(DeviceTime(device, measured, active, busy, subtract(active, busy)))
    return result


def link(trace: Trace, work: GpuWork) -> Ints:
    """Per piece of work the row of ``runtime_calls`` that launched it, -1 where unknown.

    Of several calls with one id (a driver call inside a runtime call) the first to start is taken. A call that only
    waits launched nothing: libcupti 13.0 gives its id to work of graphs that began while recording was off.
    """
    unknown = np.full(len(work.start), -1, np.int64)
    if "runtime_calls" not in trace or not len(work.start) or not trace.table("runtime_calls").num_rows:
        return unknown
    call_ids, ids = trace.column("runtime_calls", "correlation_id"), work_column(trace, work, "correlation_id")
    none = ids == 0
    low, high = min(int(call_ids.min()), int(ids.min())), max(int(call_ids.max()), int(ids.max()))
    if high - low >= 2**40:  # ids made of hashes: number them instead
        numbers = encoded(np.concatenate([call_ids, ids]))
        call_ids, ids = numbers[: len(call_ids)], numbers[len(call_ids) :]
        low, high = 0, len(numbers)
    keys = trace.column("runtime_calls", "rank") * np.int64(high - low + 1) + (call_ids - low)
    order = np.argsort(keys, kind="stable")  # calls are sorted by start: the earliest stays first
    keys = keys[order]
    wanted = work.rank * np.int64(high - low + 1) + (ids - low)
    place = np.minimum(np.searchsorted(keys, wanted, side="left"), len(keys) - 1)
    codes, labels = trace.codes("runtime_calls", "name")
    waits = np.array(["Synchronize" in label for label in labels], bool)
    found = order[place]
    return np.where((keys[place] == wanted) & ~none & ~waits[codes[found]], found, unknown)


def linked_share(work: GpuWork, calls: Ints) -> float | None:
    """The share (0 to 1) of GPU time, as a sum over work, whose launching call is known. None without work."""
    length = work.end - work.start
    whole = int(length.sum())
    return int(length[calls >= 0].sum()) / whole if whole else None


#: What a call does to the launching thread and the GPU's queue; "other" calls do neither.
CALL_KINDS = ("other", "launch", "copy", "sync")


def call_kinds(names: Iterable[str]) -> Ints:
    """Each call name's place in ``CALL_KINDS``.

    A copy that is not ``…Async`` makes the host wait: it counts as a synchronisation, like
    ``cudaStreamSynchronize``. A memset moves no data of the host's: it counts as a launch. Works on CUDA runtime,
    CUDA driver and HIP names, with or without suffixes.
    """
    return ints([CALL_KINDS.index(_call_kind(name)) for name in names])


def _call_kind(name: str) -> str:
    if "Synchronize" in name:
        return "sync"
    if "Launch" in name or "Memset" in name:
        return "launch"
    if "Memcpy" in name or "MemPrefetch" in name:
        return "copy" if "Async" in name else "sync"
    return "other"
