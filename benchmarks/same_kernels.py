"""The same steps under spikeprof and under torch.profiler: equal kernel counts, equal kernel time.

    python benchmarks/same_kernels.py [--mode eager|graph] [--blocks 6] [--steps 60] [--spikeprof COMMAND]

One process, recorded by ``spikeprof run``; blocks of steps take turns between us and a torch.profiler session of the
program's own, to which we yield. The machine's drift meets both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np


def program(mode: str, blocks: int, steps: int) -> None:
    """The program under test: prints what each block was, and what torch.profiler saw in its own."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from workload import Workload

    work = Workload()
    step = work.step if mode == "eager" else work.replay

    def run() -> None:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()

    run()
    told = []
    for _ in range(blocks):
        time.sleep(0.01)  # nothing of one block may touch the next one's times
        began = time.time_ns()
        run()
        told.append({"recorder": "spikeprof", "start_ns": began, "end_ns": time.time_ns()})
        with profile(activities=[ProfilerActivity.CUDA]) as session:
            run()
        kernels = [
            event
            for event in session.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA
            and not event.name().startswith(("Memcpy", "Memset"))
            and "ynchronize" not in event.name()
        ]
        total = sum(event.duration_ns() for event in kernels)
        told.append({"recorder": "torch.profiler", "count": len(kernels), "total_ns": total})
    print(json.dumps(told))


def compare(told: list[dict[str, Any]], folder: Path) -> tuple[list[int], list[int], list[int], list[int]]:
    """(our counts, our total ns, their counts, their total ns), a number for each block."""
    from spikeprof import open_trace

    trace = open_trace(folder)
    t0 = trace.manifest.t0_unix_ns
    start, end = trace.column("kernels", "start_ns"), trace.column("kernels", "end_ns")
    counts, totals = [], []
    for block in told:
        if block["recorder"] == "spikeprof":
            inside = (start >= block["start_ns"] - t0) & (start < block["end_ns"] - t0)
            counts.append(int(np.count_nonzero(inside)))
            totals.append(int((end - start)[inside].sum()))
    theirs = [block for block in told if block["recorder"] == "torch.profiler"]
    return counts, totals, [b["count"] for b in theirs], [b["total_ns"] for b in theirs]


def main() -> int:
    """Compare and print; exit 1 when counts differ or the median times differ by more than 1 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=["eager", "graph"], default="eager")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--spikeprof", default=f"{sys.executable} -m spikeprof", help="the command to record with")
    arguments = parser.parse_args()
    if arguments.program:
        program(arguments.mode, arguments.blocks, arguments.steps)
        return 0
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "trace"
        recorder = [*arguments.spikeprof.split(), "run", "--no-summary", "-o", str(folder), "--"]
        target = [sys.executable, str(Path(__file__).resolve()), "--program", "--mode", arguments.mode]
        sizes = ["--blocks", str(arguments.blocks), "--steps", str(arguments.steps)]
        output = subprocess.run([*recorder, *target, *sizes], check=True, stdout=subprocess.PIPE, text=True).stdout
        ours, our_ns, theirs, their_ns = compare(json.loads(output.splitlines()[-1]), folder)
    equal = ours == theirs
    off = statistics.median(our_ns) / statistics.median(their_ns) - 1
    print(f"{arguments.mode}: kernels a block {sorted(set(ours))}, torch.profiler {sorted(set(theirs))}: ", end="")
    print("equal" if equal else "DIFFERENT")
    print(
        f"{arguments.mode}: kernel time a block, median of {len(ours)}: {statistics.median(our_ns) / 1e6:.3f} ms,",
        end="",
    )
    print(f" torch.profiler {statistics.median(their_ns) / 1e6:.3f} ms: {off:+.2%}")
    return 0 if equal and abs(off) <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
