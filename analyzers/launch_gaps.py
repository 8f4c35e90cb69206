"""Why the GPU had nothing to do: idle time by interval union per device, each nanosecond in one class.

Idle is active time without any kernel, copy or memset; a gap is one stretch of it. Each nanosecond of each gap has
exactly one class, after the work that ends the gap and the call that launched that work: ``launch``, ``sync``,
``memcpy``, ``loading``, ``host`` (the host was late), ``dependency``, ``device`` (work was queued), ``cupti_overhead``,
``unknown``.
Shares are of a device's wall: the time from its first to its last work in each recorded window.

launch-bound
------------
What it means: the GPU waits because work is launched one piece at a time, more slowly than it executes.

How it is found: the class ``launch`` (inside launch calls, between two of them at most ``dispatch_limit_ns`` apart,
and from the call to the start of its work) is at least ``min_class_share`` of a device's wall.

What to do: capture the step in a CUDA graph, or launch fewer, larger kernels (``torch.compile``, fusion).

sync-bound
----------
What it means: the GPU runs dry while the host still waits for it to finish earlier work.

How it is found: the class ``sync`` (the launching thread was in a call that waits) is at least ``min_class_share`` of
a device's wall.

What to do: remove waits from the loop: ``.item()``, ``.cpu()``, printing tensors, blocking copies.

host-bound
----------
What it means: the GPU waits for the program's own work between launches: Python, tokenising, scheduling.

How it is found: the class ``host`` (the launching thread was in no recorded call) is at least ``min_class_share`` of
a device's wall. The part that follows a wait for the GPU is given beside it: there the host could not run ahead.

What to do: move that work off the launching thread or behind the next launch (prepare step n+1 during n).

code-loading
------------
What it means: the GPU waits while the driver loads or compiles code, which happens once per kernel and process.

How it is found: the class ``loading`` (CUPTI tells of it, or a launch call, not of a graph, lasts longer than
``slow_launch_ns``) is at least ``min_class_share`` of a device's wall.

What to do: run every shape once before measuring or serving; or load code at start-up (``CUDA_MODULE_LOADING=EAGER``).

copy-bound
----------
What it means: the GPU waits while the host is busy enqueueing copies, often from pageable memory.

How it is found: the class ``memcpy`` (the launching thread was in a call that copies) is at least
``min_class_share`` of a device's wall.

What to do: use pinned memory and ``non_blocking=True``, and merge small copies.

dependency-stalls
-----------------
What it means: queued work waits for another stream or for a copy.

How it is found: the class ``dependency`` (launched before the gap began; what ran last was a copy or on another
stream) is at least ``min_class_share`` of a device's wall.

What to do: overlap copies with independent work, and record events no later than the work that is needed.

profiler-idle
-------------
What it means: idle time that recording itself may have caused; without it the device would idle less.

How it is found: the class ``cupti_overhead`` (CUPTI reported work of its own in that process; an upper bound, other
threads may have gone on) is at least ``min_class_share`` of a device's wall.

What to do: judge idle time without this class; record in windows (``--window``) to disturb less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from spikeprof.analyzers.base import Evidence, Figure, Finding, Info, Metric, Result, Rule, Saving, Status
from spikeprof.analyzers.derived import (
    CLASSES,
    Bools,
    DeviceTime,
    Gaps,
    GpuWork,
    Ints,
    Pieces,
    bin_edges,
    classify,
    device_times,
    find_gaps,
    following,
    gpu_work,
    ints,
    link,
    linked_share,
    overlap_with,
    total,
    union,
    whole_gaps,
    work_column,
)
from spikeprof.profiler.trace import Trace

Columns = dict[str, list[Any]]

_RULES = {
    "launch-bound": ("launch", "Capture the step in a CUDA graph, or launch fewer, larger kernels."),
    "sync-bound": ("sync", "Remove waits for the GPU from the loop (.item(), .cpu(), blocking copies)."),
    "host-bound": ("host", "Prepare the next step's host work while the GPU runs this one."),
    "code-loading": ("loading", "Run every shape once before measuring or serving."),
    "copy-bound": ("memcpy", "Copy from pinned memory with non_blocking=True, and merge small copies."),
    "dependency-stalls": ("dependency", "Overlap copies and other streams with independent work."),
    "profiler-idle": ("cupti_overhead", "Judge idle time without this class, or record in windows (--window)."),
}


@dataclass(frozen=True)
class LaunchGaps:
    """Options: limits as shares (0 to 1) and ns, and sizes of the tables."""

    min_class_share: float = 0.10
    min_known_origin_share: float = 0.9
    dispatch_limit_ns: int = 50_000
    slow_launch_ns: int = 1_000_000
    longest_count: int = 20
    bins_count: int = 60

    info: ClassVar[Info] = Info(
        id="launch-gaps",
        question="Why does the GPU wait between pieces of work?",
        needs=("kernels", "memory_ops"),
        wants=("runtime_calls", "windows", "overheads"),
        rules=(
            Rule("launch-bound", "The GPU waits for launches", "warning"),
            Rule("sync-bound", "The GPU waits while the host waits for it", "warning"),
            Rule("host-bound", "The GPU waits for work on the host", "warning"),
            Rule("code-loading", "The GPU waits while code is loaded or compiled", "warning"),
            Rule("copy-bound", "The GPU waits while copies are enqueued", "warning"),
            Rule("dependency-stalls", "Queued work waits for another stream or a copy", "warning"),
            Rule("profiler-idle", "Part of the idle time may come from recording", "info"),
        ),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. With too few origins known only the total is given, status ``not_measured``."""
        work = gpu_work(trace)
        devices = device_times(trace, work)
        wall = sum(d.wall_ns for d in devices)
        if not wall:
            status: Status = "not_measured" if "windows" in trace.damaged else "not_applicable"
            reason = trace.damaged.get("windows", "no GPU work lies in a recorded window")
            return Result(self.info.id, status, reason=reason)
        calls = link(trace, work)
        gaps = find_gaps(work, devices, calls)
        known = linked_share(work, calls)
        why_not = self._why_not(trace, known)
        limits = (self.dispatch_limit_ns, self.slow_launch_ns)
        classes = {} if why_not else classify(trace, work, gaps, *limits)
        if "overheads" not in trace:
            classes.pop("cupti_overhead", None)
        spent = {name: _per_device(pieces, gaps, devices) for name, pieces in classes.items()}
        metrics = (
            *_totals(gaps, devices, known if "runtime_calls" in trace else None),
            *_class_metrics(trace, spent, why_not, wall, devices),
        )
        in_graph = work_column(trace, work, "graph_id", gaps.after) != 0
        findings = tuple(f for rule in self.info.rules for f in self._find(rule, classes, gaps, devices, in_graph))
        tables = {
            "devices": _device_table(devices, gaps, spent),
            "longest": _longest(trace, work, gaps, classes, self.longest_count),
            "over_time": _over_time(classes or {"idle": whole_gaps(gaps)}, gaps, devices, self.bins_count),
        }
        figures = (
            Figure("idle-over-time", "stack", "over_time", x="bin_start_ns", y="idle_share", series="class"),
            Figure("longest-gaps", "table", "longest", x="start_ns", y="duration_ns"),
        )
        return Result(
            self.info.id,
            "not_measured" if why_not else "findings" if findings else "ok",
            reason=f"{why_not}; the total is measured, its causes are not" if why_not else "",
            collect_with="spikeprof run -- CMD" if why_not else "",
            metrics=metrics,
            findings=findings,
            tables=tables,
            figures=figures,
        )

    def _why_not(self, trace: Trace, known: float | None) -> str:
        """Why idle time cannot be classed, or empty."""
        if "runtime_calls" not in trace:
            return trace.damaged.get("runtime_calls", "launch calls were not recorded")
        if known is None or known < self.min_known_origin_share:
            return (
                f"the launching call is known for a share of {known or 0:.2f} of the GPU time, "
                f"{self.min_known_origin_share:.2f} is needed"
            )
        return ""

    def _find(
        self,
        rule: Rule,
        classes: dict[str, Pieces],
        gaps: Gaps,
        devices: list[DeviceTime],
        in_graph: Bools,
    ) -> list[Finding]:
        """The device on which the class takes the largest share of the wall, where that is too much.

        ``in_graph``: per gap, whether a CUDA graph launched the work that ends it.
        """
        name, action = _RULES[rule.name]
        if name not in classes:
            return []
        pieces = classes[name]
        spent = _per_device(pieces, gaps, devices)
        shares = spent / np.maximum([d.wall_ns for d in devices], 1)
        worst = int(np.argmax(shares))
        if shares[worst] < self.min_class_share:
            return []
        of_gap = np.bincount(pieces.gap, pieces.end - pieces.start, minlength=len(gaps.start))
        of_gap = of_gap[(gaps.device == devices[worst].device) & (of_gap > 0)]
        evidence: tuple[Evidence, ...] = (
            Evidence(f"idle_{name}_share", float(shares[worst]), self.min_class_share, "min_class_share", "inferred"),
            Evidence(f"idle_{name}_ns", int(spent[worst]), basis="inferred"),
            Evidence("longest_part_of_gap_ns", int(of_gap.max())),
            Evidence("idle_share", devices[worst].idle_ns / devices[worst].wall_ns),
            Evidence("gaps_count", len(of_gap)),
            Evidence("median_part_of_gap_ns", float(np.median(of_gap))),
            Evidence("devices_count", int((shares >= self.min_class_share).sum())),
        )
        if name == "host":
            after_sync = following(pieces, classes["sync"])
            evidence += (Evidence("idle_host_after_sync_ns", int(_per_device(after_sync, gaps, devices)[worst])),)
        length = pieces.end - pieces.start
        if name == "launch" and 2 * int(length[in_graph[pieces.gap]].sum()) > int(length.sum()):
            action = "Launch fewer, larger graphs, and each before the one before it ends."
        if len(gaps.start) > 1 and 2 * of_gap.max() > spent[worst]:
            action = "One gap is most of it (start-up?): judge the rest alone, with --between BEGIN,END. " + action
        bound = Saving(total(union(pieces.start, pieces.end)), "total")  # devices idle at once count once
        return [Finding(rule.name, rule.severity, {"device": devices[worst].device}, evidence, action, bound)]


