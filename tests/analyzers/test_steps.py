"""steps on traces small enough to work out by hand, and on the two recordings of this repository. Times in ns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.derived.steps import DeviceSteps, find_steps
from spikeprof.analyzers.runner import run_one
from spikeprof.analyzers.steps import Steps
from spikeprof.profiler.store import read_trace
from spikeprof.profiler.trace import Trace

SAMPLES = Path(__file__).parents[2] / "sample_traces"
STEP = ("embed", "norm", "gemm", "norm", "gemm", "head", "argmax")
Rows = list[dict[str, Any]]


def step(at: int, names: tuple[str, ...] = STEP, length: int = 10, every: int = 12, **more: Any) -> Rows:
    """Kernels of one length, begun one after another."""
    return [
        {"name": name, "start_ns": at + i * every, "end_ns": at + i * every + length, **more}
        for i, name in enumerate(names)
    ]


def traced(*parts: Rows, **tables: Any) -> Trace:
    kernels = sorted((row for part in parts for row in part), key=lambda row: row["start_ns"])
    return tiny.trace(kernels=kernels, **{"memory_ops": [], **tables})


def only(trace: Trace) -> DeviceSteps:
    (found,) = find_steps(trace)
    return found


def metrics(result: Result) -> dict[str, Any]:
    return {m.name: m.value for m in result.metrics}


def finding(result: Result, rule: str) -> dict[str, float]:
    return {e.metric: e.value for f in result.findings if f.rule == rule for e in f.evidence}


# -- found by their period -----------------------------------------------------------------------------------------


def test_steps_are_found_with_begin_end_and_kernels():
    found = only(traced(*(step(100 * i) for i in range(5))))
    assert found.source == "found"
    assert found.begin_ns.tolist() == [0, 100, 200, 300, 400]
    assert found.end_ns.tolist() == [82, 182, 282, 382, 482]  # six kernels begun every 12, the last one lasts 10
    assert found.kernels.tolist() == [7] * 5
    assert found.follows.tolist() == [False, True, True, True, True]
    assert found.confidence == 1
    assert set(found.kind) == {"unknown"}


def test_numbers_of_steps_by_hand():
    result = Steps().analyze(traced(*(step(100 * i) for i in range(4)), step(400, length=12, every=14)))
    assert metrics(result) == {
        "steps_count": 5,
        "explained_share": 1.0,
        # 4 steps of 82 with 70 of work, and one of 96 with 84
        "steps_busy_share": (4 * 70 + 84) / (4 * 82 + 96),
        "wait_ns": 18,
        "steady_begin_ns": 0,
        "start_up_share": 0.0,
    }
    kinds = {name: values[0] for name, values in result.tables["kinds"].items()}
    assert kinds["kind"] == "unknown"
    assert (kinds["p50_ns"], kinds["p90_ns"], kinds["p99_ns"], kinds["max_ns"]) == (82, 96, 96, 96)
    assert kinds["jitter_ns"] == 14 / 4  # of four changes three are none
    assert (kinds["step_idle_ns"], kinds["step_kernels_count"]) == (12, 7)


def test_start_up_and_a_varying_kernel_lower_the_confidence():
    start_up = [{"name": f"init_{i}", "start_ns": i * 10, "end_ns": i * 10 + 5} for i in range(6)]
    steps = [step(1000 + 100 * i) for i in range(4)]
    steps[2][3]["name"] = "norm_of_another_kind"
    found = only(traced(start_up, *steps))
    assert found.begin_ns.tolist() == [1000, 1100, 1200, 1300]
    assert found.match.tolist() == [1, 1, 6 / 7, 1]
    assert found.confidence == (4 * 7 - 1) / (4 * 7 + 6)


def test_a_rare_kernel_makes_no_longer_step_and_layers_no_shorter_ones():
    layers = ("embed", *("norm", "qkv", "rope", "out") * 6, "head", "argmax")
    rows = [step(1000 * i, layers if i % 4 else ("evict", *layers)) for i in range(24)]
    found = only(traced(*rows))
    assert len(found.begin_ns) == 24
    assert Counter(found.kernels.tolist()) == {27: 18, 28: 6} or Counter(found.kernels.tolist()) == {27: 24}


def test_names_alike_with_other_grids_are_one_step_as_the_context_grows():
    rows = [step(100 * i) for i in range(8)]
    for number, row in enumerate(rows):
        row[1]["grid_x"] = 10 + number
    found = only(traced(*rows))
    assert (len(found.begin_ns), found.confidence) == (8, 1)


def test_where_names_are_all_the_same_grids_tell_the_step():
    rows = [step(100 * i, ("triton_",) * 5) for i in range(6)]
    for row in rows:
        for place, kernel in enumerate(row):
            kernel["grid_x"] = place + 1
    assert only(traced(*rows)).begin_ns.tolist() == [0, 100, 200, 300, 400, 500]


@pytest.mark.parametrize("power", [2, 3])
def test_any_sequence_that_repeats_is_found(power: int):
    """Powers modulo a prime: squares run back after half the period of 47, so that both halves hold the same."""
    found = only(traced(step(0, tuple(f"kernel_{i**power % 47}" for i in range(300)))))
    assert set(np.diff(found.begin_ns).tolist()) == {47 * 12}


def test_a_pause_cuts_steps_and_halves_are_none():
    windows = [
        {"start_ns": 0, "end_ns": 450, "state": "traced"},
        {"start_ns": 450, "end_ns": 800, "state": "clean"},
        {"start_ns": 800, "end_ns": 2000, "state": "traced"},
    ]
    rows = [*(step(100 * i) for i in range(4)), step(400)[:3], *(step(800 + 100 * i) for i in range(5))]
    found = only(traced(*rows, windows=windows))
    assert found.begin_ns.tolist() == [0, 100, 200, 300, 800, 900, 1000, 1100, 1200]
    assert found.follows.tolist() == [False, True, True, True, False, True, True, True, True]


def test_a_step_of_which_the_recording_missed_the_beginning_is_none():
    found = only(traced(step(0)[4:], *(step(100 * i) for i in range(1, 6))))
    assert found.begin_ns.tolist() == [100, 200, 300, 400, 500]


def test_what_repeats_once_per_attention_is_a_layer():
    layer = ("norm", "qkv", "flash_fwd_kernel", "out")
    found = only(traced(step(0, ("embed", *layer * 8, "head", "argmax"))))
    assert (found.source, found.confidence, len(found.begin_ns)) == ("", None, 0)
    assert "a layer" in found.reason


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (step(0, ("gemm",) * 50), "each kernel is like the one before it"),
        (step(0, STEP), "no kernel recurs 4 times"),
    ],
)
def test_where_none_are_found_it_is_not_measured_and_said_why(rows: Rows, reason: str):
    result = run_one(traced(rows), Steps())
    assert result.status == "not_measured"
    assert reason in result.reason
    assert "spikeprof.step" in result.collect_with
    assert not result.findings


def test_no_kernels_is_not_applicable():
    assert Steps().analyze(traced()).status == "not_applicable"


def test_a_process_without_steps_limits_the_answer():
    result = Steps().analyze(
        traced(*(step(100 * i) for i in range(5)), step(3, ("gemm",) * 9, rank=1, device=1), windows=[])
    )
    assert result.status == "ok"
    assert result.reason == "no steps on GPU 1 (process 1): each kernel is like the one before it"
    assert metrics(result)["explained_share"] == 35 / 44
    assert result.tables["processes"]["steps_from"] == ["found", "none"]


# -- prefill and decode --------------------------------------------------------------------------------------------


def test_larger_grids_of_the_same_kernels_are_prefill():
    names = ("embed", *("norm", "attention", "gemm") * 2, "argmax")
    rows = [step(200 * i, names, grid_x=1) for i in range(9)]
    for kernel in rows[0] + rows[5]:
        kernel["grid_x"] = 64 if kernel["name"] in ("norm", "embed") else 1
    kinds = only(traced(*rows)).kind
    assert [i for i, kind in enumerate(kinds) if kind == "prefill"] == [0, 5]
    assert Counter(kinds)["decode"] == 7


def test_without_attention_sizes_say_nothing():
    rows = [step(200 * i, grid_x=64 if i == 0 else 1) for i in range(9)]
    assert set(only(traced(*rows)).kind) == {"unknown"}


def test_names_of_attention_kernels_say_it_alone():
    names = ("embed", *("norm", "BatchDecodeWithPagedKVCacheKernel", "gemm") * 2, "argmax")
    assert set(only(traced(*(step(200 * i, names) for i in range(6)))).kind) == {"decode"}


def test_a_prefill_between_replays_of_a_graph_is_found():
    names = ("embed", *("norm", "attention", "gemm") * 4, "argmax")
    replays = [
        step(1000 + 200 * i, names, graph_id=2, correlation_id=i + 1) for i in range(10) if i != 4
    ]  # fmt: skip
    prefill = step(1000 + 800, names, grid_x=64)
    found = only(traced([{"name": "fill", "start_ns": 5, "end_ns": 9}], prefill, *replays))
    assert found.begin_ns.tolist() == [1000 + 200 * i for i in range(10)]
    assert found.kind == ("decode",) * 4 + ("prefill",) + ("decode",) * 5
    assert found.confidence == 140 / 141


def test_replays_of_graphs_for_several_batch_sizes_are_all_steps():
    names = ("embed", *("norm", "gemm") * 10, "argmax")
    rows = [step(500 * i, names, graph_id=2 + i * 7 % 3, correlation_id=i + 1) for i in range(12)]
    found = only(traced(*rows))
    assert (len(found.begin_ns), found.confidence) == (12, 1)


# -- marked by the program -----------------------------------------------------------------------------------------


def marks(*rows: tuple[int, int, str, str], thread: int = 1) -> Rows:
    return [
        {"kind": "step", "name": name, "start_ns": a, "end_ns": b, "thread_id": thread, "attributes": text}
        for a, b, name, text in rows
    ]


def launched(*pairs: tuple[int, int], thread: int = 1) -> tuple[Rows, Rows]:
    """Kernels of 10 ns at the second times, launched at the first ones."""
    kernels = [{"start_ns": b, "end_ns": b + 10, "correlation_id": i + 1} for i, (_, b) in enumerate(pairs)]
    calls = [
        {"start_ns": a, "end_ns": a + 1, "correlation_id": i + 1, "thread_id": thread, "name": "cudaLaunchKernel"}
        for i, (a, _) in enumerate(pairs)
    ]
    return kernels, calls


def test_marked_steps_hold_what_was_launched_in_them_whenever_it_ran():
    kernels, calls = launched((10, 100), (20, 120), (60, 140), (70, 160), (95, 200))
    ranges = marks((5, 50, "prefill", ""), (25, 30, "inner", ""), (55, 90, "decode", ""))
    found = only(traced(kernels, runtime_calls=calls, ranges=ranges))
    assert found.source == "marked"
    assert found.kind == ("prefill", "decode")
    assert (found.begin_ns.tolist(), found.end_ns.tolist()) == ([100, 140], [130, 170])
    assert (found.kernels.tolist(), found.confidence) == ([2, 2], 4 / 5)  # the call at 95 lies in none
    assert found.follows.tolist() == [False, True]


def test_the_kind_of_a_step_without_a_name_is_told_by_its_tokens():
    texts = [
        '{"llm.batch_size": 4, "llm.token_usage.total": 4}',
        '{"llm.batch_size": 4, "llm.token_usage.total": 512}',
        '{"llm.batch_size": 4}',
        "[torn",
    ]
    kernels, calls = launched(*((100 * i + 10, 100 * i + 20) for i in range(4)))
    ranges = marks(*((100 * i, 100 * i + 90, "step", text) for i, text in enumerate(texts)))
    found = only(traced(kernels, runtime_calls=calls, ranges=ranges))
    assert found.kind == ("decode", "prefill", "unknown", "unknown")


def test_kernels_of_a_thread_that_marks_nothing_belong_to_the_only_one_that_does():
    kernels, calls = launched((10, 100), (60, 140), thread=2)
    ranges = marks((5, 50, "step", ""), (55, 90, "step", ""))
    assert only(traced(kernels, runtime_calls=calls, ranges=ranges)).kernels.tolist() == [1, 1]
    two = sorted(ranges + marks((5, 90, "step", ""), thread=3), key=lambda row: row["start_ns"])
    assert only(traced(kernels, runtime_calls=calls, ranges=two)).source == ""


def test_steps_of_torch_profiler_are_marked_ones():
    kernels, calls = launched((10, 100), (60, 140))
    ranges = [{**r, "kind": "user", "name": f"ProfilerStep#{i}"} for i, r in
              enumerate(marks((5, 50, "", ""), (55, 90, "", "")))]  # fmt: skip
    assert only(traced(kernels, runtime_calls=calls, ranges=ranges)).kind == ("unknown", "unknown")


def test_kinds_beyond_the_first_are_taken_together():
    kernels, calls = launched(*((100 * i + 10, 100 * i + 20) for i in range(30)))
    ranges = marks(*((100 * i, 100 * i + 90, f"kind_{i}" if i < 20 else "kind_3", "") for i in range(30)))
    table = Steps().analyze(traced(kernels, runtime_calls=calls, ranges=ranges)).tables["kinds"]
    assert len(table["kind"]) == 13
    assert dict(zip(table["kind"], table["steps_count"], strict=True))["kind_3"] == 11
    assert dict(zip(table["kind"], table["steps_count"], strict=True))["other"] == 20 - 12


# -- rules ---------------------------------------------------------------------------------------------------------


def test_slow_steps_with_more_idle_time_are_a_tail_of_the_host():
    rows = [step(1000 * i, every=40 if i in (25, 33) else 12) for i in range(40)]
    result = Steps().analyze(traced(*rows))
    (found,) = result.findings
    assert found.rule == "step-tail"
    assert "host" in found.recommendation
    evidence = finding(result, "step-tail")
    assert evidence["p99_over_p50_ratio"] == 250 / 82  # 6 × 40 + 10 over 6 × 12 + 10
    assert (evidence["slow_steps_count"], evidence["more_idle_ns"], evidence["more_busy_ns"]) == (2, 168, 0)
    assert found.saving.upper_bound_ns == 2 * 168
    assert result.tables["slowest"]["start_ns"][:2] == [25_000, 33_000]


def test_slow_steps_with_more_work_are_a_tail_of_kernels():
    rows = [step(1000 * i, length=30 if i == 25 else 10, every=32 if i == 25 else 12) for i in range(40)]
    result = Steps().analyze(traced(*rows))
    assert finding(result, "step-tail")["more_busy_ns"] == 140
    assert "kernels" in result.findings[0].recommendation


def test_steps_that_grow_drift():
    rows = [step(10_000 * i, length=100 + 2 * i, every=400) for i in range(50)]
    result = Steps().analyze(traced(*rows))
    assert not result.findings  # 2,500 to 2,598: 4 %
    rows = [step(10_000 * i, length=100 + 10 * i, every=110 + 10 * i) for i in range(50)]
    evidence = finding(result := Steps().analyze(traced(*rows)), "step-drift")
    assert evidence["first_steps_ns"] == 760 + 70 * 4.5  # the median of steps 0 to 9
    assert evidence["last_steps_ns"] == 760 + 70 * 44.5
    assert evidence["busy_grown_ns"] == 70 * 40
    assert evidence["drift_correlation_ratio"] == pytest.approx(1)
    (found,) = result.findings  # and no tail: no step is far from those around it
    assert "--between" in found.recommendation


def test_start_up_names_the_command_for_the_steady_part():
    slow = [step(i * 1_000_000, every=9_000) for i in range(4)]
    steady = [step(4_000_000 + i * 10_000) for i in range(60)]
    windows = [{"start_ns": 0, "end_ns": 5_000_000, "state": "traced"}]
    trace = traced(*slow, *steady, windows=windows)
    result = Steps().analyze(trace)
    (found,) = result.findings
    assert found.rule == "start-up"
    assert "spikeprof analyze TRACE --between 0.004000,0.004591 " in found.recommendation
    assert finding(result, "start-up")["start_up_share"] == 4_000_000 / 4_590_082
    part = trace.narrowed(4_000_000, 4_591_000)
    assert metrics(Steps().analyze(part))["steps_count"] == 60
    assert not Steps().analyze(part).findings


def test_without_copies_busy_time_is_not_known():
    result = Steps().analyze(tiny.trace(kernels=[row for i in range(5) for row in step(100 * i)]))
    assert metrics(result)["steps_busy_share"] is None
    assert result.tables["kinds"]["busy_share"] == [None]


# -- recordings ----------------------------------------------------------------------------------------------------


def kernels_named(trace: Trace, part: str) -> int:
    codes, labels = trace.codes("kernels", "name")
    return int(np.isin(codes, [i for i, label in enumerate(labels) if part in label]).sum())


def test_the_eager_recording():
    """``--tokens 96``: 4 tokens to warm up and 96, so 2 prefills and 3 + 95 decodes, of which 24 were left clean."""
    trace = read_trace(SAMPLES / "h200_eager_decode")
    found = only(trace)
    clean = sum(not traced for traced in trace.table("steps").column("traced").to_pylist())
    assert clean == 24
    assert Counter(found.kind) == {"prefill": 2, "decode": 3 + 95 - clean}
    assert kernels_named(trace, "ArgMax") == len(found.begin_ns)  # one per token
    # The pause ends behind a step's first kernel, four times.
    assert Counter(found.kernels.tolist()) == {701: 72, 700: 4}
    # 53,278 kernels: the 76 steps less 4, 4 first ones of steps in a pause, 2 that join the tokens of a generation.
    assert 53_278 == 76 * 701 - 4 + 4 + 2
    assert found.confidence > 0.99
    steps = trace.table("steps").to_pylist()
    for row in (row for row in steps if row["traced"]):  # timed by CUDA events
        later = found.begin_ns[found.begin_ns > row["start_ns"] - 1_000_000]
        assert later[0] - row["start_ns"] < 1_500_000


def test_the_graph_recording():
    """``--tokens 160``: 3 + 159 replays and 2 prefills; 35 replays and a prefill were left clean.

    Two more forwards ran on a stream of their own before the capture: too few there for a period.
    """
    trace = read_trace(SAMPLES / "h200_graph_decode")
    found = only(trace)
    clean = Counter(row["kind"] for row in trace.table("steps").to_pylist() if not row["traced"])
    assert clean == {"graph_replay": 35, "forward": 1}
    assert Counter(found.kind) == {"prefill": 2 - 1, "decode": 3 + 159 - 35}
    assert kernels_named(trace, "ArgMax") == len(found.begin_ns) + 2
    assert Counter(found.kernels.tolist()) == {781: 127, 701: 1}
    assert found.confidence > 0.98


def test_the_recording_of_the_engine_with_graphs():
    """``--tokens 160``: 3 + 159 replays, of which 35 were left clean; decode attention names itself."""
    trace = read_trace(SAMPLES / "h200_engine_graph")
    found = only(trace)
    clean = sum(not row["traced"] for row in trace.table("steps").to_pylist() if row["kind"] == "graph_replay")
    assert Counter(found.kind) == {"decode": 3 + 159 - clean}
    assert found.confidence > 0.97


def test_a_long_recording_takes_bounded_memory():
    from big import STEP_KERNELS, big_trace, measured

    trace = big_trace(200 * STEP_KERNELS)
    find_steps(trace)
    _, mebibytes = measured(lambda: find_steps(trace))
    assert mebibytes < 60
    assert len(only(trace).begin_ns) == 200
