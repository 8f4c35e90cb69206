"""Whether a tensor's largest magnitude grows over steps, and when it would overflow if it went on so.

log2(amax), a doubling is 1, against the step: of each watched tensor the largest amax of each step, and of many steps
the largest of each of ``BINS`` equal stretches. The slope is the median of the slopes of all pairs (Theil and Sen: a
quarter of the points may be outliers), its bounds are Sen's: of the slopes in order those that are z sigma(S) / 2 away
from the middle, Sen, JASA 63 (1968). The trend is significant by the test of Mann and Kendall: S, the number of pairs
that rise less those that fall, against its variance n (n - 1) (2 n + 5) / 18 without a trend, which ties only lessen.
Neighbouring steps are alike, which the test does not know: tau = S / pairs is asked for besides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from spikeprof.analyzers.derived.intervals import Ints, ints
from spikeprof.analyzers.derived.numerics_formats import Floats
from spikeprof.analyzers.derived.numerics_scans import Scans

BINS = 64


@dataclass(frozen=True, slots=True)
class Trend:
    """The trend of one watched tensor: bits are doublings of amax. Steps are numbers of steps, not counted from now.

    ``last_scan`` is the last one with a finite magnitude, in step ``last_step``.

    ``overflow_step`` is where the line through the medians reaches the limit; ``earliest`` and ``latest`` follow from
    the bounds of the slope, ``latest`` infinite where the lower bound does not rise.
    """

    tensor: int
    last_scan: int
    steps_count: int
    last_step: int
    slope: float  # bits per step
    slope_low: float
    slope_high: float
    tau: float  # -1 to 1: pairs of points that rise less those that fall
    confidence: float  # 1 - p of the two-sided test
    overflow_step: float
    earliest: float
    latest: float


def trends(scans: Scans, least_steps: int, confidence: float) -> list[Trend]:
    """Trends of the watched tensors whose headroom says something, with at least so many steps of finite magnitudes.

    ``confidence`` is that of the slope's bounds.
    """
    usable = np.flatnonzero(np.isfinite(scans.headroom) & scans.unscaled[scans.tensor])
    usable = usable[np.lexsort((scans.step[usable], scans.tensor[usable]))]
    tensor, step = scans.tensor[usable], scans.step[usable]
    height = np.log2(scans.amax[usable])
    bounds = np.flatnonzero(np.diff(tensor, prepend=-1, append=-1))
    found = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        steps, highest = _by_step(step[begin:end], height[begin:end])
        if len(steps) >= least_steps:
            limit = math.log2(scans.limit[usable[begin]])
            found.append(_trend(int(tensor[begin]), int(usable[end - 1]), steps, highest, limit, confidence))
    return found


def _by_step(step: Ints, height: Floats) -> tuple[Ints, Floats]:
    """Each step once, with the largest value of all its scans."""
    first = np.flatnonzero(np.diff(step, prepend=-1))
    return step[first], np.maximum.reduceat(height, first) if len(first) else height


def _trend(tensor: int, last_scan: int, step: Ints, height: Floats, limit: float, confidence: float) -> Trend:
    x, y = binned(step, height)
    pairs_a, pairs_b = np.triu_indices(len(x), 1)
    slopes = np.sort((y[pairs_b] - y[pairs_a]) / (x[pairs_b] - x[pairs_a]))
    slope = float(np.median(slopes))
    rise, sigma = int(np.sign(slopes).sum()), math.sqrt(len(x) * (len(x) - 1) * (2 * len(x) + 5) / 18)
    # The continuity correction: S is a whole number, and next ones are 2 apart.
    z = (abs(rise) - 1) / sigma if rise else 0.0
    half = NormalDist().inv_cdf((1 + confidence) / 2) * sigma / 2
    low, high = (float(slopes[min(max(round(len(slopes) / 2 + side * half), 0), len(slopes) - 1)]) for side in (-1, 1))
    middle = float(np.median(y - slope * x))
    now = middle + slope * x[-1]
    return Trend(
        tensor,
        last_scan,
        len(step),
        int(step[-1]),
        slope,
        low,
        high,
        rise / len(slopes),
        2 * NormalDist().cdf(z) - 1 if z > 0 else 0.0,
        *(float(x[-1]) + (limit - now) / each if each > 0 else math.inf for each in (slope, high, low)),
    )


def binned(step: Ints, height: Floats) -> tuple[Floats, Floats]:
    """At most ``BINS`` points: the largest value of stretches with equally many steps, and the step that has it."""
    if len(step) > BINS:
        stretch = np.arange(len(step)) * BINS // len(step)
        highest = np.lexsort((height, stretch))[np.searchsorted(stretch, np.arange(BINS), "right") - 1]
        step, height = step[highest], height[highest]
    return step.astype(np.float64), height


def last_scans(scans: Scans) -> Ints:
    """The last scan of each watched tensor, by step and then by process."""
    order = np.lexsort((scans.order, scans.rank, scans.step))
    found = np.zeros(len(scans.tensors), np.int64)
    found[scans.tensor[order]] = order
    return found


def zero_growth(scans: Scans, least_scans: int = 8) -> Floats:
    """Mean share of zeros in the last quarter of a watched tensor's scans less that in the first.

    NaN for a tensor with fewer scans than ``least_scans``.
    """
    order = np.lexsort((scans.step, scans.tensor))
    tensor, share = scans.tensor[order], scans.zero_share[order]
    count = np.bincount(tensor, minlength=len(scans.tensors))
    begin = np.cumsum(count) - count
    place, quarter = np.arange(len(order)) - begin[tensor], ints(count // 4)
    means = [
        np.bincount(tensor, np.where(chosen, share, 0.0), minlength=len(count)) / np.maximum(quarter, 1)
        for chosen in (place < quarter[tensor], place >= (count - quarter)[tensor])
    ]
    return np.where(count >= least_scans, means[1] - means[0], np.nan)
