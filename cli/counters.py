"""``spikeprof counters``: hardware counters of whatever runs on the GPUs now; no program is started or touched."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spikeprof.profiler.counter_metrics import DEFAULT_SET
from spikeprof.profiler.errors import NoGpu, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_BAR_FROM_SECONDS = 2


def counters(
    device: Annotated[
        list[int] | None,
        typer.Option("--device", metavar="N", help="GPU, as nvidia-smi numbers it; again for more [all].", min=0),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long; Ctrl-C ends it earlier.")] = 5.0,
    metrics: Annotated[
        str, typer.Option("--counters", metavar="SET", help="Sets or metrics, as for `spikeprof run`.")
    ] = DEFAULT_SET,
    interval_us: Annotated[
        float, typer.Option("--counters-interval-us", metavar="US", help="Microseconds between samples.")
    ] = 10.0,
    max_samples: Annotated[
        int,
        typer.Option(
            "--counters-samples", metavar="N", help="Stop sampling a GPU after N samples; 0 = no limit.", min=0
        ),
    ] = 10_000_000,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Trace folder to keep the samples in.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the readings as JSON.")] = False,
) -> int:
    """Read caches, DRAM and links of GPUs that are at work already. Example: spikeprof counters --seconds 5"""
    from spikeprof.profiler.collectors.pm_sampling import visible_gpus
    from spikeprof.profiler.counter_metrics import metrics_of
    from spikeprof.profiler.watch import watch

    if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(interval_us)):
        raise UsageError(
            f"--seconds {seconds:g} and --counters-interval-us {interval_us:g} must be above 0, and finite"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends it as Ctrl-C does, and nothing is left
    chosen = tuple(dict.fromkeys(device)) if device else visible_gpus()
    with _bar(seconds) as tick:
        watched = watch(chosen, metrics_of(metrics), seconds, round(interval_us * 1000), max_samples, output, tick)
    if not watched.readings:
        raise NoGpu(f"no counters were sampled: {watched.note.reason}; `spikeprof doctor` says what would unlock them")
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(watched, enc_hook=str), indent=1))
    else:
        from rich.console import Console

        from spikeprof.reports.readings import render_readings

        render_readings(watched.readings, watched.note, Console())
    return 0


@contextmanager
def _bar(seconds: float) -> Iterator[Callable[[float], None]]:
    """A progress bar on standard error where somebody watches and it takes a while."""
    if seconds <= _BAR_FROM_SECONDS or not sys.stderr.isatty():
        yield lambda elapsed: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sampling", total=seconds)
        yield lambda elapsed: bar.update(task, completed=elapsed)
