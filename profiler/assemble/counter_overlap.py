"""Where samples of hardware counters and pieces of GPU work meet in time, and how much of a piece lies in a sample.

A piece is a stretch of GPU work that is attributed as one: a launch, the begin of a long one, a copy. How its
counts are spread over its time is not known: an H200 needs 0.35 µs from a kernel's recorded start to its first
L2 traffic, and is done with it 1 µs before the recorded end. So a piece is described by eleven *shapes*, each
the share of the piece's counts in a sample under one assumption: the first that they are spread evenly, the
others what a departure from that would add (they sum to 0 over all samples). Only a piece that is cut by the
edge of a sample has any but the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.counter_metrics import is_additive

Ints = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

#: How far outside its recorded time the counts of a piece may lie: what is left of the skew, piece by piece.
SHIFT_NS = 300

#: Stretches at the begin and before the end of a launch in which part of its counts may be bunched (on an
#: H200, 3 % of a kernel's L2 sectors come in the last 0.3 µs, after a microsecond of silence).
_BEGIN_NS, _FLUSH_NS = 400, 300

#: The shapes that are solved for (the first is the count itself, the others are departures from even), and
#: those that only widen the bounds. With each its standard deviation, as a share of the piece's count.
SOLVED_SHAPES = ("even", "shifted", "early half", "first quarter", "third quarter")
OTHER_SHAPES = ("flush", "begin", "first eighth", "third eighth", "fifth eighth", "seventh eighth")
SHAPE_SD = np.array([np.nan, 1.0, 0.5, 0.5, 0.5, 0.04, 0.04, 0.08, 0.08, 0.08, 0.08])

_BLOCK_SAMPLES, _BLOCK_PAIRS = 1 << 16, 1 << 19


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one GPU, ascending and disjoint. ``values`` (samples, metrics) may be a memory map."""

    start_ns: Ints
    end_ns: Ints
    values: npt.NDArray[np.floating]
    metrics: tuple[str, ...]

    @property
    def length_ns(self) -> Ints:
        """How long each sample is."""
        return self.lengths(slice(None))

    def lengths(self, rows: slice | Ints) -> Ints:
        """How long some samples are."""
        return self.end_ns[rows] - self.start_ns[rows]

    def counts(self, rows: slice | Ints) -> Floats:
        """(rows, metrics): what was counted; of a mean, the mean times the sample's length in ns."""
        counts = np.array(self.values[rows], np.float64)
        means = [not is_additive(metric) for metric in self.metrics]
        counts[:, means] *= self.lengths(rows)[:, None]
        return counts

    def shifted(self, ns: int) -> Samples:
        """The same samples with this added to their times."""
        return replace(self, start_ns=self.start_ns + ns, end_ns=self.end_ns + ns)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of work, in any order. ``size`` is how many of its group's unknown a piece stands for."""

    start_ns: Ints
    end_ns: Ints  # after start_ns
    group: Indices  # pieces of one group share one unknown per metric
    size: Floats  # 1 for a launch of identical ones; the length in the group's mean lengths for work at a steady rate
    shaped: Bools  # by group: whether the spread over a piece's time may depart from even


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Pairs of a sample and a piece that meet, or nearly (``SHIFT_NS``), ordered by sample."""

    sample: Indices
    piece: Indices
    first: Ints  # first[i]:first[i + 1] are the pairs of sample i

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Stretches of samples and their pairs that bound memory; every sample comes exactly once."""
        count = len(self.first) - 1
        by_pairs = np.searchsorted(self.first, np.arange(0, len(self.sample), _BLOCK_PAIRS))
        edges = np.unique(np.concatenate(([0, count], np.arange(0, count, _BLOCK_SAMPLES), by_pairs)))
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            yield slice(begin, end), slice(int(self.first[begin]), int(self.first[end]))


@dataclass(frozen=True, slots=True)
class Shares:
    """What of each pair's piece lies in its sample."""

    even: Floats  # (pairs,) under even spread, times the piece's size
    cut: Ints  # the pairs whose piece an edge of the sample cuts
    shapes: Floats  # (10, cut): the other shapes of these


