"""A spool folder to a trace folder: every process decoded, ranks and devices numbered, tables written."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spikeprof.profiler import store
from spikeprof.profiler.assemble import columns as col
from spikeprof.profiler.assemble import layouts, small
from spikeprof.profiler.assemble.layouts import layout_for
from spikeprof.profiler.assemble.names import demangle
from spikeprof.profiler.assemble.records import Batch, batches
from spikeprof.profiler.assemble.spool import ProcessSpool, read_processes
from spikeprof.profiler.trace import CollectorNote
from spikeprof.profiler.units import NS_PER_S

#: A record may lie this far outside its process's recorded life before it is set aside as broken.
SLACK_NS = 2 * NS_PER_S

#: Tables whose rows come from activity records.
EVENT_TABLES = ("kernels", "memory_ops", "runtime_calls", "overheads")

Progress = Callable[[int, int], None]  # spool bytes done, spool bytes in all


@dataclass
class Assembly:
    """What was built: for the manifest, and for the sentence at the end of a run."""

    note: CollectorNote
    processes: list[ProcessSpool]
    versions: dict[str, str]
    kernels_count: int = 0
    end_ns: int = 0  # last moment that any table mentions, in trace time
    notes: list[str] = field(default_factory=list)
    undecoded: bool = False  # some records stay in the spool, which must be kept


@dataclass
class _Tally:
    """Records seen, and those set aside by reason."""

    records: int = 0
    set_aside: Counter[str] = field(default_factory=Counter)
    unnamed: int = 0
    end_ns: int = 0


def assemble(
    spool: Path,
    folder: Path,
    t0_unix_ns: int,
    device_ordinals: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Assembly:
    """Write all activity tables of a spool folder into a trace folder.

    ``device_ordinals`` maps a GPU's uuid to its number on this machine (NVML index). Raises OutputError
    when the trace cannot be written; the spool is left as it is.
    """
    processes = read_processes(spool)
    ranks = small.rank_of(processes)
    traced = [p for p in processes if p.activated_ns]
    builders = {name: col.TableBuilder(name) for name in EVENT_TABLES}
    gpus = small.Devices(device_ordinals or {})
    tally = _Tally()
    notes: list[str] = []
    total = sum(p.records.stat().st_size for p in traced if p.records.exists())
    done = 0
    undecoded = False
    for process in traced:
        layout = layout_for(process.libcupti or 0, process.sizes, process.libcupti_path)
        if not process.records.exists():
            continue
        if layout is None:
            undecoded = True
            notes.append(
                f"the records of process {process.pid} stay undecoded in its spool: "
                f"libcupti {process.libcupti} lays them out in a way not known here"
            )
            continue
        for batch in batches(process.records, layout):
            _add_batch(batch, process, ranks[process.pid], builders, gpus, tally, t0_unix_ns)
            done += sum(r.nbytes for r in batch.records.values())
            if progress:
                progress(min(done, total), total)
    kernels = builders["kernels"].rows
    if traced:
        for builder in builders.values():
            builder.write(folder)
        small.write_tables(folder, traced, ranks, gpus, t0_unix_ns, tally.end_ns)
    store.write_table(folder, "processes", small.process_table(processes, ranks))
    notes += small.notes_of(processes)
    if tally.unnamed:
        notes.append(f"{tally.unnamed} kernel name(s) were never read from the process and are shown by address")
    return Assembly(
        note=_note(traced, processes, tally, gpus),
        processes=processes,
        versions=small.versions_of(traced),
        kernels_count=kernels,
        end_ns=tally.end_ns,
        notes=notes,
        undecoded=undecoded,
    )


def _note(
    traced: Sequence[ProcessSpool], processes: Sequence[ProcessSpool], tally: _Tally, gpus: small.Devices
) -> CollectorNote:
    faults = [fault for p in processes for fault in p.faults]
    if not traced:
        state, reason = "refused", "no process used CUDA" if processes else "no Python process reported"
    elif faults:
        state, reason = "degraded", "; ".join(faults[:3])
    else:
        state, reason = "ok", ""
    return CollectorNote(
        state=state,
        reason=reason,
        records_count=tally.records,
        dropped_count=sum(p.dropped for p in processes),
        repaired_count=0,
        set_aside_count=sum(tally.set_aside.values()),
        set_aside_reasons=dict(tally.set_aside),
        cost_ns=sum(p.cost_ns for p in processes),
    )


def _add_batch(
    batch: Batch,
    process: ProcessSpool,
    rank: int,
    builders: Mapping[str, col.TableBuilder],
    gpus: small.Devices,
    tally: _Tally,
    t0_unix_ns: int,
) -> None:
    if batch.set_aside_bytes:
        # Sizes inside are unknown, that is why they are lost: counted as stretches, not as records.
        tally.set_aside["stretch of bytes that no record begins"] += 1
    if layouts.DEVICE in batch.records:
        gpus.add(rank, batch.records[layouts.DEVICE], process.names)
    name_of = partial(_name_of, process.names, tally)
    makers: dict[int, tuple[str, Callable[[col.Records, Mapping[str, col.Labels]], col.Columns]]] = {
        layouts.KERNEL: ("kernels", partial(col.kernel_columns, name_of=name_of)),
        layouts.MEMCPY: ("memory_ops", col.copy_columns),
        layouts.MEMCPY_PEER: ("memory_ops", col.copy_columns),
        layouts.MEMSET: ("memory_ops", col.memset_columns),
        layouts.RUNTIME: ("runtime_calls", partial(col.call_columns, driver=False)),
        layouts.DRIVER: ("runtime_calls", partial(col.call_columns, driver=True)),
        layouts.OVERHEAD: ("overheads", col.overhead_columns),
    }
    for kind, (table, make) in makers.items():
        records = batch.records.get(kind)
        if records is None:
            continue
        tally.records += len(records)
        records = _sound(records, process, tally)
        if not len(records):
            continue
        columns = make(records, builders[table].labels)
        columns["start_ns"] -= t0_unix_ns
        columns["end_ns"] -= t0_unix_ns
        columns["rank"] = np.full(len(records), rank, np.int32)
        if "device" in columns:
            columns["device"] = gpus.ordinals(rank, columns["device"])
        tally.end_ns = max(tally.end_ns, int(columns["end_ns"].max()))
        builders[table].add(columns)


def _sound(records: col.Records, process: ProcessSpool, tally: _Tally) -> col.Records:
    """The records that can be true; the others are counted by what is wrong with them."""
    start, end = records["start"], records["end"]
    untimed = (start == 0) | (end == 0)
    backwards = ~untimed & (end < start)
    earliest = np.uint64(process.activated_ns - SLACK_NS)
    latest = np.uint64(max(process.last_ns, int(process.records.stat().st_mtime_ns)) + SLACK_NS)
    outside = ~untimed & ~backwards & ((start < earliest) | (end > latest))
    on_gpu = "device" in (records.dtype.names or ())
    cut = ~untimed & ~backwards & ~outside & on_gpu & _across_a_pause(start, end, process)
    bad: npt.NDArray[np.bool_] = untimed | backwards | outside | cut
    if not bad.any():
        return records
    reasons = {
        "no time": untimed,
        "ends before it starts": backwards,
        "outside the run": outside,
        "in flight when recording paused": cut,
    }
    for reason, which in reasons.items():
        if which.any():
            tally.set_aside[reason] += int(which.sum())
    return records[~bad]


def _across_a_pause(
    start: npt.NDArray[np.uint64], end: npt.NDArray[np.uint64], process: ProcessSpool
) -> npt.NDArray[np.bool_]:
    """Work that began while recording and ended after it was switched off: its end time is not its own.

    libcupti 13.0 gives such work, all kernels of a graph replay at once, the time at which recording resumed.
    """
    pauses = [
        at
        for (_, state, _), (at, following, _) in itertools.pairwise(process.windows)
        if state == "traced" and following in ("clean", "off", "yielded")
    ]
    if not pauses:
        return np.zeros(len(start), bool)
    limits = np.array([*pauses, np.iinfo(np.int64).max], np.uint64)
    return np.asarray(end > limits[np.searchsorted(limits[:-1], start, side="right")])


def _name_of(names: Mapping[int, str], tally: _Tally, pointer: int) -> str:
    if pointer in names:
        return demangle(names[pointer])
    tally.unnamed += 1
    return f"kernel at {pointer:#x} (name not read)"
