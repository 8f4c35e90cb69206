from __future__ import annotations

from typing import Any

import pytest
from reports import fabricated

from spikeprof.analyzers.base import Figure
from spikeprof.reports import figure_parts as parts
from spikeprof.reports import figures as fig
from spikeprof.reports.gauges import gauges_figure, throttling

SECONDS = (1e9, "s")
HEATMAP = Figure("h", "heatmap", "t", x="bin_start_ns", y="kernel", value="busy_ns")


def figure(spec: Figure, table: dict[str, list[Any]]) -> parts.Plotly:
    made = fig.plotly_figure(spec, table, SECONDS)
    assert made is not None
    return made


def test_a_heatmap_is_a_grid_of_shares() -> None:
    made = figure(
        HEATMAP,
        {
            "kernel": ["b", "b", "a", "a"],
            "bin_start_ns": [0, 1_000_000_000, 1_000_000_000, 2_000_000_000],
            "busy_ns": [250_000_000, 0, 1_000_000_000, None],
        },
    )
    (trace,) = made["data"]
    assert trace["x"] == [0.5, 1.5, 2.5]  # middles of the bins, in s
    assert trace["z"] == [[0.25, None, None], [None, 1.0, None]]  # rows as they come; nothing is empty, not 0
    assert made["layout"]["yaxis"]["ticktext"] == ["b", "a"]
    assert made["meta"]["rows"] == ["b", "a"]
    assert made["layout"]["coloraxis"]["colorbar"]["tickformat"] == ".2~%"  # not "0 %, 1 %, 1 %"


def test_a_stack_has_one_series_per_class() -> None:
    made = figure(
        Figure("s", "stack", "t", x="bin_start_ns", y="idle_ns", series="class"),
        {
            "bin_start_ns": [0, 2_000_000_000] * 2,
            "class": ["launch"] * 2 + ["cupti_overhead"] * 2,
            "idle_ns": [1_000_000_000, None, 500_000_000, 2_000_000_000],
        },
    )
    assert [t["name"] for t in made["data"]] == ["launch", "CUPTI"]
    assert made["data"][0]["x"] == [1.0, 3.0]
    assert made["data"][0]["y"] == [0.5, None]
    assert made["data"][1]["y"] == [0.25, 1.0]
    assert made["data"][0]["width"] == 2.0


def test_bars_and_lines() -> None:
    bars = figure(Figure("b", "bars", "t", x="total_ns", y="name"), {"name": ["k", "l"], "total_ns": [2e9, 1e9]})
    assert bars["data"][0]["x"] == [2.0, 1.0]
    assert bars["data"][0]["customdata"] == ["2.00 s", "1.00 s"]
    line = figure(
        Figure("l", "line", "t", x="t_ns", y="power_w", series="device"),
        {"t_ns": [2_000_000_000, 0, 1_000_000_000], "power_w": [3.0, 1.0, 2.0], "device": [0, 0, 1]},
    )
    assert [t["name"] for t in line["data"]] == ["GPU 0", "GPU 1"]
    assert line["data"][0]["x"] == [0.0, 2.0]  # in the order of time


def test_a_series_without_a_number_has_no_line() -> None:
    spec = Figure("l", "line", "t", x="t_ns", y="use_share", series="link")
    table = {"t_ns": [0, 1, 0, 1], "use_share": [None, None, 0.5, None], "link": ["nvlink", "nvlink", "pcie", "pcie"]}
    assert [t["y"] for t in figure(spec, table)["data"]] == [[0.5, None]]
    assert fig.plotly_figure(spec, {**table, "use_share": [None] * 4}) is None


def test_what_cannot_be_drawn_is_none() -> None:
    assert fig.plotly_figure(HEATMAP, {}) is None
    assert fig.plotly_figure(HEATMAP, {"kernel": [], "bin_start_ns": [], "busy_ns": []}) is None
    assert fig.plotly_figure(Figure("t", "table", "t", x="a", y="b"), {"a": [1], "b": [2]}) is None


def test_one_bin_and_no_busy_time() -> None:
    made = figure(HEATMAP, {"kernel": ["a"], "bin_start_ns": [7], "busy_ns": [0]})
    assert made["data"][0]["z"] == [[None]]


def test_gauges_have_a_panel_per_unit() -> None:
    samples = {
        "device": [0, 0, 1, 0, 0],
        "metric": ["power_w", "power_w", "power_w", "mem_used_bytes", "odd"],
        "t_ns": [0, 1_000_000_000, 0, 0, 0],
        "value": [100.0, 200.0, 50.0, 2.0**31, 1.0],
    }
    made = gauges_figure(samples, SECONDS)
    assert made is not None
    assert [(t["name"], t["yaxis"], t["y"]) for t in made["data"]] == [
        ("Power, GPU 0", "y", [100.0, 200.0]),
        ("Power, GPU 1", "y", [50.0]),
        ("Memory used, GPU 0", "y2", [2.0]),
    ]
    assert made["layout"]["yaxis2"]["title"]["text"] == "Memory (GiB)"
    assert gauges_figure({"device": [0], "metric": ["odd"], "t_ns": [0], "value": [1.0]}, SECONDS) is None


