"""``python -m spikeprof.kernels.bench [NAME…]``: every kernel, timed, and checked against float64."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from spikeprof.kernels.arguments import device_named, positive
from spikeprof.kernels.bench.case import NotMeasured
from spikeprof.kernels.bench.cases import cases
from spikeprof.kernels.bench.kv_precision import MOST_TOKENS, read_tokens
from spikeprof.kernels.bench.measured import Measured, try_case
from spikeprof.kernels.bench.peaks import measure_peaks
from spikeprof.kernels.bench.ratio import Setting
from spikeprof.kernels.bench.ratios import measured, ratios, ratios_json, ratios_table
from spikeprof.kernels.bench.table import cases_json, footnotes, heading, peaks_json, results_table
from spikeprof.kernels.bench.timing import RUNS


def main(arguments: list[str] | None = None) -> int:
    """Measure and print: 1 where a result is wrong or failed, 2 where an argument is wrong."""
    options = _parser().parse_args(arguments)
    try:
        device = device_named(options.device)
        small = options.quick or device.type == "cpu"
        kernels = [] if options.ratios else cases(device, small, options.names)
        claims = ratios(options.names) if options.ratios else []
        text = tuple(read_tokens(Path(options.tokens))[:MOST_TOKENS]) if options.tokens else ()
        _check_writable(options.json)
    except ValueError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels, and the events that time them, go to the current device
    console = Console(stderr=options.json == "-", highlight=False, markup=False, width=80)
    peaks = measure_peaks(device, options.quick, options.runs)
    console.print(heading(peaks, options.runs, small) + "\n")
    values = peaks_json(peaks, options.runs)
    if options.ratios:
        rows = list(measured(claims, Setting(device, small, options.runs, peaks, options.model, text)))
        console.print(ratios_table(rows))
        values["ratios"] = ratios_json(rows)
        wrong = any(failed for _, _, failed in rows)
    else:
        results = [try_case(case, device, peaks, options.runs) for case in kernels]
        console.print(results_table(results))
        console.print("\n" + "\n".join(footnotes(results)))
        values["cases"] = cases_json(results)
        wrong = any(map(_is_wrong, results))
    _write(options.json, values)
    return 1 if wrong else 0


def _is_wrong(result: Measured | NotMeasured) -> bool:
    return not result.correct if isinstance(result, Measured) else result.failed


def _check_writable(target: str | None) -> None:
    """Raise ValueError where the file cannot be written: before minutes of measuring, not after."""
    if target in (None, "-"):
        return
    try:
        with Path(str(target)).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ValueError(f"--json is {target!r}: it cannot be written: {error.strerror}") from None


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
    parser.add_argument("names", nargs="*", metavar="NAME", help="kernels, or claims, by the beginning of their name")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; -: to standard output")
    parser.add_argument("--ratios", action="store_true", help="the table of published claims instead")
    parser.add_argument(
        "--model", default="", metavar="MODEL", help="of KV precision: a preset, or a checkpoint's folder"
    )
    parser.add_argument("--tokens", metavar="FILE", help="of KV precision: the text, ids of tokens as whole numbers")
    parser.add_argument("--quick", action="store_true", help="small shapes, as on the CPU, and small peaks")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--runs", type=positive, default=RUNS, help=f"runs of each call (default: {RUNS})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
