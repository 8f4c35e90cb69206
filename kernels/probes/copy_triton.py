"""Triton kernel of the streaming copy."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096  # of a program: 16 KiB, four 16-byte loads a thread
WARPS = 8


def copy_words(source: Tensor, out: Tensor) -> None:
    """Copy a flat tensor into another."""
    words = source.numel()
    with torch.cuda.device_of(source):
        stream_copy_kernel[(triton.cdiv(words, WORDS),)](source, out, words, BLOCK=WORDS, num_warps=WARPS)


@triton.jit
def stream_copy_kernel(source, out, words, BLOCK: tl.constexpr):
    """Each program copies ``BLOCK`` neighbouring words."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    tl.store(out + at, tl.load(source + at, mask=inside), mask=inside)
