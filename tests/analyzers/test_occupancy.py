from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from paths import SHARED, needs_shared

from spikeprof.analyzers.derived.intervals import Ints, ints
from spikeprof.analyzers.derived.occupancy import REASONS, Occupancy, Shapes, occupancy, waves
from spikeprof.profiler.hardware import architecture, architectures

CALCULATOR = Path(__file__).with_name("occupancy_calculator.tsv")


def of(arch: str, *shapes: tuple[int, int, int]) -> Occupancy:
    """(threads per block, registers per thread, bytes of shared memory per block) on one architecture."""
    threads, registers, shared = (ints(column) for column in zip(*shapes, strict=True))
    return occupancy(Shapes(threads, registers, shared, ints([0] * len(shapes))), [architecture(arch)])


# An SM of an H100 or H200: 64 warps, 32 blocks, 4 partitions of 16,384 registers given out by 256 to a warp, 233,472
# bytes of shared memory given out by 128, of which each block takes 1,024 more than it asks for, and at most all.
@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks", "limiters"),
    [
        # registers: 32 × 32 = 1,024 a warp, 16 warps a partition, 64 an SM; 4 warps a block
        (128, 32, 0, 16, ["warps", "registers"]),
        (128, 18, 0, 16, ["warps"]),  # 576 -> 768 a warp, 21 a partition, 84 an SM: 21 blocks
        (128, 34, 0, 12, ["registers"]),  # 1,088 -> 1,280: 12 a partition, 48 an SM
        (128, 40, 0, 12, ["registers"]),  # 1,280 too
        (128, 128, 18_944, 4, ["registers"]),  # 4,096: 4 a partition; shared memory 19,968: 11 blocks
        (128, 255, 49_152, 2, ["registers"]),  # 8,160 -> 8,192: 2 a partition; 50,176 bytes: 4 blocks
        (160, 64, 0, 6, ["registers"]),  # 5 warps: 64 // 5 = 12; 2,048: 32 an SM, 32 // 5 = 6
        (192, 48, 8_192, 6, ["registers"]),  # 6 warps: 10; 1,536: 10 a partition, 40 // 6 = 6; 9,216 bytes: 25
        (96, 40, 2_048, 16, ["registers"]),  # 3 warps: 21; 48 // 3 = 16
        (768, 80, 0, 1, ["registers"]),  # 24 warps: 2; 2,560: 6 a partition, 24 an SM
        (640, 48, 0, 2, ["registers"]),  # 20 warps: 3; 40 // 20 = 2
        (1024, 64, 0, 1, ["registers"]),  # 2,048: 8 a partition, 32 an SM
        (256, 255, 0, 1, ["registers"]),  # 8,192 × 8 warps: all 65,536
        (224, 255, 0, 1, ["registers"]),  # 7 warps of the 8 that there is room for
        # shared memory
        (256, 32, 49_152, 4, ["shared_memory"]),  # 48 KB: 50,176 bytes of 233,472
        (256, 32, 49_153, 4, ["shared_memory"]),  # opted in to more: 50,177 -> 50,304
        (64, 24, 7_000, 28, ["shared_memory"]),  # 8,024 -> 8,064: 28.95; registers 42, warps 32, blocks 32
        (256, 32, 232_448, 1, ["shared_memory"]),  # 227 KB: all of it
        (1024, 16, 116_736, 1, ["shared_memory"]),  # 117,760: 1.98
        (1024, 16, 115_712, 2, ["warps", "shared_memory"]),  # 116,736: exactly 2
        (384, 168, 164_308, 1, ["registers", "shared_memory"]),  # 5,376: 3 a partition, 12 warps; 165,376: 1.4
        # blocks
        (32, 16, 0, 32, ["blocks"]),  # 64 by warps, 128 by registers
        (1, 32, 0, 32, ["blocks"]),  # a warp for one thread; 64 by warps and registers
        (33, 32, 0, 32, ["warps", "blocks", "registers"]),  # 2 warps: 32 by each
        # warps
        (1024, 32, 0, 2, ["warps", "registers"]),
        (256, 16, 0, 8, ["warps"]),  # registers: 512, 128 an SM: 16 blocks
        (512, 25, 0, 4, ["warps", "registers"]),  # 800 -> 1,024
        (100, 32, 0, 16, ["warps", "registers"]),  # 4 warps, the last of 4 threads
        # none fits
        (1025, 16, 0, 0, ["warps"]),  # more threads than a block may have
        (32, 256, 0, 0, ["registers"]),  # more than a thread can have
        (1024, 65, 0, 0, ["registers"]),  # 2,080 -> 2,304: 28 warps an SM, and the block has 32
        (288, 255, 0, 0, ["registers"]),  # 9 warps are checked as if they were 12
        (256, 32, 232_449, 0, ["shared_memory"]),  # 233,473 -> 233,600
    ],
)
def test_an_sm_of_an_h100(threads: int, registers: int, shared: int, blocks: int, limiters: list[str]) -> None:
    one = of("sm_90", (threads, registers, shared))
    assert one.blocks.tolist() == [blocks]
    assert one.limiters(0) == limiters
    warps = -(-threads // 32)
    assert one.warps.tolist() == [blocks * warps]
    assert one.share.tolist() == [blocks * warps / 64]


@pytest.mark.parametrize(
    ("arch", "shape", "blocks", "share", "limiters"),
    [
        ("sm_70", (256, 32, 0), 8, 1.0, ["warps", "registers"]),
        ("sm_70", (128, 32, 98_304), 1, 4 / 64, ["shared_memory"]),  # all 96 KB: nothing is reserved
        ("sm_70", (128, 32, 98_305), 0, 0.0, ["shared_memory"]),
        ("sm_70", (32, 16, 3_073), 29, 29 / 64, ["shared_memory"]),  # given out by 256: 3,328 of 98,304
        ("sm_75", (128, 64, 0), 8, 1.0, ["warps", "registers"]),  # 32 warps
        ("sm_75", (32, 16, 0), 16, 0.5, ["blocks"]),
        ("sm_75", (64, 32, 65_537), 0, 0.0, ["shared_memory"]),
        ("sm_80", (128, 32, 40_960), 4, 0.25, ["shared_memory"]),  # 41,984 of 167,936: exactly 4
        ("sm_80", (128, 32, 166_912), 1, 4 / 64, ["shared_memory"]),  # 163 KB
        ("sm_86", (256, 32, 0), 6, 1.0, ["warps"]),  # 48 warps; registers: 8
        ("sm_86", (64, 16, 0), 16, 32 / 48, ["blocks"]),
        ("sm_89", (64, 16, 0), 24, 1.0, ["warps", "blocks"]),
        ("sm_100", (128, 34, 0), 12, 0.75, ["registers"]),
        ("sm_110", (512, 32, 0), 3, 1.0, ["warps"]),
        ("sm_120", (1024, 32, 0), 1, 32 / 48, ["warps"]),
        ("sm_120", (128, 32, 101_376), 1, 4 / 48, ["shared_memory"]),  # 99 KB
        ("sm_120", (128, 32, 101_377), 0, 0.0, ["shared_memory"]),
    ],
)
def test_other_architectures(
    arch: str, shape: tuple[int, int, int], blocks: int, share: float, limiters: list[str]
) -> None:
    one = of(arch, shape)
    assert (one.blocks[0], one.share[0], one.limiters(0)) == (blocks, share, limiters)


def test_it_is_that_of_the_occupancy_calculator() -> None:
    """Shapes at random, with what ``cuda_occupancy.h`` of CUDA 13.0 answers: blocks, registers and bytes of a block."""
    with CALCULATOR.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader((line for line in lines if not line.startswith("#")), delimiter="\t"))
    names = [one.name for one in architectures()]
    columns = {name: ints([int(row[name]) for row in rows]) for name in rows[0] if name != "arch"}
    arch = ints([names.index(row["arch"]) for row in rows])
    assert len(rows) >= 300
    assert set(arch.tolist()) == set(range(len(names)))
    found = occupancy(
        Shapes(columns["threads"], columns["registers"], columns["static"] + columns["dynamic"], arch), architectures()
    )
    assert found.blocks.tolist() == columns["blocks"].tolist()
    assert found.block_registers.tolist() == columns["block_registers"].tolist()
    assert found.block_shared_bytes.tolist() == columns["block_shared_bytes"].tolist()


