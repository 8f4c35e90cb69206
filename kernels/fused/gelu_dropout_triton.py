"""Triton kernel of GELU and dropout.

Memory sets the pace only where an element takes few instructions, so the error function is not evaluated as such:
``gelu(x) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2))``, and the logarithm of ``erfc`` is nearly a parabola. Of degree
6, fitted on [0, 6] for the least error of the result, it is off by 1e-7 there; beyond 6 ``erfc`` counts for nothing.
"""
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
    value = _gelu(tl.load(x + place, mask=place < count, other=0.0).to(tl.float32))
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    nothing = tl.zeros_like(low)
    a, b, c, d = tl.philox(seed, low, (counter >> 32).to(tl.uint32), nothing, nothing, n_rounds=_ROUNDS)
    pair = tl.where(word < 4, tl.where(word < 2, a[:, None], b[:, None]), tl.where(word < 6, c[:, None], d[:, None]))
    # A word is compared in the upper half: what is below it does not change the order.
    bits = tl.where(word % 2 == 0, pair << 16, pair)
    factor = tl.where(bits >= (threshold << 16).to(tl.uint32), scale, 0.0)
    tl.store(out + place, (value * factor).to(out.dtype.element_ty), mask=place < count)


@triton.jit
def _gelu(x):
    """See above."""
    size = tl.minimum(tl.abs(x), 6.0)
    power = 2.992414010805078e-05 * size - 0.0007398738525807858
    power = power * size + 0.007977461442351341
    power = power * size - 0.05323818325996399
    power = power * size - 0.45891568064689636
    power = power * size - 1.1511471271514893
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - 0.5 * size * tl.exp2(power * size)
