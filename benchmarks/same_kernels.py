"""The same program under spikeprof and under torch.profiler: equal kernel counts, equal kernel time.

    python benchmarks/same_kernels.py [--steps 200] [--mode eager|graph]

Each recorder gets runs of its own, alternating; both record exactly the stretch between cudaProfilerStart and
cudaProfilerStop (torch.profiler: the same stretch through its context).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent


def program(mode: str, steps: int, recorder: str) -> int:
    """The program under test."""
    import torch
    from workload import Workload

    work = Workload()
    step = work.step if mode == "eager" else work.replay
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    if recorder == "torch":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as session:
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
        counts: Counter[str] = Counter()
        total_ns = 0
        for event in session.profiler.kineto_results.events():
            if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith(
                ("Memcpy", "Memset")
            ):
                if "ynchronize" in event.name():
                    continue
                counts[event.name()] += 1
                total_ns += event.duration_ns()
        print(json.dumps({"counts": counts, "total_ns": total_ns}))
    else:
        torch.cuda.cudart().cudaProfilerStart()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
    return 0


def recorded(command: list[str], mode: str, steps: int, recorder: str) -> tuple[Counter[str], int]:
    """(kernels by name, total ns) of one run."""
    target = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--program",
        recorder,
        "--mode",
        mode,
        "--steps",
        str(steps),
    ]
    if recorder == "torch":
        output = subprocess.run(target, check=True, capture_output=True, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        return Counter(found["counts"]), found["total_ns"]
    from spikeprof import open_trace

    with tempfile.TemporaryDirectory() as folder:
        trace_folder = Path(folder) / "trace"
        subprocess.run(
            [*command, "run", "--no-summary", "--capture-range", "-o", str(trace_folder), "--", *target], check=True
        )
        trace = open_trace(trace_folder)
        codes, labels = trace.codes("kernels", "name")
        counts = Counter(labels[code] for code in codes.tolist())
        total = int((trace.column("kernels", "end_ns") - trace.column("kernels", "start_ns")).sum())
        return counts, total


def main() -> int:
    """Compare and print; exit 1 when counts differ or times differ by more than 1 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", choices=["spikeprof", "torch"])
    parser.add_argument("--mode", choices=["eager", "graph"], default="eager")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--spikeprof", default="spikeprof", help="the command to record with")
    arguments = parser.parse_args()
    if arguments.program:
        return program(arguments.mode, arguments.steps, arguments.program)
    ours, theirs, equal = [], [], True
    for _ in range(arguments.repeats):
        counts, total = recorded(arguments.spikeprof.split(), arguments.mode, arguments.steps, "spikeprof")
        reference, reference_total = recorded([], arguments.mode, arguments.steps, "torch")
        ours.append(total)
        theirs.append(reference_total)
        # Names are spelled differently (torch demangles with other options): how often each kernel ran must agree.
        same = sorted(counts.values()) == sorted(reference.values())
        equal = equal and same
        verdict = "equal" if same else "DIFFERENT"
        print(f"{arguments.mode}: {counts.total():,} kernels of {len(counts)} names, {reference.total():,} of")
        print(f"  {len(reference)} by torch.profiler: {verdict}", flush=True)
    off = statistics.median(ours) / statistics.median(theirs) - 1
    print(f"{arguments.mode}: kernel time {statistics.median(ours) / 1e6:.3f} ms, torch.profiler")
    print(f"  {statistics.median(theirs) / 1e6:.3f} ms: {off:+.2%}")
    return 0 if equal and abs(off) <= 0.01 else 1


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    os.environ.setdefault("PYTHONHASHSEED", "0")
    sys.exit(main())
