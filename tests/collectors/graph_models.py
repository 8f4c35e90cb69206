"""Factories for the tests of static graphs; torch is imported in them, so that those which fail do so at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def raises() -> Any:
    raise ValueError("no weights\nhere")


def exits() -> Any:
    sys.exit(3)


def is_killed() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves() -> Any:
    os._exit(7)


def number() -> Any:
    return 5


def stubborn() -> Any:
    """Hears no signal that asks it to end."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    sys.stdout.write("deaf\n")
    sys.stdout.flush()
    time.sleep(60)


def mlp() -> Any:
    """Views, an in-place operator, two outputs, and a weight of two layers."""
    import torch
    from torch import nn

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
            self.again = nn.Linear(32, 8)
            self.again.weight = self.down.weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.nn.functional.silu(self.up(x))  # [4, 32]
            h = h.add_(1.0)
            left, _ = h.split([16, 16], -1)
            turned = h.view(4, 2, 16).transpose(0, 1)
            y = self.down(turned.transpose(0, 1).reshape(4, 32))
            return self.again(h) + y, left * 2

    sys.stdout.write("printed by the factory\n")
    return Mlp().eval(), (torch.randn(4, 8),)


def by_keyword() -> Any:
    """Arguments out of order, and a default."""
    import torch
    from torch import nn

    class Scaled(nn.Module):
        def forward(
            self, x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, shift: float = 1.0
        ) -> torch.Tensor:
            return (x * scale)[:2] + offset + shift

    return Scaled().eval(), (torch.ones(4),), {"offset": torch.ones(2), "scale": torch.full((4,), 2.0)}


def branches() -> Any:
    """A choice by data in the model itself: neither way can read it."""
    import torch
    from torch import nn

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x - 1

    return Branches().eval(), (torch.ones(2),)


def on_meta() -> Any:
    import torch
    from torch import nn

    with torch.device("meta"):
        return nn.Linear(1 << 14, 1 << 14, dtype=torch.float16).eval(), (torch.empty(1, 1 << 14, dtype=torch.float16),)


def chain(length: int = 5000) -> Any:
    """So many operators one after the other."""
    import torch
    from torch import nn

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(length):
                x = x + 1.0
            return x

    return Chain().eval(), (torch.zeros(256),)


def engine() -> Any:
    """Two layers of the reference engine's network over a prompt of 8 tokens, without its checks of positions."""
    import dataclasses

    import torch
    from torch import nn

    from spikeprof.kernels.engine.config import ModelConfig
    from spikeprof.kernels.engine.network import Kernels, Network, Step
    from spikeprof.kernels.engine.operators import unfused_operators
    from spikeprof.kernels.engine.weights import random_weights
    from spikeprof.kernels.fused import Rotated, rotary_table

    config = ModelConfig(2, 64, 4, 2, 16, 128, 97, tied=True)
    operators = dataclasses.replace(
        unfused_operators(), rotate=lambda q, k, _at, table: Rotated(q * table[0], k * table[0], "torch")
    )

    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weights = random_weights(config, precision="fp32")
            kernels = Kernels(operators, "torch", lambda name, path: None)
            self.network = Network(config, weights, rotary_table(32, 16), kernels)

        def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
            def attend(_layer: int, q: Any, k: Any, v: Any) -> Any:
                q, k, v = (x.transpose(0, 1) for x in (q, k, v))
                out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                return out.transpose(0, 1)

            return self.network(tokens, Step(positions, attend), None)

    return Prompt().eval(), (torch.arange(8), torch.arange(8))
