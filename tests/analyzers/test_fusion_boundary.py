from __future__ import annotations

from typing import Any

import pytest
import tiny
from contracts.test_analyzers import check_findings, check_metrics, check_tables
from counted import counters, kernel_class
from paths import ROOT

from spikeprof.analyzers.base import Finding, Result
from spikeprof.analyzers.fusion_boundary import FusionBoundary
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.trace import Trace

H100 = {"name": "NVIDIA H100 80GB HBM3", "sm_arch": "sm_90", "sm_count": 132}
#: 4 warps of 32 registers: 16 blocks an SM, 2,112 on the GPU. A grid of one block per SM.
SMALL = {"name": "small", "registers_count": 32, "block_x": 128, "grid_x": 132}
#: 12 warps of 168 registers and 164,308 bytes: one block an SM, 64,512 of 65,536 registers.
GEMM = {"name": "gemm", "registers_count": 168, "block_x": 384, "grid_x": 128, "shared_dynamic_bytes": 164_308}


def recorded(*kernels: dict[str, Any], device: dict[str, Any] | None = None, **tables: Any) -> Trace:
    """Kernels one after the other, of 1,000 ns (``ns``) each, with 100 ns (``gap``) before each; rank 0, stream 7."""
    rows, now = [], 0
    for kernel in kernels:
        row = dict(kernel)
        now += row.pop("gap", 100)
        length = row.pop("ns", 1000)
        rows.append({**row, "start_ns": now, "end_ns": now + length})
        now += length
    return tiny.trace(kernels=rows, devices=[device or H100], **tables)


def asked(trace: Trace, **options: Any) -> Result:
    result = run_one(trace, FusionBoundary(**options))
    assert result.status in ("ok", "findings"), result.reason
    return result


def row(result: Result, table: str = "classes", number: int = 0) -> dict[str, Any]:
    return {name: values[number] for name, values in result.tables[table].items()}


def rules(result: Result) -> list[str]:
    return [f.rule for f in result.findings]


def finding(result: Result, rule: str) -> Finding:
    (one,) = (f for f in result.findings if f.rule == rule)
    return one


def values_of(one: Finding) -> dict[str, float]:
    return {e.metric: e.value for e in one.evidence}


# -- occupancy and waves ---------------------------------------------------------------------------------------------


def test_classes_of_launches_with_their_occupancy_and_waves() -> None:
    result = asked(recorded(GEMM, SMALL, GEMM))
    gemm, small = (row(result, number=i) for i in (0, 1))
    assert (gemm["kernel"], gemm["launches_count"], gemm["total_ns"]) == ("gemm", 2, 2000)
    assert (gemm["active_blocks_count"], gemm["active_warps_count"], gemm["occupancy_share"]) == (1, 12, 12 / 64)
    assert gemm["limiter"] == "registers+shared_memory"
    assert gemm["waves_ratio"] == pytest.approx(128 / 132)
    assert gemm["expected_sm_active_share"] == pytest.approx(128 / 132)
    assert (small["occupancy_share"], small["limiter"], small["waves_ratio"]) == (1.0, "warps+registers", 132 / 2112)
    assert small["warps_per_sm_count"] == 4  # a block on every SM
    # two of three thousand ns at 12 of 64 warps, one at all
    assert result.metric("occupancy_share") == pytest.approx((2 * 12 / 64 + 1) / 3)
    assert result.metric("expected_sm_active_share") == pytest.approx((2 * 128 / 132 + 1) / 3)
    assert result.metric("one_wave_time_share") == 1
    assert "clusters" in result.reason  # of Hopper


def test_launches_of_one_name_grid_and_block_with_other_shared_memory_are_a_class_of_their_own() -> None:
    result = asked(recorded(SMALL, SMALL | {"shared_static_bytes": 16_384, "shared_dynamic_bytes": 32_768}))
    assert result.tables["classes"]["shared_bytes"] == [0, 49_152]
    assert result.tables["classes"]["active_blocks_count"] == [16, 4]
    assert result.tables["classes"]["carve_out_bytes"] == [16_384, 200_704]


def test_a_gpu_of_unknown_architecture() -> None:
    result = run_one(recorded(SMALL, device={"name": "AMD Instinct MI300X", "sm_arch": "gfx942"}), FusionBoundary())
    assert (result.status, result.reason) == ("not_measured", "the limits of the GPU's architecture are not known")
    assert result.collect_with
    without = tiny.trace(kernels=[{**SMALL, "end_ns": 10}])
    assert run_one(without, FusionBoundary()).status == "not_measured"


