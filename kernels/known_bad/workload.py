"""What a known-bad workload is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Workload:
    """One defect that a profiler should find, and its good twin.

    ``make(device, small)`` makes the inputs, the same each time; ``bad`` and ``good`` do the same job with them.
    ``differs`` says why their results differ; where it is empty they are the same but for rounding.
    """

    name: str
    defect: str
    shows: str
    make: Callable[[torch.device, bool], Any]
    bad: Callable[[Any], Tensor]
    good: Callable[[Any], Tensor]
    differs: str = ""

    def run(self, *, good: bool = False, device: torch.device | str = "cpu", small: bool = False) -> Tensor:
        """Make the inputs, do the job once, hand back its result. ``small`` is for the CPU and for tests."""
        inputs = self.make(torch.device(device), small)
        return self.good(inputs) if good else self.bad(inputs)


def seeded(seed: int = 0) -> torch.Generator:
    """Inputs are drawn on the CPU, so that they are the same on every device."""
    return torch.Generator().manual_seed(seed)
