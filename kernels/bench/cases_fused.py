"""Cases of the fused kernels, each against its unfused twin."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from spikeprof.kernels import fused
from spikeprof.kernels.bench.case import FLOPS, Case, drawn
from spikeprof.kernels.engine.linear import Int8, linear, quantised
from spikeprof.kernels.fused.dropout import keep_scale
from spikeprof.kernels.paths import Ran

P, SEED, EPS = 0.1, 3, 1e-6
_BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3}
_SHORT = {torch.float32: "fp32", torch.float16: "fp16"}
_ROWS = 64  # that are worked out in float64


def cases(_device: torch.device, small: bool) -> Iterator[Case]:
    """Pointwise functions and norms, bound by bandwidth; then products with something fused to them."""
    dtype = torch.float32 if small else torch.float16
    rows, columns = (48, 200) if small else (16384, 8192)
    yield _gelu_dropout(rows, columns, dtype)
    yield _silu_mul(rows, columns, dtype)
    yield _rms_norm(rows, columns, dtype)
    yield _rotary(*((24, 4, 2, 32) if small else (16384, 32, 8, 128)), dtype)
    yield _linear_silu(*((24, 64, 96) if small else (4096, 4096, 11008)), dtype)
    for tokens in (4,) if small else (1, 16, 64):
        yield _int8_linear(tokens, *((64, 96) if small else (4096, 11008)), dtype)


def _gelu_dropout(rows: int, columns: int, dtype: torch.dtype) -> Case:
    def check(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        kept = fused.dropout_mask(SEED, (_ROWS, columns), P, device=x.device)[: x.shape[0]]
        return out[:_ROWS], F.gelu(x[:_ROWS].double()) * kept * keep_scale(P)

    return Case(
        "gelu_dropout",
        _shape(rows, columns, dtype),
        partial(_matrix, rows, columns, dtype, 1),
        lambda x: fused.gelu_dropout(x, P, seed=SEED),
        bytes_moved=2 * rows * columns * dtype.itemsize,
        check=check,
        error_bound=_BOUNDS[dtype],
        twins={"separate operators": lambda x: fused.gelu_dropout_unfused(x, P)},
    )


def _silu_mul(rows: int, columns: int, dtype: torch.dtype) -> Case:
    return Case(
        "silu_mul",
        _shape(rows, columns, dtype),
        lambda device: _matrix(rows, 2 * columns, dtype, 1, device).chunk(2, 1),
        lambda halves: fused.silu_mul(*halves),
        bytes_moved=3 * rows * columns * dtype.itemsize,
        check=lambda halves, out: (out[:_ROWS], F.silu(halves[0][:_ROWS].double()) * halves[1][:_ROWS].double()),
        error_bound=_BOUNDS[dtype],
        twins={"separate operators": lambda halves: fused.silu_mul_unfused(*halves)},
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
        lambda given: fused.rms_norm_residual(*given, eps=EPS),
        bytes_moved=(4 * rows + 1) * columns * dtype.itemsize,
        check=check,
        error_bound=_BOUNDS[dtype],
        twins={"separate operators": lambda given: fused.rms_norm_residual_unfused(*given, eps=EPS)},
    )


def _rotary(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Case:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        q, k = (
            drawn(tokens, count, head_dim, device=device, dtype=dtype, seed=seed)
            for seed, count in ((1, heads), (2, kv_heads))
        )
        return q, k, torch.arange(tokens, device=device), fused.rotary_table(tokens, head_dim, device=device)

    def check(given: tuple[Tensor, ...], out: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs as complex numbers, turned by the angle's."""
        half = head_dim // 2
        last = slice(-_ROWS, None)
        exponents = torch.arange(half, dtype=torch.float64, device=out.device) / half
        angles = given[2][last].double()[:, None, None] * 10_000.0**-exponents
        first, second = given[0][last].double().split(half, -1)
        turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
        return out[last], torch.cat([turned.real, turned.imag], -1)

    return Case(
        "rotary",
        f"{tokens} x {heads}/{kv_heads} x{head_dim} {_SHORT[dtype]}",
        make,
        lambda given: _first(fused.rotary(*given)),
        bytes_moved=tokens * (head_dim * (2 * (heads + kv_heads) * dtype.itemsize + 4) + 8),
        check=check,
        error_bound=_BOUNDS[dtype],
        twins={"separate operators": lambda given: fused.rotary_unfused(*given)},
    )


def _first(rotated: fused.Rotated) -> Ran:
    return Ran(rotated.q, rotated.path)


def _linear_silu(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> Case:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        weight = _matrix(outputs, inputs, dtype, 2, device) / inputs**0.5
        return _matrix(tokens, inputs, dtype, 1, device), weight, drawn(outputs, device=device, dtype=dtype, seed=3)

    def check(given: tuple[Tensor, ...], out: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, bias = (part.double() for part in (given[0][:_ROWS], *given[1:]))
        return out[:_ROWS], F.silu(x @ weight.t() + bias)

    return Case(
        "linear_silu",
        f"{tokens} x {inputs} x {outputs} {_SHORT[dtype]}",
        make,
        lambda given: fused.linear_silu(*given),
        bytes_moved=((tokens + outputs) * inputs + (tokens + 1) * outputs) * dtype.itemsize,
        flops=2 * tokens * inputs * outputs,
        bound_by=FLOPS,
        check=check,
        error_bound=_BOUNDS[dtype],
        twins={"separate operators": lambda given: fused.linear_silu_unfused(*given)},
    )


def _int8_linear(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> Case:
    """A few rows, as in decode: bound by reading the weight."""

    def make(device: torch.device) -> tuple[Tensor, Int8, Tensor]:
        weight = _matrix(outputs, inputs, dtype, 2, device) / inputs**0.5
        return _matrix(tokens, inputs, dtype, 1, device), quantised(weight), weight

    def check(given: tuple[Tensor, Int8, Tensor], out: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = given
        return out, x.double() @ (weight.values.double() * weight.scale.double()[:, None]).t()

    return Case(
        "int8_linear",
        f"{tokens} x {inputs} x {outputs} {_SHORT[dtype]}",
        make,
        lambda given: linear(given[0], given[1]),
        bytes_moved=inputs * outputs + 4 * outputs + tokens * (inputs + outputs) * dtype.itemsize,
        check=check,
        error_bound=_BOUNDS[dtype],
        twins={"plain weights": lambda given: linear(given[0], given[2])},
    )


def _matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    return drawn(rows, columns, device=device, dtype=dtype, seed=seed)


def _shape(rows: int, columns: int, dtype: torch.dtype) -> str:
    return f"{rows} x {columns} {_SHORT[dtype]}"
