from __future__ import annotations

import math
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from scanned import asked, bad, evidence, found, rules, scan

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.derived.numerics_formats import format_of, formats
from spikeprof.analyzers.derived.numerics_heat import layer_of
from spikeprof.analyzers.derived.numerics_scans import scans_of
from spikeprof.analyzers.overflow import Overflow
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.trace import CollectorNote


def table(result: Result, name: str, *columns: str) -> list[tuple[Any, ...]]:
    return list(zip(*(result.tables[name][column] for column in columns), strict=True))


# -- formats -----------------------------------------------------------------------------------------------------------


def test_limits_of_floats_are_torch_s() -> None:
    torch = pytest.importorskip("torch")
    for name, one in formats().items():
        if not one.is_integer:
            limits = torch.finfo(getattr(torch, name))
            # Magnitudes of floats: 2 to the mantissa's bits steps lie between the smallest and the smallest normal.
            assert (one.largest, one.smallest_normal) == (limits.max, limits.smallest_normal)
            assert one.smallest == limits.smallest_normal * limits.eps
            assert one.codes_bits == limits.bits


def test_limits_are_those_that_the_collector_counts_by() -> None:
    from spikeprof.profiler.inject.numerics.formats import FORMATS

    for name, counted in FORMATS.items():
        one = format_of(name)
        assert one is not None
        assert one.largest == counted.limit
        if not one.is_integer:
            assert one.smallest_normal == counted.value(counted.normal)


def test_other_names_of_formats() -> None:
    assert format_of("torch.half") is format_of("fp16") is formats()["float16"]
    assert format_of("complex64") is None


# -- headroom ----------------------------------------------------------------------------------------------------------


def test_headroom_is_how_often_the_largest_magnitude_can_double() -> None:
    result = asked(scan(0, 0, "a", 16_376.0), scan(0, 1, "b", 65_504.0, dtype="float32"))
    assert result.status == "ok"
    assert dict(table(result, "tensors", "module", "headroom_bits"))["a"] == 2.0  # 65504 / 16376 = 4
    assert result.metric("float16_headroom_bits") == 2.0
    assert result.metric("float32_headroom_bits") == pytest.approx(128 - math.log2(65504), abs=1e-6)


def test_less_than_a_doubling_is_named_with_its_first_step_and_its_worst_value() -> None:
    result = asked(scan(0, 0, "a", 100.0), scan(1, 0, "a", 40_000.0), scan(2, 0, "a", 50_000.0), scan(2, 1, "b", 3.0))
    (finding,) = result.findings
    assert (finding.rule, finding.severity) == ("near-overflow", "warning")
    assert finding.scope == {"module": "a", "dtype": "float16", "step": 1}
    assert evidence(finding) == {
        "amax_value": 50_000.0,
        "headroom_bits": pytest.approx(math.log2(65504 / 50000)),
        "near_steps_count": 2,
        "scanned_steps_count": 3,
    }
    assert finding.evidence[0].limit == 65_504.0


def test_from_60000_on_the_warning_of_fp16_is_the_limit() -> None:
    (finding,) = asked(scan(0, 0, "a", 60_000.0)).findings
    assert (finding.evidence[0].limit, finding.evidence[0].limit_source) == (60_000.0, "fp16_warn_value")
    lax = Overflow(min_headroom_bits=0.05)
    assert asked(scan(0, 0, "a", 59_999.0), analyzer=lax).status == "ok"  # log2(65504 / 59999) = 0.127
    assert rules(asked(scan(0, 0, "a", 60_000.0), analyzer=lax)) == ["near-overflow"]
    assert asked(scan(0, 0, "a", 60_000.0, dtype="bfloat16")).status == "ok"


def test_the_limit_of_fp16_is_an_option() -> None:
    strict = Overflow(fp16_limit_value=1024.0)
    assert asked(scan(0, 0, "a", 256.0), analyzer=strict).metric("float16_headroom_bits") == 2.0


