"""One run: collectors started in order, the program run, everything stopped, the trace assembled.

Any part may fail: the program runs on, and the manifest says what is missing. What was recorded stays in
the trace folder's ``spool/`` until it has been assembled into tables.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import spikeprof
from spikeprof.profiler import collecting, launch, store
from spikeprof.profiler.collecting import Progress
from spikeprof.profiler.collectors.model_graph.collect import check_factory
from spikeprof.profiler.counter_metrics import check_interval
from spikeprof.profiler.errors import DamagedTrace, OutputError, SpikeprofError, UsageError
from spikeprof.profiler.trace import CollectorNote, Manifest

if TYPE_CHECKING:
    from spikeprof.profiler.assemble.build import Assembly
    from spikeprof.profiler.numerics_alerts import NumericsAlert

SPOOL_FOLDER = "spool"
SESSION_FILE = "session.json"

#: What can be scanned of a module (profiler/inject/numerics/watch.py).
NUMERICS_ROLES = ("output", "input", "weight", "gradient")

#: Where traces go when no folder is named.
TRACES_FOLDER = "spikeprof-traces"


@dataclass(frozen=True)
class RunOptions:
    """What to record. Zero means no limit, or not asked for.

    ``window`` is (seconds on, seconds off), repeated. ``clean_steps`` untraced steps are timed to tell what
    tracing costs. ``attribute_steps`` steps of each kind are looked at closely, then ever fewer: which module, line and
    operator launches each kernel. ``capture_range`` records between cudaProfilerStart and cudaProfilerStop only.
    ``counters`` are names of metrics (``counter_metrics``), sampled every
    ``counters_interval_ns``, ``counters_samples`` at most.
    ``numerics_every`` n: the tensors of every n-th step are scanned, of modules whose names match one of
    ``numerics_modules``, in ``numerics_roles`` (output, input, weight, gradient); 0 = none.
    ``graph`` names a factory of the model, whose static graph is read and timed once the program has ended.
    """

    max_bytes: int = 2 << 30
    max_seconds: float = 0.0
    window: tuple[float, float] | None = None
    capture_range: bool = False
    clean_steps: int = 0
    attribute_steps: int = 3
    graph_nodes: bool = True
    nvml_interval_ms: int = 100
    cpu_counters: bool = False
    counters: tuple[str, ...] = ()
    counters_interval_ns: int = 10_000
    counters_samples: int = 2_000_000
    libcupti: str = ""
    graph: str = ""
    numerics_every: int = 0
    numerics_modules: tuple[str, ...] = ("*",)
    numerics_roles: tuple[str, ...] = ("output",)

    def __post_init__(self) -> None:
        if self.window is not None and (self.window[0] <= 0 or self.window[1] < 0):
            raise UsageError(
                f"--window {self.window[0]:g},{self.window[1]:g}: seconds on must be above 0, off 0 or more"
            )
        # A clock compared with NaN never gets anywhere: the agent would stop over it in the middle of the program.
        if not all(map(math.isfinite, (self.max_seconds, *(self.window or ())))):
            raise UsageError("--max-seconds and --window take finite numbers of seconds; 0 = no limit")
        for name in (
            "max_bytes",
            "max_seconds",
            "clean_steps",
            "numerics_every",
            "attribute_steps",
            "nvml_interval_ms",
            "counters_samples",
        ):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")

        if self.graph:
            check_factory(self.graph)
        unknown = set(self.numerics_roles) - set(NUMERICS_ROLES)
        if unknown or not self.numerics_roles:
            raise UsageError(
                f"--numerics-roles {','.join(self.numerics_roles)!r}: it can be {', '.join(NUMERICS_ROLES)}"
            )
        if self.counters:
            check_interval(self.counters_interval_ns)

    def for_target(self) -> dict[str, object]:
        """The part that the agent in the target reads."""
        return {
            "max_bytes": self.max_bytes,
            "max_seconds": self.max_seconds,
            "window": list(self.window) if self.window else None,
            "capture_range": self.capture_range,
            "clean_steps": self.clean_steps,
            "attribute_steps": self.attribute_steps,
            "graph_nodes": self.graph_nodes,
            **self._numerics(),
            "libcupti": self.libcupti or None,
        }

    def _numerics(self) -> dict[str, object]:
        if not self.numerics_every:
            return {}
        return {
            "numerics_every": self.numerics_every,
            "numerics_modules": list(self.numerics_modules),
            "numerics_roles": list(self.numerics_roles),
        }


@dataclass(frozen=True)
class Outcome:
    """A run's end: the trace (None when it could not be written), the program's exit code, what to say."""

    exit_code: int
    trace: Path | None
    traced_count: int = 0
    kernels_count: int = 0
    scans_count: int = 0
    reason: str = ""  # why nothing, or not all, was recorded
    seconds: float = 0.0
    warnings: tuple[str, ...] = field(default=())


def record(
    command: Sequence[str],
    output: Path | None,
    options: RunOptions,
    progress: Progress | None = None,
    alerted: Callable[[NumericsAlert], None] | None = None,
) -> Outcome:
    """Run a command and record it. The program's output, signals and exit code are its own.

    ``alerted`` is told of alerts on numerics while the program runs, from a thread of its own.

    Raises UsageError, CommandNotFound, CommandNotExecutable or OutputError before anything was started;
    a trace that cannot be written afterwards is told in the outcome, with the program's exit code.
    """
    if not command:
        raise UsageError("no command to run: write it after --, as in `spikeprof run -- python infer.py`")
    folder = store.create_folder(output or _default_folder(command))
    try:
        return _record_into(folder, command, options, progress, alerted)
    except BaseException:
        _remove_if_empty(folder)
        raise


def recover(folder: Path, progress: Progress | None = None) -> None:
    """Finish a trace whose recording was cut off: assemble what lies in its spool. Raises OutputError."""
    session = _read_session(folder)
    _finish(folder, session, progress, exit_code=None, running=[])


def is_unfinished(folder: Path) -> bool:
    """Whether the folder is a recording that was never assembled."""
    return (folder / SPOOL_FOLDER).is_dir() and not store.is_trace(folder)


@dataclass
class _Session:
    """What is known of a run before any of it is read."""

    command: tuple[str, ...]
    t0_unix_ns: int
    options: dict[str, str]


def _record_into(
    folder: Path,
    command: Sequence[str],
    options: RunOptions,
    progress: Progress | None,
    alerted: Callable[[NumericsAlert], None] | None,
) -> Outcome:
    from spikeprof.profiler.control import ControlServer
    from spikeprof.profiler.numerics_alerts import ALERTS_FILE, Alerting

    spool = folder / SPOOL_FOLDER
    spool.mkdir(mode=0o700)
    given = {name: str(value) for name, value in options.for_target().items() if value}
    words = tuple(word.encode("utf-8", "replace").decode() for word in command)  # not all words are text
    session = _Session(words, time.time_ns(), given)
    _write_session(folder, session)
    control = ControlServer(spool)
    collectors = collecting.collectors_for(options, spool)
    # Always: a program may watch a model of its own accord.
    alerting = Alerting(spool, folder / ALERTS_FILE, alerted) if alerted else None
    control.start()
    try:
        if alerting:  # before the collectors: the last of them counts what later threads do
            alerting.start()
        for collector in collectors:
            collector.start(session.t0_unix_ns)
        began = time.monotonic()
        code = launch.run(command, launch.environment(spool.resolve(), control.path, options.for_target()))
    except BaseException:  # the program was not started
        control.stop(patience_s=0)
        if alerting:
            alerting.stop()
        collecting.stop_all(collectors)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    seconds = time.monotonic() - began
    running = control.stop()
    if alerting:
        alerting.stop()
    collected = collecting.stop_all(collectors)
    try:
        return _finish(
            folder,
            session,
            progress,
            exit_code=code,
            running=running,
            collected=collected,
            seconds=seconds,
            graph=options.graph,
        )
    except Exception as error:  # whatever it is: the program has run, and its exit code must not be lost
        reason = str(error) if isinstance(error, SpikeprofError) else f"{type(error).__name__}: {error}"
        return Outcome(code, None, reason=f"{reason}; the raw records are in {spool}", seconds=seconds)


def _finish(
    folder: Path,
    session: _Session,
    progress: Progress | None,
    *,
    exit_code: int | None,
    running: Sequence[int],
    collected: collecting.Collected | None = None,
    seconds: float = 0.0,
    graph: str = "",
) -> Outcome:
    """Assemble the spool, read the model's graph where asked to, write the manifest, remove the spool."""
    from spikeprof.profiler.assemble.build import assemble

    duration_ns = time.time_ns() - session.t0_unix_ns
    collected = collected or collecting.Collected()
    versions = {"spikeprof": spikeprof.__version__}
    if collected.driver_version:
        versions["driver"] = collected.driver_version
    for name, table in collected.tables.items():
        store.write_table(folder, name, table)
    spool = folder / SPOOL_FOLDER
    report = (lambda done, total: progress("assembling", done, total)) if progress else None
    built = assemble(spool, folder, session.t0_unix_ns, collecting.gpu_numbers(spool, collected), report)
    if exit_code is None:  # recovered: the records themselves tell how long it ran
        duration_ns = built.end_ns
    warnings = _warnings(built.notes, running)
    warnings += collecting.attribute_counters(spool, folder, session.t0_unix_ns, collected, progress)
    if graph:
        warnings += collecting.read_graph(graph, folder, session.command, collected, progress)
    note, asked = built.note, _asked_for(session, built)
    if not built.processes:
        note = dataclasses.replace(note, reason=launch.why_not_traced(session.command))
    elif "numerics" in asked and not asked["numerics"].records_count and not _fault_of_numerics(built):
        patterns = session.options.get("numerics_modules", "['*']")
        picked = "" if patterns == "['*']" else f"of the modules that ran none was picked by {patterns.strip('[]')}"
        why = asked["numerics"].reason or picked
        warnings.append("no tensor was scanned" + (f": {why}" if why else ""))
    manifest = Manifest(
        source="spikeprof",
        t0_unix_ns=session.t0_unix_ns,
        duration_ns=max(duration_ns, built.end_ns),
        command=session.command,
        exit_code=exit_code,
        host=platform.node(),
        versions=versions | built.versions,
        collectors={"activity": note, **asked, **collected.notes},
        options=session.options,
        notes=tuple(warnings),
    )
    store.write_manifest(folder, manifest)
    traced_count = sum(1 for p in built.processes if p.activated_ns and (p.records.exists() or not p.faults))
    if not built.undecoded:
        shutil.rmtree(spool, ignore_errors=True)
        (folder / SESSION_FILE).unlink(missing_ok=True)
    return Outcome(
        exit_code=exit_code or 0,
        trace=folder,
        traced_count=traced_count,
        kernels_count=built.kernels_count,
        scans_count=built.numerics.records_count if built.numerics else 0,
        reason=note.reason,
        seconds=seconds,
        warnings=tuple(warnings),
    )


