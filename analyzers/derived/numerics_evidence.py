"""What speaks for a finding about a watched tensor: its numbers, and the limits that they are held against.

A limit is (number, name of the option or source), or () where the number stands for itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spikeprof.analyzers.base import Evidence
from spikeprof.analyzers.derived.numerics_origin import Origin
from spikeprof.analyzers.derived.numerics_scans import Scans, Totals
from spikeprof.analyzers.derived.numerics_trend import Trend

Limit = tuple[float, str] | tuple[()]


def bad_evidence(found: Totals, tensor: int) -> Iterator[Evidence]:
    """For one that holds Inf or NaN."""
    yield Evidence("bad_steps_count", int(found.bad_steps[tensor]), 0, "none expected")
    yield Evidence("inf_count", int(found.inf[tensor]))
    yield Evidence("nan_count", int(found.nan[tensor]))
    yield from _known("amax_value", found.amax[tensor])
    yield Evidence("scanned_steps_count", int(found.steps[tensor]))


def near_evidence(
    found: Totals, tensor: int, steps: int, limit: Limit, headroom: tuple[float, str]
) -> Iterator[Evidence]:
    """For one that came close to its limit in ``steps``."""
    limit = limit or (float(found.limit[tensor]), "largest number of the format")
    yield Evidence("amax_value", float(found.amax[tensor]), *limit)
    yield Evidence("headroom_bits", float(found.least_headroom[tensor]), *headroom)
    yield Evidence("near_steps_count", steps)
    yield Evidence("scanned_steps_count", int(found.steps[tensor]))


def trend_evidence(
    scans: Scans, one: Trend, confidence: tuple[float, str], correlation: tuple[float, str]
) -> Iterator[Evidence]:
    """For one whose magnitude grows."""
    earliest = max(round(one.earliest) - one.last_step, 0)
    yield Evidence("steps_to_overflow_count", round(one.overflow_step) - one.last_step, basis="inferred")
    yield Evidence("earliest_steps_to_overflow_count", earliest, basis="inferred")
    yield from _known("amax_value", scans.amax[one.last_scan])
    yield Evidence("steps_per_doubling_count", 1 / one.slope)
    yield Evidence("confidence_share", one.confidence, *confidence)
    yield Evidence("trend_correlation_ratio", one.tau, *correlation)


def saturated_evidence(found: Totals, tensor: int, steps: int, limit: Limit) -> Iterator[Evidence]:
    """For one with elements at the ends of its format, beyond the limit in ``steps``."""
    yield Evidence("saturated_share", float(found.saturated_share[tensor]), *limit)
    yield Evidence("over_limit_steps_count", steps)
    yield Evidence("scanned_steps_count", int(found.steps[tensor]))
    yield from _known("amax_value", found.amax[tensor])


def subnormal_evidence(found: Totals, tensor: int, steps: int, limit: Limit) -> Iterator[Evidence]:
    """For one that is subnormal in part, beyond the limit in ``steps``."""
    yield Evidence("subnormal_share", float(found.subnormal_share[tensor]), *limit)
    yield from _known("amax_value", found.amax[tensor])
    yield from _known("smallest_value", found.smallest[tensor])
    yield Evidence("over_limit_steps_count", steps)
    yield Evidence("scanned_steps_count", int(found.steps[tensor]))


def zero_evidence(found: Totals, tensor: int, limit: Limit, is_signed_code: bool) -> Iterator[Evidence]:
    """For one of which much became zero."""
    yield Evidence("zero_share", float(found.zero_share[tensor]), *limit)
    yield from _known("smallest_value", found.smallest[tensor])
    if not is_signed_code:
        yield Evidence("subnormal_share", float(found.subnormal_share[tensor]))
    yield from _known("amax_value", found.amax[tensor])


def origin_evidence(scans: Scans, found: Origin) -> Iterator[Evidence]:
    """What speaks for an origin: its own numbers, those before it, and what it spoiled."""
    scan = found.scan
    yield Evidence("bad_elements_count", int(scans.nan[scan] + scans.inf[scan]), 0, "none expected")
    yield Evidence("fine_before_count", found.before_count)
    yield Evidence("victims_count", len({victim.path for victim in found.victims}), basis="inferred")
    yield Evidence("inf_count", int(scans.inf[scan]))
    yield Evidence("nan_count", int(scans.nan[scan]))
    yield Evidence("elements_count", int(scans.elements[scan]))
    if scans.first_bad[scan] >= 0:
        yield Evidence("first_bad_element_id", int(scans.first_bad[scan]))
    inputs = len(found.inputs) > 0
    largest = scans.amax[found.inputs] if inputs else scans.amax[scan - 1 : scan]
    if found.before_count and np.isfinite(largest).any():
        yield Evidence("inputs_amax_value" if inputs else "amax_before_value", float(np.nanmax(largest)))
    unseen = int(scans.step[scan]) - found.last_fine_step - 1
    if found.last_fine_step >= 0 and unseen:
        yield Evidence("unseen_steps_count", unseen)


def _known(name: str, value: float) -> Iterator[Evidence]:
    """A number, where there is one."""
    if np.isfinite(value):
        yield Evidence(name, float(value))
