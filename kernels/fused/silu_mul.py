"""SiLU of the gate, times the other half of a SwiGLU: one pass over memory instead of two."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from spikeprof.kernels.fused.checks import check_input, rows_of
from spikeprof.kernels.paths import TORCH, Ran, check_same, check_shape, chosen


def silu_mul(gate: Tensor, up: Tensor, *, path: str = "auto") -> Ran:
    """``silu(gate) * up``, both [..., n], in fp32 inside; the output is contiguous.

    The two may be halves of one projection: rows evenly spaced, elements of a row neighbours. Raises ValueError for
    tensors that differ in shape, dtype or device, are empty, spaced otherwise, or not fp16, bf16 or fp32.
    """
    check_input("gate", gate)
    check_shape("up", up, tuple(gate.shape))
    check_same("up", up, "gate", gate)
    rows, others = rows_of("gate", gate), rows_of("up", up)
    path = chosen(path, gate)
    if path == TORCH:
        return Ran((F.silu(gate.float()) * up.float()).to(gate.dtype), path)
    from spikeprof.kernels.fused import silu_mul_triton

    return Ran(silu_mul_triton.silu_mul(rows, others).view(gate.shape), path)


def silu_mul_unfused(gate: Tensor, up: Tensor) -> Ran:
    """The same of separate operators."""
    return Ran(F.silu(gate) * up, TORCH)
