"""Triton kernel of the rotary embedding."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # of a program: heads times channels, of one token
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
    """``HEADS`` heads of one token's queries or keys.

    They are loaded before the angles, which wait for the position: the two waits then pass together.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    head = block * HEADS + tl.arange(0, HEADS)
    if block < q_blocks:
        first, second = _halves(q + token * q_token_stride, q_head_stride, head, heads, HALF, WIDTH)
    else:
        head -= q_blocks * HEADS
        first, second = _halves(k + token * k_token_stride, k_head_stride, head, kv_heads, HALF, WIDTH)
    position = tl.load(positions + token * position_stride).to(tl.int64)
    inside = min(max(position, 0), positions_count - 1)
    channel = tl.arange(0, WIDTH)
    angle = table + inside * (2 * HALF) + channel
    # Every head and, mostly, every sequence reads the same ones.
    cos = _angles(angle, channel, HALF, WIDTH)[None, :]
    sin = _angles(angle + HALF, channel, HALF, WIDTH)[None, :]
    # 0, or NaN where the table lacks the position: of scalars, so that a thread needs no more registers than an SM has
    # for 2,048 of them.
    lacking = tl.where(position == inside, 0.0, float("nan"))
    low, high = first * cos - second * sin + lacking, second * cos + first * sin + lacking
    if block < q_blocks:
        _store(q_out + token * heads * (2 * HALF), low, high, head, heads, HALF, WIDTH)
    else:
        _store(k_out + token * kv_heads * (2 * HALF), low, high, head, kv_heads, HALF, WIDTH)


@triton.jit
def _angles(place, channel, HALF: tl.constexpr, WIDTH: tl.constexpr):
    if HALF == WIDTH:
        angles = tl.load(place, eviction_policy="evict_last")
    else:
        angles = tl.load(place, mask=channel < HALF, other=0.0, eviction_policy="evict_last")
    return angles


@triton.jit
def _halves(source, head_stride, head, heads, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Both halves of some heads of one token, in float32."""
    channel = tl.arange(0, WIDTH)[None, :]
    mask = _mask(head, heads, channel, HALF, WIDTH)
    place = source + head[:, None] * head_stride + channel
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _mask(head, heads, channel, HALF: tl.constexpr, WIDTH: tl.constexpr):
    mask = (head < heads)[:, None]
    if HALF != WIDTH:
        mask = mask & (channel < HALF)
    return mask


@triton.jit
def _store(target, low, high, head, heads, HALF: tl.constexpr, WIDTH: tl.constexpr):
    channel = tl.arange(0, WIDTH)[None, :]
    mask = _mask(head, heads, channel, HALF, WIDTH)
    place = target + head[:, None] * (2 * HALF) + channel
    tl.store(place, low.to(target.dtype.element_ty), mask=mask)
    tl.store(place + HALF, high.to(target.dtype.element_ty), mask=mask)
