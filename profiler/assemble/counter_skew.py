"""How far the clock of the samples runs from that of the kernels, found from the two themselves.

On an H200 both are one clock. But the counts of a kernel do not fill its recorded time: they begin a third of a
microsecond after its start and end a microsecond before its end, so that samples seem ahead by about 0.4 µs.
What is estimated is the sum of both. Every shift in question is tried on some thousands of samples: the counts of
groups of launches are solved for, and the shift is taken whose solution leaves the least unexplained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spikeprof.profiler.assemble.counter_normal import WORK_SHARE_MIN
from spikeprof.profiler.assemble.counter_overlap import (
    Floats,
    Ints,
    Pieces,
    Samples,
    overlap_ns,
    overlaps,
    shares,
    totals,
)
from spikeprof.profiler.assemble.counter_pieces import sampled_ns

#: No more is believed: both clocks are the GPU's own.
SKEW_NS_MAX = 2000

#: How well a skew must be known to be used, as the standard deviation of its estimate.
SKEW_SD_NS_MAX = 200

_COARSE_NS, _FINE_NS = 250, 50
_WINDOWS, _WINDOW_SAMPLES = 8, 2000
_PIECES_MAX, _GROUPS_MAX = 100_000, 96
_RIDGE, _EXPLAINED_MAX = 1e-6, 1e-9


@dataclass(frozen=True, slots=True)
class Skew:
    """``skew_ns`` is to be added to a kernel's time to find its counts in the samples.

    ``sd_ns`` is the standard deviation of the estimate. Where it is NaN nothing was found and the skew is 0; where
    it is above ``SKEW_SD_NS_MAX`` it was found too unsurely, and is 0 as well.
    """

    skew_ns: int
    sd_ns: float


UNKNOWN = Skew(0, float("nan"))


def estimate_skew(samples: Samples, pieces: Pieces) -> Skew:
    """The skew between samples and the pieces of the work that ran meanwhile."""
    rows, window = _windows(samples, pieces)
    if not len(rows):
        return UNKNOWN
    looked_at = replace(samples, start_ns=samples.start_ns[rows], end_ns=samples.end_ns[rows])
    counts = samples.counts(rows)
    counts = counts[:, np.square(counts).sum(axis=0) > 0]
    near = _near(looked_at, pieces)
    if not counts.shape[1] or not len(near.start_ns):
        return UNKNOWN

    def curve(shifts: Ints) -> Floats:
        """(shifts, windows)"""
        return np.stack([_unexplained(looked_at.shifted(-shift), counts, near, window) for shift in shifts.tolist()])

    coarse = np.arange(-SKEW_NS_MAX, SKEW_NS_MAX + 1, _COARSE_NS)
    curves = curve(coarse)
    at = int(np.argmin(curves.sum(axis=1)))
    if at in (0, len(coarse) - 1):
        return UNKNOWN
    each = np.array([_lowest(coarse, curve) for curve in curves.T])
    sd = float(np.std(each, ddof=1) / np.sqrt(len(each)))
    if not sd <= SKEW_SD_NS_MAX:
        return Skew(0, sd)
    fine = np.arange(coarse[at - 1], coarse[at + 1] + 1, _FINE_NS)
    return Skew(round(_lowest(fine, curve(fine).sum(axis=1))), sd)


def _windows(samples: Samples, pieces: Pieces) -> tuple[Ints, Ints]:
    """Samples to look at, in stretches spread evenly over the work, and the stretch that each belongs to."""
    count = len(samples.start_ns)
    if count < _WINDOWS or not len(pieces.start_ns):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    begins = np.sort(pieces.start_ns)
    middles = begins[(np.arange(_WINDOWS) * 2 + 1) * len(begins) // (2 * _WINDOWS)]
    length = min(_WINDOW_SAMPLES, count // _WINDOWS)
    first = np.searchsorted(samples.end_ns, middles) - length // 2
    first = np.unique(np.clip(first, 0, count - length))
    last_piece = np.searchsorted(begins, samples.end_ns[first + length - 1])
    held = int((last_piece - np.searchsorted(begins, samples.start_ns[first])).sum())
    length = max(length * min(_PIECES_MAX, held) // max(held, 1), 1)
    rows, at = np.unique((first[:, None] + np.arange(length)).ravel(), return_index=True)
    return rows, at // length


def _near(samples: Samples, pieces: Pieces) -> Pieces:
    """The pieces that meet the samples at some shift; groups beyond the longest-running ones are made one."""
    reach = SKEW_NS_MAX + 1
    met = sampled_ns(samples, pieces.start_ns - reach, pieces.end_ns + reach) > 0
    start, end, group = pieces.start_ns[met], pieces.end_ns[met], pieces.group[met]
    longest = np.argsort(-np.bincount(group, end - start), kind="stable")[: _GROUPS_MAX - 1]
    number = np.full(len(pieces.shaped), len(longest), np.int32)
    number[longest] = np.arange(len(longest))
    merged = number[group] == len(longest)
    size = np.where(merged, (end - start) / 1000, pieces.size[met])
    return Pieces(start, end, number[group], size, np.zeros(len(longest) + 1, bool))


def _unexplained(samples: Samples, counts: Floats, pieces: Pieces, window: Ints) -> Floats:
    """By window: Σ over metrics of the logarithm of what the best counts of the groups leave unexplained."""
    pairs = overlaps(samples, pieces)
    every, rows, groups = slice(0, len(pairs.sample)), len(counts), len(pieces.shaped)
    even = shares(samples, pieces, pairs, every).even
    cell = pairs.sample.astype(np.int64) * groups + pieces.group[pairs.piece]
    design = totals(cell, even, rows * groups).reshape(rows, groups)
    working = totals(pairs.sample, overlap_ns(samples, pieces, pairs, every), rows)
    root = 1 / np.sqrt(np.maximum(working, WORK_SHARE_MIN * samples.length_ns))
    design *= root[:, None]
    target = counts * root[:, None]
    square = design.T @ design
    scale = np.trace(square) / groups
    solved = np.linalg.solve(square + np.eye(groups) * max(scale, 1e-30) * _RIDGE, design.T @ target)
    rest = np.square(target - design @ solved)
    parts = np.stack([totals(window, column, 0) for column in rest.T])
    least = _EXPLAINED_MAX * np.square(target).sum(axis=0)
    return np.asarray(np.log(parts + least[:, None]).sum(axis=0), np.float64)


def _lowest(shifts: Ints, curve: Floats) -> float:
    """Where a curve is lowest, by the parabola through its lowest point and the two beside it."""
    at = int(np.clip(np.argmin(curve), 1, len(curve) - 2))
    left, middle, right = curve[at - 1 : at + 2]
    bend = left - 2 * middle + right
    away = 0.5 * (left - right) / bend if bend > 0 else 0.0
    return float(shifts[at] + np.clip(away, -1, 1) * (shifts[1] - shifts[0]))
