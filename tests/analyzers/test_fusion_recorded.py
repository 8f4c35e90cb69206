"""What fusing saves and what a compiler fuses, by recordings of an H200; on a GPU: tests/gpu/test_fusion.py."""

from __future__ import annotations

import pytest
from fused_twins import TWINS, asked, check_coverage, check_saved, moved, saved
from gpu.fusion_programs import REPEATS
from paths import ROOT

from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.trace import Trace

#: Programs of which ``sample_traces/h200_fusion`` has all twins.
RECORDED = ("gemm_silu_mul", "rms_norm")


def recorded(name: str, how: str) -> Trace:
    return open_trace(ROOT / "sample_traces" / "h200_fusion" / f"{name}_{how}")


@pytest.mark.parametrize("name", RECORDED)
def test_what_fusing_was_predicted_to_save_it_saved(name: str) -> None:
    check_saved(name, saved(recorded(name, "eager"), [recorded(name, how) for how in TWINS[name]]))


def test_the_prediction_for_a_product_with_silu_and_product_is_that_by_hand() -> None:
    """The product writes 16384 × 16384 halves that SiLU reads, which writes as many that the last one reads."""
    predicted = saved(recorded("gemm_silu_mul", "eager"), []).predicted_bytes
    assert predicted == pytest.approx(4 * 2 * 16384 * 16384, rel=0.02)


@pytest.mark.parametrize("how", ["first", "second"])
def test_a_twin_saves_its_own_part_of_a_chain(how: str) -> None:
    """By hand: the one result in between that it keeps in registers, written once and read once."""
    before, after = moved(recorded("gemm_silu_mul", "eager"))[0], moved(recorded("gemm_silu_mul", how))[0]
    assert before - after == pytest.approx(2 * 2 * 16384 * 16384, rel=0.05)


def test_a_compiler_fused_what_eager_operators_did_apart() -> None:
    check_coverage(recorded("pointwise", "eager"), recorded("pointwise", "compiled"))


def test_what_a_compiler_made_is_fused_whole() -> None:
    """Coverage of the repeats alone, without the variants that the compiler tried out before."""
    trace = recorded("pointwise", "compiled")
    begin = sorted(trace.column("kernels", "start_ns").tolist())[-REPEATS]
    result = asked(trace.narrowed(begin, trace.manifest.duration_ns))
    assert result.metric("fused_time_share") == 1
    assert result.tables["kernels"]["kernel"] == ["triton_poi_fused_add_gelu_mul_silu_tanh_0"]
    assert result.tables["kernels"]["launches_count"] == [REPEATS]