def test_registers_that_were_not_recorded() -> None:
    result = run_one(recorded(SMALL | {"registers_count": 0}), FusionBoundary())
    assert (result.status, result.reason) == ("not_measured", "registers per thread were not recorded")
    some = asked(recorded(SMALL, SMALL | {"registers_count": 0, "name": "other"}))
    assert some.metric("known_time_share") == 0.5
    assert row(some, number=1)["unknown"] == "registers per thread were not recorded"
    assert row(some, number=1)["occupancy_share"] is None
    assert row(some, number=1)["registers_count"] is None


def test_a_block_that_fits_nowhere_is_a_fault_of_the_record_and_no_occupancy_of_nothing() -> None:
    result = asked(recorded(SMALL, SMALL | {"name": "odd", "block_x": 2048}))
    assert row(result, number=1)["occupancy_share"] is None
    assert row(result, number=1)["limiter"] == "warps"
    assert "no SM" in row(result, number=1)["unknown"]
    assert result.metric("known_time_share") == 0.5
    assert result.metric("occupancy_share") == 1


def test_where_sms_were_not_recorded_the_product_says_how_many() -> None:
    assert row(asked(recorded(SMALL, device=H100 | {"sm_count": 0})))["waves_ratio"] == 132 / 2112
    unknown = asked(recorded(SMALL, device={"name": "no such GPU", "sm_arch": "sm_90"}))
    assert row(unknown)["waves_ratio"] is None
    assert unknown.metric("expected_sm_active_share") is None


def test_no_kernel_ran() -> None:
    assert run_one(recorded(), FusionBoundary()).status == "not_applicable"


def test_two_gpus() -> None:
    kernels = [{**SMALL, "device": i, "end_ns": 1000} for i in (0, 1)]
    devices = [{**H100, "device": 0}, {"device": 1, "sm_arch": "sm_86", "sm_count": 82}]
    result = asked(tiny.trace(kernels=kernels, devices=devices))
    assert result.tables["classes"]["device"] == [0, 1]
    assert result.tables["classes"]["active_blocks_count"] == [16, 12]  # 48 warps
    assert result.tables["pairs"]["kernel"] == []  # they follow one another on no stream


# -- rules about one kernel ------------------------------------------------------------------------------------------


def test_a_grid_too_small_for_the_gpu() -> None:
    result = asked(recorded(SMALL | {"grid_x": 33, "grid_y": 2}))
    one = finding(result, "small-grid")
    assert values_of(one)["expected_sm_active_share"] == 0.5
    assert values_of(one)["grid_blocks_count"] == 66
    assert "sm_active_share" not in values_of(one)
    assert one.saving is not None
    assert one.saving.upper_bound_ns == 500
    assert rules(asked(recorded(SMALL | {"grid_x": 67}))) == []
    assert rules(asked(recorded(SMALL | {"grid_x": 66}), few_sms_share=0.4)) == []


def test_what_takes_little_time_is_not_named() -> None:
    result = asked(recorded(SMALL | {"ns": 990}, SMALL | {"name": "tiny", "grid_x": 1, "ns": 10}))
    assert rules(result) == []
    assert rules(asked(recorded(SMALL, SMALL | {"name": "tiny", "grid_x": 1, "ns": 31}))) == ["small-grid"]


def test_a_large_grid_of_blocks_that_fill_their_sm_little() -> None:
    result = asked(recorded(GEMM | {"grid_x": 132}))
    one = finding(result, "low-occupancy")
    assert one.scope["limiter"] == "registers+shared_memory"
    assert values_of(one)["occupancy_share"] == 12 / 64
    assert values_of(one)["active_warps_count"] == 12
    assert "registers and less shared memory" in one.recommendation
    registers = asked(recorded(GEMM | {"grid_x": 132, "shared_dynamic_bytes": 0}))
    assert finding(registers, "low-occupancy").recommendation.startswith("Use fewer registers per thread")
    assert rules(asked(recorded(GEMM))) == []  # less than a wave: its grid is what is small
    assert rules(asked(recorded(GEMM | {"grid_x": 132}), low_occupancy_share=0.18)) == []


