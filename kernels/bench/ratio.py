"""One row of the table of published claims: what is claimed, what is measured here, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from spikeprof.kernels.bench.peaks import Peaks
from spikeprof.kernels.bench.timing import COLD, WARM, Call, measure


@dataclass(frozen=True, slots=True)
class Setting:
    """Where rows are measured: small shapes on the CPU and in tests."""

    device: torch.device
    small: bool
    runs: int
    peaks: Peaks
    model: str = ""  # a preset or the folder of a checkpoint, and a text: of the row on KV precision
    text: tuple[int, ...] = ()

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return bool(self.device.type == "cuda")

    def medians_ns(self, calls: Mapping[str, Call], l2: str = COLD) -> dict[str, float]:
        """Median of each call, which take turns; on the CPU always warm."""
        times = measure(calls, self.device, l2 if self.is_gpu else WARM, runs=self.runs)
        return {name: each.median_ns for name, each in times.items()}


@dataclass(frozen=True, slots=True)
class Ours:
    """What was measured: a sentence for the table, how it was measured, and the figures by name, for JSON.

    ``text`` is empty, and ``reason`` says why, where nothing was measured.
    """

    text: str
    how: str
    figures: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


def not_measured(reason: str) -> Ours:
    """A row that cannot be measured here, and why."""
    return Ours("", "", reason=reason)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A published claim and the function that measures it."""

    name: str
    experiment: str
    claim: str
    measure: Callable[[Setting], Ours]


def percent(share: float) -> str:
    """A share in percent, as short as it stays true."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 10 else f"{value:.1f} %"
