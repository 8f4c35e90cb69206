from __future__ import annotations

import json
import subprocess
import sys

from paths import ROOT


def test_the_benchmark_of_attribution_runs_and_its_limits_hold() -> None:
    """On a twentieth of its size."""
    command = [sys.executable, str(ROOT / "benchmarks" / "attribution.py"), "--repeats", "1", "--json"]
    sizes = ["--samples", "50000", "--kernels", "50000"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"wall_s", "cpu_s", "peak_bytes", "lost_share"}
    assert found["lost_share"] < 1e-12
