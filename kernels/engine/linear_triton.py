"""x [rows, in] times an INT8 weight [out, in], widened in registers; see linear.py."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikeprof.kernels.attention.dots_triton import dot, operand

LEAST_ROWS, MOST_ROWS = 16, 64  # of a program: the fewest that tl.dot takes; beyond the most a weight is read again
BLOCK_OUT = 32  # small: a decode step has few rows, so only many programs along ``out`` fill the GPU
BLOCK_IN, BLOCK_IN_LONG, LONG = 256, 512, 8192  # along ``in``; longer blocks for few rows that are longer than LONG
NUM_WARPS = 4
NUM_STAGES = 4


@triton.jit
def _int8_linear(x, values, scale, out, rows, outs, ins,
                 BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
                 OPERAND: tl.constexpr):  # fmt: skip
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channel = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for begin in range(0, ins, BLOCK_IN):
        at = begin + tl.arange(0, BLOCK_IN)
        a = tl.load(x + row[:, None].to(tl.int64) * ins + at[None, :],
                    mask=(row < rows)[:, None] & (at < ins)[None, :], other=0.0)  # fmt: skip
        b = tl.load(values + channel[None, :].to(tl.int64) * ins + at[:, None],
                    mask=(channel < outs)[None, :] & (at < ins)[:, None], other=0)  # fmt: skip
        # -127..127 is exact in every float dtype of x.
        total = dot(a, b, total, OPERAND)
    by = tl.load(scale + channel, mask=channel < outs, other=0.0)
    tl.store(out + row[:, None].to(tl.int64) * outs + channel[None, :],
             (total * by[None, :]).to(out.dtype.element_ty),
             mask=(row < rows)[:, None] & (channel < outs)[None, :])  # fmt: skip


def int8_linear(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """``x`` [rows, in] contiguous, ``values`` int8 [out, in] contiguous, ``scale`` fp32 [out] -> [rows, out]."""
    rows, ins = x.shape
    outs = values.shape[0]
    out = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    block_rows = min(max(LEAST_ROWS, triton.next_power_of_2(rows)), MOST_ROWS)
    grid = (triton.cdiv(outs, BLOCK_OUT), triton.cdiv(rows, block_rows))
    block_in = BLOCK_IN_LONG if ins >= LONG and block_rows == LEAST_ROWS else BLOCK_IN
    _int8_linear[grid](x, values, scale, out, rows, outs, ins, block_rows, BLOCK_OUT, block_in, operand(x.dtype),
                       num_warps=NUM_WARPS, num_stages=NUM_STAGES)  # fmt: skip
    return out
