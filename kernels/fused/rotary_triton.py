"""Triton kernel of the rotary embedding."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # of a program: heads times channels, of one token
WARPS = 4


def rotary(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """See rotary.py."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    half = triton.next_power_of_2(head_dim // 2)
    block = min(max(ELEMENTS // (2 * half), 1), triton.next_power_of_2(heads))
    q_blocks = triton.cdiv(heads, block)
    with torch.cuda.device_of(q):
        rotary_kernel[(tokens, q_blocks + triton.cdiv(kv_heads, block))](
            q, k, positions, table, *outs, q.stride(0), q.stride(1), k.stride(0), k.stride(1), positions.stride(0),
            table.shape[0], heads, kv_heads, q_blocks, HALF=head_dim // 2, WIDTH=half, HEADS=block, num_warps=WARPS,
        )  # fmt: skip
    return outs[0], outs[1]


@triton.jit
def rotary_kernel(q, k, positions, table, q_out, k_out,
                  q_token_stride, q_head_stride, k_token_stride, k_head_stride, position_stride,
                  positions_count, heads, kv_heads, q_blocks,
                  HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """``HEADS`` heads of one token's queries or keys."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions + token * position_stride).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    place = position + channel * 0  # a block: the interpreter takes no mask that is made of scalars
    known = (channel < HALF) & (place >= 0) & (place < positions_count)
    angle = table + position * (2 * HALF) + channel
    cos = tl.load(angle, mask=known, other=float("nan"))[None, :]
    sin = tl.load(angle + HALF, mask=known, other=float("nan"))[None, :]
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        _turn(q + token * q_token_stride, q_head_stride, q_out + token * heads * (2 * HALF), head, heads, cos, sin,
              HALF, WIDTH)  # fmt: skip
    else:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        _turn(k + token * k_token_stride, k_head_stride, k_out + token * kv_heads * (2 * HALF), head, kv_heads, cos,
              sin, HALF, WIDTH)  # fmt: skip


@triton.jit
def _turn(source, head_stride, target, head, heads, cos, sin, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Both halves of some heads of one token."""
    channel = tl.arange(0, WIDTH)[None, :]
    mask = (head < heads)[:, None] & (channel < HALF)
    place = source + head[:, None] * head_stride + channel
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    result = target + head[:, None] * (2 * HALF) + channel
    tl.store(result, (first * cos - second * sin).to(target.dtype.element_ty), mask=mask)
    tl.store(result + HALF, (second * cos + first * sin).to(target.dtype.element_ty), mask=mask)
