from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tiny
from contracts.test_analyzers import check_findings, check_metrics, check_tables
from counted import H200, READ, WRITTEN, counters, kernel_class
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT, SHARED, needs_shared

from spikeprof.analyzers.base import Finding, Result
from spikeprof.analyzers.derived.fusion_bytes import Moved, element_bytes, moved_by
from spikeprof.analyzers.derived.fusion_chains import MOST_MEMBERS, find_runs, saved
from spikeprof.analyzers.derived.fusion_tables import kernels
from spikeprof.analyzers.fusion_coverage import FusionCoverage
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.trace import Trace

MIB = 2**20
GEMM = "nvjet_sm90_hsh_128x128_64x4_1x2_h_bz_TNT"
SILU = "void at::native::vectorized_elementwise_kernel<8, at::native::silu_kernel(x)::{lambda(c10::Half)#1}>"
MUL = "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::Half, MulFunctor<float> > >"
ADD = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::Half> >"
POW = "void at::native::vectorized_elementwise_kernel<4, at::native::pow_tensor_scalar_kernel_impl<float, float> >"
RSQRT = "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda(x)::{lambda(float)#1}>"
TO_FLOAT = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(x)::{lambda(float)#1}>"
TO_HALF = "void at::native::vectorized_elementwise_kernel<8, at::native::float16_copy_kernel_cuda(x)>"
MEAN = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float> > >"
FLASH = "void pytorch_flash::flash_fwd_kernel<x>(pytorch_flash::Flash_fwd_params)"
FUSED = "triton_poi_fused_mul_silu_0"


def recorded(*names: str | dict[str, Any], ns: int = 1000, gap: int = 100, **tables: Any) -> Trace:
    """Kernels one after the other on one stream, of ``ns`` each, ``gap`` apart; a dict overrides columns."""
    rows, now = [], 0
    for name in names:
        row = {"name": name} if isinstance(name, str) else dict(name)
        now += row.pop("gap", gap)
        length = row.pop("ns", ns)
        rows.append({"start_ns": now, "end_ns": now + length, **row})
        now += length
    return tiny.trace(duration_ns=now + 1, kernels=rows, devices=[H200], **tables)


def counted(chain: list[tuple[str, int, float, float]], times: int = 10, spread: float = 0.0) -> Trace:
    """A chain of (name, ns, MiB read, MiB written), run so many times, a second apart."""
    rows = [{"name": n, "ns": ns, "grid_x": i + 1} for i, (n, ns, _, _) in enumerate(chain)]
    rows[0] = rows[0] | {"gap": 10**9}
    classes = [kernel_class(n, ns * times, times, block_x=128, grid_x=i + 1) for i, (n, ns, _, _) in enumerate(chain)]
    values = [
        row
        for i, (_, _, read, written) in enumerate(chain)
        for row in counters(i, spread, **{READ: read * MIB, WRITTEN: written * MIB})
    ]
    return recorded(*rows * times, kernel_classes=classes, counters=values)


def asked(trace: Trace, **options: Any) -> Result:
    result = run_one(trace, FusionCoverage(**options))
    assert result.status in ("ok", "findings"), result.reason
    check_metrics(result)
    check_tables(result)
    check_findings(FusionCoverage(), result)
    return result


def row(result: Result, table: str, number: int = 0) -> dict[str, Any]:
    return {name: values[number] for name, values in result.tables[table].items()}


def finding(result: Result, rule: str) -> Finding:
    (one,) = (f for f in result.findings if f.rule == rule)
    return one


def rules(result: Result) -> list[str]:
    return [f.rule for f in result.findings]


def values_of(one: Finding) -> dict[str, float]:
    return {e.metric: e.value for e in one.evidence}


# -- coverage --------------------------------------------------------------------------------------------------------


def test_an_eager_mlp_is_not_fused_at_all_and_a_compiled_one_is() -> None:
    eager = asked(recorded(GEMM, SILU, GEMM, MUL, GEMM))
    assert (eager.metric("fused_time_share"), eager.metric("fused_launches_share")) == (0, 0)
    assert eager.metric("fusible_time_share") == 0.4  # products are none of it
    compiled = asked(recorded(GEMM, GEMM, FUSED, GEMM))
    assert (compiled.metric("fused_time_share"), compiled.metric("fused_of_all_time_share")) == (1, 0.25)
    assert row(compiled, "kernels", 1)["why"] == "Inductor joined mul and silu"


def test_coverage_by_hand() -> None:
    # fused: attention 3,000 and triton 1,000 ns; fusible beside them SILU 2,000 and a copy 500 ns; not: GEMM, unknown.
    result = asked(
        recorded(
            {"name": FLASH, "ns": 3000}, FUSED, {"name": SILU, "ns": 2000}, {"name": TO_HALF, "ns": 500},
            {"name": GEMM, "ns": 2500}, {"name": "mystery", "ns": 1000},
        )
    )  # fmt: skip
    assert result.metric("fused_time_share") == pytest.approx(4000 / 6500)
    assert result.metric("fused_launches_share") == pytest.approx(2 / 4)
    assert result.metric("fused_of_all_time_share") == pytest.approx(0.4)
    assert result.metric("fused_of_all_launches_share") == pytest.approx(2 / 6)
    assert result.metric("fusible_time_share") == pytest.approx(0.65)
    assert result.metric("unknown_time_share") == pytest.approx(0.1)
    verdicts = {r: row(result, "verdicts", i)["total_ns"] for i, r in enumerate(result.tables["verdicts"]["verdict"])}
    assert verdicts == {"fused": 1000, "library_fused": 3000, "single": 4500, "copy": 500, "unknown": 1000}
    assert row(result, "kernels")["kernel"] == FLASH


def test_coverage_by_bytes_is_of_what_was_counted() -> None:
    result = asked(counted([(FUSED, 1000, 4, 2), (SILU, 1000, 8, 4), (GEMM, 1000, 40, 2)]))
    assert result.metric("fused_bytes_share") == pytest.approx(6 / 18)
    assert result.metric("fused_of_all_bytes_share") == pytest.approx(6 / 60)
    assert row(result, "kernels")["bytes_from"] == "counted"
    assert row(result, "verdicts")["moved_bytes"] == 60 * MIB
    assert result.collect_with == ""


def test_without_counters_and_shapes_bytes_are_not_measured() -> None:
    result = asked(recorded(SILU, MUL))
    for name in ("fused_bytes_share", "fused_of_all_bytes_share"):
        (metric,) = (m for m in result.metrics if m.name == name)
        assert metric.value is None
        assert "neither DRAM counters nor operators" in metric.reason
    assert result.collect_with == "spikeprof run --counters -- CMD"
    assert row(result, "chains")["saved_bytes"] is None
    assert rules(result) == []


def test_bytes_that_are_known_of_little_time_are_not_taken_for_all() -> None:
    classes = [kernel_class(FUSED, 1000, block_x=128, grid_x=1)]
    trace = recorded(
        FUSED, {"name": SILU, "ns": 1001}, kernel_classes=classes, counters=counters(0, **{READ: 9.0, WRITTEN: 9.0})
    )
    assert asked(trace).metric("fused_bytes_share") is None
    assert asked(trace, min_known_share=0.4).metric("fused_bytes_share") == 1


def test_nothing_that_fusing_is_about() -> None:
    result = asked(recorded(GEMM, "ncclDevKernel_AllReduce_Sum_f16_RING_LL"))
    assert result.metric("fused_time_share") is None
    assert result.metric("fused_of_all_time_share") == 0


def test_no_kernel_ran() -> None:
    assert run_one(recorded(), FusionCoverage()).status == "not_applicable"


# -- what a chain saves ----------------------------------------------------------------------------------------------


def test_silu_and_product_by_hand() -> None:
    # 40 MiB in and out; the 8 MiB between the two are written and read for nothing.
    result = asked(counted([(SILU, 4000, 8, 8), (MUL, 6000, 16, 8)]))
    chain = row(result, "chains")
    assert (chain["members_count"], chain["runs_count"], chain["total_ns"]) == (2, 10, 100_000)
    assert (chain["traffic_bytes"], chain["saved_bytes"], chain["fused_traffic_bytes"]) == (
        40 * MIB,
        16 * MIB,
        24 * MIB,
    )
    one = finding(result, "unfused-chain")
    assert one.scope == {"chain": "silu → mul", "kernel": SILU}
    assert one.severity == "info"  # nobody could look whether something else reads it
    assert one.recommendation.endswith(
        "First make sure that each reads what the one before it wrote, and nothing else does."
    )
    assert values_of(one)["saved_share"] == pytest.approx(0.4)
    assert one.saving is not None
    assert one.saving.upper_bound_ns == 40_000  # two fifths of 10,000 ns, ten times
    assert [row(result, "members", i)["saved_bytes"] for i in (0, 1)] == [0, 16 * MIB]


def test_the_time_saved_leaves_the_traffic_that_is_left_at_dram_s_peak() -> None:
    # 24 MiB at 4.8 TB/s take 5,243 ns of 7,000.
    result = asked(counted([(SILU, 3000, 8, 8), (MUL, 4000, 16, 8)]))
    saving = finding(result, "unfused-chain").saving
    assert saving is not None
    assert saving.upper_bound_ns == pytest.approx(10 * (7000 - 24 * MIB / 4.8e12 * 1e9), abs=10)


def test_an_activation_behind_a_product_vanishes_whole() -> None:
    # The product reads 8 and writes 8 MiB, SiLU reads and writes 8: what is saved is all that SiLU moves.
    result = asked(counted([(GEMM, 50_000, 8, 8), (SILU, 6000, 8, 8)]))
    one = finding(result, "unfused-chain")
    assert values_of(one)["saved_share"] == pytest.approx(0.5)
    assert one.saving is not None
    assert one.saving.upper_bound_ns == 60_000
    assert "epilogue" in one.recommendation


def test_rms_norm_with_residual_by_hand() -> None:
    """As separate operators, a unit being the tensor in fp16: 13 units read, 10 written; one kernel moves 4."""
    n = 8.0
    chain = [
        (ADD, 5000, 2 * n, n),
        (TO_FLOAT, 5000, n, 2 * n),
        (POW, 5000, 2 * n, 2 * n),
        (MEAN, 5000, 2 * n, 0.01),
        (ADD, 5000, 0.01, 0.01),
        (RSQRT, 5000, 0.01, 0.01),
        (MUL, 5000, 2 * n + 0.01, 2 * n),
        (TO_FLOAT, 5000, 0.01, 0.02),  # the weight
        (MUL, 5000, 2 * n + 0.02, 2 * n),
        (TO_HALF, 5000, 2 * n, n),
    ]
    chain_row = row(asked(counted(chain)), "chains")
    assert chain_row["members_count"] == 10
    assert chain_row["traffic_bytes"] == pytest.approx(23 * n * MIB, rel=0.01)
    # The stack takes the fp32 input for read once, the sum for not needed after: 18 units of what are 19.
    assert chain_row["saved_bytes"] == pytest.approx(18 * n * MIB, rel=0.01)
    assert chain_row["saved_bytes"] == pytest.approx(19 * n * MIB, rel=0.2)


def test_what_a_rotation_of_halves_reads_is_told_apart() -> None:
    """x cos + cat(-x2, x1) sin: the first product waits on the stack while the halves are turned."""
    found = saved([1, 0.5, 1, 1, 2], [1, 0.5, 1, 1, 1], 0.75)
    assert found == [0, 0, 1, 2, 4]


def test_too_little_saved_is_no_finding() -> None:
    chain = [(SILU, 4000, 8, 8), (MUL, 6000, 24, 8)]  # a third
    assert rules(asked(counted(chain))) == []
    assert rules(asked(counted(chain), min_saved_share=0.33)) == ["unfused-chain"]


def test_traffic_that_is_not_well_known_or_little_is_no_finding() -> None:
    chain = [(SILU, 4000, 8, 8), (MUL, 6000, 16, 8)]
    assert rules(asked(counted(chain, spread=0.6))) == []
    assert rules(asked(counted(chain, spread=0.4))) == ["unfused-chain"]
    small = [(name, ns, read / 100, written / 100) for name, ns, read, written in chain]
    assert rules(asked(counted(small))) == []
    assert rules(asked(counted(small), min_traffic_bytes=400_000)) == ["unfused-chain"]


def test_a_chain_that_takes_little_time_is_no_finding() -> None:
    chain = [(SILU, 400, 8, 8), (MUL, 600, 16, 8), (FLASH, 99_001, 1, 1)]
    assert rules(asked(counted(chain))) == []
    assert rules(asked(counted(chain), min_time_share=0.009)) == ["unfused-chain"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)), max_size=20),
    st.floats(0.1, 1),
)
def test_no_more_is_saved_than_is_read_after_the_first_and_written_before_the_last(
    moved: list[tuple[float, float]], least: float
) -> None:
    read, written = [r for r, _ in moved], [w for _, w in moved]
    found = saved(read, written, least)
    assert len(found) == len(moved)
    assert min(found, default=0) >= 0
    assert sum(found) <= (sum(read[1:]) + sum(written[:-1])) * (1 + 1e-9)
    for reads, one in zip(read, found, strict=True):
        assert one <= reads * (1 + 1 / least) * (1 + 1e-9)


