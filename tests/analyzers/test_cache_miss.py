from __future__ import annotations

import gzip
import json
from typing import Any

import numpy as np
import pytest
import tiny
from counted import (
    CONFLICTS,
    H200,
    HITS,
    L1,
    L1_HITS,
    READ,
    SECTORS,
    TENSOR,
    WAVES,
    WRITTEN,
    counters,
    four,
    kernel_class,
    trace,
)
from hypothesis import given
from hypothesis import strategies as st
from paths import SHARED, needs_shared

from spikeprof.analyzers.base import Finding, Result
from spikeprof.analyzers.cache_miss import CacheMiss
from spikeprof.analyzers.derived.counters import Estimate
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.assemble.counter_overlap import Samples
from spikeprof.profiler.assemble.counter_tables import counter_tables
from spikeprof.profiler.counter_metrics import METRICS
from spikeprof.profiler.trace import Trace


def one_class(total_ns: int = 1000, spread: float = 0.0, **values: float) -> Trace:
    return trace([kernel_class("k", total_ns)], counters(0, spread, **values))


def asked(found: Trace, **options: Any) -> Result:
    result = run_one(found, CacheMiss(**options))
    assert result.status in ("ok", "findings"), result.reason
    return result


def found(result: Result) -> list[tuple[str, str]]:
    return [(f.rule, str(f.scope.get("kernel", ""))) for f in result.findings]


def finding(result: Result, rule: str) -> Finding:
    (one,) = (f for f in result.findings if f.rule == rule)
    return one


def values_of(one: Finding) -> dict[str, float]:
    return {e.metric: e.value for e in one.evidence}


# -- the four kernels whose truth is known ---------------------------------------------------------------------------


def test_the_patterns_of_the_measured_kernels_are_named_rightly() -> None:
    result = asked(four())
    assert found(result) == [("random-gather", "gather"), ("streaming", "mul_512_mib")]
    by_name = dict(zip(result.tables["classes"]["kernel"], result.tables["classes"]["pattern"], strict=True))
    assert by_name == {"gemm": "", "mul_8_mib": "", "gather": "random-gather", "mul_512_mib": "streaming"}
    streaming = values_of(finding(result, "streaming"))
    assert streaming["dram_peak_share"] == pytest.approx(0.87976, abs=1e-5)  # 1,050,106,624 bytes in 248,672 ns
    assert streaming["l2_per_dram_ratio"] == pytest.approx(1.58317, abs=1e-5)  # 51,953,216 × 32 bytes over these
    gather = finding(result, "random-gather")
    # 1,168,698,112 bytes over (22,020,096 - 420,000) sectors of 32 bytes
    assert values_of(gather)["dram_per_asked_ratio"] == pytest.approx(1.69082, abs=1e-5)
    assert gather.saving is not None
    assert gather.saving.upper_bound_ns == pytest.approx(466_016 * (1 - 1 / 1.69082), abs=2)


def test_a_gather_is_named_by_what_l2_fills_where_l1_was_not_counted() -> None:
    # What PM sampling counted in that gather: fewer hits than none, for 64 bytes came for each sector of 32.
    result = asked(four(with_l1=False, hits={"gather": -0.25 * 44_760_169}))
    assert found(result) == [("random-gather", "gather"), ("streaming", "mul_512_mib")]
    assert values_of(finding(result, "random-gather"))["l2_filled_ratio"] == pytest.approx(1.25)
    assert asked(four(with_l1=False)).metric("l1_hit_share") is None


