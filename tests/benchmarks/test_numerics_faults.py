from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import ROOT

pytest.importorskip("torch", reason="torch is not installed (the extra `kernels`)")


def test_what_is_said_of_ten_faults() -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "numerics_faults.py"),
        "--device",
        "cpu",
        "--no-cost",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = {fault: said["spikeprof"] for fault, said in report["found"].items()}
    assert len(found) == 10
    assert found.pop("NaN in a gradient, none in forward") == "seen"  # of the module before it
    assert set(found.values()) == {"found"}
    assert report["sound_model"]["spikeprof"] == []
    assert report["cost_ratio"] == {}
