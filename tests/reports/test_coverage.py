from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from analyzers.test_fusion_coverage import FLASH, FUSED, GEMM, MEAN, MUL, SILU, counted, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import spikeprof
from spikeprof.profiler.errors import ForeignFile, InputError, NewerSchema
from spikeprof.reports import coverage as cov
from spikeprof.reports.coverage import Amount, Coverage, decode, encode, merged, register_postprocessor, shares
from spikeprof.reports.coverage_policy import Bound, check, parse, read_policy
from spikeprof.reports.coverage_sources import from_lcov, of_trace, read_file
from spikeprof.reports.coverage_text import failures, render_coverage

_HITS = st.dictionaries(st.text(max_size=5), st.integers(0, 10**6), max_size=5)
_AMOUNT = st.lists(st.integers(0, 10**12).map(float), min_size=3, max_size=3).map(lambda parts: Amount(*sorted(parts)))
COVERAGES = st.builds(
    Coverage,
    st.lists(st.text(max_size=5), max_size=2).map(tuple),
    _HITS,
    _HITS,
    _HITS,
    st.dictionaries(st.sampled_from(cov.AMOUNTS), _AMOUNT),
)


# -- of a trace ------------------------------------------------------------------------------------------------------


def test_a_trace_by_hand() -> None:
    found = of_trace(recorded(GEMM, FUSED, FUSED, SILU, MUL, MEAN, FLASH), "decode")
    assert found.sources == ("decode",)
    assert found.functions == {FUSED: 2, SILU: 0, MUL: 0, MEAN: 0, FLASH: 1}
    assert found.branches == {
        f"{FUSED} #1": 2,  # two operators, one junction
        f"{FLASH} #1": 1,
        "mul+silu -> mul+silu": 0,
        "mul+silu -> silu": 0,
        "silu -> mul": 0,
        "mul -> mean": 0,
    }
    assert found.lines == {}
    assert found.fusion == {"time": Amount(3000, 6000, 7000), "launches": Amount(3, 6, 7)}
    assert shares(found)["fusion.time"].value == 0.5
    assert shares(found)["fusion.all.launches"] == (3 / 7, 3, 7, "")
    assert shares(found)["fusion.bytes"].value is None
    assert shares(found)["functions"] == (2 / 5, 2, 5, "")


def test_lines_are_those_that_launched() -> None:
    stacks = [{"file": "model.py", "line": 10}, {"file": "model.py", "line": 20}, {"file": "x.py", "line": 1}]
    origins = [{"op": "", "module_id": -1, "stack_id": i} for i in (0, 1, 1, -1, 7)]
    owners = [{"kernel_id": i, "origin_id": o} for i, o in enumerate((0, 0, 1, 3, 4, -1, 2))]
    names = (FUSED, SILU, SILU, SILU, SILU, SILU, GEMM)
    found = of_trace(recorded(*names, stacks=stacks, origins=origins, kernel_owners=owners), "t")
    assert found.lines == {"model.py:10": 1, "model.py:20": 0}  # a product is not fusible


def test_bytes_are_there_where_they_were_counted() -> None:
    found = of_trace(counted([(FUSED, 1000, 4, 2), (SILU, 1000, 8, 4), (GEMM, 1000, 40, 2)], times=1), "t")
    assert found.fusion["bytes"] == Amount(6 * 2**20, 18 * 2**20, 60 * 2**20)


def test_a_trace_without_kernels() -> None:
    assert of_trace(recorded(), "t") == Coverage(("t",))


# -- together --------------------------------------------------------------------------------------------------------


def test_hits_and_amounts_are_added() -> None:
    prefill = Coverage(("prefill",), {"a": 2, "b": 0}, {"m.py:1": 0}, {"x": 1}, {"time": Amount(10, 40, 100)})
    decode_ = Coverage(("decode",), {"b": 3, "c": 0}, {"m.py:1": 4}, {"x": 1}, {"time": Amount(30, 60, 100)})
    code = Coverage(("unit tests",), {"c": 1})  # of other code: it has no time, and takes none away
    whole = merged([prefill, decode_, code])
    assert whole.sources == ("prefill", "decode", "unit tests")
    assert whole.functions == {"a": 2, "b": 3, "c": 1}
    assert (whole.lines, whole.branches) == ({"m.py:1": 4}, {"x": 2})
    assert shares(whole)["fusion.time"].value == 0.4  # of the sums, not the mean of shares
    assert shares(whole)["functions"].value == 1