@needs_shared
@pytest.mark.parametrize("interval", [10_000, 5_000, 2_000])
def test_the_patterns_are_named_rightly_in_what_was_sampled(interval: int) -> None:
    """From the samples to the findings, as a recording takes it."""
    path = SHARED / "recordings" / "h200_pm_sampling" / f"pm_{interval}.json.gz"
    with gzip.open(path) as file:
        data = json.load(file)
    samples = [row for row in data["samples"] if row[0] > 0]
    zero = samples[0][0]
    start, end = (np.array([row[i] for row in samples]) - zero for i in (0, 1))
    sampled = dict(zip(data["metrics"], np.array([row[2] for row in samples], float).T, strict=True))
    metrics = [METRICS[name] for name in (READ, WRITTEN, SECTORS, HITS, L1, L1_HITS)]
    values = [sampled[m.source] * m.scale * (sampled[m.times] if m.times else 1) for m in metrics]
    names = ["mul_512_mib"] * 5 + ["mul_8_mib"] * 300 + ["gemm"] * 3 + ["gather"] * 3
    acts = zip(names, data["acts"], strict=True)
    kernels = tiny.table("kernels", [{"name": n, "start_ns": a[0] - zero, "end_ns": a[1] - zero} for n, a in acts])
    made = counter_tables(
        [(0, Samples(start, end, np.stack(values, axis=1), tuple(m.name for m in metrics)))],
        kernels,
        tiny.table("memory_ops", []),
        tiny.table("windows", []),
    )
    tables = {**made.tables, "kernels": kernels, "devices": tiny.table("devices", [H200])}
    result = asked(Trace(tiny.trace().manifest, tables))
    assert found(result) == [("random-gather", "gather"), ("streaming", "mul_512_mib")]
    table = result.tables["classes"]
    hits = dict(zip(table["kernel"], table["l2_hit_share"], strict=True))
    assert hits["mul_512_mib"] == pytest.approx(0.5043, abs=0.02)  # Nsight Compute
    assert hits["gemm"] == pytest.approx(0.7441, abs=0.02)
    assert hits["mul_8_mib"] == pytest.approx(1.0, abs=0.02)  # it stays in L2
    assert hits["gather"] == 0
    assert result.metric("sampled_kernel_time_share") == pytest.approx(1, abs=0.01)
    assert result.metric("dram_outside_kernels_share") < 0.01


# -- numbers and bounds ----------------------------------------------------------------------------------------------


def test_bounds_are_carried_through() -> None:
    values = {SECTORS: 100.0, HITS: 50.0, READ: 4800.0, WRITTEN: 0.0}
    table = asked(one_class(spread=0.1, **values)).tables["classes"]
    assert (table["low_l2_hit_share"], table["l2_hit_share"], table["high_l2_hit_share"]) == (
        [pytest.approx(45 / 110)],
        [0.5],
        [pytest.approx(55 / 90)],
    )
    assert table["dram_bytes_per_s"] == [pytest.approx(4.8e9)]  # 4800 bytes in 1 µs
    assert [table[f"{b}dram_peak_share"][0] for b in ("low_", "", "high_")] == pytest.approx([0.0009, 0.001, 0.0011])
    assert table["match"] == ["exact"]
    assert "l1_hit_share" not in table  # not counted


@given(st.tuples(*[st.floats(0, 1e9)] * 3), st.tuples(*[st.floats(1e-3, 1e9)] * 3))
def test_a_quotient_lies_within_its_bounds(a: tuple[float, float, float], b: tuple[float, float, float]) -> None:
    (al, av, ah), (bl, bv, bh) = sorted(a), sorted(b)
    estimates = (Estimate(*(np.array([x]) for x in three)) for three in ((av, al, ah), (bv, bl, bh)))
    value, low, high = (part[0] for part in next(estimates).over(next(estimates)))
    assert low <= value <= high
    assert low == pytest.approx(al / bh)
    assert high == pytest.approx(ah / bl)


def test_quotients_of_what_may_be_nothing_or_less() -> None:
    above = Estimate(
        np.array([1.0, -1.0, 1.0, np.nan]), np.array([0.5, -2.0, 0.0, np.nan]), np.array([2.0, 1.0, 2.0, 1.0])
    )
    below = Estimate(np.array([2.0, 2.0, 0.0, 1.0]), np.array([0.0, 1.0, 0.0, 1.0]), np.array([4.0, 4.0, 1.0, 1.0]))
    value, low, high = above.over(below)
    np.testing.assert_array_equal(value, [0.5, -0.5, np.nan, np.nan])
    np.testing.assert_array_equal(low, [0.125, -2.0, np.nan, np.nan])
    np.testing.assert_array_equal(high, [np.inf, 1.0, np.nan, np.nan])