def test_the_time_unit_follows_the_span() -> None:
    assert parts.time_unit(2_400_000_000) == (1e9, "s")
    assert parts.time_unit(1_900_000_000) == (1e6, "ms")
    assert parts.time_unit(0) == (1.0, "ns")


def test_shades_and_range() -> None:
    made = figure(HEATMAP, {"kernel": ["a", "a"], "bin_start_ns": [1_000_000_000, 2_000_000_000], "busy_ns": [1, 1]})
    parts.shade(made, [(1_500_000_000, 1_750_000_000)], SECONDS)
    assert [(s["x0"], s["x1"]) for s in made["layout"]["shapes"]] == [(1.5, 1.75)]
    assert parts.time_range([made]) == [1.0, 3.0]
    assert parts.time_range([]) is None


def test_labels_are_no_markup() -> None:
    table = {"kernel": list(fabricated.HOSTILE), "bin_start_ns": [0] * 5, "busy_ns": [1] * 5}
    made = figure(HEATMAP, table)
    for text in (*made["layout"]["yaxis"]["ticktext"], *made["meta"]["rows"]):
        assert "<" not in text.replace("<br>", "")
        assert text.replace("<br>", "").isprintable()


def test_plotly_accepts_every_figure() -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    report = fabricated.rich()
    made = [
        fig.plotly_figure(spec, result.tables[spec.table], SECONDS)
        for result in report.results
        for spec in result.figures
    ]
    made.append(gauges_figure(report.tables["samples"], SECONDS))
    drawn = [m for m in made if m is not None]
    assert len(drawn) == 4
    for one in drawn:
        graph_objects.Figure(data=one["data"], layout=one["layout"])


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colour", parts.PALETTE)
def test_series_stand_out_on_both_backgrounds(colour: str) -> None:
    assert _contrast(colour, "#ffffff") >= 3
    assert _contrast(colour, "#171c22") >= 3


@pytest.mark.parametrize(("theme", "background"), [("light", "#ffffff"), ("dark", "#171c22")])
def test_heat_grows_away_from_the_background(theme: str, background: str) -> None:
    scale = parts.THEMES[theme]["colorscale"]
    contrasts = [_contrast(colour, background) for _, colour in scale]
    assert contrasts == sorted(contrasts)
    assert contrasts[0] >= 1.15
    assert [position for position, _ in (scale[0], scale[-1])] == [0, 1]


def test_a_class_keeps_its_colour_where_another_is_nothing() -> None:
    spec = Figure("s", "stack", "t", x="bin_start_ns", y="idle_share", series="class")
    made = figure(spec, {"bin_start_ns": [0, 0], "class": ["launch", "sync"], "idle_share": [0.0, 0.5]})
    assert [(t["name"], t["marker"]["color"]) for t in made["data"]] == [("sync", parts.PALETTE[1])]


def test_the_row_of_all_others_does_not_set_the_colours() -> None:
    table = {"kernel": ["k", "other"], "bin_start_ns": [0, 0], "busy_ns": [0.25, 1]}
    assert figure(HEATMAP, table)["layout"]["coloraxis"]["cmax"] == 0.25
    alone = {"kernel": ["other"], "bin_start_ns": [0], "busy_ns": [0.5]}
    assert figure(HEATMAP, alone)["layout"]["coloraxis"]["cmax"] == 0.5


def test_reasons_for_lower_clocks_are_drawn_and_told_when_they_held() -> None:
    samples = {
        "device": [0, 0, 0, 0],
        "metric": ["throttle_sw_power_cap_share"] * 2 + ["throttle_gpu_idle_share", "throttle_hw_thermal_share"],
        "t_ns": [0, 1_000_000_000, 0, 0],
        "value": [0.0, 1.0, 1.0, 0.0],
    }
    made = gauges_figure(samples, SECONDS)
    assert made is not None
    assert [(t["name"], t["y"]) for t in made["data"]] == [("SW power cap", [0.0, 100.0])]
    assert throttling(samples) == "The driver held clocks back: SW power cap 50.0 % of the time."
    samples["value"] = [0.0, 0.0, 1.0, 0.0]
    assert throttling(samples) == "The driver did not hold clocks back."
    assert throttling({"device": [0], "metric": ["power_w"], "t_ns": [0], "value": [1.0]}) == ""
