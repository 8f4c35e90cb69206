"""Idle time cut into classes of cause, each nanosecond in exactly one.

A gap is one stretch of idle time of one device. The piece of work that ends it, and the call that launched that
work, decide whose time it was:

* ``cupti_overhead``: CUPTI's own overhead records of that process overlap it;
* ``device``, ``dependency``: the launching call had returned before the gap began, so the work was queued and
  the GPU itself was late: ``device`` behind work of the same stream or within one graph replay, ``dependency``
  behind work of another stream or a copy;
* otherwise the host was late: ``loading`` where CUPTI tells of the driver loading or compiling code. Else, up to the
  start of the launching call, by what the launching thread was in: ``sync`` (a call that waits for the GPU),
  ``memcpy`` (a call that enqueues a copy), ``loading`` (a launch call, not of a graph, longer than ``slow_launch_ns``:
  nobody waits that long only to launch), ``launch`` (any other launch call, or the time between two enqueueing calls at
  most ``dispatch_limit_ns`` apart), ``host`` (anything else). From the start of the launching call on: ``memcpy`` when
  it copies, ``loading`` while it lasts when it is that slow, else ``launch``;
* ``unknown``: the launching call is not known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spikeprof.analyzers.derived.groups import group_codes
from spikeprof.analyzers.derived.intervals import (
    EMPTY,
    Bools,
    Integers,
    Ints,
    Lanes,
    Spans,
    complement,
    ints,
    parts,
    union,
)
from spikeprof.analyzers.derived.work import CALL_KINDS, DeviceTime, GpuWork, call_kinds, work_column
from spikeprof.profiler.trace import Trace

#: Every class of idle time, in the order in which figures stack them.
CLASSES = ("launch", "sync", "memcpy", "host", "loading", "dependency", "device", "cupti_overhead", "unknown")

#: Kinds of CUPTI overhead records that tell of the driver's time, not of the profiler's.
LOADING_KINDS = ("driver_compiler", "runtime_triggered_module_loading", "lazy_function_loading")
QUEUE_KINDS = ("command_buffer_full",)


class Gaps(NamedTuple):
    """The gaps of all devices, device by device, ascending: one element each."""

    start: Ints
    end: Ints
    device: Ints
    before: Ints  # in GpuWork: what ended last before the gap
    after: Ints  # in GpuWork: what ends the gap
    call_before: Ints  # in runtime_calls: what launched the former; -1 = unknown
    call: Ints  # in runtime_calls: what launched the latter; -1 = unknown


class Pieces(NamedTuple):
    """Parts of gaps. ``gap`` is the index of the gap that each part is of."""

    start: Ints
    end: Ints
    gap: Ints


def find_gaps(work: GpuWork, devices: list[DeviceTime], calls: Ints) -> Gaps:
    """Every stretch of idle time. ``calls`` is the launching call of each piece of work, from ``link``."""
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
    return Gaps(start, end, device, before, after, calls[before], calls[after])


def whole_gaps(gaps: Gaps) -> Pieces:
    """Every gap as one piece."""
    return Pieces(gaps.start, gaps.end, np.arange(len(gaps.start)))


def _cut(pieces: Pieces, shift: Ints, spans: Spans) -> tuple[Pieces, Pieces]:
    """Pieces inside and outside of a set laid out in lanes; ``shift`` leads each gap to its lane."""
    move = shift[pieces.gap]

    def within(those: Spans) -> Pieces:
        start, end, source = parts(pieces.start + move, pieces.end + move, those)
        return Pieces(start - move[source], end - move[source], pieces.gap[source])

    return within(spans), within(complement(spans))


def _clip(pieces: Pieces, low: Ints, high: Ints) -> Pieces:
    """What of each piece lies in its gap's ``[low, high)``."""
    start, end = np.maximum(pieces.start, low[pieces.gap]), np.minimum(pieces.end, high[pieces.gap])
    kept = end > start
    return Pieces(start[kept], end[kept], pieces.gap[kept])


def _of(pieces: Pieces, chosen: Bools) -> Pieces:
    """The pieces of the chosen gaps (a bool per gap)."""
    kept = chosen[pieces.gap]
    return Pieces(pieces.start[kept], pieces.end[kept], pieces.gap[kept])


def classify(trace: Trace, work: GpuWork, gaps: Gaps, dispatch_limit_ns: int, slow_launch_ns: int) -> dict[str, Pieces]:
    """Cut every gap into pieces of one class each: the pieces of each of ``CLASSES``. Needs ``runtime_calls``."""
    kinds = _kinds(trace)
    # First, while little else is held: this takes the most memory.
    thread, calls = _host_calls(trace, gaps, kinds, dispatch_limit_ns, slow_launch_ns)
    copies = np.isin(_of_calls(kinds, gaps), [CALL_KINDS.index("copy"), CALL_KINDS.index("sync")])
    rank, driver = _overheads(trace, work.rank[gaps.after], gaps)
    known = gaps.call >= 0
    launch_end = _of_calls(trace.column("runtime_calls", "end_ns"), gaps)
    replay = known & (gaps.call == gaps.call_before) & (work_column(trace, work, "graph_id", gaps.after) != 0)
    queued = known & ((launch_end <= gaps.start) | replay)
    inline = replay | (_same_stream(trace, work, gaps) & ~work.is_copy[gaps.before])

    found: dict[str, Pieces] = {}
    found["cupti_overhead"], rest = _cut(whole_gaps(gaps), rank, driver["own"])
    found["unknown"] = _of(rest, ~known)
    found["device"], found["dependency"] = _of(rest, queued & inline), _of(rest, queued & ~inline)
    loading, late = _cut(_of(rest, known & ~queued), rank, driver["loading"])
    middle = np.clip(_of_calls(trace.column("runtime_calls", "start_ns"), gaps), gaps.start, gaps.end)
    host, waiting = _clip(late, gaps.start, middle), _clip(late, middle, gaps.end)
    slow, launching = _cut(_of(waiting, ~copies), thread, calls["slow"])
    found["sync"], host = _cut(host, thread, calls["sync"])
    copying, host = _cut(host, thread, calls["copy"])
    slow_before, host = _cut(host, thread, calls["slow"])
    dispatch, found["host"] = _cut(host, thread, calls["launch"])
    found["memcpy"] = _join(copying, _of(waiting, copies))
    found["loading"] = _join(loading, slow, slow_before)
    found["launch"] = _join(dispatch, launching)
    return {name: found[name] for name in CLASSES}


