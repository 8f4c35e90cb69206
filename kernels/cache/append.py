"""Writing a step's keys and values of one layer."""

from __future__ import annotations

from torch import Tensor

from spikeprof.kernels.cache.pages import Quantised
from spikeprof.kernels.cache.store import write
from spikeprof.kernels.paths import TORCH, chosen


def append(
    key_store: Tensor | Quantised,
    value_store: Tensor | Quantised,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    path: str = "auto",
) -> str:
    """Put ``keys`` and ``values`` [tokens, kv_heads, head_dim] at flat ``slots`` [tokens] of one layer's pages.

    A slot is ``page * page_size + offset``; slots are trusted, nothing waits for the device. Returns the path taken.
    """
    path = chosen(path, keys)
    if path == TORCH:
        write(key_store, slots, keys)
        write(value_store, slots, values)
        return path
    from spikeprof.kernels.cache import append_triton

    append_triton.append(key_store, value_store, slots, _packed(keys), _packed(values))
    return path


def _packed(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
