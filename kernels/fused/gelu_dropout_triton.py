"""Triton kernel of GELU and dropout."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spikeprof.kernels.fused import dropout

ELEMENTS = 2048  # of a program
WARPS = 4
_ROUNDS = tl.constexpr(dropout.ROUNDS)
_WORDS = tl.constexpr(dropout.WORDS)


def gelu_dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """See gelu_dropout.py; ``x`` is contiguous."""
    out = torch.empty_like(x)
    count = x.numel()
    with torch.cuda.device_of(x):
        gelu_dropout_kernel[(triton.cdiv(count, ELEMENTS),)](
            x, out, count, seed, dropout.threshold(p), dropout.keep_scale(p), ELEMENTS=ELEMENTS, num_warps=WARPS
        )
    return out


@triton.jit(do_not_specialize=["seed", "threshold"])
def gelu_dropout_kernel(x, out, count, seed, threshold, scale, ELEMENTS: tl.constexpr):
    """A row of the tile is the elements that share a counter; a thread should have it whole, as one vector."""
    counter = tl.program_id(0).to(tl.int64) * (ELEMENTS // _WORDS) + tl.arange(0, ELEMENTS // _WORDS)
    word = tl.arange(0, _WORDS)[None, :]
    place = counter[:, None] * _WORDS + word
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    nothing = tl.zeros_like(low)
    a, b, c, d = tl.philox(seed, low, (counter >> 32).to(tl.uint32), nothing, nothing, n_rounds=_ROUNDS)
    pair = tl.where(word < 4, tl.where(word < 2, a[:, None], b[:, None]), tl.where(word < 6, c[:, None], d[:, None]))
    bits = (pair >> (word % 2 * 16).to(tl.uint32)) & 0xFFFF
    factor = tl.where(bits.to(tl.int32) >= threshold, scale, 0.0)
    tl.store(out + place, (value * factor).to(out.dtype.element_ty), mask=place < count)
