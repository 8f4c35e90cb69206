"""Triton kernel of SiLU and product."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # of a program: along a row, or along all rows where they follow one another
WARPS = 4


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See silu_mul.py; both are [rows, n]."""
    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
    if gate.is_contiguous() and up.is_contiguous():
        rows, width = 1, rows * width
    blocks = triton.cdiv(width, ELEMENTS)
    with torch.cuda.device_of(gate):
        silu_mul_kernel[(rows * blocks,)](
            gate, up, out, gate.stride(0), up.stride(0), width, blocks, ELEMENTS=ELEMENTS, num_warps=WARPS
        )
    return out


@triton.jit
def silu_mul_kernel(gate, up, out, gate_stride, up_stride, width, blocks, ELEMENTS: tl.constexpr):
    """``ELEMENTS`` of one row."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = column < width
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = x / (1.0 + tl.exp(-x)) * y
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)
