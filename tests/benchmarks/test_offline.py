from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import ROOT


@pytest.mark.parametrize("processes", [1, 2])
def test_the_benchmark_of_offline_work_runs_and_its_limits_hold(processes: int) -> None:
    """On a twentieth of its size: from a synthetic spool to the page, in a process of its own."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "offline.py"),
        "--kernels",
        "50000",
        "--repeats",
        "1",
        "--json",
    ]
    done = subprocess.run([*command, "--processes", str(processes)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"eager", "graph"}
    for result in found.values():
        # Whole steps of 385 kernels for each process.
        assert result["kernels_count"] == 50_000 // processes // 385 * 385 * processes
        assert result["errors"] == []
        assert set(result["stages"]) == {"assemble", "analyze", "terminal", "html"}
        assert 0 < result["trace_bytes_per_kernel"] < 24
    assert found["graph"]["bytes_per_kernel"]["runtime_calls"] < found["eager"]["bytes_per_kernel"]["runtime_calls"] / 5