def test_an_amount_that_one_trace_lacks_is_not_known_of_all() -> None:
    both = merged(
        [
            Coverage(fusion={"time": Amount(1, 2, 3), "bytes": Amount(1, 2, 3)}),
            Coverage(fusion={"time": Amount(1, 2, 3)}),
        ]
    )
    assert list(both.fusion) == ["time"]
    assert shares(both)["fusion.bytes"].reason == "bytes of fused kernels are not known of every trace"
    assert shares(Coverage())["fusion.bytes"].reason == "no source is a trace"


@settings(max_examples=60, deadline=None)
@given(st.lists(COVERAGES, max_size=3), st.lists(COVERAGES, max_size=3))
def test_merging_in_parts_is_merging_at_once(first: list[Coverage], second: list[Coverage]) -> None:
    at_once, in_parts = merged(first + second), merged([merged(first), merged(second)])
    assert at_once.sources == in_parts.sources
    for what in cov.COUNTED:
        assert getattr(at_once, what) == getattr(in_parts, what)
    for name, amount in at_once.fusion.items():  # whatever one side knows of nothing, the other does not take away
        assert in_parts.fusion[name] == amount
    for share in shares(at_once).values():
        assert (share.value is None) == bool(share.reason)


def test_post_processing_goes_before_the_policy() -> None:
    """As to leave a file out that nobody wants counted, or to add what is known from elsewhere."""
    seen: list[str] = []

    def without_generated(found: Coverage) -> Coverage:
        seen.append("first")
        return Coverage(found.sources, {k: v for k, v in found.functions.items() if not k.startswith("gen_")})

    def last(found: Coverage) -> Coverage:
        seen.append("second")
        return found

    remove_first, remove_last = spikeprof.register_postprocessor(without_generated), register_postprocessor(last)
    try:
        whole = merged([Coverage(functions={"gen_a": 0, "b": 1})])
        assert all(one.passed for one in check([Bound("functions", 1.0, None)], whole))
    finally:
        remove_first()
        remove_last()
        remove_last()  # once more does nothing
    assert seen == ["first", "second"]
    assert merged([Coverage(functions={"gen_a": 0})]).functions == {"gen_a": 0}


def test_a_post_processor_that_returns_nothing_is_a_mistake() -> None:
    remove = register_postprocessor(lambda found: None)  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(TypeError, match="is to return a Coverage"):
            merged([])
    finally:
        remove()


# -- files -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(COVERAGES)
def test_what_is_written_is_read_back(found: Coverage) -> None:
    assert decode(encode(found)) == found
    assert encode(found).startswith(cov.MARK)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"format":"spikeprof-coverage","version":1,"functions":{"a":-1}}',
        b'{"format":"spikeprof-coverage","version":1,"functions":{"a":"x"}}',
        b'{"format":"spikeprof-coverage","version":1,"fusion":{"time":{"fused":-1,"fusible":2,"all":3}}}',
        b'{"format":"other","version":1}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_what_is_no_coverage_file(data: bytes) -> None:
    with pytest.raises(ForeignFile):
        decode(data)


def test_a_later_version() -> None:
    with pytest.raises(NewerSchema):
        decode(b'{"format":"spikeprof-coverage","version":2}')


LCOV = """TN:
SF:src/a.py
FN:1,5,f
FNDA:3,f
FN:7,g
DA:1,3
DA:2,0
DA:2,4
BRDA:2,0,0,3
BRDA:2,0,1,-
BRDA:3,0,jump to line 4,0
LF:2
end_of_record
SF:src/b.c
FNDA:1,operator()(int,int)
DA:1,1e3,checksum
end_of_record
"""