def test_a_last_wave_that_is_nearly_empty() -> None:
    result = asked(recorded(GEMM | {"grid_x": 198}))  # 1.5 waves: a quarter of the room for two
    one = finding(result, "tail-wave")
    assert values_of(one)["tail_share"] == 0.25
    assert values_of(one)["waves_ratio"] == 1.5
    assert one.saving is not None
    assert one.saving.upper_bound_ns == 250
    assert "tail-wave" not in rules(asked(recorded(GEMM | {"grid_x": 199})))
    assert "tail-wave" not in rules(asked(recorded(GEMM | {"grid_x": 264})))


# -- measured activity -----------------------------------------------------------------------------------------------


def measured(spread: float = 0.0, clock: float | None = 1000.0, **values: float) -> Trace:
    clocks = [] if clock is None else [{"t_ns": 0, "metric": "sm_clock_mhz", "value": clock}]
    classes = [kernel_class("small", 1000, block_x=128, grid_x=132)]
    rows = counters(0, spread, **values)
    return recorded(SMALL, kernel_classes=classes, counters=rows, samples=clocks)


def test_u_by_hand() -> None:
    # Half of the 132 SMs at work for 1,000 ns at 1,000 MHz: 66,000 cycles; 4 warps of the 64 slots of an SM that works;
    # a block has 4,096 of 65,536 registers.
    result = asked(measured(sm_active_share=0.5, instructions_count=264_000.0))
    one = row(result)
    assert one["instructions_per_cycle_ratio"] == pytest.approx(4.0)
    assert one["utilisation_ratio"] == pytest.approx(4 * 4.0 / 64 * (1 - 1 / 16) ** 2)
    assert result.metric("utilisation_ratio") == pytest.approx(0.2197265625)
    assert result.metric("sm_active_share") == 0.5
    assert one["expected_sm_active_share"] == 1
    assert result.collect_with == ""


def test_u_of_a_block_that_has_nearly_all_registers() -> None:
    classes = [kernel_class("gemm", 1000, block_x=384, grid_x=128)]
    clock = [{"t_ns": 0, "metric": "sm_clock_mhz", "value": 2000.0}]
    rows = counters(0, sm_active_share=0.5, instructions_count=66_000.0)  # over 132,000 cycles
    one = row(asked(recorded(GEMM, kernel_classes=classes, counters=rows, samples=clock)))
    assert one["instructions_per_cycle_ratio"] == pytest.approx(0.5)
    assert one["utilisation_ratio"] == pytest.approx(12 * 0.5 / 64 * (1 / 64) ** 2)  # 1,024 registers are left


def test_bounds_of_u() -> None:
    one = row(asked(measured(0.1, sm_active_share=0.5, instructions_count=264_000.0)))
    assert one["low_instructions_per_cycle_ratio"] == pytest.approx(4 * 0.9 / 1.1)
    assert one["high_instructions_per_cycle_ratio"] == pytest.approx(4 * 1.1 / 0.9)
    vague = measured(0.2, sm_active_share=0.5, instructions_count=264_000.0)  # 4 × 0.8 / 1.2 to 4 × 1.2 / 0.8
    assert "utilisation_ratio" not in asked(vague).tables["classes"]
    assert row(asked(vague, max_bounds_ratio=2.5))["utilisation_ratio"] == pytest.approx(0.2197265625)


def test_without_counters_u_is_not_measured_and_the_flag_is_named() -> None:
    result = asked(recorded(SMALL))
    for name in ("sm_active_share", "utilisation_ratio"):
        assert result.metric(name) is None
        assert next(m.reason for m in result.metrics if m.name == name) == "SMs at work were not counted"
    assert result.collect_with == "spikeprof run --counters -- CMD"
    assert "sm_active_share" not in result.tables["classes"]


def test_without_a_clock_or_instructions_u_is_not_measured() -> None:
    for trace in (
        measured(clock=None, sm_active_share=0.5, instructions_count=264_000.0),
        measured(sm_active_share=0.5),
    ):
        result = asked(trace)
        assert result.metric("sm_active_share") == 0.5
        assert result.metric("utilisation_ratio") is None


def test_the_clock_is_that_of_the_nearest_reading() -> None:
    # Launches at 100 and 1,200 ns; readings at 0, 500 and 1,000 ns.
    clocks = [(0, 400.0), (500, 1000.0), (1000, 600.0)]
    samples = [{"t_ns": t, "metric": "sm_clock_mhz", "value": mhz} for t, mhz in clocks]
    classes = [kernel_class("small", 2000, 2, block_x=128, grid_x=132)]
    rows = counters(0, sm_active_share=1.0, instructions_count=66_000.0)
    result = asked(recorded(SMALL, SMALL, kernel_classes=classes, counters=rows, samples=samples))
    # 132 SMs for 1,000 ns at the mean of 400 and 600 MHz
    assert row(result)["instructions_per_cycle_ratio"] == pytest.approx(66_000 / (132 * 1000 * 0.5))


