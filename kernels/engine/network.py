"""The decoder's layers as torch modules, so that whoever looks at the program sees ``layers.7.mlp`` and not a loop.

Tokens of all sequences lie one after the other, [tokens, hidden]: no product runs over padding. Weights are attributes,
not parameters: nothing here is trained, and INT8 weights are no tensors.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spikeprof.kernels.engine.config import ModelConfig
from spikeprof.kernels.engine.linear import linear
from spikeprof.kernels.engine.operators import Operators
from spikeprof.kernels.engine.weights import LayerWeights, Matrix, Weights
from spikeprof.kernels.paths import Ran

#: (layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> [tokens, heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Step(NamedTuple):
    """What one pass needs beside the tokens: their positions int64 [tokens], and attention over the cache."""

    positions: Tensor
    attend: Attend


class Kernels(NamedTuple):
    """What all modules share: the operators, the path of the rest, and where each kernel's path is noted."""

    operators: Operators
    path: str
    ran: Callable[[str, str], None]


class Linear(nn.Module):
    """A product with a plain or INT8 weight [out, in]."""

    def __init__(self, weight: Matrix, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self.kernels = weight, kernels

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out]."""
        # Plain weights are always left to torch's BLAS, whatever path the kernels take.
        made: Ran = linear(x, self.weight, path=self.kernels.path)
        self.kernels.ran("linear" if isinstance(self.weight, Tensor) else "int8_linear", made.path)
        return made.out


class Norm(nn.Module):
    """RMSNorm of the sum with the residual stream."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self.eps, self.kernels = weight, eps, kernels

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm, and the new residual."""
        out, total, path = self.kernels.operators.norm(x, residual, self.weight, self.eps)
        self.kernels.ran("rms_norm_residual", path)
        return out, total


class Attention(nn.Module):
    """Projections and rotary embedding around the attention that the step brings."""

    def __init__(self, number: int, config: ModelConfig, weights: LayerWeights, rotary: Tensor, kernels: Kernels):
        super().__init__()
        self.number, self.rotary, self.kernels, self.head_dim = number, rotary, kernels, config.head_dim
        self.sizes = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
        self.qkv, self.out = Linear(weights.qkv, kernels), Linear(weights.out, kernels)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[tokens, hidden] -> the same."""
        q, k, v = (part.unflatten(1, (-1, self.head_dim)) for part in self.qkv(x).split(self.sizes, 1))
        q, k, path = self.kernels.operators.rotate(q, k, step.positions, self.rotary)
        self.kernels.ran("rotary", path)
        out: Tensor = self.out(step.attend(self.number, q, k, v).reshape(-1, self.sizes[0]))
        return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, weights: LayerWeights, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_up, self.down = Linear(weights.gate_up, kernels), Linear(weights.down, kernels)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> the same."""
        made = self.kernels.operators.silu_mul(*self.gate_up(x).chunk(2, 1))
        self.kernels.ran("silu_mul", made.path)
        out: Tensor = self.down(made.out)
        return out


class Layer(nn.Module):
    """Attention and MLP, each behind a norm that also adds what came before to the residual stream."""

    def __init__(self, number: int, config: ModelConfig, weights: LayerWeights, rotary: Tensor, kernels: Kernels):
        super().__init__()
        self.attention_norm = Norm(weights.attention_norm, config.norm_eps, kernels)
        self.attention = Attention(number, config, weights, rotary, kernels)
        self.mlp_norm = Norm(weights.mlp_norm, config.norm_eps, kernels)
        self.mlp = Mlp(weights, kernels)

    def forward(self, x: Tensor, residual: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """What is still to be added to the residual stream, and that stream."""
        x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self.attention(x, step), residual)
        return self.mlp(x), residual


class Network(nn.Module):
    """Embedding, layers, norm, head."""

    def __init__(self, config: ModelConfig, weights: Weights, rotary: Tensor, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.embedding = kernels, weights.embedding
        self.layers = nn.ModuleList(
            Layer(number, config, layer, rotary, kernels) for number, layer in enumerate(weights.layers)
        )
        self.norm = Norm(weights.norm, config.norm_eps, kernels)
        self.head = Linear(weights.head, kernels)

    def forward(self, tokens: Tensor, step: Step, rows: Tensor | None) -> Tensor:
        """Token ids int64 [tokens] -> logits [tokens, vocabulary], or of ``rows`` of them."""
        x = self.embedding[tokens]
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual, step)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        x, _ = self.norm(x, residual)
        logits: Tensor = self.head(x)
        return logits
