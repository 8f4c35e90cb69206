"""A linear layer with plain or INT8 weights; INT8 has one scale per output channel and is dequantised on the way.

For few rows, as in decode, the product is bound by reading the weight: the Triton kernel reads its bytes and widens
them in registers. For many rows it is bound by arithmetic: the weight is widened once and left to the BLAS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from spikeprof.kernels.paths import TORCH, Ran, check, check_shape, chosen

#: Rows up to which the Triton kernel is taken where the path is "auto".
FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class Int8:
    """A weight [out, in] as ``values * scale[:, None]``: values int8 in -127..127, scale fp32 [out]."""

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return int(self.values.shape[0]), int(self.values.shape[1])


def quantised(weight: Tensor) -> Int8:
    """The weight [out, in], symmetric, each output channel scaled so that its largest magnitude becomes 127."""
    check_shape("weight", weight, (None, None))
    scale = (weight.abs().amax(1).float() / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return Int8((weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale)


def dequantised(weight: Int8, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in ``dtype``."""
    return (weight.values * weight.scale[:, None]).to(dtype)


def linear(x: Tensor, weight: Tensor | Int8, *, path: str = "auto") -> Ran:
    """``x`` [tokens, in] times the weight [out, in] transposed -> [tokens, out].

    Raises ValueError for shapes that do not fit, or a path that cannot be taken. Plain weights always go to torch.
    """
    check_shape("x", x, (None, weight.shape[1]))
    if isinstance(weight, Tensor):
        return Ran(F.linear(x, weight), TORCH)
    path = chosen(path, x) if path != "auto" or x.shape[0] <= FEW_ROWS else TORCH
    if path == TORCH:
        # The scale belongs to the output channel: it can be left until after the product.
        return Ran((F.linear(x, weight.values.to(x.dtype)) * weight.scale).to(x.dtype), TORCH)
    check(x.is_contiguous(), "x is not contiguous: the kernel needs rows one after the other")
    from spikeprof.kernels.engine import linear_triton

    return Ran(linear_triton.int8_linear(x, weight.values, weight.scale), path)
