"""The steps of each process on each device: as the program marked them, else found in what its kernels repeat.

* **marked**: by the program (``step_marks.py``).
* **found**: the repeating unit of the kernel sequence (``step_period.py``), judged by its kernels (``step_kinds.py``).

A step begins with its first kernel and ends with its last one. The **confidence** (0 to 1) is the share of the
process's kernels on the device that the steps account for: those launched in a marked step; of found ones
those that the usual step has too, as a multiset of names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from spikeprof.analyzers.derived.counters import Floats
from spikeprof.analyzers.derived.groups import first_of_groups, group_codes
from spikeprof.analyzers.derived.intervals import Bools, Ints, ints
from spikeprof.analyzers.derived.step_kinds import (
    PREFILL,
    alike,
    is_layer,
    kinds,
    larger_share,
    makeup,
)
from spikeprof.analyzers.derived.step_marks import Marked, marked_steps
from spikeprof.analyzers.derived.step_period import Limits, Sequence, Units, find_units
from spikeprof.analyzers.derived.work import measured_spans
from spikeprof.profiler.trace import Trace


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What makes a found unit a step, and a step a long one. Shares from 0 to 1."""

    period: Limits = field(default_factory=Limits)
    min_match_share: float = 0.5  # of a unit's kernels with those of the usual one
    min_median_match_share: float = 0.75  # the same, by half of all units
    min_explained_share: float = 0.5  # of all kernels, else no step is said to be found
    min_whole_share: float = 0.9  # of the usual number of kernels, for units next to a pause
    large_ratio: float = 8.0  # blocks per launch over the usual ones
    min_larger_share: float = 0.3  # of a step's kernels
    lanes_count: int = 3  # streams in which a period is looked for


