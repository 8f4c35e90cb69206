"""Triton kernel that reads one buffer again and again."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # of a program in one pass: 16 KiB
WARPS = 8
SHIFT = 37  # blocks that a program moves on by from pass to pass


def read_passes(x: Tensor, passes: int) -> Tensor:
    """Sums of what each program read, fp32 [programs]."""
    blocks = triton.cdiv(x.numel(), ELEMENTS)
    sums = torch.empty(blocks, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        read_again_kernel[(blocks,)](x, sums, x.numel(), blocks, passes, BLOCK=ELEMENTS, SHIFT=SHIFT, num_warps=WARPS)
    return sums


@triton.jit
def read_again_kernel(x, sums, elements, blocks, passes, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """A block in each pass; each block is read by one program in each pass."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for turn in range(passes):
        at = (program + turn * SHIFT) % blocks * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < elements, other=0.0, cache_modifier=".cg")
    tl.store(sums + program, tl.sum(total))
