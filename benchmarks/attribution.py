"""How long it takes to attribute samples of counters to kernels, and how much memory: needs no GPU.

``python benchmarks/attribution.py --samples 1000000 --kernels 1000000`` makes launches as LLM decoding has them
(steps of 16 layers of 24 launches of 30 kinds, 0.8 to 20 µs) and samples of 13 metrics over the time that they take,
and attributes them in a child process that maps the samples from a file, as ``spikeprof run`` does. It prints the
medians over the repeats: seconds on the clock and of CPU, memory that it took beyond what it began with.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

#: What must hold for a million samples of 13 metrics and a million kernels, on two cores.
SECONDS_MAX, PEAK_BYTES_MAX = 10.0, 1_500_000_000

METRICS = (
    "l2_sectors_count",
    "l2_hit_sectors_count",
    "dram_read_bytes",
    "dram_written_bytes",
    "l1_sectors_count",
    "l1_hit_sectors_count",
    "pcie_read_bytes",
    "pcie_written_bytes",
    "nvlink_sent_bytes",
    "nvlink_received_bytes",
    "sm_active_share",
    "tensor_active_share",
    "instructions_count",
)
KINDS, LAYERS, LAYER_LAUNCHES = 30, 16, 24


def write_inputs(folder: Path, samples: int, kernels: int, seed: int = 1) -> None:
    """Launches back to back or with even gaps between, as many samples over their time, counts that spread evenly."""
    random = np.random.default_rng(seed)
    duration_of = 832 + 32 * (random.gamma(1.2, 1400, KINDS) / 32).astype(np.int64)
    layer = random.integers(0, KINDS - 1, LAYER_LAUNCHES)
    kind = np.resize(np.append(np.tile(layer, LAYERS), KINDS - 1), kernels)
    duration = duration_of[kind] + 32 * random.integers(-1, 2, kernels)
    begin = 1_000_000 + np.append(0, np.cumsum(duration + random.integers(300, 600, kernels))[:-1])
    edges = np.linspace(0, begin[-1] + 2_000_000, samples + 1).astype(np.int64)
    values = np.zeros((samples, len(METRICS)))
    first = np.searchsorted(edges, begin, side="right") - 1
    cut = np.clip((edges[first + 1] - begin) / duration, 0, 1)
    for m, metric in enumerate(METRICS):
        counts = random.lognormal(8, 1.2, KINDS)[kind]
        values[:, m] = np.bincount(first, counts * cut, minlength=samples)
        values[:, m] += np.bincount(np.minimum(first + 1, samples - 1), counts * (1 - cut), minlength=samples)
        if metric.endswith("_share"):
            values[:, m] /= values[:, m].max()
    np.save(folder / "kernels.npy", np.stack((begin, begin + duration, kind)))
    np.save(folder / "times.npy", np.stack((edges[:-1], edges[1:]), axis=1))
    np.save(folder / "values.npy", values)


def run(folder: Path) -> dict[str, float]:
    """Attribute what is in the folder, in this process."""
    from spikeprof.profiler.assemble.counter_overlap import Samples
    from spikeprof.profiler.assemble.counter_pieces import Work
    from spikeprof.profiler.assemble.counters import attribute

    times, values = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("times", "values"))
    begin, end, kind = np.load(folder / "kernels.npy")
    none = np.zeros(0, np.int64)
    samples = Samples(times[:, 0], times[:, 1], values, METRICS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    wall, cpu = time.perf_counter(), time.process_time()
    work = Work(begin, end, kind, none, none, none, none, none, np.zeros(len(kind), bool))
    found = attribute(samples, work, KINDS)
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "lost_share": float(abs(found.balance[:, 0].sum() / values[:, 0].sum() - 1)),
    }


def main() -> int:
    """Measure and print; exit code 1 when a limit does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.child)))
        return 0
    with tempfile.TemporaryDirectory(prefix="spikeprof-bench-") as folder:
        write_inputs(Path(folder), options.samples, options.kernels)
        child = [sys.executable, __file__, "--child", folder]
        runs = [
            json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE).stdout) for _ in range(options.repeats)
        ]
    result = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
    scale = max(options.samples, options.kernels) / 1e6
    missed = [
        f"{name}: {value:,.1f}, limit {limit:,.1f}"
        for name, value, limit in (
            ("seconds", result["wall_s"], SECONDS_MAX * max(scale, 0.5)),
            ("bytes", result["peak_bytes"], PEAK_BYTES_MAX * max(scale, 1.0)),
            ("share of counts lost", result["lost_share"], 1e-9),
        )
        if value > limit
    ]
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"{options.samples:,} samples of {len(METRICS)} metrics, {options.kernels:,} kernels, ", end="")
        print(f"median of {options.repeats}")
        print(f"  {result['wall_s']:.1f} s on the clock, {result['cpu_s']:.1f} s of CPU", end="")
        print(f", {result['peak_bytes'] / 1e6:.0f} MB")
    for line in missed:
        print(f"limit missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
