"""Why the GPU had nothing to do: idle time by interval union per device, each nanosecond in one class.

Idle is active time (``derived``) without any kernel, copy or memset. A gap is one stretch of it. The piece of
work that ends a gap, and the call that launched it, decide whose time it was; the classes add up to idle exactly:

* ``cupti_overhead``: CUPTI's own overhead records of that process overlap it (driver work that CUPTI only
  reports, such as module loading, does not count);
* ``device``, ``dependency``: the launching call had returned before the gap began, so the work was queued and
  the GPU itself was late: ``device`` behind work of the same stream or within one graph replay, ``dependency``
  behind work of another stream or a copy;
* otherwise the host was late. Up to the start of the launching call, by what the launching thread was in:
  ``sync`` (a call that waits for the GPU), ``memcpy`` (a call that enqueues a copy), ``launch`` (a call that
  launches, or the time between two enqueueing calls at most ``dispatch_limit_ns`` apart), ``host`` (anything
  else); from the start of the launching call on, ``launch``;
* ``unknown``: the launching call is not known.

launch-bound
------------
What it means: the GPU waits because work is launched one piece at a time, more slowly than it executes.

How it is found: the class ``launch`` is at least ``min_class_share`` of a device's wall.

What to do: capture the step in a CUDA graph, or launch fewer, larger kernels (``torch.compile``, fusion).

sync-bound
----------
What it means: the GPU runs dry while the host still waits for it to finish earlier work.

How it is found: the class ``sync`` is at least ``min_class_share`` of a device's wall.

What to do: remove waits from the loop: ``.item()``, ``.cpu()``, printing tensors, blocking copies.

host-bound
----------
What it means: the GPU waits for the program's own work between launches: Python, tokenising, scheduling.

How it is found: the class ``host`` is at least ``min_class_share`` of a device's wall. The part that follows a
wait for the GPU is given beside it: there the host could not run ahead.

What to do: move that work off the launching thread or behind the next launch (prepare step n+1 during n).

copy-bound
----------
What it means: the GPU waits while the host is busy enqueueing copies, often from pageable memory.

How it is found: the class ``memcpy`` is at least ``min_class_share`` of a device's wall.

What to do: use pinned memory and ``non_blocking=True``, and merge small copies.

dependency-stalls
-----------------
What it means: queued work waits for another stream or for a copy.

How it is found: the class ``dependency`` is at least ``min_class_share`` of a device's wall.

What to do: overlap copies with independent work, and record events no later than the work that is needed.

profiler-idle
-------------
What it means: idle time that recording itself may have caused; without it the device would idle less.

How it is found: the class ``cupti_overhead`` is at least ``min_class_share`` of a device's wall.

What to do: judge idle time without this class; record in windows (``--window``) to disturb less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from spikeprof.analyzers.base import Evidence, Figure, Finding, Info, Metric, Result, Rule, Saving
from spikeprof.analyzers.derived import (
    CALL_KINDS,
    EMPTY,
    DeviceTime,
    GpuWork,
    Integers,
    Ints,
    Lanes,
    Spans,
    bin_edges,
    call_kinds,
    complement,
    device_times,
    gpu_work,
    group_codes,
    ints,
    link,
    linked_share,
    overlap_with,
    parts,
    total,
    union,
)
from spikeprof.profiler.trace import Trace

Columns = dict[str, list[Any]]

#: Every class of idle time, in the order in which figures stack them.
CLASSES = ("launch", "sync", "memcpy", "host", "dependency", "device", "cupti_overhead", "unknown")

#: Kinds of CUPTI overhead records that tell of the driver's time, not of the profiler's.
DRIVER_KINDS = ("driver_compiler", "runtime_triggered_module_loading", "lazy_function_loading", "command_buffer_full")

_RULES = {
    "launch-bound": ("launch", "Capture the step in a CUDA graph, or launch fewer, larger kernels."),
    "sync-bound": ("sync", "Remove waits for the GPU from the loop (.item(), .cpu(), blocking copies)."),
    "host-bound": ("host", "Prepare the next step's host work while the GPU runs this one."),
    "copy-bound": ("memcpy", "Copy from pinned memory with non_blocking=True, and merge small copies."),
    "dependency-stalls": ("dependency", "Overlap copies and other streams with independent work."),
    "profiler-idle": ("cupti_overhead", "Judge idle time without this class, or record in windows (--window)."),
}


class _Gaps(NamedTuple):
    """The gaps of all devices, device by device, ascending: one element each."""

    start: Ints
    end: Ints
    device: Ints
    before: Ints  # in GpuWork: what ended last before the gap
    after: Ints  # in GpuWork: what ends the gap
    call_before: Ints  # in runtime_calls: what launched the former; -1 = unknown
    call: Ints  # in runtime_calls: what launched the latter; -1 = unknown


class _Pieces(NamedTuple):
    """Parts of gaps. ``gap`` is the index of the gap that each part is of."""

    start: Ints
    end: Ints
    gap: Ints


@dataclass(frozen=True)
class LaunchGaps:
    """Options: limits as shares (0 to 1) and ns, and sizes of the tables."""

    min_class_share: float = 0.10
    min_known_origin_share: float = 0.9
    dispatch_limit_ns: int = 50_000
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
            reason = trace.damaged.get("windows", "no GPU work lies in a recorded window")
            return Result(self.info.id, "not_applicable" if not trace.damaged else "not_measured", reason=reason)
        calls = link(trace, work)
        gaps = _gaps(work, devices, calls)
        known = linked_share(work, calls)
        why_not = self._why_not(trace, known)
        classes = {} if why_not else _classify(trace, work, gaps, self.dispatch_limit_ns)
        if "overheads" not in trace:
            classes.pop("cupti_overhead", None)
        spent = {name: _per_device(pieces, gaps, devices) for name, pieces in classes.items()}
        metrics = (
            *_totals(gaps, devices, known if "runtime_calls" in trace else None),
            *_class_metrics(trace, spent, why_not, wall, devices),
        )
        findings = tuple(f for rule in self.info.rules for f in self._find(rule, classes, spent, gaps, devices))
        tables = {
            "devices": _device_table(devices, gaps, spent),
            "longest": _longest(trace, work, gaps, classes, self.longest_count),
            "over_time": _over_time(classes, gaps, devices, self.bins_count),
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
        classes: dict[str, _Pieces],
        spent: dict[str, Ints],
        gaps: _Gaps,
        devices: list[DeviceTime],
    ) -> list[Finding]:
        """The device on which the class takes the largest share of the wall, where that is too much."""
        name, action = _RULES[rule.name]
        if name not in classes:
            return []
        shares = spent[name] / np.maximum([d.wall_ns for d in devices], 1)
        worst = int(np.argmax(shares))
        if shares[worst] < self.min_class_share:
            return []
        pieces = classes[name]
        of_gap = np.bincount(pieces.gap, pieces.end - pieces.start, minlength=len(gaps.start))
        of_gap = of_gap[(gaps.device == devices[worst].device) & (of_gap > 0)]
        evidence = (
            Evidence(f"idle_{name}_share", float(shares[worst]), self.min_class_share, "min_class_share"),
            Evidence(f"idle_{name}_ns", int(spent[name][worst])),
            Evidence("idle_share", devices[worst].idle_ns / devices[worst].wall_ns),
            Evidence("gaps_count", len(of_gap)),
            Evidence("median_part_of_gap_ns", float(np.median(of_gap))),
            Evidence("devices_count", int((shares >= self.min_class_share).sum())),
        )
        bound = Saving(total(union(pieces.start, pieces.end)), "total")
        return [Finding(rule.name, rule.severity, {"device": devices[worst].device}, evidence, action, bound)]


def _gaps(work: GpuWork, devices: list[DeviceTime], calls: Ints) -> _Gaps:
    columns: list[list[Ints]] = [[], [], [], [], []]
    for time in devices:
        mine = np.flatnonzero(work.device == time.device)
        reach = np.maximum.accumulate(work.end[mine])
        latest = np.maximum.accumulate(np.where(work.end[mine] == reach, np.arange(len(mine)), 0))
        place = np.searchsorted(work.start[mine], time.idle.ends, side="left")
        device = np.full(len(place), time.device)
        for column, values in zip(columns, (*time.idle, device, mine[latest[place - 1]], mine[place]), strict=True):
            column.append(values)
    start, end, device, before, after = (np.concatenate(column) for column in columns)
    return _Gaps(start, end, device, before, after, calls[before], calls[after])


def _cut(pieces: _Pieces, shift: Ints, spans: Spans) -> tuple[_Pieces, _Pieces]:
    """Pieces inside and outside of a set laid out in lanes; ``shift`` leads each gap to its lane."""
    move = shift[pieces.gap]

    def within(those: Spans) -> _Pieces:
        start, end, source = parts(pieces.start + move, pieces.end + move, those)
        return _Pieces(start - move[source], end - move[source], pieces.gap[source])

    return within(spans), within(complement(spans))


def _clip(pieces: _Pieces, low: Ints, high: Ints) -> _Pieces:
    """What of each piece lies in its gap's ``[low, high)``."""
    start, end = np.maximum(pieces.start, low[pieces.gap]), np.minimum(pieces.end, high[pieces.gap])
    kept = end > start
    return _Pieces(start[kept], end[kept], pieces.gap[kept])