def test_a_tensor_of_zeros_or_of_an_unknown_format_has_no_headroom() -> None:
    result = asked(
        scan(0, 0, "zeros", 0.0, smallest_value=math.nan, zero_count=1000),
        scan(0, 1, "empty", math.nan, smallest_value=math.nan, elements_count=0),
        scan(0, 2, "ids", 50_000.0, dtype="int64"),
    )
    assert result.status == "ok"
    assert result.tables["tensors"]["headroom_bits"] == [None, None, None]
    assert result.metric("float16_headroom_bits") is None


# -- bad values --------------------------------------------------------------------------------------------------------


def test_the_first_bad_scan_of_the_first_bad_step_is_the_origin() -> None:
    rows = [
        *(scan(0, order, f"layers.{order}") for order in range(4)),
        scan(1, 0, "layers.0"),
        scan(1, 1, "layers.1", 41.0),
        bad(1, 2, "layers.2", nan_count=0),
        bad(1, 3, "layers.3", inf_count=0),
        bad(2, 0, "layers.0"),  # poisoned by what was kept
        bad(2, 2, "layers.2"),
    ]
    result = asked(*reversed(rows))
    (origin,) = found(result, "nan-origin")
    assert origin.severity == "critical"
    assert origin.scope == {"module": "layers.2", "dtype": "float16", "step": 1}
    assert evidence(origin) == {
        "bad_elements_count": 2,
        "fine_before_count": 2,
        "victims_count": 1,
        "inf_count": 2,
        "nan_count": 0,
        "elements_count": 1000,
        "first_bad_element_id": 7,
        "amax_before_value": 41.0,
    }
    assert "BF16" in origin.recommendation
    assert table(result, "around", "step", "order", "state", "module") == [
        (1, 0, "fine", "layers.0"),
        (1, 1, "fine", "layers.1"),
        (1, 2, "first bad", "layers.2"),
        (1, 3, "victim", "layers.3"),
    ]
    assert table(result, "bad_steps", "step", "module", "bad_tensors_count") == [(1, "layers.2", 2), (2, "layers.0", 2)]


def test_tensors_that_were_bad_first_in_a_step_are_found_once_each() -> None:
    rows = [bad(step, order, f"m{order}") for step in range(3) for order in range(5)]
    for step in range(3, 6):
        rows += [scan(step, 0, "fine"), bad(step, 5, f"later{step}")]
    result = asked(*rows[:15])
    (overflow,) = found(result, "overflow")
    assert overflow.scope == {"module": "m0", "dtype": "float16", "step": 0}
    assert evidence(overflow)["bad_steps_count"] == 3
    assert (evidence(overflow)["inf_count"], evidence(overflow)["nan_count"]) == (6, 15)
    named = [finding.scope["module"] for finding in found(asked(*rows), "overflow")]
    assert named == ["m0", "later3", "later4"]  # no more of one rule


def test_what_comes_in_from_the_step_before_is_not_named_again() -> None:
    rows = [
        scan(0, 0, "a"),
        bad(0, 1, "b"),
        bad(1, 0, "a"),
        bad(1, 1, "b"),
        scan(2, 0, "a"),
        bad(2, 1, "c", inf_count=0),
    ]
    overflows = found(asked(*rows), "overflow")
    assert [finding.scope["module"] for finding in overflows] == ["b", "c"]
    assert "left in a cache" in overflows[1].recommendation
    alone = [bad(0, 0, "a", rank=0), bad(0, 0, "b", rank=1)]  # of another process
    assert [finding.scope["module"] for finding in found(asked(*alone), "overflow")] == ["a", "b"]


def test_the_worst_tensors_come_first_in_the_order_in_which_they_went_bad() -> None:
    result = asked(*(bad(step, order, f"m{order}") for step in range(3) for order in range(5)), scan(0, 9, "fine"))
    assert (result.metric("bad_tensors_count"), result.metric("bad_steps_count")) == (5, 3)
    assert [row[0] for row in table(result, "tensors", "module")] == ["m0", "m1", "m2", "m3", "m4", "fine"]


def test_every_process_has_its_own_origin_and_alike_ones_are_one() -> None:
    rows = [
        *(bad(3, 0, "a", rank=rank) for rank in (0, 1)),
        *(bad(5, 1, "b", rank=rank) for rank in (2, 3)),
        scan(5, 0, "a", rank=2),
    ]
    result = asked(*rows)
    first, second = found(result, "nan-origin")
    assert (first.scope["module"], first.scope["rank"], evidence(first)["processes_count"]) == ("a", 0, 2)
    assert (second.scope["module"], second.scope["rank"], second.scope["step"]) == ("b", 2, 5)


