"""How far the clock of the samples runs from that of the kernels, found from the two themselves.

The counts of a kernel do not fill its recorded time: on an H200 they begin a few tenths of a microsecond after its
start and end a microsecond before its end, so that samples seem ahead of kernels though the clock is one. To tell
this from a skew, two times are looked for: from the recorded start of launches to their counts, and from the end of
their counts to the recorded end. Every pair in question is tried on some thousands of samples: the counts of groups
of launches are solved for, and the pair is taken whose solution leaves the least unexplained. Only counts that come
before the recorded start or after the recorded end make a skew.

Launches from CUDA graphs are looked at for themselves: on an H200 their counts begin 0.75 µs before the recorded start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from spikeprof.profiler.assemble.counter_linear import inverse, times
from spikeprof.profiler.assemble.counter_normal import WORK_SHARE_MIN
from spikeprof.profiler.assemble.counter_overlap import (
    SHIFT_NS,
    Bools,
    Floats,
    Indices,
    Ints,
    Pieces,
    Samples,
    overlap_ns,
    overlaps,
    shares,
    totals,
)
from spikeprof.profiler.assemble.counter_pieces import Cut, sampled_ns

#: How well the times must be known for a skew to be used, as the standard deviation of their estimates.
SKEW_SD_NS_MAX = 200

#: No more is believed, of either time: both clocks are the GPU's own.
_REACH_NS = 2000

_SCAN_NS, _GAPS_NS = 250, (0, 1000)
_STEPS_NS = (400, 200, 100, 50)
_SPREAD_NS = 200

#: Counts take this share of a recorded duration at least.
_ACTIVE_SHARE_MIN = 0.25

#: A skew must explain more than none does, by so many standard deviations over the stretches that are looked at.
_GAIN_SDS = 3

_WINDOWS, _WINDOW_SAMPLES = 8, 2000
_PIECES_MAX, _GROUPS_MAX = 100_000, 60
_RIDGE, _UNEXPLAINED_MIN = 1e-6, 1e-4


@dataclass(frozen=True, slots=True)
class Skew:
    """``skew_ns`` is to be added to a kernel's time to find its counts in the samples.

    The counts of a launch begin ``begin_ns`` after its recorded start and end ``end_ns`` before its recorded end;
    ``sd_ns`` is the standard deviation of both. They are NaN where they cannot be told. The skew is 0 then, where they
    are not told well enough (``SKEW_SD_NS_MAX``), and where the spread of counts over launches, which is solved for
    class by class, may as well explain it (``SHIFT_NS``).
    """

    skew_ns: int
    begin_ns: float = float("nan")
    end_ns: float = float("nan")
    sd_ns: float = float("nan")


UNKNOWN = Skew(0)


@dataclass(frozen=True, slots=True)
class Skews:
    """The skew of kernels that were launched one by one, and of those from CUDA graphs."""

    direct: Skew = UNKNOWN
    graph: Skew = UNKNOWN


def estimate_skews(samples: Samples, work: Cut, in_graph: Bools) -> Skews:
    """Both, for the kernels that ``work`` was cut from; ``in_graph`` says of each whether a graph launched it."""
    of_kernel = work.kernel >= 0
    from_graph = of_kernel & (in_graph[work.kernel] if len(in_graph) else False)
    return Skews(_estimated(samples, work, of_kernel & ~from_graph), _estimated(samples, work, from_graph))


def _estimated(samples: Samples, work: Cut, chosen: Bools) -> Skew:
    """The skew of the chosen pieces, the others staying where they are."""
    rows, window = _windows(samples, work.pieces.start_ns[chosen])
    if not len(rows):
        return UNKNOWN
    looked_at = Samples(samples.start_ns[rows], samples.end_ns[rows], samples.values[:0], samples.metrics)
    counts = samples.counts(rows)
    counts = counts[:, np.square(counts).sum(axis=0) > 0]
    near = _Near.of(looked_at, work, chosen)
    if not counts.shape[1] or not len(near.start_ns):
        return UNKNOWN

    @cache
    def parts(begin_ns: int, end_ns: int) -> Floats:
        return _unexplained(looked_at, counts, near.pieces(begin_ns, end_ns), window)

    def unexplained(times: tuple[int, int]) -> float:
        within = max(abs(times[0]), abs(times[1])) <= _REACH_NS
        return float(np.log(parts(*times)).sum()) if within else np.inf

    # Begin and end trade for each other, so the search starts from shifts of the whole, with and without a gap.
    scan = range(-_REACH_NS, _REACH_NS + 1, _SCAN_NS)
    best = _lowest_near(min(((s, gap - s) for gap in _GAPS_NS for s in scan), key=unexplained), unexplained)
    if max(map(abs, best)) >= _REACH_NS:  # it goes on getting better out there
        return UNKNOWN
    if min(best) < 0:
        within = (max(best[0], 0), max(best[1], 0))
        plain = _lowest_near(within, lambda times: unexplained(times) if min(times) >= 0 else np.inf)
        gain = np.log(parts(*plain) / parts(*best)).sum(axis=0)
        if gain.mean() < _GAIN_SDS * np.std(gain) / np.sqrt(len(gain)):
            best = plain
    sds = []
    for of_begin, of_end in ((_SPREAD_NS, 0), (0, _SPREAD_NS)):
        three = np.stack([parts(best[0] + d * of_begin, best[1] + d * of_end) for d in (-1, 0, 1)])
        sds.append(_SPREAD_NS * _sd_of_lowest(three))
    begin_ns, end_ns, sd_ns = *map(float, best), max(sds)
    if begin_ns < 0 and end_ns < 0:
        skew_ns = round((begin_ns - end_ns) / 2)
    else:
        skew_ns = round(min(begin_ns, 0) - min(end_ns, 0))
    sure = sd_ns <= SKEW_SD_NS_MAX and abs(skew_ns) > SHIFT_NS
    return Skew(skew_ns if sure else 0, begin_ns, end_ns, sd_ns)


def _lowest_near(times: tuple[int, int], unexplained: Callable[[tuple[int, int]], float]) -> tuple[int, int]:
    """Downhill from a pair of times, in ever smaller steps."""
    for step in _STEPS_NS:
        while (nearer := min(_around(times, step), key=unexplained)) != times:
            times = nearer
    return times


def _around(at: tuple[int, int], step: int) -> list[tuple[int, int]]:
    """A pair of times and the eight around it; itself first, so that it wins where none is better."""
    moves = [(0, 0), *((x, y) for x in (-step, 0, step) for y in (-step, 0, step) if x or y)]
    return [(at[0] + x, at[1] + y) for x, y in moves]


def _windows(samples: Samples, begins: Ints) -> tuple[Ints, Ints]:
    """Samples to look at, in stretches spread evenly over the work, and the stretch that each belongs to."""
    count = len(samples.start_ns)
    if count < _WINDOWS or not len(begins):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    begins = np.sort(begins)
    middles = begins[(np.arange(_WINDOWS) * 2 + 1) * len(begins) // (2 * _WINDOWS)]
    length = min(_WINDOW_SAMPLES, count // _WINDOWS)
    first = np.searchsorted(samples.end_ns, middles) - length // 2
    first = np.unique(np.clip(first, 0, count - length))
    last_piece = np.searchsorted(begins, samples.end_ns[first + length - 1])
    held = int((last_piece - np.searchsorted(begins, samples.start_ns[first])).sum())
    length = max(length * min(_PIECES_MAX, held) // max(held, 1), 1)
    rows, at = np.unique((first[:, None] + np.arange(length)).ravel(), return_index=True)
    return rows, at // length


@dataclass(frozen=True, slots=True)
class _Near:
    """The pieces that may meet the samples; groups beyond the longest-running ones are made one."""

    start_ns: Ints
    end_ns: Ints
    begins: Bools  # whether a piece has the begin of a launch that is looked at
    ends: Bools
    group: Indices
    size: Floats
    groups: int

    @classmethod
    def of(cls, samples: Samples, work: Cut, chosen: Bools) -> _Near:
        every = work.pieces
        met = sampled_ns(samples, every.start_ns - _REACH_NS, every.end_ns + _REACH_NS) > 0
        start, end, group = every.start_ns[met], every.end_ns[met], every.group[met]
        longest = np.argsort(-np.bincount(group, end - start), kind="stable")[: _GROUPS_MAX - 1]
        number = np.full(len(every.shaped), len(longest), np.int32)
        number[longest] = np.arange(len(longest))
        size = np.where(number[group] == len(longest), (end - start) / 1000, every.size[met])
        begins, ends = work.begins[group] & chosen[met], work.ends[group] & chosen[met]
        return cls(start, end, begins, ends, number[group], size, len(longest) + 1)

    def pieces(self, begin_ns: int, end_ns: int) -> Pieces:
        """With counts from so long after the begin of those launches to so long before their end."""
        begin, end = self.begins * begin_ns, self.ends * end_ns
        length = self.end_ns - self.start_ns
        least = np.maximum((_ACTIVE_SHARE_MIN * length).astype(np.int64), 1)
        # What is too much for a short launch is taken off both times alike.
        excess = np.maximum(begin + end - (length - least), 0)
        begin = begin - np.where(end > 0, np.where(begin > 0, excess // 2, 0), excess)
        end = np.minimum(end, length - least - begin)
        none = np.zeros(self.groups, bool)
        return Pieces(self.start_ns + begin, self.end_ns - end, self.group, self.size, none)


def _unexplained(samples: Samples, counts: Floats, pieces: Pieces, window: Ints) -> Floats:
    """(metrics, windows): the squares that the best counts of the groups leave unexplained, or a little more."""
    pairs = overlaps(samples, pieces)
    every, rows, groups = slice(0, len(pairs.sample)), len(counts), len(pieces.shaped)
    even = shares(samples, pieces, pairs, every).even
    cell = pairs.sample.astype(np.int64) * groups + pieces.group[pairs.piece]
    design = totals(cell, even, rows * groups).reshape(rows, groups)
    working = totals(pairs.sample, overlap_ns(samples, pieces, pairs, every), rows)
    root = 1 / np.sqrt(np.maximum(working, WORK_SHARE_MIN * samples.length_ns))
    design *= root[:, None]
    target = counts * root[:, None]
    square = times(design.T, design)
    scale = np.trace(square) / groups
    square += np.eye(groups) * max(scale, 1e-30) * _RIDGE
    rest = np.square(target - times(design, times(inverse(square), times(design.T, target))))
    # What explains next to all of a stretch by chance must not outweigh the others.
    least = _UNEXPLAINED_MIN * np.square(target).sum(axis=0) / (window.max() + 1)
    parts: Floats = np.stack([totals(window, column, 0) for column in rest.T])
    parts += least[:, None]
    return parts


def _sd_of_lowest(parts: Floats) -> float:
    """How surely the curve of (points, metrics, windows) is lowest where it is: by the jackknife over windows."""
    windows = parts.shape[2]
    if windows < 3:
        return float("nan")
    curves = np.log(parts).sum(axis=1)
    without = curves.sum(axis=1, keepdims=True) - curves
    return float(np.std([_lowest(curve) for curve in without.T]) * np.sqrt(windows - 1))


def _lowest(curve: Floats) -> float:
    """Where the parabola through three points is lowest, from -10 to 10; on the lower side where it has no bottom."""
    left, middle, right = curve
    bend = left - 2 * middle + right
    away = 0.5 * (left - right) / bend if bend > 0 else 10 * np.sign(left - right)
    return float(np.clip(away, -10, 10))
