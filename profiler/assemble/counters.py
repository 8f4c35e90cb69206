"""Samples of hardware counters to the launches of kernels that caused them, on one GPU.

Every sample is shared out over the work that overlaps it, in proportion to what that work is known to count: a
sample with one kernel in it is that kernel's wholly, idle time in it or not. What no work overlaps is idle: write-
back of L2 after a kernel's end, for one. So nothing is lost: kernels, copies, idle time and time in which recording
was off add up to all that was sampled.

A launch that holds three whole samples or more (``counter_pieces.WHOLE_SAMPLES_MIN``) and was sampled from begin to
end has a value of its own (``exact``). Other launches have that of their class: the mean of what its launches were
given, each counting as much as it was sampled. What a launch counts is solved for over all samples
(``counter_solve``), because launches of a few microseconds share samples with their neighbours.

Bounds. Of a class: ``BOUND_SDS`` standard deviations of the solution, which knows how well the samples tell the
classes apart and that counts do not spread evenly over a launch. Of a launch: what of the samples it shares with
other work could be on the wrong side. They are about attribution; PM sampling itself came within 3 % of Nsight Compute.

A mean (``sm_active_share``) counts as the mean times the time, nothing where the GPU idles, and is divided by the
duration of the launch in the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.assemble.counter_normal import Normal, one_in
from spikeprof.profiler.assemble.counter_overlap import Floats, Ints, Samples, overlaps, totals
from spikeprof.profiler.assemble.counter_pieces import Cut, Work, cut, sampled_ns, union
from spikeprof.profiler.assemble.counter_sharing import Given, Owners, share_out
from spikeprof.profiler.assemble.counter_skew import Skews, estimate_skews
from spikeprof.profiler.assemble.counter_solve import solve
from spikeprof.profiler.counter_metrics import is_additive

#: Places of the balance, in the order of ``Attributed.balance``.
PLACES = ("kernels", "memory_ops", "not_traced", "idle")

#: ``Attributed.match`` of a class.
NONE, EXACT, CLASS = range(3)

#: A class of which less than this many launches was sampled, all taken together, has no value.
_LAUNCHES_MIN = 0.5

#: Samples longer than this many median ones are none: the first of a session may begin at time 0.
_LENGTHS_MAX = 100

#: A sample may begin this part of its length before the last one ends; it is then taken to begin there.
_OVERLAP_DIVISOR = 50


@dataclass(frozen=True, slots=True)
class Estimates:
    """Values per launch with their bounds, each (rows, metrics); NaN where nothing was sampled."""

    value: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class Attributed:
    """What the samples of one GPU say about its work."""

    metrics: tuple[str, ...]
    skews: Skews
    set_aside_count: int  # samples that could not be used
    kernels: Ints  # rows of the kernels that have values of their own
    exact: Estimates  # of these
    classes: Estimates  # the mean over the launches of each class
    match: npt.NDArray[np.int8]  # by class: NONE, EXACT (all of its launches are) or CLASS
    covered: Floats  # by kernel: the share of its time that was sampled
    balance: Floats  # (places, metrics): what was counted where; only sums can be added up
    balance_ns: Ints  # (places,): how much of the sampled time that was


def attribute(samples: Samples, work: Work, classes_count: int, skews: Skews | None = None) -> Attributed:
    """Share out samples over the work of their GPU.

    ``samples`` may be in any order, have gaps and faults: what cannot be used is set aside, and a metric without a
    single number is left out. Classes are numbered below ``classes_count``. Skews are estimated unless given.
    """
    samples, set_aside_count = _usable(samples)
    done = cut(work, samples)
    if skews is None:
        skews = estimate_skews(samples, done, work.in_graph)
    if skews.direct.skew_ns or skews.graph.skew_ns:
        work = work.shifted(np.where(work.in_graph, skews.graph.skew_ns, skews.direct.skew_ns))
        done = cut(work, samples)
    pairs = overlaps(samples, done.pieces)
    normal = Normal.empty(len(done.mean_ns), len(samples.metrics))
    step = one_in(pairs)
    for number, block in enumerate(pairs.blocks()):
        if number % step == 0:
            normal.add(samples, done.pieces, pairs, block)
    solution = solve(normal, done.mean_ns, done.pieces.shaped)
    owners = Owners.of(work, done, classes_count)
    given = share_out(samples, done, pairs, solution, owners, classes_count)
    return _attributed(samples, work, done, given, skews, set_aside_count)


def find_skews(samples: Samples, work: Work) -> Skews:
    """The skews that ``attribute`` estimates."""
    samples, _ = _usable(samples)
    return estimate_skews(samples, cut(work, samples), work.in_graph)


def _usable(samples: Samples) -> tuple[Samples, int]:
    """Those that can be used, in order of time, and how many cannot."""
    start, end, values = samples.start_ns, samples.end_ns, samples.values
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end, values = start[order], end[order], values[order]
    length = end - start
    good = length > 0
    good &= length <= _LENGTHS_MAX * (np.median(length[good]) if good.any() else 0)
    # CUPTI sets its clock right now and then: a sample then begins up to 1.2 % of its length before the last one ends.
    reach = np.maximum.accumulate(np.where(good, end, np.iinfo(np.int64).min))[:-1]
    good[1:] &= start[1:] + length[1:] // _OVERLAP_DIVISOR >= reach
    start = np.append(start[:1], np.where(good[1:], np.maximum(start[1:], reach), start[1:]))
    finite = np.isfinite(values)
    live = finite[good].any(axis=0) | (not good.any())
    good &= finite[:, live].all(axis=1)
    kept = np.flatnonzero(good)
    whole = len(kept) and kept[-1] - kept[0] + 1 == len(kept)
    rows = slice(int(kept[0]), int(kept[-1]) + 1) if whole else kept  # a slice copies nothing
    values = values[rows] if live.all() else values[rows][:, live]
    metrics = tuple(np.array(samples.metrics, object)[live])
    return Samples(start[rows], end[rows], values, metrics), len(good) - len(kept)


def _attributed(
    samples: Samples, work: Work, done: Cut, given: Given, skews: Skews, set_aside_count: int
) -> Attributed:
    classes = given.owners.shape[1] - 2
    kernel_class, duration = work.kernel_class, np.maximum(work.kernel_end_ns - work.kernel_start_ns, 1)
    sampled = done.covered > 0
    launches = np.bincount(kernel_class[sampled], minlength=classes)
    covered = totals(kernel_class, done.covered, classes)
    covered_ns = totals(kernel_class, done.covered * duration, classes)
    match = np.where(np.bincount(kernel_class[done.exact], minlength=classes) == launches, EXACT, CLASS)
    match[covered < _LAUNCHES_MIN] = NONE
    covered[match == NONE] = covered_ns[match == NONE] = np.nan
    # What was not sampled of a launch may hold nothing, or twice what its time says.
    missing = np.sqrt(totals(kernel_class[sampled], np.square(1 - done.covered[sampled]), classes)) / covered
    of_classes = given.owners[:, :classes]
    of_classes[1:] += np.abs(of_classes[0]) * missing[:, None]
    return Attributed(
        metrics=samples.metrics,
        skews=skews,
        set_aside_count=set_aside_count,
        kernels=done.exact,
        exact=_per_launch(given.exact, np.ones(len(done.exact)), duration[done.exact], samples.metrics),
        classes=_per_launch(of_classes, covered, covered_ns, samples.metrics),
        match=match.astype(np.int8),
        covered=done.covered,
        balance=np.stack((given.owners[0, :classes].sum(axis=0), *given.owners[0, classes:], given.idle)),
        balance_ns=_balance_ns(samples, done),
    )


def _per_launch(given: Floats, launches: Floats, time_ns: Floats | Ints, metrics: tuple[str, ...]) -> Estimates:
    """What rows were given, over their launches; a mean over their time."""
    means = np.array([not is_additive(metric) for metric in metrics], bool)
    value, less, more, of_others = given / np.where(means, time_ns[:, None], launches[:, None])
    # Nobody can have more than the samples hold; where little is wrong that need not be looked at.
    high = value + np.minimum(more, np.maximum(of_others, np.abs(value)))
    low = np.where(value >= 0, np.maximum(value - less, 0), value - less)
    shares = np.array([metric.endswith("_share") for metric in metrics], bool)
    most = np.where(shares, 1.0, np.inf)
    return Estimates(np.minimum(value, most), np.minimum(low, most), np.minimum(high, most))


def _balance_ns(samples: Samples, done: Cut) -> Ints:
    """How much sampled time each place takes; where several do, the first in ``PLACES``."""
    starts, ends, so_far, parts = done.pieces.start_ns, done.pieces.end_ns, 0, []
    for place in range(len(PLACES) - 1):
        within = done.place <= place
        reached = int(sampled_ns(samples, *union(starts[within], ends[within])).sum())
        parts.append(reached - so_far)
        so_far = reached
    return np.array([*parts, int(samples.length_ns.sum()) - so_far])
