"""``python -m spikeprof.kernels.bench [NAME…]``: every kernel, timed, and checked against float64."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from spikeprof.kernels.bench.case import NotMeasured
from spikeprof.kernels.bench.cases import cases
from spikeprof.kernels.bench.measured import Measured, try_case
from spikeprof.kernels.bench.peaks import measure_peaks
from spikeprof.kernels.bench.table import as_json, footnotes, heading, results_table
from spikeprof.kernels.bench.timing import RUNS
from spikeprof.kernels.probes.device import device_named


def main(arguments: list[str] | None = None) -> int:
    """Measure and print: 1 where a result is wrong, 2 where an argument is."""
    options = _parser().parse_args(arguments)
    to_stdout = options.json == "-"
    console = Console(stderr=to_stdout, highlight=False, markup=False, width=80)
    try:
        device = device_named(options.device)
        small = options.quick or device.type == "cpu"
        chosen = cases(device, small, options.names)
    except ValueError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    peaks = measure_peaks(device, options.quick, options.runs)
    console.print(heading(peaks, options.runs) + "\n")
    results = [try_case(case, device, peaks, options.runs) for case in chosen]
    console.print(results_table(results))
    for line in footnotes(results):
        console.print("\n" + line)
    _write(options.json, as_json(peaks, options.runs, results))
    return 1 if any(map(_is_wrong, results)) else 0


def _is_wrong(result: Measured | NotMeasured) -> bool:
    return not result.correct if isinstance(result, Measured) else result.failed


def _write(target: str | None, values: dict[str, Any]) -> None:
    if target is None:
        return
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spikeprof.kernels.bench",
        description="Time every kernel against the peaks of this device and its twin; check it against float64.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="kernels, by the beginning of their name")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; -: to standard output")
    parser.add_argument("--ratios", action="store_true", help="the table of published claims instead")
    parser.add_argument("--quick", action="store_true", help="small shapes, as on the CPU, and small peaks")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--runs", type=_positive, default=RUNS, help=f"runs of each call (default: {RUNS})")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: it must be 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
