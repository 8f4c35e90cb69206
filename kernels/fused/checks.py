"""What the fused kernels demand of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from spikeprof.kernels.paths import check

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_input(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor has elements, of a dtype that the kernels know."""
    check(tensor.dtype in DTYPES, f"{name} is {tensor.dtype}: it can be {', '.join(str(one) for one in DTYPES)}")
    check(tensor.dim() > 0 and tensor.numel() > 0, f"{name} has shape {list(tensor.shape)}: it must have elements")


def rows_of(name: str, tensor: Tensor) -> Tensor:
    """A view [rows, last dimension] whose elements of a row are neighbours.

    Raises ValueError where it would take a copy, which would hide a pass over memory.
    """
    strides = list(tensor.stride())
    check(strides[-1] == 1, f"{name} has stride {strides[-1]} in its last dimension: it must be 1, call contiguous()")
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        raise ValueError(f"{name} has strides {strides}: its rows must be evenly spaced, call contiguous()") from None
