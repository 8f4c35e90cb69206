"""Triton kernel of the matrix product: persistent, tiles in groups, operands through tensor descriptors."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Tiles(NamedTuple):
    """Sizes of one program's tile, and how it is run."""

    m: int
    n: int
    k: int
    group: int  # tile rows that are walked together, so that their operands stay in L2
    warps: int
    stages: int


# By bytes of an element. 2: 48 KiB a stage and 64 KiB for the result, of the 227 KiB of shared memory that Hopper has.
TILES = {2: Tiles(128, 256, 64, 8, 8, 3), 4: Tiles(64, 64, 32, 8, 4, 2)}
CPU_PROGRAMS = 2


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``a @ b`` into ``out``, one program for each SM."""
    m, k = a.shape
    n = b.shape[1]
    tiles = TILES[a.element_size()]
    count = triton.cdiv(m, tiles.m) * triton.cdiv(n, tiles.n)
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else CPU_PROGRAMS
    programs = min(count, sms)
    with torch.cuda.device_of(a):
        matmul_kernel[(programs,)](
            TensorDescriptor.from_tensor(a, [tiles.m, tiles.k]),
            TensorDescriptor.from_tensor(b, [tiles.k, tiles.n]),
            TensorDescriptor.from_tensor(out, [tiles.m, tiles.n]),
            m, n, k,
            TILE_M=tiles.m, TILE_N=tiles.n, TILE_K=tiles.k, GROUP=tiles.group, PROGRAMS=programs,
            WIDEN=a.dtype == torch.bfloat16 and not a.is_cuda,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip


@triton.jit
def matmul_kernel(
    a, b, out, m, n, k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Tiles ``program``, ``program + PROGRAMS``, … of the result, row groups first."""
    rows = tl.cdiv(m, TILE_M)
    columns = tl.cdiv(n, TILE_N)
    steps = tl.cdiv(k, TILE_K)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=True):
        group = tile // (GROUP * columns)
        height = min(rows - group * GROUP, GROUP)
        row = (group * GROUP + tile % (GROUP * columns) % height) * TILE_M
        column = tile % (GROUP * columns) // height * TILE_N
        total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for step in range(steps):
            left = a.load([row, step * TILE_K])
            right = b.load([step * TILE_K, column])
            if WIDEN:  # the interpreter multiplies bf16 as the integers that hold them
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision="ieee")
        out.store([row, column], total.to(out.dtype))
