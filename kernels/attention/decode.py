"""Decode attention: one query a sequence over its cache, split along the sequence so that all of the GPU reads.

A split gives an output and a log-sum-exp of its own; a second, small kernel puts them together (Flash-Decoding: Dao
et al., 2023, https://pytorch.org/blog/flash-decoding/). The heads that share keys are the rows of one product: each
key is read once. Quantised keys and values are dequantised where they are used, ``x = scale * (q - zero)``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spikeprof.kernels.attention.checks import checked_decode, checked_paged
from spikeprof.kernels.attention.softmax import OnlineSoftmax, merge_attended
from spikeprof.kernels.paths import TORCH, Attended, chosen

if TYPE_CHECKING:
    from spikeprof.kernels.cache.pages import Pages, Quantised

# Programs that fill an H100 or H200: two on each of its 132 multiprocessors. A split of fewer tokens than these spends
# its time on starting and on being merged.
PROGRAMS_WANTED, LEAST_TOKENS_A_SPLIT = 2 * 132, 128
_TORCH_TOKENS = 512  # tokens that the plain path takes at a time


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    splits: int | None = None,
    path: str = "auto",
) -> Attended:
    """Attention of q [batch, heads, head_dim] over the first ``lengths`` of k, v [batch, kv_heads, capacity, head_dim].

    ``lengths`` int32 [batch] counts the valid tokens, the query's own among them: with ``window`` the last so many of
    them are seen. ``splits`` are the parts that a sequence is read in; None chooses by the shapes alone. ``lse`` is
    float32 [batch, heads]; of length 0 the output is 0 and the log-sum-exp -inf.

    Raises ValueError for arguments that do not fit. The values of lengths on a GPU are not looked at, which would
    wait for the device: who makes them keeps them within the capacity.
    """
    scale = checked_decode(q, k, v, lengths, window, scale, splits)
    return _attend(q, k, v, None, lengths, window, scale, splits, chosen(path, q))


def paged_attention(
    q: Tensor,
    pages: Pages,
    *,
    window: int | None = None,
    scale: float | None = None,
    splits: int | None = None,
    path: str = "auto",
) -> Attended:
    """``decode_attention`` over a paged cache; keys and values are each plain, in q's dtype, or quantised.

    Raises ValueError for arguments that do not fit, and IndexError where an entry of the block table that is in use
    names no page. The values of the block table and the lengths on a GPU are not looked at.
    """
    scale = checked_paged(q, pages, window, scale, splits)
    table = pages.block_table
    return _attend(q, pages.keys, pages.values, table, pages.lengths, window, scale, splits, chosen(path, q))


def chosen_splits(batch: int, kv_heads: int, tokens: int) -> int:
    """Parts to read each sequence of at most ``tokens`` in: enough to fill the GPU, none needlessly short."""
    return max(1, min(math.ceil(PROGRAMS_WANTED / (batch * kv_heads)), tokens // LEAST_TOKENS_A_SPLIT))


def _attend(
    q: Tensor,
    keys: Tensor | Quantised,
    values: Tensor | Quantised,
    table: Tensor | None,
    lengths: Tensor,
    window: int | None,
    scale: float,
    splits: int | None,
    path: str,
) -> Attended:
    _, kv_heads, page_size, _ = (keys if isinstance(keys, Tensor) else keys.values).shape
    capacity = page_size * (1 if table is None else table.shape[1])
    if window is not None:
        window = min(window, capacity)  # also what int32 holds
    tokens = window or capacity
    splits = splits or chosen_splits(q.shape[0], kv_heads, tokens)
    if path == TORCH:
        return _by_torch(q, keys, values, table, lengths, window, scale, splits)
    from spikeprof.kernels.attention.decode_triton import decode

    return Attended(*decode(q, keys, values, table, lengths, window, scale, splits), path)


def _by_torch(
    q: Tensor,
    keys: Tensor | Quantised,
    values: Tensor | Quantised,
    table: Tensor | None,
    lengths: Tensor,
    window: int | None,
    scale: float,
    splits: int,
) -> Attended:
    """Splits are of the capacity, not of each length: the loops run by shapes alone."""
    _, kv_heads, page_size, _ = (keys if isinstance(keys, Tensor) else keys.values).shape
    capacity = page_size * (1 if table is None else table.shape[1])
    rows = q.float().unflatten(1, (kv_heads, -1)) * scale  # [batch, kv_heads, group, head_dim]
    first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
    parts = []
    for split in range(splits):
        softmax = OnlineSoftmax(tuple(rows.shape), q.device)
        stop = capacity * (split + 1) // splits
        for start in range(capacity * split // splits, stop, _TORCH_TOKENS):
            tokens = torch.arange(start, min(start + _TORCH_TOKENS, stop), device=q.device)
            seen = (tokens >= first[:, None]) & (tokens < lengths[:, None])
            scores = rows @ _taken(keys, table, tokens, seen).transpose(-1, -2)
            softmax.add(scores.masked_fill(~seen[:, None, None], -math.inf), _taken(values, table, tokens, seen))
        out, lse = softmax.result()
        parts.append(Attended(out.flatten(1, 2), lse.flatten(1, 2), TORCH))
    merged = merge_attended(parts)
    return merged._replace(out=merged.out.to(q.dtype))


def _taken(stored: Tensor | Quantised, table: Tensor | None, tokens: Tensor, seen: Tensor) -> Tensor:
    """float32 [batch, kv_heads, tokens, head_dim]: 0 for what is not ``seen`` [batch, tokens], whatever lies there."""
    if isinstance(stored, Tensor):
        return _rows(stored, table, tokens, seen).float()
    packed = _rows(stored.values, table, tokens, seen)
    if stored.bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    zero = _rows(stored.zero, table, tokens, seen).float()[..., None]
    scale = _rows(stored.scale, table, tokens, seen).float()[..., None]
    return ((packed.float().unflatten(-1, (scale.shape[-2], -1)) - zero) * scale).flatten(-2)


def _rows(stored: Tensor, table: Tensor | None, tokens: Tensor, seen: Tensor) -> Tensor:
    if table is None:
        rows = stored[:, :, tokens]
    else:
        page_size = stored.shape[2]
        # Entries that are not in use may name anything: page 0 stands in for them.
        pages = torch.where(seen, table[:, tokens // page_size], 0).long()
        rows = stored[pages, :, tokens % page_size].transpose(1, 2)
    return torch.where(seen[:, None, :, None], rows, 0)
