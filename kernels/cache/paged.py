"""The cache: a table that says which page is whose, and two stores, one of keys and one of values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spikeprof.kernels.attention import paged_attention
from spikeprof.kernels.cache.append import append
from spikeprof.kernels.cache.page_table import HostPlan, PageTable
from spikeprof.kernels.cache.pages import Pages
from spikeprof.kernels.cache.protocol import Plan
from spikeprof.kernels.cache.store import Store
from spikeprof.kernels.cache.usage import Usage
from spikeprof.kernels.paths import Attended, check, check_shape

_ALIGNED_INTS = 4  # 16 bytes


class PagedCache:
    """A ``KVCache`` over pages; how they are stored is the stores' affair. See ``make_cache``.

    ``scratch_slot`` is a slot of the stores that the table never gives away.
    """

    def __init__(self, table: PageTable, keys: Store, values: Store, scratch_slot: int) -> None:
        self._table, self._keys, self._values = table, keys, values
        self._scratch_slot = scratch_slot

    def begin(self, sequence: int, tokens: Sequence[int] = ()) -> int:
        """See ``KVCache``."""
        return self._table.begin(sequence, tokens)

    def fork(self, parent: int, child: int) -> None:
        """See ``KVCache``."""
        self._table.fork(parent, child)

    def plan(self, new: Sequence[tuple[int, int]]) -> Plan:
        """See ``KVCache``."""
        planned = self._table.plan(new)
        if planned.copies:
            self._keys.copy_pages(planned.copies)
            self._values.copy_pages(planned.copies)
        return Plan(
            tuple(sequence for sequence, _ in new),
            tuple(count for _, count in new),
            *_on_device(planned, self._keys.device),
            self._scratch_slot,
        )

    def blank_plan(self, batch: int) -> Plan:
        """See ``KVCache``."""
        check(batch >= 1, f"batch is {batch}: 1 at least")
        blank = HostPlan(
            slots=np.full(batch, self._scratch_slot, dtype=np.int64),
            block_table=np.zeros((batch, self._table.most_pages), dtype=np.int32),
            lengths=np.zeros(batch, dtype=np.int32),
            copies=[],
        )
        return Plan((), (), *_on_device(blank, self._keys.device), self._scratch_slot)

    def append(self, layer: int, plan: Plan, keys: Tensor, values: Tensor, *, path: str = "auto") -> str:
        """See ``KVCache``."""
        self._check_layer(layer)
        for name, tensor in (("keys", keys), ("values", values)):
            check_shape(name, tensor, (len(plan.slots), self._keys.kv_heads, self._keys.head_dim))
            check(
                (tensor.dtype, tensor.device) == (self._keys.dtype, self._keys.device),
                f"{name} are {tensor.dtype} on {tensor.device}, the cache is of {self._keys.dtype} on "
                f"{self._keys.device}",
            )
        return append(self._keys.layers[layer], self._values.layers[layer], plan.slots, keys, values, path=path)

    def attend(self, layer: int, plan: Plan, q: Tensor, *, window: int | None = None, path: str = "auto") -> Attended:
        """See ``KVCache``."""
        return paged_attention(q, self.pages(layer, plan), window=window, path=path)

    def pages(self, layer: int, plan: Plan) -> Pages:
        """A layer's pages as ``attention.paged_attention`` takes them."""
        self._check_layer(layer)
        keys, values = self._keys.layers[layer], self._values.layers[layer]
        return Pages(keys, values, plan.block_table, plan.lengths, self._keys.head_dim)

    def gather(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """See ``KVCache``."""
        self._check_layer(layer)
        pages, length = self._table.pages_of(sequence), self._table.length(sequence)
        return self._keys.read(layer, pages, length), self._values.read(layer, pages, length)

    def length(self, sequence: int) -> int:
        """See ``KVCache``."""
        return self._table.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """See ``KVCache``."""
        self._table.truncate(sequence, length)

    def evict(self, sequence: int) -> None:
        """See ``KVCache``."""
        self._table.evict(sequence)

    def usage(self) -> Usage:
        """See ``KVCache``."""
        table = self._table
        bytes_per_token = self._keys.bytes_per_token + self._values.bytes_per_token
        held_pages_count = table.pages - table.free_pages_count
        return Usage(
            tokens_count=sum(table.length(sequence) for sequence in table.sequences),
            stored_tokens_count=table.stored_tokens_count(),
            sequences_count=len(table.sequences),
            pages_count=table.pages,
            free_pages_count=table.free_pages_count,
            bytes_per_token=bytes_per_token,
            bytes_allocated=self._keys.bytes_count + self._values.bytes_count,
            bytes_reserved=held_pages_count * table.page_size * bytes_per_token,
        )

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self._keys.layers):
            raise IndexError(f"layer is {layer}: the cache has {len(self._keys.layers)}, counted from 0")


def _on_device(planned: HostPlan, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, block table and lengths, carried over in one copy that the host does not wait for.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel once for pointers that do and once for others, in
    the middle of decoding where a growing block table moves what is behind it.
    """
    parts = [planned.slots.view(np.int32), planned.block_table.ravel(), planned.lengths]
    padded = [np.pad(part, (0, -part.size % _ALIGNED_INTS)) for part in parts]
    packed = torch.from_numpy(np.concatenate(padded))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    places = packed.split([part.size for part in padded])
    slots, table, lengths = (place[: part.size] for place, part in zip(places, parts, strict=True))
    return slots.view(torch.int64), table.view(planned.block_table.shape), lengths
