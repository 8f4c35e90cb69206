"""Numerics on a real GPU: the demo that overflows in one layer, its sound twin, and healthy generation in FP16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

EXAMPLES = ROOT / "examples"


def recorded(folder: Path, program: str, *arguments: str) -> dict[str, Any]:
    """What the analyzer says of an example that ran under ``--numerics``."""
    run = [
        sys.executable,
        "-m",
        "spikeprof",
        "run",
        "--numerics",
        "--no-summary",
        "-o",
        str(folder),
        "--",
        sys.executable,
    ]
    done = subprocess.run([*run, str(EXAMPLES / program), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    asked = [sys.executable, "-m", "spikeprof", "analyze", str(folder), "--json"]
    report = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    return next(result for result in report["results"] if result["analyzer"] == "overflow")


def metric(result: dict[str, Any], name: str) -> float:
    return float(next(one["value"] for one in result["metrics"] if one["name"] == name))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("layer", [0, 5])
def test_the_layer_that_overflows_is_named(tmp_path: Path, mode: str, layer: int) -> None:
    result = recorded(tmp_path / "t", "overflow_demo.py", "--mode", mode, "--layer", str(layer))
    (origin,) = [finding for finding in result["findings"] if finding["rule"] == "nan-origin"]
    assert origin["scope"]["module"] == f"layers.{layer}.mlp.activation"
    assert origin["scope"]["step"] == 24 + (mode == "graph")  # the step that warms up for the capture is one, too
    evidence = {item["metric"]: item["value"] for item in origin["evidence"]}
    assert (evidence["inf_count"], evidence["nan_count"]) == (16, 0)
    assert metric(result, "scans_dropped_count") == 0
    alerts = [json.loads(line) for line in (tmp_path / "t" / "alerts.jsonl").read_text().splitlines()]
    assert [alert["module"] for alert in alerts if alert["rule"] == "overflow"] == [f"layers.{layer}.mlp.activation"]


def test_bf16_holds_it(tmp_path: Path) -> None:
    result = recorded(tmp_path / "t", "overflow_demo.py", "--dtype", "bf16")
    # BF16 holds it so far: what grows by a quarter with each step, squared, will pass 3·10³⁸ all the same.
    assert [finding["rule"] for finding in result["findings"]] == ["overflow-trend"]
    assert metric(result, "bad_steps_count") == 0
    assert not (tmp_path / "t" / "alerts.jsonl").exists()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_healthy_generation_in_fp16_raises_no_alarm(tmp_path: Path, mode: str) -> None:
    small = ("--preset", "tiny", "--impl", "engine", "--tokens", "40", "--mode", mode)
    result = recorded(tmp_path / "t", "infer.py", *small)
    assert [finding["rule"] for finding in result["findings"]] == []
    assert metric(result, "scans_count") > 1000
    assert metric(result, "float16_headroom_bits") > 4


#: A model whose middle block overflows in FP16 for every fifth input; each input is new.
RECURRING = """
import sys, time, torch
from torch import nn

class Block(nn.Module):
    def forward(self, x, scale):
        y = x * scale
        return y * y

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.block, self.norm = nn.Linear(64, 64), Block(), nn.LayerNorm(64)

    def forward(self, x, scale):
        return self.norm(self.block(self.up(x), scale=scale))

def main(graph):
    model = Model().cuda().half()
    x, scale = torch.randn(8, 64, device="cuda").half(), torch.ones((), device="cuda").half()
    step = lambda: model(x, scale)
    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                step()
            step = captured.replay
        for number in range(100):
            scale.fill_(3000.0 if number % 5 == 4 else 1.0)
            step()
            torch.cuda.synchronize()
            time.sleep(0.02)
    print("sum", float(scale))

main(sys.argv[1] == "graph")
"""


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_first_bad_operator_is_named(tmp_path: Path, mode: str) -> None:
    program = tmp_path / "recurring.py"
    program.write_text(RECURRING)
    result = recorded(tmp_path / "t", str(program), mode)
    (origin,) = [finding for finding in result["findings"] if finding["rule"] == "nan-origin"]
    assert origin["scope"]["module"] == "block"
    assert origin["scope"]["operator"] == "aten::mul.Tensor", result["tables"]["operator"]
    assert origin["scope"]["line"] == "recurring.py:8"  # the square, not the product before it
    table = result["tables"]["operator"]
    assert set(table["kept"]) == {"first" if mode == "graph" else "later"}
    assert 255.9 < table["amax_value"][0] <= 65504
    assert metric(result, "scans_dropped_count") == 0


def test_the_operator_of_the_demo_in_a_graph(tmp_path: Path) -> None:
    result = recorded(tmp_path / "t", "overflow_demo.py", "--mode", "graph", "--steps", "6000")
    (origin,) = [finding for finding in result["findings"] if finding["rule"] == "nan-origin"]
    assert origin["scope"]["operator"] == "aten::pow.Tensor_Scalar", result["tables"]["operator"]
    assert str(origin["scope"]["line"]).startswith("overflow_demo.py:")
    # 256 * 1.25^0.5 = 286.2
    assert result["tables"]["operator"]["amax_value"][0] == pytest.approx(286.2, abs=1)
