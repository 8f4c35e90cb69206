"""What every KV cache offers: all layers of a model in one object, sequences that come, grow and go.

A step is: ``plan`` (on the host, makes room), then for each layer ``append`` and, when decoding, ``attend``. The last
two launch kernels and wait for nothing, so that they can be captured in a CUDA graph: capture them with a plan from
``blank_plan`` and fill that one with ``Plan.copy_from`` before each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spikeprof.kernels.cache.usage import Usage
from spikeprof.kernels.paths import Attended, check


class CacheFull(RuntimeError):
    """There is no room: nothing was changed. Evict a sequence, or wait for one to end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a step's new tokens go, and what its sequences then consist of. Tensors are on the cache's device.

    ``slots`` int64 [tokens] has the flat slot, ``page * page_size + offset``, of each new token, in the order of
    ``sequences``. ``block_table`` int32 [batch, most_pages] and ``lengths`` int32 [batch] are as after appending;
    entries past the last page of a sequence are 0. ``scratch_slot`` is a slot that no sequence has.
    """

    sequences: tuple[int, ...]
    new_tokens: tuple[int, ...]
    slots: Tensor
    block_table: Tensor
    lengths: Tensor
    scratch_slot: int

    def copy_from(self, other: Plan) -> None:
        """Take over another plan's tensors in place; ``sequences`` and ``new_tokens`` stay what they are.

        The other may be smaller: rows that it lacks get length 0, tokens that it lacks go to the scratch slot.
        """
        tokens, (batch, most_pages) = len(other.slots), other.block_table.shape
        check(
            tokens <= len(self.slots) and batch <= len(self.lengths) and most_pages <= self.block_table.shape[1],
            f"other has {tokens} new tokens, {batch} sequences and {most_pages} pages for one: this plan has room for "
            f"{len(self.slots)}, {len(self.lengths)} and {self.block_table.shape[1]}",
        )
        self.slots[:tokens].copy_(other.slots)
        self.slots[tokens:].fill_(self.scratch_slot)
        self.block_table[:batch, :most_pages].copy_(other.block_table)
        self.lengths[:batch].copy_(other.lengths)
        self.lengths[batch:].zero_()


class KVCache(Protocol):
    """Keys and values of all layers for several sequences, which are named by any integers."""

    def begin(self, sequence: int, tokens: Sequence[int] = ()) -> int:
        """Take up a sequence; returns how many of its leading tokens are there already.

        ``tokens`` is the prompt. Whole pages of a sequence whose prompt begins with the same tokens are shared;
        the last token of the prompt is never shared, since its query must be run. A page counts as written once it was
        planned: run each plan before the next ``begin``. Raises ValueError for a sequence that is there already,
        CacheFull where there are as many as the cache can have.
        """
        ...

    def fork(self, parent: int, child: int) -> None:
        """Begin ``child`` as a copy of ``parent``; where the cache has pages they are shared until one is written."""
        ...

    def plan(self, new: Sequence[tuple[int, int]]) -> Plan:
        """Make room for new tokens, (sequence, how many) each, and copy shared pages that they would change.

        Raises CacheFull, which says what is missing, and ValueError for an empty list, a sequence that is named twice,
        a count below 1 and a sequence that would be longer than ``max_tokens``; IndexError for an unknown sequence.
        """
        ...

    def blank_plan(self, batch: int) -> Plan:
        """A plan for static use: one new token in each of ``batch`` rows, which goes nowhere and sees nothing."""
        ...

    def append(self, layer: int, plan: Plan, keys: Tensor, values: Tensor, *, path: str = "auto") -> str:
        """Write a layer's keys and values [tokens, kv_heads, head_dim] to the plan's slots; returns the path taken."""
        ...

    def attend(self, layer: int, plan: Plan, q: Tensor, *, window: int | None = None, path: str = "auto") -> Attended:
        """Attention of one query [batch, heads, head_dim] for each sequence of the plan, after ``append``."""
        ...

    def gather(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """All keys and values [kv_heads, length, head_dim] of a sequence, dequantised to the cache's dtype."""
        ...

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        ...

    def truncate(self, sequence: int, length: int) -> None:
        """Drop what is past the first ``length`` tokens: guesses that were rejected, for example."""
        ...

    def evict(self, sequence: int) -> None:
        """Give a sequence's room back; pages that others share stay."""
        ...

    def usage(self) -> Usage:
        """What is held and wasted now."""
        ...
