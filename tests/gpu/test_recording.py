"""Recording on a real GPU, against torch.profiler and against what the program itself knows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.trace import Trace

PROGRAM = [sys.executable, str(Path(__file__).resolve().parent / "programs.py")]


def record(folder: Path, program: list[str], *options: str) -> tuple[subprocess.CompletedProcess[str], Trace]:
    command = [sys.executable, "-m", "spikeprof", "run", "--no-summary", "-o", str(folder), *options, "--", *PROGRAM]
    done = subprocess.run([*command, *program], capture_output=True, text=True, timeout=240, check=False)
    return done, open_trace(folder)


def windows(trace: Trace, state: str) -> list[tuple[int, int]]:
    rows = trace.table("windows").to_pylist()
    return [(row["start_ns"], row["end_ns"]) for row in rows if row["state"] == state]


def launched(trace: Trace) -> np.ndarray:
    """Of each kernel, whether the call that launched it was recorded."""
    return np.isin(trace.column("kernels", "correlation_id"), trace.column("runtime_calls", "correlation_id"))


def test_a_guest_profiler_gets_its_events_and_recording_resumes(tmp_path: Path) -> None:
    done, trace = record(tmp_path / "t", ["guest", "4"])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for session in told["sessions"]:
        assert session["kernels"] == session["linked"] > 1000
        assert session["min_delay_ns"] > 0
    yielded = windows(trace, "yielded")
    assert len(yielded) == 2
    start = trace.column("kernels", "start_ns")
    for begin, end in yielded:
        assert not ((start >= begin) & (start < end)).any()
    t0 = trace.manifest.t0_unix_ns
    after = (start > told["resumed_ns"] - t0) & (start < told["ended_ns"] - t0)
    # Four steps, as many as each session of the guest held, on our own clock again.
    assert int(after.sum()) == told["sessions"][1]["kernels"]
    # CUPTI records no calls after another profiler: that is said, not passed over.
    assert not launched(trace)[after].any()
    assert any("recording launches refused" in note for note in trace.manifest.notes)


def test_a_killed_program_loses_at_most_the_last_fifth_of_a_second(tmp_path: Path) -> None:
    done, trace = record(tmp_path / "t", ["killed", "400"])
    assert done.returncode == 128 + 9
    steps = np.array(json.loads(done.stdout)) - trace.manifest.t0_unix_ns
    last = int(trace.column("kernels", "end_ns").max())
    assert steps[-1] - last < 200_000_000
    # And nothing is missing before: every step that ended by then is there, whole.
    start = trace.column("kernels", "start_ns")
    counts = Counter(np.searchsorted(steps, start[start > steps[0]]).tolist())
    whole = [counts[i] for i in range(1, int(np.searchsorted(steps, last)))]
    assert len(set(whole)) == 1
    assert trace.table("processes").column("status").to_pylist() == ["partial"]


def test_every_replayed_kernel_in_the_capture_range_is_there_and_has_a_known_node(tmp_path: Path) -> None:
    done, trace = record(tmp_path / "t", ["replays", "200"], "--capture-range")
    assert done.returncode == 0, done.stderr
    calls = trace.table("runtime_calls").to_pandas()
    launches = calls[calls.name == "cudaGraphLaunch"]
    assert len(launches) == 200
    kernels = trace.table("kernels").to_pandas()
    per_replay = kernels.groupby("correlation_id").size()
    assert len(per_replay) == 200
    assert per_replay.nunique() == 1
    assert set(kernels.correlation_id) == set(launches.correlation_id)
    nodes = trace.table("graph_nodes").to_pandas()
    assert set(kernels.graph_node_id) <= set(nodes.graph_node_id)
    assert nodes.graph_node_id.is_unique
    clones = nodes[nodes.graph_node_id.isin(kernels.graph_node_id)]
    assert (clones.source_node_id > 0).all()


def test_clean_steps_are_timed_and_no_record_is_torn_by_the_change(tmp_path: Path) -> None:
    done, trace = record(tmp_path / "t", ["steady", "120"], "--clean-steps", "40")
    assert done.returncode == 0, done.stderr
    steps = trace.table("steps").to_pandas()
    assert (~steps[steps.kind == "forward"].traced).sum() >= 40
    assert steps.duration_ns.min() > 0
    duration = trace.column("kernels", "end_ns") - trace.column("kernels", "start_ns")
    assert duration.max() < 5_000_000
    start = trace.column("kernels", "start_ns")
    for begin, end in windows(trace, "clean"):
        assert not ((start >= begin + 1_000_000) & (start < end)).any()


@pytest.mark.parametrize("window", ["0.05,0.05"])
def test_duty_windows_lose_only_what_is_in_flight(tmp_path: Path, window: str) -> None:
    # Replays enough for many windows: one takes less than half a millisecond where kernels are not recorded.
    done, trace = record(tmp_path / "t", ["steady", "400", "6000"], "--window", window)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done 400\n"
    assert len(windows(trace, "off")) > 5
    start, end = trace.column("kernels", "start_ns"), trace.column("kernels", "end_ns")
    assert (end - start).max() < 5_000_000
    # Whole replays or none: a launch that was recorded has all its kernels, unless the switch cut its replay off.
    kernels = trace.table("kernels").to_pandas()
    kernels = kernels[(kernels.graph_id > 0) & (kernels.correlation_id > 0)]
    sizes = kernels.groupby("correlation_id").size()
    assert len(sizes) > 100
    assert (sizes < sizes.max()).sum() <= 2 * len(windows(trace, "off"))
    # And under its own correlation id: no call is taken for a part of another one.
    calls = trace.table("runtime_calls").to_pandas()
    assert calls.correlation_id.is_unique
    assert launched(trace).mean() > 0.95


def test_switching_as_fast_as_can_be_while_another_thread_launches_does_no_harm(tmp_path: Path) -> None:
    """It ended the program, or put all later kernels under one id, when copies or calls were switched, too."""
    done, trace = record(tmp_path / "t", ["flips"])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300
    correlation = trace.column("kernels", "correlation_id")
    assert len(np.unique(correlation)) == len(correlation) > 10_000
    assert launched(trace).mean() > 0.95


def test_workers_are_recorded_each_and_forked_bystanders_are_not_touched(tmp_path: Path) -> None:
    done, trace = record(tmp_path / "t", ["workers", "2"])
    assert done.stdout == "[0, 0]\n", done.stderr
    processes = trace.table("processes").to_pandas()
    assert (processes.status == "traced").sum() == 2
    kernels = trace.table("kernels").to_pandas()
    gemms = kernels[kernels.name.str.contains("gemm|nvjet|cutlass", case=False)]
    # Split-K products are two kernels each.
    sizes = gemms.groupby("rank").size()
    assert sorted(sizes // 50) == [sizes.min() // 50] * 2
    assert sorted(sizes % 50) == [0, sizes.min() // 50]


def test_the_program_is_named_by_kernels_with_readable_names(tmp_path: Path) -> None:
    _, trace = record(tmp_path / "t", ["steady", "5"])
    names = trace.table("kernels").column("name").unique().to_pylist()
    assert names
    assert not [name for name in names if "not read" in name or name.startswith("_Z")]


def test_each_rank_of_torchrun_is_recorded(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "spikeprof", "run", "--no-summary", "-o", str(tmp_path / "t"), "--"]
    done = subprocess.run(
        [*command, *launcher, PROGRAM[1], "ranks"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "t")
    processes = trace.table("processes").to_pandas()
    assert processes[processes.status == "traced"]["rank"].tolist() == [0, 1]
    gpus = trace.table("devices").to_pandas().uuid.nunique()
    kernels = trace.table("kernels").to_pandas()
    gemms = kernels[kernels.name.str.contains("gemm|nvjet|cutlass", case=False)]
    assert gemms.groupby(["rank", "device"]).size().to_dict() == {(0, 0): 20, (1, gpus - 1): 20}
