"""torch.profiler (Kineto) Chrome-trace JSON into a Trace: all versions from torch 1.8 on, NVIDIA and AMD.

What an event is, its category says, in any case: ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` are work of
the GPU; that an event names a stream means nothing (Triton's host ops and waits do). One file is one
process. Kineto puts the device number where Chrome has the process, and the stream where it has the thread.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler.errors import ForeignFile
from spikeprof.profiler.importers import chrome, kineto_columns, kineto_head, kineto_owners
from spikeprof.profiler.importers.payload import read_payload
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote, Manifest, Trace
from spikeprof.profiler.units import NS_PER_S

COLLECTOR = "kineto"

#: Category, lower case -> table. ``memcpy``, ``memset``, ``runtime`` and ``operator`` are torch 1.8 to 1.11.
TABLE_OF_CATEGORY = {
    "kernel": "kernels",
    "gpu_memcpy": "memory_ops",
    "gpu_memset": "memory_ops",
    "memcpy": "memory_ops",
    "memset": "memory_ops",
    "cuda_runtime": "runtime_calls",
    "cuda_driver": "runtime_calls",
    "hip_runtime": "runtime_calls",
    "runtime": "runtime_calls",
    "cpu_op": "ops",
    "operator": "ops",
    "user_annotation": "ranges",
    "cuda_sync": "syncs",
    "overhead": "overheads",
}
#: Written by torch.profiler too, but no table holds them (yet).
_OTHER_CATEGORIES = frozenset({"trace", "gpu_user_annotation", "cuda_profiler_range"})
_FUNCTIONS = "python_function"
_MODULE_PREFIX = "nn.Module: "
_STEP_PREFIX = "ProfilerStep#"
_MARKS = ("Iteration Start: ", "Record Window End")
#: Phases that are not stretches of time: metadata and flow arrows.
_SILENT_PHASES = frozenset({"M", "s", "t", "f"})

#: Made from others.
_NOT_RECORDED = ("processes", "devices", "modules", "stacks", "origins", "kernel_owners")

#: Present even when empty: torch.profiler would have recorded them, had there been any.
_ALWAYS = ("processes", "devices", "kernels", "memory_ops", "runtime_calls")

_NO_IDS = np.empty(0, np.int64)

#: A start of exactly 0 that lies this far before all others is no time but a record never filled in.
_ZERO_GAP_NS = 3600 * NS_PER_S
_MAX_US = Decimal(2**62) / 1000
#: An event that begins or ends this far (52 days) from the middle one was not recorded with it.
_FURTHEST_NS = 2**52


def read_kineto(path: Path) -> Trace:
    """Read a torch.profiler file. Raises TraceNotFound, ForeignFile, DamagedTrace or InputError."""
    document = chrome.decode(read_payload(path), path)
    gathered = _gather(document.events)
    _refuse_other_programs(gathered, document.head, path)
    tables, origin_ns, end_ns = _on_one_clock(gathered)
    head = kineto_head.read(document.head)
    processes = kineto_columns.rank_processes(tables, head.rank)
    tables["processes"] = processes.table(no_gpu=not _gpu_events(tables), libcupti=head.versions.get("libcupti", ""))
    tables["devices"] = kineto_head.devices(document.head, head.rank, tables)
    finished = {
        name: kineto_columns.finish(name, tables.get(name), processes)
        for name in TABLES
        if name in _ALWAYS or (name in tables and len(tables[name]))
    }
    finished |= _owners(tables, finished, processes)
    records = sum(len(finished[n]) for n in finished if n not in _NOT_RECORDED)
    notes = (*head.notes, *processes.notes, *_notes(gathered, finished, head.base_time_ns + origin_ns))
    manifest = Manifest(
        source="torch.profiler",
        t0_unix_ns=head.base_time_ns + origin_ns,
        duration_ns=end_ns - origin_ns,
        host=head.host,
        versions=head.versions,
        options=head.options,
        collectors={COLLECTOR: _collector_note(gathered, records, document.repaired_count)},
        notes=notes,
    )
    return Trace(manifest, finished)


def _owners(
    tables: dict[str, pa.Table], finished: dict[str, pa.Table], processes: kineto_columns.Processes
) -> dict[str, pa.Table]:
    """The tables of who launched what; not part of what was recorded."""
    frames = tables.get(kineto_columns.FRAMES)
    if frames is not None:
        frames = frames.append_column("rank", pa.array(processes.ranks(frames.column("pid").to_numpy())))
    external = {name: tables[name].column("external_id").to_numpy() for name in ("kernels", "ops") if name in tables}
    return kineto_owners.owner_tables(
        finished, frames, {name: external.get(name, _NO_IDS) for name in ("kernels", "ops")}
    )


@dataclass
class _Gathered:
    """Columns per table as recorded (absolute times), and what did not become a row."""

    batches: dict[str, list[pa.RecordBatch]] = field(default_factory=lambda: defaultdict(list))
    set_aside: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)  # whole events that no table holds, by category
    recognised: bool = False  # whether any event is of a kind that torch.profiler writes


def _gather(events: list[Any]) -> _Gathered:
    """The one pass over events: sort them by table, and their fields into columns."""
    gathered = _Gathered()
    for chunk in chrome.chunks(events, gathered.set_aside):
        rows: dict[str, list[chrome.Event]] = defaultdict(list)
        times: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for event in chunk:
            if event.ph != "X":
                if event.ph not in _SILENT_PHASES:
                    _leave_out(event, gathered)
                continue
            interval = _interval_ns(event)
            if isinstance(interval, str):
                gathered.set_aside[interval] += 1
                continue
            table = _table_of(event)
            if table:
                rows[table].append(event)
                gathered.recognised = True
            else:
                _leave_out(event, gathered)
            times[table].append(interval)
        for table, pairs in times.items():
            start_end = np.array(pairs, np.int64).reshape(-1, 2)
            gathered.batches[table].append(kineto_columns.batch(table, rows[table], start_end))
    return gathered


def _table_of(event: chrome.Event) -> str:
    """The table for a complete event; empty for none."""
    if event.cat is None:
        # The autograd profiler before torch.profiler wrote no category: its host ops are all there is to read.
        return "" if isinstance(event.pid, str) and "cuda" in event.pid.lower() else "ops"
    category = event.cat.lower()
    table = TABLE_OF_CATEGORY.get(category, "")
    name = event.name
    if table == "ops" and isinstance(name, str) and name.startswith(_STEP_PREFIX):
        return "ranges"
    if category == _FUNCTIONS:
        return "ranges" if isinstance(name, str) and name.startswith(_MODULE_PREFIX) else kineto_columns.FRAMES
    return table


def _leave_out(event: chrome.Event, gathered: _Gathered) -> None:
    """Count an event that no table holds; marks of the recording's own start and end are nobody's loss."""
    category = (event.cat or "").lower()
    gathered.recognised |= category in _OTHER_CATEGORIES
    if category == "trace" or (isinstance(event.name, str) and event.name.startswith(_MARKS)):
        return
    gathered.left_out[category or (event.name if event.name == "[memory]" else "without a category")] += 1


def _interval_ns(event: chrome.Event) -> tuple[int, int] | str:
    """``(start, end)`` in ns on the file's own clock, or why the event has none."""
    if event.ts is None or event.dur is None:
        return "no start" if event.ts is None else "no duration"
    try:
        if not (abs(event.ts) < _MAX_US and abs(event.dur) < _MAX_US):
            return "time out of range"
    except InvalidOperation:  # NaN, as a string
        return "time out of range"
    start, duration = ns_of_us(event.ts), ns_of_us(event.dur)
    return "ends before it starts" if duration < 0 else (start, start + duration)


