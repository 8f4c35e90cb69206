"""The small tables of a spool: processes, devices, windows, steps, graph nodes; and who gets which number."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler import hardware, store
from spikeprof.profiler.assemble.columns import Records
from spikeprof.profiler.assemble.spool import ProcessSpool
from spikeprof.profiler.schema import TABLES

Rows = list[dict[str, Any]]


def number(processes: Sequence[ProcessSpool]) -> None:
    """Give every process its rank. A traced one keeps the launcher's RANK; the rest take the lowest free numbers.

    A RANK that several traced processes carry (workers of one rank inherit it) goes to the first of them.
    """
    traced = [p for p in processes if p.activated_ns or p.numerics.asked]
    others = [p for p in processes if not (p.activated_ns or p.numerics.asked)]
    owner: dict[int, ProcessSpool] = {}
    for process in traced:
        if process.env_rank is not None:
            owner.setdefault(process.env_rank, process)
    free = (n for n in itertools.count() if n not in owner)
    for process in (*traced, *others):
        rank = process.env_rank
        process.rank = rank if rank is not None and owner.get(rank) is process else next(free)


@dataclass
class Devices:
    """GPUs by uuid: one ordinal per physical GPU, whatever each process called it."""

    machine_ordinals: Mapping[str, int]
    rows: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)  # (rank, process device)
    _by_uuid: dict[str, int] = field(default_factory=dict)

    def add(self, rank: int, records: Records, names: Mapping[int, str]) -> None:
        """Device records of one process."""
        for record in records:  # a handful
            process_device = int(record["device"])
            identity = f"GPU-{uuid.UUID(bytes=record['uuid'].tobytes())}"
            name = names.get(int(record["name"]), "")
            product = hardware.lookup(name) if name else None
            peak = product.dram_bytes_per_s if product else None
            cupti_peak = float(record["mem_bandwidth_kb"]) * 1000
            self.rows[rank, process_device] = {
                "rank": rank,
                "device": self._ordinal(identity),
                "process_device": process_device,
                "uuid": identity,
                "name": name,
                "sm_arch": f"sm_{record['sm_major']}{record['sm_minor']}",
                "sm_count": int(record["sm_count"]),
                "l2_bytes": int(record["l2_bytes"]),
                "mem_bytes": int(record["mem_bytes"]),
                "mem_peak_bytes_per_s": peak.value if peak else cupti_peak or None,
                "peak_source": peak.source if peak else "memory clock × bus width, by CUPTI" if cupti_peak else "",
            }

    def ordinals(self, rank: int, process_devices: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Ordinals of a column of CUDA ordinals of one process; unknown ones keep their number."""
        out = process_devices.astype(np.int32)
        for number in np.unique(process_devices).tolist():
            row = self.rows.get((rank, number))
            if row is not None:
                out[process_devices == number] = row["device"]
        return out

    def _ordinal(self, identity: str) -> int:
        if identity not in self._by_uuid:
            known = self.machine_ordinals.get(identity)
            used = {*self._by_uuid.values()}
            reserved = {*used, *self.machine_ordinals.values()}
            free = next(n for n in itertools.count() if n not in reserved)
            self._by_uuid[identity] = known if known is not None and known not in used else free
        return self._by_uuid[identity]


def process_table(processes: Sequence[ProcessSpool]) -> pa.Table:
    """Every Python process that reported, traced or not."""
    rows = []
    for process in processes:
        status, reason = _status(process)
        rows.append(
            {
                "rank": process.rank,
                "pid": process.pid,
                "parent_pid": process.parent_pid,
                "command": " ".join(process.argv),
                "python_version": process.python,
                "libcupti_version": str(process.libcupti or ""),
                "status": status,
                "reason": reason,
            }
        )
    return TABLES["processes"].of_rows(sorted(rows, key=lambda row: row["rank"]))


def _status(process: ProcessSpool) -> tuple[str, str]:
    if process.faults:
        return ("partial" if process.records.exists() else "not_traced"), "; ".join(process.faults[:2])
    if not process.activated_ns:
        return "no_cuda", "it never used CUDA"
    stopped = next((why for _, state, why in process.windows if state == "stopped" and why != ENDED), "")
    if not process.finished and not stopped:
        return "partial", "it was killed or replaced: its last 0.2 s may be missing"
    return ("partial", stopped) if stopped else ("traced", "")


