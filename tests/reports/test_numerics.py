from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from reports import fabricated, test_terminal
from reports.test_html import Page
from scanned import asked, bad, scan

from spikeprof.analyzers.base import Result
from spikeprof.profiler.trace import CollectorNote
from spikeprof.reports import numerics as num
from spikeprof.reports.html import render_html
from spikeprof.reports.json_ import encode

HOSTILE = "<script>alert(1)</script>\x1b[31m[bold]x"


def answer(name: str = "model.layers.1.mlp", note: CollectorNote | None = None) -> Result:
    """Four modules in 20 steps; the third overflows at step 12, and the fourth takes it over."""
    rows = []
    for step in range(20):
        rows += [scan(step, 0, "model.layers.0.mlp", 12.0), scan(step, 1, "model.layers.1.norm", 3.0, zero_count=50)]
        rows += [bad(step, 2, name, nan_count=0) if step >= 12 else scan(step, 2, name, 4094.0)]
        rows += [bad(step, 3, "head", inf_count=0, amax=math.nan) if step >= 12 else scan(step, 3, "head", 9.0)]
    return asked(*rows, note=note)


def screen(result: Result, width: int = 80, encoding: str = "utf-8") -> str:
    return test_terminal.screen(fabricated.alone(result), width, encoding)


def test_the_terminal_names_the_worst_modules() -> None:
    text = screen(answer())
    part = text[text.index("Numerics ─") :].splitlines()
    assert part[1:8] == [
        "80 scans of 4 tensors in 20 steps, Inf or NaN in 2 tensors; least headroom in",
        "FP16 4.00 bits",
        "The first bad value came from model.layers.1.mlp, step 12.",
        "Module                       Type   amax   Headroom  Inf, NaN  Zeros",
        "model.layers.1.mlp        float16  4,094  4.00 bits        16    0 %",
        "head                      float16   9.00  12.8 bits        40    0 %",
        "model.layers.0.mlp        float16   12.0  12.4 bits         –    0 %",
    ]


def test_the_verdict_names_the_origin() -> None:
    text = " ".join(screen(answer()).split())
    assert "This module was the first to give Inf or NaN (module model.layers.1.mlp, dtype float16, step 12)" in text
    assert "Inf and NaN 2 (none expected); Scans of the step before it, all fine 2" in text


def test_a_leak_is_told_with_both_rows() -> None:
    batch = {"dimensions_count": 3, "rows_count": 4}
    first, second = bad(3, 0, "embed", bad_rows=0b0010, **batch), bad(3, 1, "norm", bad_rows=0b1111, **batch)
    result = asked(scan(0, 0, "embed", **batch), first, second)
    text = " ".join(screen(result).split())
    assert "Rows of the batch turned bad after others in norm, step 3: 0, 2 to 3 after 1." in text
    assert "step 3, victim rows 0, 2 to 3, poisoning rows 1)" in text
    page = [part.strip() for part in Page(render_html(fabricated.alone(result))).text]
    assert "Rows of the batch that turned bad by others" in page
    assert "Rows that turned bad" in page


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_lines_fit(width: int, encoding: str) -> None:
    text = screen(answer("decoder." * 20 + "layers.1.mlp"), width, encoding)
    assert max(map(len, text.splitlines())) <= width


def test_a_long_path_keeps_its_end() -> None:
    assert num.tail("model.layers.17.mlp.down_proj", 14) == "…mlp.down_proj"
    assert num.tail("short", 14) == "short"


def test_a_healthy_run_says_so_with_its_headroom() -> None:
    result = asked(*(scan(step, 0, "a", 16.0, dtype="bfloat16") for step in range(3)))
    assert num.summary(result) == "3 scans of 1 tensor in 3 steps, all finite; least headroom in BF16 124 bits"
    assert "nothing found" in screen(result)


def test_what_was_not_checked_or_lost_is_said() -> None:
    note = CollectorNote("degraded", "not checked: model.rotary (returns no tensor)", dropped_count=3)
    text = screen(answer(note=note))
    assert "3 scans were lost: what they saw is not known." in text
    assert "Not checked: model.rotary (returns no tensor)." in text


