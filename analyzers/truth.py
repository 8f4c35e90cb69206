"""What this recording can be trusted for: the line that every report begins with.

records-dropped
---------------
What it means: records were lost before they reached the recording, so counts and busy time are too low.

How it is found: the sum of what each collector counted as dropped (CUPTI's own count, full queues) is above 0.

What to do: record less at a time (``--window``), or allow more memory and disk; then record again.

records-set-aside
-----------------
What it means: records arrived that cannot be true (an end before its start, a time outside of the run) and
were left out of all tables. The rest is sound, but the numbers miss these.

How it is found: the sum of what the assembler or importer set aside is above 0, but for work of the time in which
recording was to be off (windows, clean steps); the reasons are in the manifest. It is a note where all of them are
readings of a sampler (PM sampling, GPM, NVML, CPU counters), and ``max_set_aside_samples_share`` of its own at most.

What to do: read the reasons; when they are many, record again with another libcupti version.

origin-unknown
--------------
What it means: for part of the GPU time it is not known which call launched it, so nothing can be said about
why the GPU waited before it.

How it is found: the share of GPU time whose correlation id matches a recorded call, other than one that only waits,
is below the option ``min_known_origin_share``.

What to do: record the launch calls too (the default of ``spikeprof run``), from the start of the program.

tracing-cost-high
-----------------
What it means: steps took longer while they were recorded than while they were not, so times between kernels
are partly the profiler's own.

How it is found: median duration of recorded steps over that of unrecorded steps of the same kind, in the same
run, less 1, is above the option ``max_tracing_cost_share``. The first step after each change is not counted.

What to do: record in windows, so that the program runs undisturbed most of the time.

impossible-durations
--------------------
What it means: work of one CUDA stream runs in order, yet some kernels last beyond later kernels of their own stream.
Their recorded ends cannot be true, and busy time, shares and percentiles that hold them are too high.

How it is found: a kernel contains the two that follow it on its stream, and no graph and no common call launched them.

What to do: judge the run without those kernels, and report them to whoever made the recording.

nothing-recorded
----------------
What it means: a process was traced, yet no work of a GPU was seen in it. This is not an idle GPU.

How it is found: a process has the status traced or partial, and the tables of GPU work hold no rows.

What to do: check that the program uses the GPU at all, and what ``spikeprof doctor`` says about CUPTI.

process-not-traced
------------------
What it means: a process of the program that may use the GPU could not be recorded; its work is missing.

How it is found: a process has the status not_traced; its reason is in the table of processes.

What to do: act on the reason given, or start that process so that it can be traced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from spikeprof.analyzers.base import Evidence, Finding, Info, Metric, Result, Rule, Severity
from spikeprof.analyzers.derived import (
    Bools,
    GpuWork,
    device_times,
    gpu_work,
    group_codes,
    link,
    linked_share,
    total,
)
from spikeprof.analyzers.derived.recording import (
    Columns,
    collectors,
    libcupti_faults,
    partial_processes,
    set_aside,
    unmeasured_windows,
    why_refused,
    window_lengths,
)
from spikeprof.profiler.trace import Trace

_TRACED = ("traced", "partial")

#: Collectors of which each record is one reading of many.
_SAMPLERS = {"pm_sampling", "gpm", "nvml", "perf_events"}


@dataclass(frozen=True)
class Truth:
    """Options: limits as shares, 0 to 1, and the fewest steps a median may rest on."""

    min_known_origin_share: float = 0.95
    max_tracing_cost_share: float = 0.05
    max_set_aside_samples_share: float = 0.01
    min_steps_count: int = 5

    info: ClassVar[Info] = Info(
        id="truth",
        question="What can this recording be trusted for?",
        needs=(),
        wants=("kernels", "memory_ops", "runtime_calls", "windows", "steps", "processes"),
        rules=(
            Rule("records-dropped", "Records were lost while recording", "warning"),
            Rule("records-set-aside", "Records that cannot be true were left out", "warning"),
            Rule("origin-unknown", "The launching call of much GPU work is unknown", "warning"),
            Rule("tracing-cost-high", "Recording slowed the program down", "warning"),
            Rule("impossible-durations", "Kernels last beyond later work of their own stream", "warning"),
            Rule("nothing-recorded", "A traced process shows no GPU work", "critical"),
            Rule("process-not-traced", "A process could not be recorded", "warning"),
        ),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. Everything that could not be measured is a metric without value, with its reason."""
        work = gpu_work(trace)
        metrics = (
            *_step_metrics(trace, self.min_steps_count),
            *_origin_metrics(trace, work),
            *_work_metrics(trace, work),
            *_collector_metrics(trace),
            *_recorded_metrics(trace),
            *_process_metrics(trace),
        )
        values = {metric.name: metric.value for metric in metrics}
        processes = partial_processes(trace)
        findings = (
            *self._of_records(trace, values),
            *self._of_limits(values),
            *_of_durations(trace),
            *_of_processes(trace, values, processes),
        )
        tables = {
            "not_measured_windows": unmeasured_windows(trace),
            "processes": processes,
            "libcupti_faults": libcupti_faults(trace),
            "collectors": collectors(trace),
            "set_aside": set_aside(trace),
            "damaged_tables": {"table": list(trace.damaged), "reason": list(trace.damaged.values())},
        }
        return Result(self.info.id, "findings" if findings else "ok", metrics=metrics, findings=findings, tables=tables)

    def _of_records(self, trace: Trace, values: dict[str, Any]) -> list[Finding]:
        """Findings about records that are missing."""
        few = self._few_samples(trace)
        asked: tuple[tuple[str, str, Severity, tuple[Evidence, ...], str], ...] = (
            ("records-dropped", "dropped_count", "warning", (),
             "Record in shorter windows (--window) so that buffers keep up."),
            ("records-set-aside", "broken_records_count", "info" if few else "warning", few,
             "Read the reasons in the table of collectors; record again if many."),
        )  # fmt: skip
        records = Evidence("records_count", sum(note.records_count for note in trace.manifest.collectors.values()))
        return [
            Finding(rule, severity, {}, (Evidence(metric, values[metric], 0, "none expected"), records, *more), action)
            for rule, metric, severity, more, action in asked
            if values[metric]
        ]

    def _few_samples(self, trace: Trace) -> tuple[Evidence, ...]:
        """The largest share of a sampler's readings, if those are all and few: a record of work is one of its kind."""
        notes = {name: note for name, note in trace.manifest.collectors.items() if note.broken_count}
        share = max((note.broken_count / max(note.records_count, 1) for note in notes.values()), default=0.0)
        if not set(notes) <= _SAMPLERS or share > self.max_set_aside_samples_share:
            return ()
        limit = self.max_set_aside_samples_share
        return (Evidence("set_aside_samples_share", share, limit, "max_set_aside_samples_share"),)

    def _of_limits(self, values: dict[str, Any]) -> list[Finding]:
        """Findings about values beyond an option."""
        findings = []
        origin, cost = values["known_origin_share"], values["tracing_cost_share"]
        if origin is not None and origin < self.min_known_origin_share:
            known = Evidence("known_origin_share", origin, self.min_known_origin_share, "min_known_origin_share")
            action = "Record the launch calls from the start of the program (the default of `spikeprof run`)."
            findings.append(Finding("origin-unknown", "warning", {}, (known,), action))
        if cost is not None and cost > self.max_tracing_cost_share:
            evidence = (
                Evidence("tracing_cost_share", cost, self.max_tracing_cost_share, "max_tracing_cost_share"),
                Evidence("step_untraced_ns", values["step_untraced_ns"]),
                Evidence("step_traced_ns", values["step_traced_ns"]),
            )
            action = "Record in windows (--window ON,OFF) so that most steps run untraced."
            findings.append(Finding("tracing-cost-high", "warning", {}, evidence, action))
        return findings