def ns_of_us(us: Decimal) -> int:
    """Decimal microseconds as whole nanoseconds, exactly; what lies below a nanosecond is rounded to even."""
    return int((us * 1000).to_integral_value())


def _refuse_other_programs(gathered: _Gathered, head: chrome.Head, path: Path) -> None:
    written_by_torch = head.schema_version is not None or head.device_properties is not None
    if written_by_torch or gathered.recognised or not gathered.left_out:
        return
    kinds = ", ".join(name for name, _ in gathered.left_out.most_common(4))
    raise ForeignFile(
        f"{path} is a Chrome trace of another program: none of its {gathered.left_out.total()} events has a category "
        f"of torch.profiler (kernel, cpu_op, cuda_runtime, …), but {kinds}"
    )


def _on_one_clock(gathered: _Gathered) -> tuple[dict[str, pa.Table], int, int]:
    """Tables with times from the earliest event on, and that event's time and the latest end (ns)."""
    tables = {name: pa.Table.from_batches(batches) for name, batches in gathered.batches.items()}
    starts = [t.column("start_ns").to_numpy() for t in tables.values()]
    every = np.concatenate(starts) if starts else np.empty(0, np.int64)
    if not len(every):
        return {}, 0, 0
    timed = every[every != 0]
    if len(timed) and len(timed) < len(every) and timed.min() > _ZERO_GAP_NS:
        gathered.set_aside["start is 0"] += len(every) - len(timed)
        tables = {name: t.filter(pa.array(t.column("start_ns").to_numpy() != 0)) for name, t in tables.items()}
        every = timed
    middle = int(np.partition(every, len(every) // 2)[len(every) // 2])
    near = {name: _near(t, middle) for name, t in tables.items()}
    far_count = sum(int((~kept).sum()) for kept in near.values())
    if far_count:
        gathered.set_aside["time out of range"] += far_count
        tables = {name: t.filter(pa.array(near[name])) for name, t in tables.items()}
    origin = min((int(t.column("start_ns").to_numpy().min()) for t in tables.values() if len(t)), default=0)
    end = max((int(t.column("end_ns").to_numpy().max()) for t in tables.values() if len(t)), default=0)
    tables.pop("", None)
    return {name: kineto_columns.shifted(t, origin) for name, t in tables.items()}, origin, end


def _near(table: pa.Table, middle: int) -> npt.NDArray[np.bool_]:
    start, end = table.column("start_ns").to_numpy(), table.column("end_ns").to_numpy()
    return np.asarray((start > middle - _FURTHEST_NS) & (end < middle + _FURTHEST_NS))


def _gpu_events(tables: dict[str, pa.Table]) -> int:
    return sum(len(tables[name]) for name in ("kernels", "memory_ops") if name in tables)


def _collector_note(gathered: _Gathered, records: int, repaired: int) -> CollectorNote:
    aside = gathered.set_aside
    return CollectorNote(
        "degraded" if aside else "ok",
        reason="broken events were set aside" if aside else "",
        records_count=records,
        repaired_count=repaired,
        set_aside_count=aside.total(),
        set_aside_reasons=dict(aside),
    )


def _notes(gathered: _Gathered, tables: dict[str, pa.Table], t0_unix_ns: int) -> Iterable[str]:
    if not _gpu_events(tables):
        yield "The file holds no GPU events: torch.profiler recorded the host only, or nothing ran on a GPU."
    if gathered.batches and t0_unix_ns < 1_000_000_000 * NS_PER_S:
        yield "The file states no date: its times count from an unknown moment."
    unsized = int(np.count_nonzero(tables["memory_ops"].column("size_bytes").to_numpy() == 0))
    if unsized:
        yield f"{unsized} of {len(tables['memory_ops'])} copies state no size: their bytes count as 0."
    if gathered.left_out:
        kinds = ", ".join(f"{count} {name}" for name, count in gathered.left_out.most_common(6))
        yield f"Events that no table holds were left out: {kinds}."
