"""Adding to the residual stream and norming the sum: one pass over memory instead of several."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spikeprof.kernels.fused.checks import check_input, rows_of
from spikeprof.kernels.paths import TORCH, check, check_same, check_shape, chosen

MOST_WIDTH = 65536  # a program holds a row


class Normed(NamedTuple):
    """The norm, the residual stream after adding, and the path that made them."""

    out: Tensor
    residual: Tensor
    path: str


def rms_norm_residual(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6, path: str = "auto") -> Normed:
    """``s = x + residual`` and ``s / sqrt(mean(s^2) + eps) * weight``, along the last dimension of [..., hidden].

    The sum is rounded to the dtype before it is normed, in fp32, as separate operators would. Raises ValueError for
    tensors that differ in shape, dtype or device, rows that are not evenly spaced, a hidden size above 65536, and an
    eps that is not above 0.
    """
    check_input("x", x)
    check_shape("residual", residual, tuple(x.shape))
    check_shape("weight", weight, (x.shape[-1],))
    check_same("residual", residual, "x", x)
    check_same("weight", weight, "x", x)
    check(x.shape[-1] <= MOST_WIDTH, f"x has {x.shape[-1]} elements in its last dimension: {MOST_WIDTH} at most")
    check(eps > 0, f"eps is {eps}: it must be above 0")
    rows, residual_rows = rows_of("x", x), rows_of("residual", residual)
    path = chosen(path, x)
    if path == TORCH:
        total = x + residual
        return Normed(_normed(total, weight, eps), total, path)
    from spikeprof.kernels.fused import rms_norm_residual_triton

    out, total = rms_norm_residual_triton.rms_norm_residual(rows, residual_rows, weight.contiguous(), eps)
    return Normed(out.view(x.shape), total.view(x.shape), path)


def rms_norm_residual_unfused(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Normed:
    """The same of separate operators."""
    total = x + residual
    return Normed(_normed(total, weight, eps), total, TORCH)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.to(torch.float32)).to(x.dtype)
