"""Models for `spikeprof graph`: each function returns (model, args), what the command asks for.

spikeprof graph examples/graph_factory.py:decoder                 # a small decoder, on the GPU where there is one
spikeprof graph examples/graph_factory.py:decoder_on_meta --no-time   # one of 7 B parameters, without its weights
spikeprof graph examples/graph_factory.py:gated                   # a choice that torch.export refuses
"""

from __future__ import annotations

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal attention over the whole prompt."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(hidden), Attention(hidden, heads)
        self.mlp_norm, self.mlp = nn.RMSNorm(hidden), Mlp(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Embedding, layers, norm, and a head whose weight is the embedding's."""

    def __init__(self, layers: int, hidden: int, heads: int, inner: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [batch, tokens] -> logits of all positions [batch, tokens, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def choose(x: Tensor, small: Tensor, large: Tensor) -> Tensor:
    """One of two tensors, by what ``x`` holds: a graph has no such choice."""
    return small if x.sum() > 0 else large


torch.fx.wrap("choose")  # torch.fx takes it as one node; torch.export looks inside


class Gated(nn.Module):
    """Takes one of two results, by what its input holds."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 64] -> the same."""
        return choose(x, self.small(x), self.large(x))


def decoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """8 layers in fp16 on a GPU, 2 in fp32 on a CPU, over a prompt; the vocabulary is odd on purpose."""
    if torch.cuda.is_available():
        model = Decoder(8, 1024, 16, 2816, 50257).to("cuda", torch.float16)
        return model.eval(), (torch.randint(50257, (4, 256), device="cuda"),)
    return Decoder(2, 128, 4, 352, 5025).eval(), (torch.randint(5025, (2, 64)),)


def decoder_on_meta() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """32 layers, 7 B parameters in bf16, a prompt of 4096 tokens: shapes and memory without the weights."""
    with torch.device("meta"):
        model = Decoder(32, 4096, 32, 11008, 50257).to(torch.bfloat16)
        return model.eval(), (torch.zeros(1, 4096, dtype=torch.int64),)


def gated() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A choice that depends on data: torch.export refuses it and says where; torch.fx reads it."""
    return Gated().eval(), (torch.randn(8, 64),)
