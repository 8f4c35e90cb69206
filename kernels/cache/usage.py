"""What a cache holds and wastes, and what a token costs in each kind of storage."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("contiguous", "fp16", "int8-values", "int8-keys", "int8", "int4")
INT4_GROUP = 32  # channels that share a scale and a zero point
_PAIR_BYTES = 4  # scale and zero point, fp16 each
_BITS = {
    "contiguous": (None, None),
    "fp16": (None, None),
    "int8-values": (None, 8),
    "int8-keys": (8, None),
    "int8": (8, 8),
    "int4": (4, 4),
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one moment. A token that several sequences share is stored, and counted in bytes, once.

    ``bytes_allocated`` is all that the cache took from the device, ``bytes_reserved`` the part that sequences hold
    (whole pages, or whole rows), ``bytes_used`` the part of that which holds tokens.
    """

    tokens_count: int  # of all sequences, shared ones counted for each
    stored_tokens_count: int  # shared ones once
    sequences_count: int
    pages_count: int  # rows of a contiguous cache
    free_pages_count: int
    bytes_per_token: int  # keys and values of all layers, scales and zero points included
    bytes_allocated: int
    bytes_reserved: int

    @property
    def bytes_used(self) -> int:
        """Bytes that hold tokens."""
        return self.stored_tokens_count * self.bytes_per_token

    @property
    def utilisation_share(self) -> float:
        """Share of what was allocated that holds tokens."""
        return self.bytes_used / self.bytes_allocated

    @property
    def internal_fragmentation_share(self) -> float:
        """Share of what sequences hold that is reserved, but holds no token; 0 where they hold nothing."""
        return 1 - self.bytes_used / self.bytes_reserved if self.bytes_reserved else 0.0


def storage_bits(kind: str) -> tuple[int | None, int | None]:
    """Bits of a stored key and of a stored value; None where the model's dtype is kept."""
    if kind not in _BITS:
        raise ValueError(f"kind is {kind!r}: it can be {', '.join(KINDS)}")
    return _BITS[kind]


def groups_count(head_dim: int, bits: int) -> int:
    """Scales of one quantised token and head: one for 8 bits, one for each 32 channels for 4 bits."""
    if bits == 8:
        return 1
    if head_dim % INT4_GROUP:
        raise ValueError(f"head_dim is {head_dim}: 4 bits need a multiple of {INT4_GROUP}")
    return head_dim // INT4_GROUP


def bytes_per_token(kind: str, *, layers: int, kv_heads: int, head_dim: int, itemsize: int = 2) -> int:
    """Bytes of one token's keys and values in all layers, scales and zero points included.

    ``itemsize`` is that of the dtype which keys and values have where they are not quantised. A head of ``head_dim``
    channels takes ``2 * itemsize * head_dim`` bytes plain; quantised, ``head_dim * bits / 8`` for each side, and 4 for
    each scale and zero point. In fp16 quantising the values alone therefore saves less than 25 %, both to 8 bits less
    than 50 %, both to 4 bits 68.75 %.
    """
    sides = (head_dim * itemsize if bits is None else _quantised_bytes(head_dim, bits) for bits in storage_bits(kind))
    return layers * kv_heads * sum(sides)


def _quantised_bytes(head_dim: int, bits: int) -> int:
    return head_dim * bits // 8 + groups_count(head_dim, bits) * _PAIR_BYTES