def _of(pieces: _Pieces, chosen: Any) -> _Pieces:
    """The pieces of the chosen gaps (a bool per gap)."""
    kept = chosen[pieces.gap]
    return _Pieces(pieces.start[kept], pieces.end[kept], pieces.gap[kept])


def _classify(trace: Trace, work: GpuWork, gaps: _Gaps, limit_ns: int) -> dict[str, _Pieces]:
    """Cut every gap into pieces of one class each."""
    pieces = _Pieces(gaps.start, gaps.end, np.arange(len(gaps.start)))
    overhead, rest = _cut(pieces, *_overheads(trace, work.rank[gaps.after], gaps))
    known = gaps.call >= 0
    launch_start = np.append(trace.column("runtime_calls", "start_ns"), 0)[gaps.call]
    launch_end = np.append(trace.column("runtime_calls", "end_ns"), 0)[gaps.call]
    before, after = gaps.before, gaps.after
    same_stream = (
        (work.rank[before] == work.rank[after])
        & (work.context[before] == work.context[after])
        & (work.stream[before] == work.stream[after])
    )
    replay = known & (gaps.call == gaps.call_before) & (work.graph[after] != 0)
    queued = known & ((launch_end <= gaps.start) | replay)
    inline = replay | (same_stream & ~work.is_copy[before])
    late = known & ~queued
    middle = np.clip(launch_start, gaps.start, gaps.end)
    host = _clip(_of(rest, late), gaps.start, middle)
    waiting = _clip(_of(rest, late), middle, gaps.end)
    shift, sets = _host_calls(trace, gaps, limit_ns)
    sync, host = _cut(host, shift, sets["sync"])
    copy, host = _cut(host, shift, sets["copy"])
    dispatch, host = _cut(host, shift, sets["launch"])
    launch = _Pieces(*(np.concatenate(pair) for pair in zip(dispatch, waiting, strict=True)))
    found = (launch, sync, copy, host, _of(rest, queued & ~inline), _of(rest, queued & inline), overhead)
    return dict(zip(CLASSES, (*found, _of(rest, ~known)), strict=True))


