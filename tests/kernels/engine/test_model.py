"""The decoder against a plain one in float64 that knows no cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spikeprof.kernels.cache import make_cache
from spikeprof.kernels.engine import model
from spikeprof.kernels.engine.config import ModelConfig
from spikeprof.kernels.engine.operators import unfused_operators
from spikeprof.kernels.engine.runner import Runner
from spikeprof.kernels.engine.weights import Weights, random_weights

SMALL = ModelConfig(2, 64, 4, 2, 32, 96, 50)
PROMPTS = [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13, 14, 15, 16, 17, 18, 19]]


def reference(config: ModelConfig, weights: Weights, ids: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] in float64, written out step by step."""
    x = weights.embedding.double()[ids]
    count, half = len(ids), config.head_dim // 2
    places, pairs = torch.arange(count, device=x.device), torch.arange(half, device=x.device)
    angle = places[:, None] * config.rope_theta ** (-pairs.double() / half)
    away = places[:, None] - places
    hidden = (away < 0) | (away >= (config.window or count))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight.double()

    def turned(x: Tensor) -> Tensor:
        rotated = torch.polar(torch.ones_like(angle), angle)[:, None] * torch.complex(x[..., :half], x[..., half:])
        return torch.cat([rotated.real, rotated.imag], -1)

    for layer in weights.layers:
        made = norm(x, layer.attention_norm) @ layer.qkv.double().T
        q, k, v = (part.unflatten(1, (-1, config.head_dim)) for part in made.split(
            [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2], 1
        ))  # fmt: skip
        q, k = turned(q), turned(k)
        outs = []
        for head in range(config.heads):
            own = head // (config.heads // config.kv_heads)
            scores = (q[:, head] @ k[:, own].T / config.head_dim**0.5).masked_fill(hidden, -torch.inf)
            outs.append(scores.softmax(-1) @ v[:, own])
        x = x + torch.cat(outs, 1) @ layer.out.double().T
        gate, up = (norm(x, layer.mlp_norm) @ layer.gate_up.double().T).chunk(2, 1)
        x = x + (gate * gate.sigmoid() * up) @ layer.down.double().T
    return norm(x, weights.norm) @ weights.head.double().T


def runner(
    config: ModelConfig,
    path: str = "torch",
    device: str = "cpu",
    kind: str = "fp16",
    fused: bool = True,
    precision: str = "fp32",
    **changes: int,
) -> Runner:
    weights = random_weights(config, precision=precision, device=device, seed=5)
    sizes = {"capacity_tokens": 256, "page_size": 16, "max_sequences": 4, "max_tokens": 64} | changes
    cache = make_cache(kind, layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim,
                       dtype=weights.dtype, device=device, **sizes)  # fmt: skip
    operators = None if fused else unfused_operators()
    return Runner(model.make_decoder(config, weights, 64, path=path, operators=operators), cache)


def assert_close(found: Tensor, want: Tensor, limit: float = 1e-5) -> None:
    assert torch.isfinite(found).all()
    assert torch.isfinite(want).all()
    assert float((found.double() - want).norm() / want.norm()) <= limit


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_prompts_of_different_lengths_then_decode(device_path: tuple[str, str], window: int | None, tied: bool) -> None:
    device, path = device_path
    config = replace(SMALL, window=window, tied=tied)
    run = runner(config, path, device)
    weights = run.decoder.weights
    with torch.inference_mode():
        found = run.prefill([0, 1, 2, 3], PROMPTS)
        assert_close(found, torch.stack([reference(config, weights, prompt)[-1] for prompt in PROMPTS]))
        longer = [[*prompt, next_token] for prompt, next_token in zip(PROMPTS, (3, 4, 30, 40), strict=True)]
        found = run.decode([3, 0, 2], [40, 3, 30])
        assert_close(found, torch.stack([reference(config, weights, longer[n])[-1] for n in (3, 0, 2)]))
    kernels = ("append", "decode_attention", "prefill_attention", "rms_norm_residual", "rotary", "silu_mul")
    assert {name: run.decoder.paths[name] for name in kernels} == {name: {path} for name in kernels}


