"""What was recorded and what was not: windows, processes, collectors, faults of the library, as small tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from spikeprof.analyzers.derived.groups import first_of_groups, group_codes
from spikeprof.analyzers.derived.intervals import Ints, ints
from spikeprof.analyzers.libcupti_faults import known_faults
from spikeprof.profiler.trace import Trace

Columns = dict[str, list[Any]]

#: The collector that makes each table, by its name in the manifest.
_COLLECTORS = {
    "kernels": "activity",
    "memory_ops": "activity",
    "runtime_calls": "activity",
    "windows": "activity",
    "counters": "pm_sampling",
    "kernel_classes": "pm_sampling",
    "samples": "nvml",
    "topology": "topology",
    "model_nodes": "model_graph",
    "tensor_stats": "numerics",
}


def why_refused(trace: Trace, table: str) -> str:
    """Why the collector of a table could not make it; empty where it could, or was not asked."""
    note = trace.manifest.collectors.get(_COLLECTORS.get(table, ""))
    return note.reason if note is not None and note.state == "refused" else ""


def window_lengths(trace: Trace) -> Ints:
    """In ns; one that ends before it starts covers nothing."""
    return ints(np.maximum(trace.column("windows", "end_ns") - trace.column("windows", "start_ns"), 0))


def unmeasured_windows(trace: Trace) -> Columns:
    """Windows that were not recorded, by state and reason; the longest total first."""
    columns = ("state", "reason", "total_ns", "windows_count")
    if "windows" not in trace:
        return {name: [] for name in columns}
    (states, state_names), (reasons, reason_names) = trace.codes("windows", "state"), trace.codes("windows", "reason")
    length = window_lengths(trace)
    groups, count = group_codes(states, reasons)
    totals = np.bincount(groups, length, minlength=count).tolist()
    counts = np.bincount(groups, minlength=count).tolist()
    rows = [
        (state_names[states[i]], reason_names[reasons[i]], int(totals[group]), counts[group])
        for group, i in enumerate(first_of_groups(groups, count).tolist())
        if state_names[states[i]] != "traced"
    ]
    rows.sort(key=lambda row: (-row[2], row))
    return {name: [row[i] for row in rows] for i, name in enumerate(columns)}


def partial_processes(trace: Trace) -> Columns:
    """The processes that were not, or not wholly, recorded."""
    names = ("rank", "pid", "command", "status", "reason")
    if "processes" not in trace:
        return {name: [] for name in names}
    rows = [r for r in trace.table("processes").select(names).to_pylist() if r["status"] != "traced"]
    return {name: [row[name] for row in rows] for name in names}


def libcupti_faults(trace: Trace) -> Columns:
    """Known faults of each libcupti version that recorded something here, as far as they can have struck."""
    versions = []
    if "processes" in trace:
        versions = [v for v in trace.table("processes").column("libcupti_version").to_pylist() if v]
    versions = versions or [v for v in [trace.manifest.versions.get("libcupti", "")] if v]
    paused = _was_paused(trace)
    rows = [
        (version, fault)
        for version in dict.fromkeys(versions)
        for fault in known_faults(version)
        if paused or not fault.after_pause
    ]
    return {
        "libcupti_version": [version for version, _ in rows],
        "what": [fault.what for _, fault in rows],
        "touches": [fault.touches for _, fault in rows],
        "fixed_in": [fault.fixed_in for _, fault in rows],
        "source": [fault.source for _, fault in rows],
    }


def _was_paused(trace: Trace) -> bool:
    """Whether recording was switched on more than once in a process; True where nobody wrote that down."""
    if "windows" not in trace:
        return True
    codes, labels = trace.codes("windows", "state")
    traced = np.array([label == "traced" for label in labels], bool)[codes]
    _, sessions = np.unique(trace.column("windows", "rank")[traced], return_counts=True)
    return bool((sessions > 1).any())


def collectors(trace: Trace) -> Columns:
    """What each collector did, as the manifest says."""
    notes = trace.manifest.collectors
    return {
        "collector": list(notes),
        "state": [n.state for n in notes.values()],
        "reason": [n.reason for n in notes.values()],
        "records_count": [n.records_count for n in notes.values()],
        "dropped_count": [n.dropped_count for n in notes.values()],
        "repaired_count": [n.repaired_count for n in notes.values()],
        "set_aside_count": [n.set_aside_count for n in notes.values()],
        "cost_ns": [n.cost_ns for n in notes.values()],
    }


def set_aside(trace: Trace) -> Columns:
    """Why records were set aside, and how many for each reason."""
    rows = [(c, r, n) for c, note in trace.manifest.collectors.items() for r, n in note.set_aside_reasons.items()]
    return {name: [row[i] for row in rows] for i, name in enumerate(("collector", "reason", "records_count"))}
