"""What attention demands of its arguments.

Values on a GPU are not looked at: that would wait for the device. Decode is called for each layer and token, so texts
are put together only where one is raised.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spikeprof.kernels.paths import check_same, check_shape

if TYPE_CHECKING:
    from spikeprof.kernels.cache.pages import Pages, Quantised

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = range(16, 257, 16)
HEAD_DIMS_TEXT = f"a multiple of {HEAD_DIMS.step} from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"


def checked_prefill(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None) -> float:
    """Check q [batch, heads, q_len, head_dim] and k, v [batch, kv_heads, k_len, head_dim]; the scale to take."""
    check_shape("q", q, (None, None, None, None))
    _check_queries(q)
    _check_keys(q, k, v)
    if window is not None and not causal:
        raise ValueError(f"window is {window} with causal=False: only causal attention takes a window")
    return _checked_options(q, window, scale, None)


def checked_decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None, scale: float | None, splits: int | None
) -> float:
    """Check q [batch, heads, head_dim] and k, v [batch, kv_heads, capacity, head_dim]; the scale to take."""
    check_shape("q", q, (None, None, None))
    _check_queries(q)
    _check_keys(q, k, v)
    _check_lengths("lengths", lengths, q, k.shape[2], "the capacity")
    return _checked_options(q, window, scale, splits)


def checked_paged(q: Tensor, pages: Pages, window: int | None, scale: float | None, splits: int | None) -> float:
    """Check q [batch, heads, head_dim] and the pages; the scale to take."""
    check_shape("q", q, (None, None, None))
    _check_queries(q)
    batch, heads, head_dim = q.shape
    if pages.head_dim != head_dim:
        raise ValueError(f"pages.head_dim is {pages.head_dim}, q has {head_dim}")
    keys = pages.keys if isinstance(pages.keys, Tensor) else pages.keys.values
    check_shape("pages.keys", keys, (None, None, None, None))
    sizes = tuple(keys.shape[:3])
    _check_pool("pages.keys", pages.keys, q, sizes)
    _check_pool("pages.values", pages.values, q, sizes)
    _check_groups(heads, sizes[1])
    table = pages.block_table
    check_shape("pages.block_table", table, (batch, None))
    _check_integers("pages.block_table", table, q)
    room = table.shape[1] * sizes[2]
    _check_lengths("pages.lengths", pages.lengths, q, room, "what the block table has room for")
    _check_table(table, pages.lengths, sizes[2], sizes[0])
    return _checked_options(q, window, scale, splits)


def _check_queries(q: Tensor) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}: it can be {', '.join(map(str, DTYPES))}")
    _check_rows("q", q)
    if q.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"head_dim is {q.shape[-1]}: it must be {HEAD_DIMS_TEXT}")


def _check_keys(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_shape("k", k, (q.shape[0], None, None, q.shape[-1]))
    _check_stored("k", k, q)
    if v.shape != k.shape:
        check_shape("v", v, tuple(k.shape))
    _check_stored("v", v, q)
    _check_groups(q.shape[1], k.shape[1])


def _check_stored(name: str, stored: Tensor, q: Tensor) -> None:
    if stored.device != q.device or stored.dtype != q.dtype:
        check_same(name, stored, "q", q)
    _check_rows(name, stored)


def _check_rows(name: str, tensor: Tensor) -> None:
    """Kernels read whole rows: a copy made here would hide its cost."""
    if tensor.numel() == 0:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: every size must be at least 1")
    if tensor.stride(-1) != 1:
        stride = tensor.stride(-1)
        raise ValueError(f"{name} has stride {stride} in its last dimension: it must be 1, call contiguous()")


def _check_groups(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads: they must be a multiple of the {kv_heads} key-value heads")


def _checked_options(q: Tensor, window: int | None, scale: float | None, splits: int | None) -> float:
    if window is not None and not (isinstance(window, Integral) and window >= 1):
        raise ValueError(f"window is {window}: it must be a whole number of at least 1 key, or None")
    if splits is not None and not (isinstance(splits, Integral) and splits >= 1):
        raise ValueError(f"splits is {splits}: it must be a whole number of at least 1, or None to choose")
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}: it must be finite and greater than 0")
    return scale


def _check_pool(name: str, pool: Tensor | Quantised, q: Tensor, sizes: tuple[int, ...]) -> None:
    head_dim = q.shape[-1]
    if isinstance(pool, Tensor):
        if pool.shape != (*sizes, head_dim):
            check_shape(name, pool, (*sizes, head_dim))
        _check_stored(name, pool, q)
        return
    if pool.bits not in (4, 8):
        raise ValueError(f"{name}.bits is {pool.bits}: it can be 4 or 8")
    if pool.values.shape != (*sizes, head_dim * pool.bits // 8):
        check_shape(f"{name}.values", pool.values, (*sizes, head_dim * pool.bits // 8))
    _check_rows(f"{name}.values", pool.values)
    if pool.scale.shape[:-1] != sizes:
        check_shape(f"{name}.scale", pool.scale, (*sizes, None))
    if pool.zero.shape != pool.scale.shape:
        check_shape(f"{name}.zero", pool.zero, tuple(pool.scale.shape))
    for part, tensor, dtype in (
        ("values", pool.values, torch.uint8),
        ("scale", pool.scale, torch.float16),
        ("zero", pool.zero, torch.float16),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"{name}.{part} is {tensor.dtype}: it must be {dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name}.{part} is on {tensor.device}, q on {q.device}")
    _check_pairs(name, pool, head_dim)


def _check_pairs(name: str, pool: Quantised, head_dim: int) -> None:
    """A scale and a zero point for a whole row, or for groups that the kernel's tiles can be cut into."""
    groups = pool.scale.shape[-1]
    span = head_dim // groups if groups and head_dim % groups == 0 else 0
    if groups != 1 and (pool.bits == 8 or span < 2 or span & (span - 1)):
        allowed = "1" if pool.bits == 8 else "1, or such that a group has a power of two of channels, 2 at least"
        what = f"{groups} groups for {head_dim} channels"
        raise ValueError(f"{name}.scale has {what}: for {pool.bits} bits it must be {allowed}")
    strides, zero_strides = pool.scale.stride(), pool.zero.stride()
    if strides != zero_strides or (groups != 1 and strides[-1] != 1):
        both = f"{list(strides)} and {list(zero_strides)}"
        raise ValueError(f"{name}.scale and {name}.zero have strides {both}: they must be equal, the last one 1")


def _check_integers(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} is {tensor.dtype}: it must be torch.int32")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
    _check_rows(name, tensor)


def _check_lengths(name: str, lengths: Tensor, q: Tensor, most: int, what: str) -> None:
    check_shape(name, lengths, (q.shape[0],))
    _check_integers(name, lengths, q)
    if not lengths.is_cuda:
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > most:
            raise ValueError(f"{name} reach from {low} to {high}: they can be 0 to {most}, {what}")


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
