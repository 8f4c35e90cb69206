"""Programs under test: separate operators, or what does the same in one: ``python fusion_programs.py NAME HOW``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

REPEATS = 40


def silu_mul(how: str) -> Callable[[], object]:
    """The activation of a SwiGLU, 224 MiB a tensor."""
    from spikeprof.kernels import fused

    gate, up = _halves(8192, 14336), _halves(8192, 14336)
    return (lambda: fused.silu_mul_unfused(gate, up)) if how == "eager" else (lambda: fused.silu_mul(gate, up))


def linear_silu(how: str) -> Callable[[], object]:
    """A product with an activation, 512 MiB a result, few operations to a byte."""
    from spikeprof.kernels import fused

    given = _halves(16384, 1024), _halves(16384, 1024) / 32, _halves(16384)
    return (lambda: fused.linear_silu_unfused(*given)) if how == "eager" else (lambda: fused.linear_silu(*given))


def gemm_silu_mul(how: str) -> Callable[[], object]:
    """A matrix product, SiLU, a product by element: fused are the first two of them, or the last two."""
    from torch.nn import functional as F

    from spikeprof.kernels import fused

    x, weight, bias, up = _halves(16384, 1024), _halves(16384, 1024) / 32, 0 * _halves(16384), _halves(16384, 16384)
    return {
        "eager": lambda: fused.silu_mul_unfused(F.linear(x, weight), up),
        "first": lambda: fused.linear_silu(x, weight, bias).out * up,
        "second": lambda: fused.silu_mul(F.linear(x, weight), up),
    }[how]


def rms_norm_residual(how: str) -> Callable[[], object]:
    """Addition to the residual stream and RMS norm, 256 MiB a tensor."""
    from spikeprof.kernels import fused

    given = _halves(16384, 8192), _halves(16384, 8192), _halves(8192)
    if how == "eager":
        return lambda: fused.rms_norm_residual_unfused(*given)
    return lambda: fused.rms_norm_residual(*given)


def pointwise(how: str) -> Callable[[], object]:
    """The pointwise part of an MLP, eager or compiled."""
    import torch
    from torch.nn import functional as F

    x, y = _halves(8192, 8192), _halves(8192, 8192)

    def part() -> torch.Tensor:
        return torch.tanh(F.silu(x) * y + x) * 0.5 + F.gelu(y)

    return part if how == "eager" else torch.compile(part)


def _halves(*shape: int) -> object:
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.half)


def main(name: str, how: str) -> None:
    """Warm up, then repeat with pauses, in which chains end."""
    import torch

    run = {
        "silu_mul": silu_mul, "linear_silu": linear_silu, "gemm_silu_mul": gemm_silu_mul,
        "rms_norm": rms_norm_residual, "pointwise": pointwise,
    }  # fmt: skip
    with torch.inference_mode():
        part = run[name](how)
        for number in range(REPEATS + 3):
            part()
            torch.cuda.synchronize()
            time.sleep(0.002 if number >= 3 else 0)


if __name__ == "__main__":
    main(*sys.argv[1:3])