def _of_durations(trace: Trace) -> list[Finding]:
    """Kernels that contain the next two of their own stream, though none of the three belongs to a graph."""
    if "kernels" not in trace:
        return []
    direct = np.flatnonzero(trace.column("kernels", "graph_node_id") == 0)
    columns = (trace.column("kernels", name)[direct] for name in ("rank", "device", "context_id", "stream"))
    streams, _ = group_codes(*columns)
    start = trace.column("kernels", "start_ns")[direct]
    order = np.lexsort((start, streams)) if np.any(np.diff(start) < 0) else np.argsort(streams, kind="stable")
    streams, start, rows = streams[order], start[order], direct[order]
    end, call = trace.column("kernels", "end_ns")[rows], trace.column("kernels", "correlation_id")[rows]
    first, second, third = slice(None, -2), slice(1, -1), slice(2, None)
    contains = (streams[first] == streams[third]) & (start[first] < start[second]) & (start[third] < end[third])
    contains &= (end[first] >= end[third]) & (end[first] >= end[second]) & (start[second] < end[second])
    contains &= (call[first] != call[second]) & (call[first] != call[third])  # old files name no graphs
    if not contains.any():
        return []
    length = end - start
    which = np.flatnonzero(contains)
    worst = rows[which[np.argmax(length[which])]]
    codes, names = trace.codes("kernels", "name")
    whole = int(np.maximum(trace.column("kernels", "end_ns") - trace.column("kernels", "start_ns"), 0).sum())
    evidence = (
        Evidence("impossible_durations_count", len(which), 0, "none expected"),
        Evidence("gpu_time_share", int(length[which].sum()) / whole),
        Evidence("longest_ns", int(length[which].max())),
    )
    where = {"kernel": names[codes[worst]], "device": int(trace.column("kernels", "device")[worst])}
    action = "Judge the run without these kernels: their recorded ends cannot be true."
    return [Finding("impossible-durations", "warning", where, evidence, action)]