def test_inputs_that_were_scanned_are_shown_to_be_fine() -> None:
    inputs = [scan(0, order, "a", 300.0 + order, role="input") for order in (0, 1)]
    (origin,) = found(asked(*inputs, bad(0, 2, "a", dtype="float32", inf_count=0)), "nan-origin")
    assert evidence(origin)["inputs_amax_value"] == 301.0
    assert "0 / 0" in origin.recommendation


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([bad(0, 0, "a")], "--numerics-roles"),
        ([bad(0, 0, "a", role="weight")], "Load the weights anew"),
        ([scan(0, 0, "before"), bad(0, 1, "a", role="input")], "between before, which was fine"),
        ([scan(0, 0, "before"), bad(0, 1, "a", dtype="float32")], "division by zero"),
        ([scan(0, 0, "before"), bad(0, 1, "a", scanned="changed")], "what writes into this tensor after the module"),
    ],
)
def test_what_to_do_depends_on_where_it_began(rows: list[dict[str, Any]], words: str) -> None:
    (origin,) = found(asked(*rows), "nan-origin")
    assert words in origin.recommendation


def test_steps_that_nobody_looked_at_are_counted() -> None:
    (origin,) = found(asked(scan(0, 0, "a"), bad(16, 0, "a")), "nan-origin")
    assert evidence(origin)["unseen_steps_count"] == 15
    (origin,) = found(asked(scan(15, 0, "a"), bad(16, 0, "a")), "nan-origin")
    assert "unseen_steps_count" not in evidence(origin)


def test_gradients_go_bad_in_reverse_order() -> None:
    forward = [scan(0, order, f"layers.{order}") for order in range(3)]
    backward = [
        scan(0, 3, "layers.2", role="gradient"),
        bad(0, 4, "layers.1", role="gradient"),
        bad(0, 5, "layers.0", role="gradient"),
    ]
    (origin,) = found(asked(*forward, *backward), "nan-origin")
    assert origin.scope == {"module": "layers.1", "role": "gradient", "dtype": "float16", "step": 0}
    assert evidence(origin)["victims_count"] == 1
    assert "the gradient that layers.2 got was fine" in origin.recommendation
    (origin,) = found(asked(*forward, *backward[1:]), "nan-origin")
    assert "Look at the loss" in origin.recommendation


@st.composite
def many_scans(draw: st.DrawFn) -> list[dict[str, Any]]:
    rows = []
    for rank in range(draw(st.integers(1, 2))):
        for step in draw(st.lists(st.integers(0, 6), unique=True, max_size=4)):
            for order in range(draw(st.integers(0, 5))):
                make = bad if draw(st.integers(0, 3)) == 0 else scan
                module, amax = draw(st.sampled_from("abc")), draw(st.floats(2.0**-24, 65504))
                rows.append(make(step, order, module, amax=amax, rank=rank))
    return draw(st.permutations(rows))


@given(many_scans())
def test_origins_and_totals_are_those_of_a_plain_search(rows: list[dict[str, Any]]) -> None:
    result = asked(*rows)
    if not rows:
        assert result.status == "not_applicable"
        return
    ordered = sorted(rows, key=lambda row: (row["rank"], row["step"], row["order"]))
    expected = {}
    for row in ordered:
        if "nan_count" in row:
            expected.setdefault(row["rank"], row)
    firsts = sorted(expected.values(), key=lambda row: (row["step"], row["rank"]))
    assert [finding.scope["module"] for finding in found(result, "nan-origin")] == list(
        dict.fromkeys(row["module"] for row in firsts)
    )
    amax = dict(table(result, "tensors", "module", "amax_value"))
    assert amax == {m: max(r["amax_value"] for r in rows if r["module"] == m) for m in {r["module"] for r in rows}}
    steps = {(row["rank"], row["step"]) for row in rows}
    assert result.metric("scanned_steps_count") == len(steps)
    cells = table(result, "heat", "module", "step", "last_step", "headroom_bits", "bad_scans_count")
    for module, first, last, headroom, bad_count in cells:
        inside = [row for row in rows if row["module"] == module and first <= row["step"] <= last]
        assert headroom == pytest.approx(min(math.log2(65504 / row["amax_value"]) for row in inside))
        assert bad_count == sum("nan_count" in row for row in inside)
    assert len(cells) == len({(row["module"], row["step"]) for row in rows})


