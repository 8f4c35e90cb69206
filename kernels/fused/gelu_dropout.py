"""GELU, then dropout: one pass over memory instead of two, or of three with a stored mask."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from spikeprof.kernels.fused.checks import check_input
from spikeprof.kernels.fused.dropout import check_dropout, dropout_mask, keep_scale
from spikeprof.kernels.paths import TORCH, Ran, check, chosen


def gelu_dropout(x: Tensor, p: float, *, seed: int, path: str = "auto") -> Ran:
    """``dropout(gelu(x), p)``, GELU by the error function, in fp32 inside; the output is as ``x``.

    The same seed drops the same elements on every path, device and block size, see ``dropout_mask``. Raises ValueError
    for a tensor that is empty, not contiguous or of another dtype than fp16, bf16 and fp32, p outside of [0, 1), and a
    seed below 0 or of more than 63 bits.
    """
    check_input("x", x)
    check(x.is_contiguous(), f"x has strides {list(x.stride())}: it must be contiguous")
    check_dropout(p, seed)
    path = chosen(path, x)
    if path == TORCH:
        return Ran(_dropped(F.gelu(x.float()), p, seed).to(x.dtype), path)
    from spikeprof.kernels.fused import gelu_dropout_triton

    return Ran(gelu_dropout_triton.gelu_dropout(x, p, seed), path)


def gelu_dropout_unfused(x: Tensor, p: float, *, seed: int | None = None) -> Ran:
    """The same of separate operators: with a seed it drops what ``gelu_dropout`` drops; without, as torch likes."""
    if seed is None:
        return Ran(F.dropout(F.gelu(x), p), TORCH)
    check_dropout(p, seed)
    return Ran(_dropped(F.gelu(x), p, seed), TORCH)


def _dropped(x: Tensor, p: float, seed: int) -> Tensor:
    # A product, not a choice: 0 times NaN is NaN, and stays visible.
    return x * dropout_mask(seed, x.shape, p, device=x.device) * keep_scale(p)
