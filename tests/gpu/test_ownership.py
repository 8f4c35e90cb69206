"""Who owns the kernels of a run: those whom torch.profiler names, and nearly all, in eager mode and in CUDA graphs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from module_shares import check_shares, shares_by_class

from spikeprof.analyzers.ownership import Ownership
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("owned_programs.py")
SPIKEPROF = shlex.split(os.environ.get("SPIKEPROF_TEST_COMMAND", f"{sys.executable} -m spikeprof"))


def record(folder: Path, *program: str | Path, options: tuple[str, ...] = ()) -> Trace:
    asked = [*SPIKEPROF, "run", "--no-summary", *options, "-o", str(folder)]
    command = [*asked, "--", sys.executable, *map(str, program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return open_trace(folder)


def later_part(trace: Trace) -> Trace:
    """From 40 % of the recording on: what makes weights and compiles is no part of the model."""
    begin, end = int(trace.column("kernels", "start_ns").min()), int(trace.column("kernels", "end_ns").max())
    return trace.narrowed(begin + 2 * (end - begin) // 5, end)


def test_modules_are_those_of_torch_profiler(tmp_path: Path) -> None:
    file = tmp_path / "torch.json"
    subprocess.run([sys.executable, str(PROGRAM), str(file)], check=True, timeout=240)
    theirs, ours = shares_by_class(open_trace(file)), shares_by_class(record(tmp_path / "trace", PROGRAM))
    print("torch.profiler", theirs, "here", ours)
    check_shares(ours, theirs)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_nearly_all_time_of_decoding_is_owned(tmp_path: Path, mode: str) -> None:
    program = [ROOT / "examples" / "infer.py", "--impl", "engine", "--mode", mode, "--tokens", "96", "--batch", "8"]
    trace = record(tmp_path / "trace", *program)
    part = later_part(trace)
    result = run_one(part, Ownership())
    found = {name: result.metric(f"owned_{name}_share") for name in ("module", "op", "shapes", "line")}
    found["steady shapes"] = steady_shapes_share(trace, part)
    print(mode, found)
    assert found["module"] >= 0.99
    assert min(found["op"], found["steady shapes"]) >= 0.95
    assert found["line"] >= 0.90


def steady_shapes_share(trace: Trace, part: Trace) -> float:
    """Of kernel time at places where the launches that were looked at, two or more, had the same inputs: of known ones.

    A place is a kernel, with its grid, of an operator at a line in a module. Where its inputs grow with the context, as
    attention's table of pages does, no other launch tells what they were; nor where there was one look only.
    """
    seen, all_of_part = (_with_origins(one) for one in (trace, part))
    place = ["module_id", "file", "line", "op", "name", "grid_x"]
    of_place = seen[seen["match"] != "position"].groupby(place)["input_shapes"].agg(["nunique", "first", "size"])
    steady = of_place[(of_place["nunique"] == 1) & (of_place["first"] != "") & (of_place["size"] > 1)].index
    rows = all_of_part[all_of_part.set_index(place).index.isin(steady)]
    times = rows["end_ns"] - rows["start_ns"]
    assert times.sum() > 0.5 * (all_of_part["end_ns"] - all_of_part["start_ns"]).sum()
    return float(times[rows["input_shapes"] != ""].sum() / times.sum())


def _with_origins(trace: Trace) -> pd.DataFrame:
    kernels, owners, origins, stacks = (
        trace.table(name).to_pandas() for name in ("kernels", "kernel_owners", "origins", "stacks")
    )
    rows = kernels.merge(owners, on="kernel_id").merge(origins.drop(columns="rank"), on="origin_id")
    rows = rows.merge(stacks[["stack_id", "file", "line"]], on="stack_id", how="left")
    return rows.astype({"op": str, "match": str, "input_shapes": str})


def test_steps_are_looked_at_while_windows_are_on(tmp_path: Path) -> None:
    program = [ROOT / "examples" / "infer.py", "--impl", "engine", "--separate", "--mode", "eager", "--tokens", "300"]
    trace = record(tmp_path / "trace", *program, options=("--window", "0.4,0.2"))
    states = trace.table("windows").column("state").to_pylist()
    assert states.count("off") > 5
    found = run_one(later_part(trace), Ownership()).metric("owned_module_share")
    print(states.count("off"), found)
    assert found >= 0.95


def test_owners_follow_kernels_that_change_with_the_context(tmp_path: Path) -> None:
    """Attention reads a longer context in parts, and merges them: from then on each layer has one kernel more."""
    program = [ROOT / "examples" / "infer.py", "--impl", "engine", "--separate", "--mode", "eager", "--tokens", "200"]
    trace = record(tmp_path / "trace", *program)
    trace = later_part(trace)
    assert "_merge_parts" in trace.table("kernels").column("name").unique().to_pylist()
    found = run_one(trace, Ownership()).metric("owned_module_share")
    print(found)
    assert found >= 0.99