def _per_device(pieces: Pieces, gaps: Gaps, devices: list[DeviceTime]) -> Ints:
    """Length of the pieces on each device, in ns."""
    place = np.searchsorted([d.device for d in devices], gaps.device[pieces.gap])
    return ints(np.bincount(place, pieces.end - pieces.start, minlength=len(devices)))


def _totals(gaps: Gaps, devices: list[DeviceTime], known: float | None) -> list[Metric]:
    wall, idle = sum(d.wall_ns for d in devices), sum(d.idle_ns for d in devices)
    lengths = gaps.end - gaps.start
    return [
        Metric("wall_ns", wall),
        Metric("idle_ns", idle),
        Metric("idle_share", idle / wall),
        Metric("gaps_count", len(lengths)),
        Metric("median_gap_ns", float(np.median(lengths)) if len(lengths) else None, "" if len(lengths) else "no gap"),
        Metric("known_origin_share", known, "" if known is not None else "launch calls were not recorded"),
    ]


def _class_metrics(
    trace: Trace, spent: dict[str, Ints], why_not: str, wall: int, devices: list[DeviceTime]
) -> list[Metric]:
    """Idle time per class, and the idle share that would be left without CUPTI's own part."""
    metrics = []
    for name in CLASSES:
        value = int(spent[name].sum()) if name in spent else None
        reason = why_not or trace.damaged.get("overheads", "CUPTI's overhead records were not collected")
        metrics.append(Metric(f"idle_{name}_ns", value, "" if value is not None else reason))
    own = metrics[CLASSES.index("cupti_overhead")]
    left = None
    if own.value is not None and wall > own.value:
        left = (sum(d.idle_ns for d in devices) - own.value) / (wall - own.value)
    return [*metrics, Metric("idle_without_cupti_share", left, own.reason)]