def _overheads(trace: Trace, rank: Integers, gaps: _Gaps) -> tuple[Ints, Spans]:
    """CUPTI's own time, in one lane per rank: (shift per gap, set)."""
    if "overheads" not in trace:
        return np.zeros(len(rank), np.int64), EMPTY
    codes, labels = trace.codes("overheads", "kind")
    own = [i for i, label in enumerate(labels) if label.lower().replace(" ", "_") not in DRIVER_KINDS]
    rows = np.flatnonzero(np.isin(codes, own))
    start, end = trace.column("overheads", "start_ns")[rows], trace.column("overheads", "end_ns")[rows]
    groups, count = group_codes(np.concatenate([trace.column("overheads", "rank")[rows], rank]))
    lanes = Lanes.of(count, start, end, gaps.start, gaps.end)
    shift = lanes.shift(groups)
    return shift[len(rows) :], union(start + shift[: len(rows)], end + shift[: len(rows)])


def _host_calls(trace: Trace, gaps: _Gaps, limit_ns: int) -> tuple[Ints, dict[str, Spans]]:
    """What launching threads were in, in one lane per thread: (shift per gap, set per kind of call)."""
    start, end = trace.column("runtime_calls", "start_ns"), trace.column("runtime_calls", "end_ns")
    codes, labels = trace.codes("runtime_calls", "name")
    threads, count = group_codes(trace.column("runtime_calls", "rank"), trace.column("runtime_calls", "thread_id"))
    lanes = Lanes.of(count, start, end, gaps.start, gaps.end)
    kind = call_kinds(labels)[codes] if labels else ints([])
    rows = np.flatnonzero(kind)
    shift = lanes.shift(threads[rows])
    start, end, kind = start[rows] + shift, end[rows] + shift, kind[rows]
    order = np.argsort(start, kind="stable")
    start, end, kind = start[order], end[order], kind[order]
    sets = {name: union(start[kind == i], end[kind == i]) for i, name in enumerate(CALL_KINDS)}
    # Between two enqueueing calls in a row the thread was on its way to the next launch.
    reach = np.maximum.accumulate(end)
    enqueues = (kind == CALL_KINDS.index("launch")) | (kind == CALL_KINDS.index("copy"))
    chained = np.flatnonzero(enqueues[:-1] & enqueues[1:] & (start[1:] - reach[:-1] <= limit_ns))
    launches = sets["launch"]
    sets["launch"] = union(
        np.concatenate([launches.starts, reach[chained]]), np.concatenate([launches.ends, start[chained + 1]])
    )
    return np.append(lanes.shift(threads), 0)[gaps.call], sets


