"""When recording is on: budgets, duty windows, capture ranges, guests, clean steps. What was not is written down."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from inject.harness import Lab, Run, check_whole

pytestmark = pytest.mark.timeout(60)

#: A launch is noted 1 µs before its kernel and ends 2 µs after: what may lie across a window's edge.
EDGE_NS = 3000


def windows_of(run: Run, state: str) -> list[tuple[int, int]]:
    rows: list[dict[str, Any]] = run.trace.table("windows").to_pylist()
    return [(w["start_ns"], w["end_ns"]) for w in rows if w["state"] == state]


def check_partition(run: Run) -> None:
    """No gap and no overlap between windows."""
    rows = run.trace.table("windows").to_pylist()
    assert rows
    for before, after in pairwise(rows):
        assert before["end_ns"] == after["start_ns"]
    assert all(row["end_ns"] > row["start_ns"] for row in rows)


def check_kernels_in_traced_windows(run: Run) -> None:
    starts = run.trace.column("kernels", "start_ns")
    inside = np.zeros(len(starts), bool)
    for begin, end in windows_of(run, "traced"):
        # A window begins when all is switched on, a millisecond of ctypes calls after the first kernel may be seen.
        inside |= (starts >= begin - 5_000_000) & (starts <= end + EDGE_NS)
    assert inside.all()


def test_duty_windows_part_the_programs_life(lab: Lab) -> None:
    run = lab.record(
        """
        import cupy, time
        cupy.generate(2000)
        time.sleep(1.3)
        """,
        window=(0.2, 0.2),
    )
    assert run.code == 0
    check_partition(run)
    check_kernels_in_traced_windows(run)
    states = [state for state, _ in run.windows()]
    assert states[:5] == ["traced", "off", "traced", "off", "traced"]
    assert {reason for state, reason in run.windows() if state == "off"} == {"--window"}
    spans = [end - begin for begin, end in windows_of(run, "traced")[:-1]]
    assert min(abs(span - 200_000_000) for span in spans) < 50_000_000, spans
    # About half of the work was seen. At an edge a launch may be noted without its kernel, or the other way round.
    kernels, calls = (set(run.trace.column(t, "correlation_id").tolist()) for t in ("kernels", "runtime_calls"))
    assert len(kernels ^ calls) <= len(states)
    traced = sum(end - begin for begin, end in windows_of(run, "traced"))
    life = sum(w["end_ns"] - w["start_ns"] for w in run.trace.table("windows").to_pylist())
    assert len(kernels) / max(kernels) == pytest.approx(traced / life, rel=0.4)


@pytest.mark.parametrize(
    ("window", "max_seconds", "windows_min"),
    [((0.05, 0.05), 0.0, 20), ((0.2, 0.15), 1.6, 3)],  # more buffers than there are; too few to be had back before
)
def test_a_kernel_that_never_ends_holds_back_no_other_for_long(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, window: tuple[float, float], max_seconds: float, windows_min: int
) -> None:
    """libcupti hands over buffers in their order, and one that was in flight when recording paused may get no end."""
    monkeypatch.setenv("FAKE_CUPTI_FAIL", "hold")
    run = lab.record(
        """
        import cupy, time
        cupy.generate(2000)
        time.sleep(4)
        """,
        window=window,
        max_seconds=max_seconds,
    )
    assert run.code == 0
    check_partition(run)
    check_kernels_in_traced_windows(run)
    assert run.trace.manifest.collectors["activity"].dropped_count == 0
    seen = run.trace.column("kernels", "start_ns")
    traced = windows_of(run, "traced")[:-1]
    assert len(traced) >= windows_min
    assert all(((seen >= begin) & (seen < end)).any() for begin, end in traced)


def test_max_seconds(lab: Lab) -> None:
    run = lab.record(
        """
        import cupy, time
        cupy.launch(100)
        time.sleep(0.8)
        cupy.launch(100)
        """,
        max_seconds=0.4,
    )
    assert run.code == 0
    check_whole(run, 100)
    check_partition(run)
    assert run.windows() == [("traced", ""), ("stopped", "--max-seconds 0.4 reached")]
    (traced,) = windows_of(run, "traced")
    assert 0.38e9 <= traced[1] - traced[0] < 0.6e9
    assert run.processes[0]["status"] == "partial"


def test_max_bytes(lab: Lab) -> None:
    run = lab.record(
        """
        import cupy, time
        for _ in range(20):
            cupy.launch(1000)
            time.sleep(0.05)
        """,
        max_bytes=1_500_000,
    )
    assert run.code == 0
    # 256 bytes a launch and its kernel: 5859 of them fit, in pieces of one flush.
    assert 2000 <= run.kernels <= 5859
    check_whole(run, run.kernels)
    assert run.windows()[-1] == ("stopped", "--max-bytes 1500000 reached")
    check_partition(run)


def test_capture_range(lab: Lab) -> None:
    run = lab.record(
        """
        import cupy, time
        cupy.launch_distinct(100)
        cupy.profiler(1)
        cupy.launch(10)
        cupy.profiler(0)
        time.sleep(0.15)
        cupy.launch_distinct(100)
        cupy.profiler(1)
        cupy.launch(20)
        cupy.profiler(0)
        cupy.launch(100)
        """,
        capture_range=True,
    )
    assert run.code == 0
    check_whole(run, 30)
    check_partition(run)
    assert run.windows() == [
        ("off", "before cudaProfilerStart"),
        ("traced", ""),
        ("off", "after cudaProfilerStop"),
        ("traced", ""),
        ("off", "after cudaProfilerStop"),
    ]


def test_capture_range_called_through_torch_is_followed_outside_of_cupti(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another profiler holds CUPTI's subscription, without which its callbacks cannot be had."""
    monkeypatch.setenv("FAKE_CUPTI_FAIL", "subscribe")
    run = lab.record(
        """
        import torch
        torch.cuda.launch(50)
        torch._C._cudart.cudaProfilerStart()
        torch.cuda.launch(10)
        torch._C._cudart.cudaProfilerStop()
        torch.cuda.launch(50)
        """,
        capture_range=True,
    )
    assert run.code == 0
    check_whole(run, 10)
    assert run.windows() == [
        ("off", "before cudaProfilerStart"),
        ("traced", ""),
        ("off", "after cudaProfilerStop"),
    ]


