"""Caches by the name of their kind."""

from __future__ import annotations

from numbers import Integral

import torch

from spikeprof.kernels.cache.page_table import PageTable
from spikeprof.kernels.cache.paged import PagedCache
from spikeprof.kernels.cache.store import Store
from spikeprof.kernels.cache.usage import storage_bits
from spikeprof.kernels.paths import check

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def make_cache(
    kind: str,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    capacity_tokens: int,
    page_size: int = 16,
    max_sequences: int,
    max_tokens: int,
    dtype: torch.dtype,
    device: str | torch.device,
) -> PagedCache:
    """A cache of at most ``max_sequences`` sequences of at most ``max_tokens`` tokens, in room for ``capacity_tokens``.

    ``contiguous`` reserves ``max_tokens`` for each sequence, in one piece: ``capacity_tokens // max_tokens`` of them
    fit. The others give pages of ``page_size`` tokens as a sequence grows, and share those of equal prompts: ``fp16``
    keeps ``dtype``, ``int8-keys``, ``int8-values`` and ``int8`` (both) and ``int4`` (both) quantise. Room is rounded
    down to whole rows or pages; one slot or page more is allocated, where a padded batch writes.

    Raises ValueError for an unknown kind, sizes below 1, a dtype that is no float, no room for a row or page, and for
    ``int4`` a head_dim that is no multiple of 32.
    """
    key_bits, value_bits = storage_bits(kind)
    sizes = {
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "page_size": page_size,
        "max_sequences": max_sequences,
        "max_tokens": max_tokens,
        "capacity_tokens": capacity_tokens,
    }
    for name, size in sizes.items():
        check(isinstance(size, Integral) and size >= 1, f"{name} is {size}: a whole number, 1 at least")
    check(dtype in _DTYPES, f"dtype is {dtype}: it can be {', '.join(str(one) for one in _DTYPES)}")
    if kind == "contiguous":
        # A row is one page that a whole sequence fits in; its last slot is never given away.
        pages, page_size, spare_pages = capacity_tokens // max_tokens, max_tokens + 1, 0
        unit, scratch_slot = f"a sequence of max_tokens, {max_tokens}", max_tokens
        max_sequences = min(max_sequences, pages)
    else:
        pages, spare_pages = capacity_tokens // page_size, 1
        unit, scratch_slot = f"a page of {page_size}", pages * page_size
    check(pages >= 1, f"capacity_tokens is {capacity_tokens}: room for {unit} tokens at least")
    table = PageTable(pages=pages, page_size=page_size, max_sequences=max_sequences, max_tokens=max_tokens)
    shape = (layers, pages + spare_pages, kv_heads, page_size, head_dim)
    device = torch.device(device)
    keys, values = (Store(shape, dtype, device, bits) for bits in (key_bits, value_bits))
    return PagedCache(table, keys, values, scratch_slot)
