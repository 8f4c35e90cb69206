from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spikeprof.kernels.engine import marks
from spikeprof.kernels.engine.checkpoint import write_shard
from spikeprof.kernels.engine.config import ModelConfig
from spikeprof.kernels.engine.engine import Engine, Streamed
from spikeprof.kernels.engine.graph import DecodeGraphs, buckets

SMALL = ModelConfig(2, 64, 4, 2, 32, 96, 50)
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13, 14, 15, 16, 17, 18, 19]]


def engine(**options: object) -> Engine:
    return Engine(SMALL, **({"weights": "fp32", "max_seq_len": 64, "max_batch": 4, "device": "cpu"} | options))


def test_generating_gives_figures_of_each_prompt() -> None:
    made = engine().generate(PROMPTS, 6)
    assert [len(tokens) for tokens in made.tokens] == [6, 6, 6]
    assert made.reasons == ["length"] * 3
    assert all(seconds > 0 for seconds in made.ttft_s)
    assert [len(gaps) for gaps in made.itl_s] == [5, 5, 5]
    assert made.paths["decode_attention"] == ("torch",)
    assert made.paths["linear"] == ("torch",)


def test_a_batch_gives_what_each_prompt_gives_alone() -> None:
    together = engine().generate(PROMPTS, 8).tokens
    alone = [engine().generate(prompt, 8).tokens[0] for prompt in PROMPTS]
    assert together == alone


def test_prompts_as_tensors_and_pages_of_other_sizes() -> None:
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    want = engine().generate([[1, 2, 3], [4, 5, 6]], 6).tokens
    assert engine().generate(prompts, 6).tokens == engine(page_size=4).generate(list(prompts), 6).tokens == want
    assert engine().generate(prompts[1], 6).tokens == want[1:]


def test_more_prompts_than_the_batch_holds_take_turns() -> None:
    prompts = [[number, number + 1] for number in range(11)]
    assert engine(max_batch=3).generate(prompts, 5).tokens == engine(max_batch=16).generate(prompts, 5).tokens


@pytest.mark.parametrize("options", [{"temperature": 0.9}, {"temperature": 1.5, "top_p": 0.7, "seed": 4}])
def test_sampling_repeats_by_its_seed(options: dict[str, float]) -> None:
    first, again = (engine().generate([PROMPTS[0]] * 2, 12, **options).tokens for _ in range(2))
    assert first == again
    assert first[0] != first[1]  # each prompt has a seed of its own
    assert first != engine().generate([PROMPTS[0]] * 2, 12, **(options | {"seed": 99})).tokens


def test_the_stop_token_is_the_last_one() -> None:
    tokens = engine().generate(PROMPTS[0], 10).tokens[0]
    stop = tokens[4]
    made = engine().generate(PROMPTS[0], 10, stop_token=stop)
    assert made.tokens[0] == tokens[: tokens.index(stop) + 1]
    assert made.reasons == ["stop"]


def test_streaming_gives_the_same_tokens_one_by_one() -> None:
    run = engine()
    parts: list[list[int]] = [[], [], []]
    for streamed in run.stream(PROMPTS, 6):
        assert isinstance(streamed, Streamed)
        parts[streamed.prompt].append(streamed.token)
    assert parts == engine().generate(PROMPTS, 6).tokens


def test_a_stream_that_is_closed_gives_its_pages_back_and_another_goes_on() -> None:
    run = engine()
    left, kept = run.stream(PROMPTS[0], 30), run.stream(PROMPTS[1], 8)
    tokens = [next(kept).token, next(left).token and next(kept).token]
    left.close()
    assert run.runner.cache.usage().sequences_count == 1
    tokens += [streamed.token for streamed in kept]
    assert tokens == engine().generate(PROMPTS[1], 8).tokens[0]
    assert run.scheduler.is_idle
    assert run.runner.cache.usage().tokens_count == 0


def test_a_stream_that_nobody_reads_queues_nothing() -> None:
    run = engine()
    run.stream(PROMPTS, 6).close()  # type: ignore[attr-defined]
    assert run.scheduler.is_idle


