"""What the Triton kernels of attention share: products with float32 sums, on the GPU and in the interpreter."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spikeprof.kernels.paths import is_interpreted

LN2 = tl.constexpr(0.6931471805599453)

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def operand(dtype: torch.dtype) -> tl.dtype:
    """The type in which values of ``dtype`` are multiplied: the interpreter has no products of bfloat16."""
    return tl.float32 if dtype == torch.bfloat16 and is_interpreted() else _TYPES[dtype]


@triton.jit
def dot(a, b, sums, OPERAND: tl.constexpr):
    """``a @ b`` in float32, added to ``sums`` unless None; full precision for float32 operands."""
    return tl.dot(a.to(OPERAND), b.to(OPERAND), sums, input_precision="ieee")