@dataclass(frozen=True, slots=True)
class DeviceSteps:
    """The steps of one process on one device, ascending by begin; arrays have one element per step.

    ``source`` is ``marked``, ``found`` or empty: no steps, and ``reason`` says why.
    """

    rank: int
    device: int
    source: str
    reason: str
    confidence: float | None
    begin_ns: Ints
    end_ns: Ints
    kernels: Ints
    kind: tuple[str, ...]
    match: Floats  # the share of its kernels that the usual step has too; 1 for marked ones
    follows: Bools  # whether it follows the one before it, with no other work of its stream and no pause between
    kernels_total: int = 0  # of the process on the device, in steps or not


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels of one process on one device, ascending by start."""

    row: Ints
    start: Ints
    end: Ints
    name: Ints
    lane: Ints  # context and stream, numbered
    window: Ints


def find_steps(trace: Trace, limits: StepLimits | None = None) -> list[DeviceSteps]:
    """One entry per process and device with kernels: marked steps where there are any with kernels, else found ones.

    Needs ``kernels``; wants ``ranges``, ``runtime_calls``, ``windows``.
    """
    limits = limits or StepLimits()
    start, end = trace.column("kernels", "start_ns"), trace.column("kernels", "end_ns")
    rows = np.flatnonzero(end >= start)  # those of 0 ns count: sources that round hold some
    if not len(rows):
        return []
    rows = rows[np.argsort(start[rows], kind="stable")]
    rank, device = trace.column("kernels", "rank")[rows], trace.column("kernels", "device")[rows]
    group, count = group_codes(rank, device)
    marked = marked_steps(trace, rows)
    names, labels = trace.codes("kernels", "name")
    found = []
    for number, first in enumerate(first_of_groups(group, count).tolist()):
        of = rows if count == 1 else rows[group == number]
        mine = int(rank[first]), int(device[first])
        steps = _from_marks(trace, of, marked, mine) if marked else None
        steps = steps or _from_period(trace, of, ints(names), labels, mine, limits)
        found.append(replace(steps, kernels_total=len(of)))
    return sorted(found, key=lambda steps: (steps.rank, steps.device))


def _none(mine: tuple[int, int], reason: str) -> DeviceSteps:
    nothing = ints([])
    return DeviceSteps(*mine, "", reason, None, nothing, nothing, nothing, (), np.zeros(0), np.zeros(0, bool))


def _windows(trace: Trace, rank: int, times: Ints) -> Ints:
    """The number of the stretch of recording in which each time lies."""
    return ints(np.searchsorted(measured_spans(trace, [rank]).starts, times, side="right"))


# ---------------------------------------------------------------- marked by the program


def _from_marks(trace: Trace, rows: Ints, marked: Marked, mine: tuple[int, int]) -> DeviceSteps | None:
    """The marked steps that have kernels here; None when there are none."""
    of_kernel = marked.of_kernel[rows]
    inside = np.flatnonzero(of_kernel >= 0)
    if not len(inside):
        return None
    start, end = trace.column("kernels", "start_ns")[rows], trace.column("kernels", "end_ns")[rows]
    order = inside[np.argsort(of_kernel[inside], kind="stable")]
    of_kernel = of_kernel[order]
    first = np.flatnonzero(np.append(True, of_kernel[1:] != of_kernel[:-1]))
    begin, stop = np.minimum.reduceat(start[order], first), np.maximum.reduceat(end[order], first)
    number, count = of_kernel[first], np.diff(np.append(first, len(order)))
    by_time = np.argsort(begin, kind="stable")
    begin, stop, number, count = begin[by_time], stop[by_time], number[by_time], count[by_time]
    window = _windows(trace, mine[0], begin)
    return DeviceSteps(
        *mine,
        "marked",
        "",
        len(inside) / len(rows),
        begin,
        stop,
        ints(count),
        tuple(marked.kind[i] for i in number.tolist()),
        np.ones(len(begin)),
        np.append(False, (window[1:] == window[:-1]) & (number[1:] == number[:-1] + 1)),
    )


# ---------------------------------------------------------------- found by their period


def _from_period(
    trace: Trace, rows: Ints, names: Ints, labels: list[str], mine: tuple[int, int], limits: StepLimits
) -> DeviceSteps:
    """The steps of the stream, and by the way of comparing kernels, that account for most kernels."""
    start, end = trace.column("kernels", "start_ns")[rows], trace.column("kernels", "end_ns")[rows]
    lane, lanes = group_codes(trace.column("kernels", "context_id")[rows], trace.column("kernels", "stream")[rows])
    of = _Kernels(rows, start, end, names[rows], lane, _windows(trace, mine[0], start))
    held = np.bincount(lane, minlength=lanes)
    best, reasons = _none(mine, ""), []
    for chosen in np.argsort(-held, kind="stable")[: limits.lanes_count].tolist():
        if held[chosen] < limits.min_explained_share / 4 * len(rows):
            break
        for sequence in _sequences(trace, of, chosen):
            steps = _tried(trace, of, chosen, sequence, labels, best, limits)
            if not steps.source:
                reasons.append(steps.reason)
            gain = (steps.confidence or 0.0) - (best.confidence or 0.0)
            shorter = 2 * len(steps.begin_ns) >= 3 * len(best.begin_ns) > 0
            if gain > 0.02 or (gain > -0.02 and shorter):
                best = steps
        if (best.confidence or 0.0) >= 0.9:
            return best
    if not best.begin_ns.size:
        return replace(best, reason=reasons[0] if reasons else "there are too many streams with too few kernels each")
    if (best.confidence or 0.0) < limits.min_explained_share:
        return _none(mine, f"the best period accounts for {best.confidence:.0%} of the kernels only")
    return best


def _tried(
    trace: Trace, of: _Kernels, lane: int, sequence: Sequence, labels: list[str], best: DeviceSteps, limits: StepLimits
) -> DeviceSteps:
    """The steps by the likeliest period of the sequence whose units are alike; ``best`` where none can be better."""
    tries = find_units(sequence, limits.period)
    if isinstance(tries, str):
        return _none((best.rank, best.device), tries)
    reason = ""
    for find in tries:
        units = find()
        if (best.confidence or 0.0) >= 0.9 and 2 * len(units.first) < 3 * len(best.begin_ns):
            return best  # it would have to find shorter steps
        steps = _judged(trace, of, lane, sequence, units, labels, (best.rank, best.device), limits)
        if steps.source:
            return steps
        reason = reason or steps.reason
    return _none((best.rank, best.device), reason)


def _sequences(trace: Trace, of: _Kernels, lane: int) -> Iterator[Sequence]:
    """The stream's sequence by kernel names; with all graphs taken for one; by names, grids and blocks."""
    graph = trace.column("kernels", "graph_id")[of.row]
    correlation = trace.column("kernels", "correlation_id")[of.row]
    replayed = np.flatnonzero((graph != 0) & (correlation != 0))
    direct = np.flatnonzero((of.lane == lane) & ((graph == 0) | (correlation == 0)))
    place, weight, end = direct, np.ones(len(direct), np.int64), of.end[direct]
    graphs = ints([])
    if len(replayed):
        replay, count = group_codes(graph[replayed], correlation[replayed])
        first = first_of_groups(replay, count)
        order = np.argsort(replay, kind="stable")
        weights = np.bincount(replay, minlength=count)
        ends = np.maximum.reduceat(of.end[replayed][order], np.cumsum(weights) - weights)
        here = of.lane[replayed[first]] == lane
        graphs = ints(graph[replayed[first]][here])
        place = np.concatenate([direct, replayed[first][here]])
        weight, end = np.concatenate([weight, weights[here]]), np.concatenate([end, ends[here]])
    order = np.argsort(place, kind="stable")
    place, weight, end = place[order], ints(weight[order]), ints(end[order])
    graph_codes, kinds_count = group_codes(graphs) if len(graphs) else (graphs, 0)

    def sequence(codes: Ints, of_graphs: Ints) -> Sequence:
        code, _ = group_codes(np.concatenate([codes[direct], int(codes.max()) + 1 + of_graphs])[order])
        return Sequence(code, of.start[place], end, weight, of.window[place])

    yield sequence(of.name, graph_codes)
    if kinds_count > 1:
        yield sequence(of.name, np.zeros(len(graphs), np.int64))
    shape = (trace.column("kernels", f"{what}_{axis}")[of.row] for what in ("grid", "block") for axis in "xyz")
    yield sequence(group_codes(of.name, *shape)[0], graph_codes)


