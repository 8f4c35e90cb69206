"""The decoder's operators as two sets: fused kernels, and their twins of separate torch operators to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from spikeprof.kernels import fused
from spikeprof.kernels.attention import naive_attention, tiled_attention
from spikeprof.kernels.fused import Normed, Rotated
from spikeprof.kernels.paths import Attended, Ran


@dataclass(frozen=True, slots=True)
class Operators:
    """``norm(x, residual, weight, eps)``, ``rotate(q, k, positions, table)``, ``silu_mul(gate, up)`` and causal
    ``attend(q, k, v, window)``, shaped as in kernels.fused and kernels.attention; each says its path."""

    norm: Callable[[Tensor, Tensor, Tensor, float], Normed]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], Rotated]
    silu_mul: Callable[[Tensor, Tensor], Ran]
    attend: Callable[[Tensor, Tensor, Tensor, int | None], Attended]


def fused_operators(path: str) -> Operators:
    """Fused kernels, and attention by tiles, on ``path``."""
    return Operators(
        lambda x, residual, weight, eps: fused.rms_norm_residual(x, residual, weight, eps=eps, path=path),
        lambda q, k, positions, table: fused.rotary(q, k, positions, table, path=path),
        lambda gate, up: fused.silu_mul(gate, up, path=path),
        lambda q, k, v, window: tiled_attention(q, k, v, window=window, path=path),
    )


def unfused_operators() -> Operators:
    """Separate torch operators, and attention that materialises its scores."""
    return Operators(
        lambda x, residual, weight, eps: fused.rms_norm_residual_unfused(x, residual, weight, eps=eps),
        fused.rotary_unfused,
        fused.silu_mul_unfused,
        lambda q, k, v, window: naive_attention(q, k, v, window=window),
    )
