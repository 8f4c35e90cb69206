"""Samples shared out over the pieces of work that overlap them, block by block, nothing lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.assemble.counter_overlap import (
    Floats,
    Ints,
    Overlaps,
    Samples,
    Shares,
    shares,
    totals,
)
from spikeprof.profiler.assemble.counter_pieces import KERNELS, MEMORY_OPS, Cut, Work
from spikeprof.profiler.assemble.counter_solve import Solution

#: Bounds of a class are this many standard deviations away: 95 % of simulated cases and more lie inside.
BOUND_SDS = 2.5

#: How well the split of a shared sample is known at best, as a share of either side's count.
_SPLIT_ERROR = 0.15

#: How well the time is known at which the counts of one launch end and those of the next begin.
_EDGE_NS = 600

#: Work is given this share of what sharing by time gives it, whatever the solution says: all of a sample must
#: go somewhere.
_BY_TIME, _TRACE = 1e-3, 1e-9


@dataclass(frozen=True, slots=True)
class Owners:
    """Whose each piece is."""

    owner: Ints  # the class of its kernel; then memory_ops, then not traced
    exact: Ints  # which of the kernels with values of their own, -1 for none
    loose: npt.NDArray[np.bool_]  # its bounds come from what it shares with others, not from the solution

    @classmethod
    def of(cls, work: Work, done: Cut, classes_count: int) -> Owners:
        """For the pieces of this work."""
        owner = np.where(done.place == MEMORY_OPS, classes_count, classes_count + 1)
        exact = np.full(len(owner), -1)
        of_kernel = done.place == KERNELS
        row = done.kernel[of_kernel]
        owner[of_kernel] = work.kernel_class[row]
        number = np.full(len(work.kernel_start_ns), -1)
        number[done.exact] = np.arange(len(done.exact))
        exact[of_kernel] = number[row]
        return cls(owner, exact, (exact >= 0) | (of_kernel & done.merged[done.pieces.group]))


@dataclass(frozen=True, slots=True)
class Given:
    """What was given to whom; by how much it could be less, and more; and what of "more" the others hold."""

    owners: Floats  # (4, classes + 2, metrics)
    exact: Floats  # (4, kernels with values of their own, metrics)
    idle: Floats  # (metrics,): counts of samples without work


def share_out(
    samples: Samples, done: Cut, pairs: Overlaps, solution: Solution, owners: Owners, classes_count: int
) -> Given:
    """Share out all samples: the sum of everything given, idle included, is the sum of the samples."""
    metrics = len(samples.metrics)
    given = Given(np.zeros((4, classes_count + 2, metrics)), np.zeros((4, len(done.exact), metrics)), np.zeros(metrics))
    for rows, which in pairs.blocks():
        counts = samples.counts(rows)
        block = _Block.of(samples, done, pairs, (rows, which), owners)
        given.idle[:] += counts[block.idle].sum(axis=0)
        for metric in range(metrics):
            block.share_out(metric, counts[:, metric], solution, given)
    return given


@dataclass(frozen=True, slots=True)
class _Block:
    """The pairs of some samples."""

    sample: npt.NDArray[np.integer]  # counted from the block's first
    group: npt.NDArray[np.integer]
    owner: Ints
    held: Shares
    holders: _Holders
    mean_ns: Floats  # by group
    length_ns: Ints  # by sample
    idle: npt.NDArray[np.bool_]  # by sample

    @classmethod
    def of(cls, samples: Samples, done: Cut, pairs: Overlaps, block: tuple[slice, slice], owners: Owners) -> _Block:
        rows, which = block
        held = shares(samples, done.pieces, pairs, which)
        piece, sample = pairs.piece[which], pairs.sample[which] - rows.start
        meet = held.even > 0
        loose = np.flatnonzero(owners.loose[piece] & meet)
        return cls(
            sample=sample,
            group=done.pieces.group[piece],
            owner=owners.owner[piece],
            held=held,
            holders=_Holders.of(loose, sample[loose], owners.exact[piece[loose]], len(done.exact)),
            mean_ns=done.mean_ns,
            length_ns=samples.length_ns[rows],
            idle=np.bincount(sample[meet], minlength=rows.stop - rows.start) == 0,
        )

    def share_out(self, metric: int, counts: Floats, solution: Solution, given: Given) -> None:
        """Add what one metric's counts give to everybody."""
        shapes, by_time = solution.shapes[..., metric], solution.by_time[:, metric]
        weight = self._weight(shapes, by_time)
        total = totals(self.sample, weight, len(counts))
        amount = weight * (counts / np.where(total > 0, total, 1))[self.sample]
        half = BOUND_SDS * solution.sd[:, metric] + _BY_TIME * np.abs(by_time - shapes[0])
        wrong = self.held.even * half[self.group]
        wrong[self.holders.pairs] = 0
        others = np.abs(counts)[self.sample] - np.abs(amount)
        _add(given.owners[:, :, metric], self.owner, (amount, wrong, wrong, np.minimum(wrong, others)))
        if len(self.holders.pairs):
            doubt = _SPLIT_ERROR + half / np.maximum(np.maximum(shapes[0], half), np.finfo(float).tiny)
            timed = self.held.even * by_time[self.group]
            parts = self.holders.parts(
                self.sample, counts, weight, timed, np.minimum(doubt, 1)[self.group], self.length_ns
            )
            first, own = self.holders.first, self.holders.exact >= 0
            # The amounts are the owners' already.
            _add(given.owners[:, :, metric], self.owner[first], (0 * parts[0], *parts[1:]))
            _add(given.exact[:, :, metric], self.holders.exact[own], tuple(part[own] for part in parts))

    def _weight(self, shapes: Floats, by_time: Floats) -> Floats:
        """What the solution says that each pair counts, and a little of what its time says."""
        weight = self.held.even * shapes[0][self.group]
        cut = self.held.cut
        for departure, share in zip(shapes[1:], self.held.shapes, strict=False):
            weight[cut] += share * departure[self.group[cut]]
        trace = _TRACE * (float((by_time / self.mean_ns).max(initial=0)) or 1.0) * self.mean_ns
        at_least = self.held.even * (_BY_TIME * by_time + trace)[self.group]
        # Outside of its time a piece is given nothing, though its counts may be shifted there.
        return np.where(self.held.even > 0, np.maximum(weight, 0) + at_least, 0)


