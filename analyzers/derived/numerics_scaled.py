"""Quantised tensors whose scale is known: what their codes stand for at most, against what that is turned into.

The most is the largest code times the largest scale, or, with zero points, as far as the codes of any group can reach.
Codes fill their format by intention; what they stand for must fit into the format of the scale, to which they are
turned back, FP16 where the scale is a plain number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spikeprof.analyzers.base import Evidence
from spikeprof.analyzers.derived.intervals import Ints
from spikeprof.analyzers.derived.numerics_formats import Floats, headroom_bits
from spikeprof.analyzers.derived.numerics_scans import Scans, Totals, first_by_tensor, steps_by_tensor


@dataclass(frozen=True, slots=True)
class Scaled:
    """Arrays of one element per watched tensor; NaN where no scale is known. ``first`` is its first near scan or -1."""

    headroom: Floats  # least
    limit: Floats
    first: Ints
    near_steps: Ints


def scaled(scans: Scans, least_headroom: float) -> Scaled:
    """The watched tensors with a scale, and their scans with less headroom than this."""
    bits = headroom_bits(scans.real_amax, scans.real_limit)
    near = bits < least_headroom
    known = np.flatnonzero(np.isfinite(bits))
    worst = known[np.argsort(-bits[known], kind="stable")]
    headroom, limit = (np.full(len(scans.tensors), np.nan) for _ in range(2))
    headroom[scans.tensor[worst]], limit[scans.tensor[worst]] = bits[worst], scans.real_limit[worst]
    return Scaled(headroom, limit, first_by_tensor(scans, near), steps_by_tensor(scans, near))


def scaled_evidence(found: Totals, real: Scaled, tensor: int, least_headroom: float) -> Iterator[Evidence]:
    """What speaks for a quantised tensor whose real numbers come close to their limit."""
    amax, limit = float(found.real_amax[tensor]), float(real.limit[tensor])
    yield Evidence("real_amax_value", amax, limit, "largest number of the format", "modelled")
    yield Evidence("headroom_bits", float(real.headroom[tensor]), least_headroom, "min_headroom_bits", "modelled")
    yield Evidence("near_steps_count", int(real.near_steps[tensor]))
    yield Evidence("scanned_steps_count", int(found.steps[tensor]))
