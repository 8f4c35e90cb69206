"""Where bad values came from: of each step with Inf or NaN the first scan, in execution order, that saw one.

All scans of the step before that one were fine, so were, of what is watched, its module's inputs: they were handed on
by modules that ran before it. What is bad after it in the same step is a victim of it, or of another that this one
hides. Only the first bad step of a process is followed to its source: in later steps bad values may come from what was
kept, such as a KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spikeprof.analyzers.derived.intervals import Bools, Ints, ints
from spikeprof.analyzers.derived.numerics_scans import Scans, Tensor


@dataclass(frozen=True, slots=True)
class BadSteps:
    """Steps with bad values, by process and step: their first bad scan, and how many watched tensors were bad."""

    first: Ints  # scan
    tensors_count: Ints
    brought_in: Bools  # bad from its very first scan on, as the step before it was


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the bad values of one step came from.

    ``step_begin`` to ``step_end`` are the scans of the step; ``inputs`` those of its module's inputs in it;
    ``last_fine_step`` is the last scanned step of the process before it, -1 where it is the first.
    """

    scan: int
    step_begin: int
    step_end: int
    inputs: Ints
    victims: tuple[Tensor, ...]
    last_fine_step: int

    @property
    def before_count(self) -> int:
        """Scans of the step before it, all of them fine."""
        return self.scan - self.step_begin


def bad_steps(scans: Scans) -> BadSteps:
    """All steps with bad values."""
    bad = np.flatnonzero(scans.bad)
    group = scans.step_group[bad]
    _, first = np.unique(group, return_index=True)
    number = len(scans.tensors)
    pairs = np.unique(group * number + scans.tensor[bad])
    of_group = np.bincount(pairs // number, minlength=1) if len(pairs) else ints([])
    groups = group[first]
    begins = np.searchsorted(scans.step_group, groups)
    after_bad = np.isin(groups - 1, groups) & (scans.rank[np.maximum(begins - 1, 0)] == scans.rank[begins])
    return BadSteps(bad[first], ints(of_group[groups]), after_bad & (bad[first] == begins))


def origins(scans: Scans, found: BadSteps) -> Iterator[Origin]:
    """The origin of the first bad step of each process, by step and then by process."""
    _, first = np.unique(scans.rank[found.first], return_index=True)
    chosen = found.first[first]
    for scan in chosen[np.argsort(scans.step[chosen], kind="stable")].tolist():
        yield _origin(scans, scan)


def _origin(scans: Scans, scan: int) -> Origin:
    group = scans.step_group[scan]
    begin, end = (int(np.searchsorted(scans.step_group, group, side)) for side in ("left", "right"))
    after = np.unique(scans.tensor[scan + 1 : end][scans.bad[scan + 1 : end]], return_index=True)
    own = scans.tensors[scans.tensor[scan]]
    victims = [scans.tensors[tensor] for tensor in after[0][np.argsort(after[1])].tolist()]
    takes = np.array([one.path == own.path and one.role == "input" != own.role for one in scans.tensors], np.bool_)
    before = begin > 0 and scans.rank[begin - 1] == scans.rank[scan]
    return Origin(
        scan,
        begin,
        end,
        ints(begin + np.flatnonzero(takes[scans.tensor[begin:scan]])),
        tuple(one for one in victims if one != own),
        int(scans.step[begin - 1]) if before else -1,
    )
