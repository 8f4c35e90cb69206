"""Cases of the fused kernels, each against its unfused twin."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from spikeprof.kernels.bench.case import Case, drawn
from spikeprof.kernels.fused.dropout import dropout_mask, keep_scale
from spikeprof.kernels.fused.gelu_dropout import gelu_dropout, gelu_dropout_unfused
from spikeprof.kernels.fused.rms_norm_residual import rms_norm_residual, rms_norm_residual_unfused
from spikeprof.kernels.fused.silu_mul import silu_mul, silu_mul_unfused

P, SEED, EPS = 0.1, 3, 1e-6
_BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3}
_SHORT = {torch.float32: "fp32", torch.float16: "fp16"}
_ROWS = 64  # that are worked out in float64


def cases(_device: torch.device, small: bool) -> Iterator[Case]:
    """Pointwise functions and norms: all of them bound by bandwidth."""
    dtype = torch.float32 if small else torch.float16
    rows, columns = (48, 200) if small else (16384, 8192)
    yield _gelu_dropout(rows, columns, dtype)
    yield _silu_mul(rows, columns, dtype)
    yield _rms_norm(rows, columns, dtype)


def _gelu_dropout(rows: int, columns: int, dtype: torch.dtype) -> Case:
    def check(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        kept = dropout_mask(SEED, (_ROWS, columns), P, device=x.device)[: x.shape[0]]
        return out[:_ROWS], F.gelu(x[:_ROWS].double()) * kept * keep_scale(P)

    return Case(
        "gelu_dropout",
        _shape(rows, columns, dtype),
        partial(_matrix, rows, columns, dtype, 1),
        lambda x: gelu_dropout(x, P, seed=SEED),
        bytes_moved=2 * rows * columns * dtype.itemsize,
        check=check,
        error_bound=_BOUNDS[dtype],
        twins={"separate operators": lambda x: gelu_dropout_unfused(x, P)},
    )


def _silu_mul(rows: int, columns: int, dtype: torch.dtype) -> Case:
    return Case(
        "silu_mul",
        _shape(rows, columns, dtype),
        lambda device: _matrix(rows, 2 * columns, dtype, 1, device).chunk(2, 1),
        lambda halves: silu_mul(*halves),
        bytes_moved=3 * rows * columns * dtype.itemsize,
        check=lambda halves, out: (out[:_ROWS], F.silu(halves[0][:_ROWS].double()) * halves[1][:_ROWS].double()),
        error_bound=_BOUNDS[dtype],
        twins={"separate operators": lambda halves: silu_mul_unfused(*halves)},
    )


def _rms_norm(rows: int, columns: int, dtype: torch.dtype) -> Case:
    def check(given: tuple[Tensor, ...], out: Tensor) -> tuple[Tensor, Tensor]:
        x, residual, weight = given
        total = (x + residual)[:_ROWS].double()
        norm = total * torch.rsqrt(total.pow(2).mean(1, keepdim=True) + EPS)
        return out[:_ROWS], norm * weight.double()

    return Case(
        "rms_norm_residual",
        _shape(rows, columns, dtype),
        lambda device: (
            *(_matrix(rows, columns, dtype, seed, device) for seed in (1, 2)),
            drawn(columns, device=device, dtype=dtype, seed=4),
        ),
        lambda given: rms_norm_residual(*given, eps=EPS),
        bytes_moved=(4 * rows + 1) * columns * dtype.itemsize,
        check=check,
        error_bound=_BOUNDS[dtype],
        twins={"separate operators": lambda given: rms_norm_residual_unfused(*given, eps=EPS)},
    )


def _matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    return drawn(rows, columns, device=device, dtype=dtype, seed=seed)


def _shape(rows: int, columns: int, dtype: torch.dtype) -> str:
    return f"{rows} x {columns} {_SHORT[dtype]}"