def test_lcov() -> None:
    found = from_lcov(LCOV, "unit.info")
    assert found.functions == {"src/a.py:f": 3, "src/a.py:g": 0, "src/b.c:operator()(int,int)": 1}
    assert found.lines == {"src/a.py:1": 3, "src/a.py:2": 4, "src/b.c:1": 1000}
    assert found.branches == {"src/a.py:2:0:0": 3, "src/a.py:2:0:1": 0, "src/a.py:3:0:jump to line 4": 0}
    assert found.sources == ("unit.info",)


@pytest.mark.parametrize(
    "text", ["", "hello", "SF:a\nDA:x,1\n", "SF:a\nDA:1\n", "SF:a\nBRDA:1,0\n", "SF:a\nDA:1,-4\n", "SF:a\nDA:1,inf\n"]
)
def test_what_is_no_lcov(text: str) -> None:
    with pytest.raises(InputError, match="is no LCOV file"):
        from_lcov(text, "x.info")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=100))
def test_any_text_is_lcov_or_refused(text: str) -> None:
    with contextlib.suppress(InputError):
        assert from_lcov(text, "x.info").sources == ("x.info",)


def test_what_kind_of_file(tmp_path: Path) -> None:
    ours, lcov, other = (tmp_path / name for name in ("c.json", "c.info", "trace.json"))
    ours.write_bytes(encode(Coverage(("t",), {"a": 1})))
    lcov.write_text(LCOV)
    other.write_text('{"traceEvents": []}')
    assert (read_file(ours) or Coverage()).functions == {"a": 1}
    assert (read_file(lcov) or Coverage()).sources == ("c.info",)
    assert read_file(other) is None
    assert read_file(tmp_path) is None
    with pytest.raises(InputError, match="cannot read"):
        read_file(tmp_path / "none.info")


# -- policies --------------------------------------------------------------------------------------------------------


def test_a_policy_in_both_notations(tmp_path: Path) -> None:
    same = [
        Bound("fusion.time", 0.5, None),
        Bound("branches", 0.85, None),
        Bound("functions", 0.2, 1.0),
        Bound("lines", None, 0.9),
    ]
    require = {"fusion.time": "50 %", "branch": 0.85, "functions": {"min": 0.2, "max": 1}, "lines": {"max": "90%"}}
    (tmp_path / "p.json").write_text(json.dumps({"version": 1, "require": require}))
    (tmp_path / "p.yaml").write_text(
        "# what must be fused\nrequire:\n  fusion.time: 50 %\n  branch: 0.85\n  functions: {min: 0.2, max: 1}\n"
        "  lines:\n    max: 90%\n"
    )
    assert read_policy(tmp_path / "p.json") == same
    assert read_policy(tmp_path / "p.yaml") == same


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], 'must hold "require"'),
        ({"require": {}}, 'must hold "require"'),
        ({"require": [1]}, 'must hold "require"'),
        ({"require": {"lines": 1}, "also": 1}, "'also'"),
        ({"require": {"lines": 1}, "version": 2}, "version 2"),
        ({"require": {"fusion.tme": 1}}, "did you mean fusion.time"),
        ({"require": {"x": 1}}, "measures: fusion.time"),
        ({"require": {"lines": 85}}, '0.85 or "85 %"'),
        ({"require": {"lines": "120 %"}}, "not from 0 to 1"),
        ({"require": {"lines": -0.1}}, "not from 0 to 1"),
        ({"require": {"lines": float("nan")}}, "not from 0 to 1"),
        ({"require": {"lines": True}}, "is no share"),
        ({"require": {"lines": None}}, "is no share"),
        ({"require": {"lines": "most"}}, "is no share"),
        ({"require": {"lines": {"least": 1}}}, "write min, max or both"),
        ({"require": {"lines": {}}}, "write min, max or both"),
        ({"require": {"lines": {"min": 0.9, "max": 0.1}}}, "min is above its max"),
        ({"require": {"lines": 1, "line": 1}}, "bounded twice"),
    ],
)
def test_policies_that_are_wrong_say_how(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(data)


def test_policy_files_that_cannot_be_read(tmp_path: Path) -> None:
    bad = {"a.json": "{", "a.yaml": "a: [", "b.yaml": "!!python/object/apply:os.system [echo]", "c.yaml": "\x00"}
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match="cannot be read as"):
            read_policy(tmp_path / name)
    (tmp_path / "d.yaml").write_text("require: {lines: most}")
    with pytest.raises(InputError, match=r"d\.yaml: lines: 'most' is no share"):
        read_policy(tmp_path / "d.yaml")
    (tmp_path / "e.yaml").write_bytes(b" " * 1_000_001)
    with pytest.raises(InputError, match="more than 1,000,000 bytes"):
        read_policy(tmp_path / "e.yaml")
    with pytest.raises(InputError, match="cannot read the policy"):
        read_policy(tmp_path / "none.yaml")


