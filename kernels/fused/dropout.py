"""Which elements a seeded dropout keeps: a property of the seed and of an element's place, not of how it is run.

Element i takes the 16-bit word i % 8 of the 128 random bits that Philox4x32 with 7 rounds makes of the counter i // 8
and the seed as its key (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011; 7 rounds pass
BigCrush there). Words are counted from the low half of the first 32 bits. An element is dropped where its word is
below ``p`` times 65536, rounded: ``p`` is met within 2^-17.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from numbers import Integral

import torch
from torch import Tensor

from spikeprof.kernels.paths import check

ROUNDS = 7
WORDS = 8  # of 16 bits, that one counter gives
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def check_dropout(p: float, seed: int) -> None:
    """Raise ValueError unless p is in [0, 1) and the seed a whole number that 63 bits hold."""
    check(0 <= p < 1, f"p is {p}: it must be at least 0 and below 1")
    check(isinstance(seed, Integral) and 0 <= seed < 2**63,
          f"seed is {seed}: it must be at least 0 and below 2^63, and whole")  # fmt: skip


def threshold(p: float) -> int:
    """Words below this are dropped; of 65536. At most 65535, so that something is kept."""
    return min(round(p * 65536), 65535)


def keep_scale(p: float) -> float:
    """What kept elements are multiplied by, so that the expected sum stays: by the rounded ``p``."""
    return 1 / (1 - threshold(p) / 65536)


def dropout_mask(seed: int, shape: Sequence[int], p: float, *, device: str | torch.device = "cpu") -> Tensor:
    """bool ``shape``: True where the element, counted in row-major order, is kept."""
    check_dropout(p, seed)
    count = prod(shape)
    counters = torch.arange(-(-count // WORDS), dtype=torch.int64, device=device)
    words = torch.stack(philox(counters, seed), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
    return (halves.flatten() >= threshold(p))[:count].view(tuple(shape))


def philox(counters: Tensor, seed: int, rounds: int = ROUNDS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 of the counters (low half, high half, 0, 0) and the seed: four int64 tensors of 32-bit words."""
    a, b = counters & _LOW, counters >> 32
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    key, other = seed & _LOW, seed >> 32
    for _ in range(rounds):
        high_a, low_a = _product(_MULTIPLIERS[0], a)
        high_c, low_c = _product(_MULTIPLIERS[1], c)
        a, b, c, d = high_c ^ b ^ key, low_c, high_a ^ d ^ other, low_a
        key, other = (key + _KEY_STEPS[0]) & _LOW, (other + _KEY_STEPS[1]) & _LOW
    return a, b, c, d


def _product(multiplier: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of 32-bit numbers; int64 has no room for all 64 bits and a sign."""
    upper, lower = multiplier * (x >> 16), multiplier * (x & 0xFFFF)
    total = lower + ((upper & 0xFFFF) << 16)
    return (upper >> 16) + (total >> 32), total & _LOW
