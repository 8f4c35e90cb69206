"""Reading one buffer again and again: the rate of L2 where the buffer fits, of DRAM where it does not."""

from __future__ import annotations

import torch
from torch import Tensor

from spikeprof.kernels.paths import TORCH, check, chosen
from spikeprof.kernels.probes.probed import Probed


def read_again(x: Tensor, passes: int, *, path: str = "auto") -> Probed:
    """Read all of fp32 ``x``, contiguous, ``passes`` times. ``out`` is fp32 [any]; it adds up to passes · sum(x).

    Between two passes every block moves to another program, so that no L1 serves it. The torch path is a reduction
    for each pass.
    """
    check(x.dtype == torch.float32, f"x is {x.dtype}: it must be float32")
    check(x.is_contiguous(), f"x has strides {list(x.stride())}: it must be contiguous")
    check(x.numel() > 0, f"x has shape {list(x.shape)}: no size may be 0")
    check(passes > 0, f"passes is {passes}: it must be 1 or more")
    path = chosen(path, x)
    if path == TORCH:
        out = torch.stack([x.sum() for _ in range(passes)])
    else:
        from spikeprof.kernels.probes.l2_triton import read_passes

        out = read_passes(x.reshape(-1), passes)
    return Probed(out, path, passes * x.numel() * 4, passes * x.numel())
