"""Prefill attention a tile at a time: no score leaves the chip, memory is linear in the length.

The online softmax over tiles of keys is that of FlashAttention (Dao et al., 2022, arXiv 2205.14135; 2023, arXiv
2307.08691). Tiles that the masks exclude are never loaded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spikeprof.kernels.attention.checks import checked_prefill
from spikeprof.kernels.attention.masks import key_range, visible
from spikeprof.kernels.attention.softmax import OnlineSoftmax
from spikeprof.kernels.paths import TORCH, Attended, chosen

_TORCH_QUERIES, _TORCH_KEYS = 512, 512  # a tile of the plain path


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    path: str = "auto",
) -> Attended:
    """Attention of q [batch, heads, q_len, head_dim] over k, v [batch, kv_heads, k_len, head_dim].

    ``heads`` is a multiple of ``kv_heads``, head_dim a multiple of 16 from 16 to 256, the dtype fp16, bf16 or fp32. A
    causal mask aligns the last query with the last key; with ``window`` a query sees itself and the ``window - 1``
    keys before it. ``scale`` multiplies the scores, ``head_dim ** -0.5`` unless given.

    The output is laid out in memory as q is, ``lse`` float32 [batch, heads, q_len]. A query that sees no key has the
    output 0 and the log-sum-exp -inf. Raises ValueError for arguments that do not fit.
    """
    scale = checked_prefill(q, k, v, causal, window, scale)
    path = chosen(path, q)
    if window is not None:
        window = min(window, k.shape[2])  # also what int32 holds
    if path == TORCH:
        return Attended(*_by_torch(q, k, v, causal, window, scale), path)
    from spikeprof.kernels.attention.tiled_triton import tiled

    return Attended(*tiled(q, k, v, causal, window, scale), path)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float) -> tuple[Tensor, Tensor]:
    (batch, heads, q_len, head_dim), (kv_heads, k_len) = q.shape, k.shape[1:3]
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, q_len, device=q.device)
    for first in range(0, q_len, _TORCH_QUERIES):
        rows = slice(first, min(first + _TORCH_QUERIES, q_len))
        positions = range(rows.start + k_len - q_len, rows.stop + k_len - q_len)
        # The heads that share keys are rows of one product: keys are not repeated.
        shared = q[:, :, rows].float().reshape(batch, kv_heads, -1, head_dim) * scale
        softmax = OnlineSoftmax(tuple(shared.shape), q.device)
        keys = key_range(positions, k_len, causal, window)
        for start in range(keys.start, keys.stop, _TORCH_KEYS):
            tile = range(start, min(start + _TORCH_KEYS, keys.stop))
            scores = shared @ k[:, :, tile.start : tile.stop].float().transpose(-1, -2)
            seen = visible(positions, tile, causal, window, q.device)
            if seen is not None:
                by_head = scores.unflatten(2, (-1, len(positions)))
                scores = by_head.masked_fill(~seen, -math.inf).flatten(2, 3)
            softmax.add(scores, v[:, :, tile.start : tile.stop].float())
        block, block_lse = softmax.result()
        out[:, :, rows] = block.reshape(batch, heads, -1, head_dim).to(q.dtype)
        lse[:, :, rows] = block_lse.reshape(batch, heads, -1)
    return out, lse