def following(pieces: Pieces, others: Pieces) -> Pieces:
    """Those of the pieces whose gap also holds a piece of ``others``."""
    kept = np.isin(pieces.gap, others.gap)
    return Pieces(pieces.start[kept], pieces.end[kept], pieces.gap[kept])


def _join(*several: Pieces) -> Pieces:
    return Pieces(*(np.concatenate(column) for column in zip(*several, strict=True)))


def _same_stream(trace: Trace, work: GpuWork, gaps: Gaps) -> Bools:
    """Whether the work before and after each gap ran on the same stream of the same context."""
    same: Bools = work.rank[gaps.before] == work.rank[gaps.after]
    for column in ("context_id", "stream"):
        before, after = (work_column(trace, work, column, pieces) for pieces in (gaps.before, gaps.after))
        same &= before == after
    return same


def _of_calls(column: Ints, gaps: Gaps) -> Ints:
    """A column of ``runtime_calls`` for the call behind each gap; anything where that is unknown."""
    return np.append(column, 0)[gaps.call]


def _kinds(trace: Trace) -> Ints:
    """The kind of every call, as its place in ``CALL_KINDS``."""
    codes, labels = trace.codes("runtime_calls", "name")
    return call_kinds(labels)[codes] if labels else ints([])


def _overheads(trace: Trace, rank: Integers, gaps: Gaps) -> tuple[Ints, dict[str, Spans]]:
    """CUPTI's own time and the driver's loading, in one lane per rank: (shift per gap, sets)."""
    if "overheads" not in trace:
        return np.zeros(len(rank), np.int64), {"own": EMPTY, "loading": EMPTY}
    codes, labels = trace.codes("overheads", "kind")
    start, end = trace.column("overheads", "start_ns"), trace.column("overheads", "end_ns")
    groups, count = group_codes(np.concatenate([trace.column("overheads", "rank"), rank]))
    lanes = Lanes.of(count, start, end, gaps.start, gaps.end)
    shift = lanes.shift(groups)
    start, end = start + shift[: len(start)], end + shift[: len(end)]
    kinds = [label.lower().replace(" ", "_") for label in labels]
    loading = np.isin(codes, [i for i, kind in enumerate(kinds) if kind in LOADING_KINDS])
    own = np.isin(codes, [i for i, kind in enumerate(kinds) if kind not in LOADING_KINDS + QUEUE_KINDS])
    sets = {"own": union(start[own], end[own]), "loading": union(start[loading], end[loading])}
    return shift[len(start) :], sets


def _host_calls(
    trace: Trace, gaps: Gaps, kind: Ints, dispatch_limit_ns: int, slow_launch_ns: int
) -> tuple[Ints, dict[str, Spans]]:
    """What launching threads were in, in one lane per thread: (shift per gap, sets).

    The sets: ``sync``, ``copy``, ``slow`` (launch calls too long for launching) and ``launch`` (launch calls, and the
    time between enqueueing calls in a row).
    """
    start, end = trace.column("runtime_calls", "start_ns"), trace.column("runtime_calls", "end_ns")
    threads, count = group_codes(trace.column("runtime_calls", "rank"), trace.column("runtime_calls", "thread_id"))
    lanes = Lanes.of(count, start, end, gaps.start, gaps.end)
    rows = np.flatnonzero(kind)
    shift = lanes.shift(threads[rows])
    start, end, kind = start[rows] + shift, end[rows] + shift, kind[rows]
    order = np.argsort(start, kind="stable")
    start, end, kind, thread = start[order], end[order], kind[order], threads[rows][order]
    sets = {name: union(start[kind == i], end[kind == i]) for i, name in enumerate(CALL_KINDS)}
    # A whole graph is launched by one call, which takes its time for every node: long, but nothing is loaded.
    codes, labels = trace.codes("runtime_calls", "name")
    of_graph = np.array(["GraphLaunch" in label for label in labels], bool)[codes[rows][order]]
    slow = (kind == CALL_KINDS.index("launch")) & ~of_graph & (end - start > slow_launch_ns)
    sets["slow"] = union(start[slow], end[slow])
    # Between two enqueueing calls in a row the thread was on its way to the next launch.
    reach = np.maximum.accumulate(end)
    enqueues = np.isin(kind, [CALL_KINDS.index("launch"), CALL_KINDS.index("copy")])
    in_a_row = enqueues[:-1] & enqueues[1:] & (thread[:-1] == thread[1:])
    chained = np.flatnonzero(in_a_row & (start[1:] - reach[:-1] <= dispatch_limit_ns))
    launches = sets["launch"]
    sets["launch"] = union(
        np.concatenate([launches.starts, reach[chained]]), np.concatenate([launches.ends, start[chained + 1]])
    )
    return _of_calls(lanes.shift(threads), gaps), sets