def _device_table(devices: list[DeviceTime], gaps: Gaps, spent: dict[str, Ints]) -> Columns:
    return {
        "device": [d.device for d in devices],
        "wall_ns": [d.wall_ns for d in devices],
        "idle_ns": [d.idle_ns for d in devices],
        "idle_share": [d.idle_ns / d.wall_ns if d.wall_ns else None for d in devices],
        "gaps_count": [int((gaps.device == d.device).sum()) for d in devices],
        **{f"{name}_ns": spent[name].tolist() if name in spent else [None] * len(devices) for name in CLASSES},
    }


def _longest(trace: Trace, work: GpuWork, gaps: Gaps, classes: dict[str, Pieces], most: int) -> Columns:
    """The longest gaps, and for each the class that most of it belongs to."""
    top = np.argsort(gaps.start - gaps.end, kind="stable")[:most]
    shares = np.zeros((len(CLASSES), len(top)))
    for i, name in enumerate(CLASSES):
        if name in classes:
            pieces = classes[name]
            shares[i] = np.bincount(pieces.gap, pieces.end - pieces.start, minlength=len(gaps.start))[top]
    largest = [CLASSES[i] if classes else None for i in shares.argmax(axis=0).tolist()]
    call_codes, call_names = trace.codes("runtime_calls", "name") if "runtime_calls" in trace else (ints([]), [])
    names = {table: trace.codes(table, column) for table, column in (("kernels", "name"), ("memory_ops", "kind"))}

    def name_of(piece: int) -> str:
        codes, labels = names["memory_ops" if work.is_copy[piece] else "kernels"]
        return str(labels[codes[work.row[piece]]])

    return {
        "device": gaps.device[top].tolist(),
        "start_ns": gaps.start[top].tolist(),
        "duration_ns": (gaps.end - gaps.start)[top].tolist(),
        "class": largest,
        "work_before": [name_of(i) for i in gaps.before[top]],
        "work_after": [name_of(i) for i in gaps.after[top]],
        "call": [call_names[call_codes[i]] if i >= 0 else None for i in gaps.call[top]],
    }


