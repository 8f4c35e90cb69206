"""Kernel time by module on screens and pages, readable and harmless whatever the names are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from analyzers.test_ownership import model
from reports import fabricated
from reports.test_html import Page
from reports.test_terminal import GOLDENS, UPDATE, screen

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.kernel_latency import KernelLatency
from spikeprof.analyzers.ownership import Ownership
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.trace import Trace
from spikeprof.reports import ownership as own
from spikeprof.reports.html import render_html
from spikeprof.reports.model import Report


def report(trace: Trace) -> Report:
    results = (fabricated.truth(), run_one(trace, KernelLatency()), run_one(trace, Ownership()))
    return Report(fabricated.manifest(), results, "owned")


def owned(trace: Trace) -> Result:
    return run_one(trace, Ownership())


def hostile() -> Trace:
    """The model with names that want to be markup, escapes or new lines."""
    names = fabricated.HOSTILE
    modules = [{"parent_id": i - 1, "path": ".".join(names[: i + 1]), "class_name": n} for i, n in enumerate(names)]
    stacks = [{"file": n, "line": 3, "function": n, "frames": "[]"} for n in names]
    origins = [
        {"module_id": i, "stack_id": i, "op": n, "input_shapes": n, "input_dtypes": f'["{i}", {n!r}'}
        for i, n in enumerate(names)
    ]
    kernels = [{"name": n, "start_ns": 1000 * i, "end_ns": 1000 * i + 500} for i, n in enumerate(names)]
    owners = [{"kernel_id": i, "origin_id": i} for i in range(len(names))]
    return model(modules=modules, stacks=stacks, origins=origins, kernels=kernels, kernel_owners=owners)


def test_the_whole_screen_at_80_columns() -> None:
    path = GOLDENS / "ownership.80.txt"
    text = screen(report(model()))
    if UPDATE:
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
@pytest.mark.parametrize("make", [model, hostile])
def test_lines_fit_and_hold_no_escapes(make: Any, width: int, encoding: str) -> None:
    text = screen(report(make()), width, encoding)
    assert "Time by module" in text
    for line in text.splitlines():
        assert len(line) <= width
        assert line == line.rstrip()
    assert all(c.isprintable() or c == "\n" for c in text)


def test_without_modules_operators_are_shown() -> None:
    trace = model()
    part = Trace(trace.manifest, {n: t for n, t in trace.tables.items() if n not in ("modules", "stacks")})
    text = screen(report(part))
    assert "Time by operator" in text
    assert "operator known for 82.5 % of kernel time" in " ".join(text.split())
    assert "aten::mm" in text


def test_nothing_known_shows_nothing_but_why() -> None:
    trace = model(kernel_owners=[])
    text = screen(report(trace))
    assert "Time by" not in text
    missing = Trace(trace.manifest, {"kernels": trace.tables["kernels"]})
    assert "Time by module: launches were not attributed in this recording" in " ".join(screen(report(missing)).split())


def test_the_truth_line_says_of_how_much_the_module_is_known() -> None:
    text = " ".join(screen(report(model()), 140).split())
    assert "the module is known for 82.5 % of kernel time" in text
    assert "the module is known" not in screen(fabricated.rich(), 140)


def test_the_page_shows_the_tree_its_tables_and_whose_the_kernels_are() -> None:
    page = Page(render_html(report(model())))
    figures: Any = page.data["figures"]
    (trace,) = figures["ownership-icicle"]["data"]
    assert trace["type"] == "icicle"
    assert trace["labels"][:3] == ["all kernels", "Decoder", "layers.*"]
    assert trace["parents"][:3] == ["", "c0", "c1"]
    assert trace["values"][:3] == [4000, 3300, 3200]
    assert trace["customdata"][3] == "module layers.*.mlp<br>2.00 µs, 50.0 % of kernel time"
    for text in ("layers.*.mlp", "aten::sdpa", "/m/model.py:10", "Lines that launch the kernels"):
        assert text in page.shown
    assert "30.0 % was seen at its launch" in page.shown


def test_names_are_never_markup_in_the_page() -> None:
    text = render_html(report(hostile()))
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag in ("img", "b", "a", "svg") and "onerror" in str(_)]
    assert "<img src=x" not in text
    figures: Any = page.data["figures"]
    (trace,) = figures["ownership-icicle"]["data"]
    shown = "".join([*trace["labels"], *trace["customdata"]]).replace("<br>", "")
    assert "<" not in shown  # plotly reads a little HTML in labels


def test_thousands_of_modules_make_tables_of_usual_size() -> None:
    modules = [{"parent_id": -1, "path": "", "class_name": "M"}]
    modules += [{"parent_id": 0, "path": f"m{i}_x", "class_name": "L"} for i in range(3000)]
    origins = [{"module_id": i + 1, "stack_id": -1, "op": f"op{i}"} for i in range(3000)]
    kernels = [{"name": f"k{i}", "start_ns": i * 10, "end_ns": i * 10 + 1 + i % 7} for i in range(3000)]
    owners = [{"kernel_id": i, "origin_id": i} for i in range(3000)]
    result = owned(model(modules=modules, origins=origins, kernels=kernels, kernel_owners=owners, stacks=[]))
    assert all(len(next(iter(table.values()))) <= 700 for table in result.tables.values())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[[4, 128], [], [[2], [3, 1]]]", "4×128, –, (2, 3×1)"),
        ("[[2], [], []]", "2"),
        ("[[]]", ""),
        ("", ""),
        ("[\n  [8,\n 4]\n]", "8×4"),
        ("[[4, 128]", "[[4, 128]"),
        ("\x1b[31m {", "\\x1b[31m {"),
        ("{}", "{}"),
    ],
)
def test_shapes_read_as_shapes(text: str, shown: str) -> None:
    assert own.shapes(text) == shown


def test_types_lose_their_namespace() -> None:
    assert own.dtypes('["c10::BFloat16", "", "float", ""]') == "BFloat16, –, float"


def test_an_owner_keeps_its_operator_when_room_is_short() -> None:
    found = ("layers.*.self_attn.rotary_emb.inner", "aten::mm", 0.6)
    assert own.owner(found, 80) == "layers.*.self_attn.rotary_emb.inner · aten::mm (60.0 % of it)"

    assert "aten::mm" in own.owner(found, 44)
    assert own.owner(("", "aten::mm", 1.0), 40) == "aten::mm"
    assert own.owner(("", "", 1.0), 40) == ""


def test_what_is_said_of_matches() -> None:
    (first, second) = own.notes(owned(model()))
    assert first == (
        "Of kernel time, 30.0 % was seen at its launch, 2.5 % belongs to nodes of CUDA graphs that were seen captured, "
        "50.0 % is known from the same place in the same sequence of kernels and 17.5 % is not known."
    )
    assert second == "Shapes are those of launches that were seen."
    assert own.notes(dataclasses.replace(owned(model()), metrics=())) == []