def _judged(
    trace: Trace,
    of: _Kernels,
    lane: int,
    sequence: Sequence,
    units: Units,
    labels: list[str],
    mine: tuple[int, int],
    limits: StepLimits,
) -> DeviceSteps:
    """Those of the units that are like the usual one, and what else is a step between them."""
    begin = sequence.start[units.first]
    reach = np.maximum.accumulate(sequence.end)[units.stop - 1]
    joined = np.append(units.stop[:-1] == units.first[1:], False) & ~units.last
    until = np.where(joined, np.append(begin[1:], 0), np.maximum(reach, begin + 1))
    blocks = np.prod([trace.column("kernels", f"grid_{a}")[of.row].astype(np.int64) for a in "xyz"], axis=0)
    step, inside = _assigned(of.start, begin, until)
    made = makeup(step[inside], of.name[inside], blocks[inside], len(labels))
    usual = made.usual(made.count.astype(np.float64), len(begin), len(labels))
    usual_blocks = made.usual(made.blocks, len(begin), len(labels))
    whole = float(usual.sum())
    same, count = alike(made, usual, len(begin)), np.bincount(step[inside], minlength=len(begin))
    match = same / np.maximum(np.maximum(count, whole), 1)
    kept = match >= limits.min_match_share
    weight = np.append(0, np.cumsum(sequence.weight))
    weight = weight[units.stop] - weight[units.first]  # of its stream alone: what runs beside it varies
    kept &= ~units.at_edge | (weight >= limits.min_whole_share * np.median(weight))
    if kept.sum() < limits.period.min_repeats_count or np.median(match[kept]) < limits.min_median_match_share:
        return _none(mine, "what lies between kernels that recur evenly is not alike")
    if is_layer(made, labels, len(begin)):
        return _none(mine, "what repeats holds attention once: a layer, it seems, and no step recurs often enough")
    begin, until = begin[kept], until[kept]
    extra = _between(of, lane, begin, until, usual, limits)
    regular = np.concatenate([np.ones(len(begin), bool), extra[2]])
    begin, until = np.concatenate([begin, extra[0]]), np.concatenate([until, extra[1]])
    order = np.argsort(begin, kind="stable")
    begin, until, regular = begin[order], until[order], regular[order]
    for _ in range(2):  # the second time without what turned out to be no step
        step, inside = _assigned(of.start, begin, until)
        made = makeup(step[inside], of.name[inside], blocks[inside], len(labels))
        larger = larger_share(made, usual_blocks, len(begin), limits.large_ratio)
        kind = kinds(made, labels, larger, len(begin), limits.min_larger_share)
        right = regular | (np.array(kind) == PREFILL)
        if right.all():
            break
        begin, until, regular = begin[right], until[right], regular[right]
    count = np.bincount(step[inside], minlength=len(begin))
    same = alike(made, usual, len(begin))
    first = np.searchsorted(step[inside], np.arange(len(begin)))
    end = np.maximum.reduceat(of.end[inside], first)
    end = np.minimum(end, np.append(begin[1:], end[-1]))
    outside = np.append(0, np.cumsum((of.lane == lane) & ~_mask(inside, len(of.row))))
    before = outside[np.searchsorted(of.start, begin)]
    window = _windows(trace, mine[0], begin)
    follows = np.append(False, (before[1:] == before[:-1]) & (window[1:] == window[:-1]))
    return DeviceSteps(
        *mine, "found", "", float(same.sum()) / len(of.row), begin, ints(end), ints(count), tuple(kind),
        same / np.maximum(count, whole), follows,
    )  # fmt: skip


