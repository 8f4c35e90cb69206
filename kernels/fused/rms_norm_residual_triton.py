"""Triton kernel of the sum with the residual stream and its norm."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # of a program at least: several rows where they are short
ELEMENTS_PER_WARP = 512


def rms_norm_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Norm and sum; see rms_norm_residual.py. ``x`` and ``residual`` are [rows, hidden]."""
    count, hidden = x.shape
    out, total = (torch.empty((count, hidden), dtype=x.dtype, device=x.device) for _ in range(2))
    width = triton.next_power_of_2(hidden)
    rows = max(ELEMENTS // width, 1)
    warps = min(max(rows * width // ELEMENTS_PER_WARP, 4), 16)
    with torch.cuda.device_of(x):
        rms_norm_residual_kernel[(triton.cdiv(count, rows),)](
            x, residual, weight, out, total, x.stride(0), residual.stride(0), count, hidden, eps,
            ROWS=rows, WIDTH=width, num_warps=warps,
        )  # fmt: skip
    return out, total


@triton.jit
def rms_norm_residual_kernel(x, residual, weight, out, total, x_stride, residual_stride, count, hidden, eps,
                             ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """``ROWS`` whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    mask = (row < count) & (column < hidden)
    own = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    carried = tl.load(residual + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
    rounded = (own + carried).to(total.dtype.element_ty)
    tl.store(total + row * hidden + column, rounded, mask=mask)
    wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / hidden + eps)
    factor = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    result = wide * inverse[:, None] * factor
    tl.store(out + row * hidden + column, result.to(out.dtype.element_ty), mask=mask)