def overlaps(samples: Samples, pieces: Pieces) -> Overlaps:
    """All pairs of samples and pieces."""
    first = np.searchsorted(samples.end_ns, pieces.start_ns - SHIFT_NS, side="right")
    stop = np.searchsorted(samples.start_ns, pieces.end_ns + SHIFT_NS, side="left")
    counts = np.maximum(stop - first, 0)
    sample = np.arange(counts.sum(), dtype=np.int64)
    sample += np.repeat(first - (np.cumsum(counts) - counts), counts)
    sample = sample.astype(np.int32)
    piece = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    if np.any(sample[1:] < sample[:-1]):
        order = np.argsort(sample, kind="stable")
        sample, piece = sample[order], piece[order]
    per_sample = np.bincount(sample, minlength=len(samples.start_ns))
    return Overlaps(sample, piece, np.append(0, np.cumsum(per_sample)))


def overlap_ns(samples: Samples, pieces: Pieces, pairs: Overlaps, block: slice) -> Floats:
    """How long the pairs of a block overlap; 0 where they only nearly meet."""
    sample, piece = pairs.sample[block], pairs.piece[block]
    begin = np.maximum(samples.start_ns[sample], pieces.start_ns[piece])
    end = np.minimum(samples.end_ns[sample], pieces.end_ns[piece])
    return np.asarray(np.maximum(end - begin, 0), np.float64)


def shares(samples: Samples, pieces: Pieces, pairs: Overlaps, block: slice) -> Shares:
    """The shapes of the pairs of a block."""
    sample, piece = pairs.sample[block], pairs.piece[block]
    begin = (samples.start_ns[sample] - pieces.start_ns[piece]).astype(np.float64)
    end = (samples.end_ns[sample] - pieces.start_ns[piece]).astype(np.float64)
    length = (pieces.end_ns[piece] - pieces.start_ns[piece]).astype(np.float64)
    even = _within(begin, end, 0, length) * pieces.size[piece]
    edged = ~((begin <= -SHIFT_NS) & (end >= length + SHIFT_NS))
    cut = np.flatnonzero(edged & pieces.shaped[pieces.group[piece]])
    return Shares(even, cut, _shapes(begin[cut], end[cut], length[cut]))


def _shapes(begin: Floats, end: Floats, length: Floats) -> Floats:
    """Rows in the order of the shapes, without the first; times relative to the piece's begin."""
    eighths = _eighths(begin / length, end / length)
    even = eighths.sum(axis=0)
    halves, quarters = eighths.reshape(2, 4, -1).sum(axis=1), eighths.reshape(4, 2, -1).sum(axis=1)
    later, earlier = (_within(begin, end, shift, length) for shift in (SHIFT_NS, -SHIFT_NS))
    return np.stack(
        (
            (later - earlier) / 2,
            2 * (halves[0] - halves[1]),
            2 * (quarters[0] - quarters[1]),
            2 * (quarters[2] - quarters[3]),
            _within(begin, end, length - _FLUSH_NS, np.full_like(length, _FLUSH_NS)) - even,
            _within(begin, end, 0, np.minimum(length, _BEGIN_NS)) - even,
            *(4 * (eighths[i] - eighths[i + 1]) for i in (0, 2, 4, 6)),
        )
    )


def totals(index: npt.NDArray[np.integer], amounts: npt.NDArray[Any], count: int) -> Floats:
    """The sum of the amounts of each index, from 0 to ``count``."""
    return np.asarray(np.bincount(index, amounts, minlength=count), np.float64)


def _within(begin: Floats, end: Floats, offset: Floats | int, length: Floats) -> Floats:
    """The share of [offset, offset + length) that lies in [begin, end)."""
    share: Floats = np.clip((end - offset) / length, 0, 1)
    share -= np.clip((begin - offset) / length, 0, 1)
    return share


def _eighths(begin: Floats, end: Floats) -> Floats:
    """(8, …): what of each eighth of a piece lies between two places in it, as a share of the piece."""
    edges = np.arange(8)[:, None] / 8
    share: Floats = np.clip(end[None, :] - edges, 0, 0.125)
    share -= np.clip(begin[None, :] - edges, 0, 0.125)
    return share
