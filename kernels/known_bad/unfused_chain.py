"""A pointwise function as a chain of kernels, each of which reads and writes all of it: GELU, term by term."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from spikeprof.kernels.known_bad.workload import Workload, seeded


def make(device: torch.device, small: bool) -> Tensor:
    """Activations [tokens, hidden], fp32."""
    shape = (32, 256) if small else (8192, 8192)
    return torch.randn(shape, generator=seeded()).to(device)


def bad(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), an operator at a time."""
    cube = x * x * x
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * cube)
    return 0.5 * x * (1 + torch.tanh(inner))


def good(x: Tensor) -> Tensor:
    """The same function in one kernel."""
    return F.gelu(x, approximate="tanh")


WORKLOAD = Workload(
    "unfused_chain",
    "GELU is computed by nine pointwise kernels, each of which reads and writes the whole tensor.",
    "A run of pointwise kernels at DRAM's rate, each of which reads what the one before it wrote.",
    make,
    bad,
    good,
)
