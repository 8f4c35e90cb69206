"""What a probe hands back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Probed(NamedTuple):
    """A probe's output, the path that it ran on, the bytes read and written, and the floating-point operations."""

    out: Tensor
    path: str
    bytes_moved: int
    flops: int
