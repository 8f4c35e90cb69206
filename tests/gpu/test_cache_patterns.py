"""Patterns of memory use are named rightly in a run of kernels that are known to have them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.cache_miss import CacheMiss
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.importers import open_trace

PROGRAM = Path(__file__).resolve().parent / "programs.py"
SPIKEPROF = shlex.split(os.environ.get("SPIKEPROF_TEST_COMMAND", f"{sys.executable} -m spikeprof"))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("patterns") / "t"
    command = [*SPIKEPROF, "run", "--no-summary", "--counters", "-o", str(folder), "--", sys.executable, str(PROGRAM)]
    done = subprocess.run([*command, "memory_patterns"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    trace = open_trace(folder)
    note = trace.manifest.collectors["pm_sampling"]
    if note.state == "refused":
        pytest.skip(f"counters cannot be sampled here: {note.reason}")
    # Every kernel counts here, however short it ran.
    answer = run_one(trace, CacheMiss(min_time_share=0.0))
    assert answer.status in ("ok", "findings"), answer.reason
    for row in zip(*(answer.tables["classes"][c] for c in ("kernel", "grid_x", "pattern")), strict=True):
        print(row)
    return answer


@pytest.mark.parametrize(
    ("part", "grid_x", "pattern"),
    [
        ("MulFunctor", 2**18, "streaming"),
        ("index_kernel_impl", 2**15, "random-gather"),
        ("index_put", 2**15, "partial-sector"),
        ("sin_kernel", None, "l2-thrash"),
        ("cos_kernel", None, "l2-thrash"),
    ],
)
def test_a_pattern_is_named(result: Result, part: str, grid_x: int | None, pattern: str) -> None:
    table = result.tables["classes"]
    rows = zip(table["kernel"], table["grid_x"], table["pattern"], strict=True)
    named = {found for kernel, grid, found in rows if part in kernel and grid_x in (None, grid)}
    assert named == {pattern}


def test_the_gpu_is_seen_to_be_ours_alone(result: Result) -> None:
    assert "gpu-shared" not in {f.rule for f in result.findings}
    assert result.metric("dram_outside_kernels_share") < 0.01