# -- end codes, zeros, subnormals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "role", "saturated", "rule"),
    [
        ("int8", "output", 10, "int8-saturation"),
        ("int8", "output", 9, None),
        ("uint8", "kv", 49, None),
        ("uint8", "kv", 50, "int8-saturation"),
        ("int4", "weight", 249, None),
        ("int4", "weight", 250, "int8-saturation"),
        ("float8_e4m3fn", "output", 10, "near-overflow"),
        ("float8_e5m2", "output", 9, None),
        ("float16", "output", 999, None),
    ],
)
def test_end_codes_count_where_the_format_is_scaled(dtype: str, role: str, saturated: int, rule: str | None) -> None:
    result = asked(scan(0, 0, "a", 1.0, dtype=dtype, role=role, saturated_count=saturated))
    assert rules(result) == ([rule] if rule else [])
    if rule:
        assert evidence(result.findings[0])["saturated_share"] == saturated / 1000


@pytest.mark.parametrize(("saturated", "told"), [(16, False), (32, False), (33, True)])
def test_a_scale_for_each_row_puts_two_of_it_at_the_ends(saturated: int, told: bool) -> None:
    """16 rows of 64 elements: the least and the largest of each are 3.1 % of all, beyond the limit of 1 %."""
    row = scan(
        0, 0, "a", dtype="int8", elements_count=1024, rows_count=16, dimensions_count=2, saturated_count=saturated
    )
    assert [finding.rule for finding in asked(row).findings] == ["int8-saturation"] * told


def test_codes_have_no_headroom_finding() -> None:
    assert asked(scan(0, 0, "a", 127.0, dtype="int8"), scan(0, 1, "b", 448.0, dtype="float8_e4m3fn")).status == "ok"


def test_zeros_beside_subnormals_are_an_underflow() -> None:
    lost = {"zero_count": 200, "subnormal_count": 40, "smallest_value": 2.0**-24}
    (finding,) = asked(scan(0, 0, "a", 0.01, **lost)).findings
    assert finding.rule == "underflow"
    assert evidence(finding) == {
        "zero_share": 0.2,
        "smallest_value": 2.0**-24,
        "subnormal_share": 0.05,
        "amax_value": 0.01,
    }


def test_zeros_alone_are_none() -> None:
    """Half of what a ReLU gives is zero, and of many elements a few are subnormal."""
    assert asked(scan(0, 0, "relu", 3.0, zero_count=500, subnormal_count=4)).status == "ok"


def test_zeros_that_grow_are_an_underflow() -> None:
    rows = [scan(step, 0, "a", zero_count=40 * step, dtype="bfloat16") for step in range(16)]
    (finding,) = asked(*rows).findings
    assert finding.rule == "underflow"
    # Last quarter (12 to 15): 0.54 on average; first quarter (0 to 3): 0.06.
    assert evidence(finding)["zero_growth_share"] == pytest.approx(0.48)
    assert asked(*rows[:7]).status == "ok"  # too few to tell
    assert asked(*(scan(step, 0, "a", zero_count=400) for step in range(16))).status == "ok"


def test_signed_codes_that_are_zero_are_an_underflow() -> None:
    assert rules(asked(scan(0, 0, "a", 2.0, dtype="int8", zero_count=900))) == ["underflow"]
    assert asked(scan(0, 0, "a", 2.0, dtype="int8", zero_count=899)).status == "ok"
    assert asked(scan(0, 0, "a", 2.0, dtype="uint8", zero_count=9, role="kv")).status == "ok"


