"""The weights of a decoder: random ones made on the device, or those of a Llama-style safetensors checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from spikeprof.kernels.engine.checkpoint import Checkpoint, CheckpointError
from spikeprof.kernels.engine.config import ModelConfig
from spikeprof.kernels.engine.linear import Int8, quantised
from spikeprof.kernels.paths import check

PRECISIONS = ("fp32", "fp16", "bf16", "int8")
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

Matrix: TypeAlias = Tensor | Int8


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are [out, in].

    ``qkv``: the rows of queries [heads * head_dim], then keys, then values [kv_heads * head_dim]. ``gate_up``: those of
    the gate [intermediate], then those of the other half. One product makes all of them.
    """

    attention_norm: Tensor
    qkv: Matrix
    out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Weights:
    """``embedding`` [vocabulary, hidden] is never quantised: it is looked up; a tied head is the same tensor."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Matrix

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def bytes_count(self) -> int:
        """Bytes of all weights, those of a tied head once."""
        matrices: list[Matrix] = [self.embedding, self.norm]
        if self.head is not self.embedding:
            matrices.append(self.head)
        for layer in self.layers:
            matrices += [layer.attention_norm, layer.qkv, layer.out, layer.mlp_norm, layer.gate_up, layer.down]
        return sum(_bytes(matrix) for matrix in matrices)


def random_weights(config: ModelConfig, *, precision: str = "fp16", device: str = "cpu", seed: int = 0) -> Weights:
    """Weights drawn on the device: matrices with variance 1 / inputs, so that activations keep their size; norms 1.

    The same seed gives the same weights on the same kind of device. INT8 is quantised matrix by matrix as it is drawn.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def fill(_names: tuple[str, ...], into: Tensor) -> None:
        if into.dim() == 1:
            into.fill_(1)
        else:
            into.normal_(0, into.shape[1] ** -0.5, generator=generator)

    return _assemble(config, precision, device, fill, tied=config.tied)


def load_weights(path: Path, config: ModelConfig, *, precision: str = "fp16", device: str = "cpu") -> Weights:
    """The weights of a safetensors file or folder, tensor by tensor straight to the device.

    The head is tied where the config says so, or where the checkpoint has none. Raises CheckpointError, a ValueError,
    naming the file and the tensor for what is missing, damaged, of another shape than ``config`` wants, or not known:
    a bias that was left out would be computed wrongly.
    """
    checkpoint = Checkpoint(path)
    tied = config.tied or HEAD not in checkpoint.names
    _check_no_others(path, config, checkpoint.names)

    def fill(names: tuple[str, ...], into: Tensor) -> None:
        begin = 0
        for name, rows in zip(names, _rows(config, names, into), strict=True):
            checkpoint.read(name, into[begin : begin + rows])
            begin += rows

    return _assemble(config, precision, device, fill, tied=tied)


def compute_dtype(precision: str, device: str) -> torch.dtype:
    """The dtype of activations: for INT8 weights fp16 on a GPU, fp32 on a CPU, which has no fast fp16."""
    check(precision in PRECISIONS, f"weights is {precision!r}: it can be {', '.join(PRECISIONS)}")
    if precision == "int8":
        return torch.float32 if torch.device(device).type == "cpu" else torch.float16
    return _DTYPES[precision]


def layer_names(layer: int) -> Mapping[str, tuple[str, ...]]:
    """The tensors of a Llama-style checkpoint that make each field of ``LayerWeights``, row by row."""
    at = f"model.layers.{layer}."
    return {
        "attention_norm": (f"{at}input_layernorm.weight",),
        "qkv": tuple(f"{at}self_attn.{part}_proj.weight" for part in "qkv"),
        "out": (f"{at}self_attn.o_proj.weight",),
        "mlp_norm": (f"{at}post_attention_layernorm.weight",),
        "gate_up": (f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight"),
        "down": (f"{at}mlp.down_proj.weight",),
    }


def layer_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of each field of ``LayerWeights``."""
    attention = config.heads * config.head_dim
    return {
        "attention_norm": (config.hidden,),
        "qkv": (attention + 2 * config.kv_heads * config.head_dim, config.hidden),
        "out": (config.hidden, attention),
        "mlp_norm": (config.hidden,),
        "gate_up": (2 * config.intermediate, config.hidden),
        "down": (config.hidden, config.intermediate),
    }


def _check_no_others(path: Path, config: ModelConfig, names: frozenset[str]) -> None:
    known = {EMBEDDING, NORM, HEAD}
    for layer in range(config.layers):
        known.update(*layer_names(layer).values())
    others = sorted(name for name in names - known if not name.endswith("rotary_emb.inv_freq"))
    if others:
        raise CheckpointError(f"{path}: tensor {others[0]} is not one of this kind of decoder with {config.layers} "
                              f"layers; there are {len(others)} such")  # fmt: skip


def _bytes(matrix: Matrix) -> int:
    parts = (matrix.values, matrix.scale) if isinstance(matrix, Int8) else (matrix,)
    return sum(part.numel() * part.element_size() for part in parts)


def _rows(config: ModelConfig, names: tuple[str, ...], into: Tensor) -> list[int]:
    """How many rows of ``into`` each of the tensors fills."""
    if len(names) == 3:
        keys = config.kv_heads * config.head_dim
        return [config.heads * config.head_dim, keys, keys]
    return [into.shape[0] // len(names)] * len(names)


def _assemble(
    config: ModelConfig, precision: str, device: str, fill: Callable[[tuple[str, ...], Tensor], None], *, tied: bool
) -> Weights:
    dtype = compute_dtype(precision, device)

    def plain(names: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=device)
        fill(names, made)
        return made

    def matrix(names: tuple[str, ...], shape: tuple[int, ...]) -> Matrix:
        made = plain(names, shape)
        return quantised(made) if precision == "int8" else made

    table = (config.vocabulary, config.hidden)
    embedding = plain((EMBEDDING,), table)
    layers = []
    for layer in range(config.layers):
        names, shapes = layer_names(layer), layer_shapes(config)
        layers.append(LayerWeights(**{
            field: (plain if field.endswith("norm") else matrix)(names[field], shapes[field]) for field in names
        }))  # fmt: skip
    norm = plain((NORM,), (config.hidden,))
    head = embedding if tied else matrix((HEAD,), table)
    return Weights(embedding, tuple(layers), norm, head)
