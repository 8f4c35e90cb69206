"""The decoder's operators, each as ``Ran``, in one place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spikeprof.kernels.paths import TORCH, Attended, Ran


class Normed(NamedTuple):
    """The residual stream after adding, and its norm."""

    residual: Tensor
    out: Tensor
    path: str


def rms_norm(x: Tensor, weight: Tensor, eps: float, path: str) -> Ran:
    """``x`` [tokens, hidden] -> its root-mean-square norm, computed in fp32."""
    wide = x.float()
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return Ran((out * weight.float()).to(x.dtype), TORCH)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, path: str) -> Normed:
    """``residual + x`` and its norm."""
    total = residual + x
    return Normed(total, rms_norm(total, weight, eps, path).out, TORCH)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, path: str) -> Ran:
    """``x`` [tokens, heads, head_dim] rotated; ``cos`` and ``sin`` fp32 [tokens, head_dim // 2]."""
    low, high = x.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return Ran(torch.cat([low * c - high * s, high * c + low * s], -1).to(x.dtype), TORCH)


def silu_mul(gate_up: Tensor, path: str) -> Ran:
    """``gate_up`` [tokens, 2 * intermediate] -> silu of the first half times the second."""
    gate, up = gate_up.chunk(2, -1)
    return Ran(F.silu(gate) * up, TORCH)


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, path: str) -> Attended:
    """Causal attention; the last query sees the last key."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q_len, k_len = q.shape[2], k.shape[2]
    away = torch.arange(k_len - q_len, k_len, device=q.device)[:, None] - torch.arange(k_len, device=q.device)
    seen = (away >= 0) & (away < (window or k_len))
    scores = (q.float() @ k.float().transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    return Attended((scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1), TORCH)
