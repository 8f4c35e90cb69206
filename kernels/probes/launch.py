"""Launches of kernels that do nothing: what a launch costs by itself."""

from __future__ import annotations

import torch

from spikeprof.kernels.paths import TORCH, check, chosen
from spikeprof.kernels.probes.probed import Probed


def launch_empty(count: int, *, device: torch.device | str = "cpu", path: str = "auto") -> Probed:
    """Launch ``count`` kernels that do nothing, one after the other. ``out`` is a single zero.

    The torch path has no empty kernel: it zeroes one element each time.
    """
    check(count > 0, f"count is {count}: it must be 1 or more")
    out = torch.zeros(1, device=device)
    path = chosen(path, out)
    if path == TORCH:
        for _ in range(count):
            out.zero_()
    else:
        from spikeprof.kernels.probes.launch_triton import empty_kernel

        with torch.cuda.device_of(out):
            for _ in range(count):
                empty_kernel[(1,)](out, num_warps=1)
    return Probed(out, path, 0, 0)
