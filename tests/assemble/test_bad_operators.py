"""What processes say of bad operators, to rows: values by hand, and lines that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from spikeprof.profiler.assemble.bad_operators import operator_row
from spikeprof.profiler.assemble.spool import read_process

TENSOR = {"shape": [2, 8], "dtype": "float16", "amax": 12.5, "nan": 0, "inf": 3}
EVENT = {
    "ev": "numerics_operator", "t": 5, "step": 4, "order": 9, "module": "layers.1", "class_name": "Mlp",
    "role": "output", "rerun": "layers.1", "exact": True, "taken": [TENSOR], "operator": "aten::exp",
    "file": "/app/model.py", "line": 41, "function": "forward", "before": 3, "inputs": [TENSOR, TENSOR],
    "output": {**TENSOR, "amax": None}, "first_bad": 7, "why_not": "",
}  # fmt: skip
NOT_KNOWN = {
    "ev": "numerics_operator", "t": 5, "step": 4, "order": 9, "module": "", "class_name": "Model", "role": "output",
    "why_not": "it did not come back",
}  # fmt: skip


def test_an_operator_becomes_a_row() -> None:
    row = operator_row(EVENT)
    assert (row["step"], row["order"], row["op"], row["line"], row["before_count"]) == (4, 9, "aten::exp", 41, 3)
    assert (row["kept"], row["first_bad_index"], row["run_module"]) == ("first", 7, "layers.1")
    assert json.loads(row["inputs"]) == [TENSOR, TENSOR]
    assert json.loads(row["output"]) == {**TENSOR, "amax": None}
    assert operator_row({**EVENT, "exact": False})["kept"] == "later"


def test_one_that_is_not_known_has_the_reason() -> None:
    row = operator_row(NOT_KNOWN)
    assert (row["op"], row["why_not"], row["kept"], row["first_bad_index"]) == ("", "it did not come back", "none", -1)
    assert (row["file"], row["line"], row["inputs"], row["output"], row["taken"]) == ("", 0, "[]", "", "[]")


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": None},
        {"step": 1 << 63},
        {"line": 1 << 31},
        {"inputs": 3},
        {"inputs": [{}]},
        {"inputs": [{**TENSOR, "shape": [math.inf]}]},
        {"inputs": [{**TENSOR, "amax": -1.0}]},
        {"output": {**TENSOR, "amax": math.nan}},
        {"first_bad": -2},
        {"exact": []},
    ],
)
def test_a_line_that_cannot_be_true_is_left_out_and_counted(tmp_path: Path, wrong: dict[str, Any]) -> None:
    file = tmp_path / "77-1.jsonl"
    file.write_text(json.dumps({**EVENT, **wrong}) + "\n" + json.dumps(NOT_KNOWN) + "\n")
    process = read_process(file)
    assert [row["op"] for row in process.numerics.operators] == [""]
    assert process.damaged_lines == 1
