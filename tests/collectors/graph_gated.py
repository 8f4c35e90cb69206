"""A model with a choice by data, in a function that torch.fx takes as one node."""

from __future__ import annotations

import torch
from torch import fx, nn


def choose(x: torch.Tensor, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    return small if x.sum() > 0 else large


fx.wrap("choose")


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return choose(x, self.small(x), self.large(x))


def gated() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Gated().eval(), (torch.ones(2, 8),)
