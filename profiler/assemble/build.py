"""A spool folder to a trace folder: every process decoded, ranks and devices numbered, tables written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from spikeprof.profiler import store
from spikeprof.profiler.assemble import columns as col
from spikeprof.profiler.assemble import layouts, numerics, owners, small
from spikeprof.profiler.assemble.checks import Tally, sound
from spikeprof.profiler.assemble.layouts import layout_for
from spikeprof.profiler.assemble.names import demangle
from spikeprof.profiler.assemble.records import Batch, batches
from spikeprof.profiler.assemble.spool import ProcessSpool, read_processes
from spikeprof.profiler.errors import OutputError
from spikeprof.profiler.schema import GPU_WORK_TABLES
from spikeprof.profiler.trace import CollectorNote

#: Tables whose rows come from activity records.
EVENT_TABLES = ("kernels", "memory_ops", "runtime_calls", "overheads")

_SCANNED = ("tensor_stats", "bad_operators")

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
    numerics: CollectorNote | None = None  # of the scans of tensors; None = none were asked for
    ownership: CollectorNote | None = None  # what became of attribution; None = the spool says nothing of it


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
    small.number(processes)
    traced = [p for p in processes if p.activated_ns]
    builders = {name: col.TableBuilder(name) for name in EVENT_TABLES}
    gpus = small.Devices(device_ordinals or {})
    tally = Tally()
    total = sum(p.records.stat().st_size for p in traced if p.records.exists())
    done = 0
    undecoded: dict[Path, str] = {}
    for process in traced:
        if not process.records.exists():
            continue
        layout = layout_for(process.libcupti or 0, process.sizes, process.libcupti_path)
        if layout is None:
            undecoded[process.stem] = _undecoded(process)
            process.faults.append(undecoded[process.stem])
            continue
        for batch in batches(process.records, layout):
            _add_batch(batch, process, builders, gpus, tally, t0_unix_ns)
            done += batch.spool_bytes
            if progress:
                progress(min(done, total), total)
    for name in GPU_WORK_TABLES:
        # Only now: a process's devices may be told after its first kernels.
        builders[name].renumber("device", gpus.ordinals)
    kernels = builders["kernels"].rows
    collected = [p for p in traced if p.collected and p.stem not in undecoded]
    if collected:
        for builder in builders.values():
            builder.write(folder)
    if traced:
        small.write_tables(folder, traced, gpus, t0_unix_ns, tally.end_ns)
    ownership = _optional(folder, owners.WRITTEN, "joined", lambda: owners.write_owners(folder, traced, t0_unix_ns))
    scans = [(p.rank, p.stem, p.numerics) for p in processes]
    scanned = _optional(folder, _SCANNED, "read", lambda: numerics.write_stats(folder, scans, t0_unix_ns))
    store.write_table(folder, "processes", small.process_table(processes))
    notes = [*undecoded.values(), *small.notes_of(processes)]
    if tally.unnamed:
        notes.append(f"{len(tally.unnamed)} kernel name(s) were never read from the process and are shown by address")
    return Assembly(
        note=_note(processes, traced, collected, tally),
        processes=processes,
        versions=small.versions_of(traced),
        kernels_count=kernels,
        end_ns=max(tally.end_ns.values(), default=0),
        notes=notes,
        undecoded=bool(undecoded),
        ownership=ownership,
        numerics=scanned,
    )


def _optional(
    folder: Path, tables: Sequence[str], done: str, write: Callable[[], CollectorNote | None]
) -> CollectorNote | None:
    """What ``write`` answers. A fault of it costs nothing but its own tables; raises OutputError."""
    try:
        return write()
    except OutputError:
        raise
    except Exception as error:
        for name in tables:
            store.remove_table(folder, name)
        return CollectorNote("refused", f"could not be {done}: {type(error).__name__}: {error}")


def _undecoded(process: ProcessSpool) -> str:
    return (
        f"the records of process {process.pid} stay undecoded in the folder's spool: "
        f"libcupti {process.libcupti or 'of unknown version'} lays them out in a way not known here"
    )


def _note(
    processes: Sequence[ProcessSpool],
    traced: Sequence[ProcessSpool],
    collected: Sequence[ProcessSpool],
    tally: Tally,
) -> CollectorNote:
    faults = [fault for p in processes for fault in p.faults]
    if not traced:
        none = "no process used CUDA" if processes else "no Python process reported"
        state, reason = "refused", "; ".join(faults[:3]) or none
    elif not collected:
        never = next((why for p in traced for _, _, why in reversed(p.windows) if why != small.ENDED), "")
        state, reason = "refused", "; ".join(faults[:3]) or f"recording was never on: {never or 'no reason is known'}"
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
    builders: Mapping[str, col.TableBuilder],
    gpus: small.Devices,
    tally: Tally,
    t0_unix_ns: int,
) -> None:
    rank = process.rank
    if batch.set_aside_count:
        # How many records lie in there cannot be told: that is why they are lost.
        tally.set_aside["buffer not readable to its end"] += batch.set_aside_count
    if layouts.DEVICE in batch.records:
        gpus.add(rank, batch.records[layouts.DEVICE], process.names)
    name_of = partial(_name_of, process, tally)
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
        records = sound(records, process, batch.handed_over_ns, tally)
        if not len(records):
            continue
        columns = make(records, builders[table].labels)
        columns["start_ns"] -= t0_unix_ns
        columns["end_ns"] -= t0_unix_ns
        columns["rank"] = np.full(len(records), rank, np.int32)
        tally.end_ns[rank] = max(tally.end_ns.get(rank, 0), int(columns["end_ns"].max()))
        builders[table].add(columns)


def _name_of(process: ProcessSpool, tally: Tally, pointer: int) -> str:
    if pointer in process.names:
        return demangle(process.names[pointer])
    tally.unnamed.add((process.rank, pointer))
    return f"kernel at {pointer:#x} (name not read)"
