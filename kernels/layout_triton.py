"""Triton kernels of the layout change: a tile of pixels and channels a program, whole sectors on both sides."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_PIXELS = 64
TILE_CHANNELS = 64  # four blocks: 128 bytes of a pixel in fp16
NAIVE_PIXELS = 1024
WARPS = 4


def to_blocked(x: Tensor, out: Tensor) -> None:
    """NHWC ``x`` into NCHWc16 ``out``."""
    pixels, channels, blocks = _sizes(x, out)
    _tiled(pixels, blocks, x.shape[0], nhwc_to_nchwc16_kernel, x, out, channels)


def from_blocked(x: Tensor, out: Tensor) -> None:
    """NCHWc16 ``x`` into NHWC ``out``."""
    pixels, channels, blocks = _sizes(out, x)
    _tiled(pixels, blocks, x.shape[0], nchwc16_to_nhwc_kernel, x, out, channels)


def to_blocked_naive(x: Tensor, out: Tensor) -> None:
    """NHWC ``x`` into NCHWc16 ``out``, a program for each stretch of one channel's plane."""
    pixels, channels, blocks = _sizes(x, out)
    stretches = triton.cdiv(pixels, NAIVE_PIXELS)
    grid = (stretches * blocks * 16 * x.shape[0],)
    with torch.cuda.device_of(x):
        nhwc_to_nchwc16_naive_kernel[grid](
            x, out, pixels, channels, blocks, stretches, TILE_P=NAIVE_PIXELS, num_warps=WARPS
        )


def _sizes(nhwc: Tensor, blocked: Tensor) -> tuple[int, int, int]:
    return nhwc.shape[1] * nhwc.shape[2], nhwc.shape[3], blocked.shape[1]


def _tiled(pixels: int, blocks: int, batch: int, kernel, x: Tensor, out: Tensor, channels: int) -> None:
    across = triton.cdiv(blocks * 16, TILE_CHANNELS)
    down = triton.cdiv(pixels, TILE_PIXELS)
    with torch.cuda.device_of(x):
        kernel[(across * down * batch,)](
            x, out, pixels, channels, blocks, across, down,
            TILE_P=TILE_PIXELS, TILE_C=TILE_CHANNELS, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _tile(pixels, channels, blocks, across, down, TILE_P: tl.constexpr, TILE_C: tl.constexpr):
    """Offsets of the program's tile in NHWC and in NCHWc16, and the masks of valid and of padded elements."""
    program = tl.program_id(0)
    # Channels vary fastest: programs that run together read neighbouring memory.
    image = (program // (across * down)).to(tl.int64)
    pixel = (program // across) % down * TILE_P + tl.arange(0, TILE_P)[:, None]
    channel = program % across * TILE_C + tl.arange(0, TILE_C)[None, :]
    flat = (image * pixels + pixel) * channels + channel
    block, lane = channel // 16, channel % 16
    blocked = ((image * blocks + block) * pixels + pixel) * 16 + lane
    inside = pixel < pixels
    return flat, blocked, inside & (channel < channels), inside & (block < blocks)


@triton.jit
def nhwc_to_nchwc16_kernel(
    x, out, pixels, channels, blocks, across, down, TILE_P: tl.constexpr, TILE_C: tl.constexpr
):  # fmt: skip
    """Read a tile along the channels, write it along pixels and sixteen channels."""
    flat, blocked, valid, padded = _tile(pixels, channels, blocks, across, down, TILE_P, TILE_C)
    tl.store(out + blocked, tl.load(x + flat, mask=valid, other=0.0), mask=padded)


@triton.jit
def nchwc16_to_nhwc_kernel(
    x, out, pixels, channels, blocks, across, down, TILE_P: tl.constexpr, TILE_C: tl.constexpr
):  # fmt: skip
    """Read a tile along pixels and sixteen channels, write it along the channels."""
    flat, blocked, valid, _ = _tile(pixels, channels, blocks, across, down, TILE_P, TILE_C)
    tl.store(out + flat, tl.load(x + blocked, mask=valid, other=0.0), mask=valid)


@triton.jit
def nhwc_to_nchwc16_naive_kernel(x, out, pixels, channels, blocks, stretches, TILE_P: tl.constexpr):
    """One channel of ``TILE_P`` pixels: each thread reads and writes elements that are far apart."""
    program = tl.program_id(0)
    plane = program // stretches
    image = (plane // (blocks * 16)).to(tl.int64)
    channel = plane % (blocks * 16)
    pixel = program % stretches * TILE_P + tl.arange(0, TILE_P)
    inside = pixel < pixels
    valid = pixel < tl.where(channel < channels, pixels, 0)
    value = tl.load(x + (image * pixels + pixel) * channels + channel, mask=valid, other=0.0)
    target = ((image * blocks + channel // 16) * pixels + pixel) * 16 + channel % 16
    tl.store(out + target, value, mask=inside)
