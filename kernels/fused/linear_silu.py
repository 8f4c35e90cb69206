"""A linear layer with SiLU in its epilogue: the product is not written and read again."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from spikeprof.kernels.fused.checks import check_input, rows_of
from spikeprof.kernels.paths import TORCH, Ran, check_same, check_shape, chosen


def linear_silu(x: Tensor, weight: Tensor, bias: Tensor, *, path: str = "auto") -> Ran:
    """``silu(x @ weight.T + bias)`` [..., out] of x [..., in], weight [out, in], bias [out]; sums are kept in fp32.

    fp32 is multiplied as such, not in TF32. Raises ValueError for shapes, dtypes or devices that do not fit, empty
    tensors, and rows of ``x`` or ``weight`` that are not evenly spaced.
    """
    check_input("x", x)
    check_input("weight", weight)
    check_shape("weight", weight, (None, x.shape[-1]))
    check_shape("bias", bias, (weight.shape[0],))
    check_same("weight", weight, "x", x)
    check_same("bias", bias, "x", x)
    rows, weight = rows_of("x", x), rows_of("weight", weight)
    path = chosen(path, x)
    if path == TORCH:
        return linear_silu_unfused(x, weight, bias)
    from spikeprof.kernels.fused import linear_silu_large_triton, linear_silu_triton

    kernel = linear_silu_large_triton if linear_silu_large_triton.takes(rows, weight) else linear_silu_triton
    out = kernel.linear_silu(rows, weight, bias.contiguous())
    return Ran(out.view(*x.shape[:-1], weight.shape[0]), path)


def linear_silu_unfused(x: Tensor, weight: Tensor, bias: Tensor) -> Ran:
    """The same of separate operators."""
    return Ran(F.silu(F.linear(x, weight, bias)), TORCH)
