from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from spikeprof.kernels.engine.config import ModelConfig
from spikeprof.kernels.engine.engine import Engine
from spikeprof.kernels.engine.speculative import Speculative, judge

SMALL = ModelConfig(2, 64, 4, 2, 32, 96, 50)
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13, 14, 15, 16, 17, 18, 19]]


def engine(config: ModelConfig = SMALL, **options: object) -> Engine:
    return Engine(config, **({"weights": "fp32", "max_seq_len": 64, "max_batch": 4, "device": "cpu"} | options))


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("draft", ["same", "int8", "other"])
def test_greedy_output_is_the_targets_own(k: int, draft: str) -> None:
    options = {"same": {}, "int8": {"weights": "int8"}, "other": {"seed": 9}}[draft]
    want = engine().generate(PROMPTS, 20)
    target, small = engine(), engine(**options)
    made = Speculative(target, small, k=k).generate(PROMPTS, 20)
    assert made.tokens == want.tokens
    assert made.reasons == want.reasons
    assert set(made.paths) == {"target", "draft"}
    assert made.paths["target"]["decode_attention"] == made.paths["draft"]["rotary"] == ("torch",)
    assert made.statistics.generated_count == 60
    share = made.statistics.acceptance_share
    assert {"same": share == 1.0, "int8": share > 0.5, "other": share < 0.5}[draft]
    for run in (target, small):
        assert run.runner.cache.usage().sequences_count == 0


@pytest.mark.parametrize("kind", ["contiguous", "int8", "int4"])
def test_greedy_output_over_other_caches(kind: str) -> None:
    want = engine(kv_cache=kind).generate(PROMPTS, 15)
    made = Speculative(engine(kv_cache=kind), engine(seed=9, kv_cache=kind), k=3).generate(PROMPTS, 15)
    assert made.tokens == want.tokens


def test_a_draft_of_another_size() -> None:
    draft = engine(replace(SMALL, layers=1, hidden=32), seed=2)
    assert Speculative(engine(), draft, k=3).generate(PROMPTS, 20).tokens == engine().generate(PROMPTS, 20).tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_greedy_output_on_a_gpu_with_a_draft_of_graphs() -> None:
    draft = engine(device="cuda", weights="int8", cuda_graph=True)
    made = Speculative(engine(device="cuda"), draft, k=3).generate(PROMPTS, 20)
    assert made.tokens == engine(device="cuda").generate(PROMPTS, 20).tokens
    assert min(made.statistics.draft_s + made.statistics.verify_s + made.statistics.commit_s) > 0


def test_figures_of_a_draft_that_is_always_right() -> None:
    made = Speculative(engine(), engine(), k=4).generate(PROMPTS[0], 11)
    found = made.statistics
    # One token of the prefill, then two rounds of four proposals and one more.
    assert (found.proposed_count, found.accepted_count, found.target_passes_count) == (8, 8, 3)
    assert found.tokens_per_pass == pytest.approx(11 / 3)
    assert [len(laps) for laps in (found.draft_s, found.verify_s, found.commit_s)] == [2, 2, 2]
    assert min(found.draft_s + found.verify_s + found.commit_s) > 0


def test_ends_are_kept() -> None:
    own = engine().generate(PROMPTS[0], 20).tokens[0]
    stop = own[6]
    for k in (1, 2, 3, 8):
        made = Speculative(engine(), engine(), k=k).generate(PROMPTS[0], 20, stop_token=stop)
        assert made.tokens[0] == own[: own.index(stop) + 1]
        assert made.reasons == ["stop"]
        assert len(Speculative(engine(), engine(), k=k).generate(PROMPTS[0], 1).tokens[0]) == 1


