from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType

import pytest
from paths import ROOT

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `kernels`)")

SCRIPT = ROOT / "examples" / "infer.py"
SMALL = ("--layers", "2", "--hidden", "256", "--prompt", "5", "--tokens", "4", "--impl", "torch")


def infer(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("infer_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_two_lines_and_nothing_else_the_same_tokens_every_time() -> None:
    first = infer("--device", "cpu", "--batch", "2", "--repeat", "2", "--json")
    again = infer("--device", "cpu", "--batch", "2")
    assert (first.returncode, first.stderr) == (0, "")
    checksum, line = first.stdout.splitlines()
    figures = json.loads(line)
    assert (figures["batch"], figures["tokens"], figures["mode"], figures["device"]) == (2, 4, "eager", "cpu")
    assert figures["ttft_ms"] > 0
    assert figures["itl_median_ms"] > 0
    assert again.stdout.splitlines()[0] == checksum
    assert "tokens/s, TTFT" in again.stdout.splitlines()[1]


def test_without_streaming_no_itl_is_claimed() -> None:
    figures = json.loads(infer("--device", "cpu", "--no-stream", "--json").stdout.splitlines()[1])
    assert figures["ttft_ms"] is None
    assert figures["itl_median_ms"] is None
    assert figures["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--mode", "graph", "--device", "cpu"), "--mode graph needs a CUDA device"),
        (("--hidden", "100"), "--hidden must be a multiple of 256"),
        (("--batch", "0"), "--batch must be at least 1"),
    ],
)
def test_values_that_cannot_work_are_refused(arguments: tuple[str, ...], problem: str) -> None:
    run = infer(*arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert problem in run.stderr


@torch.inference_mode()
@pytest.mark.parametrize("masked", [False, True], ids=["sliced cache", "masked static cache"])
def test_decoding_by_the_cache_gives_the_logits_of_a_whole_prefill(module: ModuleType, masked: bool) -> None:
    torch.manual_seed(1)
    model = module.Decoder(layers=2, hidden=256, batch=2, length=9).double().eval()
    ids = torch.randint(module.VOCABULARY, (2, 7))
    whole = model(ids, torch.arange(7), 7)
    model.cache.zero_()
    model(ids[:, :4], torch.arange(4), 4)
    for position in range(4, 7):
        last = model(ids[:, position : position + 1], torch.tensor([position]), None if masked else position + 1)
    torch.testing.assert_close(last, whole, rtol=1e-9, atol=1e-9)


@torch.inference_mode()
def test_rotary_keeps_lengths_and_depends_on_distance_only(module: ModuleType) -> None:
    torch.manual_seed(2)
    model = module.Decoder(layers=1, hidden=256, batch=1, length=16).double()
    q, k = torch.randn(2, 1, 1, 1, module.HEAD_DIM).double()

    def score(i: int, j: int) -> float:
        at = model.rotary
        return float((module.rotate(q, at[:, [i]]) * module.rotate(k, at[:, [j]])).sum())

    assert score(0, 0) == pytest.approx(float((q * k).sum()))
    assert score(9, 4) == pytest.approx(score(14, 9), rel=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graph_and_eager_generate_the_same_tokens() -> None:
    lines = {mode: infer("--mode", mode, "--dtype", "float32").stdout.splitlines() for mode in ("eager", "graph")}
    assert lines["eager"][0].startswith("checksum ")
    assert lines["eager"][0] == lines["graph"][0]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_model_of_transformers() -> None:
    run = infer("--device", "cpu", "--impl", "transformers", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[1])["impl"] == "transformers"
