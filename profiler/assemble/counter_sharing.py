"""Samples shared out over the pieces of work that overlap them, block by block, nothing lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.assemble.counter_normal import SOLVED
from spikeprof.profiler.assemble.counter_overlap import (
    Floats,
    Ints,
    Overlaps,
    Samples,
    shares,
    totals,
)
from spikeprof.profiler.assemble.counter_pieces import KERNELS, MEMORY_OPS, Cut, Work
from spikeprof.profiler.assemble.counter_solve import Solution

#: Bounds of a class are this many standard deviations away: 95 % of simulated cases and more lie inside.
BOUND_SDS = 3.0

#: How well the split of a shared sample is known at best, as a share of either side's count.
_SPLIT_ERROR = 0.15

#: How well the time is known at which the counts of one launch end and those of the next begin.
_EDGE_NS = 600

#: What of the counts of work that has a sample for itself may lie in idle samples beside it.
_ALONE_ERROR = 0.01

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
    """The pairs of some samples that meet."""

    sample: Ints  # counted from the block's first
    group: Ints
    owner: Ints
    even: Floats  # of each pair: the piece's share in the sample, evenly spread
    cut: Ints  # pairs whose spread may depart from even
    cut_group: Ints
    shapes: Floats  # (SOLVED - 1, cut): what each departure adds to the share
    holders: _Holders
    mean_ns: Floats  # by group
    length_ns: Ints  # by sample
    alone: Ints  # pairs whose sample has no other
    idle: npt.NDArray[np.bool_]  # by sample

    @classmethod
    def of(cls, samples: Samples, done: Cut, pairs: Overlaps, block: tuple[slice, slice], owners: Owners) -> _Block:
        rows, which = block
        held = shares(samples, done.pieces, pairs, which)
        # Outside of its time a piece is given nothing, though its counts may be shifted there.
        meet = held.even > 0
        # As wide as NumPy indexes with: narrower ones would be widened for every metric anew.
        piece, sample = (part[which][meet].astype(np.int64) for part in (pairs.piece, pairs.sample))
        sample -= rows.start
        cut = meet[held.cut]
        at = (np.cumsum(meet) - 1)[held.cut[cut]]
        group, exact = done.pieces.group[piece].astype(np.int64), owners.exact[piece]
        number = np.bincount(sample, minlength=rows.stop - rows.start)
        loose = np.flatnonzero(owners.loose[piece])
        return cls(
            sample=sample,
            group=group,
            owner=owners.owner[piece],
            even=held.even[meet],
            cut=at,
            cut_group=group[at],
            shapes=held.shapes[: SOLVED - 1, cut],
            holders=_Holders.of(loose, sample[loose], exact[loose], len(done.exact)),
            mean_ns=done.mean_ns,
            length_ns=samples.lengths(rows),
            alone=np.flatnonzero(number[sample] == 1),
            idle=number == 0,
        )

    def share_out(self, metric: int, counts: Floats, solution: Solution, given: Given) -> None:
        """Add what one metric's counts give to everybody."""
        shapes, by_time = np.ascontiguousarray(solution.shapes[..., metric]), solution.by_time[:, metric]
        weight = self._weight(shapes, by_time)
        total = totals(self.sample, weight, len(counts))
        amount = weight * (counts / np.where(total > 0, total, 1))[self.sample]
        half = BOUND_SDS * solution.sd[:, metric] + _BY_TIME * np.abs(by_time - shapes[0])
        wrong = self.even * half[self.group]
        wrong[self.alone] = np.minimum(wrong[self.alone], _ALONE_ERROR * np.abs(amount[self.alone]))
        wrong[self.holders.pairs] = 0
        of_others = np.minimum(wrong, np.abs(counts)[self.sample] - np.abs(amount))
        of_others[self.alone] = wrong[self.alone]
        owners = given.owners[:, :, metric]
        for rows, part in ((slice(0, 1), amount), (slice(1, 3), wrong), (slice(3, 4), of_others)):
            owners[rows] += totals(self.owner, part, owners.shape[1])
        if len(self.holders.pairs):
            doubt = _SPLIT_ERROR + half / np.maximum(np.maximum(shapes[0], half), np.finfo(float).tiny)
            timed = self.even * by_time[self.group]
            doubts = np.minimum(doubt, 1)[self.group]
            parts = self.holders.parts(self.sample, counts, weight, timed, doubts, self.length_ns)
            first, own = self.holders.first, self.holders.exact >= 0
            for row, part in enumerate(parts):
                if row:  # the amounts are the owners' already
                    owners[row] += totals(self.owner[first], part, owners.shape[1])
                given.exact[row, :, metric] += totals(self.holders.exact[own], part[own], given.exact.shape[1])

    def _weight(self, shapes: Floats, by_time: Floats) -> Floats:
        """What the solution says that each pair counts, and a little of what its time says."""
        weight: Floats = self.even * shapes[0][self.group]
        departures = np.zeros(len(self.cut))
        for departure, share in zip(shapes[1:], self.shapes, strict=True):
            departures += departure[self.cut_group] * share
        weight[self.cut] += departures
        trace = _TRACE * (float((by_time / self.mean_ns).max(initial=0)) or 1.0) * self.mean_ns
        np.maximum(weight, 0, out=weight)
        weight += self.even * (_BY_TIME * by_time + trace)[self.group]
        return weight


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
        sample: Ints,
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
