"""``spikeprof run``: run a program unchanged, record it, say what was seen and what to type next.

Standard output and standard input stay the program's alone: everything said here goes to standard error.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spikeprof.cli.inputs import two_numbers
from spikeprof.profiler.errors import SpikeprofError, UsageError

if TYPE_CHECKING:
    from spikeprof.profiler.collecting import Progress
    from spikeprof.profiler.numerics_alerts import NumericsAlert
    from spikeprof.profiler.session import Outcome

#: Memory that the analyzers take at their peak (docs/overhead.md).
_SUMMARY_BYTES_PER_KERNEL = 700

_BYTES_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- CMD", help="The program and its arguments.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Trace folder to make [spikeprof-traces/NAME-TIME]."),
    ] = None,
    clean_steps: Annotated[
        int, typer.Option(metavar="N", help="Time N steps without tracing, to tell what tracing costs.")
    ] = 0,
    attribute_steps: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Find out which module, line and operator launches each kernel, in the first N steps of each kind, "
            "then ever more rarely; 0 = not.",
        ),
    ] = 3,
    window: Annotated[
        str, typer.Option(metavar="ON,OFF", help="Record ON seconds, pause OFF seconds, and so on.")
    ] = "",
    capture_range: Annotated[
        bool, typer.Option("--capture-range", help="Record between cudaProfilerStart and cudaProfilerStop only.")
    ] = False,
    max_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Stop recording after this much raw data per process, e.g. 500M; 0 = no limit."
        ),
    ] = "2Gi",
    max_seconds: Annotated[
        float,
        typer.Option(
            metavar="S", help="Stop recording S seconds after the first CUDA use; 0 = no limit.", show_default="0"
        ),
    ] = 0.0,
    graph_nodes: Annotated[
        bool, typer.Option("--graph-nodes/--no-graph-nodes", help="Note CUDA-graph nodes as they are captured.")
    ] = True,
    nvml_interval_ms: Annotated[
        int, typer.Option(metavar="MS", help="Read power, clocks and load this often; 0 = never.")
    ] = 100,
    counters: Annotated[
        str | None,
        typer.Option(
            metavar="[=SET]",
            help="Sample hardware counters, for every kernel: memory (what --counters alone means), compute, nvlink,"
            " bank-conflicts, or metrics, comma separated.",
        ),
    ] = None,
    counters_interval_us: Annotated[
        float, typer.Option(metavar="US", help="Microseconds between samples of the counters.")
    ] = 10.0,
    counters_samples: Annotated[
        int, typer.Option(metavar="N", help="Stop sampling a GPU's counters after N samples; 0 = no limit.")
    ] = 2_000_000,
    numerics: Annotated[
        bool,
        typer.Option("--numerics", help="Scan what the model's modules give for overflow, NaN and lost precision."),
    ] = False,
    numerics_every: Annotated[int, typer.Option(metavar="N", min=1, help="Scan every N-th step only.")] = 1,
    numerics_modules: Annotated[
        str,
        typer.Option(metavar="PATTERNS", help="Modules to scan, by name: shell patterns, comma separated."),
    ] = "*",
    numerics_roles: Annotated[
        str,
        typer.Option(metavar="ROLES", help="What to scan: output, input, weight (once), gradient; comma separated."),
    ] = "output",
    cpu_counters: Annotated[
        bool, typer.Option("--cpu-counters", help="Count CPU cache reads and misses of the program.")
    ] = False,
    graph: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Once it has ended, read the static graph of the model that the factory makes (see `spikeprof graph`),"
            " and join its nodes to the kernels.",
        ),
    ] = "",
    libcupti: Annotated[
        str, typer.Option(metavar="FILE", help="Use this libcupti instead of the one the program would load.")
    ] = "",
    summary: Annotated[bool, typer.Option("--summary/--no-summary", help="Print the summary at the end.")] = True,
) -> int:
    """Run a program unchanged and record what its GPUs did.

    Its input, output, signals and exit code stay its own. Example: spikeprof run -- python infer.py --batch 8
    """
    from spikeprof.profiler import session
    from spikeprof.profiler.counter_metrics import metrics_of

    if not math.isfinite(counters_interval_us):
        raise UsageError(f"--counters-interval-us {counters_interval_us}: must be a number of microseconds")
    options = session.RunOptions(
        max_bytes=_bytes(max_bytes),
        max_seconds=max_seconds,
        window=_window(window),
        capture_range=capture_range,
        clean_steps=clean_steps,
        attribute_steps=attribute_steps,
        graph_nodes=graph_nodes,
        numerics_every=numerics_every if numerics else 0,
        numerics_modules=_words(numerics_modules),
        numerics_roles=_words(numerics_roles),
        nvml_interval_ms=nvml_interval_ms,
        cpu_counters=cpu_counters,
        counters=() if counters is None else metrics_of(counters),
        counters_interval_ns=round(counters_interval_us * 1000),
        counters_samples=counters_samples,
        libcupti=libcupti,
        graph=graph,
    )
    with _progress() as progress:
        outcome = session.record(command or [], output, options, progress, _Alerts())
    # Nobody may be listening; that is no reason to hide how the program ended.
    with suppress(OSError, SystemExit):  # the latter is rich's answer to a broken pipe
        _tell(outcome, summary=summary)
    return outcome.exit_code


class _Alerts:
    """Prints alerts while the program runs, one line each, the first ones; all are in a file of the trace folder."""

    MOST = 20

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, alert: NumericsAlert) -> None:
        """Called from a thread of the recording."""
        from spikeprof.reports.numerics import alert_text

        self._count += 1
        if self._count <= self.MOST:
            _say(alert_text(dataclasses.asdict(alert)))
        elif self._count == self.MOST + 1:
            _say("alert: more of them are in alerts.jsonl in the trace folder")


def _tell(outcome: Outcome, *, summary: bool) -> None:
    """What came of it, on standard error. Nothing here may change the exit code."""
    if outcome.trace is None:
        _say(f"no trace: {outcome.reason}")
        return
    if not outcome.traced_count and not outcome.scans_count:
        _say(f"not traced: {outcome.reason}; the program ran and exited with {outcome.exit_code}")
        _say(f"a trace without GPU work is in {outcome.trace}")
    elif summary:
        need = outcome.kernels_count * _SUMMARY_BYTES_PER_KERNEL
        if need > _available_bytes() // 2:
            _say(f"no summary: it takes about {need / 1e9:.1f} GB, more than half of what is free here")
        else:
            try:
                _print_summary(outcome.trace)
            except SpikeprofError as error:
                _say(f"no summary: {error}")
    for warning in outcome.warnings:
        _say(f"note: {warning}")
    if outcome.traced_count:
        _say(f"{outcome.kernels_count:,} kernels of {outcome.traced_count} process(es) in {outcome.trace}")
    elif outcome.scans_count:
        _say(f"no GPU work ({outcome.reason}); {outcome.scans_count:,} scans of tensors in {outcome.trace}")
    if outcome.traced_count or outcome.scans_count:
        _say(f"next: spikeprof report {shlex.quote(str(outcome.trace))} -o report.html")


def _available_bytes() -> int:
    """Memory that can be had without swapping, by Linux's own estimate; without one, no limit is known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return sys.maxsize
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    return sys.maxsize if kib is None else kib * 1024


def _print_summary(trace: Path) -> None:
    from rich.console import Console

    from spikeprof.profiler.importers import open_trace
    from spikeprof.reports.build import build_report
    from spikeprof.reports.terminal import render_terminal

    render_terminal(build_report(open_trace(trace), trace.name), Console(stderr=True))


def _say(text: str) -> None:
    sys.stderr.write(f"spikeprof: {text}\n")


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A progress bar on standard error, shown once assembling takes longer than a blink; none when piped."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    bar = Bar(console=Console(stderr=True), transient=True)
    tasks = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            bar.start()
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise UsageError(f"--max-bytes {text!r}: write a size such as 500M, 2G or 2Gi")
    return int(float(match[1]) * _BYTES_UNITS[match[2] or ""])


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _window(text: str) -> tuple[float, float] | None:
    if not text:
        return None
    window = two_numbers(text)
    if window is None:
        raise UsageError(f"--window {text!r}: write seconds on and seconds off, as in --window 0.1,0.9")
    return window
