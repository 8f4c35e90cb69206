"""The origin of each kernel, found by hand; tables from elsewhere may name what is not there."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.analyzers.derived.cells import finite, json_list, numbers
from spikeprof.analyzers.derived.kernel_origins import MATCHES, kernel_origins, operators, referred

KERNELS = [{"kernel_id": i, "name": "k", "start_ns": 10 * i, "end_ns": 10 * i + 5} for i in (10, 11, 12, 13)]
ORIGINS = [
    {"origin_id": 0, "module_id": 0, "stack_id": 1, "op": "aten::mm"},
    {"origin_id": 1, "module_id": 2, "stack_id": -1, "op": None},
]
MODULES = [{"module_id": i, "path": f"m{i}"} for i in (0, 1)]


def owner(kernel: int, origin: int, match: str = "exact") -> dict[str, object]:
    return {"kernel_id": kernel, "origin_id": origin, "match": match}


def test_each_kernel_has_the_origin_that_is_there_in_whatever_order_the_rows_are() -> None:
    owners = [owner(13, 1, "graph"), owner(99, 0), owner(10, 0), owner(11, 2), owner(12, -1, "none"), owner(3, 1)]
    origin, match = kernel_origins(tiny.trace(kernels=KERNELS, kernel_owners=owners, origins=ORIGINS))
    assert origin.tolist() == [0, -1, -1, 1]  # there is no origin 2
    assert [MATCHES[i] for i in match] == ["exact", "none", "none", "graph"]


@given(st.lists(st.tuples(st.integers(5, 18), st.integers(-2, 3)), unique_by=lambda row: row[0]))
def test_any_owners_are_joined_as_a_dictionary_would(owners: list[tuple[int, int]]) -> None:
    rows = [owner(*row) for row in owners]
    origin, match = kernel_origins(tiny.trace(kernels=KERNELS, kernel_owners=rows, origins=ORIGINS))
    known = [dict(owners).get(i, -1) for i in (10, 11, 12, 13)]
    assert origin.tolist() == [one if 0 <= one < len(ORIGINS) else -1 for one in known]
    assert [MATCHES[i] == "exact" for i in match] == (origin >= 0).tolist()


@pytest.mark.parametrize("tables", [{}, {"origins": ORIGINS}, {"kernel_owners": [owner(10, 0)]},
                                    {"kernel_owners": [], "origins": ORIGINS}])  # fmt: skip
def test_without_owners_nothing_is_known(tables: dict[str, list[dict[str, object]]]) -> None:
    origin, match = kernel_origins(tiny.trace(kernels=KERNELS, **tables))
    assert origin.tolist() == [-1] * 4
    assert {MATCHES[i] for i in match} == {"none"}


def test_a_word_that_is_no_match_counts_as_none() -> None:
    owners = [owner(10, 0, "guessed")]
    origin, match = kernel_origins(tiny.trace(kernels=KERNELS, kernel_owners=owners, origins=ORIGINS))
    assert (origin[0], MATCHES[match[0]]) == (0, "none")


def test_what_origins_refer_to() -> None:
    trace = tiny.trace(origins=ORIGINS, modules=MODULES)
    assert referred(trace, "module_id", "modules").tolist() == [0, -1]  # there is no module 2
    assert referred(trace, "stack_id", "stacks").tolist() == [-1, -1]  # there are no stacks
    assert operators(trace) == ["aten::mm", ""]


def test_numbers_that_are_not_known_are_none() -> None:
    assert numbers(np.array([1.5, math.nan, math.inf, -math.inf, 0.0])) == [1.5, None, None, None, 0.0]
    assert type(finite(np.float32(2))) is float  # JSON knows no other


def test_lists_in_texts() -> None:
    assert json_list("[[4, 128], []]") == [[4, 128], []]
    assert [json_list(text) for text in ("", "7", '{"a": 1}', "[1", "[" * 100_000)] == [None] * 5
