"""Attention as it is written down: all scores are made, [batch, heads, q_len, k_len] of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spikeprof.kernels.attention.checks import checked_prefill
from spikeprof.kernels.attention.masks import visible
from spikeprof.kernels.paths import TORCH, Attended


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int | None = None, scale: float | None = None
) -> Attended:
    """What a program does that knows nothing better: scores, mask, softmax, product, each in q's dtype and in memory.

    Arguments, result and errors are those of ``tiled_attention``; the path is always torch. Memory is quadratic in
    the length, and the keys and values of a group of heads are repeated for each of them.
    """
    scale = checked_prefill(q, k, v, causal, window, scale)
    return _materialised(q, k, v, causal, window, scale)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int | None = None, scale: float | None = None
) -> Attended:
    """The same in float64, output and log-sum-exp too: what the others are measured against."""
    scale = checked_prefill(q, k, v, causal, window, scale)
    return _materialised(q.double(), k.double(), v.double(), causal, window, scale)


def _materialised(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float) -> Attended:
    (q_len, k_len), group = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * scale) @ keys.transpose(-1, -2)
    seen = visible(range(k_len - q_len, k_len), range(k_len), causal, window, q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores, -1)
    if seen is not None:
        weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    lse = torch.logsumexp(scores.double() if q.dtype == torch.float64 else scores.float(), -1)
    return Attended(weights @ values, lse, TORCH)
