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
    if mode == "eager":
        assert origin["scope"]["step"] == 24
    evidence = {item["metric"]: item["value"] for item in origin["evidence"]}
    assert (evidence["inf_count"], evidence["nan_count"]) == (16, 0)
    assert metric(result, "scans_dropped_count") == 0
    alerts = [json.loads(line) for line in (tmp_path / "t" / "alerts.jsonl").read_text().splitlines()]
    assert [alert["module"] for alert in alerts if alert["rule"] == "overflow"] == [f"layers.{layer}.mlp.activation"]


def test_bf16_holds_it(tmp_path: Path) -> None:
    result = recorded(tmp_path / "t", "overflow_demo.py", "--dtype", "bf16")
    assert result["findings"] == []
    assert metric(result, "bad_steps_count") == 0
    assert not (tmp_path / "t" / "alerts.jsonl").exists()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_healthy_generation_in_fp16_raises_no_alarm(tmp_path: Path, mode: str) -> None:
    small = ("--preset", "tiny", "--impl", "engine", "--tokens", "40", "--mode", mode)
    result = recorded(tmp_path / "t", "infer.py", *small)
    assert [finding["rule"] for finding in result["findings"]] == []
    assert metric(result, "scans_count") > 1000
    assert metric(result, "float16_headroom_bits") > 4