def test_bounds_hold_or_not() -> None:
    whole = Coverage(("t",), {"a": 1, "b": 0}, branches={f"{i}": i for i in range(20)})
    bounds = [
        Bound("functions", 0.5, None),
        Bound("functions", None, 0.49),
        Bound("branches", 0.95, 1),
        Bound("lines", 0, None),
    ]
    checks = check(bounds, whole)
    assert [one.passed for one in checks] == [True, False, True, False]
    assert failures(checks) == [
        "functions is 50.0 %, required: ≤ 49 %",
        "lines was not measured: no source names lines",
    ]


def test_the_table() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    whole = Coverage(("a", "b", "c", "d", "e"), {"x": 1, "y": 0}, fusion={"time": Amount(1e6, 4e6, 8e6)})
    render_coverage(whole, check([Bound("fusion.time", 0.5, None)], whole), console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines[:3] == [
        "Fusion coverage of a, b, c, d and 1 more",
        "measure               value             covered  required",
        "fusion.time          25.0 %  1.00 ms of 4.00 ms    ≥ 50 %  FAILED",
    ]
    assert "functions            50.0 %              1 of 2" in lines
    assert "lines and branches: not measured: no source names lines" not in lines
    assert "lines: not measured: no source names lines" in lines
    assert max(map(len, lines)) <= 80


def test_aliases_of_aliases_are_refused_in_a_line(tmp_path: Path) -> None:
    layers = ["&a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    layers += [f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]  # 9**20 numbers
    path = tmp_path / "bomb.yaml"
    path.write_text("require:\n  lines: [" + ", ".join(layers) + "]\n")
    with pytest.raises(InputError, match=r"lines: .{1,200} is no share"):
        read_policy(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"functions": {"f": 2**81}}, "too large to be true"),
        ({"fusion": {"time": {"fused": 1e308, "fusible": 1e308, "all": 1e308}}}, "too large to be true"),
        ({"fusion": {"time": {"fused": 10, "fusible": 5, "all": 20}}}, "of time more is fused"),
        ({"fusion": {"bytes": {"fused": 1, "fusible": 5, "all": 4}}}, "of bytes more is fused"),
    ],
)
def test_counts_that_cannot_be_true_are_refused(content: dict[str, Any], why: str) -> None:
    head = {"format": "spikeprof-coverage", "version": 1}
    with pytest.raises(ForeignFile, match=why):
        decode(json.dumps(head | content).encode())


def test_a_part_may_exceed_its_whole_by_rounding() -> None:
    amount = Amount(0.1 + 0.2, 0.3, 0.3)
    assert decode(encode(Coverage(("a",), fusion={"time": amount}))).fusion["time"] == amount


def test_lcov_counts_beyond_any_counter_are_refused() -> None:
    assert from_lcov("SF:x.py\nDA:1,18446744073709549568\n", "x").lines == {"x.py:1": 2**64 - 2048}
    with pytest.raises(InputError, match="line 2"):
        from_lcov("SF:x.py\nDA:1,18446744073709551616\n", "x")
