"""The repeating unit of a kernel sequence: where it begins and ends each time.

The sequence is that of one stream: single kernels, and each replay of a CUDA graph as one element that weighs as many
kernels as it ran. A class of elements that recurs at even distances is a candidate for the beginning of the unit.
Classes of one distance make a *level*: a layer, a step, a round of steps. A higher level is the unit when what it adds
to the lower one is no trifle; so a step is not taken for its layers, nor a run of steps with a rare kernel for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from spikeprof.analyzers.derived.groups import encoded, group_percentile, sorted_in_groups
from spikeprof.analyzers.derived.intervals import Bools, Ints, ints


class Sequence(NamedTuple):
    """What one stream ran, ascending by start; one element per kernel or graph replay."""

    code: Ints  # numbers from 0: equal elements have equal ones
    start: Ints
    end: Ints
    weight: Ints  # kernels
    window: Ints  # which stretch of recording it lies in: nothing is said across two


@dataclass(frozen=True, slots=True)
class Limits:
    """When a class recurs evenly, and when a level adds enough to the one below to be the unit instead of it."""

    min_repeats_count: int = 4
    even_within_share: float = 0.10  # of the median distance
    min_even_share: float = 0.5  # of a class's distances
    short_count: int = 8  # kernels: over distances below it chance looks even, and more is asked for
    min_even_short_share: float = 0.8
    min_coverage_share: float = 0.5  # of the kernels, by even distances of one class
    level_apart_ratio: float = 1.15
    min_added_share: float = 0.05  # of the lower level's kernels, by two classes or more
    min_added_alone_share: float = 0.25  # the same by one class
    whole_ratio: float = 1.5  # a unit with more kernels than this times the usual is followed by something else
    coverage_apart_share: float = 0.3  # below the best class of the level, for one to be where units begin
    min_same_share: float = 0.6  # of units with the same kernel where they are to begin
    look_back_count: int = 512  # elements
    tries_count: int = 3  # levels


class Units(NamedTuple):
    """Where each unit lies in the sequence, as ``[first, stop)``."""

    first: Ints
    stop: Ints
    last: Bools  # the last one of its window
    at_edge: Bools  # that, or it begins with its window: it may not be whole


def find_units(of: Sequence, limits: Limits) -> list[Callable[[], Units]] | str:
    """The units of the sequence, to be worked out when called, or why there are none.

    The likeliest first; the others are longer ones, should it turn out that the likeliest are not alike.
    """
    total = int(of.weight.sum())
    found = _candidates(of, limits, total)
    if isinstance(found, str):
        return found
    classes, distance, coverage = found
    levels = [level for level in _unit_levels(of, classes, distance, limits) if distance[level].max() >= 2]
    if not levels:
        return "each kernel is like the one before it"

    def units(level: Ints) -> Units:
        best = level[coverage[level] >= coverage[level].max() - limits.coverage_apart_share]
        return _bounded(of, _beginnings(of, classes[best], limits), limits)

    return [partial(units, level) for level in levels[: limits.tries_count]]


def _candidates(of: Sequence, limits: Limits, total: int) -> tuple[Ints, Ints, np.ndarray] | str:
    """Classes that recur at even distances: their codes, median distances in kernels, and shares of all covered."""
    position = np.cumsum(of.weight) - of.weight
    order = np.argsort(of.code, kind="stable")
    code, window, place = of.code[order], of.window[order], position[order]
    pairs = np.flatnonzero((code[1:] == code[:-1]) & (window[1:] == window[:-1]))
    often = np.bincount(code[pairs], minlength=1) >= limits.min_repeats_count - 1
    pairs = pairs[often[code[pairs]]]
    if not len(pairs):
        return f"no kernel recurs {limits.min_repeats_count} times or more without a pause of the recording"
    distance = place[pairs + 1] - place[pairs]
    fresh = np.append(True, code[pairs[1:]] != code[pairs[:-1]])
    classes, group = code[pairs[fresh]], np.cumsum(fresh) - 1
    ordered, offsets = sorted_in_groups(group, distance, len(classes))
    median = group_percentile(ordered, offsets, 50)
    even = np.abs(distance - median[group]) <= limits.even_within_share * median[group]
    even_share = np.bincount(group, even, len(classes)) / np.diff(offsets)
    coverage = np.minimum((np.bincount(group, distance * even, len(classes)) + median) / total, 1)  # with the last one
    enough = np.where(median < limits.short_count, limits.min_even_short_share, limits.min_even_share)
    kept = (even_share >= enough) & (coverage >= limits.min_coverage_share)
    if not kept.any():
        most = float(coverage[even_share >= limits.min_even_share].max(initial=0.0))
        return f"no kernel recurs at even distances (the best one does over {most:.0%} of the kernels)"
    return ints(classes[kept]), median[kept], coverage[kept]


def _unit_levels(of: Sequence, classes: Ints, distance: Ints, limits: Limits) -> list[Ints]:
    """The candidates that recur once per unit; then those of higher levels."""
    weight = np.zeros(int(of.code.max()) + 1, np.int64)
    weight[of.code] = of.weight
    order = np.argsort(distance, kind="stable")
    apart = distance[order][1:] > limits.level_apart_ratio * distance[order][:-1]
    levels = np.split(order, np.flatnonzero(apart) + 1)
    chosen, unit = 0, levels[0]
    for number, level in enumerate(levels[1:], 1):
        alone = len(level) < 2  # and if it is a graph replay, more likely a step of its own than a part of one
        added = (1 if alone else int(weight[classes[level]].sum())) / float(np.median(distance[unit]))
        if added >= (limits.min_added_alone_share if alone else limits.min_added_share):
            chosen, unit = number, level
    return [ints(level) for level in levels[chosen:]]


def _beginnings(of: Sequence, classes: Ints, limits: Limits) -> Ints:
    """Where units begin: at the class, of those once per unit, before which the stream is idle longest.

    Idle time counts by its median over all units; where none stands out, the class that comes first. A kernel shortly
    before it that recurs within the unit can begin it just as well.
    """
    idle = np.append(0, np.maximum(of.start[1:] - np.maximum.accumulate(of.end)[:-1], 0))
    chosen = np.full(int(of.code.max()) + 1, -1, np.int64)
    chosen[classes] = np.arange(len(classes))
    places = np.flatnonzero(chosen[of.code] >= 0)
    group = chosen[of.code[places]]
    ordered, offsets = sorted_in_groups(group, idle[places], len(classes))
    before = group_percentile(ordered, offsets, 50)
    first = np.full(len(classes), len(of.code))
    np.minimum.at(first, group, places)
    best = int(np.lexsort((first, -before))[0])
    earliest = int(np.argmin(first))
    if before[best] <= 1.2 * before[earliest]:
        best = earliest
    anchors = places[group == best]
    back, least = 0, 1.5 * max(int(before[best]), 1)
    room = int(np.median(np.diff(anchors))) - 1 if len(anchors) > 1 else 0
    code = np.where(of.weight > 1, -1, of.code)  # graphs of several batch sizes begin units of one kind
    for k in range(1, min(limits.look_back_count, room) + 1):
        at = anchors[anchors >= k] - k
        median = float(np.median(idle[at])) if len(at) else 0.0
        if median > least and _usual(code[at])[1] >= limits.min_same_share:
            back, least = k, median
    if not back:
        return ints(anchors)
    usual, _ = _usual(code[anchors[anchors >= back] - back])
    moved = np.maximum(anchors - back, 0)
    moved = np.where((code[moved] == usual) & (of.window[moved] == of.window[anchors]), moved, -1)
    before_it = np.append(-1, anchors[:-1])
    reach = np.append(0, np.cumsum(of.weight))  # kernels before each element
    usual_weight = float(np.median(reach[anchors + 1] - reach[np.maximum(anchors - back, 0)]))
    for number in np.flatnonzero(moved < 0).tolist():  # few: an unusual unit begins behind the longest idle time
        low, high = int(before_it[number]) + 1, int(anchors[number]) + 1
        low += int(np.searchsorted(of.window[low:high], of.window[high - 1]))
        is_first = low == 0 or int(of.window[low - 1]) != int(of.window[low])
        if not is_first or reach[high] - reach[low] > limits.whole_ratio * usual_weight:
            low += int(np.argmax(idle[low:high]))
        moved[number] = low
    return ints(np.unique(moved))


def _usual(codes: Ints) -> tuple[int, float]:
    """The most frequent number and its share."""
    if not len(codes):
        return -1, 0.0
    numbers = encoded(codes)
    counts = np.bincount(numbers)
    most = int(counts.argmax())
    return int(codes[np.argmax(numbers == most)]), float(counts[most] / len(codes))


def _bounded(of: Sequence, begin: Ints, limits: Limits) -> Units:
    """The units from their beginnings: each up to the next one, less what does not belong to it at its end."""
    window = of.window[begin]
    after = np.append(begin[1:], len(of.code))
    window_stop = np.searchsorted(of.window, window, side="right")
    last = after >= window_stop
    last[-1] = True
    at_edge = last | (begin == np.searchsorted(of.window, window))
    stop = np.minimum(after, window_stop)
    inner = np.flatnonzero(~last)
    if not len(inner):
        return Units(begin, ints(stop), last, at_edge)
    reach = np.append(0, np.cumsum(of.weight))
    usual_weight = float(np.median((reach[stop] - reach[begin])[inner]))
    usual_length = float(np.median((stop - begin)[inner]))
    ending, _ = _usual(of.code[stop[inner] - 1])
    too_long = reach[stop] - reach[begin] > limits.whole_ratio * usual_weight
    stop = np.where(too_long, np.minimum(stop, begin + int(np.ceil(1.25 * usual_length))), stop)
    places = np.append(-1, np.flatnonzero(of.code == ending))
    end = places[np.searchsorted(places, stop) - 1]
    return Units(begin, ints(np.where(end >= begin, end + 1, stop)), last, at_edge)
