"""Asymmetric integers of 8 or 4 bits for keys and values, a scale and a zero point for each group of channels.

The scale is the group's range over 2^bits − 1, rounded up to fp16, so that nothing is clipped: a value is off by half a
scale at most. The zero point is a whole number of at most 2048 in size, which fp16 holds exactly; a group far from zero
and narrow, of which it would be more, gets a coarser scale instead. A NaN or an infinity in a group makes all of it
NaN or infinite: it is never hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spikeprof.kernels.cache.pages import Quantised
from spikeprof.kernels.cache.usage import groups_count
from spikeprof.kernels.paths import check

MOST_ZERO = 2048.0  # whole numbers up to here are exact in fp16
LEAST_SCALE = 2.0**-24  # the smallest fp16 above 0
ROUND_UP = 1 + 2.0**-10, 2.0**-25  # times, plus: then the nearest fp16 is not below, subnormal or not


def quantise(x: Tensor, bits: int) -> Quantised:
    """Quantise ``x`` [..., head_dim] to 8 bits, one group, or 4 bits, one group for each 32 channels."""
    check_bits(bits)
    groups = groups_count(x.shape[-1], bits)
    grouped = x.to(torch.float32).unflatten(-1, (groups, -1))
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    levels = 2**bits - 1
    size = torch.maximum(low.abs(), high.abs())
    exact = torch.maximum((high - low) / levels, size / MOST_ZERO).clamp_min(LEAST_SCALE)
    scale = (exact * ROUND_UP[0] + ROUND_UP[1]).to(torch.float16)
    step = scale.to(torch.float32)
    zero = torch.floor(0.5 - low / step)
    values = torch.floor(grouped / step + zero + 0.5).clamp(0, levels).nan_to_num().to(torch.uint8).flatten(-2)
    return Quantised(pack(values) if bits == 4 else values, scale.squeeze(-1), zero.to(torch.float16).squeeze(-1), bits)


def dequantise(stored: Quantised, dtype: torch.dtype = torch.float32) -> Tensor:
    """``scale * (q - zero)`` [..., head_dim], worked out in fp32."""
    values = unpack(stored.values) if stored.bits == 4 else stored.values
    grouped = values.to(torch.float32).unflatten(-1, (stored.scale.shape[-1], -1))
    scale, zero = stored.scale.to(torch.float32).unsqueeze(-1), stored.zero.to(torch.float32).unsqueeze(-1)
    return (scale * (grouped - zero)).flatten(-2).to(dtype)


def pack(values: Tensor) -> Tensor:
    """uint8 below 16 [..., n], n even, to [..., n // 2]: the even channel in the low half of the byte."""
    check(values.shape[-1] % 2 == 0, f"values has {values.shape[-1]} channels: an even number is wanted")
    return values[..., 0::2] | values[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """The inverse of ``pack``."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def check_bits(bits: int) -> None:
    """Raise ValueError unless keys and values can be stored in so many bits."""
    check(bits in (4, 8), f"bits is {bits}: it can be 4 or 8")
