"""``python -m spikeprof.kernels.known_bad [NAME…] [--good]``: list the workloads, or run some of them."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time

import torch
from rich.console import Console

from spikeprof.kernels.arguments import device_named, positive
from spikeprof.kernels.known_bad import WORKLOADS, Workload, workload

WIDTH = 80


def main(arguments: list[str] | None = None) -> int:
    """List or run; 2 where a name or a device is wrong."""
    options = _parser().parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not options.names:
        _list(console)
        return 0
    try:
        jobs = [workload(name) for name in options.names]
        device = device_named(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        small = options.small or device.type == "cpu"
        for job in jobs:
            seconds, result = run(job, options.good, device, small, options.times)
            finite = int(torch.isfinite(result).sum()) if result.is_floating_point() else result.numel()
            console.print(
                f"{job.name} {'good' if options.good else 'bad'}: {options.times} x on {device}, "
                f"{1e3 * seconds / options.times:.3f} ms each, {finite} of {result.numel()} results finite"
            )
    except ValueError as error:
        sys.stderr.write(f"known_bad: {error}\n")
        return 2
    return 0


def run(job: Workload, good: bool, device: torch.device, small: bool, times: int) -> tuple[float, torch.Tensor]:
    """Seconds that ``times`` runs took, after one that warms up and does not count, and the last result."""
    inputs = job.make(device, small)
    call = job.good if good else job.bad
    result = call(inputs)
    _finish(device)
    began = time.perf_counter()
    for _ in range(times):
        result = call(inputs)
    _finish(device)
    return time.perf_counter() - began, result


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _list(console: Console) -> None:
    for job in WORKLOADS.values():
        console.print(job.name, style="bold")
        for text in (job.defect, f"A profiler shows: {job.shows}"):
            console.print(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    "))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spikeprof.kernels.known_bad",
        description="List workloads that have one defect each, or run some of them, or their twins that have none.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads to run; none: list them")
    parser.add_argument("--good", action="store_true", help="run the twin that does the job right")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:N or cpu (default: auto)")
    parser.add_argument("--small", action="store_true", help="small shapes; on the CPU always")
    parser.add_argument("--times", type=positive, default=5, help="how often to run after one warm-up (default: 5)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
