from __future__ import annotations

import importlib.util
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import ROOT

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `kernels`)")

SCRIPT = ROOT / "examples" / "infer.py"
SMALL = ("--preset", "tiny", "--layers", "2", "--hidden", "256", "--prompt", "5", "--tokens", "4", "--impl", "engine")


def infer(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


Here = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs a script in this process, which has torch already: importing it takes longer than all else."""

    def run(*arguments: str, script: Path = SCRIPT, first: tuple[str, ...] = SMALL) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", [str(script), *first, *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
        code = end.value.code
        assert code is None or isinstance(code, int)
        return subprocess.CompletedProcess(sys.argv, code or 0, *capsys.readouterr())

    return run


def test_two_lines_and_nothing_else_the_same_tokens_every_time(here: Here) -> None:
    first = infer("--device", "cpu", "--batch", "2", "--repeat", "2", "--json")
    again = here("--device", "cpu", "--batch", "2")
    assert (first.returncode, first.stderr) == (0, "")
    checksum, line = first.stdout.splitlines()
    figures = json.loads(line)
    assert (figures["batch"], figures["tokens"], figures["mode"], figures["device"]) == (2, 4, "eager", "cpu")
    assert figures["ttft_ms"] > 0
    assert figures["itl_median_ms"] > 0
    assert again.stdout.splitlines()[0] == checksum
    assert "tokens/s, TTFT" in again.stdout.splitlines()[1]


def test_one_token_has_no_itl(here: Here) -> None:
    figures = json.loads(here("--device", "cpu", "--tokens", "1", "--json").stdout.splitlines()[1])
    assert figures["itl_median_ms"] is None
    assert figures["tokens_per_s"] > 0


def test_separate_operators_make_the_same_tokens(here: Here) -> None:
    fused, separate = (here("--device", "cpu", *more, "--json").stdout.splitlines() for more in ((), ("--separate",)))
    assert fused[0] == separate[0]
    assert json.loads(fused[1])["paths"]["prefill_attention"] == ["torch"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--mode", "graph", "--device", "cpu"), "--mode graph needs a CUDA device"),
        (("--hidden", "100"), "--hidden must be a multiple of 256"),
        (("--batch", "0"), "--batch must be at least 1"),
        (("--device", "foo"), "device is 'foo': it can be auto, cpu, cuda or cuda:N"),
        (("--weights", "half"), "argument --weights: invalid choice: 'half'"),
        (("--impl", "transformers", "--kv-cache", "int8", "--device", "cpu"), "work with --impl engine only"),
    ],
)
def test_values_that_cannot_work_are_refused(here: Here, arguments: tuple[str, ...], problem: str) -> None:
    run = here(*arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert problem in run.stderr


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="transformers is installed")
def test_transformers_that_is_missing_is_told() -> None:
    run = infer("--device", "cpu", "--impl", "transformers")
    assert (run.returncode, run.stdout) == (2, "")
    assert "--impl transformers: transformers is not installed; --impl engine needs nothing else" in run.stderr


@pytest.mark.parametrize("name", ["infer.py", "serve_sim.py"])
def test_help_fits_a_terminal_of_80_columns(here: Here, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = here("--help", script=SCRIPT.with_name(name), first=())
    assert (run.returncode, run.stderr) == (0, "")
    assert max(map(len, run.stdout.splitlines())) <= 80


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graph_and_eager_generate_the_same_tokens() -> None:
    lines = {mode: infer("--mode", mode, "--weights", "fp32").stdout.splitlines() for mode in ("eager", "graph")}
    assert lines["eager"][0].startswith("checksum ")
    assert lines["eager"][0] == lines["graph"][0]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_model_of_transformers() -> None:
    run = infer("--device", "cpu", "--impl", "transformers", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[1])["impl"] == "transformers"
