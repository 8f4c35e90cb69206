"""The command line in this process: for the many cases in which starting a process would take the longest."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from spikeprof.cli.app import run_command_line

Run = subprocess.CompletedProcess[str]
Here = Callable[..., Run]


def runner(capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs ``spikeprof pierce ARGUMENTS`` and gives what a process would give."""
    assert pd  # imported, so that a live run does not leave it out of this process

    def run(*arguments: str | Path) -> Run:
        capsys.readouterr()
        words = ["pierce", *map(str, arguments)]
        code = run_command_line(words)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, out, err)

    return run
