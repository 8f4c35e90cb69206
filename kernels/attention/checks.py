"""What attention demands of its arguments. Values on a GPU are not looked at: that would wait for the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spikeprof.kernels.paths import check, check_same, check_shape

if TYPE_CHECKING:
    from spikeprof.kernels.cache.pages import Pages, Quantised

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 256


def checked_prefill(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None) -> float:
    """Check q [batch, heads, q_len, head_dim] and k, v [batch, kv_heads, k_len, head_dim]; the scale to take."""
    check_shape("q", q, (None, None, None, None))
    batch, heads, _, head_dim = q.shape
    _check_queries(q)
    check_shape("k", k, (batch, None, None, head_dim))
    check_shape("v", v, tuple(k.shape))
    _check_stored("k", k, q)
    _check_stored("v", v, q)
    _check_groups(heads, k.shape[1])
    check(causal or window is None, f"window is {window} with causal=False: only causal attention takes a window")
    _check_window(window)
    return _checked_scale(scale, head_dim)


def checked_decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None, scale: float | None, splits: int | None
) -> float:
    """Check q [batch, heads, head_dim] and k, v [batch, kv_heads, capacity, head_dim]; the scale to take."""
    check_shape("q", q, (None, None, None))
    _check_queries(q)
    batch, heads, head_dim = q.shape
    check_shape("k", k, (batch, None, None, head_dim))
    check_shape("v", v, tuple(k.shape))
    _check_stored("k", k, q)
    _check_stored("v", v, q)
    _check_groups(heads, k.shape[1])
    _check_lengths("lengths", lengths, q, k.shape[2], "the capacity")
    _check_window(window)
    _check_splits(splits)
    return _checked_scale(scale, head_dim)


def checked_paged(q: Tensor, pages: Pages, window: int | None, scale: float | None, splits: int | None) -> float:
    """Check q [batch, heads, head_dim] and the pages; the scale to take."""
    check_shape("q", q, (None, None, None))
    _check_queries(q)
    batch, heads, head_dim = q.shape
    check(pages.head_dim == head_dim, f"pages.head_dim is {pages.head_dim}, q has {head_dim}")
    keys = pages.keys if isinstance(pages.keys, Tensor) else pages.keys.values
    check_shape("pages.keys", keys, (None, None, None, None))
    sizes = tuple(keys.shape[:3])
    _check_pool("pages.keys", pages.keys, q, sizes)
    _check_pool("pages.values", pages.values, q, sizes)
    _check_groups(heads, pages.kv_heads)
    table = pages.block_table
    check_shape("pages.block_table", table, (batch, None))
    _check_integers("pages.block_table", table, q)
    check(table.shape[1] > 0, f"pages.block_table has shape {list(table.shape)}: every size must be at least 1")
    room = table.shape[1] * pages.page_size
    _check_lengths("pages.lengths", pages.lengths, q, room, "what the block table has room for")
    _check_table(table, pages.lengths, pages.page_size, sizes[0])
    _check_window(window)
    _check_splits(splits)
    return _checked_scale(scale, head_dim)


def _check_queries(q: Tensor) -> None:
    check(q.numel() > 0, f"q has shape {list(q.shape)}: every size must be at least 1")
    check(q.dtype in DTYPES, f"q is {q.dtype}: it can be {', '.join(map(str, DTYPES))}")
    head_dim = q.shape[-1]
    fits = head_dim % 16 == 0 and SMALLEST_HEAD_DIM <= head_dim <= LARGEST_HEAD_DIM
    allowed = f"a multiple of 16 from {SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM}"
    check(fits, f"head_dim is {head_dim}: it must be {allowed}")
    _check_rows("q", q)


def _check_stored(name: str, stored: Tensor, q: Tensor) -> None:
    check_same(name, stored, "q", q)
    check(stored.numel() > 0, f"{name} has shape {list(stored.shape)}: every size must be at least 1")
    _check_rows(name, stored)


def _check_rows(name: str, tensor: Tensor) -> None:
    """Kernels read whole rows: a copy made here would hide its cost."""
    stride = tensor.stride(-1)
    check(stride == 1, f"{name} has stride {stride} in its last dimension: it must be 1, call contiguous()")


def _check_groups(heads: int, kv_heads: int) -> None:
    check(heads % kv_heads == 0, f"q has {heads} heads: they must be a multiple of the {kv_heads} key-value heads")


def _check_window(window: int | None) -> None:
    check(window is None or window >= 1, f"window is {window}: it must be at least 1 key, or None")


def _check_splits(splits: int | None) -> None:
    check(splits is None or splits >= 1, f"splits is {splits}: it must be at least 1, or None to choose")


def _checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    check(math.isfinite(scale) and scale > 0, f"scale is {scale}: it must be finite and greater than 0")
    return scale


def _check_pool(name: str, pool: Tensor | Quantised, q: Tensor, sizes: tuple[int, ...]) -> None:
    head_dim = q.shape[-1]
    if isinstance(pool, Tensor):
        check_shape(name, pool, (*sizes, head_dim))
        _check_stored(name, pool, q)
        return
    check(pool.bits in (4, 8), f"{name}.bits is {pool.bits}: it can be 4 or 8")
    check_shape(f"{name}.values", pool.values, (*sizes, head_dim * pool.bits // 8))
    check(pool.values.dtype == torch.uint8, f"{name}.values is {pool.values.dtype}: it must be torch.uint8")
    check(pool.values.device == q.device, f"{name}.values is on {pool.values.device}, q on {q.device}")
    check(pool.values.numel() > 0, f"{name}.values has shape {list(pool.values.shape)}: every size must be at least 1")
    _check_rows(f"{name}.values", pool.values)
    check_shape(f"{name}.scale", pool.scale, (*sizes, None))
    groups = pool.scale.shape[-1]
    span = head_dim // groups if groups and head_dim % groups == 0 else 0
    fits = groups == 1 or (pool.bits == 4 and span >= 2 and span & (span - 1) == 0)
    allowed = "1" if pool.bits == 8 else "1, or such that a group has a power of two of channels, 2 at least"
    check(fits, f"{name}.scale has {groups} groups for {head_dim} channels: for {pool.bits} bits it must be {allowed}")
    check_shape(f"{name}.zero", pool.zero, tuple(pool.scale.shape))
    for part, tensor in (("scale", pool.scale), ("zero", pool.zero)):
        check(tensor.dtype == torch.float16, f"{name}.{part} is {tensor.dtype}: it must be torch.float16")
        check(tensor.device == q.device, f"{name}.{part} is on {tensor.device}, q on {q.device}")
    same = pool.scale.stride() == pool.zero.stride() and (groups == 1 or pool.scale.stride(-1) == 1)
    strides = f"{list(pool.scale.stride())} and {list(pool.zero.stride())}"
    check(same, f"{name}.scale and {name}.zero have strides {strides}: they must be equal, the last one 1")


def _check_integers(name: str, tensor: Tensor, q: Tensor) -> None:
    check(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}: it must be torch.int32")
    check(tensor.device == q.device, f"{name} is on {tensor.device}, q on {q.device}")
    _check_rows(name, tensor)


def _check_lengths(name: str, lengths: Tensor, q: Tensor, most: int, what: str) -> None:
    check_shape(name, lengths, (q.shape[0],))
    _check_integers(name, lengths, q)
    if not lengths.is_cuda:
        low, high = int(lengths.min()), int(lengths.max())
        check(low >= 0 and high <= most, f"{name} reach from {low} to {high}: they can be 0 to {most}, {what}")


def _check_table(table: Tensor, lengths: Tensor, page_size: int, pages_count: int) -> None:
    """Raise IndexError where an entry in use names no page. Only on the CPU, where looking is free."""
    if table.is_cuda:
        return
    first_token = torch.arange(table.shape[1]) * page_size
    wrong = (first_token < lengths[:, None]) & ((table < 0) | (table >= pages_count))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        entry = int(table[row, column])
        raise IndexError(f"pages.block_table[{row}, {column}] is {entry}: the pages are 0 to {pages_count - 1}")
