from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT
from scanned import asked, evidence, found

import spikeprof
from spikeprof.analyzers.base import Result

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `kernels`)")

SCRIPT = ROOT / "examples" / "overflow_demo.py"


@pytest.fixture(scope="module")
def demo(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("overflow_demo")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "24 of 32 steps finite, the first bad one 24\n"),
        (
            ("--step", "3", "--layer", "0", "--layers", "2", "--steps", "5"),
            "3 of 5 steps finite, the first bad one 3\n",
        ),
        (("--dtype", "bf16"), "32 of 32 steps finite\n"),
    ],
)
def test_it_overflows_at_the_step_that_was_asked_for(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    assert demo.main(["--device", "cpu", *arguments]) == 0
    assert capsys.readouterr().out == line


def watched(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """What the analyzer says of the demo, watched by ``spikeprof.watch``."""
    watches = []

    class Watched(demo.Model):  # type: ignore[misc,name-defined]
        def __init__(self, layers: int, bad_layer: int) -> None:
            super().__init__(layers, bad_layer)
            watches.append(spikeprof.watch(self))

    monkeypatch.setattr(demo, "Model", Watched)
    demo.main(["--device", "cpu", "--layer", "3", "--step", "20", *arguments])
    with watches[0]:
        return asked(*watches[0].stats())


def test_the_analyzer_names_the_layer_and_the_step(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    result = watched(demo, monkeypatch)
    (origin,) = found(result, "nan-origin")
    assert origin.scope == {"module": "layers.3.mlp.activation", "dtype": "float16", "step": 20}
    assert evidence(origin)["inf_count"] == 16  # one element of each token
    near = found(result, "near-overflow")[0]
    # 65536 / 1.25^(2 * 1.5) = 33554 is within a doubling of 65504; two factors of 1.25 before it is not.
    assert (near.scope["module"], near.scope["step"]) == ("layers.3.mlp.activation", 18)


def test_the_analyzer_tells_beforehand_when_it_will_be(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    trend = found(watched(demo, monkeypatch, "--steps", "18"), "overflow-trend")[0]
    assert trend.scope["module"] == "layers.3.mlp.activation"
    # Step 17 is the last: two more are as good as at the limit, 65536 / 1.25 = 52429 and 65536 * 1.25 lie around it.
    assert evidence(trend)["steps_to_overflow_count"] == 2
    assert evidence(trend)["steps_per_doubling_count"] == pytest.approx(1 / (2 * math.log2(1.25)), rel=0.02)


def test_recorded_without_a_gpu_the_report_names_the_layer(tmp_path: Path) -> None:
    words = ["run", "--numerics", "-o", tmp_path / "trace", "--", sys.executable, SCRIPT, "--device", "cpu"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    run = subprocess.run(
        [sys.executable, "-m", "spikeprof", *words], capture_output=True, text=True, env=environment, check=False
    )
    assert (run.returncode, run.stdout) == (0, "24 of 32 steps finite, the first bad one 24\n")
    said = " ".join(run.stderr.split())
    assert "alert: overflow in layers.5.mlp.activation (float16, step 24): 16 of 4,096 elements Inf or NaN" in said
    assert "This module was the first to give Inf or NaN (module layers.5.mlp.activation" in said
    assert "GPU work not measured: no process used CUDA" in said
    assert "the table 'kernels' was not collected" not in said, "it was asked for, and there was nothing to collect"
    assert "no GPU work (no process used CUDA)" in said


def test_alerts_come_for_a_model_that_the_program_watches_of_its_own_accord(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import spikeprof, torch\n"
        "model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Softplus())\n"
        "spikeprof.watch(model)\n"
        "with torch.no_grad(): print(model(torch.tensor([float('inf')])))\n"
    )
    words = ["run", "--no-summary", "-o", tmp_path / "trace", "--", sys.executable, program]
    run = subprocess.run([sys.executable, "-m", "spikeprof", *words], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "tensor([inf])\n")
    assert "alert: overflow in 1 (float32, step 0): 1 of 1 element Inf or NaN" in run.stderr
    assert (tmp_path / "trace" / "alerts.jsonl").exists()


def test_wrong_values_are_refused(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        demo.main(["--layer", "8"])
    assert end.value.code == 2
    assert "--layer must be from 0 to 7" in capsys.readouterr().err