def _step_metrics(trace: Trace, fewest: int) -> list[Metric]:
    """Median step time untraced and traced (ns), and what tracing adds as a share."""
    names = ("step_untraced_ns", "step_traced_ns", "tracing_cost_share")
    if "steps" not in trace:
        reason = why_refused(trace, "kernels") or (
            "no step was timed without tracing; `spikeprof run --clean-steps 20` does that"
        )
        return [Metric(name, None, trace.damaged.get("steps", reason)) for name in names]
    traced = np.asarray(trace.column("steps", "traced"), bool)
    duration = trace.column("steps", "duration_ns")
    codes, _ = trace.codes("steps", "kind")
    settled = _settled(trace, codes, traced)
    counts = [
        [int((settled & (codes == kind) & (traced == state)).sum()) for state in (False, True)]
        for kind in np.unique(codes)
    ]
    # One kind only: steps of different kinds are different work. The one with the most of both.
    best = max(range(len(counts)), key=lambda i: min(counts[i]), default=None)
    untraced_count, traced_count = (0, 0) if best is None else counts[best]
    if best is not None:
        settled &= codes == np.unique(codes)[best]
    medians: list[float | None] = []
    for state, count in ((~traced, untraced_count), (traced, traced_count)):
        medians.append(float(np.median(duration[settled & state])) if count >= fewest else None)
    why = f"{untraced_count} untraced and {traced_count} traced steps of one kind, {fewest} of each are needed"
    cost = medians[1] / medians[0] - 1 if medians[0] and medians[1] else None
    return [
        Metric(name, value, "" if value is not None else why)
        for name, value in zip(names, (*medians, cost), strict=True)
    ]


def _settled(trace: Trace, kind: Any, traced: Bools) -> Bools:
    """Which steps are not the first of their process and kind since tracing was switched on or off."""
    groups, _ = group_codes(trace.column("steps", "rank"), kind)
    order = np.lexsort((trace.column("steps", "start_ns"), groups))
    same = (groups[order][1:] == groups[order][:-1]) & (traced[order][1:] == traced[order][:-1])
    settled = np.zeros(len(groups), bool)
    settled[order[1:]] = same
    return settled