def test_subnormals_are_counted_of_what_is_not_zero() -> None:
    result = asked(scan(0, 0, "a", 0.001, zero_count=0, subnormal_count=100))
    assert rules(result) == ["subnormal-heavy"]
    assert asked(scan(0, 0, "a", 0.001, subnormal_count=99)).status == "ok"
    share = evidence(asked(scan(0, 0, "a", 0.001, zero_count=5, subnormal_count=199)).findings[0])
    assert share["subnormal_share"] == 199 / 995


# -- trend -------------------------------------------------------------------------------------------------------------


def test_growth_tells_the_step_of_the_overflow() -> None:
    rows = [scan(step, 0, "a", 2.0 ** (step / 10)) for step in range(40)]
    result = asked(*rows)
    (finding,) = result.findings
    assert finding.rule == "overflow-trend"
    assert finding.scope["step"] == 39
    # log2(65504) = 15.9993: at 0.1 bits a step it is reached at step 159.99, 121 after step 39.
    assert evidence(finding)["steps_to_overflow_count"] == 121
    assert evidence(finding)["steps_per_doubling_count"] == pytest.approx(10)
    assert evidence(finding)["trend_correlation_ratio"] == 1.0
    assert table(result, "trends", "overflow_step", "earliest_overflow_step", "latest_overflow_step") == [
        (160, 160, 160)
    ]


def test_growth_that_ended_in_nan_is_told_of_its_last_finite_step() -> None:
    rows = [scan(step, 0, "a", 2.0 ** (step / 10)) for step in range(40)]
    rows += [bad(40, 0, "a", amax=math.nan)]
    (finding,) = found(asked(*rows), "overflow-trend")
    assert (finding.scope["step"], evidence(finding)["steps_to_overflow_count"]) == (39, 121)
    assert evidence(finding)["amax_value"] == 2.0**3.9


def test_a_few_steps_that_stick_out_change_little() -> None:
    rows = [scan(step, 0, "a", 2.0 ** (step / 10) * (300 if step % 8 == 3 else 1)) for step in range(40)]
    (finding,) = found(asked(*rows), "overflow-trend")
    assert evidence(finding)["steps_to_overflow_count"] == pytest.approx(121, abs=12)


@pytest.mark.parametrize(
    "height",
    [
        lambda step: 5.0,
        lambda step: 9.0 - step / 10,
        lambda step: 5.0 + (step * 7919 % 13) / 13,
        lambda step: step / 1000,
        lambda step: 14.0 if step < 5 else 2.0,
    ],
    ids=["flat", "falls", "noise", "too slow to matter", "prompt first"],
)
def test_no_trend_is_none(height: Any) -> None:
    rows = [scan(step, 0, "a", 2.0 ** height(step)) for step in range(40)]
    assert found(asked(*rows), "overflow-trend") == []


def test_many_steps_are_joined_to_stretches() -> None:
    rows = [scan(step, 0, "a", 2.0 ** (step / 1000)) for step in range(10_000)]
    (finding,) = found(asked(*rows), "overflow-trend")
    assert evidence(finding)["steps_to_overflow_count"] == 15_999 - 9_999


# -- figures and notes -------------------------------------------------------------------------------------------------


def test_rows_of_the_heatmap_are_layers_where_there_are_many_modules() -> None:
    paths = ["embed", *(f"layers.{layer}.{part}" for layer in range(30) for part in ("attention", "mlp")), "norm"]
    result = asked(*(scan(0, order, path, 2.0 ** (order % 9)) for order, path in enumerate(paths)))
    labels = list(dict.fromkeys(result.tables["heat"]["module"]))
    assert labels == ["embed", *(f"layers.{layer}" for layer in range(30)), "norm"]
    cells = dict(table(result, "heat", "module", "headroom_bits"))
    assert cells["layers.3"] == pytest.approx(math.log2(65504) - 8)  # the worse of orders 7 and 8
    few = asked(*(scan(0, order, path) for order, path in enumerate(paths)), analyzer=Overflow(heat_rows_count=16))
    assert list(dict.fromkeys(few.tables["heat"]["module"]))[:2] == ["embed to layers.0", "layers.1 to layers.2"]