def test_not_measured_says_what_would_measure_it() -> None:
    from spikeprof.analyzers.overflow import Overflow
    from spikeprof.analyzers.runner import run_one

    result = run_one(asked_nothing(), Overflow())
    assert num.summary(result) == ""
    assert "Numerics ─" not in screen(result)
    assert "→ spikeprof run --numerics -- CMD" in " ".join(screen(result).split())
    assert "Not measured: the table" in render_html(fabricated.alone(result))


def asked_nothing() -> Any:
    import tiny

    return tiny.trace()


def test_the_page_has_the_heatmap_and_the_scans_around_the_first_bad_one() -> None:
    text = [part.strip() for part in Page(render_html(fabricated.alone(answer()))).text]
    assert "Headroom by module and step" in text
    assert "The first step with Inf or NaN, around the first bad scan" in text
    assert "bad after it" in text
    assert "Role" not in text  # all are outputs
    assert "Process" not in text  # there is one


def test_cells_of_the_heatmap() -> None:
    figure = num.heat_figure(answer())
    assert figure is not None
    headroom, red = figure["data"]
    assert figure["layout"]["yaxis"]["ticktext"] == ["layers.0.mlp", "layers.1.norm", "layers.1.mlp", "head"]
    assert headroom["z"][2][11] == 4.0  # log2(65504 / 4094)
    assert headroom["z"][0][0] == pytest.approx(12.414)
    assert red["z"][2][11:13] == [None, 1]
    assert red["z"][0] == [None] * 20
    assert (
        headroom["customdata"][3][12] == "head<br>step 12: no finite element above zero<br><b>Inf or NaN</b> in 1 scan"
    )
    assert num.heat_figure(asked()) is None
    assert num.heat_figure(asked(scan(0, 0, "a", 100.0, dtype="int8"))) is None


def test_joined_rows_keep_both_names() -> None:
    from spikeprof.analyzers.overflow import Overflow

    rows = [scan(0, order, f"model.layers.{order}") for order in range(4)]
    figure = num.heat_figure(asked(*rows, analyzer=Overflow(heat_rows_count=2)))
    assert figure is not None
    assert figure["layout"]["yaxis"]["ticktext"] == ["layers.0 to layers.1", "layers.2 to layers.3"]


def test_hostile_names_stay_text() -> None:
    text = render_html(fabricated.alone(answer(HOSTILE, CollectorNote("degraded", HOSTILE))))
    assert "<script>alert(1)" not in text
    assert "\x1b" not in screen(answer(HOSTILE))
    assert (
        msgspec.json.decode(encode(fabricated.alone(answer(HOSTILE))))["results"][0]["tables"]["tensors"]["module"][0]
        == HOSTILE
    )


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({}, "to give one: aten::exp at model.py:41, inputs' amax 12.5 (float16)."),
        ({"kept": "later"}, "inputs' amax 12.5 (float16). Seen in a later step, in which the module was bad again."),
        ({"line": 0, "inputs": "[]"}, "The first operator to give one: aten::exp."),
        ({"run_module": "", "inputs": "[]"}, "aten::exp at model.py:41, which runs before the module, in (model)."),
        ({"op": "", "why_not": "no step came after it"}, "The operator in it is not known: no step came after it."),
    ],
)
def test_the_operator_is_told_or_why_not(more: dict[str, Any], sentence: str) -> None:
    from analyzers.test_overflow_operator import answer as operator_answer
    from analyzers.test_overflow_operator import row

    result = operator_answer(row(**more))
    assert sentence in " ".join(screen(result).split())
    page = [part.strip() for part in Page(render_html(fabricated.alone(result))).text]
    caption = "The first operator with Inf or NaN from fine inputs, and its tensors"
    assert (caption in page) == ("op" not in more)


def test_a_hostile_operator_is_text() -> None:
    from analyzers.test_overflow_operator import answer as operator_answer
    from analyzers.test_overflow_operator import row

    result = operator_answer(row(op=HOSTILE, file=f"/{HOSTILE}", function=HOSTILE))
    page = render_html(fabricated.alone(result))
    assert "<script>alert(1)" not in page
    assert "\x1b" not in screen(result) + page