def test_a_hit_rate_below_zero_is_shown_as_none_and_said() -> None:
    table = asked(one_class(**{SECTORS: 100.0, HITS: -25.0})).tables["classes"]
    assert (table["l2_hit_share"], table["l2_filled_ratio"]) == ([0.0], [1.25])


def test_more_hits_than_lookups_are_no_hit_rate() -> None:
    assert "l2_hit_share" not in asked(one_class(**{SECTORS: 100.0, HITS: 190.0})).tables["classes"]


def test_loads_past_l1_have_no_l1_hit_rate() -> None:
    classes = [kernel_class("tma", 1000), kernel_class("plain", 1000)]
    rows = [
        *counters(0, **{SECTORS: 1000.0, L1: 9.0, L1_HITS: 9.0}),
        *counters(1, **{SECTORS: 10.0, L1: 10.0, L1_HITS: 4.0}),
    ]
    assert asked(trace(classes, rows)).tables["classes"]["l1_hit_share"] == [None, 0.4]


def test_a_class_has_its_own_value_else_the_mean_of_its_launches() -> None:
    classes = [kernel_class("a", 30, 2), kernel_class("b", 20, 2), kernel_class("c", 10)]
    rows = [
        *counters(0, match="class", **{READ: 7.0}),
        *counters(0, kernel_id=0, **{READ: 100.0}),
        *counters(1, kernel_id=1, **{READ: 10.0}),
        *counters(1, kernel_id=2, **{READ: 20.0}),
        *counters(2, match="none", **{READ: float("nan")}),
    ]
    kernels = [{"start_ns": 10 * i, "end_ns": 10 * i + 4} for i in range(3)]
    result = asked(trace(classes, rows, kernels=kernels))
    assert result.tables["classes"]["dram_read_bytes"] == [7.0, 15.0, None]
    assert result.tables["classes"]["match"] == ["class", "exact", "none"]
    assert result.metric("class_time_share") == 0.5
    assert result.metric("exact_time_share") == pytest.approx(1 / 3)
    launches = result.tables["launches"]
    assert [launches[c] for c in ("kernel", "start_ns", "duration_ns", "dram_read_bytes")] == [
        ["a", "b", "b"],
        [0, 20, 10],
        [4, 4, 4],
        [100.0, 20.0, 10.0],
    ]


def test_totals_and_what_fell_outside_of_kernels() -> None:
    places = (("kernels", 80.0, 40), ("memory_ops", 15.0, 10), ("idle", 5.0, 50), ("not_traced", 0.0, 0))
    balance = [{"metric": m, "place": p, "value": v, "time_ns": ns} for m in (READ, WRITTEN) for p, v, ns in places]
    result = asked(trace([kernel_class("k", 40)], counters(0, **{READ: 80.0, WRITTEN: 80.0}), counter_balance=balance))
    assert result.metric("dram_read_bytes") == 80
    assert result.metric("dram_bytes_per_s") == 160 / 40e-9
    assert result.metric("dram_peak_share") == pytest.approx(4e9 / 4.8e12)
    assert result.metric("dram_outside_kernels_share") == pytest.approx(0.2)
    assert result.metric("sampled_kernel_time_share") is None  # which kernels ran was not recorded
    assert [result.tables["balance"][f"{p}_share"] for p, *_ in places] == [
        [0.8] * 2,
        [0.15] * 2,
        [0.05] * 2,
        [0.0] * 2,
    ]
    assert result.tables["balance"]["total_bytes"] == [100.0, 100.0]


def test_what_was_not_counted_names_the_set_that_counts_it() -> None:
    result = asked(one_class(**{TENSOR: 0.5}))
    reasons = {m.name: m.reason for m in result.metrics if m.value is None}
    assert set(reasons) == {"dram_read_bytes", "dram_written_bytes", "l2_sectors_count", "l2_hit_share", "l1_hit_share",
                            "bank_conflict_share", "dram_bytes_per_s"}  # fmt: skip
    assert reasons["l2_hit_share"] == "the counters of the set memory were not recorded (--counters)"
    assert reasons["bank_conflict_share"].endswith("(--counters=bank-conflicts)")