# -- what is a chain -------------------------------------------------------------------------------------------------


def members(result: Result) -> list[list[str]]:
    """The kernels of each chain, the one that took most time first."""
    table = result.tables["members"]
    found: dict[int, list[str]] = {}
    for number, kernel in zip(table["chain_id"], table["kernel"], strict=True):
        found.setdefault(number, []).append(kernel)
    return list(found.values())


def test_products_come_in_front_and_only_before_pointwise_work() -> None:
    assert members(asked(recorded(SILU, GEMM, SILU, MUL, GEMM))) == [[GEMM, SILU, MUL]]
    assert members(asked(recorded(GEMM, ADD, POW, MEAN))) == [[ADD, POW, MEAN]]
    assert members(asked(recorded(GEMM, FLASH, GEMM))) == []
    assert members(asked(recorded(FLASH, SILU, FLASH))) == []


@pytest.mark.parametrize(
    "between",
    [
        {"gap": 100_001},
        {"stream": 8},
        {"rank": 1},
        {"graph_id": 3},
    ],
)
def test_what_parts_a_chain(between: dict[str, Any]) -> None:
    assert members(asked(recorded(SILU, MUL))) == [[SILU, MUL]]
    assert members(asked(recorded(SILU, {"name": MUL, **between}))) == []


