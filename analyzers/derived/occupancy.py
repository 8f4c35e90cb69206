"""Theoretical occupancy: how many blocks of a launch an SM can hold at once, what limits them, and in how many waves
the grid runs.

An SM holds as many blocks as all of four resources allow: slots of warps, slots of blocks, registers, shared memory.
The rules of each are those of the CUDA occupancy calculator (``cuda_occupancy.h`` of CUDA 13.0), the numbers those of
``profiler/hardware.toml``. Shared memory counts at its largest carve-out, as the driver sets it unless the program asks
otherwise. Two things that may limit further are in no record: named barriers, and the sizes of clusters, whose blocks
need room on SMs of one GPC at the same time. What is given here is an upper bound then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spikeprof.analyzers.derived.counters import Floats
from spikeprof.analyzers.derived.intervals import Bools, Integers, Ints, ints
from spikeprof.profiler.hardware import Architecture, Peak

WARP_THREADS = 32

#: What may limit the blocks of an SM. Where several do, all are named, in this order.
RESOURCES = ("warps", "blocks", "registers", "shared_memory")

#: Why an occupancy is not known: the codes of ``Occupancy.unknown``, 0 = it is known.
REASONS = (
    "",
    "the limits of the GPU's architecture are not known",
    "registers per thread were not recorded",
    "threads per block were not recorded",
)

#: Blocks that a resource allows where it is not used at all.
_NO_LIMIT = np.iinfo(np.int32).max


class Shapes(NamedTuple):
    """Launch shapes, one element each; 0 = not recorded. ``architecture`` is an index into a list, -1 = unknown."""

    threads: Ints  # per block
    registers: Ints  # per thread
    shared_bytes: Ints  # per block, static and dynamic
    architecture: Ints


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Per shape, all per SM unless named otherwise. ``allowed``: blocks by resource; where ``unknown``, all is 0.

    A block that fits on no SM has ``blocks`` 0 without being unknown: such a launch cannot have run.
    """

    unknown: Ints  # index into REASONS
    block_warps: Ints
    block_registers: Ints  # as given out, per block
    block_shared_bytes: Ints  # as given out, per block, with what the driver reserves
    allowed: Ints  # [resource, shape]
    blocks: Ints
    max_warps: Ints
    registers_share: Floats  # of the SM's registers, what one block is given; NaN = unknown
    thread_registers_share: Floats  # registers of a thread, of the most that one can have; NaN = unknown
    may_cluster: Bools  # launches in clusters are possible; whether this one was is not recorded
    carve_out_bytes: Ints  # the least size of shared memory that holds the blocks

    @property
    def known(self) -> Bools:
        """The shapes whose occupancy is known."""
        return np.asarray(self.unknown == 0, np.bool_)

    @property
    def warps(self) -> Ints:
        """Warps that an SM holds at most."""
        return self.blocks * self.block_warps

    @property
    def share(self) -> Floats:
        """Warps held of those that an SM has slots for; NaN = unknown."""
        return _quotient(self.warps, np.where(self.known, self.max_warps, 0))

    def limiters(self, shape: int) -> list[str]:
        """The resources that allow no more blocks; none where it is not known."""
        if not self.known[shape]:
            return []
        return [name for name, n in zip(RESOURCES, self.allowed[:, shape], strict=True) if n == self.blocks[shape]]


