"""The next token from logits, for a whole batch at once: greedy, temperature, top-p, a seed per request.

A request's random numbers depend on its seed and on the token's position in it alone: whom it was batched with,
or whether it was preempted and taken up again, changes nothing.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor, nn

from spikeprof.kernels.engine.host import on_device
from spikeprof.kernels.paths import check, check_shape

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0 is greedy. ``top_p``: the fewest tokens whose probabilities reach it are kept."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check(0 <= self.temperature < float("inf"), f"temperature is {self.temperature}: it must be 0 or more")
        check(0 < self.top_p <= 1, f"top_p is {self.top_p}: it must be above 0, and at most 1")
        check(isinstance(self.seed, Integral), f"seed is {self.seed!r}: it must be an integer")


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) that depends on its arguments alone (splitmix64); ``stream`` parts uses of one position."""
    bits = 0
    for word in (seed, position, stream):
        bits = (bits + word + 0x9E3779B97F4A7C15) & _MASK
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
        bits ^= bits >> 31
    return (bits >> 11) * 2.0**-53


def probabilities(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """What each row of ``logits`` [rows, vocabulary] is drawn from -> fp32, rows sum to 1; greedy is a single 1.

    Of equal probabilities at the edge of top-p the lower token ids are kept.
    """
    _check(logits, samplings)
    greedy = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    greedy.scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    if all(sampling.temperature == 0 for sampling in samplings):
        return greedy
    options = _options(samplings, logits.device)
    # The largest becomes 0, so that no temperature makes it infinite; 1 keeps the division finite in greedy rows.
    wide = logits.float()
    scaled = (wide - wide.amax(1, keepdim=True)) / torch.where(options[0] > 0, options[0], 1.0)[:, None]
    found = scaled.softmax(1)
    if any(sampling.top_p < 1 and sampling.temperature > 0 for sampling in samplings):
        ordered, order = found.sort(dim=1, descending=True, stable=True)
        before = ordered.cumsum(1) - ordered
        # The most likely token is before nothing: it is always kept. A top_p of 1 keeps all, whatever the rounding.
        kept = (before < options[1][:, None]) | (options[1] >= 1)[:, None]
        found = torch.zeros_like(found).scatter_(1, order, ordered * kept)
        found /= found.sum(1, keepdim=True)
    return torch.where((options[0] > 0)[:, None], found, greedy)


def draw(chances: Tensor, uniforms: Sequence[float]) -> Tensor:
    """One token id, int64 [rows], of each row of ``chances`` [rows, vocabulary], by inverting its distribution.

    A row with NaN gives the last token: no id is out of range, lest the device fails before anyone can look.
    """
    check(len(uniforms) == chances.shape[0], f"uniforms has {len(uniforms)} numbers for {chances.shape[0]} rows")
    at = chances.double().cumsum(1)
    whole = at[:, -1:].contiguous()
    target = on_device(uniforms, torch.float64, chances.device)[:, None] * whole
    # The first token whose cumulated probability passes the target: never one of probability 0, as long as rounding
    # has not brought the target up to the whole.
    target = torch.minimum(target, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(at, target, right=True)[:, 0].clamp_max(chances.shape[1] - 1)


def sample(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """The next token of each row of ``logits`` [rows, vocabulary] -> int64 [rows]; ``positions``: its place, for the
    random numbers. -1 for a row with NaN or infinity, which cannot be told without waiting for the device."""
    _check(logits, samplings)
    highest, tokens = logits.max(1)
    if any(sampling.temperature > 0 for sampling in samplings):
        uniforms = [uniform(s.seed, position) for s, position in zip(samplings, positions, strict=True)]
        tokens = draw(probabilities(logits, samplings), uniforms)
    return torch.where(highest.isfinite(), tokens, -1)


class Sampler(nn.Module):
    """``sample`` as a module, as servers have it: a profiler that knows modules knows whose kernels these are."""

    def forward(self, logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
        """See ``sample``."""
        return sample(logits, samplings, positions)


def check_finite(sequence: int, is_finite: bool) -> None:
    """Raise FloatingPointError where a sequence's logits were not finite: no token can be told from them."""
    if not is_finite:
        raise FloatingPointError(
            f"logits of sequence {sequence} have NaN or infinity: weights are damaged, or activations passed what "
            "their dtype holds (fp16: 65504); weights='bf16' or 'fp32' hold more"
        )


def _check(logits: Tensor, samplings: Sequence[Sampling]) -> None:
    check_shape("logits", logits, (len(samplings), None))
    check(len(samplings) > 0, "logits has no rows: at least one is needed")


def _options(samplings: Sequence[Sampling], device: torch.device) -> Tensor:
    """Temperatures and top_p, fp32 [2, rows], in one copy to the device."""
    rows = [[s.temperature for s in samplings], [s.top_p for s in samplings]]
    return on_device(rows, torch.float32, device)