def test_a_copy_between_two_kernels_parts_them() -> None:
    copy = [{"start_ns": 1110, "end_ns": 1150}]
    assert members(asked(recorded(SILU, MUL, memory_ops=copy))) == []
    assert members(asked(recorded(SILU, MUL, memory_ops=[copy[0] | {"stream": 9}]))) == [[SILU, MUL]]


def test_replays_and_marked_steps_part_chains() -> None:
    graph = {"graph_id": 3, "correlation_id": 1}
    again = graph | {"correlation_id": 2}
    whole = recorded({"name": SILU, **graph}, {"name": MUL, **graph}, {"name": SILU, **again}, {"name": MUL, **again})
    assert row(asked(whole), "chains")["runs_count"] == 2
    marks = [{"start_ns": i * 50, "end_ns": i * 50 + 50, "kind": "step", "name": "step"} for i in (0, 1)]
    calls = [{"start_ns": 10 + 50 * (i // 2), "end_ns": 20 + 50 * (i // 2), "correlation_id": i + 1} for i in range(4)]
    names = [{"name": n, "correlation_id": i + 1} for i, n in enumerate((SILU, MUL, SILU, MUL))]
    assert members(asked(recorded(*names))) == [[SILU, MUL, SILU, MUL]]
    assert row(asked(recorded(*names, ranges=marks, runtime_calls=calls)), "chains")["runs_count"] == 2


def test_a_run_without_end_is_cut() -> None:
    found = members(asked(recorded(*[SILU] * (MOST_MEMBERS + 3))))
    assert [len(one) for one in found] == [MOST_MEMBERS, 3]
    named = finding(asked(recorded(*[SILU] * 8, MUL, ADD, POW)), "short-chain").scope["chain"]
    assert named == "silu → silu → silu → silu → silu → … → silu → silu → mul → add → pow"


def test_fused_kernels_may_be_part_of_a_chain() -> None:
    assert members(asked(recorded(FUSED, ADD))) == [[FUSED, ADD]]


_NAMES = st.sampled_from([GEMM, SILU, MUL, MEAN, FLASH, TO_HALF])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_NAMES, st.sampled_from([100, 100, 200_000]), st.sampled_from([7, 7, 8])), max_size=40))
def test_chains_are_those_of_a_plain_walk(drawn: list[tuple[str, int, int]]) -> None:
    trace = recorded(*({"name": name, "gap": gap, "stream": stream} for name, gap, stream in drawn))
    of = kernels(trace)
    runs = find_runs(trace, of.of, of.work, 100_000)
    found = sorted(tuple(runs.row[f : f + n].tolist()) for f, n in zip(runs.first, runs.length, strict=True))
    assert found == sorted(walked(trace))
    kinds = [tuple(of.of.of_kernel[runs.row[f : f + n]].tolist()) for f, n in zip(runs.first, runs.length, strict=True)]
    for a, one in zip(kinds, runs.kind, strict=True):
        for b, other in zip(kinds, runs.kind, strict=True):
            assert (a == b) == (one == other)