def test_capture_range_that_never_begins(lab: Lab) -> None:
    run = lab.record("import cupy, time; cupy.launch(100); time.sleep(0.2)", capture_range=True)
    assert run.code == 0
    assert run.kernels == 0
    assert run.windows() == [("off", "before cudaProfilerStart")]


def test_capture_range_with_duty_windows(lab: Lab) -> None:
    """Neither may switch on what the other has switched off."""
    run = lab.record(
        """
        import cupy, time
        cupy.generate(2000)
        time.sleep(0.6)
        cupy.profiler(1)
        time.sleep(0.8)
        cupy.profiler(0)
        time.sleep(0.5)
        """,
        capture_range=True,
        window=(0.1, 0.1),
    )
    check_partition(run)
    check_kernels_in_traced_windows(run)
    begin = next(w[0] for w in windows_of(run, "traced"))
    assert begin >= 0.55e9
    assert max(w[1] for w in windows_of(run, "traced")) - begin < 1.0e9
    assert len(windows_of(run, "traced")) >= 3


def test_a_torch_profiler_in_the_program_gets_its_events_and_its_window(lab: Lab) -> None:
    run = lab.record("""
        import time, torch
        torch.cuda.launch(100)
        for n in (30, 40):
            with torch.autograd.profiler.profile() as profile:
                torch.cuda.launch(n)
                time.sleep(0.25)  # our thread must not flush the guest's buffers away
                torch.cuda.launch(n)
            assert profile.kernels_count == 2 * n, profile.kernels_count
            torch.cuda.launch(100)
        """)
    assert run.code == 0
    check_whole(run, 300, launches_lost=200)
    check_partition(run)
    notes = [note for note in run.trace.manifest.notes if "recording launches" in note]
    assert len(notes) == 1
    assert run.windows() == [
        ("traced", ""),
        ("yielded", "torch.profiler"),
        ("traced", ""),
        ("yielded", "torch.profiler"),
        ("traced", ""),
    ]


def test_torchs_monitor_stays_a_guest_beyond_a_profilers_session(lab: Lab) -> None:
    run = lab.record("""
        import torch
        from torch.autograd import profiler
        from torch.profiler._cupti_monitor import CuptiMonitor
        torch.cuda.launch(100)
        monitor = CuptiMonitor()
        monitor.start()
        torch.cuda.launch(10)
        profiler._prepare_profiler(None, {"ProfilerActivity.CUDA"})
        torch.cuda.launch(10)
        try:
            profiler._disable_profiler()  # of the session; the fake ends the guest, too: count from here again
        finally:
            torch.cuda.launch(10)
        monitor.stop()
        torch.cuda.launch(100)
        """)
    assert run.code == 0
    check_whole(run, 200, launches_lost=100)
    assert [state for state, _ in run.windows()] == ["traced", "yielded", "yielded", "yielded", "traced"]
    assert run.windows()[2] == ("yielded", "torch's CuptiMonitor, torch.profiler")