def test_steps_of_the_heatmap_are_joined() -> None:
    result = asked(*(scan(step, 0, "a", 2.0 ** (step % 7)) for step in range(120)), bad(77, 1, "a"))
    bins = table(result, "heat", "step", "last_step", "bad_scans_count")
    assert len(bins) == 50
    assert [last + 1 for _, last, _ in bins][:-1] == [first for first, _, _ in bins][1:]
    assert [(first <= 77 <= last) == (count == 1) for first, last, count in bins] == [True] * 50


def test_layers() -> None:
    assert layer_of("model.layers.7.mlp.experts.3") == "model.layers.7"
    assert layer_of("lm_head") == "lm_head"
    assert layer_of("") == ""


def test_not_collected_is_not_healthy() -> None:
    result = run_one(tiny.trace(), Overflow())
    assert (result.status, result.collect_with) == ("not_measured", "spikeprof run --numerics -- CMD")
    assert asked().status == "not_applicable"


def test_what_was_not_checked_is_named() -> None:
    note = CollectorNote("degraded", "not checked: layers.3 (returns no tensor)", dropped_count=4)
    result = asked(scan(0, 0, "a"), note=note)
    assert result.reason == "not checked: layers.3 (returns no tensor)"
    assert result.metric("scans_dropped_count") == 4


def test_what_codes_stand_for_is_held_against_the_format_of_the_scale() -> None:
    codes = {"dtype": "int8", "role": "kv", "real_dtype": "float16"}
    rows = [
        scan(0, 0, "a", 127.0, real_amax_value=32752.0, **codes),  # 1 bit
        scan(1, 0, "a", 127.0, real_amax_value=40000.0, **codes),
        scan(1, 1, "b", 127.0, real_amax_value=70000.0, **codes),
        scan(1, 2, "c", 127.0, real_amax_value=70000.0, **{**codes, "real_dtype": "bfloat16"}),
        scan(1, 3, "d", 127.0, **{**codes, "real_dtype": ""}),
        scan(1, 4, "d", 60000.0, role="scale"),  # is in what the codes stand for
    ]
    result = asked(*rows)
    assert result.metric("float16_headroom_bits") is None
    assert [one.scope["module"] for one in found(result, "near-overflow")] == ["b", "a"]
    one = found(result, "near-overflow")[1]
    assert dict(one.scope) == {"module": "a", "role": "kv", "dtype": "int8", "step": 1, "real_dtype": "float16"}
    seen = evidence(one)
    assert (seen["real_amax_value"], seen["near_steps_count"], seen["scanned_steps_count"]) == (40000.0, 1, 2)
    assert seen["headroom_bits"] == pytest.approx(math.log2(65504 / 40000))
    table = result.tables["tensors"]
    assert dict(zip(table["module"], table["real_amax_value"], strict=True)) == {
        "a": 40000.0, "b": 70000.0, "c": 70000.0, "d": None,
    }  # fmt: skip


def test_400_000_scans_take_a_second_or_two() -> None:
    import time

    import numpy as np
    import pyarrow as pa

    from spikeprof.profiler.schema import TABLES
    from spikeprof.profiler.trace import Trace

    steps, modules = 2_000, 200
    order, step = (part.ravel() for part in np.meshgrid(np.arange(modules), np.arange(steps)))
    columns = {name: np.zeros(len(step)) for name in TABLES["tensor_stats"].arrow.names}
    columns |= {"order": order, "step": step, "amax_value": 1.0 + order, "elements_count": np.full(len(step), 4096)}
    texts = {
        name: pa.array([{"dtype": "float16", "real_dtype": ""}.get(name, "output")])
        for name in ("class_name", "role", "dtype", "real_dtype", "scanned")
    }
    texts["module"] = pa.array([f"layers.{at}" for at in range(modules)])
    made = {
        name: pa.DictionaryArray.from_arrays(
            pa.array(order if name == "module" else np.zeros(len(step), int), pa.int32()), texts[name]
        )
        if name in texts
        else pa.array(values)
        for name, values in columns.items()
    }
    trace = tiny.trace()
    whole = Trace(trace.manifest, {"tensor_stats": pa.table(made).cast(TABLES["tensor_stats"].arrow)})
    assert len(scans_of(whole, 65504.0)) == 400_000
    began = time.process_time()
    assert run_one(whole, Overflow()).metric("watched_modules_count") == modules
    assert time.process_time() - began < 5