def test_an_unknown_gpu_has_rates_but_no_shares() -> None:
    result = asked(trace([kernel_class("k", 1000)], counters(0, **{READ: 5e6, WRITTEN: 0.0}), devices=[]))
    assert result.metric("dram_bytes_per_s") == pytest.approx(5e12)
    assert next(m.reason for m in result.metrics if m.name == "dram_peak_share")
    assert result.findings == ()
    # The data sheet serves where the driver did not tell.
    known = [{"name": "NVIDIA H200", "mem_peak_bytes_per_s": None}]
    told = asked(trace([kernel_class("k", 1000)], counters(0, **{READ: 2.4e6, WRITTEN: 0.0}), devices=known))
    assert told.metric("dram_peak_share") == pytest.approx(0.5)


def test_cpu_caches_stand_beside() -> None:
    cpu = [{"metric": m, "value_count": v} for m, v in (("llc_read_count", 60.0), ("llc_read_miss_count", 15.0)) * 2]
    result = asked(trace([kernel_class("k", 10)], counters(0, **{READ: 1.0}), cpu_cache=cpu))
    assert result.metric("cpu_llc_miss_share") == 0.25
    assert result.metric("cpu_l1d_miss_share") is None


# -- rules -----------------------------------------------------------------------------------------------------------


def test_streaming_needs_its_lower_bound_and_its_share_of_the_time() -> None:
    values = {READ: 2_000_000.0, WRITTEN: 1_600_000.0, SECTORS: 170_000.0}  # 3.6 MB in 1 µs: 75 % of the peak
    assert found(asked(one_class(**values))) == [("streaming", "k")]
    assert found(asked(one_class(spread=0.1, **values))) == []  # may be 67.5 %
    rows = [*counters(0, **values), *counters(1, **{READ: 0.0})]
    assert found(asked(trace([kernel_class("k", 1000), kernel_class("other", 20_000)], rows))) == []
    assert found(asked(one_class(**values | {SECTORS: 400_000.0}))) == []  # 3.6 L2 bytes per DRAM byte: it is reused


def chain(read_after: float) -> Trace:
    """A kernel that reads and writes 60 MB in 40 µs (62.5 % of the peak), and one after it on its stream."""
    classes = [kernel_class("produce", 80_000, 2), kernel_class("consume", 80_000, 2)]
    rows = [*counters(0, **{READ: 60e6, WRITTEN: 60e6}), *counters(1, **{READ: read_after, WRITTEN: 0.0})]
    names = ("produce", "consume", "produce", "consume")
    kernels = [{"name": n, "start_ns": 50_000 * i, "end_ns": 50_000 * i + 40_000} for i, n in enumerate(names)]
    return trace(classes, rows, kernels=kernels)


def test_thrash_is_what_the_next_kernel_reads_back() -> None:
    result = asked(chain(read_after=61e6))
    assert found(result) == [("l2-thrash", "produce")]
    evidence = values_of(result.findings[0])
    assert evidence["read_after_bytes"] == 61e6
    assert evidence["dram_per_l2_size_ratio"] == pytest.approx(120e6 / 62_914_560)
    assert found(asked(chain(read_after=29e6))) == []  # less than half of what was written
    assert found(asked(chain(read_after=61e6), thrash_l2_ratio=1.5)) == []


def test_partial_sectors_are_overfetch_of_a_kernel_that_writes() -> None:
    # 1 million sectors asked (32 MB), 20 MB written, 48 MB read: half as much again.
    values = {READ: 48e6, WRITTEN: 25e6, L1: 1e6, L1_HITS: 0.0, SECTORS: 2e6, HITS: 0.0}
    assert found(asked(one_class(total_ns=100_000, **values))) == [("partial-sector", "k")]
    assert found(asked(one_class(total_ns=100_000, **values | {WRITTEN: 23e6}))) == [("random-gather", "k")]
    # Written bytes count beyond one L2: 31 + (85 - 62.9) MB over 32 MB asked are 1.66, without them 0.97.
    beyond = {READ: 31e6, WRITTEN: 85e6}
    result = asked(one_class(total_ns=100_000, **values | beyond))
    assert values_of(finding(result, "partial-sector"))["dram_per_asked_ratio"] == pytest.approx(
        (116e6 - 62_914_560) / 32e6
    )
    # Loads past L1: what was asked is not known.
    assert found(asked(one_class(total_ns=100_000, **values | {SECTORS: 3e6, HITS: 3e6}))) == []


