from __future__ import annotations

from typing import Any

import pytest
from counted import HITS, READ, SECTORS, TENSOR, WRITTEN, counters, four, kernel_class, trace
from reports import fabricated, test_terminal
from reports.test_html import Page

from spikeprof.analyzers.base import Figure, Result
from spikeprof.analyzers.cache_miss import CacheMiss
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.trace import Trace
from spikeprof.reports import caches
from spikeprof.reports import counter_figures as fig
from spikeprof.reports import format as fmt
from spikeprof.reports.class_names import class_names
from spikeprof.reports.html import render_html
from spikeprof.reports.html_tables import html_table

MILLISECONDS = (1e6, "ms")


def samples(gpus: int = 2) -> list[dict[str, Any]]:
    """20 samples of 1 µs on each GPU, which reads 1 TB/s."""
    return [
        {"device": device, "start_ns": 1000 * i, "end_ns": 1000 * i + 1000, "metric": metric, "value": value}
        for device in range(gpus)
        for i in range(20)
        for metric, value in ((READ, 1e6), (SECTORS, 1e6), (HITS, 5e5), ("sm_active_share", 0.25))
    ]


def answer(found: Trace) -> Result:
    result = run_one(found, CacheMiss())
    assert result.status in ("ok", "findings"), result.reason
    return result


def drawn(result: Result, figure_id: str) -> fig.Plotly:
    (spec,) = (f for f in result.figures if f.id == figure_id)
    made = fig.draw(spec, result.tables[spec.table], MILLISECONDS)
    assert made is not None
    return made


def screen(result: Result, width: int = 80) -> str:
    return test_terminal.screen(fabricated.alone(result), width)


# -- words -----------------------------------------------------------------------------------------------------------


def test_the_terminal_has_a_table_of_kernels() -> None:
    lines = screen(answer(four())).splitlines()
    start = lines.index("Kernel                    L2 hit  DRAM read   Written  Of peak")
    assert lines[start - 1] == "5.00 GiB read from DRAM, 647 MiB written, 32.0 % of its peak while kernels ran"
    assert lines[start + 1 : start + 5] == [
        "mul_8_mib                 50.6 %   8.01 MiB       0 B   29.5 % ██▋",
        "gemm                      74.4 %   1.07 GiB   124 MiB   18.3 % █▋",
        "gather                    13.5 %   1.09 GiB  33.4 MiB   53.8 % ████▉",
        "mul_512_mib               50.4 %    512 MiB   489 MiB   88.0 % ████████",
    ]
    assert all(len(line) <= 80 for line in lines)


