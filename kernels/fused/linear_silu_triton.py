"""Triton kernel of the linear layer with SiLU in its epilogue."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 8  # rows of tiles that are walked together, so that the L2 keeps what they share


class _Tile(NamedTuple):
    rows: int
    outs: int
    ins: int
    warps: int
    stages: int


def _tile(rows: int, dtype: torch.dtype) -> _Tile:
    if dtype == torch.float32:  # not on tensor cores: sums of a larger tile would leave the registers
        return _Tile(64, 64, 32, 4, 3)
    if rows <= 64:
        return _Tile(max(16, triton.next_power_of_2(rows)), 64, 128, 4, 4)
    return _Tile(256, 128, 64, 8, 3) if rows >= 256 else _Tile(128, 128, 64, 8, 4)


def linear_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See linear_silu.py; ``x`` is [rows, in]."""
    (rows, ins), outs = x.shape, weight.shape[0]
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    tile = _tile(rows, x.dtype)
    with torch.cuda.device_of(x):
        linear_silu_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(outs, tile.outs),)](
            x, weight, bias, out, x.stride(0), weight.stride(0), rows, outs, ins,
            ROWS=tile.rows, OUTS=tile.outs, INS=tile.ins, GROUP=GROUP,
            WIDEN=x.dtype == torch.bfloat16 and not x.is_cuda,  # the interpreter has no products of bfloat16
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


@triton.jit
def linear_silu_kernel(x, weight, bias, out, x_stride, weight_stride, rows, outs, ins,
                       ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, GROUP: tl.constexpr,
                       WIDEN: tl.constexpr):  # fmt: skip
    """One tile of the output."""
    program = tl.program_id(0)
    across = tl.cdiv(outs, OUTS)
    group = program // (GROUP * across)
    first = group * GROUP
    members = tl.minimum(tl.cdiv(rows, ROWS) - first, GROUP)
    within = program % (GROUP * across)
    row = (first + within % members) * ROWS + tl.arange(0, ROWS)
    column = (within // members) * OUTS + tl.arange(0, OUTS)
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + column.to(tl.int64)[None, :] * weight_stride
    total = tl.zeros((ROWS, OUTS), tl.float32)
    for begin in range(0, ins, INS):
        at = begin + tl.arange(0, INS)
        a = tl.load(x_rows + at[None, :], mask=(row < rows)[:, None] & (at < ins)[None, :], other=0.0)
        b = tl.load(weight_rows + at[:, None], mask=(column < outs)[None, :] & (at < ins)[:, None], other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    total += tl.load(bias + column, mask=column < outs, other=0.0).to(tl.float32)[None, :]
    result = total / (1.0 + tl.exp(-total))
    place = out + row.to(tl.int64)[:, None] * outs + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outs)[None, :])