def walked(trace: Trace) -> list[tuple[int, ...]]:
    rows = trace.table("kernels").to_pylist()
    found: list[list[int]] = []
    for stream in (7, 8):
        mine: list[list[int]] = []
        before: dict[str, Any] | None = None
        for number, one in enumerate(rows):
            if one["stream"] != stream:
                continue
            near = before is not None and one["start_ns"] - before["end_ns"] <= 100_000
            joins = one["name"] in (SILU, MUL, MEAN, TO_HALF)
            if near and joins and before is not None and before["name"] != FLASH:
                mine[-1].append(number)
            else:
                mine.append([number])
            before = one
        for chain in mine:
            names = [rows[i]["name"] for i in chain]
            found.append(chain[1:] if names[0] == GEMM and MEAN in names else chain)
    return [tuple(chain) for chain in found if len(chain) > 1]


# -- short kernels ---------------------------------------------------------------------------------------------------


def test_short_kernels_in_a_row_are_named_by_their_time_alone() -> None:
    result = asked(recorded(SILU, MUL, {"name": ADD, "ns": 2000}))
    one = finding(result, "short-chain")
    assert values_of(one)["members_count"] == 3
    assert values_of(one)["longest_ns"] == 2000
    assert one.saving is not None
    assert one.saving.upper_bound_ns == 2000  # of 4,000 ns, one of 2,000 stays
    assert rules(asked(recorded(SILU, MUL))) == []
    assert rules(asked(recorded(SILU, MUL, {"name": ADD, "ns": 5001}))) == []
    behind = finding(asked(recorded({"name": GEMM, "ns": 9000}, SILU, MUL, ADD)), "short-chain")
    assert behind.saving is not None
    assert behind.saving.upper_bound_ns == 3000


