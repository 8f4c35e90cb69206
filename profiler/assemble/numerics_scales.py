"""What codes of quantised tensors stand for at most, from the scans of their scales (``inject/numerics/scales.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.inject.numerics import records as layout

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of one point: the point that is its scan; where ``reaches``, that is of how far codes can reach."""

    source: int
    dtype: str
    reaches: bool


def scale_of(row: list[Any]) -> tuple[int, Scale]:
    """(point, its scale) from a row of the event ``numerics_scales``. Raises ValueError and TypeError."""
    point, source, dtype, reaches = row
    return int(point), Scale(int(source), str(dtype), bool(reaches))


def real_magnitudes(rows: Ints, amax: Floats, scales: Mapping[int, Scale], same: Mapping[int, int]) -> Floats:
    """The most that each scan's elements stand for, NaN where no scale is known.

    ``amax`` are values of the records' largest magnitudes, ``same`` points of which only another one is scanned. Of the
    scans of a scale the next one in the step counts, or else the last one before.
    """
    points = layout.point_of(rows[:, layout.TAG])
    when = rows[:, layout.STEP] << 32 | layout.order_of(rows[:, layout.TAG])
    real = np.full(len(rows), np.nan)
    for point, scale in scales.items():
        own = np.flatnonzero(points == point)
        if not len(own):
            continue
        scans = np.flatnonzero(points == scale.source)
        if not len(scans):
            scans = np.flatnonzero(points == same.get(scale.source, -1))
        size = _scanned(when[own], when[scans], amax[scans])
        real[own] = size if scale.reaches else size * amax[own]
    return real


def _scanned(when: Ints, at: Ints, values: Floats) -> Floats:
    if not len(at):
        return np.full(len(when), np.nan)
    order = np.argsort(at, kind="stable")
    at, values = at[order], values[order]
    later = np.searchsorted(at, when)
    follows = at[np.minimum(later, len(at) - 1)] >> 32 == when >> 32
    chosen = np.where((later < len(at)) & follows, np.minimum(later, len(at) - 1), later - 1)
    return np.where(chosen >= 0, values[np.maximum(chosen, 0)], np.nan)