#: The reason that the agent gives for the last window of a life that ended well.
ENDED = "the program ended"


def write_tables(
    folder: Path,
    traced: Sequence[ProcessSpool],
    gpus: Devices,
    t0_unix_ns: int,
    last_ns: Mapping[int, int],
) -> None:
    """Write devices, windows, steps, ranges and graph nodes.

    ``last_ns`` is where each rank's last record ends, in trace time.
    """
    if gpus.rows or any(p.collected for p in traced):
        store.write_table(folder, "devices", TABLES["devices"].of_rows(list(gpus.rows.values())))
    windows, steps, ranges, nodes = [], [], [], []
    for process in traced:
        rank = process.rank
        windows += _windows(process, t0_unix_ns, last_ns.get(rank, 0))
        steps += [
            {"rank": rank, "kind": kind, "traced": traced, "start_ns": at - t0_unix_ns, "duration_ns": ns}
            for kind, traced, at, ns in process.steps
        ]
        ranges += [
            {
                "rank": rank,
                "thread_id": thread,
                "kind": kind,
                "name": name,
                "start_ns": begin - t0_unix_ns,
                "end_ns": end - t0_unix_ns,
                "attributes": attributes,
            }
            for kind, name, begin, end, thread, attributes in process.ranges
            if end >= begin
        ]
        nodes += [
            {"rank": rank, "graph_node_id": node, "source_node_id": source, "graph_id": graph, "t_ns": at - t0_unix_ns}
            for node, source, graph, at in process.nodes
        ]
    store.write_table(folder, "windows", TABLES["windows"].of_rows(sorted(windows, key=lambda row: row["start_ns"])))
    if any(p.steps for p in traced):
        store.write_table(folder, "steps", TABLES["steps"].of_rows(sorted(steps, key=lambda row: row["start_ns"])))
    if ranges:
        store.write_table(folder, "ranges", TABLES["ranges"].of_rows(sorted(ranges, key=lambda row: row["start_ns"])))
    if nodes:
        store.write_table(folder, "graph_nodes", TABLES["graph_nodes"].of_rows(_with_sources(nodes)))


def _with_sources(nodes: Rows) -> Rows:
    """Each node once: CUPTI tells of a clone twice, as created and then as cloned from another node."""
    cloned = {(row["rank"], row["graph_node_id"]) for row in nodes if row["source_node_id"]}
    return [row for row in nodes if row["source_node_id"] or (row["rank"], row["graph_node_id"]) not in cloned]


def _windows(process: ProcessSpool, t0_unix_ns: int, last_ns: int) -> Rows:
    """The process's windows as intervals; the last one lasts to its end, or to its last record."""
    end = process.last_ns - t0_unix_ns if process.finished else max(process.last_ns - t0_unix_ns, last_ns)
    starts = [at - t0_unix_ns for at, _, _ in process.windows]
    rows = []
    for (_, state, reason), begin, until in zip(process.windows, starts, [*starts[1:], end], strict=True):
        if until > begin and not (state == "stopped" and reason == ENDED):
            rows.append({"rank": process.rank, "state": state, "reason": reason, "start_ns": begin, "end_ns": until})
    return rows


def versions_of(traced: Sequence[ProcessSpool]) -> dict[str, str]:
    """Component -> version over all traced processes; several are joined."""
    found: dict[str, dict[str, None]] = {"libcupti": {}, "torch": {}, "python": {}}
    for process in traced:
        for component, version in (
            ("libcupti", process.libcupti),
            ("torch", process.torch),
            ("python", process.python),
        ):
            if version:
                found[component][str(version)] = None
    return {component: ", ".join(versions) for component, versions in found.items() if versions}


def notes_of(processes: Sequence[ProcessSpool]) -> list[str]:
    """What the agents noted, each sentence once, and what of their notes could not be read."""
    notes = list(dict.fromkeys(note for process in processes for note in process.notes))
    for process in processes:
        if process.windows and not process.clock_held:
            notes.append(f"the clock was set back while process {process.pid} was recorded: its times are uncertain")
        if process.ranges_dropped:
            notes.append(f"{process.ranges_dropped} marked ranges of process {process.pid} came too fast to be kept")
        if process.damaged_lines:
            notes.append(f"{process.damaged_lines} line(s) of the event file of process {process.pid} are damaged")
    return notes
