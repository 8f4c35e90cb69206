"""Fields of Kineto events into columns of the schema. The times come in and go out as int64 ns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler.importers.chrome import NO_ARGS, Args, Event
from spikeprof.profiler.schema import TABLES

Ints = npt.NDArray[np.int64]
Columns = dict[str, Any]

#: Tables of the host, whose ``pid`` is a process; elsewhere Kineto writes the device there.
HOST_TABLES = ("runtime_calls", "ops", "ranges")

#: Calls of Python functions, from which stacks are made: no table of a trace.
FRAMES = "frames"

_COPY = re.compile(r"Memcpy (\w+to\w+|PtoP)\b(?: \((.+?) -> (.+?)\))?|Copy(Host|Device)To(Host|Device)")
_COPY_KINDS = frozenset({"HtoD", "DtoH", "DtoD", "HtoH", "PtoP", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA"})
_MEMSET = re.compile(r"Memset(?: \((.+?)\))?|FillBuffer")
_SYNC_KINDS = {
    "stream wait event": "stream_wait_event",
    "event sync": "event",
    "stream sync": "stream",
    "context sync": "context",
}
_INT32 = np.iinfo(np.int32)


def batch(table: str, events: Sequence[Event], start_end: Ints) -> pa.RecordBatch:
    """The events' columns for ``table`` beside their times (n × 2, ns); for table ``""`` the times alone."""
    columns: Columns = _READERS[table](events, [e.args or NO_ARGS for e in events]) if table else {}
    columns |= {"start_ns": start_end[:, 0], "end_ns": start_end[:, 1]}
    return pa.RecordBatch.from_pydict(columns)


def shifted(table: pa.Table, origin_ns: int) -> pa.Table:
    """The same rows with ``origin_ns`` as time 0, in order of start (equal starts as recorded)."""
    start = table.column("start_ns").to_numpy() - origin_ns
    order = np.argsort(start, kind="stable")
    end = table.column("end_ns").to_numpy() - origin_ns
    table = table.drop_columns(["start_ns", "end_ns"]).unify_dictionaries().combine_chunks().take(pa.array(order))
    return table.append_column("start_ns", pa.array(start[order])).append_column("end_ns", pa.array(end[order]))


@dataclass
class Processes:
    """The processes of a file, and which rank each has. A file is one process unless somebody merged files."""

    rank_of_pid: dict[int, int]
    main_rank: int
    notes: list[str] = field(default_factory=list)

    def table(self, *, no_gpu: bool, libcupti: str) -> pa.Table:
        """The processes table."""
        pids = list(self.rank_of_pid) or [0]
        none = [""] * len(pids)
        return pa.table(
            {
                "rank": [self.rank_of_pid.get(pid, self.main_rank) for pid in pids],
                "pid": pids,
                "parent_pid": [0] * len(pids),
                "command": none,
                "python_version": none,
                "libcupti_version": [libcupti] * len(pids),
                "status": ["no_cuda" if no_gpu else "traced"] * len(pids),
                "reason": ["the file holds no GPU events" if no_gpu else ""] * len(pids),
            }
        ).sort_by("rank")

    def ranks(self, pids: Ints) -> Ints:
        """The rank of each row from its process number."""
        distinct, inverse = np.unique(pids, return_inverse=True)
        ranks = [self.rank_of_pid.get(int(pid), self.main_rank) for pid in distinct]
        return np.array(ranks, np.int64)[inverse]


def rank_processes(tables: dict[str, pa.Table], main_rank: int) -> Processes:
    """``main_rank`` for the process that launches most; further ones, in order of pid, the ranks after it."""
    hosts = [tables[name] for name in HOST_TABLES if name in tables and len(tables[name])]
    if not hosts:
        return Processes({}, main_rank)
    # Launches first: they alone tie a process to the GPU.
    busiest, counts = np.unique(hosts[0].column("pid").to_numpy(), return_counts=True)
    main = int(busiest[np.argmax(counts)])
    every = np.unique(np.concatenate([t.column("pid").to_numpy() for t in hosts]))
    others = [int(pid) for pid in every if pid != main]
    processes = Processes({main: main_rank} | {pid: main_rank + 1 + i for i, pid in enumerate(others)}, main_rank)
    launching = np.unique(tables["runtime_calls"].column("pid").to_numpy()) if "runtime_calls" in tables else ()
    if len(launching) > 1:
        processes.notes.append(
            f"{len(launching)} processes launch work in this file, but its GPU events do not say whose they are: "
            f"all count as rank {main_rank}, process {main}."
        )
    return processes


