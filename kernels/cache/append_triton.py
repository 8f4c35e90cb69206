"""Triton kernel that puts a step's keys and values of one layer into pages, quantised on the way, in one launch."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikeprof.kernels.cache.pages import Quantised
from spikeprof.kernels.cache.quant import LEAST_SCALE, MOST_ZERO, ROUND_UP
from spikeprof.kernels.cache.usage import INT4_GROUP

ELEMENTS = 1024  # of a program: heads times channels
WARPS = 4
_MOST_ZERO = tl.constexpr(MOST_ZERO)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_FACTOR, _SUMMAND = tl.constexpr(ROUND_UP[0]), tl.constexpr(ROUND_UP[1])
_GROUP = tl.constexpr(INT4_GROUP)
_INFINITY = tl.constexpr(float("inf"))


def append(key_store: Tensor | Quantised, value_store: Tensor | Quantised, slots: Tensor, keys: Tensor, values: Tensor):
    """Write keys and values [tokens, kv_heads, head_dim], whose channels are neighbours, to flat slots."""
    tokens, kv_heads, head_dim = keys.shape
    width = triton.next_power_of_2(head_dim)
    heads = min(max(ELEMENTS // width, 1), triton.next_power_of_2(kv_heads))
    key_parts, key_bits = _parts(key_store)
    value_parts, value_bits = _parts(value_store)
    with torch.cuda.device_of(keys):
        append_kernel[(tokens, triton.cdiv(kv_heads, heads))](
            slots,
            keys, keys.stride(0), keys.stride(1), *key_parts,
            values, values.stride(0), values.stride(1), *value_parts,
            kv_heads, key_parts[0].shape[2],
            KEY_BITS=key_bits, VALUE_BITS=value_bits, HEAD_DIM=head_dim, WIDTH=width, HEADS=heads, num_warps=WARPS,
        )  # fmt: skip


def _parts(stored: Tensor | Quantised) -> tuple[tuple[Any, Any, Any], int]:
    if isinstance(stored, Quantised):
        return (stored.values, stored.scale, stored.zero), stored.bits
    return (stored, None, None), 0


@triton.jit
def append_kernel(slots,
                  keys, key_token_stride, key_head_stride, key_store, key_scale, key_zero,
                  values, value_token_stride, value_head_stride, value_store, value_scale, value_zero,
                  kv_heads, page_size,
                  KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
                  HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """``HEADS`` heads of one token, keys and values; 0 bits are as they come."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots + token)
    row = (slot // page_size * kv_heads + head) * page_size + slot % page_size
    key = keys + token * key_token_stride + head * key_head_stride
    value = values + token * value_token_stride + head * value_head_stride
    _put(key, key_store, key_scale, key_zero, row, head < kv_heads, KEY_BITS, HEAD_DIM, WIDTH)
    _put(value, value_store, value_scale, value_zero, row, head < kv_heads, VALUE_BITS, HEAD_DIM, WIDTH)


@triton.jit
def _put(source, stored, scale, zero, row, inside,
         BITS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """One side: a row of channels from each source pointer to each row of the store."""
    if BITS == 0:
        channel = tl.arange(0, WIDTH)[None, :]
        mask = inside[:, None] & (channel < HEAD_DIM)
        x = tl.load(source[:, None] + channel, mask=mask, other=0.0)
        tl.store(stored + row[:, None] * HEAD_DIM + channel, x, mask=mask)
    elif BITS == 8:
        _put_quantised(source, stored, scale, zero, row, inside, 8, 1, 1, HEAD_DIM, WIDTH)
    else:
        _put_quantised(source, stored, scale, zero, row, inside, 4, HEAD_DIM // _GROUP, WIDTH // _GROUP, _GROUP, _GROUP)


@triton.jit
def _put_quantised(source, stored, scale, zero, row, inside, BITS: tl.constexpr,
                   GROUPS: tl.constexpr, GROUPS_WIDTH: tl.constexpr,
                   SPAN: tl.constexpr, SPAN_WIDTH: tl.constexpr):  # fmt: skip
    """``GROUPS`` of ``SPAN`` channels, each in a tile that is a power of two wide."""
    LEVELS: tl.constexpr = 255 if BITS == 8 else 15
    group = tl.arange(0, GROUPS_WIDTH)[None, :]
    within = tl.arange(0, SPAN_WIDTH)[None, None, :]
    channel = group[:, :, None] * SPAN + within
    group_mask = inside[:, None] & (group < GROUPS)
    mask = group_mask[:, :, None] & (within < SPAN)
    x = tl.load(source[:, None, None] + channel, mask=mask, other=0.0).to(tl.float32)
    low = tl.min(tl.where(within < SPAN, x, _INFINITY), axis=2)
    high = tl.max(tl.where(within < SPAN, x, -_INFINITY), axis=2)
    half, step, nought = _pair(low, high, tl.sum(x - x, axis=2), LEVELS)
    level = tl.floor(tl.div_rn(x, step[:, :, None]) + nought[:, :, None] + 0.5)
    level = tl.minimum(tl.maximum(level, 0.0), LEVELS * 1.0).to(tl.int32).to(tl.uint8)
    if BITS == 4:
        even, odd = tl.split(tl.reshape(level, [level.shape[0], GROUPS_WIDTH, SPAN // 2, 2]))
        byte = group[:, :, None] * (SPAN // 2) + tl.arange(0, SPAN // 2)[None, None, :]
        target = stored + row[:, None, None] * (GROUPS * SPAN // 2) + byte
        tl.store(target, even | (odd << 4), mask=group_mask[:, :, None])
    else:
        tl.store(stored + row[:, None, None] * (GROUPS * SPAN) + channel, level, mask=mask)
    at = row[:, None] * GROUPS + group
    tl.store(scale + at, half, mask=group_mask)
    tl.store(zero + at, nought.to(tl.float16), mask=group_mask)


@triton.jit
def _pair(low, high, spoilt, LEVELS: tl.constexpr):
    """Scale in fp16, the same in fp32, zero point; as ``quant.quantise``.

    ``spoilt`` is NaN where a value is NaN or infinite, else 0: the extremes of a tile leave NaN out.
    """
    size = tl.maximum(tl.abs(low), tl.abs(high))
    exact = tl.maximum(tl.div_rn(high - low, LEVELS * 1.0), size * (1 / _MOST_ZERO))
    half = (tl.maximum(exact, _LEAST_SCALE) * _FACTOR + _SUMMAND + spoilt).to(tl.float16)
    step = half.to(tl.float32)
    return half, step, tl.floor(0.5 - tl.div_rn(low, step))