def test_rows_that_are_padding_change_nothing(device_path: tuple[str, str]) -> None:
    """What a CUDA graph does: a static plan of more rows than there are sequences."""
    device, path = device_path
    plain, padded = runner(SMALL, path, device), runner(SMALL, path, device)
    with torch.inference_mode():
        for run in (plain, padded):
            run.prefill([0, 1], PROMPTS[2:])
        static = padded.cache.blank_plan(4)
        ids, positions = torch.tensor([[30, 40, 1, 1], [len(PROMPTS[2]), len(PROMPTS[3]), 0, 63]], device=device)
        for _ in range(2):
            static.copy_from(padded.cache.plan([(0, 1), (1, 1)]))
            found = model.decode(padded.decoder, padded.cache, static, ids, positions)
            want = plain.decode([0, 1], ids[:2])
            assert torch.isfinite(found).all()
            assert float((found[:2] - want).abs().max()) < 1e-5
            positions[:2] += 1


def test_separate_operators_give_the_same() -> None:
    fused, unfused = runner(SMALL), runner(SMALL, fused=False)
    with torch.inference_mode():
        for run in (fused, unfused):
            run.prefill([0, 1, 2, 3], PROMPTS)
        found, want = (run.decode([0, 1, 2], [5, 6, 7]) for run in (unfused, fused))
    assert float((found - want).abs().max()) < 1e-5
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("kind", ["fp16", "contiguous"])
def test_several_tokens_at_once_give_the_logits_of_each(kind: str) -> None:
    run = runner(SMALL, kind=kind)
    with torch.inference_mode():
        run.prefill([4, 5], [[1, 2, 3], [9, 9]])
        found = run.extend([5, 4], [3, 1], [10, 11, 12, 20])
    first = reference(SMALL, run.decoder.weights, [9, 9, 10, 11, 12])[2:]
    second = reference(SMALL, run.decoder.weights, [1, 2, 3, 20])[3:]
    assert_close(found, torch.cat([first, second]))


def test_a_shared_prefix_is_read_from_the_cache() -> None:
    run = runner(SMALL)
    prompt = list(range(40))
    with torch.inference_mode():
        run.prefill([0], [prompt])
        found = run.prefill([1], [[*prompt[:35], 45, 46]])
    assert_close(found, reference(SMALL, run.decoder.weights, [*prompt[:35], 45, 46])[-1:])
    usage = run.cache.usage()
    assert (usage.tokens_count, usage.stored_tokens_count) == (40 + 37, 40 + 37 - 32)


@pytest.mark.parametrize(("kind", "limit"), [("int8", 0.02), ("int8-keys", 0.02), ("int8-values", 0.02), ("int4", 0.3)])
def test_quantised_caches_stay_close(kind: str, limit: float) -> None:
    run = runner(SMALL, kind=kind)
    prompt = list(range(20))
    with torch.inference_mode():
        run.prefill([0], [prompt])
        found = run.decode([0], [33])
    assert_close(found, reference(SMALL, run.decoder.weights, [*prompt, 33])[-1:], limit)


@pytest.mark.parametrize(("precision", "limit"), [("fp16", 4e-3), ("bf16", 3e-2)])
def test_half_precision_stays_close(device_path: tuple[str, str], precision: str, limit: float) -> None:
    device, path = device_path
    run = runner(SMALL, path, device, precision=precision)
    with torch.inference_mode():
        found = [run.prefill([0], [PROMPTS[3]])[0], run.decode([0], [33])[0]]
    assert_close(torch.stack(found), reference(SMALL, run.decoder.weights, [*PROMPTS[3], 33])[-2:], limit)


def test_int8_weights_stay_close() -> None:
    run = runner(SMALL)
    exact = run.decoder.weights
    weights = random_weights(SMALL, precision="int8", seed=5)
    eight = Runner(model.make_decoder(SMALL, weights, 64, path="torch"), runner(SMALL).cache)
    with torch.inference_mode():
        found = eight.prefill([0], [PROMPTS[0]])
    assert eight.decoder.paths["int8_linear"] == {"torch"}
    assert_close(found, reference(SMALL, exact, PROMPTS[0])[-1:], 0.05)


def test_a_plan_and_tokens_that_do_not_fit() -> None:
    run = runner(SMALL)
    run.cache.begin(0)
    plan = run.cache.plan([(0, 2)])
    with pytest.raises(ValueError, match=r"tokens has shape \[1\], \[2\] is wanted"):
        model.prefill(run.decoder, run.cache, plan, torch.tensor([1]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"positions has shape \[3\], \[2\] is wanted"):
        model.prefill(run.decoder, run.cache, plan, torch.tensor([1, 2]), torch.tensor([0, 1, 2]))