def test_bank_conflicts() -> None:
    result = asked(one_class(total_ns=900, **{WAVES: 300.0, CONFLICTS: 100.0}))
    assert found(result) == [("bank-conflicts", "k")]
    assert values_of(result.findings[0])["bank_conflict_share"] == pytest.approx(1 / 3)
    assert result.findings[0].saving is not None
    assert result.findings[0].saving.upper_bound_ns == 300
    assert result.metric("bank_conflict_share") == pytest.approx(1 / 3)
    assert found(asked(one_class(spread=0.2, **{WAVES: 300.0, CONFLICTS: 100.0}))) == []  # may be 80 of 360


def balance(metric: str, kernels: float, idle: float) -> list[dict[str, Any]]:
    rows = (("kernels", kernels, 900), ("idle", idle, 100))
    return [{"metric": metric, "place": place, "value": value, "time_ns": ns} for place, value, ns in rows]


@pytest.mark.parametrize(
    ("read", "written", "instructions", "rules"),
    [
        ((100, 0), (85, 15), (100, 0), ["write-back"]),
        ((92, 8), (85, 15), (100, 0), []),  # it reads, too
        ((100, 0), (95, 5), (100, 0), []),
        ((92, 8), (85, 15), (90, 10), ["gpu-shared"]),
    ],
)
def test_counts_in_idle_time(read: Any, written: Any, instructions: Any, rules: list[str]) -> None:
    rows = [*balance(READ, *read), *balance(WRITTEN, *written), *balance("instructions_count", *instructions)]
    result = asked(trace([kernel_class("k", 900)], counters(0, **{READ: 1.0}), counter_balance=rows))
    assert [f.rule for f in result.findings] == rules
    assert all(f.scope == {"device": 0} for f in result.findings)


def test_what_runs_on_a_gpu_that_the_program_does_not_use_is_not_its_own() -> None:
    mine = [*balance(READ, 100, 0), *balance("instructions_count", 100, 0)]
    other = [
        {"device": 1, "metric": m, "place": "idle", "value": 900.0, "time_ns": 1000}
        for m in (READ, "instructions_count")
    ]
    result = asked(trace([kernel_class("k", 900)], counters(0, **{READ: 1.0}), counter_balance=mine + other))
    assert [f.rule for f in result.findings] == []
    assert result.metric("dram_outside_kernels_share") == 0
    assert result.tables["balance"]["device"] == [0, 0, 1, 1]


def test_the_share_of_other_work_is_told_and_sectors_tell_it_where_instructions_were_not_counted() -> None:
    rows = balance(SECTORS, 90, 10)
    result = asked(trace([kernel_class("k", 900)], counters(0, **{SECTORS: 1.0}), counter_balance=rows))
    assert values_of(finding(result, "gpu-shared")) == {
        "other_work_share": 0.1,
        "idle_l2_sectors_count": 10,
        "idle_ns": 100,
    }


def test_low_hit_rates_most_of_the_time() -> None:
    classes = [kernel_class(f"k{i}", 1000) for i in range(3)]
    weights = {READ: 1_900_000.0, WRITTEN: 0.0, SECTORS: 90_000.0, HITS: 9_000.0}  # 40 % of the peak, 10 % hits
    rows = [*counters(0, **weights), *counters(1, **weights), *counters(2, **weights | {HITS: 80_000.0})]
    result = asked(trace(classes, rows))
    evidence = values_of(finding(result, "low-l2-hit"))
    assert evidence["low_hit_time_share"] == pytest.approx(2 / 3)
    assert evidence["l2_hit_share"] == pytest.approx(0.1)
    assert evidence["dram_peak_share"] == pytest.approx(1.9 / 4.8)
    assert found(asked(trace(classes, rows), low_hit_time_share=0.7)) == []
    assert found(asked(trace(classes, rows), low_hit_peak_share=0.5)) == []


