"""Runs the installed ``spikeprof`` as a user would: a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: The command beside the interpreter that runs the tests.
SPIKEPROF = Path(sys.executable).with_name("spikeprof")


def spikeprof(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
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


def refusal(run: subprocess.CompletedProcess[str]) -> str:
    """The one line that a refused command prints on standard error, without its prefix; nothing else may be there."""
    assert run.stdout == ""
    lines = run.stderr.splitlines()
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("spikeprof: ")
    return lines[0].removeprefix("spikeprof: ")
