from __future__ import annotations

import pytest
from analyzers.test_fusion_coverage import GEMM, MUL, PAIR, SILU, counted, model, owned, recorded, shapes
from reports import fabricated, test_terminal
from reports.test_html import Page

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.fusion_coverage import FusionCoverage
from spikeprof.analyzers.runner import run_one
from spikeprof.reports import fusion
from spikeprof.reports.html import render_html


def heavy() -> Result:
    return run_one(counted([(GEMM, 50_000, 8, 8), (SILU, 6000, 8, 8), (MUL, 9000, 16, 8)]), FusionCoverage())


def short() -> Result:
    return run_one(recorded(SILU, MUL, MUL, MUL), FusionCoverage())


def screen(result: Result, width: int = 80) -> str:
    return test_terminal.screen(fabricated.alone(result), width)


def page(result: Result) -> str:
    return render_html(fabricated.alone(result))


def test_the_terminal_has_coverage_and_chains() -> None:
    text = screen(heavy())
    part = text[text.index("Fusion ──") :].splitlines()
    assert part[1:5] == [
        "0 % of the time of fusible kernels is in fused ones (0 % of all kernels' time).",
        "By launches 0 % and bytes 0 %.",
        "Chain                      Total   Traffic   Saved  Share",
        "gemm → silu → mul         650 µs  56.0 MiB  57.1 %  100 % ████████",
    ]


def test_what_was_not_measured_is_not_shown_as_nothing() -> None:
    text = screen(short())
    assert "silu → mul ×3" in text
    assert "Traffic" not in text
    assert "By launches 0 %." in text
    assert "Fused, of the bytes of fusible kernels" in text
    assert "neither DRAM counters nor operators with the shapes" in " ".join(text.split())


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_lines_fit(width: int) -> None:
    for result in (heavy(), short()):
        assert max(map(len, screen(result, width).splitlines())) <= width


def test_tables_of_the_page() -> None:
    tables = fusion.tables(heavy())
    chains = tables["fusion-chains"]
    assert chains["chain"] == ["1: gemm → silu → mul"]
    assert chains["traffic_bytes"][0] - chains["fused_traffic_bytes"][0] == 32 * 2**20
    assert (chains["saving_from"], chains["bytes_from"]) == (["less traffic"], ["counters"])
    assert "read_by" not in chains  # it could not be checked: the notes say so
    assert tables["fusion-members"]["does"] == ["gemm", "silu", "mul"]
    assert tables["fusion-kernels"]["verdict"] == ["one node"] * 3
    assert "Whether anything else reads what lies between was not checked" in page(heavy())
    assert fusion.tables(short())["fusion-chains"]["saving_from"] == ["fewer short kernels"]


def test_readers_are_named_where_the_graph_is_known() -> None:
    result = run_one(owned(*PAIR, shape=shapes([1024, 4096]), **model([("silu", "mul")])), FusionCoverage())
    assert fusion.tables(result)["fusion-chains"]["read_by"] == ["the chain alone"]
    assert not any("was not checked" in note for note in fusion.notes(result))


def test_nothing_to_say() -> None:
    nothing = run_one(recorded(), FusionCoverage())
    assert (fusion.summary(nothing), fusion.notes(nothing), fusion.chain_names(nothing)) == ("", [], {})
    assert "Fusion ──" not in screen(nothing)
    assert "Does not apply: no kernel ran" in page(nothing)


def test_names_of_kernels_and_operators_are_text() -> None:
    pairs = [(fabricated.HOSTILE[0], "aten::silu", "mlp"), (SILU, f"aten::{fabricated.HOSTILE[1]}", "mlp")]
    parsed = Page(page(run_one(owned(*pairs), FusionCoverage())))
    assert all(tag != "img" for tag, _ in parsed.tags)
    assert fabricated.HOSTILE[0] in parsed.shown
