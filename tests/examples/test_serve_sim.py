from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `kernels`)")

SMALL = ["--requests", "8", "--rate", "200", "--prompt", "2-20", "--output", "2-8", "--device", "cpu"]


@pytest.fixture(scope="module")
def module(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("serve_sim")


def test_figures_of_a_run(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert module.main([*SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["device"], found["preemptions"]) == (8, "cpu", 0)
    assert 16 <= found["output_tokens"] <= 64
    assert found["tokens_per_s"] == pytest.approx(found["output_tokens"] / found["duration_s"])
    assert 0 < found["ttft_p50_ms"] <= found["ttft_p99_ms"]
    assert 0 < found["itl_p50_ms"] <= found["itl_p99_ms"]
    assert 0 < found["cache_utilisation_mean"] <= found["cache_utilisation_max"] <= 1
    assert found["paths"]["decode_attention"] == ["torch"]


def test_the_summary(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kv-cache", "int8", "--weights", "int8", "--cache-tokens", "64", "--max-delay-ms", "5"]
    assert module.main([*SMALL, *options, "--temperature", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 requests at 200/s on cpu: ")
    assert [line[:18].strip() for line in lines[1:]] == [
        "output", "TTFT P50 / P99", "ITL P50 / P99", "cache mean / max",
    ]  # fmt: skip


def test_the_same_seed_gives_the_same_requests(module: ModuleType) -> None:
    def made(seed: int) -> list[tuple[float, list[int], int]]:
        options = module.argparse.Namespace(seed=seed, requests=200, rate=50.0, prompt=(2, 20), output=(3, 3))
        return [(arrival.at_s, arrival.prompt, arrival.most) for arrival in module.arrivals(options, 100)]

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert {len(prompt) for _, prompt, _ in made(1)} == set(range(2, 21))
    assert {most for *_, most in made(1)} == {3}
    assert made(1)[-1][0] == pytest.approx(200 / 50, rel=0.3)


def test_percentiles_by_nearest_rank(module: ModuleType) -> None:
    values = [float(number) for number in range(1, 101)]
    assert (module.percentile(values, 0.5), module.percentile(values, 0.99)) == (50, 99)
    assert module.percentile([7.0], 0.99) == 7


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--requests", "0"], "--requests must be at least 1"),
        (["--rate", "0"], "--rate must be above 0"),
        (["--rate", "nan"], "--rate must be above 0"),
        (["--prompt", "9-3"], "argument --prompt: '9-3': it must be LOW-HIGH, with 1 <= LOW <= HIGH, or one"),
        (["--cache-tokens", "16"], "together they can be at most 17"),
        (["--cuda-graph"], "cuda_graph is True, but the device is cpu: CUDA graphs need a GPU"),
        (["--prompt", "x"], "argument --prompt: 'x': it must be LOW-HIGH"),
        (["--max-batch", "0"], "max_batch is 0"),
        (["--max-delay-ms", "inf"], "max_delay_s is inf: it must be 0 or more, and finite"),
        (["--top-p", "2"], "top_p is 2.0: it must be above 0, and at most 1"),
        (["--temperature", "-1"], "temperature is -1.0: it must be 0 or more"),
    ],
)
def test_values_that_cannot_work(
    module: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        module.main([*SMALL, "--prompt", "20", *arguments])
    assert raised.value.code == 2
    assert problem in capsys.readouterr().err
