"""Run every benchmark that this machine can run: ``make bench``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run them in turn; the exit code is the worst of theirs."""
    probe = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    has_gpu = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode == 0
    scripts = [["offline.py"], ["attribution.py"]]
    if has_gpu:
        scripts += [["overhead.py"], ["same_kernels.py"], ["same_kernels.py", "--mode", "graph"]]
        scripts += [["counters_overhead.py"], ["counters_vs_ncu.py", "--parts", "mul,small,gemm,gather"]]
    else:
        print("no NVIDIA GPU that torch can use: only what needs none is measured", file=sys.stderr)
    codes = []
    for script, *options in scripts:
        print(f"\n== {script} {' '.join(options)}", flush=True)
        codes.append(subprocess.run([sys.executable, str(HERE / script), *options], check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
