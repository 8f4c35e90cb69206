"""truth on traces small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.libcupti_faults import FAULTS, known_faults, version_number
from spikeprof.analyzers.truth import Truth
from spikeprof.profiler.trace import CollectorNote


def reason(result: Result, name: str) -> str:
    metric = next(m for m in result.metrics if m.name == name)
    assert metric.value is None
    return metric.reason


def rules(result: Result) -> list[str]:
    return [finding.rule for finding in result.findings]


# -- steps ---------------------------------------------------------------------------------------------------------


def steps(*durations: tuple[bool, int], **more: Any) -> list[dict[str, Any]]:
    return [
        {"start_ns": i * 1000, "duration_ns": ns, "traced": traced, "kind": "forward", **more}
        for i, (traced, ns) in enumerate(durations)
    ]


def test_tracing_cost_is_the_ratio_of_medians_without_the_first_step_after_each_change():
    untraced, traced = [(False, 100), (False, 90), (False, 110)], [(True, 106), (True, 104), (True, 111)]
    rows = steps((False, 5000), *untraced, (True, 7000), *traced, (False, 9000), *untraced)
    result = Truth(min_steps_count=3).analyze(tiny.trace(steps=rows))
    assert result.metric("step_untraced_ns") == 100
    assert result.metric("step_traced_ns") == 106
    assert result.metric("tracing_cost_share") == pytest.approx(0.06)
    assert rules(result) == ["tracing-cost-high"]
    assert rules(Truth(min_steps_count=3, max_tracing_cost_share=0.07).analyze(tiny.trace(steps=rows))) == []


def test_a_median_needs_enough_steps():
    rows = steps((False, 1), *[(False, 100)] * 5, (True, 1), *[(True, 100)] * 4)
    result = Truth().analyze(tiny.trace(steps=rows))
    assert result.metric("step_untraced_ns") == 100
    assert reason(result, "step_traced_ns") == "5 untraced and 4 traced steps of one kind, 5 of each are needed"
    assert reason(result, "tracing_cost_share")


def test_steps_of_different_kinds_and_processes_are_not_mixed():
    rows = steps(*[(False, 100)] * 4, *[(True, 110)] * 4, kind="forward")
    rows += steps(*[(False, 9)] * 9, kind="graph_replay")
    rows += steps(*[(False, 102)] * 4, *[(True, 112)] * 4, kind="forward", rank=1)
    rows.sort(key=lambda r: r["start_ns"])
    result = Truth(min_steps_count=6).analyze(tiny.trace(steps=rows))
    # 3 of 100 and 3 of 102; 3 of 110 and 3 of 112: each process loses its own first step after a change
    assert (result.metric("step_untraced_ns"), result.metric("step_traced_ns")) == (101, 111)


def test_no_table_of_steps_says_what_would_measure_it():
    result = Truth().analyze(tiny.trace())
    assert "--clean-steps" in reason(result, "tracing_cost_share")
    assert reason(Truth().analyze(tiny.trace(steps=[])), "step_traced_ns").startswith("0 untraced and 0 traced")


# -- origin, amounts -----------------------------------------------------------------------------------------------


def test_known_origin_is_a_share_of_time():
    kernels = [{"start_ns": 0, "end_ns": 90, "correlation_id": 1}, {"start_ns": 90, "end_ns": 98, "correlation_id": 2}]
    calls = [{"correlation_id": 1, "name": "cudaLaunchKernel"}, {"correlation_id": 2, "rank": 1}]
    copies = [{"start_ns": 98, "end_ns": 100}]
    result = Truth().analyze(tiny.trace(kernels=kernels, memory_ops=copies, runtime_calls=calls))
    assert result.metric("known_origin_share") == 0.9
    assert rules(result) == ["origin-unknown"]
    assert (
        rules(
            Truth(min_known_origin_share=0.9).analyze(
                tiny.trace(kernels=kernels, memory_ops=copies, runtime_calls=calls)
            )
        )
        == []
    )


def test_correlation_ids_made_of_hashes_still_link():
    ids = [2**62 + 5, -(2**61), 7]
    kernels = [{"start_ns": i, "end_ns": i + 1, "correlation_id": c} for i, c in enumerate(ids)]
    calls = [{"correlation_id": c} for c in ids[:2]]
    result = Truth().analyze(tiny.trace(kernels=kernels, memory_ops=[], runtime_calls=calls))
    assert result.metric("known_origin_share") == pytest.approx(2 / 3)


def test_gpu_time_is_a_union_per_device():
    kernels = [{"start_ns": 0, "end_ns": 100}, {"start_ns": 50, "end_ns": 150, "stream": 8}]
    kernels += [{"start_ns": 60, "end_ns": 70, "device": 1}]
    result = Truth().analyze(tiny.trace(kernels=kernels, memory_ops=[{"start_ns": 140, "end_ns": 160}]))
    assert (result.metric("kernels_count"), result.metric("gpu_time_ns")) == (3, 160 + 10)
    assert reason(result, "known_origin_share") == "no launch calls were recorded"


def test_without_kernels_the_origin_of_copies_is_not_taken_for_that_of_all_work():
    copies = [{"start_ns": 0, "end_ns": 10, "correlation_id": 1}]
    calls = [{"start_ns": 0, "end_ns": 1, "correlation_id": 1, "name": "cudaMemcpyAsync"}]
    result = Truth().analyze(tiny.trace(memory_ops=copies, runtime_calls=calls))
    assert reason(result, "known_origin_share") == "kernels were not recorded"


def test_a_call_that_only_waits_launched_nothing():
    kernels = [{"start_ns": 0, "end_ns": 30, "correlation_id": 1}, {"start_ns": 40, "end_ns": 50, "correlation_id": 2}]
    calls = [{"start_ns": i, "end_ns": i + 1, "correlation_id": i + 1, "name": "cudaLaunchKernel"} for i in range(2)]
    calls[1]["name"] = "cudaDeviceSynchronize"
    result = Truth().analyze(tiny.trace(kernels=kernels, memory_ops=[], runtime_calls=calls))
    assert result.metric("known_origin_share") == 0.75


def test_a_table_that_was_not_collected_is_not_zero():
    result = Truth().analyze(tiny.trace())
    assert reason(result, "kernels_count") == "kernels were not recorded"
    damaged = replace(tiny.trace(), damaged={"kernels": "kernels.parquet is damaged: truncated"})
    result = Truth().analyze(damaged)
    assert reason(result, "gpu_time_ns") == "kernels.parquet is damaged: truncated"
    assert result.tables["damaged_tables"] == {
        "table": ["kernels"],
        "reason": ["kernels.parquet is damaged: truncated"],
    }


# -- records -------------------------------------------------------------------------------------------------------


def test_records_are_added_over_collectors():
    collectors = {
        "activity": CollectorNote("degraded", "queue full", 1000, 7, 1, 3, {"end before start": 2, "outside": 1}),
        "nvml": CollectorNote("ok", "", 50, 1),
    }
    result = Truth().analyze(tiny.trace(collectors=collectors))
    counts = {name: result.metric(name) for name in ("dropped_count", "repaired_count", "set_aside_count")}
    assert counts == {"dropped_count": 8, "repaired_count": 1, "set_aside_count": 3}
    assert rules(result) == ["records-dropped", "records-set-aside"]
    assert result.findings[0].evidence[1].value == 1050
    assert result.tables["set_aside"]["reason"] == ["end before start", "outside"]
    assert result.tables["collectors"]["state"] == ["degraded", "ok"]
    assert rules(Truth().analyze(tiny.trace())) == []


# -- windows, processes --------------------------------------------------------------------------------------------


def test_windows_that_were_not_measured():
    rows = [
        {"start_ns": 0, "end_ns": 100, "state": "traced"},
        {"start_ns": 100, "end_ns": 130, "state": "clean", "reason": "clean-steps"},
        {"start_ns": 130, "end_ns": 200, "state": "traced"},
        {"start_ns": 200, "end_ns": 260, "state": "yielded", "reason": "torch.profiler"},
        {"start_ns": 260, "end_ns": 340, "state": "clean", "reason": "clean-steps"},
        {"start_ns": 0, "end_ns": 60, "state": "traced", "rank": 1},
    ]
    result = Truth().analyze(tiny.trace(windows=sorted(rows, key=lambda r: r["start_ns"])))
    assert result.metric("recorded_share") == 230 / 400
    assert result.tables["not_measured_windows"] == {
        "state": ["clean", "yielded"],
        "reason": ["clean-steps", "torch.profiler"],
        "total_ns": [110, 60],
        "windows_count": [2, 1],
    }


def test_an_import_does_not_say_when_it_recorded():
    assert reason(Truth().analyze(tiny.trace()), "recorded_share")
    assert reason(Truth().analyze(tiny.trace(windows=[])), "recorded_share") == "no process used the GPU"


def process(status: str, why: str = "", **more: Any) -> dict[str, Any]:
    return {"status": status, "reason": why, "pid": 42, "command": "python worker.py", **more}


def test_processes_that_were_not_traced():
    rows = [process("traced"), process("not_traced", "python -S", rank=1), process("no_cuda", rank=2)]
    result = Truth().analyze(tiny.trace(processes=rows, kernels=[{"end_ns": 5}], memory_ops=[]))
    (finding,) = result.findings
    assert finding.rule == "process-not-traced"
    assert finding.scope == {"pid": 42, "command": "python worker.py"}
    assert "python -S" in finding.recommendation
    assert result.tables["processes"]["status"] == ["not_traced", "no_cuda"]
    assert (result.metric("processes_count"), result.metric("processes_not_traced_count")) == (3, 1)


@pytest.mark.parametrize("status", ["traced", "partial"])
def test_a_traced_process_without_gpu_work_is_not_an_idle_gpu(status):
    result = Truth().analyze(tiny.trace(processes=[process(status)], kernels=[], memory_ops=[]))
    assert [(f.rule, f.severity) for f in result.findings] == [("nothing-recorded", "critical")]


def test_a_program_without_cuda_is_no_problem():
    assert rules(Truth().analyze(tiny.trace(processes=[process("no_cuda")], kernels=[], memory_ops=[]))) == []


# -- libcupti ------------------------------------------------------------------------------------------------------


def test_versions_of_libcupti():
    assert version_number("130001") == 130001
    assert version_number(" 26 ") == 26
    assert version_number("13.0.85") == 130000
    assert [version_number(text) for text in ("", "unknown", "13")] == [None, None, 13]


def test_a_fault_that_needs_a_pause_is_named_only_after_one():
    def named(*states):
        windows = [{"state": state, "start_ns": i * 10, "end_ns": i * 10 + 10} for i, state in enumerate(states)]
        faults = Truth().analyze(tiny.trace(windows=windows)).tables["libcupti_faults"]
        return [what for what in faults["what"] if "cudaGraphLaunch" in what]

    assert named("traced") == []
    assert named("off", "traced", "stopped") == []
    assert len(named("traced", "clean", "traced")) == 1


def test_known_faults_by_version():
    def touched(version: str) -> set[int]:
        return {fault.fixed_in for fault in known_faults(version)}

    assert touched("130000") == {130001, 130101, 130401}
    assert touched("130001") == {130101, 130401}
    assert touched("130101") == {130401}
    assert touched("26") == {130101, 130401}
    assert touched("130401") == touched("130500") == touched("unreadable") == set()
    assert all(fault.source.startswith("https://") and fault.since < fault.fixed_in for fault in FAULTS)


def test_the_library_that_each_process_used_counts_before_the_manifest():
    rows = [process("traced", libcupti_version="130401"), process("traced", libcupti_version="130101", rank=1)]
    table = Truth().analyze(tiny.trace(processes=rows)).tables["libcupti_faults"]
    assert set(table["libcupti_version"]) == {"130101"}
    assert set(Truth().analyze(tiny.trace()).tables["libcupti_faults"]["libcupti_version"]) == {"130001"}


def in_a_row(count: int = 10) -> list[dict[str, Any]]:
    return [{"start_ns": 10 * i, "end_ns": 10 * i + 8, "correlation_id": i + 1, "name": f"k{i}"} for i in range(count)]


def test_a_kernel_that_outlasts_later_work_of_its_stream_is_told():
    kernels = in_a_row()
    kernels[2]["end_ns"] = 78  # the end of k7
    kernels[5]["end_ns"] = 68  # k5 contains k6 alone: a dependent launch may begin early
    (found,) = (f for f in Truth().analyze(tiny.trace(kernels=kernels)).findings if f.rule == "impossible-durations")
    assert found.scope == {"kernel": "k2", "device": 0}
    assert {e.metric: e.value for e in found.evidence} == {
        "impossible_durations_count": 1,
        "gpu_time_share": 58 / (8 * 8 + 58 + 18),
        "longest_ns": 58,
    }


@pytest.mark.parametrize("column", ["stream", "context_id", "device", "rank", "graph_node_id"])
def test_work_beside_that_of_another_stream_or_in_a_graph_is_possible(column: str):
    kernels = in_a_row()
    kernels[2] |= {"end_ns": 78, column: 3}
    assert "impossible-durations" not in {f.rule for f in Truth().analyze(tiny.trace(kernels=kernels)).findings}


def test_kernels_of_one_call_are_those_of_a_graph_that_the_source_does_not_name():
    kernels = [{**kernel, "correlation_id": 1} for kernel in in_a_row()]
    kernels[2]["end_ns"] = 78
    assert "impossible-durations" not in {f.rule for f in Truth().analyze(tiny.trace(kernels=kernels)).findings}


def test_a_window_that_ends_before_it_starts_covers_nothing():
    windows = [
        {"start_ns": 0, "end_ns": 30, "state": "traced"},
        {"start_ns": 30, "end_ns": 40, "state": "off"},
        {"start_ns": 900, "end_ns": 100, "state": "off"},
    ]
    result = Truth().analyze(tiny.trace(windows=windows))
    assert result.metric("recorded_share") == 0.75
    assert result.tables["not_measured_windows"]["total_ns"] == [10]


def test_work_of_the_time_in_which_recording_was_off_is_no_fault() -> None:
    """A graph that CUPTI goes on recording is set aside by design; a record that ends before it starts is not."""
    reasons = {"recorded while recording was off": 40, "in flight when recording paused": 3}
    expected = CollectorNote("ok", records_count=100, set_aside_count=43, set_aside_reasons=reasons)
    broken = CollectorNote("ok", set_aside_count=45, set_aside_reasons={**reasons, "ends before it starts": 2})
    assert "records-set-aside" not in rules(Truth().analyze(tiny.trace(collectors={"activity": expected})))
    result = Truth().analyze(tiny.trace(collectors={"activity": broken}))
    (finding,) = [f for f in result.findings if f.rule == "records-set-aside"]
    assert finding.evidence[0].value == 2
    assert finding.severity == "warning"
    assert result.metric("set_aside_count") == 45


@pytest.mark.parametrize(("name", "broken", "severity"), [
    ("pm_sampling", 10, "info"), ("pm_sampling", 11, "warning"), ("activity", 1, "warning"), ("kineto", 1, "warning"),
    ("numerics", 1, "warning"), ("ownership", 1, "warning"), ("nvml", 1, "info"),
])  # fmt: skip
def test_few_readings_of_a_sampler_may_go(name: str, broken: int, severity: str) -> None:
    note = CollectorNote("ok", records_count=1000, set_aside_count=broken, set_aside_reasons={"without a time": broken})
    others = {"gpm": CollectorNote("ok", records_count=50)}
    (finding,) = Truth().analyze(tiny.trace(collectors={**others, name: note})).findings
    assert (finding.rule, finding.severity) == ("records-set-aside", severity)
    shares = [e.value for e in finding.evidence if e.metric == "set_aside_samples_share"]
    assert shares == ([broken / 1000] if severity == "info" else [])
    both = {name: note, "activity": CollectorNote("ok", records_count=9, set_aside_count=1, set_aside_reasons={"x": 1})}
    (finding,) = Truth().analyze(tiny.trace(collectors=both)).findings
    assert finding.severity == "warning"
