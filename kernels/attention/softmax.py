"""The softmax a part at a time: what is known of the keys so far, and how parts are put together.

A part is its output and its log-sum-exp. With ``m`` the greatest log-sum-exp, parts weigh ``exp(lse - m)``
(the online softmax: Milakov and Gimelshein, 2018, arXiv 1805.02867).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spikeprof.kernels.paths import Attended, check, check_same, check_shape


class OnlineSoftmax:
    """Attention of some queries [..., rows, head_dim] over the keys added so far, in float32."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Nothing is seen yet; ``shape`` is that of the output."""
        self.highest = torch.full(shape[:-1], -math.inf, device=device)
        self.total = torch.zeros(shape[:-1], device=device)
        self.weighed = torch.zeros(shape, device=device)

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Take in scaled scores [..., rows, keys], -inf where a key is not seen, and values [..., keys, head_dim]."""
        highest = torch.maximum(self.highest, scores.amax(-1))
        shift = highest.masked_fill(highest == -math.inf, 0.0)  # -inf less -inf is not a number
        weights = torch.exp(scores - shift[..., None])
        kept = torch.exp(self.highest - shift)
        self.total = self.total * kept + weights.sum(-1)
        self.weighed = self.weighed * kept[..., None] + weights @ values
        self.highest = highest

    def result(self) -> tuple[Tensor, Tensor]:
        """Output [..., rows, head_dim] and log-sum-exp [..., rows]; 0 and -inf for queries that saw nothing."""
        total = self.total.masked_fill(self.highest == -math.inf, 1.0)
        return self.weighed / total[..., None], self.highest + total.log()


def merge_attended(parts: Sequence[Attended]) -> Attended:
    """The same queries' attention over all keys, from parts that each saw some of them (and none twice).

    The output keeps the parts' shape and dtype. ``path`` is theirs, or all of them, joined by ``+``. Raises ValueError
    where there is no part, or where they do not fit each other.
    """
    check(len(parts) > 0, "parts is empty: at least one is wanted")
    first = parts[0]
    check_shape("parts[0].lse", first.lse, tuple(first.out.shape[:-1]))
    for i, part in enumerate(parts[1:], 1):
        check_shape(f"parts[{i}].out", part.out, tuple(first.out.shape))
        check_shape(f"parts[{i}].lse", part.lse, tuple(first.lse.shape))
        check_same(f"parts[{i}].out", part.out, "parts[0].out", first.out)
    lse = torch.stack([part.lse for part in parts])
    merged = torch.logsumexp(lse, 0)
    # Where no part saw a key all weights are exp(-inf) = 0, not exp(-inf - -inf).
    weights = torch.exp(lse - merged.masked_fill(merged == -math.inf, 0.0))
    out = sum(part.out * weight[..., None] for part, weight in zip(parts, weights, strict=True))
    return Attended(out.to(first.out.dtype), merged, "+".join(dict.fromkeys(part.path for part in parts)))
