"""How kernels use caches and DRAM: what follows from counters per launch. One element per row of ``Counted``.

* **L2 hit share**: lookups less sectors filled, over lookups, clipped to 0..1. It counts what was *fetched*: where a
  fill brings more than was looked up (DRAM is read 64 bytes at a time, a sector has 32) it would be below 0.
  ``l2_filled`` keeps that: sectors filled per sector looked up. A GPU whose L2 has two partitions (A100, H100, H200)
  looks half of all sectors up twice, and fills them twice.
* **asked**: bytes that SMs asked of L2 by ordinary loads and stores: sectors looked up in L1 and not found there.
  What TMA and asynchronous copies fetch goes past L1: then far more is looked up in L2, and it is not known.
* **overfetch**: bytes that DRAM moved per byte asked. Above 1 only where part of what is moved is not used. Written
  bytes count beyond one full L2: so much may be left from kernels before.
* **reuse**: bytes looked up in L2 per byte that DRAM moved.
* **footprint**: no table tells how many distinct bytes a kernel touches, so there is no re-read factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spikeprof.analyzers.derived.counters import Counted, Estimate, Floats, Peaks
from spikeprof.analyzers.derived.intervals import Bools
from spikeprof.profiler.units import NS_PER_S

SECTOR_BYTES = 32  # of L1 and L2, on all NVIDIA GPUs since Volta

#: A hit share further outside 0..1 than this is not one: the counter is not what it is taken for.
_HIT_EXCESS_SHARE = 0.05
#: L1 of kernels that send less than this share of their L2 traffic through it says nothing about them.
_MIN_L1_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Per launch. Shares are 0 to 1, rates bytes per second, ``ratio`` a quotient; NaN = not measured."""

    l1_hit: Estimate
    l2_hit: Estimate
    l2_filled: Estimate  # sectors per sector looked up
    dram_read: Estimate  # bytes
    dram_written: Estimate  # bytes
    dram_moved: Estimate  # bytes
    dram_rate: Estimate
    peak_share: Estimate
    reuse: Estimate  # ratio
    overfetch: Estimate  # ratio
    conflicts: Estimate  # share of shared-memory wavefronts
    peak: Floats  # DRAM bytes per second
    l2_bytes: Floats


def memory_use(rows: Counted, limits: Mapping[int, Peaks], max_l2_per_asked_ratio: float) -> MemoryUse:
    """What the counters of the rows say. ``limits`` are by GPU.

    L1 tells what SMs ask for only where L2 looks up at most ``max_l2_per_asked_ratio`` sectors for each.
    """
    count = len(rows.class_id)
    known = [limits.get(int(device)) for device in rows.device]
    peak = np.array([one.dram_bytes_per_s if one else np.nan for one in known])
    l2_bytes = np.array([one.l2_bytes if one else np.nan for one in known])
    l1, l1_hits = rows.per_launch("l1_sectors_count"), rows.per_launch("l1_hit_sectors_count")
    l2, l2_hits = rows.per_launch("l2_sectors_count"), rows.per_launch("l2_hit_sectors_count")
    read, written = rows.per_launch("dram_read_bytes"), rows.per_launch("dram_written_bytes")
    moved = read.plus(written)
    seconds = rows.mean_ns / NS_PER_S
    rate = moved.times(np.divide(1, seconds, out=np.full(count, np.nan), where=seconds > 0))
    asked_sectors = l1.less(l1_hits)
    asked = _where(l2.value <= max_l2_per_asked_ratio * asked_sectors.value, asked_sectors.times(SECTOR_BYTES))
    hit = l2_hits.over(l2)
    through_l1 = ~(l1.value < _MIN_L1_SHARE * l2.value)
    return MemoryUse(
        l1_hit=_where(through_l1, l1_hits.over(l1)).within(0, 1),
        l2_hit=_where(hit.value <= 1 + _HIT_EXCESS_SHARE, hit).within(0, 1),
        l2_filled=_where(hit.value <= 1 + _HIT_EXCESS_SHARE, Estimate(1 - hit.value, 1 - hit.high, 1 - hit.low)),
        dram_read=read,
        dram_written=written,
        dram_moved=moved,
        dram_rate=rate,
        peak_share=rate.times(1 / np.where(peak > 0, peak, np.nan)),
        reuse=l2.times(SECTOR_BYTES).over(moved),
        overfetch=_overfetch(read, written, l2_bytes, asked),
        conflicts=rows.per_launch("shared_conflicts_count")
        .over(rows.per_launch("shared_wavefronts_count"))
        .within(0, 1),
        peak=peak,
        l2_bytes=l2_bytes,
    )


def _overfetch(read: Estimate, written: Estimate, l2_bytes: Floats, asked: Estimate) -> Estimate:
    left = np.where(np.isfinite(l2_bytes), l2_bytes, np.inf)
    beyond = Estimate(*(np.maximum(np.nan_to_num(part) - left, 0) for part in written))
    return read.plus(beyond).over(asked)


def _where(good: Bools, estimate: Estimate) -> Estimate:
    return Estimate(*(np.where(good, part, np.nan) for part in estimate))