def _add(given: Floats, to: Ints, rows: tuple[Floats, ...]) -> None:
    for row, part in enumerate(rows):
        given[row] += totals(to, part, given.shape[1])


@dataclass(frozen=True, slots=True)
class _Holders:
    """Whose bounds come from what they share: the launches with values of their own, once in each sample."""

    pairs: Ints
    number: Ints  # of each pair: the holder it is a part of; a launch may be three pieces
    first: Ints  # of each holder: one of its pairs
    exact: Ints  # of each holder: which of the kernels with values of their own, -1 for none

    @classmethod
    def of(cls, pairs: Ints, sample: Ints, exact: Ints, exact_count: int) -> _Holders:
        # A piece that is no part of such a kernel is a holder by itself.
        within = np.where(exact >= 0, exact, exact_count + np.arange(len(pairs)))
        key = sample * np.int64(exact_count + len(pairs)) + within
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
        return cls(pairs, number, pairs[first], exact[first])

    def parts(
        self,
        sample: npt.NDArray[np.integer],
        counts: Floats,
        weight: Floats,
        timed: Floats,
        doubt: Floats,
        length_ns: Ints,
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """The rows of ``Given`` of each holder, from its pairs' weight, that by time alone, and its relative error."""
        at = sample[self.first]
        columns = (weight, timed, weight * doubt)
        own, own_timed, own_doubt = (totals(self.number, c[self.pairs], len(self.first)) for c in columns)
        all_of, all_timed, all_doubt = (totals(sample, c, len(counts))[at] for c in columns)
        part, part_timed = own / all_of, own_timed / np.where(all_timed > 0, all_timed, 1)
        others = all_of - own
        doubts = own_doubt / own + np.maximum(all_doubt - own_doubt, 0) / np.where(others > 0, others, 1)
        # A relative error of either side of a share p moves p (1 - p) times it across. Who has no weight may have time.
        moved = doubts * np.maximum(part * (1 - part), part_timed * (1 - part_timed))
        # And where one ends and the other begins is not known better than this.
        moved += np.where(all_timed > own_timed * (1 + _TRACE), np.minimum(_EDGE_NS / length_ns[at], 1), 0)
        count = np.abs(counts[at])
        wrong = moved * count
        more = np.minimum(wrong, (1 - part) * count)
        return part * counts[at], np.minimum(wrong, part * count), more, more
