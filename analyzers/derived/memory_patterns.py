"""Which pattern of memory use a kernel class shows. The first of ``PATTERNS`` that fits, or none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spikeprof.analyzers.derived.counters import Floats
from spikeprof.analyzers.derived.intervals import Bools, Ints, ints
from spikeprof.analyzers.derived.memory_use import MemoryUse

#: Every pattern, the more telling first: what is fetched in vain explains why DRAM is busy.
PATTERNS = ("random-gather", "partial-sector", "l2-thrash", "streaming")
NO_PATTERN = len(PATTERNS)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the patterns, named as the analyzer's options are."""

    overfetch_ratio: float
    overfilled_ratio: float
    partial_written_ratio: float
    thrash_peak_share: float
    thrash_l2_ratio: float
    thrash_written_ratio: float
    thrash_read_back_share: float
    streaming_peak_share: float
    streaming_reuse_ratio: float


def patterns(use: MemoryUse, read_back: Floats, limits: Limits) -> Ints:
    """Per class the place of its pattern in ``PATTERNS``, else ``NO_PATTERN``: what the lower bounds allow to say.

    ``read_back``: bytes that the kernels right after a launch read from DRAM, on average.
    """
    read, written, moved = use.dram_read.value, use.dram_written.value, use.dram_moved.value
    vain = overfetches(use, limits)
    mixed = written >= limits.partial_written_ratio * read
    spilled = (moved > use.l2_bytes) & (moved <= limits.thrash_l2_ratio * use.l2_bytes)
    again = (written >= limits.thrash_written_ratio * read) & (read_back >= limits.thrash_read_back_share * written)
    busy = use.peak_share.low
    found = np.stack(
        (
            vain & ~mixed,
            vain & mixed,
            (busy >= limits.thrash_peak_share) & spilled & again,
            (busy >= limits.streaming_peak_share) & (use.reuse.value < limits.streaming_reuse_ratio),
            np.ones(len(read), bool),
        )
    )
    return ints(np.argmax(found, axis=0))


def overfetches(use: MemoryUse, limits: Limits) -> Bools:
    """Where DRAM moves clearly more than was asked for: by what L1 asked, else by what L2 filled."""
    known = np.isfinite(use.overfetch.value)
    by_l1 = use.overfetch.low >= limits.overfetch_ratio
    return np.where(known, by_l1, use.l2_filled.low >= limits.overfilled_ratio).astype(bool)