# -- operators, shapes and the graph of the model --------------------------------------------------------------------


def shapes(*shape: list[int]) -> str:
    return json.dumps(list(shape))


HALF = json.dumps(["c10::Half"] * 3)


@pytest.mark.parametrize(
    ("operator", "given_shapes", "dtypes", "moved"),
    [
        ("aten::mul", shapes([4, 8], [4, 8]), HALF, Moved(128, 64)),
        ("aten::mul", shapes([4, 8], [8]), HALF, Moved(80, 64)),
        ("aten::mul", shapes([4, 8], []), HALF, Moved(64, 64)),
        ("aten::mul", shapes([4, 1], [8]), '["float", "float"]', Moved(48, 128)),
        ("aten::add_", shapes([4, 8], [4, 8], []), '["float", "c10::Half", "Scalar"]', Moved(192, 128)),
        ("aten::eq", shapes([4, 8], [4, 8]), HALF, Moved(128, 32)),
        ("aten::where", shapes([4, 8], [4, 8], [4, 8]), '["bool", "float", "float"]', Moved(288, 128)),
        ("aten::mm", shapes([4, 8], [8, 16]), HALF, Moved(2 * (32 + 128), 2 * 64)),
        ("aten::addmm", shapes([16], [4, 8], [8, 16], [], []), json.dumps(["float"] * 3), Moved(4 * 176, 4 * 64)),
        ("aten::bmm", shapes([3, 4, 8], [3, 8, 16]), HALF, Moved(2 * 3 * 160, 2 * 3 * 64)),
        ("aten::mean", shapes([4, 8], []), '["float"]', Moved(128, 16)),
        ("aten::_softmax", shapes([4, 8], []), HALF, Moved(64, 64)),
        ("aten::cat", "[[[4, 8], [4, 8]], []]", '["c10::Half", "Scalar"]', Moved(128, 128)),
        ("aten::cat", "[[[4, 8], [4, 8]], []]", '["TensorList", "Scalar"]', None),
        ("aten::copy_", shapes([4, 8], [4, 8]), '["float", "c10::Half"]', Moved(64, 128)),
        ("aten::fill_", shapes([4, 8], []), HALF, Moved(0, 64)),
        ("aten::mul", shapes([4, 8], [4, 8]), "", Moved(64, 32, True)),
        ("aten::mm", shapes([4, 8], [8, 16]), "", Moved(160, 64, True)),
        ("aten::copy_", shapes([4, 8], [4, 8]), "", None),  # of two types, neither known
        ("aten::mm", shapes([4, 8], [9, 16]), HALF, None),
        ("aten::mul", "", "", None),
        ("aten::mul", "[[4,", HALF, None),
        ("aten::mul", '{"a": 1}', HALF, None),
        ("aten::mul", '[[-1, 8], "x", null]', HALF, None),
        ("aten::mul", shapes([2**30, 2**30]), HALF, None),  # no such tensor
        ("aten::mul", shapes([2**40, 1], [1, 2**40]), HALF, None),
        ("aten::view", shapes([4, 8]), HALF, None),
        ("mine::op", shapes([4, 8]), HALF, None),
    ],
)  # fmt: skip
def test_what_operators_move(operator: str, given_shapes: str, dtypes: str, moved: Moved | None) -> None:
    assert moved_by(operator, given_shapes, dtypes) == moved


