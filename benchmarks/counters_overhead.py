"""What sampling counters from outside costs a program: products that fill the GPU, and replays of small kernels.

    python benchmarks/counters_overhead.py [--repeats 10] [--interval-us 10] [--json FILE]

Blocks with samplers running take turns with blocks without; each stands between two without, and the ratio to their
mean is what counts. Nothing else is recorded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from workload import Workload

from spikeprof.profiler.collectors.pm_sampling import PmSamplingCollector
from spikeprof.profiler.counter_metrics import SETS

_SECONDS = 0.25  # of each workload in each block


def block(steps: dict[str, object]) -> dict[str, float]:
    """ms a step of each workload."""
    found = {}
    for name, step in steps.items():
        torch.cuda.synchronize()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < _SECONDS:
            for _ in range(20):
                step()
            torch.cuda.synchronize()
            count += 20
        found[name] = (time.perf_counter() - began) / count * 1e3
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--interval-us", type=float, default=10.0)
    parser.add_argument("--set", default="memory", choices=sorted(SETS))
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    work = Workload()
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.half)
    steps = {"GEMM": lambda: matrix @ matrix, "graph replay": work.replay, "eager step": work.step}
    block(steps)
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    samples_count = 0
    before = block(steps)
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            collector = PmSamplingCollector(
                (0,), SETS[arguments.set], round(arguments.interval_us * 1000), Path(folder), 0
            )
            collector.start(0)
            during = block(steps)
            note, _ = collector.stop()
        if not note.records_count:
            print(f"nothing was sampled: {note.reason}", file=sys.stderr)
            return 1
        samples_count += note.records_count
        after = block(steps)
        for name in steps:
            ratios[name].append(during[name] / ((before[name] + after[name]) / 2))
        before = after
    print(f"{arguments.set} set every {arguments.interval_us:g} us, {samples_count} samples; last: {note.reason}")
    table = {}
    for name, found in ratios.items():
        found.sort()
        quarter = len(found) // 4
        table[name] = [round(100 * (x - 1), 2) for x in (statistics.median(found), found[quarter], found[-1 - quarter])]
        print(f"{name:14} {table[name][0]:+.2f} % [{table[name][1]:+.2f}, {table[name][2]:+.2f}], n = {len(found)}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
