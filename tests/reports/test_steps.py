"""Steps in the reports: words, tables, figure, and what stands where none are known."""

from __future__ import annotations

import io
from typing import Any

import tiny
from rich.console import Console

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.steps import Steps
from spikeprof.profiler.trace import Trace
from spikeprof.reports import steps
from spikeprof.reports.build import build_report
from spikeprof.reports.html_sections import sections
from spikeprof.reports.model import Report
from spikeprof.reports.terminal import render_terminal

MS = (1e6, "ms")
NAMES = ("embed", "norm", "attention", "norm", "attention", "argmax")
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m"


def trace(count: int = 12, **more: Any) -> Trace:
    """Steps of 510 µs, one each millisecond; the first a prefill of 5.1 ms."""
    kernels = []
    for number in range(count):
        every, at = (1_000_000, 0) if number == 0 else (100_000, 9_000_000 + 1_000_000 * number)
        for place, name in enumerate(NAMES):
            start = at + place * every
            kernels.append({"name": name, "start_ns": start, "end_ns": start + every // 10})
            kernels[-1]["grid_x"] = 64 if number == 0 else 1
    return tiny.trace(kernels=kernels, **{"memory_ops": [], "duration_ns": 1_000_000_000, **more})


def report(of: Trace) -> Report:
    return build_report(of, "tiny", [Steps()])


def printed(of: Trace, width: int = 80) -> list[str]:
    out = io.StringIO()
    render_terminal(report(of), Console(file=out, width=width, force_terminal=False))
    return out.getvalue().splitlines()


def test_the_terminal_shows_kinds_with_their_durations():
    lines = printed(trace())
    at = next(i for i, line in enumerate(lines) if line.startswith("Steps"))
    assert lines[at + 1 : at + 5] == [
        "12 steps, found by the period of the kernels: 100 % of the kernels accounted for",
        "Kind        Steps      p50      p99  Longest  Kernels    Wait  GPU busy",
        "decode         11   510 µs   510 µs   510 µs        6  490 µs    11.8 %",
        "prefill         1  5.10 ms  5.10 ms  5.10 ms        6       –    11.8 %",
    ]
    assert max(map(len, lines)) <= 80


def test_without_steps_the_terminal_says_what_would_measure_them():
    kernels = [{"name": "gemm", "start_ns": i * 10, "end_ns": i * 10 + 5} for i in range(30)]
    text = " ".join(" ".join(printed(tiny.trace(kernels=kernels, memory_ops=[]))).split())
    assert "Steps: the program marks no steps, and none were found: each kernel is like the one before it" in text
    assert "spikeprof.step(...)" in text


def test_the_page_has_a_section_with_the_figure_and_tables():
    section = next(s for s in sections(report(trace()), MS) if s.id == "steps")
    assert section.count.startswith("12 steps")
    assert "Prefill and decode are told apart" in section.lead
    assert [chart.id for chart in section.charts] == ["step-durations"]
    assert [table.caption.split()[0] for table in section.tables] == ["Steps", "Steps"]
    captions = [table.caption for table in section.tables]
    assert captions[0] == "Steps by kind"
    assert "GPU" not in [heading.text for heading in section.tables[1].headings]  # there is but one


def test_the_page_says_why_there_is_nothing():
    section = next(s for s in sections(report(tiny.trace()), MS) if s.id == "steps")
    assert section.notices == [
        "Not measured: the table 'kernels' was not collected. To measure it: spikeprof run -- CMD"
    ]
    assert not section.charts


def test_the_figure_has_a_panel_per_kind_and_a_dot_per_step():
    made = steps.figure(Steps().analyze(trace()), MS)
    decode, prefill = made["data"]
    assert (decode["name"], prefill["name"]) == ("decode", "prefill")
    assert decode["mode"] == "markers"
    assert decode["x"] == [10.0 + i for i in range(11)]
    assert set(decode["y"]) == {510.0}
    assert (made["layout"]["yaxis"]["title"]["text"], prefill["y"]) == ("decode (µs)", [5.1])
    assert "type" not in made["layout"]["yaxis"]


def test_many_steps_are_drawn_as_the_median_and_the_longest_of_several():
    result = Steps(points_count=4).analyze(trace(33))
    table = result.tables["durations"]
    assert [n for k, n in zip(table["kind"], table["steps_count"], strict=True) if k == "decode"] == [8] * 4
    table["max_ns"][0] = 51_000_000
    made = steps.figure(result, MS)
    assert [t["name"] for t in made["data"][:2]] == ["decode, longest of several", "decode, median of several"]
    assert made["layout"]["yaxis"]["title"]["text"] == "decode (µs, log)"
    assert made["layout"]["yaxis"]["type"] == "log"  # one of them is a hundred times the others


def test_kinds_that_the_program_names_cannot_do_harm():
    ranges = [{"kind": "step", "name": HOSTILE, "start_ns": i * 100, "end_ns": i * 100 + 90} for i in range(3)]
    calls = [{"name": "cudaLaunchKernel", "start_ns": i * 100, "end_ns": i * 100 + 5, "correlation_id": i + 1}
             for i in range(3)]  # fmt: skip
    kernels = [{"start_ns": i * 100 + 50, "end_ns": i * 100 + 80, "correlation_id": i + 1} for i in range(3)]
    of = tiny.trace(kernels=kernels, memory_ops=[], ranges=ranges, runtime_calls=calls)
    assert not any("\x1b" in line for line in printed(of))
    assert "3 steps, marked by the program: 100 % of the kernels accounted for" in printed(of)
    made = steps.figure(Steps().analyze(of), MS)
    assert "<img" not in str(made)


def test_what_limits_the_answer_is_said():
    beside = [{"name": "gemm", "rank": 1, "device": 1, "start_ns": i * 10, "end_ns": i * 10 + 5} for i in range(20)]
    whole = trace()
    kernels = sorted(whole.table("kernels").to_pylist() + beside, key=lambda row: row["start_ns"])
    result = Steps().analyze(tiny.trace(kernels=[{**row, "kernel_id": i} for i, row in enumerate(kernels)]))
    assert steps.notes(result)[-1] == "No steps on GPU 1 (process 1): each kernel is like the one before it."
    assert set(steps.tables(result)["step-processes"]["why_not"]) == {"", "each kernel is like the one before it"}


def test_an_answer_without_steps_has_no_words():
    nothing = Result("steps", "not_measured", reason="no")
    assert steps.summary(nothing) == ""
    assert steps.notes(nothing) == []
    assert steps.figure(nothing, MS) is None
    assert not any(steps.tables(nothing).values())