def occupancy(shapes: Shapes, architectures: Sequence[Architecture | None]) -> Occupancy:
    """The occupancy of every shape; ``shapes.architecture`` numbers ``architectures``. Never raises for a shape."""
    threads, registers, shared, arch = shapes
    limit = {name: _of(architectures, name)[arch] for name in _LIMITS}  # the last element is that of the unknown
    unknown = np.select([limit["warps_count"] == 0, threads <= 0, registers <= 0], [1, 3, 2], 0)
    warps = _up(np.maximum(threads, 1), WARP_THREADS)
    per_warp = _up(registers * WARP_THREADS, limit["register_unit_count"]) * limit["register_unit_count"]
    block_shared = _up(shared + limit["block_reserved_bytes"], limit["shared_unit_bytes"]) * limit["shared_unit_bytes"]
    allowed = np.stack(
        [
            np.where(threads <= limit["block_threads_count"], limit["warps_count"] // warps, 0),
            limit["blocks_count"],
            _by_registers(registers, warps, per_warp, limit),
            _by_shared_memory(block_shared, limit),
        ]
    )
    known = unknown == 0
    allowed = ints(np.where(known, allowed, 0))
    blocks = ints(allowed.min(axis=0))
    return Occupancy(
        ints(unknown),
        ints(np.where(known, warps, 0)),
        ints(np.where(known, per_warp * warps, 0)),
        ints(np.where(known, block_shared, 0)),
        allowed,
        blocks,
        ints(np.where(known, limit["warps_count"], 0)),
        _quotient(per_warp * warps, np.where(known, limit["registers_count"], 0)),
        _quotient(registers, np.where(known, limit["thread_registers_count"], 0)),
        np.asarray(known & (limit["cluster_blocks_count"] > 1), np.bool_),
        _carve_out(blocks * block_shared, arch, architectures),
    )


_LIMITS = ("warps_count", "blocks_count", "block_threads_count", "registers_count", "block_registers_count",
           "thread_registers_count", "shared_bytes", "block_shared_bytes", "block_reserved_bytes",
           "register_unit_count", "partitions_count", "shared_unit_bytes", "cluster_blocks_count")  # fmt: skip


def _of(architectures: Sequence[Architecture | None], name: str) -> Ints:
    """One limit by architecture, and 0 at the end; 0 where it is not known."""
    peaks: list[Peak | None] = [getattr(a, name) if a else None for a in architectures]
    return ints([*(int(peak.value) if peak else 0 for peak in peaks), 0])


def _up(values: Integers, unit: Integers | int) -> Ints:
    """Values in whole units, rounded up; a unit of 0 counts as 1."""
    return ints(-(-values // np.maximum(unit, 1)))


def _by_registers(registers: Ints, warps: Ints, per_warp: Ints, limit: dict[str, Ints]) -> Ints:
    """Blocks that registers allow.

    Each partition of an SM gives out its own registers, so that what is left over in one is of no use to another. A
    block's registers are checked against the most that a block may have as if its warps filled all partitions evenly.
    """
    partitions = np.maximum(limit["partitions_count"], 1)
    held = limit["registers_count"] // partitions // np.maximum(per_warp, 1) * partitions
    assumed = per_warp * _up(warps, partitions) * partitions
    fits = (assumed <= limit["block_registers_count"]) & (registers <= limit["thread_registers_count"])
    return ints(np.where(fits, held // warps, 0))


def _by_shared_memory(block_shared: Ints, limit: dict[str, Ints]) -> Ints:
    """Blocks that shared memory allows at its largest carve-out."""
    fits = block_shared <= limit["block_shared_bytes"] + limit["block_reserved_bytes"]
    held = np.where(block_shared > 0, limit["shared_bytes"] // np.maximum(block_shared, 1), _NO_LIMIT)
    return ints(np.where(fits, held, 0))


def _carve_out(needed: Ints, arch: Ints, architectures: Sequence[Architecture | None]) -> Ints:
    """The least size of shared memory that holds so many bytes."""
    found = np.zeros(len(needed), np.int64)
    for number, one in enumerate(architectures):
        sizes = ints([int(size.value) for size in one.carve_out_bytes] if one else [])
        mine = arch == number
        if len(sizes) and mine.any():
            found[mine] = sizes[np.minimum(np.searchsorted(sizes, needed[mine]), len(sizes) - 1)]
    return found


# ---------------------------------------------------------------- waves


class Waves(NamedTuple):
    """How a grid runs over the SMs of a GPU, if all its blocks take equally long. NaN = unknown.

    ``waves`` are those of blocks that fit at once, the last one counted by its part. ``tail_share`` is the part of the
    room for blocks that stands empty over all whole waves: ``1 - waves / ceil(waves)``. ``active_sms_share`` is the
    mean share of SMs with a block, ``warps`` the mean of warps on an SM that has one.
    """

    waves: Floats
    tail_share: Floats
    active_sms_share: Floats
    warps: Floats

    def of(self, rows: Integers | Bools) -> Waves:
        """Some of the rows."""
        return Waves(*(part[rows] for part in self))


def waves(occupied: Occupancy, grid_blocks: Ints, sm_count: Ints, cluster: Ints | None = None) -> Waves:
    """The waves of grids of so many blocks, by shape. Blocks go to the emptiest SM first.

    ``sm_count`` 0 = unknown. ``cluster``: blocks of a cluster, 0 = unknown; blocks in excess of whole clusters find no
    room. A cluster also needs its SMs to be of one GPC: with clusters there may be more waves than this.
    """
    room = occupied.blocks * sm_count
    if cluster is not None:
        room = room - room % np.maximum(cluster, 1)
    known = occupied.known & (room > 0) & (grid_blocks > 0)
    count = _quotient(np.where(known, grid_blocks, 0), np.where(known, room, 0))
    whole = np.ceil(count)
    # SMs with a block in the last wave; in all waves before it every SM has as many as it can hold.
    left = np.where(known, (grid_blocks - 1) % np.maximum(room, 1) + 1, 0)
    last_sms = np.minimum(left, sm_count)
    active = (whole - 1 + last_sms / np.maximum(sm_count, 1)) / whole
    held = (whole - 1) * sm_count + last_sms  # SMs with a block, over all waves
    return Waves(count, 1 - count / whole, active, _quotient(grid_blocks * occupied.block_warps, held))


def _quotient(part: Integers | Floats, whole: Integers | Floats) -> Floats:
    """The quotient, NaN where there is nothing to divide by."""
    result = np.full(len(part), np.nan)
    np.divide(part, whole, out=result, where=np.nan_to_num(np.asarray(whole, np.float64)) > 0)
    return result
