"""Rotary position embedding of queries and keys, one launch for both.

Channels i and i + head_dim / 2 are a pair, which is turned by ``position * base ** (-2 i / head_dim)`` radians (Su et
al., RoFormer, 2021, in the order of halves that most checkpoints have). Angles are worked out in float64 once, for a
table: in fp32 they would be off by about 1e-3 at positions of some ten thousand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spikeprof.kernels.fused.checks import check_input
from spikeprof.kernels.paths import TORCH, check, check_same, check_shape, chosen


class Rotated(NamedTuple):
    """Queries and keys after turning, and the path that did it."""

    q: Tensor
    k: Tensor
    path: str


def rotary_table(
    positions_count: int, head_dim: int, *, base: float = 10_000.0, device: str | torch.device = "cpu"
) -> Tensor:
    """fp32 [positions_count, head_dim]: cosines of a position's angles, then their sines."""
    check(positions_count >= 1, f"positions_count is {positions_count}: 1 at least")
    check(base > 0, f"base is {base}: it must be above 0")
    _check_head_dim(head_dim)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.arange(positions_count, dtype=torch.float64)[:, None] * base**-exponents
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device, torch.float32)


def rotary(q: Tensor, k: Tensor, positions: Tensor, table: Tensor, *, path: str = "auto") -> Rotated:
    """q [tokens, heads, head_dim] and k [tokens, kv_heads, head_dim], turned by ``positions`` [tokens], int32 or int64.

    ``table`` is of ``rotary_table``. A position that it lacks gives NaN on Triton's path and torch's own error on
    torch's, where the positions are on a GPU and nothing waits for them; on the CPU torch's path raises IndexError.
    Raises ValueError for shapes, dtypes and devices that do not fit.
    """
    _check(q, k, positions, table)
    path = chosen(path, q)
    if path == TORCH:
        return rotary_unfused(q, k, positions, table)
    from spikeprof.kernels.fused import rotary_triton

    return Rotated(*rotary_triton.rotary(q, k, positions, table), path)


def rotary_unfused(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Rotated:
    """The same of separate operators."""
    _check(q, k, positions, table)
    if not positions.is_cuda:
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= len(table):
            raise IndexError(f"positions reach from {low} to {high}: the table has 0 to {len(table) - 1}")
    # Not table[positions]: a negative one would count from the table's end.
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return Rotated(_turned(q, cos, sin), _turned(k, cos, sin), TORCH)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _check(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> None:
    check_input("q", q)
    check_input("k", k)
    check_shape("q", q, (None, None, None))
    check_shape("k", k, (q.shape[0], None, q.shape[2]))
    check_same("k", k, "q", q)
    _check_head_dim(q.shape[2])
    for name, tensor in (("q", q), ("k", k)):
        stride = tensor.stride(-1)
        check(stride == 1, f"{name} has stride {stride} in its last dimension: it must be 1, call contiguous()")
    check_shape("positions", positions, (q.shape[0],))
    integers = (torch.int32, torch.int64)
    check(positions.dtype in integers, f"positions is {positions.dtype}: it can be torch.int32, torch.int64")
    check_shape("table", table, (None, q.shape[2]))
    check(table.dtype == torch.float32, f"table is {table.dtype}: it must be torch.float32")
    check(len(table) > 0, "table has no rows: it holds the angles of no position")
    check(table.is_contiguous(), f"table has strides {list(table.stride())}: it must be contiguous")
    for name, tensor in (("positions", positions), ("table", table)):
        check(tensor.device == q.device, f"{name} is on {tensor.device}, q on {q.device}")


def _check_head_dim(head_dim: int) -> None:
    check(head_dim >= 2 and head_dim % 2 == 0, f"head_dim is {head_dim}: an even number is wanted, 2 at least")
