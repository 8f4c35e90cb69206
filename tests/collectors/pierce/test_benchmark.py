from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "pierce_proxy.py"


def test_the_benchmark_of_the_proxy_runs() -> None:
    if shutil.which("redis-benchmark") is None or shutil.which("redis-server") is None:
        pytest.skip("there is no redis-benchmark on this machine (Debian: apt-get install redis)")
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--requests", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "GET, 50 clients, pipeline 1 " in done.stdout
    assert ": 4,200 look-ups seen, 0 dropped, 0 bytes not looked into" in done.stdout
