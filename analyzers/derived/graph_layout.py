"""How the rows of a tensor lie in memory: what a kernel can load in one access.

A *row* is the innermost dimension whose elements lie side by side. Its *pitch* is the distance to the next one. A
kernel can use 16-byte loads, and matrix units their fastest layouts, only where every row begins at a multiple of 16
bytes (CUDA C++ Programming Guide, device memory accesses; cuBLAS, tensor core usage).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, isfinite

from spikeprof.analyzers.derived.model_nodes import Tensors

#: Allocators align what they give to this and more.
LARGEST_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one tensor: bytes of one, from one to the next, and the largest power of two that divides each begin."""

    row_bytes: int
    pitch_bytes: int
    alignment_bytes: int
    is_side_by_side: bool  # whether there is a dimension whose elements lie side by side


def rows(shape: Sequence[int], strides: Sequence[int], element_bytes: int, offset: int) -> Rows | None:
    """The rows of a tensor; sizes in elements. None where it has no element, or is no more than one."""
    sizes = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1]
    if not sizes or any(n == 0 for n, _ in sizes):
        return None
    inner = next((at for at in reversed(range(len(sizes))) if sizes[at][1] == 1), None)
    length = 1 if inner is None else sizes[inner][0]
    pitches = [stride * element_bytes for at, (_, stride) in enumerate(sizes) if at != inner and stride > 0]
    common = gcd(offset * element_bytes, *pitches)
    alignment = min(common & -common, LARGEST_ALIGNMENT) if common else LARGEST_ALIGNMENT
    return Rows(length * element_bytes, min(pitches, default=length * element_bytes), alignment, inner is not None)


def rows_of(tensors: Tensors, at: int) -> Rows | None:
    """The rows of one tensor of a graph; None where its layout is not known."""
    shape, strides = tensors.shape[at], tensors.strides[at]
    if shape is None or strides is None or len(shape) != len(strides) or tensors.element_bytes[at] <= 0:
        return None
    if not all(type(n) is int and n >= 0 for n in shape) or not isfinite(tensors.offset[at]):
        return None
    return rows(shape, strides, int(tensors.element_bytes[at]), int(tensors.offset[at]))