def finish(name: str, table: pa.Table | None, processes: Processes) -> pa.Table:
    """The table in its schema's columns and types: ranks and row numbers filled in, what is unknown 0 or empty."""
    spec = TABLES[name]
    if table is None:
        return spec.empty()
    rows = len(table)
    columns = {}
    for column in spec.columns:
        if column.name in table.column_names:
            columns[column.name] = table.column(column.name)
        elif column.name == "rank":
            pids = table.column("pid").to_numpy() if name in HOST_TABLES else np.full(rows, -1, np.int64)
            columns[column.name] = pa.array(processes.ranks(pids))
        elif column.doc == "row number":
            columns[column.name] = pa.array(np.arange(rows))
        else:
            columns[column.name] = pa.array(np.zeros(rows, np.int64))
    return pa.table(columns).cast(spec.arrow)


def _kernels(events: Sequence[Event], args: Sequence[Args]) -> Columns:
    grid, block = _triples([a.grid for a in args]), _triples([a.block for a in args])
    return _on_gpu(events, args) | {
        "name": _names(events),
        "external_id": _external(args),
        **{f"grid_{axis}": _int32(grid[:, i]) for i, axis in enumerate("xyz")},
        **{f"block_{axis}": _int32(block[:, i]) for i, axis in enumerate("xyz")},
        "registers_count": _int32(ints([a.registers for a in args])),
        # Kineto adds static and dynamic memory up: the sum, which is what occupancy needs, stands under dynamic.
        "shared_dynamic_bytes": _int32(ints([a.shared_memory for a in args])),
    }


def _memory_ops(events: Sequence[Event], args: Sequence[Args]) -> Columns:
    names = _names(events)
    kinds = [memory_kind(text) for text in names.dictionary.to_pylist()]
    columns = _on_gpu(events, args) | {"size_bytes": np.maximum(ints([a.bytes for a in args]), 0)}
    for i, column in enumerate(("kind", "src_memory", "dst_memory")):
        columns[column] = _relabelled(names, [kind[i] for kind in kinds])
    return columns


def _runtime_calls(events: Sequence[Event], args: Sequence[Args]) -> Columns:
    return _on_host(events) | {"correlation_id": _correlation(args), "name": _names(events)}


def _ops(events: Sequence[Event], args: Sequence[Args]) -> Columns:
    return _on_host(events) | {
        "name": _names(events),
        "external_id": _external(args),
        "input_shapes": pa.array([_json(a.input_dims) or _json(a.input_dims_old) for a in args], pa.string()),
        "input_dtypes": pa.array([_json(a.input_types) for a in args], pa.string()),
    }


def _frames(events: Sequence[Event], _args: Sequence[Args]) -> Columns:
    return _on_host(events) | {"name": _names(events)}


def _ranges(events: Sequence[Event], args: Sequence[Args]) -> Columns:
    names = [_text(e.name) for e in events]
    kinds = [
        "step" if n.startswith("ProfilerStep#") else "module" if n.startswith("nn.Module: ") else "user" for n in names
    ]
    return _on_host(events) | {
        "kind": pa.array(kinds).dictionary_encode(),
        "name": pa.array([n.removeprefix("nn.Module: ") for n in names], pa.string()),
        "attributes": pa.array([""] * len(events), pa.string()),
    }


def _syncs(events: Sequence[Event], args: Sequence[Args]) -> Columns:
    kinds = [
        _SYNC_KINDS.get(_text(a.sync_kind or e.name).lower(), "unknown") for e, a in zip(events, args, strict=True)
    ]
    columns = _on_gpu(events, args) | {"kind": pa.array(kinds).dictionary_encode()}
    del columns["device"]
    return columns


def _overheads(events: Sequence[Event], args: Sequence[Args]) -> Columns:
    names = _names(events)
    kinds = [re.sub(r"\W+", "_", text.strip().lower()) for text in names.dictionary.to_pylist()]
    return {"thread_id": threads([e.tid for e in events]), "kind": _relabelled(names, kinds)}


_READERS: dict[str, Callable[[Sequence[Event], Sequence[Args]], Columns]] = {
    "kernels": _kernels,
    "memory_ops": _memory_ops,
    "runtime_calls": _runtime_calls,
    "ops": _ops,
    "ranges": _ranges,
    FRAMES: _frames,
    "syncs": _syncs,
    "overheads": _overheads,
}


