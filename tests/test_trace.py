"""The Trace: what it holds, what it withholds, and a stretch of it."""

from __future__ import annotations

import pyarrow as pa
import pytest
import tiny

from spikeprof.profiler.errors import MissingTable
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import coded


def test_an_analyzer_sees_only_what_it_declared() -> None:
    trace = tiny.trace(kernels=[], memory_ops=[])
    seen = trace.restricted(["kernels", "steps"])
    assert "kernels" in seen
    assert "memory_ops" not in seen
    with pytest.raises(MissingTable, match="memory_ops"):
        seen.table("memory_ops")


def test_a_stretch_holds_what_begins_in_it_and_its_windows_are_cut() -> None:
    trace = tiny.trace(
        duration_ns=1000,
        kernels=[{"start_ns": 90, "end_ns": 110}, {"start_ns": 100, "end_ns": 300}, {"start_ns": 200, "end_ns": 210}],
        runtime_calls=[{"start_ns": 50, "end_ns": 60, "correlation_id": 7}],
        samples=[{"t_ns": 99}, {"t_ns": 150}],
        devices=[{"device": 0}],
        windows=[
            {"state": "traced", "start_ns": 0, "end_ns": 120},
            {"state": "clean", "start_ns": 120, "end_ns": 150},
            {"state": "traced", "start_ns": 150, "end_ns": 900},
        ],
    ).narrowed(100, 200)
    assert trace.column("kernels", "start_ns").tolist() == [100]
    assert trace.column("samples", "t_ns").tolist() == [150]
    # Launched before, run here.
    assert trace.column("runtime_calls", "correlation_id").tolist() == [7]
    assert trace.table("devices").num_rows == 1
    windows = trace.table("windows").to_pylist()
    assert [(w["state"], w["start_ns"], w["end_ns"]) for w in windows] == [
        ("traced", 100, 120),
        ("clean", 120, 150),
        ("traced", 150, 200),
    ]


def test_a_stretch_does_not_know_where_the_counts_of_all_went() -> None:
    trace = tiny.trace(counter_balance=[{"device": 0}], counters=[{"class_id": 0}])
    part = trace.narrowed(0, 100)
    assert (trace.is_part, part.is_part, part.sound().restricted(["counters"]).is_part) == (False, True, True)
    assert ("counter_balance" in part, "counters" in part) == (False, True)


def test_a_stretch_of_an_imported_trace_is_what_was_recorded() -> None:
    trace = tiny.trace(kernels=[{"start_ns": 0, "end_ns": 10}], processes=[{"rank": 0}, {"rank": 3}]).narrowed(5, 50)
    rows = trace.table("windows").to_pylist()
    assert [(w["rank"], w["state"], w["start_ns"], w["end_ns"]) for w in rows] == [
        (0, "traced", 5, 50),
        (3, "traced", 5, 50),
    ]
    assert trace.table("kernels").num_rows == 0


@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())])
def test_texts_are_numbered_over_all_chunks_and_a_null_is_none_of_them(kind: pa.DataType) -> None:
    chunks = [pa.array(texts, pa.string()) for texts in (["a", "b"], ["c", None, "a"])]
    if pa.types.is_dictionary(kind):
        chunks = [chunk.dictionary_encode() for chunk in chunks]
    codes, labels = coded(pa.chunked_array(chunks))
    assert codes.dtype == "int32"
    assert [labels[code] if code >= 0 else None for code in codes] == ["a", "b", "c", None, "a"]
    assert sorted(labels) == ["a", "b", "c"]
    codes, labels = coded(pa.chunked_array([], kind))
    assert (len(codes), labels) == (0, [])


def test_a_table_of_rows_numbers_them_and_wants_all_else() -> None:
    row = {"rank": 0, "parent_id": -1, "path": "", "class_name": "Net"}
    table = TABLES["modules"].of_rows([row, row | {"parent_id": 0, "path": "mlp"}])
    assert table.schema == TABLES["modules"].arrow
    assert table.column("module_id").to_pylist() == [0, 1]
    assert table.column("path").to_pylist() == ["", "mlp"]
    assert TABLES["modules"].of_rows([]) == TABLES["modules"].empty()
    with pytest.raises(KeyError, match="class_name"):
        TABLES["modules"].of_rows([{name: row[name] for name in ("rank", "parent_id", "path")}])
