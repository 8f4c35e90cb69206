"""Whole answers at 80 columns. ``SPIKEPROF_UPDATE_GOLDENS=1 pytest tests/reports`` writes them anew: read the diff."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import tiny
from collectors import fake_links
from collectors.fake_cuda import UUIDS
from collectors.fake_links import FakeLinks
from reports import fabricated
from reports.test_terminal import GOLDENS, UPDATE, screen
from rich.console import Console

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.runner import run_one
from spikeprof.analyzers.topology import Topology
from spikeprof.profiler.collectors.copy_probe import Copies, with_copies
from spikeprof.profiler.collectors.topology import TopologyCollector
from spikeprof.profiler.trace import Trace
from spikeprof.reports import topology as say
from spikeprof.reports.html import render_html
from spikeprof.reports.topology import render_topology

A, B = UUIDS[:2]
SOME = Copies({(A, B): 391e9, (B, A): 389.5e9, ("host", A): 55.2e9, (A, "host"): 20e9}, reason="the copies hung")
EIGHT = Copies({(a, b): 391.2e9 for a in UUIDS for b in UUIDS if a != b}, reason="no host")
LINKS = ((1, fake_links.SWITCH, fake_links.HIDDEN),) * 18

MACHINES: dict[str, tuple[FakeLinks, Copies | None]] = {
    "h200_pair": (fake_links.h200_pair(), None),
    "h200_pair_measured": (fake_links.h200_pair(), SOME),
    "h200_alone": (fake_links.h200_alone(broken={"nvmlDeviceGetMaxPcieLinkWidth": ValueError("odd")}), None),
    "pcie_only": (fake_links.pcie_only(), None),
    "three_v100": (fake_links.three_v100(), None),
    "h200_eight_measured": (FakeLinks((LINKS,) * 8, 6, p2p=(0, 0, 0, 0, 5)), EIGHT),
    "nothing_known": (FakeLinks(((), ()), pcie=((0, 0, 0, 0),) * 2, p2p=(6,) * 5, ancestor=7, affinity=(0,)), None),
}


def answer(name: str) -> tuple[Result, str]:
    """The analyzer's result for a machine, and what could not be read."""
    fake, copies = MACHINES[name]
    collector = TopologyCollector(fake, Path("/nonexistent"))
    collector.start(0)
    note, tables = collector.stop()
    table = tables["topology"]
    if copies:
        table = with_copies(table, collector.gpus, copies)
    trace = tiny.trace()
    return run_one(Trace(trace.manifest, {"topology": table}), Topology()), note.reason


def shown(name: str, width: int = 80, encoding: str = "utf-8") -> str:
    result, problem = answer(name)
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    names = ["NVIDIA H200"] * len(result.tables["gpus"]["device"])
    render_topology(result, names, problem, Console(file=file, width=width))
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("name", MACHINES)
def test_whole_answers_at_80_columns(name: str) -> None:
    path, text = GOLDENS / f"topology_{name}.80.txt", shown(name)
    if UPDATE:
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_lines_fit_and_end_without_blanks(name: str, width: int, encoding: str) -> None:
    for line in shown(name, width, encoding).splitlines():
        assert len(line) <= width
        assert line == line.rstrip()


def test_eight_gpus_fit_80_columns_in_one_matrix_for_each_rate() -> None:
    text = shown("h200_eight_measured")
    assert sum(line.startswith("from") for line in text.splitlines()) == 2
    assert "GPU 7 NV18 450" in text


def test_columns_that_do_not_fit_follow_below() -> None:
    table = {"from": ["a", "b"], "one": ["11", "22"], "two": ["333", "4"], "three": ["x", "y"]}
    assert say.table_lines(table, 30) == ["from  one  two  three", "a     11   333  x", "b     22   4    y"]
    assert say.table_lines(table, 19) == ["from one two three", "a    11  333 x", "b    22  4   y"]
    blocks = "\n".join(say.table_lines(table, 13)).split("\n\n")
    assert blocks == [
        "from  one\na     11\nb     22",
        "from  two\na     333\nb     4",
        "from  three\na     x\nb     y",
    ]
    assert say.table_lines({}, 80) == []


def test_a_report_shows_the_matrix_where_there_are_two_gpus() -> None:
    def with_links(name: str) -> str:
        report = fabricated.rich()
        return screen(dataclasses.replace(report, results=(*report.results, answer(name)[0])))

    assert "GPU 0  –         NV18 450" in with_links("h200_pair")
    assert "GPU to GPU" not in with_links("h200_alone")


def test_the_page_has_matrix_hosts_units_and_sources() -> None:
    report = fabricated.rich()
    page = render_html(dataclasses.replace(report, results=(*report.results, answer("h200_pair_measured")[0])))
    for text in (
        "Links of the GPUs",
        "NV18 391/450",
        "55.2/63.0",
        "Rates are GB/s in one direction, measured/theoretical.",
        "18 x 25 GB/s of payload a link (H100 data sheet",
        "Not measured: the copies hung.",
    ):
        assert text in page


def test_texts_of_the_driver_are_made_printable() -> None:
    result, _ = answer("pcie_only")
    links = {**result.tables["links"], "peer_access": ["\x1b[31mno"] * 6, "pcie_path": ["\x1b[0m"] * 6}
    hostile = dataclasses.replace(result, tables={**result.tables, "links": links})
    assert "\x1b" not in " ".join(say.legend(hostile)) + str(say.matrix(hostile))