def test_sizes_of_elements_by_names() -> None:
    assert [element_bytes(name) for name in (SILU, POW, GEMM, "nvjet_sm90_sss_8x8")] == [2, 4, 2, 4]
    assert np.isnan(element_bytes("mystery"))


def owned(*pairs: tuple[str, str, str], shape: str = "", **tables: Any) -> Trace:
    """Kernels one after the other of (name, operator, module); ``shape`` of all inputs. Once, 6,000 ns each."""
    modules = [{"path": path, "parent_id": -1} for path in dict.fromkeys(m for _, _, m in pairs)]
    paths = [m["path"] for m in modules]
    origins = [
        {"op": op, "module_id": paths.index(module), "stack_id": -1, "input_shapes": shape, "input_dtypes": ""}
        for _, op, module in pairs
    ]
    owners = [{"kernel_id": i, "origin_id": i} for i in range(len(pairs))]
    names = [{"name": name, "grid_x": i + 1, "ns": 6000} for i, (name, _, _) in enumerate(pairs)]
    return recorded(*names, modules=modules, origins=origins, kernel_owners=owners, **tables)


PAIR = ((SILU, "aten::silu", "mlp"), (MUL, "aten::mul", "mlp"))
SHAPE = shapes([1024, 4096], [1024, 4096])  # 8 MiB each of halves


