"""What one launch of each group of identical ones counts, from the normal equations.

The unknowns are each group's count and, because launches that stand close share samples, a few departures of
its spread from an even one. It is a least-squares solution with non-negative counts and a normal prior:

* a departure's standard deviation is ``counter_overlap.SHAPE_SD`` times the group's count;
* a count is what sharing every sample out by time gives, give or take ``PRIOR_RATIO`` times that. It is weak, so
  that it tells only where samples do not: groups that always run together come out by time, with wide bounds.

The standard deviation of a count is that of the normal posterior, with the variance of samples taken from the
residuals, and of the departures that are not solved for, each carried through the solution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spikeprof.profiler.assemble.counter_linear import applied, inverse, nonnegative, times
from spikeprof.profiler.assemble.counter_normal import SHAPES, SOLVED, Normal
from spikeprof.profiler.assemble.counter_overlap import SHAPE_SD, Bools, Floats, Ints

#: Standard deviation of a count before the samples are looked at, over what sharing by time gives it.
PRIOR_RATIO = 3.0

#: Unknowns at most: of the groups beyond, departures are not solved for.
_UNKNOWNS_MAX = 640

#: The priors of departures follow the counts, which takes some rounds; of a group that counts nothing they stay
#: at this share of its count by time.
_ROUNDS, _COUNT_MIN = 3, 0.05

#: Samples are told no better than 0.1 %: without that, what they do not tell would follow rounding errors.
_VARIANCE_MIN = 1e-6

#: A prior is no narrower than this share of the largest count: keeps the system regular.
_WIDTH_MIN = 1e-6

#: Nor is it wider than this says, over what the samples say: likewise.
_PRECISION_MIN = 1e-9


@dataclass(frozen=True, slots=True)
class Solution:
    """Per group and metric: the count of one piece, what sharing by time gives, the standard deviation."""

    shapes: Floats  # (SOLVED, groups, metrics): the count, not negative, and its departures from even spread
    by_time: Floats  # (groups, metrics)
    sd: Floats  # (groups, metrics)


def solve(normal: Normal, mean_ns: Floats, shaped: Bools) -> Solution:
    """Solve for every metric. Per group: the mean length of its pieces, whether its spread may depart from even."""
    groups, metrics = normal.right.shape[1:]
    system = _System.of(normal, mean_ns, shaped)
    solution = Solution(np.zeros((SOLVED, groups, metrics)), np.zeros((groups, metrics)), np.zeros((groups, metrics)))
    # Weights are 1 / working time, so this is (rate of the samples that a group runs in) × length.
    seen, time_ns = normal.pieces > 0, normal.pieces * mean_ns
    amount = np.maximum(normal.right[0] * mean_ns[:, None], 0)
    by_time = solution.by_time
    by_time[seen] = amount[seen] / normal.pieces[seen, None]
    # A group that is in none of these samples is taken to work at the mean rate.
    by_time[~seen] = mean_ns[~seen, None] * amount.sum(axis=0) / max(float(time_ns.sum()), 1)
    for m in np.flatnonzero((normal.squares > 0) & (by_time.max(axis=0, initial=0) > 0)).tolist():
        found, solution.sd[:, m] = system.solve(normal.right[..., m], normal.squares[m], by_time[:, m])
        solution.shapes[system.shape[: len(found)], system.group[: len(found)], m] = found
    return solution


@dataclass(frozen=True, slots=True)
class _System:
    """The equations of the unknowns, all counts first, and of the departures that are not solved for."""

    matrix: Floats  # (unknowns, unknowns)
    others: Floats  # (unknowns, departures not solved for)
    shape: Ints  # of the unknowns, then of the others
    group: Ints  # likewise
    groups: int
    samples_count: int

    @classmethod
    def of(cls, normal: Normal, mean_ns: Floats, shaped: Bools) -> _System:
        groups = len(normal.pieces)
        solved = np.zeros((SHAPES, groups), bool)
        solved[0] = True
        # Departures matter most where there is most to share out.
        most_time = np.argsort(-normal.pieces * mean_ns, kind="stable")
        most_time = most_time[shaped[most_time]][: max((_UNKNOWNS_MAX - groups) // (SOLVED - 1), 0)]
        solved[1:SOLVED, most_time] = True
        shape, group = np.nonzero(solved)
        other_shape, other_group = np.nonzero(~solved & shaped)
        whole = normal.matrix()
        rows = whole[shape, group]  # (unknowns, SHAPES, groups)
        return cls(
            rows[:, shape, group],
            rows[:, other_shape, other_group],
            np.append(shape, other_shape),
            np.append(group, other_group),
            groups,
            normal.samples_count,
        )

    def solve(self, right: Floats, squares: float, by_time: Floats) -> tuple[Floats, Floats]:
        """One metric: the unknowns, and the standard deviation of the counts."""
        groups, unknowns = self.groups, len(self.matrix)
        shape, group = self.shape[:unknowns], self.group[:unknowns]
        target = right[shape, group]
        least = float(by_time.max()) * _WIDTH_MIN
        prior_sd = np.maximum(PRIOR_RATIO * by_time, least)
        count, variance = by_time, squares / self.samples_count
        for _ in range(_ROUNDS):
            sd = SHAPE_SD[shape] * np.maximum(count, np.maximum(_COUNT_MIN * by_time, least))[group]
            sd[:groups] = prior_sd
            precision = np.maximum(variance / np.square(sd), _PRECISION_MIN * np.diag(self.matrix))
            pull = target.copy()
            pull[:groups] += precision[:groups] * by_time
            inverted = inverse(self.matrix + np.diag(precision))
            found = nonnegative(inverted, pull, groups)
            count = found[:groups]
            residual = float(squares - 2 * target @ found + found @ applied(self.matrix, found))
            freedom = max(self.samples_count - unknowns, 1)
            variance = max(residual / freedom, squares / self.samples_count * _VARIANCE_MIN)
        gain = inverted[:groups]
        beyond = times(gain, self.others)
        beyond *= SHAPE_SD[self.shape[unknowns:]] * count[self.group[unknowns:]]
        return found, np.sqrt(variance * np.diag(gain) + np.square(beyond).sum(axis=1))
