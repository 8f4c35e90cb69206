"""KnownKeys: which keys exist at all, as a Bloom filter."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rbloom import Bloom

from spikeprof.profiler.errors import UsageError

_BLOCK_COUNT = 65_536


class KnownKeys:
    """Keys that exist in the cache or in the store behind it: a Bloom filter (``rbloom``).

    It takes 1.44 log2(1/``false_positive_share``) bits per key: 1.8 MB per million keys at 0.001. It hashes
    by Python's own hash of strings, whose secret changes with every process (unless PYTHONHASHSEED says otherwise): it
    is built anew each time. To swap one while running, build another and assign it (``detector.known = other``): no
    call sees half of it.

    Keys learned once the filter holds ``capacity_count`` are not taken: more would make it say "known" too often.
    ``not_taken_count`` says how many; build a larger one then. ``is_complete`` is False then, and once ``doubt`` was
    called: there are keys that exist and are not in it.
    """

    def __init__(
        self, keys: Iterable[str] = (), capacity_count: int = 1_000_000, false_positive_share: float = 0.001
    ) -> None:
        if capacity_count < 1 or not 0 < false_positive_share < 1:
            raise UsageError(
                f"capacity_count {capacity_count} must be 1 or more, "
                f"false_positive_share {false_positive_share} between 0 and 1"
            )
        self.capacity_count = capacity_count
        self.false_positive_share = false_positive_share  # at most, of keys that do not exist
        self.not_taken_count = 0
        self.added_count = 0  # different keys, short of those that a false positive hid
        self._is_doubted = False
        self._filter = Bloom(capacity_count, false_positive_share)
        self.learn(keys)

    def __contains__(self, key: str) -> bool:
        """Whether the key may exist. False is certain; True is wrong for ``false_positive_share`` of other keys."""
        return key in self._filter

    def contains(self, keys: pa.StringArray) -> npt.NDArray[np.bool_]:
        """The same for many keys, bool [n]."""
        known = self._filter
        return np.fromiter((key in known for key in keys.to_pylist()), np.bool_, len(keys))

    def learn(self, keys: Iterable[str]) -> None:
        """Add keys: of a scan, of writes that were seen, of look-ups that hit. Any number; read block by block."""
        source = iter(keys)
        while block := list(islice(source, _BLOCK_COUNT)):
            fresh = [key for key in dict.fromkeys(block) if key not in self._filter]
            room = max(self.capacity_count - self.added_count, 0)
            self._filter.update(fresh[:room])
            # worked out first: nothing may come between reading and adding, since two threads may learn at a time
            taken_count = min(len(fresh), room)
            self.added_count += taken_count
            left_count = len(fresh) - taken_count
            self.not_taken_count += left_count

    def doubt(self) -> None:
        """Keys that cannot be told came to exist."""
        self._is_doubted = True

    @property
    def is_complete(self) -> bool:
        """Whether a key that is not in it can be taken for one that does not exist."""
        return not (self._is_doubted or self.not_taken_count)
