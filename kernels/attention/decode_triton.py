"""The Triton kernels of decode attention: one reads a part of a sequence, the other puts the parts together."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikeprof.kernels.attention.dots_triton import LN2, dot, operand

if TYPE_CHECKING:
    from spikeprof.kernels.cache.pages import Quantised

_PLAIN_BITS = tl.constexpr(16)  # of whatever float
_LEAST_ROWS, _LEAST_COLUMNS = 16, 16  # of a product on tensor cores
_PARTS_AT_A_TIME = 8  # in the reduction
# What weights are multiplied with beside the values' scale, which alone would take them below what fp16 resolves. The
# scale of values in fp16 is at most 131008 / 255: the product stays in its range.
_LIFT = tl.constexpr(64.0)
# What is taken off 8-bit numbers before they are multiplied: their sums then stay small. Of numbers that all are
# positive a sum grows so large that what tensor cores cut off shows in what is left when the zero is taken away.
_MIDDLE = tl.constexpr(128)


class _Tile(NamedTuple):
    """Tokens that a program takes at a time, and how it is launched."""

    tokens: int
    warps: int
    stages: int


def _tile(head_dim: int, dtype: torch.dtype, bits: int) -> _Tile:
    """``bits`` of a key or value, whichever has fewer. What measured best on an H200: benchmarks/tune_kernels.py."""
    if dtype == torch.float32:
        return _Tile(32, 4, 3) if head_dim <= 128 else _Tile(16, 4, 3)
    if head_dim > 128:
        return _Tile(32, 4, 3)
    return {16: _Tile(64, 4, 2), 8: _Tile(32, 2, 3), 4: _Tile(64, 2, 2)}[bits]


def decode(
    q: Tensor,
    keys: Tensor | Quantised,
    values: Tensor | Quantised,
    table: Tensor | None,
    lengths: Tensor,
    window: int | None,
    scale: float,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; the arguments are checked already. ``table`` None: row b of the cache is sequence b's."""
    batch, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = (keys if isinstance(keys, Tensor) else keys.values).shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    parts, parts_lse = out, lse
    if splits > 1:
        parts = torch.empty(batch, heads, splits, head_dim, dtype=torch.float32, device=q.device)
        parts_lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device)
    tile = _tile(head_dim, q.dtype, min(_bits(keys), _bits(values)))
    group = heads // kv_heads
    half = head_dim // 2
    with torch.cuda.device_of(q):
        _decode_part[(batch * kv_heads * splits,)](
            *(q, *_tensors(keys), *_tensors(values), table if table is not None else lengths, lengths),
            *(parts, parts_lse),
            *(*q.stride()[:2], *_strides(keys), *_strides(values), table.stride(0) if table is not None else 0),
            *(kv_heads, splits, scale / math.log(2), window or 0),
            WINDOWED=window is not None,
            PAGE=page_size if table is not None else 0,
            HALF=half,
            COLUMNS=max(_LEAST_COLUMNS, triton.next_power_of_2(half)),
            KEY_FOLDED=_bits(keys) < _PLAIN_BITS.value and _groups(keys) == 1,
            VALUE_FOLDED=_bits(values) < _PLAIN_BITS.value and _groups(values) == 1,
            GROUP=group,
            ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)),
            TOKENS=tile.tokens,
            KEY_BITS=_bits(keys),
            KEY_GROUPS=_groups(keys),
            VALUE_BITS=_bits(values),
            VALUE_GROUPS=_groups(values),
            OPERAND=operand(q.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            _merge_parts[(batch * heads,)](
                *(parts, parts_lse, out, lse, splits),
                HEAD_DIM=head_dim,
                COLUMNS=triton.next_power_of_2(head_dim),
                PARTS=_PARTS_AT_A_TIME,
                num_warps=4,
            )
    return out, lse


def _tensors(stored: Tensor | Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """What is stored, its scale and its zero; plain tensors have none, and theirs are not read."""
    return (stored, stored, stored) if isinstance(stored, Tensor) else (stored.values, stored.scale, stored.zero)


def _strides(stored: Tensor | Quantised) -> tuple[int, ...]:
    """From page to page, head to head, token to token: of what is stored, and of scale and zero."""
    rows, scale, _ = _tensors(stored)
    return (*rows.stride()[:3], *scale.stride()[:3])


def _bits(stored: Tensor | Quantised) -> int:
    return int(_PLAIN_BITS.value) if isinstance(stored, Tensor) else stored.bits


def _groups(stored: Tensor | Quantised) -> int:
    return 1 if isinstance(stored, Tensor) else int(stored.scale.shape[-1])


@triton.jit(do_not_specialize=["table_row", "splits"])  # which grow while sequences do
def _decode_part(
    q_ptr, key_ptr, key_scale_ptr, key_zero_ptr, value_ptr, value_scale_ptr, value_zero_ptr, table_ptr, lengths_ptr,
    out_ptr, lse_ptr,
    q_batch, q_head, key_page, key_head, key_token, key_scale_page, key_scale_head, key_scale_token,
    value_page, value_head, value_token, value_scale_page, value_scale_head, value_scale_token, table_row,
    kv_heads, splits, scale, window,
    WINDOWED: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    KEY_FOLDED: tl.constexpr, VALUE_FOLDED: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, KEY_BITS: tl.constexpr, KEY_GROUPS: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_GROUPS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """All query heads of one key-value head over one part of one sequence; ``scale`` is for scores in base 2.

    Channels are taken in two halves, each with products of its own: even and odd ones of 4 bits, which share bytes and
    are never put back in order; else the lower and the upper ones.

    Folded: where a token has one scale and zero for all its channels, the product is of what is stored, and scale and
    zero go into its score, or its weight: work for each token instead of each channel.
    """
    program = tl.program_id(0)
    part, batch, kv_head = program % splits, program // splits // kv_heads, (program // splits % kv_heads).to(tl.int64)
    begin, end = _tokens_of(part, splits, tl.load(lengths_ptr + batch), window, WINDOWED, TOKENS)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    valid = (rows < GROUP)[:, None] & (columns < HALF)[None, :]
    head = kv_head * GROUP + rows
    q_rows = q_ptr + batch.to(tl.int64) * q_batch + head[:, None] * q_head
    q_low = tl.load(q_rows + _low(columns, KEY_BITS)[None, :], mask=valid, other=0.0)
    q_high = tl.load(q_rows + _high(columns, KEY_BITS, HALF)[None, :], mask=valid, other=0.0)
    q_sum = tl.sum(q_low.to(tl.float32), 1) + tl.sum(q_high.to(tl.float32), 1)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total, offset = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    low, high = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    # The pages of the next tokens are looked up a turn ahead: their loads can then start as early as any.
    entries = table_ptr + batch.to(tl.int64) * table_row
    if PAGE:
        coming = _pages_of(entries, begin, end, PAGE, TOKENS)
    for start in tl.range(begin, end, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        inside = tokens < end
        if PAGE:
            page = coming.to(tl.int64)
            slot = tokens % PAGE
            coming = _pages_of(entries, start + TOKENS, end, PAGE, TOKENS)
        else:
            page = batch.to(tl.int64)
            slot = tokens.to(tl.int64)
        k_low, k_high, k_scale, k_zero = _halves(
            key_ptr, key_scale_ptr, key_zero_ptr, page, kv_head, slot, inside, key_page, key_head, key_token,
            key_scale_page, key_scale_head, key_scale_token, KEY_BITS, KEY_GROUPS, KEY_FOLDED, HALF, COLUMNS,
            q_ptr.dtype.element_ty)  # fmt: skip
        v_low, v_high, v_scale, v_zero = _halves(
            value_ptr, value_scale_ptr, value_zero_ptr, page, kv_head, slot, inside, value_page, value_head,
            value_token, value_scale_page, value_scale_head, value_scale_token, VALUE_BITS, VALUE_GROUPS, VALUE_FOLDED,
            HALF, COLUMNS, q_ptr.dtype.element_ty)  # fmt: skip

        scores = dot(q_high, tl.trans(k_high), dot(q_low, tl.trans(k_low), None, OPERAND), OPERAND)
        if KEY_FOLDED:
            scores = (scores - q_sum[:, None] * k_zero[None, :]) * k_scale[None, :]
        scores = tl.where(inside[None, :], scores * scale, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1))  # a tile has at least one token: never -inf
        weights = tl.exp2(scores - highest[:, None])
        kept = tl.exp2(best - highest)
        total = total * kept + tl.sum(weights, 1)
        if VALUE_FOLDED:  # the offset is of rounded weights: what comes with the stored values is taken away exactly
            weights = (weights * (v_scale * _LIFT)[None, :]).to(q_ptr.dtype.element_ty)
            offset = offset * kept + tl.sum(weights.to(tl.float32) * v_zero[None, :], 1)
        weights = weights.to(q_ptr.dtype.element_ty)
        low = dot(weights, v_low, low * kept[:, None], OPERAND)
        high = dot(weights, v_high, high * kept[:, None], OPERAND)
        best = highest

    if VALUE_FOLDED:
        low = (low - offset[:, None]) / _LIFT
        high = (high - offset[:, None]) / _LIFT
    total = tl.where(total == 0.0, 1.0, total)  # where nothing was seen; NaN stays
    # Heads of a sequence, and parts of a head, lie one after the other.
    written = ((batch * kv_heads + kv_head) * GROUP + rows) * splits + part
    _write(out_ptr + written[:, None] * (2 * HALF), low / total[:, None], high / total[:, None], columns, valid,
           VALUE_BITS, HALF)  # fmt: skip
    tl.store(lse_ptr + written, (best + tl.log2(total)) * LN2, mask=rows < GROUP)


@triton.jit
def _tokens_of(part, splits, length, window, WINDOWED: tl.constexpr, TOKENS: tl.constexpr):
    """The first token of a part, and the one past its last."""
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    tokens_a_part = tl.cdiv(tl.cdiv(length - first, splits), TOKENS) * TOKENS
    begin = first + part * tokens_a_part
    return begin, tl.minimum(begin + tokens_a_part, length)


@triton.jit
def _write(rows_ptr, low, high, columns, valid, BITS: tl.constexpr, HALF: tl.constexpr):
    kind = rows_ptr.dtype.element_ty
    tl.store(rows_ptr + _low(columns, BITS)[None, :], low.to(kind), mask=valid)
    tl.store(rows_ptr + _high(columns, BITS, HALF)[None, :], high.to(kind), mask=valid)


@triton.jit
def _pages_of(entries, start, end, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """The page of each token from ``start``; entries past ``end`` are not read."""
    tokens = start + tl.arange(0, TOKENS)
    return tl.load(entries + tokens // PAGE, mask=tokens < end, other=0)


@triton.jit
def _low(columns, BITS: tl.constexpr):
    return columns * 2 if BITS == 4 else columns


@triton.jit
def _high(columns, BITS: tl.constexpr, HALF: tl.constexpr):
    return columns * 2 + 1 if BITS == 4 else columns + HALF


@triton.jit
def _halves(
    ptr, scale_ptr, zero_ptr, page, head, slot, inside, of_page, of_head, of_token, scale_of_page, scale_of_head,
    scale_of_token, BITS: tl.constexpr, GROUPS: tl.constexpr, FOLDED: tl.constexpr, HALF: tl.constexpr,
    COLUMNS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Two [tokens, columns] of ``KIND``; 0 for tokens that are not ``inside``: nothing of them is read.

    They are dequantised, unless ``FOLDED``: then [tokens] of scale and zero, in float32, come with them.
    """
    columns = tl.arange(0, COLUMNS)
    loaded = inside[:, None]
    if COLUMNS != HALF:
        loaded = loaded & (columns < HALF)[None, :]
    rows = ptr + (page * of_page + head * of_head + slot * of_token)[:, None]
    low = tl.load(rows + columns[None, :], mask=loaded, other=0)
    if BITS == 4:
        high = low >> 4
        low = low & 15
    else:
        high = tl.load(rows + (columns + HALF)[None, :], mask=loaded, other=0)
    scale = tl.zeros(slot.shape, tl.float32)
    zero = tl.zeros(slot.shape, tl.float32)
    if FOLDED:
        one = page * scale_of_page + head * scale_of_head + slot * scale_of_token
        scale = tl.load(scale_ptr + one, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(zero_ptr + one, mask=inside, other=0.0).to(tl.float32) - _MIDDLE
        low, high = _widened(low, KIND, _MIDDLE), _widened(high, KIND, _MIDDLE)
    elif BITS < 16:
        SPAN: tl.constexpr = COLUMNS if GROUPS == 1 else HALF // GROUPS  # columns of a half that share a pair
        pairs = tl.arange(0, COLUMNS // SPAN)
        paired = inside[:, None] & (pairs < GROUPS)[None, :]
        pair = (page * scale_of_page + head * scale_of_head + slot * scale_of_token)[:, None] + pairs[None, :]
        scales = tl.load(scale_ptr + pair, mask=paired, other=0.0)
        zeros = tl.load(zero_ptr + pair, mask=paired, other=0.0)
        low = _dequantised(low, scales, zeros, SPAN, KIND)
        high = _dequantised(high, scales, zeros, SPAN, KIND)
    return low, high, scale, zero


@triton.jit
def _widened(stored, KIND: tl.constexpr, LESS: tl.constexpr):
    """Bytes as ``KIND``, less a whole number: exact in any kind."""
    if KIND.is_fp16():
        # A byte below the leading bit of 1024 is 1024 more in fp16: cheaper than to convert it.
        wide = (stored.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + LESS)
    else:
        wide = (stored.to(tl.float32) - LESS).to(KIND)
    return wide


@triton.jit
def _dequantised(stored, scale, zero, SPAN: tl.constexpr, KIND: tl.constexpr):
    """``scale * (stored - zero)``: in fp16 where that is wanted, which rounds twice but is half the work."""
    tokens: tl.constexpr = stored.shape[0]
    columns: tl.constexpr = stored.shape[1]
    work: tl.constexpr = tl.float16 if KIND.is_fp16() else tl.float32
    grouped = tl.reshape(stored, [tokens, columns // SPAN, SPAN])
    plain = (_widened(grouped, work, 0) - zero.to(work)[:, :, None]) * scale.to(work)[:, :, None]
    return tl.reshape(plain, [tokens, columns]).to(KIND)


@triton.jit(do_not_specialize=["splits"])
def _merge_parts(
    parts_ptr, parts_lse_ptr, out_ptr, lse_ptr, splits, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: parts weigh the exponential of their log-sum-exp."""
    head = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    out = tl.zeros([1, COLUMNS], tl.float32)
    for start in tl.range(0, splits, PARTS):
        parts = start + tl.arange(0, PARTS)
        rows = (head * splits + parts)[:, None] * HEAD_DIM + columns[None, :]
        lse = tl.load(parts_lse_ptr + head * splits + parts, mask=parts < splits, other=float("-inf"))
        valid = (parts < splits)[:, None] & (columns < HEAD_DIM)[None, :]
        part = tl.load(parts_ptr + rows, mask=valid, other=0.0)
        highest = tl.maximum(best, tl.max(lse, 0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # -inf less -inf is not a number
        weights = tl.exp(lse - shift)
        kept = tl.exp(best - shift)
        total = total * kept + tl.sum(weights, 0)
        out = out * kept[:, None] + tl.sum(part * weights[:, None], 0)[None, :]
        best = highest
    total = tl.where(total == 0.0, 1.0, total)  # where nothing was seen; NaN stays
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head * HEAD_DIM + columns[None, :], out, mask=(columns < HEAD_DIM)[None, :])
    tl.store(lse_ptr + head + tl.arange(0, 1), best + tl.log(total))