def test_a_guest_before_cuda_is_used(lab: Lab) -> None:
    """torch.profiler around the whole program: ours begins when it has ended."""
    run = lab.record("""
        import torch
        with torch.autograd.profiler.profile() as profile:
            torch.cuda.launch(30)
        assert profile.kernels_count == 30
        torch.cuda.launch(100)
        """)
    assert run.code == 0
    check_whole(run, 100, launches_lost=100)
    assert run.windows() == [("yielded", "torch.profiler"), ("traced", "")]
    assert run.trace.table("devices").num_rows == 1


def test_a_guest_that_only_looks_at_the_cpu_is_no_guest(lab: Lab) -> None:
    run = lab.record("""
        import torch
        from torch.autograd import profiler
        torch.cuda.launch(10)
        profiler._prepare_profiler(None, {"ProfilerActivity.CPU"})
        torch.cuda.launch(10)
        """)
    check_whole(run, 20)
    assert run.windows() == [("traced", "")]


def test_a_program_that_ends_inside_its_profiler(lab: Lab) -> None:
    run = lab.record("""
        import torch
        torch.cuda.launch(100)
        torch.autograd.profiler.profile().__enter__()
        torch.cuda.launch(50)
        """)
    assert run.code == 0
    check_whole(run, 100)
    assert [state for state, _ in run.windows()] == ["traced", "yielded"]
    assert run.processes[0]["status"] == "traced"


def test_stopped_while_a_guest_records(lab: Lab) -> None:
    """The budget ends inside the guest's session: it keeps its events, and we do not come back."""
    run = lab.record(
        """
        import time, torch
        torch.cuda.launch(100)
        with torch.autograd.profiler.profile() as profile:
            torch.cuda.launch(30)
            time.sleep(0.6)
            torch.cuda.launch(30)
        assert profile.kernels_count == 60, profile.kernels_count
        with torch.autograd.profiler.profile() as profile:
            torch.cuda.launch(30)
        assert profile.kernels_count == 30, profile.kernels_count
        torch.cuda.launch(100)
        """,
        max_seconds=0.3,
    )
    assert run.code == 0
    check_whole(run, 100)
    assert run.windows() == [
        ("traced", ""),
        ("yielded", "torch.profiler"),
        ("stopped", "--max-seconds 0.3 reached"),
    ]


def test_conditions_set_by_many_threads_at_once(lab: Lab) -> None:
    run = lab.record("""
        import cupy, random, threading, time
        from _spikeprof import hooks
        agent = hooks.the_agent()
        def toggle(condition, seed):
            choose = random.Random(seed)
            for _ in range(100):
                agent.set_condition(condition, "test" if choose.random() < 0.5 else None)
                cupy.launch(5)
            agent.set_condition(condition, None)
        threads = [
            threading.Thread(target=toggle, args=(condition, n))
            for n, condition in enumerate(["yielded", "range", "off", "clean"] * 2)
        ]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert agent._state == "traced"
        cupy.launch_distinct(77)
        """)
    assert run.code == 0
    check_partition(run)
    names = run.trace.table("kernels").column("name").cast("string").to_pylist()
    assert len(set(names)) == 77
    assert all(name.startswith("fake_gemm_") for name in names)
    assert run.trace.manifest.collectors["activity"].state == "ok"


def test_graph_nodes_are_noted(lab: Lab) -> None:
    run = lab.record("import cupy; cupy.capture(1500); cupy.launch(1)")
    nodes = run.trace.table("graph_nodes").to_pylist()
    assert len(nodes) == 3000
    clones = {n["graph_node_id"]: n["source_node_id"] for n in nodes if n["source_node_id"]}
    assert clones == {n + 1000000: n for n in range(1, 1501)}
    assert {n["graph_id"] for n in nodes} == {3}


def test_no_graph_nodes_when_not_asked_for(lab: Lab) -> None:
    run = lab.record("import cupy; cupy.capture(10); cupy.launch(1)", graph_nodes=False)
    assert "graph_nodes" not in run.trace or run.trace.table("graph_nodes").num_rows == 0


def test_clean_steps_alternate_with_traced_ones(lab: Lab) -> None:
    run = lab.record(
        """
        import torch
        class Model(torch.nn.Module):
            def forward(self, n):
                torch.cuda.launch(n)
                return n
        model = Model()
        for _ in range(60):
            assert model(10) == 10
        assert torch.nn.Module.__call__.__name__ == "__call__"
        """,
        clean_steps=10,
    )
    assert run.code == 0
    steps = run.trace.table("steps").to_pylist()
    clean = [s for s in steps if not s["traced"]]
    assert len(clean) >= 10
    assert len([s for s in steps if s["traced"]]) >= 10
    # Five to warm up, blocks of six; 12 of 60 steps were left untraced.
    assert run.kernels == 480
    assert [state for state, _ in run.windows()] == ["traced", "clean", "traced", "clean", "traced"]
    check_partition(run)
    for begin, end in windows_of(run, "clean"):
        assert sum(begin <= s["start_ns"] < end for s in clean) == 6
