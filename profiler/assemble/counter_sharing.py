"""Samples shared out over the pieces of work that overlap them, block by block, nothing lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.assemble.counter_overlap import Floats, Ints, Overlaps, Samples, Shares, shares, totals
from spikeprof.profiler.assemble.counter_pieces import KERNELS, MEMORY_OPS, Cut, Work
from spikeprof.profiler.assemble.counter_solve import Solution

#: Bounds of a class are this many standard deviations away: 95 % of simulated cases and more lie inside.
BOUND_SDS = 2.5

#: How well the split of a shared sample is known at best, as a share of either side's count.
_SPLIT_ERROR = 0.12

#: Work is given this share of what sharing by time gives it, whatever the solution says: all of a sample must
#: go somewhere.
_BY_TIME, _TRACE = 0.01, 1e-9


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
    """What was given to whom, by how much it could be wrong, and how much of that the others hold."""

    owners: Floats  # (3, classes + 2, metrics)
    exact: Floats  # (3, kernels with values of their own, metrics)
    idle: Floats  # (metrics,): counts of samples without work


def share_out(
    samples: Samples, done: Cut, pairs: Overlaps, solution: Solution, owners: Owners, classes_count: int
) -> Given:
    """Share out all samples: the sum of everything given, idle included, is the sum of the samples."""
    metrics = len(samples.metrics)
    given = Given(np.zeros((3, classes_count + 2, metrics)), np.zeros((3, len(done.exact), metrics)), np.zeros(metrics))
    for rows, which in pairs.blocks():
        counts = samples.counts(rows)
        held = shares(samples, done.pieces, pairs, which)
        piece = pairs.piece[which]
        block = _Block(pairs.sample[which] - rows.start, done.pieces.group[piece], held, solution, done.mean_ns)
        meet = held.even > 0
        idle = np.bincount(block.sample[meet], minlength=len(counts)) == 0
        given.idle[:] += counts[idle].sum(axis=0)
        owner, exact = owners.owner[piece], owners.exact[piece]
        loose = np.flatnonzero(owners.loose[piece] & meet)
        for metric in range(metrics):
            shared = block.shared(metric, counts[:, metric], loose)
            for row, amount in enumerate(shared):
                given.owners[row, :, metric] += totals(owner, amount, classes_count + 2)
            own = exact[loose] >= 0
            for row, amount in enumerate(shared):
                given.exact[row, :, metric] += totals(exact[loose][own], amount[loose][own], len(done.exact))
    return given


@dataclass(frozen=True, slots=True)
class _Block:
    """The pairs of some samples."""

    sample: npt.NDArray[np.int32]  # counted from the block's first
    group: npt.NDArray[np.int32]
    held: Shares
    solution: Solution
    mean_ns: Floats

    def shared(self, metric: int, counts: Floats, loose: Ints) -> tuple[Floats, Floats, Floats]:
        """For each pair: what it is given of its sample, by how much that could be wrong, as far as others hold it."""
        weight = self._weight(metric)
        total = totals(self.sample, weight, len(counts))
        part = weight / np.where(total > 0, total, 1)[self.sample]
        given = part * counts[self.sample]
        wrong = BOUND_SDS * self.held.even * self.solution.sd[self.group, metric]
        if len(loose):
            wrong[loose] = self._unsure(metric, weight, total, loose) * np.abs(given[loose]) * (1 - part[loose])
        others = np.abs(counts)[self.sample] - np.abs(given)
        return given, wrong, np.minimum(wrong, others)

    def _weight(self, metric: int) -> Floats:
        """What the solution says that each pair counts, and a little of what its time says."""
        shapes, by_time = self.solution.shapes[..., metric], self.solution.by_time[:, metric]
        weight = self.held.even * shapes[0][self.group]
        cut = self.held.cut
        for departure, share in zip(shapes[1:], self.held.shapes, strict=False):
            weight[cut] += share * departure[self.group[cut]]
        trace = _TRACE * max(float((by_time / self.mean_ns).max(initial=0)), 1) * self.mean_ns
        at_least = self.held.even * (_BY_TIME * by_time + trace)[self.group]
        # Outside of its time a piece is given nothing, though its counts may be shifted there.
        return np.where(self.held.even > 0, np.maximum(weight, 0) + at_least, 0)

    def _unsure(self, metric: int, weight: Floats, total: Floats, loose: Ints) -> Floats:
        """By how much of the smaller part the split of the sample of each loose pair can be wrong."""
        count, sd = self.solution.shapes[0, :, metric], self.solution.sd[:, metric]
        half = BOUND_SDS * sd
        unsure = np.minimum(_SPLIT_ERROR + half / np.maximum(np.maximum(count, half), np.finfo(float).tiny), 1)
        weighted = weight * unsure[self.group]
        all_weighted = totals(self.sample, weighted, len(total))
        sample = self.sample[loose]
        others = total[sample] - weight[loose]
        of_others = np.maximum(all_weighted[sample] - weighted[loose], 0) / np.where(others > 0, others, 1)
        return unsure[self.group[loose]] + of_others
