"""Streaming copy: the rate of DRAM that a kernel can reach, reads and writes together."""

from __future__ import annotations

import torch
from torch import Tensor

from spikeprof.kernels.paths import TORCH, check, check_same, check_shape, chosen
from spikeprof.kernels.probes.probed import Probed


def stream_copy(source: Tensor, out: Tensor | None = None, *, path: str = "auto") -> Probed:
    """Copy contiguous ``source`` of any shape and dtype, into ``out`` where one is given.

    Raises ValueError where a tensor is empty or not contiguous, or the two do not match.
    """
    check(source.numel() > 0, f"source has shape {list(source.shape)}: no size may be 0")
    out = torch.empty_like(source) if out is None else out
    check_same("out", out, "source", source)
    check_shape("out", out, tuple(source.shape))
    for name, tensor in (("source", source), ("out", out)):
        check(tensor.is_contiguous(), f"{name} has strides {list(tensor.stride())}: it must be contiguous")
    path = chosen(path, source)
    if path == TORCH:
        out.copy_(source)
    else:
        from spikeprof.kernels.probes.copy_triton import copy_words

        copy_words(_words(source), _words(out))
    return Probed(out, path, 2 * source.numel() * source.element_size(), 0)


def _words(tensor: Tensor) -> Tensor:
    """The same bytes as int32 where they divide, else as bytes: what is copied is bits, not numbers."""
    flat = tensor.reshape(-1).view(torch.uint8)
    return flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0 else flat