def test_bytes_are_modelled_from_the_shapes_of_operators() -> None:
    result = asked(owned((SILU, "aten::silu", "mlp"), (MUL, "aten::mul", "mlp"), shape=SHAPE))
    chain = row(result, "chains")
    assert chain["bytes_from"] == "modelled"
    assert chain["traffic_bytes"] == (16 + 8 + 16 + 8) * MIB  # the test gives SiLU two inputs
    assert chain["saved_bytes"] == 16 * MIB
    assert result.metric("known_bytes_time_share") == 1
    assert result.metric("fused_bytes_share") == 0


def test_what_an_operator_launches_beside_its_own_kind_of_kernel_is_not_modelled_by_its_shapes() -> None:
    mm = ("aten::addmm", "mlp")
    trace = owned((TO_HALF, *mm), (GEMM, *mm), shape=shapes([1024], [4096, 512], [512, 1024]))
    result = asked(trace)
    assert [row(result, "kernels", i)["bytes_from"] for i in (0, 1)] == ["unknown", "modelled"]
    assert row(result, "kernels", 1)["moved_bytes"] == 2 * (1024 + 4096 * 512 + 512 * 1024 + 4096 * 1024)


def test_counters_go_before_models() -> None:
    classes = [kernel_class(SILU, 6000, block_x=128, grid_x=1)]
    rows = counters(0, **{READ: 1.0 * MIB, WRITTEN: 2.0 * MIB})
    result = asked(owned(*PAIR, shape=SHAPE, kernel_classes=classes, counters=rows))
    assert [row(result, "members", i)["read_bytes"] for i in (0, 1)] == [MIB, 16 * MIB]
    assert row(result, "chains")["bytes_from"] == "modelled"  # the less sure of the two


def test_a_kernel_of_unknown_name_is_what_its_operator_is() -> None:
    result = asked(owned(("mystery", "aten::gelu", "mlp"), ("secret", "mine::op", "mlp")))
    assert [row(result, "kernels", i)["verdict"] for i in (0, 1)] == ["single", "unknown"]
    assert row(result, "kernels")["why"] == "launched by aten::gelu, one node of the graph"
    named = asked(owned((GEMM, "aten::addmm", "mlp"), (SILU, "triton::mine", "mlp")))
    assert [row(named, "kernels", i)["does"] for i in (0, 1)] == ["addmm", "silu"]


def model(readers: list[tuple[str, str]]) -> dict[str, Any]:
    """silu and mul of the module mlp, and who reads them: pairs of (from, to) of node names."""
    names = ["x", "silu", "mul", "view", "add_", "_assert_tensor_metadata", "add"]
    nodes = [{"name": n, "kind": "op", "op": f"aten::{n}", "module": "mlp"} for n in names]
    nodes[0] |= {"kind": "input", "op": ""}
    nodes[-1]["module"] = "other"
    storage = {"view": 1, "add_": 1}
    tensors = [{"node_id": i, "storage_id": storage.get(n, i)} for i, n in enumerate(names)]
    edges = [{"src_node_id": names.index(a), "dst_node_id": names.index(b)} for a, b in readers]
    return {"model_nodes": nodes, "model_tensors": tensors, "model_edges": edges}


