"""The bench's results as text for a terminal of 80 columns, and as values for JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from spikeprof.kernels.bench.case import FLOPS, NotMeasured
from spikeprof.kernels.bench.measured import Measured, Timed
from spikeprof.kernels.bench.peaks import Peaks

NOTHING = "–"
WIDTH = 80


def heading(peaks: Peaks, runs: int, small: bool) -> str:
    """What was measured on, its peaks, and how."""
    gpu = bool(peaks.l2_bytes)
    l2 = f", L2 {peaks.l2_bytes >> 20} MiB" if gpu else ""
    states = (
        "L2 cold: a buffer of twice its size was written and read before; warm: the same call ran before."
        if gpu
        else "Caches are warm: a CPU's are not emptied."
    )
    return (
        f"{peaks.device}{l2}\n"
        f"peaks measured here: copy {rate(peaks.copy_bytes_per_s)} ({peaks.copy_by}), {peaks.product_dtype} product "
        f"{rate(peaks.product_flops_per_s, flops=True)} ({peaks.product_by}); a launch takes {time(peaks.launch_ns)}\n"
        f"Median and p90 of {runs} runs, twins in turn. {states} Bytes are what the algorithm needs; error is "
        f"‖out − ref‖ / ‖ref‖ against float64."
        + ("\nSmall shapes: they show that all works; times are mostly overhead." if small else "")
    )


def results_table(results: Sequence[Measured | NotMeasured]) -> Table:
    """Two lines or more for each case: with L2 cold, with L2 warm."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, width=WIDTH)
    table.add_column("kernel, shape", width=25, overflow="fold")
    for name, width in (("L2", 4), ("median", 8), ("p90", 8), ("rate", 11), ("peak", 4), ("error", 8), ("×twin", 5)):
        left = name in ("L2", "error")
        table.add_column(name, width=width, no_wrap=True, justify="left" if left else "right")
    for result in results:
        for row in _rows(result) if isinstance(result, Measured) else ():
            table.add_row(*row)
    return table


def footnotes(results: Sequence[Measured | NotMeasured]) -> Iterator[str]:
    """The twins that ratios are against, errors out of bounds, what was not measured."""
    twins: dict[str, dict[str, None]] = {}
    for result in results:
        if isinstance(result, Measured) and result.case.twins:
            twins.setdefault(next(iter(result.case.twins)), {})[result.case.kernel] = None
    if twins:
        yield "×twin: how many times faster than"
        for twin, kernels in twins.items():
            yield _wrapped(f"  {twin}: {', '.join(kernels)}")
    for result in results:
        if isinstance(result, NotMeasured):
            yield _wrapped(f"{result.kernel}: {'FAILED' if result.failed else 'not measured'}: {result.reason}")
        elif not result.correct:
            wrong = f"error {error(result.error)}, {result.case.error_bound:g} is allowed"
            yield _wrapped(f"{result.case.kernel}, {result.case.shape}: WRONG: {wrong}")


def peaks_json(peaks: Peaks, runs: int) -> dict[str, Any]:
    """The device, its peaks and how many runs a median is of."""
    return {"runs": runs, "peaks": asdict(peaks)}


def cases_json(results: Sequence[Measured | NotMeasured]) -> list[dict[str, Any]]:
    """Everything that the table says, and every twin."""
    return [_case_json(result) for result in results]


def rate(per_s: float, *, flops: bool = False) -> str:
    """Bytes, or floating-point operations, per second, in three digits or so."""
    if not per_s:
        return NOTHING
    unit = "FLOP/s" if flops else "B/s"
    power = min(4 if flops else 3, max(0, int(math.log10(per_s) // 3)))
    value = per_s / 1000**power
    return f"{value:.{0 if value >= 10 else 1}f} {'  kMGT'[power + 1].strip()}{unit}"


def time(ns: float) -> str:
    """Nanoseconds in the unit that suits them."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            value = ns / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{ns:.0f} ns"


def error(value: float | None) -> str:
    """A relative error, 0 where every element is the same."""
    if value is None:
        return NOTHING
    return "exact" if value == 0 else f"{value:.1e}" if math.isfinite(value) else "not finite"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="    ")


def _rows(result: Measured) -> Iterator[tuple[str, ...]]:
    left = [result.case.kernel, result.case.shape]
    right = [error(result.error), result.path]
    for place in range(max(2, len(result.timed))):
        middle = _times(result, result.timed[place]) if place < len(result.timed) else ("",) * 6
        ends = (left[place], right[place]) if place < 2 else ("", "")
        yield (ends[0], *middle[:5], ends[1], middle[5])


def _times(result: Measured, timed: Timed) -> tuple[str, str, str, str, str, str]:
    case = result.case
    ratio = f"{timed.times_faster(next(iter(case.twins))):.2f}" if case.twins else NOTHING
    share = f"{100 * timed.peak_share:.0f}%" if timed.rate_per_s else NOTHING
    return (
        timed.l2,
        time(timed.kernel.median_ns),
        time(timed.kernel.p90_ns),
        rate(timed.rate_per_s, flops=case.bound_by == FLOPS),
        share,
        ratio,
    )


def _case_json(result: Measured | NotMeasured) -> dict[str, Any]:
    if isinstance(result, NotMeasured):
        return {"kernel": result.kernel, "not_measured": result.reason, "failed": result.failed}
    case = result.case
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "path": result.path,
        "bytes_moved": case.bytes_moved,
        "flops": case.flops,
        "bound_by": case.bound_by,
        # JSON has no infinity: a result that is not finite has no error, and is not correct.
        "error": result.error if result.error is not None and math.isfinite(result.error) else None,
        "error_bound": case.error_bound,
        "correct": result.correct,
        "timed": [
            {
                "l2": timed.l2,
                "median_ns": timed.kernel.median_ns,
                "p90_ns": timed.kernel.p90_ns,
                "rate_per_s": timed.rate_per_s,
                "peak_share": timed.peak_share,
                "twins": {
                    name: {
                        "median_ns": times.median_ns,
                        "p90_ns": times.p90_ns,
                        "times_faster": timed.times_faster(name),
                    }
                    for name, times in timed.twins.items()
                },
            }
            for timed in result.timed
        ],
    }
