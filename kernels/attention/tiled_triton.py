"""The Triton kernel of tiled attention."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikeprof.kernels.attention.dots_triton import LN2, dot, operand

# Keys and values of the heads that run at one time stay in the L2 cache (50 MB on an H200), beside what streams by.
_L2_BYTES = 16 << 20


class _Tile(NamedTuple):
    """Queries and keys of a tile, and how it is launched."""

    queries: int
    keys: int
    warps: int
    stages: int


def _tile(head_dim: int, dtype: torch.dtype) -> _Tile:
    if dtype == torch.float32:
        # Products of full precision take no tensor cores, and whole rows in registers: larger tiles spill.
        return _Tile(64, 32, 8, 1) if head_dim <= 64 else _Tile(32, 32, 8, 1)
    if head_dim <= 64:
        return _Tile(128, 64, 4, 3)
    return _Tile(128, 64, 4, 2) if head_dim <= 128 else _Tile(128, 64, 8, 2)


def tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; the arguments are checked already."""
    (batch, heads, q_len, head_dim), (kv_heads, k_len) = q.shape, k.shape[1:3]
    tile = _tile(head_dim, q.dtype)
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(q_len, tile.queries)
    bytes_a_head = 2 * k_len * head_dim * q.element_size() * kv_heads // heads
    section = min(max(1, _L2_BYTES // max(1, bytes_a_head)), batch * heads)
    with torch.cuda.device_of(q):
        _tiled[(tiles * batch * heads,)](
            *(q, k, v, out, lse),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()),
            *(heads, heads // kv_heads, batch * heads, section, q_len, k_len),
            *(scale / math.log(2), window or 0),
            CAUSAL=causal,
            WINDOWED=window is not None,
            HEAD_DIM=head_dim,
            COLUMNS=triton.next_power_of_2(head_dim),
            QUERIES=tile.queries,
            KEYS=tile.keys,
            OPERAND=operand(q.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out, lse


@triton.jit
def _tiled(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row, out_column,
    heads, group, all_heads, section, q_len, k_len,
    scale, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head; ``scale`` is for scores in base 2."""
    # Heads run in sections whose keys fit the L2 cache; within one, the last queries, which see most, come first: what
    # is left to the end is light.
    tiles = tl.cdiv(q_len, QUERIES)
    program = tl.program_id(0)
    first_head = program // (tiles * section) * section
    in_section = tl.minimum(section, all_heads - first_head)
    nth = program - first_head * tiles
    which = first_head + nth % in_section
    first_row = (tiles - 1 - nth // in_section) * QUERIES
    batch, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)

    rows, columns = first_row + tl.arange(0, QUERIES), tl.arange(0, COLUMNS)
    valid = (rows < q_len)[:, None] & (columns < HEAD_DIM)[None, :]
    q_rows = q_ptr + batch * q_batch + head * q_head + rows.to(tl.int64)[:, None] * q_row
    q = tl.load(q_rows + columns[None, :], mask=valid, other=0.0)
    keys_ptr = k_ptr + batch * k_batch + head // group * k_head
    values_ptr = v_ptr + batch * v_batch + head // group * v_head

    # Positions among the keys of this tile's queries, and the keys that some of them, and that all of them see.
    positions = rows + (k_len - q_len)
    lowest = first_row + k_len - q_len
    highest = tl.minimum(first_row + QUERIES, q_len) - 1 + k_len - q_len
    end = k_len
    all_end = k_len // KEYS * KEYS
    if CAUSAL:
        end = tl.maximum(tl.minimum(k_len, highest + 1), 0)
        all_end = tl.maximum(tl.minimum(k_len, lowest + 1), 0) // KEYS * KEYS
    begin = 0
    all_begin = 0
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0) // KEYS * KEYS
        all_begin = tl.minimum(tl.cdiv(tl.maximum(highest - window + 1, 0), KEYS) * KEYS, end)
    all_end = tl.maximum(all_end, all_begin)

    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    weighed = tl.zeros([QUERIES, COLUMNS], tl.float32)
    if WINDOWED:
        best, total, weighed = _over(best, total, weighed, q, keys_ptr, values_ptr, k_row, v_row, positions, begin,
                                     all_begin, k_len, scale, window, True, CAUSAL, WINDOWED, HEAD_DIM, COLUMNS, KEYS,
                                     OPERAND)  # fmt: skip
    best, total, weighed = _over(best, total, weighed, q, keys_ptr, values_ptr, k_row, v_row, positions, all_begin,
                                 all_end, k_len, scale, window, False, CAUSAL, WINDOWED, HEAD_DIM, COLUMNS, KEYS,
                                 OPERAND)  # fmt: skip
    best, total, weighed = _over(best, total, weighed, q, keys_ptr, values_ptr, k_row, v_row, positions, all_end,
                                 end, k_len, scale, window, True, CAUSAL, WINDOWED, HEAD_DIM, COLUMNS, KEYS,
                                 OPERAND)  # fmt: skip

    total = tl.where(total == 0.0, 1.0, total)  # where nothing was seen; NaN stays
    out_rows = out_ptr + batch * out_batch + head * out_head + rows.to(tl.int64)[:, None] * out_row
    out = (weighed / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_rows + columns[None, :] * out_column, out, mask=valid)
    lse = (best + tl.log2(total)) * LN2
    tl.store(lse_ptr + which.to(tl.int64) * q_len + rows, lse, mask=rows < q_len)


@triton.jit
def _over(
    best, total, weighed, q, keys_ptr, values_ptr, k_row, v_row, positions, begin, end, k_len, scale, window,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    KEYS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys from ``begin`` to ``end``; without MASKED all queries see all of them."""
    columns = tl.arange(0, COLUMNS)
    for start in tl.range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        far = keys.to(tl.int64)[:, None]
        if MASKED or COLUMNS != HEAD_DIM:
            loaded = (keys < k_len)[:, None] & (columns < HEAD_DIM)[None, :]
            k = tl.load(keys_ptr + far * k_row + columns[None, :], mask=loaded, other=0.0)
            v = tl.load(values_ptr + far * v_row + columns[None, :], mask=loaded, other=0.0)
        else:
            k = tl.load(keys_ptr + far * k_row + columns[None, :])
            v = tl.load(values_ptr + far * v_row + columns[None, :])
        scores = dot(q, tl.trans(k), None, OPERAND)
        if MASKED:
            seen = (keys < k_len)[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= positions[:, None])
            if WINDOWED:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1) * scale)
        shift = highest
        if MASKED:
            shift = tl.where(highest == float("-inf"), 0.0, highest)  # -inf less -inf is not a number
        weights = tl.exp2(scores * scale - shift[:, None])
        kept = tl.exp2(best - shift)
        total = total * kept + tl.sum(weights, 1)
        weighed = dot(weights.to(v.dtype), v, weighed * kept[:, None], OPERAND)
        best = highest
    return best, total, weighed
