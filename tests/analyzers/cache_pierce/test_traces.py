"""L2 counters of traces: the same decision, on a clock of its own."""

from __future__ import annotations

from typing import Any

import counted
import pytest
import tiny

from spikeprof.analyzers.cache_pierce.traces import pierce_trace

MS = 1_000_000


def launch(at_ms: int, sectors: float, hit_share: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A kernel that takes half a millisecond, and its counters."""
    kernel = {"name": "gather", "start_ns": at_ms * MS, "end_ns": at_ms * MS + MS // 2}
    return kernel, [
        {"metric": counted.SECTORS, "value": sectors, "kernel_id": at_ms},
        {"metric": counted.HITS, "value": sectors * hit_share, "kernel_id": at_ms},
    ]


def trace(jump: bool) -> Any:
    """Two seconds with a launch per millisecond; from 1.5 to 1.6 s three times the sectors, most of which miss."""
    kernels, counters = [], []
    for at_ms in range(2000):
        odd = jump and 1500 <= at_ms < 1600
        kernel, rows = launch(at_ms, 3000.0 if odd else 1000.0, 0.2 if odd else 0.9)
        kernels.append(kernel)
        counters += rows
    return tiny.trace(
        duration_ns=2000 * MS,
        kernels=kernels,
        counters=counters,
        kernel_classes=[counted.kernel_class("gather", 1, 2000)],
    )


def test_a_kernel_whose_misses_jump() -> None:
    verdict = pierce_trace(trace(jump=True))
    assert verdict.status == "findings"
    assert [(alert.kind, alert.tenant, alert.pattern) for alert in verdict.alerts] == [
        ("raised", "GPU 0", "gather"),
        ("recovered", "GPU 0", "gather"),
    ]
    assert verdict.s_per_option_s == pytest.approx(2 / 600, rel=0.01)
    raised = verdict.alerts[0]
    assert 1.5 <= raised.ts_s <= 1.5 + 2 * verdict.s_per_option_s
    found = {one.metric: one for one in raised.evidence}
    assert found["lookups_per_s"].value == pytest.approx(3e6, rel=0.3)  # 3,000 sectors per millisecond
    assert found["lookups_per_s"].baseline == pytest.approx(1e6, rel=0.05)
    assert found["miss_share"].value == pytest.approx(0.8, abs=0.1)
    row = verdict.rows[0]
    assert row.qps == pytest.approx(1e6, rel=0.3)


def test_a_steady_kernel() -> None:
    verdict = pierce_trace(trace(jump=False))
    assert (verdict.status, verdict.alerts) == ("ok", ())


def test_samples_of_a_whole_gpu() -> None:
    samples = []
    for at_ms in range(2000):
        odd = 1500 <= at_ms < 1600
        sectors, hits = (3000.0, 600.0) if odd else (1000.0, 900.0)
        for metric, value in ((counted.SECTORS, sectors), (counted.HITS, hits)):
            samples.append(
                {"device": 1, "start_ns": at_ms * MS, "end_ns": (at_ms + 1) * MS, "metric": metric, "value": value}
            )
    verdict = pierce_trace(tiny.trace(duration_ns=2000 * MS, counter_samples=samples))
    assert [(alert.kind, alert.tenant, alert.pattern) for alert in verdict.alerts] == [
        ("raised", "GPU 1", "*"),
        ("recovered", "GPU 1", "*"),
    ]


def test_without_counters_nothing_is_measured() -> None:
    verdict = pierce_trace(tiny.trace(kernels=[{"end_ns": 5}]))
    assert verdict.status == "not_measured"
    assert "counter_samples" in verdict.reason
    assert "--counters" in verdict.collect_with


def test_counts_of_a_class_say_nothing_over_time() -> None:
    rows = counted.counters(0, match="class", **{counted.SECTORS: 100.0, counted.HITS: 50.0})
    verdict = pierce_trace(counted.trace([counted.kernel_class("gemm", 5, 3)], rows, kernels=[{"end_ns": 5}]))
    assert verdict.status == "not_measured"
    assert verdict.class_only == ("gemm",)
