"""Triton kernel of the random gather."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # of a program: rows times width
WIDEST = 1024
WARPS = 4


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]``, a tile of rows a program."""
    width, count = table.shape[1], index.numel()
    out = torch.empty((count, width), dtype=table.dtype, device=table.device)
    across = min(triton.next_power_of_2(width), WIDEST)
    down = ELEMENTS // across
    grid = (triton.cdiv(count, down), triton.cdiv(width, across))
    with torch.cuda.device_of(table):
        gather_kernel[grid](table, index, out, count, width, ROWS=down, WIDTH=across, num_warps=WARPS)
    return out


@triton.jit
def gather_kernel(table, index, out, count, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """``ROWS`` rows, ``WIDTH`` elements of each."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    row = tl.load(index + place, mask=place < count, other=0)
    inside = (place < count) & (column < width)
    tl.store(out + place * width + column, tl.load(table + row * width + column, mask=inside), mask=inside)
