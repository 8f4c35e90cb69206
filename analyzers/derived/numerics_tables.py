"""Tables about number formats at work: watched tensors, the scans around the first bad one, trends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from spikeprof.analyzers.base import Metric
from spikeprof.analyzers.derived.cells import numbers
from spikeprof.analyzers.derived.intervals import Ints
from spikeprof.analyzers.derived.numerics_heat import MODEL
from spikeprof.analyzers.derived.numerics_origin import BadSteps, Origin
from spikeprof.analyzers.derived.numerics_scans import Scans, Totals, first_by_tensor
from spikeprof.analyzers.derived.numerics_trend import Trend
from spikeprof.profiler.trace import CollectorNote

Columns = Mapping[str, list[Any]]


def module_table(scans: Scans, found: Totals, most: int) -> Columns:
    """Watched tensors, the worst first: those with bad values in the order in which they went bad, then by headroom.

    Tensors whose headroom says nothing (integer codes, scaled formats) come by their share of saturated elements.
    """
    first_bad = first_by_tensor(scans, scans.bad)
    chosen = sorted(range(len(scans.tensors)), key=lambda at: _badness(scans, found, first_bad, at))[:most]
    tensors = [scans.tensors[at] for at in chosen]
    bad = [int(first_bad[at]) for at in chosen]
    return {
        "module": [one.path or MODEL for one in tensors],
        "class_name": [one.class_name for one in tensors],
        "role": [one.role for one in tensors],
        "dtype": [one.dtype for one in tensors],
        "amax_value": numbers(found.amax[chosen]),
        "headroom_bits": numbers(found.least_headroom[chosen]),
        "real_amax_value": numbers(found.real_amax[chosen]),
        "nan_count": found.nan[chosen].tolist(),
        "inf_count": found.inf[chosen].tolist(),
        "smallest_value": numbers(found.smallest[chosen]),
        "subnormal_share": numbers(found.subnormal_share[chosen]),
        "zero_share": numbers(found.zero_share[chosen]),
        "saturated_share": numbers(found.saturated_share[chosen]),
        "scanned_steps_count": found.steps[chosen].tolist(),
        "bad_steps_count": found.bad_steps[chosen].tolist(),
        "first_bad_step": [int(scans.step[at]) if at >= 0 else None for at in bad],
    }


def _badness(scans: Scans, found: Totals, first_bad: Ints, at: int) -> tuple[float, ...]:
    bad = int(first_bad[at])
    if bad >= 0:
        return (0, float(scans.step[bad]), float(scans.order[bad]))
    known = scans.tensors[at].format
    headroom = float(found.least_headroom[at])
    if known is None or known.scaled or math.isnan(headroom):
        return (2, -float(found.saturated_share[at]), 0)
    return (1, headroom, 0)


def around_table(scans: Scans, found: Origin | None, before: int, after: int) -> Columns:
    """The last scans before the first bad one, that one, and bad ones after it; ``state`` says which is which."""
    if found is None:
        rows: list[int] = []
    else:
        later = found.scan + 1 + np.flatnonzero(scans.bad[found.scan + 1 : found.step_end])
        rows = [*range(max(found.step_begin, found.scan - before), found.scan + 1), *later[:after].tolist()]
    tensors = [scans.tensors[scans.tensor[row]] for row in rows]
    scan = found.scan if found else -1
    return {
        "step": [int(scans.step[row]) for row in rows],
        "order": [int(scans.order[row]) for row in rows],
        "state": ["fine" if row < scan else "first bad" if row == scan else "victim" for row in rows],
        "module": [one.path or MODEL for one in tensors],
        "class_name": [one.class_name for one in tensors],
        "role": [one.role for one in tensors],
        "dtype": [one.dtype for one in tensors],
        "amax_value": numbers(scans.amax[rows]) if rows else [],
        "headroom_bits": numbers(scans.headroom[rows]) if rows else [],
        "nan_count": [int(scans.nan[row]) for row in rows],
        "inf_count": [int(scans.inf[row]) for row in rows],
        "elements_count": [int(scans.elements[row]) for row in rows],
    }


def bad_step_table(scans: Scans, found: BadSteps, most: int) -> Columns:
    """Steps with bad values, with the watched tensor that went bad first in each."""
    order = np.lexsort((scans.rank[found.first], scans.step[found.first]))[:most]
    first = found.first[order]
    tensors = [scans.tensors[tensor] for tensor in scans.tensor[first].tolist()]
    return {
        "rank": scans.rank[first].tolist(),
        "step": scans.step[first].tolist(),
        "module": [one.path or MODEL for one in tensors],
        "role": [one.role for one in tensors],
        "nan_count": scans.nan[first].tolist(),
        "inf_count": scans.inf[first].tolist(),
        "bad_tensors_count": found.tensors_count[order].tolist(),
    }


def trend_table(scans: Scans, found: Iterable[Trend], most: int) -> Columns:
    """Watched tensors whose magnitude grows, those that would overflow first on top."""
    chosen = sorted(found, key=lambda one: one.overflow_step)[:most]
    tensors = [scans.tensors[one.tensor] for one in chosen]
    return {
        "module": [one.path or MODEL for one in tensors],
        "role": [one.role for one in tensors],
        "dtype": [one.dtype for one in tensors],
        "scanned_steps_count": [one.steps_count for one in chosen],
        "steps_per_doubling_count": [1 / one.slope for one in chosen],
        "trend_correlation_ratio": [one.tau for one in chosen],
        "confidence_share": [one.confidence for one in chosen],
        "overflow_step": [round(one.overflow_step) for one in chosen],
        "earliest_overflow_step": [round(one.earliest) for one in chosen],
        "latest_overflow_step": [round(one.latest) if math.isfinite(one.latest) else None for one in chosen],
    }


def metrics(scans: Scans, found: Totals, bad_steps_count: int, note: CollectorNote | None) -> Iterator[Metric]:
    """How much was looked at, and the worst of it."""
    yield Metric("scans_count", len(scans))
    yield Metric("scanned_steps_count", len(np.unique(scans.step_group)))
    yield Metric("watched_tensors_count", len(scans.tensors))
    yield Metric("watched_modules_count", len({one.path for one in scans.tensors}))
    yield Metric("bad_steps_count", bad_steps_count)
    yield Metric("bad_tensors_count", int((found.bad_steps > 0).sum()))
    yield Metric("changed_scans_count", int(scans.changed.sum()))
    if note is not None:
        yield Metric("scans_dropped_count", note.dropped_count)
    for dtype in dict.fromkeys(one.dtype for one, kept in zip(scans.tensors, scans.unscaled, strict=True) if kept):
        mine = found.least_headroom[[one.dtype == dtype for one in scans.tensors]]
        known = bool(np.isfinite(mine).any())
        name = f"{dtype.removeprefix('torch.')}_headroom_bits"
        yield Metric(name, float(np.nanmin(mine)) if known else None, "" if known else "all elements are zero or bad")