@pytest.mark.parametrize(
    ("readers", "answer", "severity"),
    [
        ([("x", "silu"), ("silu", "mul")], "chain_only", "warning"),
        ([("silu", "mul"), ("silu", "add")], "others_too", ""),
        ([("silu", "view"), ("view", "mul")], "chain_only", "warning"),  # a view of it is it
        ([("silu", "view"), ("view", "mul"), ("view", "add")], "others_too", ""),
        ([("silu", "add_"), ("add_", "mul")], "others_too", ""),  # what changes it in place reads it
        ([("silu", "_assert_tensor_metadata"), ("silu", "mul")], "chain_only", "warning"),
        ([], "not_checked", "info"),  # who reads it is outside the graph
    ],
)
def test_readers_by_the_graph_of_the_model(readers: list[tuple[str, str]], answer: str, severity: str) -> None:
    trace = owned(*PAIR, shape=shapes([1024, 4096]), **model(readers))
    result = asked(trace, min_saved_share=0.3)
    assert row(result, "chains")["read_by"] == answer
    assert [f.severity for f in result.findings] == ([severity] if severity else [])
    # Two of 8 MiB in, two out: what lies between is not written or not read; if others read it, it must be written.
    assert row(result, "chains")["saved_bytes"] == (8 if answer == "others_too" else 16) * MIB
    if severity == "warning":
        assert finding(result, "unfused-chain").recommendation.endswith("fused operator.")


def test_kernels_of_one_node_and_a_residual_stream() -> None:
    """The sum goes to the norm and on: it is written in any case. What the norm's kernels hand on is its own."""
    kernels_of = [
        (ADD, "aten::add", "block"),
        (POW, "aten::pow", "norm"),
        (MEAN, "aten::mean", "norm"),
        (MUL, "aten::mul", "norm"),
    ]
    nodes = [
        {"name": n, "kind": "op", "op": f"aten::{n}", "module": m}
        for n, m in (("add", "block"), ("rms_norm", "norm"), ("linear", "mlp"))
    ]
    tensors = [{"node_id": i, "storage_id": i} for i in range(3)]
    edges = [{"src_node_id": a, "dst_node_id": b} for a, b in ((0, 1), (0, 2), (1, 2))]
    graph = {"model_nodes": nodes, "model_tensors": tensors, "model_edges": edges}
    result = asked(owned(*kernels_of, shape=shapes([1024, 4096]), **graph))
    assert row(result, "chains")["read_by"] == "others_too"
    spared = [row(result, "members", i)["saved_bytes"] for i in range(4)]
    # The sum's 8 MiB are not read again; the power's 16 are neither written nor read.
    assert spared[:3] == [0, 8 * MIB, 16 * MIB + 16 * MIB]


def test_a_kernel_that_the_graph_does_not_have_is_not_checked() -> None:
    trace = owned((SILU, "aten::silu", "elsewhere"), PAIR[1], shape=SHAPE, **model([("silu", "mul")]))
    assert row(asked(trace), "chains")["read_by"] == "not_checked"


# -- real recordings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h200_eager_decode", "h200_graph_decode"])
def test_sample_traces(name: str) -> None:
    result = asked(open_trace(ROOT / "sample_traces" / name))
    assert result.metric("unknown_time_share") == 0
    table = result.tables["kernels"]
    assert {k for k, v in zip(table["kernel"], table["verdict"], strict=True) if v == "library_fused"} <= {
        k for k in table["kernel"] if "flash" in k or "fmha" in k
    }
    longest = members(result)[0]
    assert len(longest) == 9  # addition and RMS norm of a layer, as separate kernels
    assert "MeanOps" in longest[3]
    # A decode step of one token moves next to nothing between kernels: the chain is named for its time.
    assert set(rules(result)) == {"short-chain"}


@needs_shared
def test_a_compiled_model() -> None:
    path = next((SHARED / "traces").glob("**/torch_compile_triton/trace.json.gz"), None)
    if path is None:
        pytest.skip("the recording of a compiled model is not in the shared folder")
    result = asked(open_trace(path))
    verdicts = dict(zip(result.tables["kernels"]["kernel"], result.tables["kernels"]["verdict"], strict=True))
    assert verdicts["triton_poi_fused__unsafe_view_mul_silu_2"] == "fused"
    assert verdicts["triton_red_fused_add_mean_mul_pow_rsqrt_0"] == "fused"
    assert verdicts["triton_poi_fused__unsafe_view_add_3"] == "single"
