"""What fusing is predicted to save is what it saves; what a compiler fuses is seen to be fused."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fused_twins import TWINS, check_coverage, check_saved, saved

from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.trace import Trace

PROGRAM = Path(__file__).resolve().parent / "fusion_programs.py"
SPIKEPROF = shlex.split(os.environ.get("SPIKEPROF_TEST_COMMAND", f"{sys.executable} -m spikeprof"))


def recorded(folder: Path, name: str, how: str, *options: str) -> Trace:
    command = [*SPIKEPROF, "run", "--no-summary", *options, "-o", str(folder / how), "--", sys.executable, str(PROGRAM)]
    done = subprocess.run([*command, name, how], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return open_trace(folder / how)


def counted(folder: Path, name: str, how: str) -> Trace:
    trace = recorded(folder, name, how, "--counters", "--counters-interval-us", "5")
    note = trace.manifest.collectors["pm_sampling"]
    if note.state == "refused":
        pytest.skip(f"counters cannot be sampled here: {note.reason}")
    return trace


@pytest.mark.parametrize("name", TWINS)
def test_what_fusing_is_predicted_to_save_it_saves(tmp_path: Path, name: str) -> None:
    one = saved(counted(tmp_path, name, "eager"), [counted(tmp_path, name, how) for how in TWINS[name]])
    print(name, one)
    check_saved(name, one)


def test_a_compiler_fuses_what_eager_operators_do_apart(tmp_path: Path) -> None:
    check_coverage(*(recorded(tmp_path, "pointwise", how) for how in ("eager", "compiled")))
