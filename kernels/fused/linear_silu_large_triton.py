"""Triton kernel of the linear layer with SiLU in its epilogue, for many rows: persistent, operands by descriptors."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, OUTS, INS = 128, 256, 64  # of a tile: 48 KiB a stage, and 64 KiB for the result
GROUP = 16  # rows of tiles that are walked together, so that the L2 keeps what they share
WARPS, STAGES = 8, 3
LEAST_ROWS = 256
CPU_PROGRAMS = 2
_ALIGNED_BYTES = 16  # rows of what a descriptor describes


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether rows are as many, and lie in memory, as this kernel wants them, and the GPU loads tiles by itself."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] < 9:
        return False
    size = x.element_size()
    pitches = (x.stride(0) * size, weight.stride(0) * size, weight.shape[0] * size)
    aligned = min(pitches) > 0 and all(n % _ALIGNED_BYTES == 0 for n in (*pitches, x.data_ptr(), weight.data_ptr()))
    return size == 2 and x.shape[0] >= LEAST_ROWS and aligned


def linear_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See linear_silu.py; ``x`` is [rows, in]."""
    (rows, ins), outs = x.shape, weight.shape[0]
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(outs, OUTS)
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else CPU_PROGRAMS
    programs = min(tiles, sms)
    with torch.cuda.device_of(x):
        linear_silu_large_kernel[(programs,)](
            TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [ROWS, INS]),
            TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [OUTS, INS]),
            TensorDescriptor.from_tensor(out, [ROWS, OUTS]),
            bias, rows, outs, ins,
            ROWS=ROWS, OUTS=OUTS, INS=INS, GROUP=GROUP, PROGRAMS=programs,
            WIDEN=x.dtype == torch.bfloat16 and not x.is_cuda,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out


@triton.jit
def linear_silu_large_kernel(
    x, weight, out, bias, rows, outs, ins,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Tiles ``program``, ``program + PROGRAMS``, … of the result, row groups first."""
    down = tl.cdiv(rows, ROWS)
    across = tl.cdiv(outs, OUTS)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        group = tile // (GROUP * across)
        height = min(down - group * GROUP, GROUP)
        row = (group * GROUP + tile % (GROUP * across) % height) * ROWS
        column = tile % (GROUP * across) // height * OUTS
        total = tl.zeros((ROWS, OUTS), dtype=tl.float32)
        for begin in range(0, ins, INS):
            left = x.load([row, begin])
            right = weight.load([column, begin])
            if WIDEN:  # the interpreter multiplies bf16 as the integers that hold them
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, right.T, total, input_precision="ieee")
        place = column + tl.arange(0, OUTS)
        total += tl.load(bias + place, mask=place < outs, other=0.0).to(tl.float32)[None, :]
        out.store([row, column], (total / (1.0 + tl.exp(-total))).to(out.dtype))
