"""Many kernels of a few microseconds where one would do: a softmax for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from spikeprof.kernels.known_bad.workload import Workload, seeded


def make(device: torch.device, small: bool) -> Tensor:
    """Scores [rows, columns], fp32."""
    return torch.randn((64 if small else 2048, 256), generator=seeded()).to(device)


def bad(scores: Tensor) -> Tensor:
    """A launch for each row."""
    out = torch.empty_like(scores)
    for row in range(scores.shape[0]):
        out[row] = scores[row].softmax(0)
    return out


def good(scores: Tensor) -> Tensor:
    """One launch for all rows."""
    return scores.softmax(1)


WORKLOAD = Workload(
    "tiny_kernels",
    "A softmax is launched for each row; each launch costs more than its work.",
    "Thousands of kernels of a few microseconds, as many copies, and a GPU that idles between them.",
    make,
    bad,
    good,
)
