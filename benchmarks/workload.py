"""The workload of the overhead figures: one decode step of a 16-layer fp16 decoder, batch 1, ≈ 385 small kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, HIDDEN, HEADS, CONTEXT, VOCABULARY = 16, 1024, 16, 512, 32000


class Block(nn.Module):
    """Pre-norm attention over a fixed KV cache and a SwiGLU MLP, every operator a kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.Parameter(torch.ones(HIDDEN))
        self.norm2 = nn.Parameter(torch.ones(HIDDEN))
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``x`` [1, 1, hidden]; ``keys`` and ``values`` [1, heads, context, head dim]."""
        q, _, _ = self.qkv(_rms_norm(x, self.norm1)).chunk(3, -1)
        q = q.view(1, 1, HEADS, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, keys, values)
        x = x + self.out(attended.transpose(1, 2).reshape(1, 1, HIDDEN))
        y = _rms_norm(x, self.norm2)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """LAYERS blocks and a vocabulary projection."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One step: logits [1, 1, vocabulary]."""
        for block in self.blocks:
            x = block(x, keys, values)
        return self.head(x)


class Workload:
    """The model on the GPU, warmed up, its step also captured as a CUDA graph."""

    def __init__(self) -> None:
        torch.set_grad_enabled(False)
        torch.manual_seed(0)
        self.model = Decoder().half().cuda().eval()
        self.x = torch.randn(1, 1, HIDDEN, device="cuda", dtype=torch.half)
        self.keys = torch.randn(1, HEADS, CONTEXT, HIDDEN // HEADS, device="cuda", dtype=torch.half)
        self.values = torch.randn_like(self.keys)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(10):
                self.step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()
        torch.cuda.synchronize()

    def step(self) -> None:
        """One eager decode step."""
        self.model(self.x, self.keys, self.values)

    def replay(self) -> None:
        """The same step as a CUDA-graph replay."""
        self.graph.replay()


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    squares = x.float().pow(2).mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(squares + 1e-5)).to(x.dtype) * weight
