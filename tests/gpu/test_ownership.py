"""Who owns the kernels of a run: those whom torch.profiler names, and nearly all, in eager mode and in CUDA graphs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from module_shares import check_shares, shares_by_class

from spikeprof.analyzers.ownership import Ownership
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("owned_programs.py")
SPIKEPROF = shlex.split(os.environ.get("SPIKEPROF_TEST_COMMAND", f"{sys.executable} -m spikeprof"))


def record(folder: Path, *program: str | Path) -> Trace:
    command = [*SPIKEPROF, "run", "--no-summary", "-o", str(folder), "--", sys.executable, *map(str, program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return open_trace(folder)


def test_modules_are_those_of_torch_profiler(tmp_path: Path) -> None:
    file = tmp_path / "torch.json"
    subprocess.run([sys.executable, str(PROGRAM), str(file)], check=True, timeout=240)
    theirs, ours = shares_by_class(open_trace(file)), shares_by_class(record(tmp_path / "trace", PROGRAM))
    print("torch.profiler", theirs, "here", ours)
    check_shares(ours, theirs)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_nearly_all_time_of_decoding_is_owned(tmp_path: Path, mode: str) -> None:
    """From 40 % of the recording on: what makes weights and compiles is no part of the model."""
    program = [ROOT / "examples" / "infer.py", "--impl", "engine", "--mode", mode, "--tokens", "96", "--batch", "8"]
    trace = record(tmp_path / "trace", *program)
    begin, end = int(trace.column("kernels", "start_ns").min()), int(trace.column("kernels", "end_ns").max())
    result = run_one(trace.narrowed(begin + 2 * (end - begin) // 5, end), Ownership())
    found = {name: result.metric(f"owned_{name}_share") for name in ("module", "op", "shapes", "line")}
    print(mode, found)
    assert found["module"] >= 0.99
    assert min(found["op"], found["shapes"]) >= 0.95
    assert found["line"] >= 0.90
