"""Runs the installed ``spikeprof`` as a user would: a real process; or the command line in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spikeprof.cli.app import run_command_line

Run = subprocess.CompletedProcess[str]
Here = Callable[..., Run]

#: The command beside the interpreter that runs the tests.
SPIKEPROF = Path(sys.executable).with_name("spikeprof")


def spikeprof(*arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> Run:
    """Run it to its end; output as text, nothing on standard input."""
    return subprocess.run(
        [SPIKEPROF, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def runner(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """Runs ``spikeprof ARGUMENTS`` in this process: starting one takes longer than most of what is tested.

    What libraries write to the descriptors themselves is seen, too.
    """
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str | Path) -> Run:
        capfd.readouterr()
        code = run_command_line([*map(str, arguments)])
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


def refusal(run: Run) -> str:
    """The one line that a refused command prints on standard error, without its prefix; nothing else may be there."""
    assert run.stdout == ""
    lines = run.stderr.splitlines()
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("spikeprof: ")
    return lines[0].removeprefix("spikeprof: ")