def test_sms_that_work_less_than_the_grid_lets_expect() -> None:
    result = asked(measured(0.1, sm_active_share=0.3))
    one = finding(result, "idle-blocks")
    assert values_of(one)["sm_active_share"] == 0.3
    assert values_of(one)["expected_sm_active_share"] == 1
    assert values_of(one)["activity_of_expected_share"] == pytest.approx(0.33)
    assert rules(asked(measured(0.1, sm_active_share=0.46))) == []  # its upper bound is above half


def test_warps_as_the_driver_measured_them() -> None:
    """Three readings of which one reaches out of the recorded window: the mean over 1,000 ns beside theory."""
    samples = [
        {"t_ns": t, "metric": "gpm_occupancy_share", "value": v} for t, v in ((0, 0.9), (1000, 0.02), (2000, 0.7))
    ]
    window = [{"start_ns": 0, "end_ns": 1500}]
    kernel = {**SMALL, "start_ns": 200, "end_ns": 600}
    result = asked(tiny.trace(kernels=[kernel], devices=[H100], samples=samples, windows=window))
    assert result.metric("held_warps_share") == pytest.approx(0.02)
    assert result.metric("expected_held_warps_share") == pytest.approx(4 / 64 * 400 / 1000)  # 4 warps on every SM
    assert result.metric("held_warps_ns") == 1000
    assert asked(recorded(SMALL)).metric("held_warps_share") is None


# -- neighbours ------------------------------------------------------------------------------------------------------


def test_two_small_kernels_would_fit_into_one() -> None:
    other = SMALL | {"name": "other", "registers_count": 40, "block_x": 256, "shared_static_bytes": 1000}
    result = asked(recorded(*[SMALL, other] * 20), min_pairs_count=19)
    first, second = (row(result, "pairs", i) for i in (0, 1))
    assert (first["kernel"], first["next_kernel"], first["met_count"], first["gap_ns"]) == ("small", "other", 20, 100)
    assert first["verdict"] == "fits"
    # 72 registers a thread: 2,304 a warp, 8 warps of the larger block
    assert first["thread_registers_share"] == pytest.approx(72 / 255)
    assert first["block_registers_share"] == pytest.approx(8 * 2304 / 65_536)
    assert (first["shared_sum_bytes"], first["shared_max_bytes"]) == (1000, 1000)
    assert first["alone_occupancy_share"] == 0.75  # 40 registers: 48 warps
    assert first["fused_occupancy_share"] == pytest.approx(24 / 64)  # 7 warps a partition: 28, of which 3 blocks of 8
    assert second["met_count"] == 19
    assert first["pair_time_share"] == 1
    one = next(f for f in result.findings if f.rule == "fusion-fits")
    assert (one.scope["kernel"], one.scope["next_kernel"]) == ("small", "other")
    assert result.metric("pairs_fits_count") == 39
    assert asked(recorded(*[SMALL, other] * 20)).metric("pairs_fits_count") == 20  # 19 times is not often


def test_a_large_kernel_and_a_small_one_would_not() -> None:
    result = asked(recorded(*[GEMM, SMALL] * 20))
    one = next(f for f in result.findings if f.rule == "fusion-too-large")
    # 200 registers: 6,400 a warp, 12 warps; 164,308 bytes of the first alone
    assert values_of(one)["block_registers_share"] == pytest.approx(12 * 6400 / 65_536)
    assert values_of(one)["shared_max_bytes"] == 164_308
    assert values_of(one)["thread_registers_share"] == pytest.approx(200 / 255)
    assert one.scope["resource"] == "block_registers+shared_memory"
    assert one.recommendation.startswith("Keep the two apart: one is too large by itself")
    assert row(result, "pairs")["fused_occupancy_share"] == 0  # such a block fits nowhere


