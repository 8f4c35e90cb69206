from __future__ import annotations

from typing import Any

import pytest
import tiny
from counted import counters, kernel_class
from reports import fabricated, test_terminal
from reports.test_html import Page

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.fusion_boundary import FusionBoundary
from spikeprof.analyzers.runner import run_one
from spikeprof.reports import finding_text
from spikeprof.reports import format as fmt
from spikeprof.reports import occupancy as occ
from spikeprof.reports.html import render_html

H100 = {"name": "NVIDIA H100 80GB HBM3", "sm_arch": "sm_90", "sm_count": 132}


def answer(counted: bool = True, names: tuple[str, str] = ("gemm", "add"), **more: Any) -> Result:
    """A GEMM of one block per SM on 44 SMs and an addition in turns, 30 times each."""
    shapes = (
        {"registers_count": 168, "block_x": 384, "grid_x": 4, "grid_y": 11, "shared_dynamic_bytes": 164_308},
        {"registers_count": 32, "block_x": 128, "grid_x": 132},
    )
    kernels = [
        {**shapes[i % 2], "name": names[i % 2], "start_ns": 1100 * i, "end_ns": 1100 * i + 1000, **more}
        for i in range(60)
    ]
    tables: dict[str, Any] = {"kernels": kernels, "devices": [H100]}
    if counted:
        tables["kernel_classes"] = [kernel_class(names[0], 30_000, 30, block_x=384, grid_x=4, grid_y=11)]
        tables["counters"] = counters(0, 0.05, sm_active_share=0.25, instructions_count=33_000.0)
        tables["samples"] = [
            {"t_ns": t, "metric": metric, "value": value}
            for t in (0, 60_000)
            for metric, value in (("sm_clock_mhz", 1000.0), ("gpm_occupancy_share", 0.04))
        ]
    return run_one(tiny.trace(**tables), FusionBoundary())


def screen(result: Result, width: int = 80) -> str:
    return test_terminal.screen(fabricated.alone(result), width)


def page(result: Result) -> str:
    return render_html(fabricated.alone(result))


# -- words -----------------------------------------------------------------------------------------------------------


def test_the_terminal_has_a_table_of_kernels() -> None:
    text = screen(answer())
    part = text[text.index("Occupancy and waves") :]
    assert part.splitlines()[1:5] == [
        "occupancy 59.4 % at most, averaged over the kernels' time; SMs at work 25.0 %,",
        "66.7 % expected from the grids",
        "Kernel                    Occupancy   Limited by  Waves  SMs busy",
        "gemm                         18.8 %  regs+shared   0.33    25.0 % ████████",
    ]
    assert part.splitlines()[5] == "add                           100 %   warps+regs   0.06         –"


def test_without_counters_the_table_has_theory_alone() -> None:
    part = screen(answer(counted=False))
    assert "SMs busy" not in part
    assert "occupancy 59.4 % at most, averaged over the kernels' time; SMs at work 66.7 %" in part
    assert "SM active and U: SMs at work were not counted → spikeprof run --counters --" in part


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_lines_fit(width: int) -> None:
    assert max(map(len, screen(answer(), width).splitlines())) <= width


def test_findings_name_both_kernels_and_what_is_short() -> None:
    text = " ".join(screen(answer()).split())
    assert "(kernel gemm, grid 4×11×1, block 384×1×1, then add, short of registers and shared memory)" in text
    assert (
        "[fusion-too-large] Of an SM's registers 117.2 % (limit 85 %; modelled); Larger shared memory 160 KiB" in text
    )
    assert "(limit 48.0 KiB; modelled)" in text
    assert "Expected SM active 33.3 % (limit 50 %; modelled); SM active 25.0 %; Blocks 44" in text


def test_a_scope_says_what_limits() -> None:
    where = {"kernel": "gemm", "block_x": 384, "limiter": "registers+shared_memory"}
    assert finding_text.scope(where) == "kernel gemm, block 384, limited by registers and shared memory"


def test_what_is_not_known_has_no_table() -> None:
    unknown = answer(registers_count=0)
    assert occ.summary(unknown) == ""
    assert occ.longest(unknown, 5) == {}
    assert "Occupancy and waves" not in screen(unknown)
    assert "Not measured: registers per thread were not recorded. To measure it: spikeprof run -- CMD" in page(unknown)


@pytest.mark.parametrize(
    ("names", "full", "short"),
    [
        ("", "", ""),
        ("registers", "registers", "regs"),
        ("registers+shared_memory", "registers and shared memory", "regs+shared"),
        ("thread_registers+block_registers", "registers per thread and registers", "regs"),
        ("barriers", "barriers", "barriers"),  # of a later version
    ],
)
def test_names_of_resources(names: str, full: str, short: str) -> None:
    assert fmt.resources(names) == full
    assert fmt.resources(names, short=True) == short


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0.00"), (0.000947, "< 0.01"), (0.333, "0.33"), (9.5, "9.50"), (124.2, "124")]
)
def test_waves_are_no_multiples_of_something(value: float, text: str) -> None:
    assert fmt.quantity("waves_ratio", value) == text


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_both_tables() -> None:
    result = answer()
    tables = occ.tables(result)
    classes, pairs = tables["occupancy"], tables["neighbours"]
    assert classes["grid"] == ["4×11", "132"]
    assert classes["limiter"] == ["registers and shared memory", "warps and registers"]
    assert "device" not in classes
    assert "unknown" not in classes
    assert pairs["verdict"] == ["too large: registers and shared memory"] * 2
    text = page(result)
    assert "Kernels by time, with their theoretical occupancy" in text
    assert "Neighbours by time, and what one kernel in place of two would need at most" in text
    assert "in which the driver measured warps, idle time included, SMs held 4.0 %" in text
    assert "The sizes of clusters are not recorded" in text


def test_names_of_kernels_are_text() -> None:
    parsed = Page(page(answer(names=(fabricated.HOSTILE[0], fabricated.HOSTILE[1]))))
    assert all(tag != "img" for tag, _ in parsed.tags)
    assert fabricated.HOSTILE[0] in parsed.shown
