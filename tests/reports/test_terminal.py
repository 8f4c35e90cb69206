"""Whole screens at 80 columns. ``SPIKEPROF_UPDATE_GOLDENS=1 pytest tests/reports`` writes them anew: read the diff."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from reports import fabricated
from rich.console import Console

from spikeprof.reports.build import build_report
from spikeprof.reports.model import Report
from spikeprof.reports.terminal import render_terminal

GOLDENS = Path(__file__).parent / "goldens"
UPDATE = os.environ.get("SPIKEPROF_UPDATE_GOLDENS") == "1"


def screen(report: Report, width: int = 80, encoding: str = "utf-8", *, colour: bool = False) -> str:
    """What a file or pipe of that encoding receives; with ``colour`` what a terminal does."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = Console(file=file, width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    render_terminal(report, console)
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("name", fabricated.ALL)
def test_whole_screens_at_80_columns(name: str) -> None:
    path = GOLDENS / f"{name}.80.txt"
    text = screen(fabricated.ALL[name]())
    if UPDATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")


@pytest.mark.parametrize("name", fabricated.ALL)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 300])
def test_lines_fit_and_end_without_blanks_or_escapes(name: str, width: int, encoding: str) -> None:
    text = screen(fabricated.ALL[name](), width, encoding)
    for line in text.splitlines():
        assert len(line) <= width
        assert line == line.rstrip()
    assert all(c.isprintable() or c == "\n" for c in text)


def test_a_summary_is_about_a_screen_or_two() -> None:
    assert len(screen(fabricated.rich()).splitlines()) <= 60


def test_an_idle_program_is_told_from_a_healthy_one() -> None:
    text = " ".join(screen(fabricated.empty()).split())
    assert "Verdict: nothing to judge" in text
    assert "Kernel latency does not apply: no kernel ran while recording." in text


def test_our_own_signs_have_ascii_forms() -> None:
    assert "\\" not in screen(fabricated.rich(), encoding="ascii")


def test_colour_changes_nothing_but_colour() -> None:
    from rich.text import Text

    coloured = screen(fabricated.rich(), colour=True)
    assert "\x1b[" in coloured
    assert Text.from_ansi(coloured).plain.rstrip() == screen(fabricated.rich()).rstrip()


def test_hostile_names_reach_the_terminal_as_text() -> None:
    text = screen(fabricated.hostile(), colour=True)
    assert "\x1b[31mred" not in text
    assert "[bold red]markup[/]" in screen(fabricated.hostile(), 140)  # shown as it is, not taken as markup


def test_the_truth_line_comes_first_and_numbers_stay_with_their_units() -> None:
    lines = screen(fabricated.rich(), 60).splitlines()
    sections = [line.split(" ─")[0] for line in lines if "──" in line]
    assert sections[0] == "How far to trust this"
    assert sections[1].startswith("Verdict: 1 critical and 2 warnings")
    units = ("ns", "µs", "ms", "s", "%")
    assert not [line for line in lines if line.split() and line.split()[0].rstrip(";,)") in units]


def test_what_the_truth_line_says() -> None:
    text = " ".join(screen(fabricated.rich(), 140).split())
    assert "5.52 ms without tracing → 5.61 ms with tracing (+1.6 %)" in text
    assert "99.9 % of GPU time can be traced to the call that launched it" in text
    assert "77,056 kernels; 0 dropped, 12 repaired, 3 set aside (end before start 3)" in text
    assert "30.0 ms in 1 window yielded to the program's own profiler (torch.profiler)" in text
    assert "13.0.0, 1 known fault: no synchronization records for cudaDeviceSynchronize" in text


def test_what_could_not_be_looked_at_is_not_healthy() -> None:
    text = screen(fabricated.not_measured())
    assert "Verdict: not measured" in text
    assert "Could not be looked at: kernel latency and launch gaps." in text
    assert "nothing found" not in text
    assert "the table 'kernels' was not collected (launch-gaps)" in text
    assert "internal error" in screen(fabricated.broken())


def test_the_real_analyzers_fill_every_section() -> None:
    import tiny

    kernels = [
        {"name": "k", "start_ns": i * 10_000, "end_ns": i * 10_000 + 4_000, "correlation_id": i + 1} for i in range(20)
    ]
    calls = [
        {
            "name": "cudaLaunchKernel",
            "start_ns": i * 10_000 - 2_000,
            "end_ns": i * 10_000 - 500,
            "correlation_id": i + 1,
        }
        for i in range(20)
    ]
    trace = tiny.trace(kernels=kernels, memory_ops=[], runtime_calls=calls)
    text = screen(build_report(trace, "tiny"))
    assert "Kernels by time: 1 of 1" in text
    assert "GPU idle: 58.8 % of 194 µs active time" in text  # 19 gaps of 6 µs in 19 × 10 + 4 µs
    assert "19 gaps, the median one 6.00 µs" in text


def test_a_class_of_idle_time_that_is_not_known_here_is_shown_too() -> None:
    from spikeprof.analyzers.base import Metric, Result

    numbers = {"wall_ns": 100_000, "idle_ns": 50_000, "idle_share": 0.5, "idle_new_kind_ns": 50_000}
    metrics = tuple(Metric(name, value) for name, value in numbers.items())
    gaps = Result("launch-gaps", "ok", metrics=metrics, tables={"over_time": {"class": ["new_kind"]}})
    assert "new kind" in screen(fabricated.alone(gaps))
