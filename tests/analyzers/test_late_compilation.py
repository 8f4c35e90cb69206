"""late-compilation on traces small enough to work out by hand, and on a recording whose pauses were looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from spikeprof.analyzers.base import Finding, Result
from spikeprof.analyzers.late_compilation import LateCompilation
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.importers import open_trace

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
MS = 1_000_000


def launches(*rows: tuple[int, str], rank: int = 0, thread: int = 5, first_id: int = 1) -> dict[str, list[Any]]:
    """Launches of 1 ms at these ms, and their kernels of 1 ms right after them."""
    calls, kernels = [], []
    for i, (at, name) in enumerate(rows, first_id):
        common = {"rank": rank, "correlation_id": i}
        calls.append({**common, "thread_id": thread, "start_ns": at * MS, "end_ns": (at + 1) * MS, "name": "cuLaunch"})
        kernels.append({**common, "name": name, "start_ns": (at + 1) * MS, "end_ns": (at + 2) * MS})
    return {"runtime_calls": calls, "kernels": kernels}


def load(at: int, rank: int = 0, thread: int = 5, kind: str = "lazy_function_loading") -> dict[str, Any]:
    return {"rank": rank, "thread_id": thread, "kind": kind, "start_ns": at * MS, "end_ns": (at + 1) * MS}


def asked(overheads: list[dict[str, Any]], *parts: dict[str, list[Any]], **more: Any) -> Result:
    tables = {
        name: sorted((row for part in parts for row in part[name]), key=lambda row: row["start_ns"])
        for name in ("runtime_calls", "kernels")
    }
    return run_one(tiny.trace(duration_ns=10_000 * MS, overheads=overheads, **tables, **more), LateCompilation())


def the_finding(result: Result) -> Finding:
    (finding,) = result.findings
    return finding


def values(finding: Finding) -> dict[str, Any]:
    return {evidence.metric: evidence.value for evidence in finding.evidence}


PLAIN = launches((10, "a"), (20, "b"), (30, "a"), (430, "a"), (450, "c"), (700, "d"))


def test_a_kernel_that_is_made_again_is_told_with_what_it_cost() -> None:
    result = asked([load(9), load(428), load(698)], PLAIN)
    # From the end of the call at 30 ms to the one at 430, and from 451 to 700. "a" had run, "d" had not.
    assert result.tables["compile-stalls"] == {
        "start_ns": [31 * MS, 451 * MS],
        "stall_ns": [399 * MS, 249 * MS],
        "kernel": ["a", "d"],
        "rank": [0, 0],
        "made_again": [True, False],
        "late": [True, False],
    }
    assert {m.name: m.value for m in result.metrics} == {
        "loads_count": 3, "stalls_count": 2, "stalls_ns": 648 * MS, "late_stalls_count": 1, "late_stalls_ns": 399 * MS,
    }  # fmt: skip
    finding = the_finding(result)
    assert (finding.rule, finding.scope, finding.severity) == ("late-compile", {"kernel": "a"}, "warning")
    assert values(finding) == {
        "late_stalls_count": 1, "late_stalls_ns": 399 * MS, "longest_stall_ns": 399 * MS, "kernel_stalls_ns": 399 * MS,
        "made_again_count": 1, "kernels_count": 1,
    }  # fmt: skip
    assert "do_not_specialize" in finding.recommendation
    assert finding.saving is not None
    assert finding.saving.upper_bound_ns == 399 * MS


def test_where_steps_are_known_late_is_what_the_steady_part_waited_for() -> None:
    """Forty steps of 20 ms; the first takes 400 ms, the thirtieth 300 ms for a kernel that is new."""
    rows, at = [], 0
    for step in range(40):
        at += 400 if step == 0 else 300 if step == 30 else 20
        rows += [(at + 2 * i, name) for i, name in enumerate(["x" if step == 30 else "a", "b", "c", "d"])]
    first, late = rows[0][0], rows[120][0]
    result = asked([load(first - 1), load(late - 2)], launches((0, "w"), *rows))
    assert result.tables["compile-stalls"]["late"] == [False, True]
    finding = the_finding(result)
    assert finding.scope == {"kernel": "x"}
    assert values(finding)["made_again_count"] == 0
    assert "Run every shape once" in finding.recommendation
    assert "do_not_specialize" not in finding.recommendation


@pytest.mark.parametrize(
    ("overheads", "more"),
    [
        ([load(415)], {}),  # long before the launch: whatever made the host wait came after it
        ([load(428, thread=6)], {}),  # of another thread
        ([load(428, rank=1)], {}),
        ([load(428, kind="buffer_flush"), load(9)], {}),
        ([load(30)], {}),  # inside the call before
        ([load(449)], {}),  # 19 ms: less than a compiler takes
        ([load(9)], {}),  # the thread's first call: nothing tells when it began
        ([load(900)], {}),  # no launch follows
        ([load(428)], {"windows": [{"start_ns": 0, "end_ns": 10_000 * MS, "state": "traced"},
                                   {"start_ns": 100 * MS, "end_ns": 110 * MS, "state": "clean"}]}),
    ],
)  # fmt: skip
def test_what_is_no_stall(overheads: list[dict[str, Any]], more: dict[str, Any]) -> None:
    result = asked(overheads, PLAIN, **more)
    assert (result.status, result.reason) == ("ok", "")
    assert result.tables["compile-stalls"]["kernel"] == []


def test_processes_and_threads_wait_each_for_themselves() -> None:
    other = launches((15, "a"), (35, "a"), (500, "a"), rank=1, thread=6, first_id=1)
    third = launches((40, "b"), (540, "b"), thread=7, first_id=100)
    result = asked([load(498, rank=1, thread=6), load(538, thread=7)], PLAIN, other, third)
    table = result.tables["compile-stalls"]
    assert (table["start_ns"], table["rank"], table["kernel"]) == ([36 * MS, 41 * MS], [1, 0], ["a", "b"])


def test_several_loads_before_one_launch_are_one_stall_and_copies_are_none() -> None:
    result = asked([load(426), load(428)], PLAIN)
    assert result.tables["compile-stalls"]["kernel"] == ["a"]
    parts = launches((10, "a"), (430, "a"))
    parts["kernels"].pop()  # what the second call launched is a copy
    copy = {"rank": 0, "correlation_id": 2, "start_ns": 431 * MS, "end_ns": 432 * MS}
    assert asked([load(428)], parts, memory_ops=[copy]).tables["compile-stalls"]["kernel"] == []


def test_without_loads_nothing_is_measured() -> None:
    result = asked([load(9, kind="resource")], PLAIN)
    assert result.status == "not_measured"
    assert "no loading of functions" in result.reason
    assert run_one(tiny.trace(**PLAIN), LateCompilation()).status == "not_measured"
    assert asked([load(5)], {"runtime_calls": [], "kernels": []}).status in ("ok", "not_applicable")


def test_a_recording_in_which_triton_compiled_decode_attention_three_times_and_the_merge_of_its_parts_once() -> None:
    """Pauses of 577, 180, 487 and 513 ms, in which the first token of a page, or of a part, was waited for."""
    result = run_one(open_trace(SAMPLES / "h200_engine_eager"), LateCompilation())
    table = result.tables["compile-stalls"]
    stalls = zip(table["kernel"], table["stall_ns"], table["late"], strict=True)
    late = [(kernel, round(ns / MS)) for kernel, ns, is_late in stalls if is_late]
    assert late == [("_decode_part", 577), ("_merge_parts", 180), ("_decode_part", 487), ("_decode_part", 513)]
    assert the_finding(result).scope == {"kernel": "_decode_part"}


@pytest.mark.parametrize("name", ["h200_engine_graph", "h200_eager_decode", "h200_two_gpus", "h200_owned"])
def test_recordings_that_compile_at_their_start_alone(name: str) -> None:
    result = run_one(open_trace(SAMPLES / name), LateCompilation())
    assert result.status == "ok"
    assert result.metric("loads_count") > 10
