"""The first bad operator in the finding and the tables: rows by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scanned import asked, bad, evidence, found, scan

from spikeprof.analyzers.base import Result


def tensor(amax: float | None, nan: int = 0, inf: int = 0, shape: tuple[int, ...] = (2, 8)) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": "float16", "amax": amax, "nan": nan, "inf": inf}


def row(**more: Any) -> dict[str, Any]:
    """exp of 12.5 at model.py:41, after three operators of layers.1."""
    known = {
        "step": 3,
        "order": 1,
        "module": "layers.1",
        "class_name": "Mlp",
        "role": "output",
        "kept": "first",
        "taken": json.dumps([tensor(4.0)]),
        "run_module": "layers.1",
        "op": "aten::exp",
        "file": "/app/model.py",
        "line": 41,
        "function": "forward",
        "before_count": 3,
        "inputs": json.dumps([tensor(12.5), tensor(None, inf=16)]),
        "output": json.dumps(tensor(60000.0, nan=1, inf=2)),
        "first_bad_index": 7,
        "why_not": "",
    }
    return {**known, **more}


def answer(*operators: dict[str, Any], **more: Any) -> Result:
    rows = [scan(0, 0, "layers.0"), scan(0, 1, "layers.1"), scan(3, 0, "layers.0", 2.0), bad(3, 1, "layers.1", **more)]
    return asked(*rows, bad_operators=list(operators))


def test_the_operator_its_line_and_its_inputs_are_in_the_finding() -> None:
    (origin,) = found(answer(row()), "nan-origin")
    assert (origin.scope["operator"], origin.scope["line"]) == ("aten::exp", "model.py:41")
    told = evidence(origin)
    # The module took 4, its operator 12.5; of its three bad elements two are infinite.
    assert (told["inputs_amax_value"], told["op_inputs_amax_value"]) == (4.0, 12.5)
    assert (told["op_bad_elements_count"], told["ops_before_count"]) == (3, 3)
    assert {one.basis for one in origin.evidence if one.metric.startswith("op_")} == {"measured"}


def test_of_a_later_step_it_is_inferred() -> None:
    (origin,) = found(answer(row(kept="later")), "nan-origin")
    bases = {one.metric: one.basis for one in origin.evidence}
    assert bases["op_inputs_amax_value"] == bases["inputs_amax_value"] == "inferred"


def test_what_the_module_took_stands_before_it() -> None:
    around = answer(row()).tables["around"]
    # 65504 / 4 is 2^14 but for a little.
    assert list(zip(around["state"], around["module"], around["role"], around["amax_value"], strict=True)) == [
        ("fine", "layers.0", "output", 2.0),
        ("input", "layers.1", "input", 4.0),
        ("first bad", "layers.1", "output", 1.0),
    ]
    assert around["headroom_bits"][1] == pytest.approx(13.999, abs=0.001)
    assert around["elements_count"][1] == 16
    assert answer(row(kept="later")).tables["around"]["state"][1] == "input later"


def test_scanned_inputs_and_those_of_a_module_around_it_are_not_shown_twice() -> None:
    scans = [scan(3, 0, "layers.1", 5.0, role="input"), bad(3, 1, "layers.1")]
    result = asked(*scans, bad_operators=[row()])
    assert result.tables["around"]["state"] == ["fine", "first bad"]
    assert evidence(found(result, "nan-origin")[0])["inputs_amax_value"] == 5.0
    assert "input" not in answer(row(run_module="")).tables["around"]["state"]


def test_its_table_has_a_row_for_each_tensor() -> None:
    table = answer(row()).tables["operator"]
    assert list(
        zip(*(table[name] for name in ("tensor", "shape", "amax_value", "nan_count", "inf_count")), strict=True)
    ) == [
        ("input", "2 × 8", 12.5, 0, 0),
        ("input", "2 × 8", None, 0, 16),
        ("output", "2 × 8", 60000.0, 1, 2),
    ]
    assert set(table["op"]) == {"aten::exp"}
    assert set(table["line"]) == {"model.py:41"}
    assert set(table["around"]) == {""}
    assert answer(row(run_module="")).tables["operator"]["around"][0] == "(model)"


@pytest.mark.parametrize(
    ("operators", "why"),
    [
        ([row(op="", why_not="it did not come back")], "it did not come back"),
        ([], "its process ended in a way that left no time to run the module again"),
        ([row(rank=1)], "its process ended in a way that left no time to run the module again"),
        ([row(module="head")], "head was run again instead"),
    ],
)
def test_where_it_is_not_known_the_reason_is(operators: list[dict[str, Any]], why: str) -> None:
    result = answer(*operators)
    (origin,) = found(result, "nan-origin")
    assert "operator" not in origin.scope
    assert result.tables["operator"]["why_not"] == [why]


def test_without_the_table_nothing_is_said_of_operators() -> None:
    result = asked(bad(3, 1, "layers.1"))
    assert result.tables["operator"]["op"] == []
    assert answer().tables["operator"]["op"] == [""]


@pytest.mark.parametrize("broken", ["", "[", "[1]", '[{"shape": 3}]', "[" * 5000, '[{"shape": ["x"], "amax": 1}]'])
def test_text_that_is_none_counts_as_nothing(broken: str) -> None:
    (origin,) = found(answer(row(taken=broken, inputs=broken, output=broken)), "nan-origin")
    assert origin.scope["operator"] == "aten::exp"
    assert "op_inputs_amax_value" not in evidence(origin)
    assert "op_bad_elements_count" not in evidence(origin)


def test_a_line_that_is_not_known_is_left_out() -> None:
    (origin,) = found(answer(row(file="", line=0)), "nan-origin")
    assert "line" not in origin.scope
    (origin,) = found(answer(row(file="C:\\app\\model.py")), "nan-origin")
    assert origin.scope["line"] == "model.py:41"