def test_a_part_of_a_recording_says_what_its_counts_are() -> None:
    text = caches.summary(run_one(four().narrowed(0, 100), CacheMiss()))
    assert text.endswith("while kernels ran; counts per launch are means over the whole recording")


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_hostile_names_fit(width: int) -> None:
    text = screen(answer(four(names=fabricated.HOSTILE[:4])), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert all(c.isprintable() or c == "\n" for c in text)


def test_nothing_is_said_where_nothing_was_counted() -> None:
    missing = Result("cache-miss", "not_measured", reason="the table 'counters' was not collected")
    assert "per launch" not in screen(missing)
    only_tensor = answer(trace([kernel_class("k", 10)], counters(0, **{TENSOR: 0.5})))
    assert "per launch" not in screen(only_tensor)
    assert caches.summary(only_tensor) == ""


def test_notes_are_of_what_the_recording_holds() -> None:
    assert len(caches.notes(answer(four()))) == 2  # loads past L1, classes of short launches
    clipped = caches.notes(answer(four(hits={"gather": -1e7})))
    assert "would be below 0" in clipped[0]
    plain = trace([kernel_class("k", 10)], counters(0, **{SECTORS: 10.0, HITS: 4.0}))
    assert caches.notes(answer(plain)) == []


def test_classes_of_one_kernel_are_told_apart() -> None:
    table = {
        "kernel": ["k", "k", "other"],
        "device": [0, 0, 0],
        "grid_x": [4, 2, 1],
        "grid_y": [1, 3, 1],
        "grid_z": [1] * 3,
    }
    assert class_names(table, 20) == (["k [4]", "k [2×3]", "other"], ["k, grid 4", "k, grid 2×3", "other, grid 1"])
    assert class_names(table | {"device": [0, 1, 1]}, 20)[0] == ["k [4] GPU 0", "k [2×3] GPU 1", "other GPU 1"]


def test_bounds_stand_beside_the_number_where_they_are_wide() -> None:
    table = {
        "dram_read_bytes": [1024.0, 1024.0, None],
        "low_dram_read_bytes": [1023.0, 512.0, None],
        "high_dram_read_bytes": [1025.0, 1280.0, None],
        "l2_hit_share": [0.5, 0.5, None],
        "low_l2_hit_share": [0.49, 0.3, None],
        "high_l2_hit_share": [0.51, None, None],
    }
    made = html_table("cache-classes", table)
    assert made is not None
    assert [h.text for h in made.headings] == ["DRAM read", "L2 hit rate"]
    assert [[c.text for c in row] for row in made.cells] == [
        ["1.00 KiB", "50.0 %"],
        ["1.00 KiB ±50 %", "50.0 %"],
        ["–", "–"],
    ]
    assert made.cells[1][0].title == "1.00 KiB (512 B to 1.25 KiB)"
    assert {(c.kind, c.bar) for row in made.cells for c in row} == {("num", None)}


def test_spreads_and_short_counts() -> None:
    assert fmt.spread("l2_hit_share", 0.5, 0.4, 0.55) == "±10"
    assert fmt.spread("a_count", 200.0, 190.0, 220.0) == "±10 %"
    assert fmt.spread("a_count", 0.0, -1.0, 1.0) == ""
    assert [fmt.brief("a_count", v) for v in (9_999, 44_003_216.0, None)] == ["9,999", "44.0 M", ""]
    assert fmt.scale("dram_bytes_per_s", 4.8e12) == (1e12, "TB/s")
    assert fmt.scale("tensor_flop_per_s", 9.9e14) == (1e12, "TFLOP/s")
    assert fmt.quantity("tensor_flop_per_byte", 206.1) == "206 FLOP/byte"


# -- figures ---------------------------------------------------------------------------------------------------------


def test_the_matrix_has_a_row_per_class_and_a_column_per_metric() -> None:
    made = drawn(answer(four()), "cache-matrix")
    (trace_,) = made["data"]
    assert made["layout"]["yaxis"]["ticktext"] == ["mul_8_mib", "gemm", "gather", "mul_512_mib"]
    assert made["layout"]["xaxis"]["ticktext"] == ["L1 hit<br>rate", "L2 hit<br>rate", "L2 sectors", "DRAM read",
                                                   "DRAM<br>written", "Share of<br>DRAM peak"]  # fmt: skip
    assert trace_["text"][1] == ["", "74.4 %", "256 M", "1.07 GiB", "124 MiB", "18.3 %"]
    assert trace_["z"][1][0] is None  # not measured: loads past L1
    assert trace_["z"][1][2] == 1.0  # the most sectors
    assert trace_["customdata"][1][1] == "gemm, grid 2<br>L2 hit rate: 74.4 % (71.5 % to 77.4 %)"


def test_counters_over_time_have_a_panel_per_unit_and_a_line_per_gpu() -> None:
    made = drawn(answer(four(counter_samples=samples())), "counter-timeline")
    assert [(t["name"], t["yaxis"]) for t in made["data"]] == [
        ("DRAM read, GPU 0", "y"),
        ("DRAM read, GPU 1", "y"),
        ("L2 hit rate, GPU 0", "y2"),
        ("L2 hit rate, GPU 1", "y2"),
        ("SM active, GPU 0", "y3"),
        ("SM active, GPU 1", "y3"),
    ]
    assert made["layout"]["yaxis"]["title"]["text"] == "DRAM (TB/s)"
    assert made["data"][0]["y"] == [1.0] * 10
    assert made["data"][0]["x"][:2] == [0.001, 0.003]  # middles of bins of two samples, in ms
    assert made["data"][2]["y"] == [50.0] * 10
    assert made["layout"]["margin"]["l"] == 250
    assert made["meta"]["time"]


def test_many_gpus_share_the_entries_of_the_legend() -> None:
    made = drawn(answer(four(counter_samples=samples(8))), "counter-timeline")
    assert len(made["data"]) == 24
    assert [t["name"] for t in made["data"] if t["showlegend"]] == ["DRAM read", "L2 hit rate", "SM active"]
    assert len({t["line"]["color"] for t in made["data"]}) == 3
    assert made["data"][7]["hovertemplate"].startswith("DRAM read, GPU 7: ")


def test_rates_are_drawn_against_the_peak() -> None:
    made = drawn(answer(four()), "memory-roof")
    read, written, peak = made["data"]
    assert (read["name"], written["name"], peak["name"]) == ("Read", "Written", "DRAM peak 4.80 TB/s")
    assert peak["x"] == [4.8, 4.8]
    assert read["x"][3] + written["x"][3] == pytest.approx(4.2229, abs=1e-4)


def test_names_in_the_roofline_do_not_overlap() -> None:
    values = {READ: 5e5, WRITTEN: 5e5}
    classes = [kernel_class(f"k{i}", 1000 - i) for i in range(3)]
    rows = [row for i, share in enumerate((0.5, 0.51, 0.01)) for row in counters(i, **values, **{TENSOR: share})]
    roof, points = drawn(answer(trace(classes, rows)), "roofline")["data"]
    assert roof["name"] == "NVIDIA H200: 4.80 TB/s, 990 TFLOP/s"
    assert points["text"] == ["k0", "", "k2"]
    assert points["y"] == pytest.approx([494.75, 504.645, 9.895])  # TFLOP/s


def test_plotly_accepts_the_figures() -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    results = (
        answer(four(counter_samples=samples())),
        answer(trace([kernel_class("k", 10)], counters(0, **{READ: 10.0, WRITTEN: 0.0, TENSOR: 0.5}))),
    )
    specs = [(result, spec) for result in results for spec in result.figures]
    assert {spec.kind for _, spec in specs} == set(fig.KINDS)
    for result, spec in specs:
        made = fig.draw(spec, result.tables[spec.table], MILLISECONDS)
        assert made is not None
        graph_objects.Figure(data=made["data"], layout=made["layout"])


def test_an_empty_table_is_not_drawn() -> None:
    for kind in fig.KINDS:
        assert fig.draw(Figure("f", kind, "t", x="x", y="y"), {"x": [], "y": []}) is None  # type: ignore[arg-type]


def test_the_page_has_a_section_for_them() -> None:
    result = answer(four(counter_samples=samples(), names=fabricated.HOSTILE[:4]))
    text = render_html(fabricated.alone(result))
    page = Page(text)
    assert "Caches and DRAM" in page.shown
    assert {"counter-timeline", "cache-matrix", "memory-roof"} <= set(page.data["figures"])  # type: ignore[operator]
    assert "random-gather" in page.shown
    assert "<img src=x" not in text
    assert len(text.encode()) < 8_000_000
