"""The normal equations of the counts of launches, gathered from samples block by block.

The count of a sample is modelled as the sum over its pieces of (share of the piece in the sample) × (count of the
piece's group), with one unknown per group for every shape that its counts may take (``counter_overlap``). A
sample's weight is one over its working time. That makes the solution right on average, whatever the spread of
counts within a launch, where launches stand alone: then it is all that was counted over the number of launches.

The equations are sparse, a sample holds few groups, so they are summed over pairs of groups of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.assemble.counter_overlap import (
    OTHER_SHAPES,
    SOLVED_SHAPES,
    Floats,
    Ints,
    Overlaps,
    Pieces,
    Samples,
    Shares,
    overlap_ns,
    shares,
    totals,
)

SHAPES, SOLVED = len(SOLVED_SHAPES) + len(OTHER_SHAPES), len(SOLVED_SHAPES)

#: Below this share of its length at work a sample weighs no more: its counts are the background's.
WORK_SHARE_MIN = 0.05

#: Products that are summed at most (some seconds' work), and at once (bounds memory).
_PRODUCTS_MAX, _PRODUCTS_AT_ONCE = 20_000_000, 1 << 18


@dataclass(slots=True)
class Normal:
    """Sums over samples, of G groups and M metrics."""

    products: Floats  # (SOLVED, SHAPES, G · G): Σ weight × share × share; left of the diagonal by symmetry
    right: Floats  # (SOLVED, G, M): Σ weight × share × count
    squares: Floats  # (M,): Σ weight × count²
    pieces: Floats  # (G,): pieces of each group in the samples, those cut short in part
    samples_count: int = 0  # that hold work

    @classmethod
    def empty(cls, groups: int, metrics: int) -> Normal:
        """No samples yet."""
        return cls(
            np.zeros((SOLVED, SHAPES, groups * groups)),
            np.zeros((SOLVED, groups, metrics)),
            np.zeros(metrics),
            np.zeros(groups),
        )

    def matrix(self) -> Floats:
        """(SOLVED, G, SHAPES, G), symmetric where both shapes are solved for."""
        groups = len(self.pieces)
        matrix = self.products.reshape(SOLVED, SHAPES, groups, groups)
        for t in range(1, SOLVED):
            matrix[t, :t] = matrix[:t, t].swapaxes(1, 2)
        return matrix.transpose(0, 2, 1, 3)

    def add(self, samples: Samples, pieces: Pieces, pairs: Overlaps, block: tuple[slice, slice]) -> None:
        """Add a block of samples (``Overlaps.blocks``)."""
        rows, which = block
        counts, sample = samples.counts(rows), pairs.sample[which] - rows.start
        working = totals(sample, overlap_ns(samples, pieces, pairs, which), len(counts))
        weight = np.where(working > 0, 1 / np.maximum(working, WORK_SHARE_MIN * samples.lengths(rows)), 0)
        held = shares(samples, pieces, pairs, which)
        groups = len(self.pieces)
        entries = _joined(sample, pieces.group[pairs.piece[which]], held, groups)
        self._add_products(entries, weight)
        cut_groups = entries.group[entries.cut]
        for m in range(counts.shape[1]):
            weighted = (weight * counts[:, m])[entries.sample]
            self.right[0, :, m] += totals(entries.group, entries.even * weighted, groups)
            for s in range(1, SOLVED):
                part = entries.shapes[s - 1] * weighted[entries.cut]
                self.right[s, :, m] += totals(cut_groups, part, groups)
        self.squares += weight @ np.square(counts)
        self.pieces += totals(entries.group, entries.even, groups)
        self.samples_count += int(np.count_nonzero(weight))

    def _add_products(self, entries: _Entries, weight: Floats) -> None:
        """All ordered pairs of entries of one sample, a bounded number at a time."""
        count = len(entries.sample)
        if not count:
            return
        fresh = np.flatnonzero(np.append(True, entries.sample[1:] != entries.sample[:-1]))
        size = np.diff(np.append(fresh, count))
        first, partners = np.repeat(fresh, size), np.repeat(size, size)  # of each entry, itself among them
        before = np.cumsum(partners) - partners
        edges = np.searchsorted(before, np.arange(0, int(partners.sum()), _PRODUCTS_AT_ONCE))
        edges = np.unique(np.append(edges, count))
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            row = np.repeat(np.arange(begin, end), partners[begin:end])
            column = first[row] + np.arange(len(row)) - (before[row] - before[begin])
            self._add_pairs(entries, weight, row, column)

    def _add_pairs(self, entries: _Entries, weight: Floats, row: Ints, column: Ints) -> None:
        cells = len(self.pieces) ** 2
        key = entries.group[row] * len(self.pieces) + entries.group[column]
        left = (weight[entries.sample] * entries.even)[row]
        self.products[0, 0] += totals(key, left * entries.even[column], cells)
        cut = entries.cut_at[column] >= 0
        key, left, row = key[cut], left[cut], row[cut]
        right = np.take(entries.shapes, entries.cut_at[column[cut]], axis=1)
        for s in range(1, SHAPES):
            self.products[0, s] += totals(key, left * right[s - 1], cells)
        cut = entries.cut_at[row] >= 0
        key, row, right = key[cut], row[cut], right[:, cut]
        heavy, at = weight[entries.sample[row]], entries.cut_at[row]
        for t in range(1, SOLVED):
            left = heavy * entries.shapes[t - 1, at]
            for s in range(t, SHAPES):
                self.products[t, s] += totals(key, left * right[s - 1], cells)


@dataclass(frozen=True, slots=True)
class _Entries:
    """The pairs of a block with those of one sample and group joined, ordered by sample."""

    sample: Ints
    group: Ints
    even: Floats
    cut: Ints  # entries that have other shapes than the first
    shapes: Floats  # (SHAPES - 1, cut)
    cut_at: Ints  # column of ``shapes`` by entry, -1 without one


def _joined(sample: npt.NDArray[np.int32], group: npt.NDArray[np.int32], held: Shares, groups: int) -> _Entries:
    distinct, entry = np.unique(sample.astype(np.int64) * groups + group, return_inverse=True)
    even = totals(entry, held.even, len(distinct))
    cut, at = np.unique(entry[held.cut], return_inverse=True)
    shapes = np.stack([totals(at, row, len(cut)) for row in held.shapes])
    cut_at = np.full(len(distinct), -1)
    cut_at[cut] = np.arange(len(cut))
    return _Entries(distinct // groups, distinct % groups, even, cut, shapes, cut_at)


def one_in(pairs: Overlaps) -> int:
    """1 to gather all blocks, n to gather one in n: so that the products stay within bounds."""
    per_sample = np.diff(pairs.first).astype(np.float64)
    return max(int(np.square(per_sample).sum() // _PRODUCTS_MAX), 1)