def test_a_kernel_of_several_shapes_is_named_once() -> None:
    classes = [kernel_class("k", 1000 + i, grid_x=i) for i in range(1, 4)]
    rows = [row for i in range(3) for row in counters(i, **{WAVES: 2.0, CONFLICTS: 1.0})]
    result = asked(trace(classes, rows))
    assert [(f.rule, f.scope["grid_x"]) for f in result.findings] == [("bank-conflicts", 3)]


# -- figures ---------------------------------------------------------------------------------------------------------


def test_the_roofline_is_inferred_from_the_tensor_pipes() -> None:
    values = {READ: 600_000.0, WRITTEN: 400_000.0, TENSOR: 0.5}  # 1 TB/s; half of 989.5 TFLOP/s
    result = asked(one_class(**values))
    table = result.tables["roofline"]
    assert table["kind"] == ["kernel", "roof", "roof", "roof"]
    assert table["tensor_flop_per_s"][0] == pytest.approx(494.75e12)
    assert table["tensor_flop_per_byte"][0] == pytest.approx(494.75)
    ridge = 989.5e12 / 4.8e12
    assert table["tensor_flop_per_byte"][1:] == pytest.approx([ridge / 4, ridge, 4 * 494.75])
    assert table["tensor_flop_per_s"][1:] == pytest.approx([989.5e12 / 4, 989.5e12, 989.5e12])
    assert [f.id for f in result.figures] == ["cache-matrix", "roofline"]


def test_without_tensor_activity_there_is_the_roof_of_dram_alone() -> None:
    result = asked(one_class(**{READ: 600.0, WRITTEN: 400.0}))
    assert result.tables["roofline"]["kind"] == []
    table = result.tables["memory_roof"]
    assert table["way"] == ["read", "written"]
    assert table["dram_bytes_per_s"] == pytest.approx([0.6e9, 0.4e9])
    assert table["dram_peak_bytes_per_s"] == [4.8e12, 4.8e12]
    assert [f.id for f in result.figures] == ["cache-matrix", "memory-roof"]


def test_each_metric_has_its_own_scale() -> None:
    classes = [kernel_class("a", 2000), kernel_class("b", 1000)]
    rows = [*counters(0, **{SECTORS: 100.0, HITS: 25.0}), *counters(1, **{SECTORS: 400.0, HITS: 200.0})]
    table = asked(trace(classes, rows)).tables["matrix"]
    cells = dict(zip(zip(table["metric"], table["class_id"], strict=True), table["scaled_share"], strict=True))
    assert cells == {
        ("l2_hit_share", 0): 0.25,
        ("l2_hit_share", 1): 0.5,
        ("l2_sectors_count", 0): 0.25,
        ("l2_sectors_count", 1): 1.0,
    }


def test_counters_over_time() -> None:
    samples = []
    for number in range(8):  # of 100 ns; the last two are idle
        values = {
            READ: 1000.0 * (number < 6),
            SECTORS: 1000.0 * (number < 6),
            HITS: 250.0,
            "sm_active_share": number / 8,
        }
        when = {"start_ns": 100 * number, "end_ns": 100 * number + 100}
        samples += [{**when, "metric": m, "value": v} for m, v in values.items()]
    kernels = [{"start_ns": 0, "end_ns": 800}]
    found = trace([kernel_class("kernel", 800)], counters(0, **{READ: 1.0}), counter_samples=samples, kernels=kernels)
    table = asked(found).tables["timeline"]
    assert table["bin_start_ns"] == [0, 200, 400, 600]  # two samples each
    assert table["dram_read_bytes_per_s"] == [1e10, 1e10, 1e10, 0.0]
    assert table["l2_hit_share"] == [0.25, 0.25, 0.25, None]  # nothing was looked up
    assert table["sm_active_share"] == [0.0625, 0.3125, 0.5625, 0.8125]
    assert "dram_written_bytes_per_s" not in table
    assert len(asked(found, bins_count=2).tables["timeline"]["device"]) == 2


