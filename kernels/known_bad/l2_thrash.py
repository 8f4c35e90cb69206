"""Passes over a buffer that is a little larger than L2: each evicts what the next will read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spikeprof.kernels.known_bad.workload import Workload, seeded

L2_RATIO = 1.5  # the buffer's size in L2s
PIECES = 3
STEPS = ((1.01, 0.5), (0.99, -0.25), (1.02, 0.125), (0.98, -0.5))  # x <- a x + b, two kernels each


class Buffer(NamedTuple):
    """The initial content, fp32 [elements]."""

    start: Tensor


def make(device: torch.device, small: bool) -> Buffer:
    """A buffer of one and a half L2s, which each kernel reads and writes in place."""
    l2_bytes = 50 << 20
    if device.type == "cuda":
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    elements = 3072 if small else int(L2_RATIO * l2_bytes) // 4 // PIECES * PIECES
    return Buffer(torch.randn(elements, generator=seeded()).to(device))


def bad(buffer: Buffer) -> Tensor:
    """Every step over the whole buffer before the next step."""
    out = buffer.start.clone()
    _steps(out)
    return out


def good(buffer: Buffer) -> Tensor:
    """All steps over a piece that fits in L2, then the next piece."""
    out = buffer.start.clone()
    for piece in out.chunk(PIECES):
        _steps(piece)
    return out


def _steps(x: Tensor) -> None:
    for factor, summand in STEPS:
        x.mul_(factor)
        x.add_(summand)


WORKLOAD = Workload(
    "l2_thrash",
    "Eight steps run one after the other over a buffer of 1.5 L2s: each evicts what the next one reads.",
    "Kernels near DRAM's peak that move 1 to 4 L2s each and read back what the kernel before them wrote.",
    make,
    bad,
    good,
)
