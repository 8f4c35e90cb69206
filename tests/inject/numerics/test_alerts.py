"""From a program that overflows to its alerts and its report: whole runs on the CPU, with a fake libcupti."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from inject.harness import SPIKEPROF, Lab
from inject.numerics.test_run import ACTIVATE
from paths import ROOT

DEMO = f"""
sys.path.insert(0, {str(ROOT / "examples")!r})
import overflow_demo
overflow_demo.main(["--device", "cpu"])
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def real(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab with torch itself."""
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lab


def test_alerts_come_while_the_program_runs_and_the_report_names_the_layer(real: Lab) -> None:
    program = real.program(ACTIVATE + DEMO)
    running = real.start(sys.executable, program, options=("--numerics",), stdin=subprocess.PIPE)
    assert running.stdin is not None
    assert running.stderr is not None
    file = real.folder / "trace" / "alerts.jsonl"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (file.exists() and b'"overflow"' in file.read_bytes()):
        time.sleep(0.1)
    assert running.poll() is None  # it waits for its input: what was told was told before its end
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["rule"], one["module"], one["step"]) for one in told] == [
        ("near-overflow", "layers.5.mlp.activation", 22),
        ("overflow", "layers.5.mlp.activation", 24),
    ]
    out, err = running.communicate(b"")
    assert running.returncode == 0
    assert out == b"24 of 32 steps finite, the first bad one 24\n"
    assert (
        b"spikeprof: alert: overflow in layers.5.mlp.activation (float16, step 24): 16 of 4,096 elements Inf or NaN\n"
        in err
    )
    assert file.stat().st_mode & 0o777 == 0o600
    asked = [SPIKEPROF, "analyze", real.folder / "trace", "--fail-on", "overflow"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "The first bad value came from layers.5.mlp.activation, step 24." in answer.stdout
