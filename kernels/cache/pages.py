"""What attention sees of a paged cache: one layer's pages, and which of them each sequence has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Quantised:
    """Asymmetric integers ``x ~ scale * (q - zero)``.

    ``values`` is uint8: [..., head_dim] of 8 bits, or [..., head_dim // 2] of 4 bits, two in a byte, the even channel
    in the low half. ``scale`` and ``zero`` are fp16 [..., groups]: one pair for each ``head_dim // groups``
    neighbouring channels of a token and head.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor
    bits: int


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values [pages, kv_heads, page_size, head_dim] of one layer, each plain or quantised.

    ``block_table`` int32 [batch, most_pages] names the pages of each sequence in order, ``lengths`` int32 [batch] says
    how many tokens are valid. Entries past the last page of a sequence are never read.
    """

    keys: Tensor | Quantised
    values: Tensor | Quantised
    block_table: Tensor
    lengths: Tensor
    head_dim: int

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        stored = self.keys.values if isinstance(self.keys, Quantised) else self.keys
        return int(stored.shape[2])

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        stored = self.keys.values if isinstance(self.keys, Quantised) else self.keys
        return int(stored.shape[1])
