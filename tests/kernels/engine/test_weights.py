from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spikeprof.kernels.engine.checkpoint import CheckpointError, write_shard, write_sharded
from spikeprof.kernels.engine.config import ModelConfig
from spikeprof.kernels.engine.linear import Int8, dequantised, linear, quantised
from spikeprof.kernels.engine.weights import load_weights, random_weights

SMALL = ModelConfig(2, 32, 4, 2, 8, 48, 100)


def llama(config: ModelConfig) -> dict[str, Tensor]:
    """A checkpoint with the names and shapes that Llama has, written out."""
    torch.manual_seed(3)
    tensors = {"model.embed_tokens.weight": torch.randn(100, 32), "model.norm.weight": torch.rand(32)}
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": torch.rand(32),
            f"{at}.self_attn.q_proj.weight": torch.randn(32, 32),
            f"{at}.self_attn.k_proj.weight": torch.randn(16, 32),
            f"{at}.self_attn.v_proj.weight": torch.randn(16, 32),
            f"{at}.self_attn.o_proj.weight": torch.randn(32, 32),
            f"{at}.post_attention_layernorm.weight": torch.rand(32),
            f"{at}.mlp.gate_proj.weight": torch.randn(48, 32),
            f"{at}.mlp.up_proj.weight": torch.randn(48, 32),
            f"{at}.mlp.down_proj.weight": torch.randn(32, 48),
        }
    if not config.tied:
        tensors["lm_head.weight"] = torch.randn(100, 32)
    return tensors


def test_names_of_a_checkpoint(tmp_path: Path) -> None:
    tensors = llama(SMALL)
    write_sharded(tmp_path, tensors, 3)
    weights = load_weights(tmp_path, SMALL, precision="fp32")
    layer = weights.layers[1]
    assert torch.equal(layer.qkv[:32], tensors["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(layer.qkv[32:48], tensors["model.layers.1.self_attn.k_proj.weight"])
    assert torch.equal(layer.qkv[48:], tensors["model.layers.1.self_attn.v_proj.weight"])
    assert torch.equal(layer.gate_up[:48], tensors["model.layers.1.mlp.gate_proj.weight"])
    assert torch.equal(layer.gate_up[48:], tensors["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(layer.mlp_norm, tensors["model.layers.1.post_attention_layernorm.weight"])
    assert torch.equal(layer.down, tensors["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(weights.head, tensors["lm_head.weight"])
    assert torch.equal(weights.norm, tensors["model.norm.weight"])


def test_a_tied_head_is_the_embedding_also_where_only_the_checkpoint_says_so(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", llama(replace(SMALL, tied=True)))
    for config in (SMALL, replace(SMALL, tied=True)):
        weights = load_weights(tmp_path, config, precision="fp32")
        assert weights.head is weights.embedding


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"tensor model.layers.1.mlp.up_proj.weight is missing"),
        (
            "model.layers.0.self_attn.k_proj.bias",
            (16,),
            r"tensor model.layers.0.self_attn.k_proj.bias is not one of this kind of decoder with 2 layers",
        ),
        (
            "model.layers.0.self_attn.k_proj.weight",
            (32, 32),
            r"tensor model.layers.0.self_attn.k_proj.weight has shape \[32, 32\], \[16, 32\] is wanted",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    tmp_path: Path, name: str, tensor: tuple[int, ...] | None, problem: str
) -> None:
    tensors = llama(SMALL)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = torch.zeros(tensor)
    write_shard(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=problem):
        load_weights(tmp_path, SMALL, precision="fp32")


def test_random_weights_by_their_seed() -> None:
    first, again, other = (random_weights(SMALL, precision="fp32", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.layers[1].down, again.layers[1].down)
    assert not torch.equal(first.layers[1].down, other.layers[1].down)
    assert float(random_weights(replace(SMALL, vocabulary=4096), precision="fp32").embedding.std()) == pytest.approx(
        32**-0.5, rel=0.02
    )
    assert torch.equal(first.norm, torch.ones(32))


def test_precisions() -> None:
    assert random_weights(SMALL, precision="bf16").dtype == torch.bfloat16
    eight = random_weights(SMALL, precision="int8")
    assert (eight.dtype, type(eight.layers[0].qkv), type(eight.head)) == (torch.float32, Int8, Int8)
    with pytest.raises(ValueError, match="weights is 'fp8': it can be fp32, fp16, bf16, int8"):
        random_weights(SMALL, precision="fp8")


def test_quantising_by_hand() -> None:
    made = quantised(torch.tensor([[1.27, -0.64, 0.0], [0.0, 0.0, 0.0]]))
    assert made.values.tolist() == [[127, -64, 0], [0, 0, 0]]
    assert float(made.scale[0]) == pytest.approx(0.01)
    assert torch.isfinite(dequantised(made, torch.float32)).all()


def test_quantising_is_off_by_half_a_step_at_most() -> None:
    torch.manual_seed(0)
    weight = torch.randn(17, 33)
    made = quantised(weight)
    assert ((dequantised(made, torch.float32) - weight).abs() <= made.scale[:, None] * 0.501).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 300, 40), (17, 64, 33)])
def test_the_int8_product(device_path: tuple[str, str], dtype: str, shape: tuple[int, int, int]) -> None:
    device, path = device_path
    rows, ins, outs = shape
    torch.manual_seed(1)
    x = torch.randn(rows, ins, device=device).to(getattr(torch, dtype))
    weight = quantised(torch.randn(outs, ins, device=device))
    out, ran = linear(x, weight, path=path)
    want = x.double() @ (weight.values.double() * weight.scale.double()[:, None]).T
    assert ran == path
    assert torch.isfinite(out).all()
    limit = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    assert float((out.double() - want).norm() / want.norm()) <= limit


def test_products_that_cannot_be() -> None:
    weight = quantised(torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"x has shape \[2, 7\], \[any, 8\] is wanted"):
        linear(torch.ones(2, 7), weight)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="path is 'triton'"):
            linear(torch.ones(2, 8), weight, path="triton")