def _on_gpu(events: Sequence[Event], args: Sequence[Args]) -> Columns:
    device = [e.pid if a.device is None else a.device for e, a in zip(events, args, strict=True)]
    stream = [e.tid if a.stream is None else a.stream for e, a in zip(events, args, strict=True)]
    return {
        "device": _int32(np.maximum(ints(device), 0)),
        "context_id": _int32(ints([a.context for a in args])),
        # Some writers give "all streams" as -1, some as 4294967295: the same 32 bits.
        "stream": ints(stream).astype(np.int32),
        "correlation_id": _correlation(args),
        "graph_id": _int32(ints([a.graph_id for a in args])),
        "graph_node_id": ints([a.graph_node_id for a in args]),
    }


def _on_host(events: Sequence[Event]) -> Columns:
    return {"pid": ints([e.pid for e in events]), "thread_id": threads([e.tid for e in events])}


def _external(args: Sequence[Args]) -> Ints:
    return ints([a.external_id if a.external_id is not None else a.external_id_old for a in args])


def _correlation(args: Sequence[Args]) -> Ints:
    found = ints([a.correlation for a in args])
    return np.maximum(found, 0)  # −1 means none, as 0 does


def memory_kind(name: str) -> tuple[str, str, str]:
    """``(kind, source memory, destination memory)`` from a copy's or memset's name, in the schema's words.

    ``Memcpy HtoD (Pageable -> Device)`` → ``("HtoD", "pageable", "device")``.
    """
    if memset := _MEMSET.fullmatch(name.strip()):
        return "memset", "unknown", _memory(memset[1])
    copy = _COPY.fullmatch(name.strip())
    if not copy:
        return "unknown", "unknown", "unknown"
    if copy[4]:  # ROCm's own words
        return f"{copy[4][0]}to{copy[5][0]}", _memory(copy[4]), _memory(copy[5])
    return (copy[1] if copy[1] in _COPY_KINDS else "unknown"), _memory(copy[2]), _memory(copy[3])


def _memory(words: str | None) -> str:
    # "Managed Static" and "Device Static" are still managed and device; ROCm's "Host" says not whether pinned.
    first = (words or "").lower().split(" ")[0]
    return first if first in ("pageable", "pinned", "device", "array", "managed") else "unknown"


def ints(values: Sequence[Any]) -> Ints:
    """Whole numbers from what JSON held: numbers, digits in quotes, ``"stream 7"``; anything else is 0."""
    try:
        plain = np.array([0 if v is None else v for v in values], np.int64)
    except (ValueError, TypeError, OverflowError):
        plain = np.empty((0, 0), np.int64)
    return plain if plain.ndim == 1 else np.array([_int(v) for v in values], np.int64)


def _int(value: Any) -> int:
    if isinstance(value, str):
        found = re.fullmatch(r"(?:stream )?\s*(-?\d{1,20})", value.strip())
        value = int(found[1]) if found else 0
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        return 0
    # Unsigned 64-bit ids keep their bits.
    return (number + 2**63) % 2**64 - 2**63 if abs(number) < 2**64 else 0


def threads(values: Sequence[Any]) -> Ints:
    """Thread numbers; each name that is no number becomes a negative number of its own."""
    named = sorted({v for v in values if isinstance(v, str) and not v.strip().isdigit()})
    number = {name: -1 - i for i, name in enumerate(named)}
    return ints([number.get(v, v) if isinstance(v, str) else v for v in values])


def _int32(values: Ints) -> npt.NDArray[np.int32]:
    return np.clip(values, _INT32.min, _INT32.max).astype(np.int32)


def _triples(values: Sequence[Any]) -> Ints:
    """Grid or block sizes, n × 3; 0 where the file states none."""
    whole = [v if isinstance(v, list) and len(v) == 3 else (0, 0, 0) for v in values]
    return ints([x for v in whole for x in v]).reshape(-1, 3)


def _names(events: Sequence[Event]) -> pa.DictionaryArray:
    return pa.array([_text(e.name) for e in events], pa.string()).dictionary_encode()


def _relabelled(codes: pa.DictionaryArray, labels: Sequence[str]) -> pa.DictionaryArray:
    """The same rows under new labels, which may repeat."""
    distinct = list(dict.fromkeys(labels))
    place = np.array([distinct.index(label) for label in labels], np.int32)
    return pa.DictionaryArray.from_arrays(place[np.asarray(codes.indices)], pa.array(distinct, pa.string()))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _json(raw: Any) -> str:
    return bytes(raw).decode("utf-8", "replace")
