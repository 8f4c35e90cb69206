"""What plotly figures are made of: colours, axes, layouts, texts; and what is done to those over time.

Colours that depend on the theme are not in the figures: the page merges ``THEMES[light|dark]`` into each layout.
Series colours are one palette whose every colour keeps a contrast of 3:1 on both backgrounds.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from spikeprof.reports.kernel_names import clip, printable

Plotly = dict[str, Any]

#: Told apart with the common colour blindnesses, in this order.
PALETTE = ("#3a80c4", "#c76a12", "#1d9175", "#bb5aa0", "#8a8420", "#c9433f", "#7a6fd0", "#4c8c9e", "#8a8f98", "#a5694f")

_HEAT_LIGHT = ("#e3eefa", "#b5d3ef", "#7fb2df", "#4a8cc9", "#1f66ad", "#0b4488", "#082a5c")
_HEAT_DARK = ("#17304d", "#1c4a78", "#2468a5", "#3a8bd0", "#6db0ea", "#a9d4fa", "#eaf5ff")

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_AXIS_TIME = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
PERCENT_TICKS = ".2~%"  # as many decimals as it takes to tell ticks apart, at most two
LABEL_CHARS = 32  # of a row's label
LEFT_MARGIN = 250  # px, the same for all figures over time, so that their axes stand under one another


def _scale(colours: Sequence[str]) -> list[list[float | str]]:
    """A colour scale by square root: most cells of a kernel × time map are small, and must still be seen."""
    last = len(colours) - 1
    return [[(i / last) ** 2, colour] for i, colour in enumerate(colours)]


def _theme(ink: str, grid: str, paper: str, shade: str, heat: Sequence[str]) -> Plotly:
    axis = {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid, "tickcolor": grid}
    return {
        "font": {"color": ink},
        "axis": axis,
        "hoverlabel": {"bgcolor": paper, "bordercolor": grid, "font": {"color": ink}},
        "colorscale": _scale(heat),
        "evenscale": [[i / (len(heat) - 1), colour] for i, colour in enumerate(heat)],
        "shade": shade,
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": grid, "activecolor": ink},
    }


#: What the page merges into every layout, by theme.
THEMES: dict[str, Plotly] = {
    "light": _theme("#30363d", "#d5dae1", "#ffffff", "rgba(90,100,114,0.18)", _HEAT_LIGHT),
    "dark": _theme("#c9d1d9", "#363d47", "#1c2128", "rgba(152,163,177,0.22)", _HEAT_DARK),
}


def safe(text: str) -> str:
    """Text for plotly, which reads a little HTML in labels: nothing of it is markup."""
    return html.escape(printable(text), quote=False)


def wrapped(text: str, width: int = 70, lines: int = 6) -> str:
    """A long name for a hover box, broken into lines, as plotly text."""
    shown = clip(printable(text), width * lines)
    return "<br>".join(html.escape(shown[i : i + width], quote=False) for i in range(0, len(shown), width))


def time_unit(span_ns: float) -> tuple[float, str]:
    """The unit in which a time axis of this span has readable numbers: (nanoseconds, name)."""
    return next(((step, unit) for step, unit in _AXIS_TIME if span_ns >= 2 * step), _AXIS_TIME[-1])


def base_layout(height: int, **more: Any) -> Plotly:
    """The layout that all figures share; ``height`` in px."""
    return {
        "height": height,
        "autosize": True,
        "margin": {"l": LEFT_MARGIN, "r": 18, "t": 34, "b": 42},
        "font": {"family": _FONT, "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "modebar": {"bgcolor": "rgba(0,0,0,0)"},
        "legend": {
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "xanchor": "left",
        },
        "hoverlabel": {"align": "left", "namelength": -1},
        "hovermode": "closest",
        **more,
    }


def axis(text: str, **more: Any) -> Plotly:
    """An axis with a title, in the manner of all figures."""
    return {"title": {"text": safe(text), "standoff": 8}, "automargin": False, "zeroline": False, **more}


def time_axis(unit: str) -> Plotly:
    """An axis of time since the start of the recording, in the named unit."""
    return axis(f"time since the start of the recording ({unit})", showgrid=False, ticks="outside")


def row_axis(names: Sequence[str], **more: Any) -> Plotly:
    """The axis of rows that are numbered from 0, the first on top, with their names as plotly text."""
    shown = {"tickvals": list(range(len(names))), "ticktext": list(names)}
    return axis("", autorange="reversed", showgrid=False, fixedrange=True, **shown, **more)


def colour_bar(title: str, ticks: int, **more: Any) -> Plotly:
    """The legend of a heatmap's colours, above it on the right, with about so many ticks."""
    place = {"x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"}
    shape = {"orientation": "h", "thickness": 10, "len": 0.4, "nticks": ticks}
    return {**shape, **place, "title": {"text": title, "side": "top"}, **more}


def bin_width(values: Sequence[float]) -> float:
    """The width of one bin: the smallest distance of two neighbours."""
    ordered = sorted(set(values))
    return min((b - a for a, b in pairwise(ordered)), default=1.0) or 1.0


def shade(figure: Plotly, windows: Sequence[tuple[float, float]], unit: tuple[float, str]) -> None:
    """Grey stretches behind a figure over time: there nothing was recorded. Times in ns."""
    figure["layout"]["shapes"] = [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": round(start / unit[0], 6),
            "x1": round(end / unit[0], 6),
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "line": {"width": 0},
            "fillcolor": THEMES["light"]["shade"],
        }
        for start, end in windows
    ]


def time_range(figures: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """The stretch of time that the heatmaps and stacks among the figures cover, in their unit."""
    edges: list[float] = []
    for figure in figures:
        for trace in figure["data"]:
            if trace["type"] in ("heatmap", "bar") and trace.get("orientation") != "h" and trace["x"]:
                half = bin_width(trace["x"]) / 2
                edges += [min(trace["x"]) - half, max(trace["x"]) + half]
    return [round(min(edges), 6), round(max(edges), 6)] if edges else None
