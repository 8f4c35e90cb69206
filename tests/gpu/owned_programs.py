"""A small model in steps; with a file's name under torch.profiler, whose own attribution goes there."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LAYERS, STEPS = 1024, 8, 40


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 8000)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@torch.inference_mode()
def main(file: str | None) -> None:
    model, x = Model().cuda().half().eval(), torch.randn(1, 2048, WIDTH, device="cuda", dtype=torch.half)

    def steps() -> None:
        for _ in range(STEPS):
            model(x)
        torch.cuda.synchronize()

    steps()
    if file is not None:
        with torch.profiler.profile(with_stack=True, record_shapes=True) as session:
            steps()
        session.export_chrome_trace(file)


if __name__ == "__main__":
    main(*sys.argv[1:2] or [None])
