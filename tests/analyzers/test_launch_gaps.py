"""launch-gaps on traces small enough to work out by hand. Times in ns; one device unless said otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.derived import CLASSES
from spikeprof.analyzers.launch_gaps import LaunchGaps
from spikeprof.profiler.trace import Trace


def kernel(start: int, end: int, id: int = 0, **more: Any) -> dict[str, Any]:
    return {"start_ns": start, "end_ns": end, "correlation_id": id, **more}


def call(start: int, end: int, id: int = 0, name: str = "cudaLaunchKernel", **more: Any) -> dict[str, Any]:
    return {"start_ns": start, "end_ns": end, "correlation_id": id, "name": name, "thread_id": 1, **more}


def trace(kernels: list[dict], calls: list[dict] | None = None, **more: Any) -> Trace:
    tables = {"memory_ops": [], "overheads": [], **more}
    if calls is not None:
        tables["runtime_calls"] = calls
    return tiny.trace(kernels=kernels, **tables)


def classes(result: Result) -> dict[str, int]:
    """The classes that hold any time."""
    found = {name: result.metric(f"idle_{name}_ns") for name in CLASSES}
    return {name: ns for name, ns in found.items() if ns}


def test_time_in_and_after_the_launch_call_is_launch():
    found = LaunchGaps(dispatch_limit_ns=0).analyze(
        trace([kernel(0, 100, 1), kernel(400, 500, 2)], [call(0, 5, 1), call(300, 340, 2)])
    )
    assert classes(found) == {"host": 200, "launch": 100}  # 100–300 in no call, 300–400 from call to start
    assert (found.metric("idle_ns"), found.metric("wall_ns"), found.metric("idle_share")) == (300, 500, 0.6)


def test_time_between_launches_close_together_is_launch():
    kernels, calls = [kernel(10, 20, 1), kernel(100, 110, 2)], [call(0, 30, 1), call(80, 90, 2)]
    assert classes(LaunchGaps(dispatch_limit_ns=50).analyze(trace(kernels, calls))) == {"launch": 80}
    # 20–30 is still in the first call; 30–80 is too long to be one launch after the other
    assert classes(LaunchGaps(dispatch_limit_ns=49).analyze(trace(kernels, calls))) == {"launch": 30, "host": 50}


def test_a_sync_splits_the_hosts_time_and_the_rest_is_host():
    kernels = [kernel(0, 100, 1), kernel(1000, 1100, 2)]
    calls = [call(0, 10, 1), call(20, 160, 3, "cudaStreamSynchronize"), call(900, 950, 2)]
    found = LaunchGaps().analyze(trace(kernels, calls))
    assert classes(found) == {"sync": 60, "host": 740, "launch": 100}
    host = next(f for f in found.findings if f.rule == "host-bound")
    assert {e.metric: e.value for e in host.evidence}["idle_host_after_sync_ns"] == 740
    assert host.saving.upper_bound_ns == 740


def test_one_gap_that_makes_most_of_a_class_is_told_apart_from_steady_work():
    launches = [0, 5000, 5400, 5800]
    kernels = [kernel(at, at + 100, i + 1) for i, at in enumerate(launches)]
    calls = [call(max(at - 10, 0), at, i + 1) for i, at in enumerate(launches)]
    (host,) = LaunchGaps(dispatch_limit_ns=0).analyze(trace(kernels, calls)).findings
    assert {e.metric: e.value for e in host.evidence}["longest_part_of_gap_ns"] == 4890
    assert host.recommendation.startswith("One gap is most of it")
    assert "--between" in host.recommendation
    steady = LaunchGaps(dispatch_limit_ns=0).analyze(trace(kernels[1:], calls[1:])).findings
    assert "--between" not in steady[0].recommendation


def test_another_threads_calls_do_not_explain_a_gap():
    kernels = [kernel(0, 100, 1), kernel(1000, 1100, 2)]
    waiting = [call(20, 900, 3, "cudaDeviceSynchronize", thread_id=2)]
    found = LaunchGaps().analyze(trace(kernels, [call(0, 10, 1, thread_id=3), *waiting, call(900, 950, 2)]))
    assert classes(found) == {"host": 800, "launch": 100}


def test_the_last_launch_of_one_thread_and_the_first_of_another_do_not_follow_each_other():
    kernels = [kernel(0, 10, 1), kernel(30, 40, 2), kernel(50, 60, 3)]
    calls = [call(0, 5, 1, thread_id=1), call(20, 25, 2, thread_id=2), call(44, 60, 3, thread_id=1)]
    found = LaunchGaps(dispatch_limit_ns=30).analyze(trace(kernels, calls))
    assert classes(found) == {"host": 10 + 4, "launch": 10 + 6}  # thread 1: 39 ns between its launches


def test_a_driver_call_inside_a_runtime_call_does_not_break_the_row():
    kernels = [kernel(0, 15, 1), kernel(31, 40, 2)]
    calls = [call(0, 20, 1), call(2, 4, 1, "cuLaunchKernel"), call(25, 30, 2)]
    found = LaunchGaps(dispatch_limit_ns=5).analyze(trace(kernels, calls))
    assert classes(found) == {"launch": 16}  # 20–25 counts from the end of the outer call
    assert found.tables["longest"]["call"] == ["cudaLaunchKernel"]


def test_a_blocking_copy_is_a_wait_and_an_asynchronous_one_is_copying():
    kernels, ops = [kernel(0, 100, 1), kernel(1000, 1100, 4)], [kernel(300, 400, 2), kernel(600, 700, 3)]
    calls = [call(0, 10, 1), call(150, 410, 2, "cudaMemcpy"), call(500, 650, 3, "cudaMemcpyAsync"), call(800, 999, 4)]
    found = LaunchGaps(dispatch_limit_ns=0).analyze(trace(kernels, calls, memory_ops=ops))
    # 100–150 host, 150–300 the copy being issued; 400–410 still in it, 410–500 host, 500–600 issuing; 700–800 host
    assert classes(found) == {"host": 50 + 90 + 100, "memcpy": 150 + 100, "sync": 10, "launch": 200}


def test_queued_work_is_late_by_the_device_or_by_a_dependency():
    kernels = [
        kernel(0, 100, 1, stream=1),
        kernel(110, 200, 2, stream=1),
        kernel(230, 300, 3, stream=2),
        kernel(460, 500, 5, stream=2),
    ]
    calls = [call(i, i + 1, id) for i, id in enumerate((1, 2, 3, 4, 5))]
    found = LaunchGaps().analyze(trace(kernels, calls, memory_ops=[kernel(350, 400, 4, stream=2)]))
    # behind the same stream 10 + 50 (the copy waits for a kernel), behind another stream 30, behind a copy 60
    assert classes(found) == {"device": 60, "dependency": 90}


def test_gaps_within_a_graph_replay_are_the_devices_also_while_the_launch_call_lasts():
    kernels = [
        kernel(100, 200, 1, graph_id=5, graph_node_id=1, stream=1),
        kernel(220, 300, 1, graph_id=5, graph_node_id=2, stream=2),
    ]
    found = LaunchGaps().analyze(trace(kernels, [call(50, 260, 1, "cudaGraphLaunch")]))
    assert classes(found) == {"device": 20}


def test_the_profilers_own_time_comes_first_and_the_drivers_is_not_the_profilers():
    kernels, calls = [kernel(0, 100, 1), kernel(400, 500, 2)], [call(0, 5, 1), call(300, 340, 2)]
    overheads = [
        {"start_ns": 90, "end_ns": 150, "kind": "buffer_flush"},
        {"start_ns": 140, "end_ns": 160, "kind": "Resource"},
        {"start_ns": 160, "end_ns": 190, "kind": "command_buffer_full"},
        {"start_ns": 200, "end_ns": 300, "kind": "Lazy Function Loading"},
        {"start_ns": 200, "end_ns": 300, "kind": "buffer_flush", "rank": 1},
    ]
    found = LaunchGaps(dispatch_limit_ns=0).analyze(trace(kernels, calls, overheads=overheads))
    assert classes(found) == {"cupti_overhead": 60, "host": 40, "loading": 100, "launch": 100}
    assert found.metric("idle_without_cupti_share") == 240 / 440


def test_a_launch_call_that_takes_long_loads_code():
    kernels = [kernel(0, 100, 1), kernel(2_000_600, 2_000_700, 2), kernel(4_000_000, 4_000_100, 4)]
    calls = [call(0, 5, 1), call(500, 2_000_500, 2), call(2_000_800, 3_900_000, 3), call(3_999_000, 3_999_500, 4)]
    found = LaunchGaps(dispatch_limit_ns=0).analyze(trace(kernels, calls, duration_ns=10_000_000))
    # its own call 500–2,000,500 and one before it 2,000,800–3,900,000
    assert classes(found) == {"host": 400 + 100 + 99_000, "loading": 2_000_000 + 1_899_200, "launch": 100 + 1000}
    assert [f.rule for f in found.findings] == ["code-loading"]
    patient = LaunchGaps(dispatch_limit_ns=0, slow_launch_ns=2_000_000).analyze(
        trace(kernels, calls, duration_ns=10_000_000)
    )
    assert patient.metric("idle_loading_ns") == 0


def test_a_graph_launch_that_takes_long_launches_many_nodes():
    kernels = [kernel(0, 100, 1), kernel(2_000_600, 2_000_700, 2, graph_id=3, graph_node_id=1)]
    calls = [call(0, 5, 1), call(500, 2_000_500, 2, "cudaGraphLaunch")]
    found = LaunchGaps(dispatch_limit_ns=0).analyze(trace(kernels, calls, duration_ns=10_000_000))
    assert classes(found) == {"host": 400, "launch": 2_000_100}


def test_idle_is_span_less_union_over_all_streams():
    # Two streams that take turns: each alone is half idle, the device never is.
    kernels = [kernel(i * 100, i * 100 + 110, stream=i % 2) for i in range(10)]
    assert LaunchGaps().analyze(trace(kernels, [])).metric("idle_ns") == 0


def test_equal_stream_ids_on_two_devices_are_two_streams():
    kernels = [kernel(0, 400, 1, device=0), kernel(0, 100, 2, device=1), kernel(350, 400, 3, device=1)]
    found = LaunchGaps().analyze(trace(kernels, [call(0, 1, 1), call(0, 1, 2), call(0, 1, 3)]))
    assert found.tables["devices"]["device"] == [0, 1]
    assert found.tables["devices"]["idle_ns"] == [0, 250]
    assert found.tables["devices"]["wall_ns"] == [400, 400]


def test_equal_correlation_ids_of_two_processes_are_two_launches():
    kernels = [kernel(0, 100, 1, rank=0), kernel(0, 100, 1, rank=1, device=1), kernel(200, 300, 2, rank=0)]
    calls = [call(0, 1, 1), call(0, 1, 1, rank=1), call(2, 3, 2, rank=1, name="cudaGraphLaunch"), call(150, 160, 2)]
    found = LaunchGaps(dispatch_limit_ns=0).analyze(trace(kernels, calls))
    assert classes(found) == {"host": 50, "launch": 50}
    assert found.tables["longest"]["call"] == ["cudaLaunchKernel"]


def windows(*spans: tuple[int, int, str], rank: int = 0) -> list[dict[str, Any]]:
    return [{"start_ns": a, "end_ns": b, "state": state, "rank": rank} for a, b, state in spans]


def test_time_that_was_not_recorded_is_not_idle():
    # Recorded 0–300 and 700–1000; in between the program ran on unseen.
    kernels = [kernel(0, 100, 1), kernel(150, 250, 2), kernel(800, 900, 3)]
    seen = windows((0, 300, "traced"), (300, 700, "clean"), (700, 1000, "traced"))
    found = LaunchGaps().analyze(trace(kernels, [], windows=seen))
    assert found.metric("idle_ns") == 50
    assert found.metric("wall_ns") == 250 + 100
    assert found.tables["devices"]["gaps_count"] == [1]


def test_idle_over_time_has_no_value_where_nothing_was_recorded():
    kernels = [kernel(0, 100, 1), kernel(150, 200, 2), kernel(800, 1000, 3)]
    seen = windows((0, 200, "traced"), (200, 800, "off"), (800, 1000, "traced"))
    found = LaunchGaps(bins_count=5).analyze(trace(kernels, [], windows=seen))
    table = found.tables["over_time"]
    assert table["bin_start_ns"] == [0, 200, 400, 600, 800]
    assert table["class"] == ["idle"] * 5  # no launch was recorded: only the total is known
    assert table["idle_ns"] == [50, None, None, None, 0]
    assert table["idle_share"] == [0.25, None, None, None, 0.0]


def test_work_across_the_end_of_a_window_counts_up_to_the_end():
    kernels = [kernel(0, 100, 1), kernel(250, 500, 2)]
    found = LaunchGaps().analyze(trace(kernels, [], windows=windows((0, 300, "traced"), (300, 600, "off"))))
    assert (found.metric("wall_ns"), found.metric("idle_ns")) == (300, 150)


def test_a_device_shared_with_a_process_that_was_not_recorded_is_not_known_to_idle():
    kernels = [kernel(0, 100, 1), kernel(200, 250, 2, rank=1), kernel(900, 1000, 3)]
    seen = [*windows((0, 1000, "traced")), *windows((150, 300, "traced"), (300, 800, "yielded"), rank=1)]
    found = LaunchGaps().analyze(trace(kernels, [], windows=sorted(seen, key=lambda w: w["start_ns"])))
    assert found.metric("idle_ns") == 100  # 100–200; 250–300 has no work after it in its window, 300–800 is not known


def test_damaged_windows_withhold_the_answer():
    damaged = replace(trace([kernel(0, 1), kernel(5, 6)], []), damaged={"windows": "windows.parquet is damaged"})
    found = LaunchGaps().analyze(damaged)
    assert (found.status, found.reason) == ("not_measured", "windows.parquet is damaged")


def test_without_launch_calls_the_total_is_given_and_the_classes_are_not():
    found = LaunchGaps().analyze(trace([kernel(0, 100, 1), kernel(150, 200, 2)]))
    assert found.status == "not_measured"
    assert "launch calls were not recorded" in found.reason
    assert found.metric("idle_ns") == 50
    metric = next(m for m in found.metrics if m.name == "idle_launch_ns")
    assert (metric.value, metric.reason) == (None, "launch calls were not recorded")
    assert found.tables["longest"]["class"] == [None]


def test_too_few_known_origins_withhold_the_classes():
    kernels = [kernel(0, 89, 1), kernel(150, 161, 2)]
    found = LaunchGaps(min_known_origin_share=0.9).analyze(trace(kernels, [call(0, 1, 1)]))
    assert (found.status, found.metric("known_origin_share")) == ("not_measured", 0.89)
    assert found.metric("idle_launch_ns") is None
    assert found.findings == ()
    loose = LaunchGaps(min_known_origin_share=0.89).analyze(trace(kernels, [call(0, 1, 1)]))
    assert classes(loose) == {"unknown": 61}


def test_correlation_id_zero_is_none():
    found = LaunchGaps(min_known_origin_share=0).analyze(trace([kernel(0, 9), kernel(20, 29)], [call(0, 1, 0)]))
    assert classes(found) == {"unknown": 11}


def test_absent_overhead_records_are_said_to_be_absent():
    whole = trace([kernel(0, 100, 1), kernel(400, 500, 2)], [call(0, 5, 1), call(300, 340, 2)])
    absent = replace(whole, tables={k: v for k, v in whole.tables.items() if k != "overheads"})
    found = LaunchGaps(dispatch_limit_ns=0).analyze(absent)
    assert classes(found) == {"host": 200, "launch": 100}
    assert next(m for m in found.metrics if m.name == "idle_cupti_overhead_ns").reason


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("cudaLaunchKernel", "launch-bound"),
        ("cudaStreamSynchronize", "sync-bound"),
        ("cudaMalloc", "host-bound"),
        ("cudaMemcpyAsync", "copy-bound"),
    ],
)
def test_each_way_of_being_late_has_its_rule(name, rule):
    calls = [call(0, 5, 1), call(100, 290, 9, name), call(298, 299, 2)]
    kernels = [kernel(0, 100, 1), kernel(300, 400, 2)]
    found = LaunchGaps(dispatch_limit_ns=0).analyze(trace(kernels, calls))
    (finding,) = found.findings
    assert finding.rule == rule
    share = 190 / 400 if rule != "host-bound" else 198 / 400
    assert {e.metric: e.value for e in finding.evidence}["idle_share"] == 0.5
    assert finding.evidence[0].value == pytest.approx(share if rule != "launch-bound" else 192 / 400)
    assert finding.evidence[0].limit == 0.10
    assert finding.scope == {"device": 0}


def test_late_graph_launches_are_not_to_be_cured_by_a_graph():
    kernels = [kernel(0, 100, 1, graph_id=4), kernel(300, 400, 2, graph_id=4)]
    found = LaunchGaps().analyze(trace(kernels, [call(0, 9, 1), call(100, 290, 2, "cudaGraphLaunch")]))
    (finding,) = found.findings
    assert finding.rule == "launch-bound"
    assert finding.recommendation == "Launch fewer, larger graphs, and each before the one before it ends."


def test_dependency_and_profiler_rules():
    kernels = [kernel(0, 100, 1, stream=1), kernel(200, 300, 2, stream=2), kernel(400, 500, 3, stream=2)]
    overheads = [{"start_ns": 310, "end_ns": 390, "kind": "instrumentation"}]
    found = LaunchGaps().analyze(trace(kernels, [call(i, i + 1, i) for i in (1, 2, 3)], overheads=overheads))
    assert {f.rule: f.saving.upper_bound_ns for f in found.findings} == {"dependency-stalls": 100, "profiler-idle": 80}


def test_savings_count_devices_that_idle_at_once_once():
    kernels = [kernel(a, a + 10, 1 + a + d, device=d) for a in (0, 100) for d in (0, 1)]
    calls = [call(95, 96, 101, thread_id=1), call(95, 96, 102, thread_id=2)]
    found = LaunchGaps(min_known_origin_share=0, dispatch_limit_ns=0).analyze(trace(kernels, calls))
    (finding,) = [f for f in found.findings if f.rule == "host-bound"]
    assert found.metric("idle_host_ns") == 2 * 85
    assert finding.saving.upper_bound_ns == 85


def test_longest_gaps_name_what_ran_before_and_after():
    kernels = [kernel(0, 10, 1, name="a"), kernel(20, 30, 2, name="b"), kernel(130, 140, 3, name="c")]
    ops = [kernel(60, 70, 4, kind="HtoD")]
    calls = [call(0, 1, 1), call(0, 1, 2), call(0, 1, 4, "cudaMemcpyAsync"), call(100, 101, 3)]
    table = LaunchGaps(longest_count=2).analyze(trace(kernels, calls, memory_ops=ops)).tables["longest"]
    assert table["duration_ns"] == [60, 30]
    assert table["start_ns"] == [70, 30]
    assert table["work_before"] == ["HtoD", "b"]
    assert table["work_after"] == ["c", "HtoD"]
    assert table["call"] == ["cudaLaunchKernel", "cudaMemcpyAsync"]


def test_reversed_and_empty_intervals_are_no_work():
    kernels = [kernel(0, 100, 1), kernel(110, 50, 2), kernel(120, 120, 3), kernel(150, 200, 4)]
    found = LaunchGaps().analyze(trace(kernels, []))
    assert (found.metric("idle_ns"), found.metric("gaps_count")) == (50, 1)
