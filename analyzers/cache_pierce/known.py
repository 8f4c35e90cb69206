"""KnownKeys: which keys exist at all, as a Bloom filter."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class KnownKeys:
    """Keys that exist in the cache or in the store behind it. Replace it as a whole to swap it while running."""

    def __init__(self, keys: Iterable[str] = (), capacity_count: int = 1_000_000, false_positive_share: float = 0.001):
        raise NotImplementedError

    def __contains__(self, key: str) -> bool:
        """Whether the key may exist. False is certain; True is wrong for ``false_positive_share`` of other keys."""
        raise NotImplementedError

    def contains(self, keys: pa.StringArray) -> npt.NDArray[np.bool_]:
        """The same for many keys, bool [n]."""
        raise NotImplementedError

    def learn(self, keys: Iterable[str]) -> None:
        """Add keys: of writes that were seen, of look-ups that hit."""
        raise NotImplementedError