def test_blocks_of_real_launches_are_those_of_the_driver() -> None:
    """cuOccupancyMaxActiveBlocksPerMultiprocessor on an H200, of what tests/gpu/occupancy_launches.py launches."""
    with Path(__file__).with_name("occupancy_h200.tsv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    shapes = [(int(r["threads"]), int(r["registers"]), int(r["static"]) + int(r["dynamic"])) for r in rows]
    assert of("sm_90", *shapes).blocks.tolist() == [int(row["blocks"]) for row in rows]
    assert len({row["symbol"] for row in rows}) >= 150
    assert sum(int(row["cluster"]) > 1 for row in rows) >= 20


def test_several_architectures_at_once_and_what_is_not_known() -> None:
    shapes = Shapes(ints([256, 256, 256, 256, 0]), ints([32, 32, 32, 0, 32]), ints([0] * 5), ints([0, 1, -1, 0, 0]))
    found = occupancy(shapes, [architecture("sm_90"), architecture("sm_86")])
    assert found.blocks.tolist() == [8, 6, 0, 0, 0]
    assert found.known.tolist() == [True, True, False, False, False]
    assert [REASONS[i] for i in found.unknown.tolist()][2:] == [
        "the limits of the GPU's architecture are not known",
        "registers per thread were not recorded",
        "threads per block were not recorded",
    ]
    assert np.isnan(found.share).tolist() == [False, False, True, True, True]
    assert found.limiters(2) == []
    assert found.may_cluster.tolist() == [True, False, False, False, False]
    assert len(occupancy(Shapes(*(ints([]) for _ in range(4))), []).blocks) == 0


def test_the_least_shared_memory_that_an_sm_must_be_set_to() -> None:
    # On sm_90: 16 blocks of 1,024 reserved bytes; 4 of 50,176, exactly 196 KB; 1 of 165,376. On sm_75 32 or 64 KB.
    found = of("sm_90", (128, 32, 0), (256, 32, 49_152), (384, 168, 164_308))
    assert found.carve_out_bytes.tolist() == [16 * 1024, 196 * 1024, 164 * 1024]
    assert of("sm_75", (128, 64, 0), (128, 64, 4_096)).carve_out_bytes.tolist() == [32 * 1024, 32 * 1024]


def test_shares_of_the_registers() -> None:
    found = of("sm_90", (384, 168, 0), (128, 34, 0))
    assert found.registers_share.tolist() == [64_512 / 65_536, 4 * 1_280 / 65_536]
    assert found.thread_registers_share.tolist() == [168 / 255, 34 / 255]


# -- waves -------------------------------------------------------------------------------------------------------------


def grids(shape: tuple[int, int, int], *blocks: int, cluster: Ints | None = None) -> list[tuple[float, ...]]:
    """Waves of grids on the 132 SMs of an H100, rounded to 6 places."""
    found = waves(of("sm_90", *[shape] * len(blocks)), ints(blocks), ints([132] * len(blocks)), cluster)
    return [tuple(round(float(part[i]), 6) for part in found) for i in range(len(blocks))]


def test_waves_of_16_blocks_per_sm() -> None:
    # 132 × 16 = 2,112 blocks of 4 warps fit at once. (waves, room left empty, SMs with a block, warps on these)
    found = grids((128, 32, 0), 1, 132, 200, 2112, 2113, 3168)
    assert found[0] == (round(1 / 2112, 6), round(1 - 1 / 2112, 6), round(1 / 132, 6), 4.0)
    assert found[1] == (0.0625, 0.9375, 1.0, 4.0)
    assert found[2] == (round(200 / 2112, 6), round(1912 / 2112, 6), 1.0, round(800 / 132, 6))
    assert found[3] == (1.0, 0.0, 1.0, 64.0)
    # one block more: all SMs, then one; 8,452 warps over 133 SMs with a block
    assert found[4] == (round(2113 / 2112, 6), round(2111 / 4224, 6), round(133 / 264, 6), round(8452 / 133, 6))
    assert found[5] == (1.5, 0.25, 1.0, 48.0)


def test_clusters_that_are_known_leave_room_for_whole_ones_only() -> None:
    gemm = (384, 168, 164_308)  # one block per SM: 132
    assert [wave[0] for wave in grids(gemm, 128, 264, 264, cluster=ints([4, 4, 8]))] == [
        round(128 / 132, 6),
        2.0,
        2.0625,  # 16 clusters of 8: 128 blocks
    ]


def test_waves_that_are_not_known() -> None:
    fits, none, grid = of("sm_90", (128, 32, 0)), of("sm_90", (1025, 32, 0)), ints([100])
    for found in (
        waves(fits, ints([0]), ints([132])),
        waves(fits, grid, ints([0])),
        waves(none, grid, ints([132])),
        waves(fits, grid, ints([4]), cluster=ints([100])),  # no room for one cluster
    ):
        assert all(np.isnan(part).all() for part in found)


# -- what torch.profiler says ------------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize(
    ("name", "arch", "count"),
    [("nccl_data", "sm_80", 100), ("resnet_kineto", "sm_75", 50), ("linear_kineto", "sm_75", 5)],
)
def test_it_is_what_torch_profiler_estimated_where_it_was_recorded(name: str, arch: str, count: int) -> None:
    """Its estimate, in percent: blocks that fit, or all that there are, by threads. Above 48 KB it says 0, wrongly."""
    (path,) = (SHARED / "traces").glob(f"**/{name}.json.gz")
    with gzip.open(path) as file:
        data = json.load(file)
    sms = next(one["numSms"] for one in data["deviceProperties"])
    events = [e["args"] for e in data["traceEvents"] if "est. achieved occupancy %" in e.get("args", {})]
    known = [a for a in events if a.get("shared memory", 49_153) <= 49_152]
    threads = [math.prod(a["block"]) for a in known]
    found = of(arch, *((t, a["registers per thread"], a["shared memory"]) for t, a in zip(threads, known, strict=True)))
    there = np.array([math.prod(a["grid"]) / sms for a in known])
    mine = np.minimum(found.blocks, there) * threads / (found.max_warps * 32) * 100
    assert len(known) >= count
    assert np.abs(mine - [a["est. achieved occupancy %"] for a in known]).max() <= 0.5