def test_samples_without_a_number_have_no_timeline() -> None:
    samples = [{"start_ns": 0, "end_ns": 100, "metric": READ, "value": float("nan")}]
    kernels = [{"start_ns": 0, "end_ns": 800}]
    found = trace([kernel_class("kernel", 800)], counters(0, **{READ: 1.0}), counter_samples=samples, kernels=kernels)
    assert asked(found).tables["timeline"] == {"bin_start_ns": [], "device": []}


def test_a_roofline_leaves_out_what_has_no_place_on_it() -> None:
    """Its axes are logarithmic: a kernel whose DRAM bytes come out below 0 is nowhere."""
    classes = [kernel_class("gemm", 1000), kernel_class("odd", 1000)]
    rows = [
        *counters(0, **{READ: 1000.0, WRITTEN: 0.0, TENSOR: 0.5}),
        *counters(1, **{READ: -1000.0, WRITTEN: 0.0, TENSOR: 0.5}),
    ]
    table = asked(trace(classes, rows)).tables["roofline"]
    assert [name for kind, name in zip(table["kind"], table["kernel"], strict=True) if kind == "kernel"] == ["gemm"]


def test_no_kernel_ran_while_counters_were_sampled() -> None:
    assert run_one(trace([], [], kernels=[]), CacheMiss()).status == "not_applicable"


def test_where_kernels_were_not_recorded_nobody_knows_whether_some_ran() -> None:
    result = run_one(trace([], []), CacheMiss())
    assert (result.status, result.collect_with) == ("not_measured", "spikeprof run --counters -- CMD")


def test_a_part_of_a_recording_has_its_own_launches_and_the_counts_of_all() -> None:
    """Four launches of 100, 100, 300 and 400 ns, two of them with counts of their own; the part holds the last two."""
    times = [(0, 100), (1000, 1100), (2000, 2300), (3000, 3400)]
    names = ["other", "mine", "mine", "mine"]
    kernels = [{"name": n, "start_ns": a, "end_ns": b} for n, (a, b) in zip(names, times, strict=True)]
    for kernel in kernels:
        kernel["grid_x"] = 4
    classes = [kernel_class("other", 100, grid_x=4), kernel_class("mine", 800, 3, grid_x=4)]
    rows = [
        *counters(0, **{READ: 900.0, WRITTEN: 0.0}),
        *counters(1, match="class", **{READ: 600.0, WRITTEN: 300.0}),
        *counters(1, kernel_id=1, **{READ: 500.0}),
        *counters(1, kernel_id=3, **{READ: 700.0}),
    ]
    went = [{"metric": READ, "place": "kernels", "value": 2700.0, "time_ns": 900}]
    whole = trace(classes, rows, kernels=kernels, counter_balance=went)
    assert asked(whole).tables["launches"]["start_ns"] == [3000, 1000]
    part = asked(whole.narrowed(1500, 4000))
    assert "whole recording" in part.reason
    assert part.tables["classes"]["kernel"] == ["mine"]
    assert part.tables["classes"]["launches_count"] == [2]
    assert part.tables["classes"]["total_ns"] == [700]
    assert (part.tables["launches"]["start_ns"], part.tables["launches"]["duration_ns"]) == ([3000], [400])
    assert part.metric("dram_read_bytes") == 1200  # of two launches
    assert part.metric("dram_bytes_per_s") == pytest.approx(1800 / 700e-9)
    assert part.metric("sampled_kernel_time_share") is None
    assert part.tables["balance"]["metric"] == []
    assert run_one(whole.narrowed(3500, 9000), CacheMiss()).status == "not_applicable"


def test_sums_of_what_was_sampled_in_part_say_so() -> None:
    kernels = [{"start_ns": 0, "end_ns": 300}, {"start_ns": 200, "end_ns": 400}]
    rows = [{"metric": READ, "place": "kernels", "value": 1.0, "time_ns": 100}]
    counted = trace([kernel_class("kernel", 500, 2)], counters(0, **{READ: 1.0}), kernels=kernels, counter_balance=rows)
    assert asked(counted).metric("sampled_kernel_time_share") == 0.25  # of the 400 ns in which any kernel ran
