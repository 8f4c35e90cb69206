"""Copy between two GPUs: the rate of the link that joins them."""

from __future__ import annotations

import torch
from torch import Tensor

from spikeprof.kernels.paths import TORCH, check, check_shape
from spikeprof.kernels.probes.probed import Probed


def peer_copy(source: Tensor, out: Tensor) -> Probed:
    """Copy ``source`` to ``out`` on another GPU. Bytes are those that cross the link, in one direction.

    Raises ValueError where there are no two GPUs, or the tensors do not match or are not on two of them.
    """
    reason = why_no_peer()
    check(not reason, f"peer copy is not available: {reason}")
    check_shape("out", out, tuple(source.shape))
    check(out.dtype == source.dtype, f"out is {out.dtype}, source {source.dtype}")
    apart = source.is_cuda and out.is_cuda and source.device != out.device
    check(apart, f"source is on {source.device}, out on {out.device}: they must be on two GPUs")
    out.copy_(source, non_blocking=True)
    return Probed(out, TORCH, source.numel() * source.element_size(), 0)


def why_no_peer() -> str:
    """Why nothing can be copied between GPUs here, or nothing."""
    count = torch.cuda.device_count()
    return "" if count >= 2 else f"it needs 2 GPUs, there {'is' if count == 1 else 'are'} {count or 'none'}"
