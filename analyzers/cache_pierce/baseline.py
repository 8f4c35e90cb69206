"""What is usual for each pattern."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BaselineRow:
    """One pattern's baseline as it is kept on disk: plain values only."""

    tenant: str
    pattern: str
    qps: float  # median of the last baseline_s
    miss_rate: float  # 0-1
    reference_qps: float  # the slow reference
    reference_miss_rate: float
    learned_s: float  # how long it was learned
    updated_s: float  # Unix seconds of event time