def test_the_longest_sequence_that_fits_and_groups_in_little_room() -> None:
    prompts = [[number] * (3 + number) for number in range(6)]
    options = {"max_seq_len": 32, "cache_tokens": 64}
    want = engine(max_seq_len=32).generate(prompts, 24).tokens
    made = Speculative(engine(**options), engine(**options, seed=3), k=7).generate(prompts, 24)
    assert made.tokens == want
    tight = Speculative(engine(cache_tokens=32), engine(cache_tokens=32), k=7).generate([1] * 9, 24)
    assert tight.tokens == engine().generate([1] * 9, 24).tokens


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_what_is_sampled_is_distributed_as_the_target_samples(top_p: float) -> None:
    config = ModelConfig(1, 32, 2, 1, 16, 32, 4)
    target, draft = (engine(config, seed=seed, max_batch=500, cache_tokens=8192) for seed in (1, 2))
    count = 3000
    made = Speculative(target, draft, k=2).generate([[1, 2]] * count, 3, temperature=0.7, top_p=top_p, seed=0)
    found = torch.zeros(4, 4, 4, dtype=torch.float64)
    for tokens in made.tokens:
        found[tuple(tokens)] += 1 / count
    assert 0.2 < made.statistics.acceptance_share < 0.95  # neither always refused nor always right

    def chances(prompt: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            p = (target.runner.prefill([0], [prompt])[0].double() / 0.7).softmax(0)
        target.runner.cache.evict(0)
        ordered, order = p.sort(descending=True)
        kept = torch.zeros(4, dtype=torch.float64)
        kept[order] = torch.where(ordered.cumsum(0) - ordered < top_p, ordered, 0.0)
        return kept / kept.sum()

    want = torch.zeros(4, 4, 4, dtype=torch.float64)
    for a, b in itertools.product(range(4), repeat=2):
        want[a, b] = chances([1, 2])[a] * chances([1, 2, a])[b] * chances([1, 2, a, b])
    assert float(want.sum()) == pytest.approx(1)
    assert ((found - want).abs() <= 5 * (want * (1 - want) / count).sqrt() + 1e-12).all()


def test_judging_by_hand() -> None:
    wanted = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.2, 0.8], [0.1, 0.1, 0.8]]])
    chances = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]])
    proposals = torch.tensor([[0, 1]])

    def judged(first: float, second: float, following: float) -> tuple[int, int]:
        accepted, token = judge(wanted, chances, proposals, [[first, second]], [following])
        return int(accepted), int(token)

    assert judged(0.5, 0.0, 0.3) == (0, 1)  # p/q = 0.5 is not above 0.5; what is left is 0, 0.5, 0
    assert judged(0.49, 0.41, 0.99) == (1, 2)  # then 0.2 / 0.5; what is left is 0, 0, 0.3
    assert judged(0.49, 0.39, 0.05) == (2, 0)  # all accepted: one more, of the last row
    assert judged(0.49, 0.39, 0.15) == (2, 1)
    equal = judge(wanted[:, :2], wanted[:, :1], torch.tensor([[2]]), [[0.0]], [0.0])
    assert (int(equal.accepted), int(equal.following)) == (0, 0)  # nothing is left: the target's own


def test_what_cannot_be_paired_or_run() -> None:
    with pytest.raises(ValueError, match="k is 0: at least one token must be proposed"):
        Speculative(engine(), engine(), k=0)
    with pytest.raises(ValueError, match="the draft's vocabulary has 60 tokens, the target's 50"):
        Speculative(engine(), engine(replace(SMALL, vocabulary=60)))
    both = Speculative(engine(), engine(max_seq_len=32))
    with pytest.raises(ValueError, match="the prompt has 30 tokens and max_new_tokens is 10: together they can be at"):
        both.generate([1] * 30, 10)
    with pytest.raises(IndexError, match="prompt has the token 50"):
        both.generate([50], 10)
    stream = both.target.stream([1], 9)
    next(stream)
    with pytest.raises(ValueError, match="an engine has requests of its own"):
        both.generate([1], 9)
    with pytest.raises(ValueError, match=r"wanted has shape \[1, 1, 3\], \[1, 2, 3\] is wanted"):
        judge(torch.ones(1, 1, 3), torch.ones(1, 1, 3), torch.zeros(1, 1).long(), [[0.0]], [0.0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_the_target_that_are_not_finite_are_told(temperature: float) -> None:
    both = Speculative(engine(), engine(seed=9))
    weights = both.target.runner.decoder.weights.norm
    before = weights.clone()
    weights[3] = float("nan")
    with pytest.raises(FloatingPointError, match="logits of sequence 0 have NaN or infinity"):
        both.generate(PROMPTS, 4, temperature=temperature)
    weights.copy_(before)
    both.draft.runner.decoder.weights.norm[3] = float("nan")  # proposals are worth nothing then, and are refused
    made = both.generate(PROMPTS, 4, temperature=temperature)
    if temperature == 0:
        assert made.tokens == engine().generate(PROMPTS, 4).tokens
    for run in (both.target, both.draft):
        assert run.runner.cache.usage().sequences_count == 0


@pytest.mark.parametrize("which", ["target", "draft"])
def test_an_error_of_a_prefill_is_told_as_it_is(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Speculative(engine(), engine(seed=9))
    failing = getattr(both, which).runner.cache

    def plan(_new: object) -> None:
        raise MemoryError("no room on the device")

    monkeypatch.setattr(failing, "plan", plan)
    with pytest.raises(MemoryError, match="no room on the device"):
        both.generate(PROMPTS, 4)
    for run in (both.target, both.draft):
        assert run.runner.cache.usage().sequences_count == 0
