"""What sampling counters from outside costs a program: products that fill the GPU, and replays of small kernels.

    python benchmarks/counters_overhead.py [--repeats 10] [--interval-us 10] [--json FILE]

Blocks with samplers running take turns with blocks without; each stands between two without, and the ratio to their
mean is what counts. In their place as often: ``set up``, counters configured in another process and never started,
CUPTI's own floor; and ``nothing``, after the same pause: what repeats can tell apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from workload import Workload

from spikeprof.profiler.collectors.pm_sampling import PmSamplingCollector
from spikeprof.profiler.counter_metrics import SETS

_SECONDS = 0.5  # of each workload in each block
_PAUSE_SECONDS = 1.0  # about what starting the sampler takes: a GPU that has rested is faster


def block(steps: dict[str, tuple[Callable[[], object], int]]) -> dict[str, float]:
    """ms a step of each workload, so many launched before the next wait."""
    found = {}
    for name, (step, chunk) in steps.items():
        for _ in range(chunk):
            step()
        torch.cuda.synchronize()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < _SECONDS:
            for _ in range(chunk):
                step()
            torch.cuda.synchronize()
            count += chunk
        found[name] = (time.perf_counter() - began) / count * 1e3
    return found


class Sampling:
    """The product's sampler, as `spikeprof run --counters` has it."""

    def __init__(self, names: tuple[str, ...], interval_us: float) -> None:
        self._names, self._interval_ns = names, round(interval_us * 1000)
        self.samples_count, self.last = 0, ""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While it samples. Raises RuntimeError where nothing was sampled."""
        with tempfile.TemporaryDirectory() as folder:
            collector = PmSamplingCollector((0,), self._names, self._interval_ns, Path(folder), 0)
            collector.start(0)
            yield
            note, _ = collector.stop()
        if not note.records_count:
            raise RuntimeError(f"nothing was sampled: {note.reason}")
        self.samples_count += note.records_count
        self.last = note.reason


@contextmanager
def set_up(names: tuple[str, ...], interval_us: float) -> Iterator[None]:
    """Counters configured in another process, not started."""
    code = (
        "import sys\n"
        "from spikeprof.profiler.collectors.pm_library import PmSampler, load\n"
        "from spikeprof.profiler.collectors.pm_writer import packed, resolved, sources\n"
        "sampler = PmSampler(0, load())\n"
        "(metrics,) = packed(resolved(sys.argv[2:]), sampler.passes)\n"
        "sampler.configure(sources(metrics), int(sys.argv[1]), 3000)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
        "sampler.close()\n"
    )
    command = [sys.executable, "-c", code, str(round(interval_us * 1000)), *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("counters could not be set up")
        yield
        process.stdin.close()


@contextmanager
def nothing() -> Iterator[None]:
    """The same pause, and nothing else."""
    time.sleep(_PAUSE_SECONDS)
    yield


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--interval-us", type=float, default=10.0)
    parser.add_argument("--set", default="memory", choices=sorted(SETS))
    parser.add_argument("--only", default="", help="workloads, comma-separated: GEMM, graph replay, eager step")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    work = Workload()
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.half)
    steps = {"GEMM": (lambda: matrix @ matrix, 200), "graph replay": (work.replay, 40), "eager step": (work.step, 20)}
    steps = {name: step for name, step in steps.items() if name in (arguments.only or ",".join(steps)).split(",")}
    sampling = Sampling(SETS[arguments.set], arguments.interval_us)
    ways = {
        "sampled": sampling,
        "set up": lambda: set_up(SETS[arguments.set], arguments.interval_us),
        "nothing": nothing,
    }
    ratios: dict[str, dict[str, list[float]]] = {way: {name: [] for name in steps} for way in ways}
    time.sleep(_PAUSE_SECONDS)
    before = block(steps)
    for turn in range(len(ways) * arguments.repeats):
        way = list(ways)[turn % len(ways)]
        with ways[way]():
            during = block(steps)
        time.sleep(_PAUSE_SECONDS)
        after = block(steps)
        for name, found in ratios[way].items():
            found.append(during[name] / ((before[name] + after[name]) / 2))
        before = after
    print(f"{arguments.set} set every {arguments.interval_us:g} us, {sampling.samples_count} samples; {sampling.last}")
    table = {way: {name: show(way, name, found) for name, found in of.items()} for way, of in ratios.items()}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table) + "\n", encoding="utf-8")
    return 0


def show(way: str, name: str, ratios: list[float]) -> list[float]:
    """Print median and quartiles of the cost in percent; returns them."""
    ratios = sorted(ratios)
    quarter = len(ratios) // 4
    row = [round(100 * (ratio - 1), 2) for ratio in (statistics.median(ratios), ratios[quarter], ratios[-1 - quarter])]
    print(f"{way:8} {name:14} {row[0]:+.2f} % [{row[1]:+.2f}, {row[2]:+.2f}], n = {len(ratios)}")
    return row


if __name__ == "__main__":
    sys.exit(main())
