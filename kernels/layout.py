"""Layout change of activations: NHWC to NCHWc16 and back.

NCHWc16 is [batch, blocks, height, width, 16]: sixteen neighbouring channels of a pixel lie together, 32 bytes in fp16,
one sector; the last block is padded with zeros. The naive twin moves one plane of one channel after the other, so that
neighbouring threads read ``channels`` elements apart and use a single element of each sector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spikeprof.kernels.paths import TORCH, Ran, check, check_shape, chosen

BLOCK = 16  # channels that lie together


def nhwc_to_nchwc16(x: Tensor, *, path: str = "auto") -> Ran:
    """[batch, height, width, channels] to [batch, ceil(channels / 16), height, width, 16], zeros in the padding.

    ``x`` must be contiguous: a layout change of a view would measure the view. Raises ValueError otherwise.
    """
    _check("x", x, (None, None, None, None))
    path = chosen(path, x)
    out = _blocked_like(x)
    if path == TORCH:
        _blocks_of(x, out)
    else:
        from spikeprof.kernels.layout_triton import to_blocked

        to_blocked(x, out)
    return Ran(out, path)


def nchwc16_to_nhwc(x: Tensor, channels: int, *, path: str = "auto") -> Ran:
    """[batch, blocks, height, width, 16] to [batch, height, width, channels]; the padding is dropped.

    Raises ValueError where ``channels`` does not need exactly this number of blocks.
    """
    _check("x", x, (None, None, None, None, BLOCK))
    batch, blocks, height, width, _ = x.shape
    fits = (blocks - 1) * BLOCK < channels <= blocks * BLOCK
    check(fits, f"channels is {channels}: {blocks} blocks hold {(blocks - 1) * BLOCK + 1} to {blocks * BLOCK}")
    path = chosen(path, x)
    if path == TORCH:
        joined = x.permute(0, 2, 3, 1, 4).reshape(batch, height, width, blocks * BLOCK)
        return Ran(joined[..., :channels].contiguous(), path)
    from spikeprof.kernels.layout_triton import from_blocked

    out = torch.empty((batch, height, width, channels), dtype=x.dtype, device=x.device)
    from_blocked(x, out)
    return Ran(out, path)


def nhwc_to_nchwc16_naive(x: Tensor, *, path: str = "auto") -> Ran:
    """As :func:`nhwc_to_nchwc16`, a plane of one channel at a time: reads that stride over all channels."""
    _check("x", x, (None, None, None, None))
    path = chosen(path, x)
    out = _blocked_like(x)
    if path == TORCH:
        channels = x.shape[3]
        for channel in range(out.shape[1] * BLOCK):
            plane = out[:, channel // BLOCK, :, :, channel % BLOCK]
            if channel < channels:
                plane.copy_(x[..., channel])
            else:
                plane.zero_()
    else:
        from spikeprof.kernels.layout_triton import to_blocked_naive

        to_blocked_naive(x, out)
    return Ran(out, path)


def blocks_of(channels: int) -> int:
    """Blocks of sixteen channels that so many channels need."""
    return -(-channels // BLOCK)


def _blocks_of(x: Tensor, out: Tensor) -> None:
    whole, rest = divmod(x.shape[3], BLOCK)
    target = out.permute(0, 2, 3, 1, 4)
    if whole:
        target[..., :whole, :].copy_(x[..., : whole * BLOCK].unflatten(3, (whole, BLOCK)))
    if rest:
        target[..., whole, :rest].copy_(x[..., whole * BLOCK :])
        target[..., whole, rest:].zero_()


def _blocked_like(x: Tensor) -> Tensor:
    batch, height, width, channels = x.shape
    return torch.empty((batch, blocks_of(channels), height, width, BLOCK), dtype=x.dtype, device=x.device)


def _check(name: str, x: Tensor, shape: tuple[int | None, ...]) -> None:
    check_shape(name, x, shape)
    check(x.numel() > 0, f"{name} has shape {list(x.shape)}: no size may be 0")
    check(x.is_contiguous(), f"{name} has strides {list(x.stride())}: it must be contiguous")
