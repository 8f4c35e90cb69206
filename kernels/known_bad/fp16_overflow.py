"""A feed-forward layer whose activations overflow fp16: squared ReLU of an outlier channel, then a norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spikeprof.kernels.known_bad.workload import Workload, seeded

OUTLIER = 40.0  # of the first channel of every token; activations in fp16 models reach some hundreds
SCALE = 2.0**-6  # a power of two: it costs no precision
EPSILON = 1e-5
_FP16_MAX = 65504


class Layer(NamedTuple):
    """Tokens [tokens, hidden], weights [hidden, ffn] and [ffn, hidden], fp16."""

    x: Tensor
    up: Tensor
    down: Tensor


def make(device: torch.device, small: bool) -> Layer:
    """The outlier meets weights of 8 in every fourth channel: 320² = 102,400 does not fit in fp16."""
    tokens, hidden = (8, 32) if small else (2048, 2048)
    generator = seeded()
    x = torch.randn((tokens, hidden), generator=generator)
    up = torch.randn((hidden, 4 * hidden), generator=generator) / hidden**0.5
    down = torch.randn((4 * hidden, hidden), generator=generator) / (4 * hidden) ** 0.5
    x[:, 0] = OUTLIER
    up[0, ::4] = 8.0
    return Layer(*(part.half().to(device) for part in (x, up, down)))


def bad(layer: Layer) -> Tensor:
    """All in fp16: the square is inf, its products inf or NaN, the norm NaN."""
    hidden = torch.relu(layer.x @ layer.up) ** 2 @ layer.down
    return hidden * torch.rsqrt((hidden * hidden).mean(1, keepdim=True) + EPSILON)


def good(layer: Layer) -> Tensor:
    """Scaled before the square, undone by the norm, whose sum of squares is in fp32."""
    hidden = ((torch.relu(layer.x @ layer.up) * SCALE) ** 2 @ layer.down).float()
    return (hidden * torch.rsqrt((hidden * hidden).mean(1, keepdim=True) + EPSILON * SCALE**4)).half()


def reference(layer: Layer) -> Tensor:
    """What the layer means, in float64."""
    x, up, down = (part.double() for part in layer)
    hidden = torch.relu(x @ up) ** 2 @ down
    return hidden * torch.rsqrt((hidden * hidden).mean(1, keepdim=True) + EPSILON)


WORKLOAD = Workload(
    "fp16_overflow",
    f"Squared activations of an outlier channel pass the largest fp16 number ({_FP16_MAX:,}).",
    "inf in a quarter of the squared activations, NaN in all that the layer hands on.",
    make,
    bad,
    good,
    differs="the bad twin overflows: its result is not finite",
)
