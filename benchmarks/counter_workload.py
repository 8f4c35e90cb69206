"""Kernels whose counters are known: streaming beyond L2, within L2, a matrix product, a gather; and small decode steps.

python benchmarks/counter_workload.py [--parts mul,small,gemm,gather,decode] [--steps 40]
"""

from __future__ import annotations

import argparse
import time

import torch

MUL_LAUNCHES, SMALL_LAUNCHES, GEMM_LAUNCHES, GATHER_LAUNCHES = 5, 300, 3, 3
DECODE_STEPS = 40
PARTS = ("mul", "small", "gemm", "gather", "decode")


def main() -> None:
    """Run the parts, 2 ms apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS[:-1]))
    parser.add_argument("--steps", type=int, default=DECODE_STEPS, help="decode steps")
    parser.add_argument("--repeat", type=int, default=1, help="how often all of it")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    torch.manual_seed(0)
    half = {"device": "cuda", "dtype": torch.half}
    big, big_out = torch.randn(1 << 28, **half), torch.empty(1 << 28, **half)
    small, small_out = torch.randn(1 << 22, **half), torch.empty(1 << 22, **half)
    matrix = torch.randn(8192, 8192, **half)
    index = torch.randint(1 << 28, (1 << 24,), device="cuda")
    step = None
    if "decode" in parts:
        from workload import Workload

        step = Workload().step
    work = {
        "mul": lambda: [torch.mul(big, 2, out=big_out) for _ in range(MUL_LAUNCHES)],
        "small": lambda: [torch.mul(small, 2, out=small_out) for _ in range(SMALL_LAUNCHES)],
        "gemm": lambda: [matrix @ matrix for _ in range(GEMM_LAUNCHES)],
        "gather": lambda: [big[index] for _ in range(GATHER_LAUNCHES)],
        "decode": lambda: [step() for _ in range(arguments.steps)],
    }
    for part in ("mul", "small", "gemm", "gather"):  # first-time costs stay out of the figures
        if part in parts and arguments.repeat > 1:
            work[part]()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for _ in range(arguments.repeat):
        for part in parts:
            time.sleep(0.002)
            work[part]()
            torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main()
