"""Runs programs under spikeprof with a fake libcupti, and looks at what was recorded."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spikeprof.profiler import session
from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.session import Outcome, RunOptions
from spikeprof.profiler.trace import Trace

FAKES = Path(__file__).with_name("fakes")

#: The command beside the interpreter that runs the tests.
SPIKEPROF = Path(sys.executable).with_name("spikeprof")

#: What runs the programs under test: another Python than ours if asked for.
PYTHON = os.environ.get("SPIKEPROF_TEST_PYTHON", sys.executable)

TIMEOUT_S = 30


@dataclass
class Run:
    """What came of one program."""

    outcome: Outcome
    trace: Trace

    @property
    def code(self) -> int:
        """The program's exit code."""
        return self.outcome.exit_code

    @property
    def kernels(self) -> int:
        """All kernels recorded."""
        return count(self.trace, "kernels")

    @property
    def processes(self) -> list[dict[str, Any]]:
        """The process table's rows."""
        rows: list[dict[str, Any]] = self.trace.table("processes").to_pylist()
        return rows

    def kernels_by_process(self) -> list[int]:
        """Kernels of each traced process, in rank order."""
        ranks = self.trace.column("kernels", "rank")
        return [int((ranks == p["rank"]).sum()) for p in self.processes if p["status"] != "no_cuda"]

    def windows(self) -> list[tuple[str, str]]:
        """(state, reason) in time order."""
        return [(w["state"], w["reason"]) for w in self.trace.table("windows").to_pylist()]


class Lab:
    """A folder for one test: programs, the trace, and the environment they run in."""

    def __init__(self, folder: Path, library: Path, monkeypatch: Any) -> None:
        self.folder, self.library = folder, library
        monkeypatch.setenv("FAKE_CUPTI", str(library))
        monkeypatch.setenv("PYTHONPATH", str(FAKES))
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.delenv("FAKE_CUPTI_FAIL", raising=False)
        # Descriptors that somebody handed to the test runner are not the program's, which counts its own.
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one that lists them
                if int(entry.name) > 2:
                    os.set_inheritable(int(entry.name), False)

    def program(self, text: str, name: str = "program.py") -> Path:
        """A program file."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def record(self, text: str, *arguments: str, output: Path | None = None, **options: Any) -> Run:
        """Record a program given as text, in this process as the command does."""
        return self.record_command([PYTHON, str(self.program(text)), *arguments], output, **options)

    def record_command(self, command: list[str], output: Path | None = None, **options: Any) -> Run:
        """Record any command."""
        output = output or self.folder / "trace"
        options = {"libcupti": str(self.library), "nvml_interval_ms": 0, **options}
        outcome = session.record(command, output, RunOptions(**options))
        assert outcome.trace is not None, outcome.reason
        return Run(outcome, open_trace(outcome.trace))

    def command(self, *words: str | Path, options: tuple[str, ...] = ()) -> list[str]:
        """The installed command, about to run these words."""
        flags = ["--libcupti", self.library, "--nvml-interval-ms", "0", "--no-summary", "-o", self.folder / "trace"]
        return [str(w) for w in (SPIKEPROF, "run", *flags, *options, "--", *words)]

    def start(self, *words: str | Path, options: tuple[str, ...] = (), **popen: Any) -> subprocess.Popen[bytes]:
        """Start the installed command; its output is captured unless told otherwise."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(self.command(*words, options=options), **{**streams, **popen})

    def opened(self) -> Trace:
        """The trace of the command that has ended."""
        return open_trace(self.folder / "trace")


def count(trace: Trace, table: str) -> int:
    """Rows of a table; 0 when there is none."""
    return trace.table(table).num_rows if table in trace else 0


def own_lines(stderr: bytes) -> tuple[bytes, list[str]]:
    """Standard error without what spikeprof says at the end, and what it says."""
    theirs, mark, ours = stderr.partition(b"spikeprof: ")
    return theirs, (mark + ours).decode().splitlines()


def check_whole(run: Run, kernels: int, launches_lost: int = 0) -> None:
    """Every kernel that was launched is there, once, named, with its launch but for ``launches_lost`` of them."""
    trace = run.trace
    assert run.kernels == kernels
    keys = np.stack([trace.column("kernels", "rank"), trace.column("kernels", "correlation_id")])
    assert np.unique(keys, axis=1).shape[1] == kernels
    launches = np.stack([trace.column("runtime_calls", "rank"), trace.column("runtime_calls", "correlation_id")])
    assert launches.shape[1] == kernels - launches_lost
    assert len({*map(tuple, launches.T.tolist())} & {*map(tuple, keys.T.tolist())}) == kernels - launches_lost
    names = set(trace.table("kernels").column("name").cast("string").to_pylist())
    assert all(name.startswith("fake_gemm_") and name.endswith("(float*, int)") for name in names), names
    assert trace.manifest.collectors["activity"].set_aside_count == 0


def environment_without_us() -> dict[str, str]:
    """The environment of an untraced run."""
    return dict(os.environ)