def _mask(places: Ints, length: int) -> Bools:
    mask = np.zeros(length, bool)
    mask[places] = True
    return mask


def _assigned(start: Ints, begin: Ints, until: Ints) -> tuple[Ints, Ints]:
    """The step of each kernel by its start, ``begin`` ascending; and the places of those that lie in one."""
    step = np.searchsorted(begin, start, side="right") - 1
    return ints(step), np.flatnonzero((step >= 0) & (start < until[np.maximum(step, 0)]))


def _between(
    of: _Kernels, lane: int, begin: Ints, until: Ints, usual: Floats, limits: StepLimits
) -> tuple[Ints, Ints, Bools]:
    """Begin and end of runs between the steps that are made of the same kernels for a good part.

    And whether each is whole: a step whose first kernel was not recorded. The others may be a prefill.
    """
    step, inside = _assigned(of.start, begin, until)
    rest = np.flatnonzero(~_mask(inside, len(of.row)) & (of.lane == lane) & (usual[of.name] > 0))
    if not len(rest):
        return ints([]), ints([]), np.zeros(0, bool)
    run, count = group_codes(step[rest], of.window[rest])
    made = makeup(run, of.name[rest], np.ones(len(rest), np.int64), len(usual))
    same, whole = alike(made, usual, count), float(usual.sum())
    first = first_of_groups(run, count)
    last = len(run) - 1 - first_of_groups(run[::-1], count)
    number, least = np.bincount(run, minlength=count), limits.min_whole_share
    good = (same >= limits.min_match_share * whole) & (number <= 2 * whole)
    is_whole = ((same >= least * whole) & (least * number <= whole))[good]
    starts, ends = of.start[rest[first[good]]], of.end[rest[last[good]]]
    return starts, np.maximum(ends, starts + 1), is_whole