@pytest.mark.parametrize("kind", ["contiguous", "int8-values", "int8-keys", "int8", "int4"])
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_kinds_of_caches_and_weights(kind: str, weights: str) -> None:
    made = engine(kv_cache=kind, weights=weights).generate(PROMPTS, 6)
    assert [len(tokens) for tokens in made.tokens] == [6, 6, 6]
    assert ("int8_linear" in made.paths) == (weights == "int8")
    if (kind, weights) == ("contiguous", "fp32"):
        assert made.tokens == engine().generate(PROMPTS, 6).tokens


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 32,'
        ' "vocab_size": 20, "tie_word_embeddings": true}'
    )
    torch.manual_seed(0)
    at = "model.layers.0"
    shapes = {
        "model.embed_tokens": (20, 64), "model.norm": (64,), f"{at}.input_layernorm": (64,),
        f"{at}.post_attention_layernorm": (64,), f"{at}.mlp.gate_proj": (32, 64), f"{at}.mlp.up_proj": (32, 64),
        f"{at}.mlp.down_proj": (64, 32), **{f"{at}.self_attn.{part}_proj": (64, 64) for part in "qkvo"},
    }  # fmt: skip
    write_shard(tmp_path / "model.safetensors", {f"{name}.weight": torch.randn(s) for name, s in shapes.items()})
    by_folder = Engine(str(tmp_path), weights="fp32", max_seq_len=32, max_batch=2, device="cpu")
    by_file = Engine(tmp_path / "model.safetensors", weights="fp32", max_seq_len=32, max_batch=2, device="cpu")
    assert by_folder.config.head_dim == 32
    assert by_folder.generate([1, 2], 5).tokens == by_file.generate([1, 2], 5).tokens


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("window", [None, 6])
def test_a_checkpoint_of_transformers(tmp_path: Path, window: int | None) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    kinds = (LlamaConfig, LlamaForCausalLM) if window is None else (MistralConfig, MistralForCausalLM)
    options = {} if window is None else {"sliding_window": window}
    torch.manual_seed(0)
    model = kinds[1](kinds[0](
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, **options,
    )).eval()  # fmt: skip
    for parameter in model.parameters():  # as it is made, its tokens hardly depend on the prompt
        parameter.data.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 + (parameter.dim() == 1))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    prompt = list(range(3, 23))
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0, -1]
    run = Engine(tmp_path, weights="fp32", max_seq_len=64, max_batch=2, device="cpu")
    found = run.runner.prefill([0], [prompt])[0]
    assert float((found - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": "huge"}, "model is 'huge': presets are tiny"),
        ({"model": 7}, "model is 7: it can be a ModelConfig, a preset's name or a path"),
        ({"model": replace(SMALL, head_dim=8)}, "head_dim is 8: it must be a multiple of 16 from 16 to 256"),
        ({"model": replace(SMALL, head_dim=48), "kv_cache": "int4"}, "head_dim is 48: 4 bits need a multiple of 32"),
        ({"max_seq_len": 1.5}, "max_seq_len is 1.5: it must be a positive integer"),
        ({"max_delay_s": float("inf")}, "max_delay_s is inf: it must be 0 or more, and finite"),
        ({"kv_cache": "fp8"}, "kv_cache is 'fp8': it can be contiguous"),
        ({"weights": "fp8"}, "weights is 'fp8'"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"cache_tokens": 0}, "cache_tokens is 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"kv_cache": "contiguous", "max_seq_len": 1 << 20}, "a cache may take 268435456 bytes here"),
        ({"cuda_graph": True}, "cuda_graph is True, but the device is cpu: CUDA graphs need a GPU"),
        ({"device": "tpu"}, "device is 'tpu': it can be 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"max_delay_s": -1}, "max_delay_s is -1"),
        ({"max_size": 0}, "max_size is 0"),
        ({"path": "cuda"}, "path is 'cuda'"),
    ],
)
def test_options_that_cannot_work(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Engine(**({"model": SMALL, "device": "cpu", "max_seq_len": 64, "weights": "fp32"} | options))


def test_a_gpu_that_is_not_there() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device is 'cuda', but torch sees no GPU"):
            engine(device="cuda")


@pytest.mark.parametrize(
    ("prompts", "most", "error", "problem"),
    [
        ([], 4, ValueError, "prompts is empty"),
        (5, 4, ValueError, "prompts is 5: it must be a list of token ids, or of such lists"),
        ([1], 2.5, ValueError, "max_new_tokens is 2.5: it must be a positive integer"),
        ([[]], 4, ValueError, "prompt is empty"),
        ([[1.5]], 4, ValueError, "prompt must be a list of token ids: 'float' object"),
        ([[1], [50]], 4, IndexError, "prompt has the token 50: the vocabulary has 0 to 49"),
        ([-1], 4, IndexError, "prompt has the token -1"),
        ([1], 0, ValueError, "max_new_tokens is 0"),
        ([1] * 60, 5, ValueError, "the prompt has 60 tokens and max_new_tokens is 5: together they can be at most 64"),
    ],
)
def test_prompts_that_cannot_be_run(prompts: list[object], most: int, error: type[Exception], problem: str) -> None:
    run = engine()
    for call in (run.generate, run.stream):
        with pytest.raises(error, match=problem):
            call(prompts, most)
    assert run.scheduler.is_idle


def test_marks_name_the_phases_and_do_nothing_by_themselves() -> None:
    seen = []

    @contextmanager
    def hook(name: str, **ids: int | str) -> Iterator[None]:
        seen.append((name, ids))
        yield

    run = engine()
    assert marks.mark("x", step=1) is marks.mark("y")
    before = marks.replace(hook)
    try:
        run.generate([[1, 2], [3]], 2)
    finally:
        marks.replace(before)
    assert [name for name, _ in seen] == ["step", "prefill", "sample", "decode", "sample"]
    assert seen[1][1] == {"batch": 2, "tokens": 3}
    assert seen[3][1] == {"batch": 2}
    run.generate([1], 1)
    assert len(seen) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_graphs_need_a_gpu() -> None:
    run = engine()
    with pytest.raises(ValueError, match="cuda_graph is True, but the device is cpu: CUDA graphs need a GPU"):
        DecodeGraphs(run.runner.decoder, run.runner.cache, 4)


def test_buckets_of_graphs() -> None:
    assert [buckets(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]
    with pytest.raises(ValueError, match="max_batch is 0"):
        buckets(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [{}, {"kv_cache": "contiguous"}, {"kv_cache": "int4", "weights": "int8"}])
def test_graphs_generate_the_same_tokens(options: dict[str, str]) -> None:
    prompts = [[number, 2, 3] for number in range(7)]
    eager, graph = (
        engine(device="cuda", max_batch=5, cuda_graph=on, **options).generate(prompts, 12) for on in (False, True)
    )
    assert eager.tokens == graph.tokens
    assert graph.paths["decode_attention"] == ("triton",)