def _over_time(classes: dict[str, Pieces], gaps: Gaps, devices: list[DeviceTime], bins: int) -> Columns:
    """Idle time per class (or as a whole, "idle") and time bin over all devices; no value where none was measured."""
    first = min(int(d.active.starts[0]) for d in devices if d.wall_ns)
    last = max(int(d.active.ends[-1]) for d in devices if d.wall_ns)
    edges = bin_edges(first, last, bins)
    low, high = edges[:-1], edges[1:]
    wall = sum((overlap_with(low, high, d.active) for d in devices), np.zeros(len(low), np.int64))
    columns: Columns = {"bin_start_ns": [], "class": [], "idle_ns": [], "idle_share": []}
    for name, pieces in classes.items():
        idle = np.zeros(len(low), np.int64)
        for d in devices:
            mine = gaps.device[pieces.gap] == d.device
            idle += overlap_with(low, high, union(pieces.start[mine], pieces.end[mine]))
        columns["bin_start_ns"] += low.tolist()
        columns["class"] += [name] * len(low)
        columns["idle_ns"] += [i if w else None for i, w in zip(idle.tolist(), wall.tolist(), strict=True)]
        columns["idle_share"] += [i / w if w else None for i, w in zip(idle.tolist(), wall.tolist(), strict=True)]
    return columns