@pytest.mark.parametrize(
    ("registers", "shared", "verdict", "lacking"),
    [
        ((108, 108), (0, 0), "fits", ""),  # 216 of 255: 84.7 %
        ((108, 109), (0, 0), "too_large", "thread_registers"),  # 217: 85.1 %
        ((32, 32), (24_576, 24_576), "fits", ""),  # 48 KB together
        ((32, 32), (24_576, 24_577), "if_shared", ""),
        ((32, 32), (49_152, 49_152), "if_shared", ""),
        ((32, 32), (0, 49_153), "too_large", "shared_memory"),
    ],
)
def test_limits(registers: tuple[int, int], shared: tuple[int, int], verdict: str, lacking: str) -> None:
    pair = [
        SMALL | {"name": name, "registers_count": r, "shared_dynamic_bytes": s}
        for name, r, s in zip("ab", registers, shared, strict=True)
    ]
    found = row(asked(recorded(*pair), min_pairs_count=1), "pairs")
    assert (found["verdict"], found["lacking"]) == (verdict, lacking)


def test_two_that_are_too_large_only_together() -> None:
    pair = [SMALL | {"name": name, "registers_count": 120} for name in "ab"]
    result = asked(recorded(*pair * 20))
    one = next(f for f in result.findings if f.rule == "fusion-too-large")
    assert one.recommendation == "Keep the two apart, or fuse them with smaller tiles."


def test_what_is_not_right_after_is_no_neighbour() -> None:
    other = SMALL | {"name": "other"}
    ask: dict[str, Any] = {"min_pairs_count": 1}
    assert asked(recorded(SMALL, other), **ask).tables["pairs"]["met_count"] == [1]
    copy = [{"start_ns": 1100, "end_ns": 1150}]
    assert asked(recorded(SMALL, other, memory_ops=copy), **ask).tables["pairs"]["kernel"] == []
    assert asked(recorded(SMALL, other | {"stream": 8}), **ask).tables["pairs"]["kernel"] == []
    assert asked(recorded(SMALL, other | {"gap": 100_001}), **ask).tables["pairs"]["kernel"] == []
    assert asked(recorded(SMALL, other), min_pairs_count=2).tables["pairs"]["kernel"] == []


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void vllm::cross_device_reduce_1stage<__half, 2>(vllm::RankData*)",
        "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
    ],
)
def test_kernels_that_move_data_between_gpus_take_few_sms_on_purpose(name: str) -> None:
    result = asked(recorded(*[SMALL, SMALL | {"name": name, "grid_x": 16}] * 20))
    assert rules(result) == []
    assert result.tables["pairs"]["kernel"] == []
    assert len(result.tables["classes"]["kernel"]) == 2


def test_a_pair_of_which_one_is_not_known() -> None:
    result = asked(recorded(SMALL, SMALL | {"name": "other", "registers_count": 0}), min_pairs_count=1)
    found = row(result, "pairs")
    assert (found["verdict"], found["lacking"], found["fused_occupancy_share"]) == ("unknown", "", None)
    assert [r for r in rules(result) if r.startswith("fusion")] == []


# -- real recordings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h200_eager_decode", "h200_graph_decode"])
def test_sample_traces(name: str) -> None:
    result = asked(open_trace(ROOT / "sample_traces" / name))
    check_metrics(result)
    check_tables(result)
    check_findings(FusionBoundary(), result)
    table = result.tables["classes"]
    gemm = row(result, number=table["kernel"].index("nvjet_sm90_hsh_8x64_64x16_2x1_v_bz_TNN"))
    # 168 registers, 384 threads, 164,308 bytes; a grid of 2 × 64 on 132 SMs
    assert (gemm["active_blocks_count"], gemm["occupancy_share"]) == (1, 12 / 64)
    assert gemm["limiter"] == "registers+shared_memory"
    assert gemm["expected_sm_active_share"] == pytest.approx(128 / 132)
    assert gemm["low_sm_active_share"] < gemm["sm_active_share"] < gemm["expected_sm_active_share"]
    assert 0.4 < gemm["instructions_per_cycle_ratio"] < 0.5
    room = (1 - 64_512 / 65_536) ** 2
    assert gemm["utilisation_ratio"] == pytest.approx(12 / 64 * gemm["instructions_per_cycle_ratio"] * room)
    assert result.metric("known_time_share") == 1
    # What was measured is below what theory lets expect, for SMs and for warps.
    for measured_name in ("sm_active_share", "held_warps_share"):
        assert 0 < (result.metric(measured_name) or 0) < (result.metric(f"expected_{measured_name}") or 0)
    assert {"small-grid", "fusion-fits", "fusion-too-large"} <= set(rules(result))