def _asked_for(session: _Session, built: Assembly) -> dict[str, CollectorNote]:
    """Notes of what the agent does where it is asked to."""
    numerics = built.numerics
    if numerics is None and "numerics_every" in session.options:
        nothing = "no process called a module of torch: nothing was watched"
        numerics = CollectorNote("refused", _fault_of_numerics(built) or nothing)
    notes = {"ownership": built.ownership, "numerics": numerics}
    return {name: note for name, note in notes.items() if note is not None}


def _fault_of_numerics(built: Assembly) -> str:
    """What ended the watch, as the process told it; empty where it did not say so."""
    return next((note for note in built.notes if "numerics" in note), "")


def _warnings(notes: Sequence[str], running: Sequence[int]) -> list[str]:
    found = list(notes)
    if running:
        pids = ", ".join(map(str, running))
        found.append(f"still running when the command ended, recorded up to then: process {pids}")
    return found


def _default_folder(command: Sequence[str]) -> Path:
    stamp = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    base = Path(TRACES_FOLDER) / f"{launch.describe(command)}-{stamp}"
    candidates = (base.with_name(f"{base.name}-{n}") if n else base for n in itertools.count())
    return next(path for path in candidates if not path.exists())


def _write_session(folder: Path, session: _Session) -> None:
    data = msgspec.json.encode(session)
    try:
        with os.fdopen(os.open(folder / SESSION_FILE, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}; nothing was started") from error


def _read_session(folder: Path) -> _Session:
    try:
        return msgspec.json.decode((folder / SESSION_FILE).read_bytes(), type=_Session)
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedTrace(f"{folder} holds raw records but no readable {SESSION_FILE}: {error}") from error


def _remove_if_empty(folder: Path) -> None:
    """Take the folder away again when nothing was recorded into it."""
    spool = folder / SPOOL_FOLDER
    if spool.is_dir() and not any(spool.iterdir()):
        spool.rmdir()
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {SESSION_FILE}:
        shutil.rmtree(folder, ignore_errors=True)
