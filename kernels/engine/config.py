"""The sizes of a decoder: presets from 10 M to 7 B parameters, or a checkpoint's config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spikeprof.kernels.paths import check

MODEL_TYPES = ("llama", "mistral")
_POSITIVE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of Llama's kind: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

    ``window`` limits attention to a query's own token and the ``window - 1`` before it. ``tied``: the embedding is the
    output head, too. Raises ValueError for sizes that cannot work together.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    window: int | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            check(type(value) is int and value > 0, f"{name} is {value!r}: it must be a positive integer")
        check(self.heads % self.kv_heads == 0, f"heads is {self.heads}: it must be a multiple of kv_heads, "
              f"{self.kv_heads}")  # fmt: skip
        check(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}: rotary embedding needs an even one")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            check(type(value) in (float, int) and 0 < value < math.inf,
                  f"{name} is {value!r}: it must be a positive number")  # fmt: skip
        check(self.window is None or (type(self.window) is int and self.window > 0),
              f"window is {self.window!r}: it must be a positive integer, or None")  # fmt: skip

    @property
    def parameters_count(self) -> int:
        """Parameters, those of a tied head once."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token takes in the KV cache, keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


PRESETS: Mapping[str, ModelConfig] = {
    "tiny": ModelConfig(4, 384, 6, 2, 64, 1024, 8192, tied=True),
    "100m": ModelConfig(12, 768, 12, 4, 64, 2048, 32000, tied=True),
    "240m": ModelConfig(16, 1024, 16, 4, 64, 2688, 32000),
    "1b": ModelConfig(22, 2048, 32, 4, 64, 5632, 32000),
    "3b": ModelConfig(28, 3072, 24, 8, 128, 8192, 32000),
    "7b": ModelConfig(32, 4096, 32, 8, 128, 14336, 32000),
}


def preset(name: str) -> ModelConfig:
    """The preset of this name. Raises ValueError where there is none."""
    check(name in PRESETS, f"model is {name!r}: presets are {', '.join(PRESETS)}; or the path of a checkpoint")
    return PRESETS[name]


def read_config(folder: Path) -> ModelConfig:
    """The sizes in ``config.json`` of a checkpoint, in the keys that Llama-style checkpoints have.

    Raises ValueError naming the file and the key for what is missing or not supported.
    """
    path = folder / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    check(isinstance(found, dict), f"{path}: must be a JSON object")
    _check_supported(path, found)
    try:
        heads = found["num_attention_heads"]
        check(type(heads) is int and heads > 0, f"num_attention_heads is {heads!r}: it must be a positive integer")
        return ModelConfig(
            layers=found["num_hidden_layers"],
            hidden=found["hidden_size"],
            heads=heads,
            kv_heads=found.get("num_key_value_heads") or heads,
            head_dim=found.get("head_dim") or found["hidden_size"] // heads,
            intermediate=found["intermediate_size"],
            vocabulary=found["vocab_size"],
            tied=bool(found.get("tie_word_embeddings", False)),
            rope_theta=_rope_theta(found),
            norm_eps=found.get("rms_norm_eps", 1e-6),
            window=found.get("sliding_window") if found.get("use_sliding_window", True) else None,
        )
    except KeyError as error:
        raise ValueError(f"{path}: the key {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _check_supported(path: Path, found: Mapping[str, object]) -> None:
    """Biases, other activations and scaled rotary embedding would be computed wrongly: refuse them.

    So would kinds of models that have Llama's tensors and do other things with them: a scaled residual, for example.
    """
    kind = found.get("model_type", MODEL_TYPES[0])
    check(kind in MODEL_TYPES, f"{path}: model_type is {kind!r}: it can be {', '.join(MODEL_TYPES)}")
    for key, allowed in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        check(found.get(key, allowed) == allowed, f"{path}: {key} is {found.get(key)!r}: only {allowed!r} is supported")
    for key in ("rope_scaling", "rope_parameters"):
        scaling = found.get(key)
        kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else "default"
        check(kind == "default", f"{path}: {key} is of type {kind!r}: only plain rotary embedding is supported")


def _rope_theta(found: Mapping[str, object]) -> Any:
    inner = found.get("rope_parameters")
    theta = inner.get("rope_theta", 10000.0) if isinstance(inner, dict) else 10000.0
    return found.get("rope_theta", theta)