def _why_absent(trace: Trace, table: str, otherwise: str) -> str:
    return trace.damaged.get(table) or why_refused(trace, table) or otherwise


def _origin_metrics(trace: Trace, work: GpuWork) -> list[Metric]:
    for table, what in (("runtime_calls", "no launch calls were recorded"), ("kernels", "kernels were not recorded")):
        if table not in trace:  # without kernels it would be the share of the copies' time, and read as good news
            return [Metric("known_origin_share", None, _why_absent(trace, table, what))]
    share = linked_share(work, link(trace, work))
    return [Metric("known_origin_share", share, "" if share is not None else "no GPU work was recorded")]


def _work_metrics(trace: Trace, work: GpuWork) -> list[Metric]:
    """How many kernels, and the time in which devices worked: a union per device, added over devices."""
    missing = "kernels" not in trace
    reason = _why_absent(trace, "kernels", "kernels were not recorded") if missing else ""
    busy = sum(total(t.busy) for t in device_times(trace, work))
    return [
        Metric("kernels_count", None if missing else trace.table("kernels").num_rows, reason),
        Metric("gpu_time_ns", None if missing else busy, reason),
    ]


def _collector_metrics(trace: Trace) -> list[Metric]:
    notes = trace.manifest.collectors.values()
    return [
        Metric("dropped_count", sum(n.dropped_count for n in notes)),
        Metric("repaired_count", sum(n.repaired_count for n in notes)),
        Metric("set_aside_count", sum(n.set_aside_count for n in notes)),
        Metric("broken_records_count", sum(n.broken_count for n in notes)),
    ]


def _recorded_metrics(trace: Trace) -> list[Metric]:
    """The share of the processes' traced life in which they were being recorded."""
    if "windows" not in trace:
        reason = _why_absent(trace, "windows", "the source of this trace does not say when it recorded")
        return [Metric("recorded_share", None, reason)]
    codes, labels = trace.codes("windows", "state")
    length = window_lengths(trace)
    whole = int(length.sum())
    on = int(length[np.isin(codes, [i for i, s in enumerate(labels) if s == "traced"])].sum())
    return [Metric("recorded_share", on / whole if whole else None, "" if whole else "no process used the GPU")]


def _process_metrics(trace: Trace) -> list[Metric]:
    """How many processes there were, and how many of those that may use the GPU were not recorded."""
    if "processes" not in trace:
        reason = trace.damaged.get("processes", "the source of this trace does not list processes")
        return [Metric(name, None, reason) for name in ("processes_count", "processes_not_traced_count")]
    status = trace.table("processes").column("status").to_pylist()
    return [
        Metric("processes_count", len(status)),
        Metric("processes_not_traced_count", sum(s == "not_traced" for s in status)),
    ]


def _of_processes(trace: Trace, values: dict[str, Any], processes: Columns) -> list[Finding]:
    findings = []
    lost = [i for i, status in enumerate(processes["status"]) if status == "not_traced"]
    if lost:
        first = {"pid": processes["pid"][lost[0]], "command": processes["command"][lost[0]]}
        evidence = Evidence("processes_count", len(lost), 0, "none expected")
        action = (
            f"Act on the reason: {processes['reason'][lost[0]]}"
            if processes["reason"][lost[0]]
            else "Run `spikeprof doctor`."
        )
        findings.append(Finding("process-not-traced", "warning", first, (evidence,), action))
    if "processes" in trace and "kernels" in trace and "memory_ops" in trace:
        traced = sum(status in _TRACED for status in trace.table("processes").column("status").to_pylist())
        if traced and not trace.table("kernels").num_rows and not trace.table("memory_ops").num_rows:
            evidence = Evidence("kernels_count", 0, 1, "a traced process uses the GPU")
            action = "Check that the program reaches GPU work, then run `spikeprof doctor`."
            findings.append(Finding("nothing-recorded", "critical", {"processes": traced}, (evidence,), action))
    return findings
