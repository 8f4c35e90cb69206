"""What fusing is predicted to save is what it saves; what a compiler fuses is seen to be fused."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.fusion_programs import REPEATS

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.derived.fusion_tables import kernels
from spikeprof.analyzers.fusion_coverage import FusionCoverage
from spikeprof.analyzers.runner import run_one
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


def asked(trace: Trace) -> Result:
    result = run_one(trace, FusionCoverage(min_time_share=0.0))
    assert result.status in ("ok", "findings"), result.reason
    return result


def moved(trace: Trace) -> tuple[float, float]:
    """(bytes of DRAM, ns) of one repeat."""
    of = kernels(trace)
    often = of.of.launches >= REPEATS
    assert of.moved.known[often].all()
    times = REPEATS + 3
    return float(of.moved_bytes[often].sum()) / times, float(of.of.total_ns[often].sum()) / times


@pytest.mark.parametrize(
    ("name", "hows"),
    [
        ("silu_mul", ["fused"]),
        ("linear_silu", ["fused"]),
        ("rms_norm", ["fused"]),
        ("gemm_silu_mul", ["first", "second"]),  # each saves one of the chain's two edges
    ],
)
def test_what_fusing_is_predicted_to_save_it_saves(tmp_path: Path, name: str, hows: list[str]) -> None:
    eager = counted(tmp_path, name, "eager")
    result, before = asked(eager), moved(eager)
    table = result.tables["chains"]
    # A pause that fails to come joins two repeats.
    (chain,) = (i for i, runs in enumerate(table["runs_count"]) if runs >= REPEATS - 3)
    predicted_ns = table["saving_ns"][chain] / table["runs_count"][chain]
    assert "unfused-chain" in {f.rule for f in result.findings}
    saved_bytes = saved_ns = 0.0
    for how in hows:
        fused = counted(tmp_path, name, how)
        after = moved(fused)
        saved_bytes, saved_ns = saved_bytes + before[0] - after[0], saved_ns + before[1] - after[1]
        if len(hows) == 1:
            assert "unfused-chain" not in {f.rule for f in asked(fused).findings}
    print(name, "predicted", table["saved_bytes"][chain], "saved", saved_bytes)
    print(name, "at most", predicted_ns, "ns, saved", saved_ns)
    assert table["saved_bytes"][chain] == pytest.approx(saved_bytes, rel=0.2)
    if "linear_silu" not in name and "gemm" not in name:  # whose product is another kernel
        assert predicted_ns == pytest.approx(saved_ns, rel=0.2)


def test_a_compiler_fuses_what_eager_operators_do_apart(tmp_path: Path) -> None:
    eager, compiled = (asked(recorded(tmp_path, "pointwise", how)) for how in ("eager", "compiled"))
    assert eager.metric("fused_time_share") < 0.05  # random numbers are made in the same program
    assert compiled.metric("fused_time_share") > 0.8