def _per_device(pieces: _Pieces, gaps: _Gaps, devices: list[DeviceTime]) -> Ints:
    """Length of the pieces on each device, in ns."""
    place = np.searchsorted([d.device for d in devices], gaps.device[pieces.gap])
    return ints(np.bincount(place, pieces.end - pieces.start, minlength=len(devices)))


def _totals(gaps: _Gaps, devices: list[DeviceTime], known: float | None) -> list[Metric]:
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


def _device_table(devices: list[DeviceTime], gaps: _Gaps, spent: dict[str, Ints]) -> Columns:
    return {
        "device": [d.device for d in devices],
        "wall_ns": [d.wall_ns for d in devices],
        "idle_ns": [d.idle_ns for d in devices],
        "idle_share": [d.idle_ns / d.wall_ns if d.wall_ns else None for d in devices],
        "gaps_count": [int((gaps.device == d.device).sum()) for d in devices],
        **{f"{name}_ns": spent[name].tolist() if name in spent else [None] * len(devices) for name in CLASSES},
    }


def _longest(trace: Trace, work: GpuWork, gaps: _Gaps, classes: dict[str, _Pieces], most: int) -> Columns:
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


def _over_time(classes: dict[str, _Pieces], gaps: _Gaps, devices: list[DeviceTime], bins: int) -> Columns:
    """Idle time per class and time bin over all devices; no value where nothing was measured."""
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
