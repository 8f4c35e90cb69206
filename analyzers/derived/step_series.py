"""Numbers of steps: the steps of all processes and devices as one series, and what is asked of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spikeprof.analyzers.derived.counters import Floats
from spikeprof.analyzers.derived.intervals import EMPTY, Bools, Ints, Spans, ints, overlap_with
from spikeprof.analyzers.derived.steps import DeviceSteps

OTHER = "other"  # kinds beyond the first
MOST_KINDS = 12


@dataclass(frozen=True, slots=True)
class StepSeries:
    """Arrays of one element per step, process by process and device by device, ascending by begin within each."""

    group: Ints  # number of the process and device
    rank: Ints
    device: Ints
    begin: Ints
    end: Ints
    kernels: Ints
    kind: Ints  # kinds[kind]
    kinds: list[str]
    busy: Ints | None  # ns with GPU work of any process; None = not known
    wait: Ints  # from the end of the step before; -1 where other work or a pause lies between
    steady: Bools

    @property
    def duration(self) -> Ints:
        """In ns."""
        return self.end - self.begin

    @property
    def steady_begin_ns(self) -> int:
        """When the steady part begins."""
        return int(self.begin[self.steady].min())

    def of_kind(self, name: str) -> Bools:
        """The steps of a kind."""
        return np.asarray(self.kind == self.kinds.index(name), np.bool_)

    def jitter(self, kind: int) -> float | None:
        """The mean difference of the durations of a step and of the next one, in ns, where both are of the kind."""
        both = (self.kind[1:] == kind) & (self.kind[:-1] == kind) & (self.wait[1:] >= 0)
        change = np.abs(np.diff(self.duration))[both]
        return float(change.mean()) if len(change) else None


def series_of(
    found: Sequence[DeviceSteps], busy: Mapping[int, Spans], busy_known: bool, start_up_ratio: float
) -> StepSeries:
    """The steps of all as one series. ``busy`` by device: the times with GPU work."""
    names = [name for steps in found for name in steps.kind]
    often = Counter(names)
    kinds = [name for name, _ in often.most_common(MOST_KINDS) if name != OTHER]
    if len(kinds) < len(often):
        kinds.append(OTHER)
    at = {name: i for i, name in enumerate(kinds)}
    kind = ints([at.get(name, len(kinds) - 1) for name in names])
    lengths = [len(steps.begin_ns) for steps in found]
    begin, end = (np.concatenate([getattr(s, name) for s in found]) for name in ("begin_ns", "end_ns"))
    group = np.repeat(np.arange(len(found)), lengths)
    device = np.repeat([steps.device for steps in found], lengths)
    covered = [overlap_with(s.begin_ns, s.end_ns, busy.get(s.device, EMPTY)) for s in found]
    follows = np.concatenate([steps.follows for steps in found])
    wait = np.where(follows, np.maximum(begin - np.append(0, end[:-1]), 0), -1)
    steady = [_steady(kind[group == i], end[group == i] - begin[group == i], start_up_ratio) for i in range(len(found))]
    return StepSeries(
        ints(group),
        ints(np.repeat([steps.rank for steps in found], lengths)),
        ints(device),
        ints(begin),
        ints(end),
        np.concatenate([steps.kernels for steps in found]),
        kind,
        kinds,
        np.concatenate(covered) if busy_known else None,
        ints(wait),
        np.concatenate(steady),
    )


def _steady(kind: Ints, length: Ints, ratio: float) -> Bools:
    """The steps from the first one on after which the kind that took most time is no longer slow three times in a row.

    Slow is longer than ``ratio`` times the median of the second half.
    """
    main = int(np.bincount(kind, length).argmax())
    mine = np.flatnonzero(kind == main)
    usual = float(np.median(length[mine[len(mine) // 2 :]]))
    slow = length[mine] > ratio * usual
    in_a_row = slow[:-2] & slow[1:-1] & slow[2:] if len(mine) > 2 else np.zeros(0, bool)
    half = len(mine) // 2  # what is slow later is no start-up
    last = np.flatnonzero(in_a_row[:half])
    first = int(last[-1]) + 3 if len(last) else 0
    while first < half and slow[first]:  # one or two slow ones at the very beginning, or behind those in a row
        first += 1
    return np.asarray(np.arange(len(kind)) >= mine[min(first, len(mine) - 1)], np.bool_)


def percentile(values: Ints, percent: int) -> int | None:
    """The nearest-rank percentile: the smallest value that ``percent`` % of the values do not exceed; None of none."""
    if not len(values):
        return None
    return int(np.sort(values)[(len(values) * percent + 99) // 100 - 1])


def around(values: Ints, count: int = 31) -> Floats:
    """The median of each value and those around it, ``count`` in all (odd); fewer values have one median."""
    if len(values) < count:
        return np.full(len(values), float(np.median(values)) if len(values) else 0.0)
    middle = np.median(np.lib.stride_tricks.sliding_window_view(values, count), axis=1)
    return np.asarray(np.pad(middle, count // 2, mode="edge"), np.float64)


def longest_run(of: StepSeries, name: str) -> Ints:
    """The longest run of steady steps of a kind on one device with none of another kind between."""
    chosen = of.of_kind(name) & of.steady
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.where(chosen, of.group + 1, 0), [0]])))
    starts, stops = edges[:-1], edges[1:]
    inside = chosen[starts] if len(starts) else np.zeros(0, bool)
    starts, stops = starts[inside], stops[inside]
    if not len(starts):
        return ints([])
    best = int(np.argmax(stops - starts))
    return np.arange(starts[best], stops[best])


def trend(values: Ints) -> tuple[float, float, float]:
    """The medians of the first and the last fifth, and the rank correlation (Spearman) of value and order."""
    fifth = max(len(values) // 5, 1)
    first, last = float(np.median(values[:fifth])), float(np.median(values[-fifth:]))
    _, group, count = np.unique(values, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count + 1) / 2)[group]  # equal values share their mean rank
    spread = float(rank.std())
    order = np.arange(len(values))
    if spread == 0 or len(values) < 2:
        return first, last, 0.0
    return first, last, float(((rank - rank.mean()) * (order - order.mean())).mean() / (spread * order.std()))


def durations(of: StepSeries, kinds: Sequence[str], most: int) -> dict[str, list[Any]]:
    """Per kind at most ``most`` points: steps in order of time, several in a row as their median and their longest."""
    table: dict[str, list[Any]] = {"kind": [], "start_ns": [], "duration_ns": [], "max_ns": [], "steps_count": []}
    for name in kinds:
        rows = np.flatnonzero(of.of_kind(name))
        rows = rows[np.argsort(of.begin[rows], kind="stable")]
        for part in np.array_split(rows, min(most, len(rows))):
            length = of.duration[part]
            table["kind"].append(name)
            table["start_ns"].append(int(of.begin[part[0]]))
            table["duration_ns"].append(percentile(length, 50))
            table["max_ns"].append(int(length.max()))
            table["steps_count"].append(len(part))
    return table
