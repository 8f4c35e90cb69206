from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeprof.profiler.errors import SpikeprofError
from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.importers.kineto import ns_of_us
from spikeprof.profiler.importers.kineto_columns import ints, memory_kind, threads
from spikeprof.profiler.schema import TABLES


@given(st.integers(0, 2**61))
def test_nanoseconds_survive_the_decimal_point(ns: int) -> None:
    assert ns_of_us(Decimal(f"{ns // 1000}.{ns % 1000:03d}")) == ns


@given(st.decimals(0, 2**51, allow_nan=False, places=6))
def test_below_a_nanosecond_is_rounded_to_the_nearest(us: Decimal) -> None:
    assert abs(ns_of_us(us) - Fraction(us) * 1000) <= Fraction(1, 2)


@given(st.integers(0, 2**51), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_child_that_ends_with_its_parent_does_so_in_ns(start: int, lead: int, length: int) -> None:
    def us(ns: int) -> Decimal:
        return Decimal(f"{ns // 1000}.{ns % 1000:03d}")

    parent_end = ns_of_us(us(start)) + ns_of_us(us(lead + length))
    assert parent_end == ns_of_us(us(start + lead)) + ns_of_us(us(length))


_PLACES = {"Pageable": "pageable", "Pinned": "pinned", "Device": "device", "Array": "array", "Managed": "managed"}
_PLACES |= {"Device Static": "device", "Managed Static": "managed", "Unknown": "unknown", "Host": "unknown"}


@given(
    st.sampled_from(["HtoD", "DtoH", "DtoD", "HtoH", "PtoP", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA"]),
    st.sampled_from(sorted(_PLACES)),
    st.sampled_from(sorted(_PLACES)),
)
def test_copy_names(kind: str, src: str, dst: str) -> None:
    assert memory_kind(f"Memcpy {kind} ({src} -> {dst})") == (kind, _PLACES[src], _PLACES[dst])
    assert memory_kind(f"Memcpy {kind}") == (kind, "unknown", "unknown")


def test_memset_and_rocm_names() -> None:
    assert memory_kind("Memset (Device)") == ("memset", "unknown", "device")
    assert memory_kind("FillBuffer") == ("memset", "unknown", "unknown")
    assert memory_kind("CopyHostToDevice") == ("HtoD", "unknown", "device")
    assert memory_kind("CopyDeviceToHost") == ("DtoH", "device", "unknown")
    assert memory_kind("Memcpy ZtoQ (Device -> Device)") == ("unknown", "device", "device")


@given(st.text(max_size=40))
def test_any_name_has_some_kind(name: str) -> None:
    kind, src, dst = memory_kind(name)
    assert kind in {"unknown", "memset"} or "to" in kind
    assert {src, dst} <= {"pageable", "pinned", "device", "array", "managed", "unknown"}


def test_numbers_from_whatever_json_held() -> None:
    assert ints([1, None, "12", "stream 7", "0x0", 2.0, [], {}, True]).tolist() == [1, 0, 12, 7, 0, 2, 0, 0, 1]
    assert ints([2**64 - 1, 10159970886766084423, 10**30]).tolist() == [-1, 10159970886766084423 - 2**64, 0]
    assert ints([]).tolist() == []


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_numbers_that_fit_stay(values: list[int]) -> None:
    assert ints(values).tolist() == values
    assert ints([str(v) for v in values]).tolist() == values


@given(st.lists(st.text(st.characters(categories=["L"]), min_size=1), max_size=8))
def test_named_threads_are_numbered_apart(names: list[str]) -> None:
    numbers = threads(names).tolist()
    assert len(set(numbers)) == len(set(names))
    assert all(n < 0 for n in numbers)


_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1.5", "stream 7"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
_KEYS = ("name", "pid", "tid", "ts", "dur", "args")
_ARGS = ("device", "stream", "correlation", "grid", "block", "bytes", "Input Dims", "graph node id", "cuda_sync_kind")
_CATEGORIES = ("kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "user_annotation", "cuda_sync", "overhead", "FEE")


@st.composite
def _events(draw: st.DrawFn) -> dict[str, Any]:
    plain: dict[str, Any] = {"ph": "X", "cat": draw(st.sampled_from(_CATEGORIES)), "name": "n", "ts": 1, "dur": 2}
    plain["args"] = draw(st.dictionaries(st.sampled_from(_ARGS), _ANYTHING, max_size=4))
    return plain | draw(st.dictionaries(st.sampled_from(_KEYS), _ANYTHING, max_size=2))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(_events(), max_size=5),
    st.dictionaries(st.sampled_from(["baseTimeNanoseconds", "deviceProperties"]), _ANYTHING),
)
def test_odd_values_never_break_the_import(
    tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]], head: dict[str, Any]
) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "odd.json"
    path.write_text(json.dumps({**head, "traceEvents": events}))
    try:
        trace = open_trace(path)
    except SpikeprofError:
        return
    tables = [trace.table(n) for n in trace.tables if n not in ("processes", "devices")]
    known = [e for e in events if e["cat"] != "FEE"]
    assert sum(len(t) for t in tables) + trace.manifest.collectors["kineto"].set_aside_count >= len(known)
    for name in trace.tables:
        assert trace.table(name).schema.equals(TABLES[name].arrow)
