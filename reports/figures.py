"""From a Figure spec and its table to a plotly figure: plain dicts, without importing plotly (it takes half a second).

Colours that depend on the theme are not in the figures: the page merges ``THEMES[light|dark]`` into each layout.
Series colours are one palette whose every colour keeps a contrast of 3:1 on both backgrounds.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from spikeprof.analyzers.base import Figure
from spikeprof.profiler.units import unit_of
from spikeprof.reports import format as fmt
from spikeprof.reports.kernel_names import clip, printable, short_names
from spikeprof.reports.model import PlainTable

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


def plotly_figure(spec: Figure, table: PlainTable, unit: tuple[float, str] | None = None) -> Plotly | None:
    """The plotly figure of a spec, None when the table has nothing to draw or lacks a column, or the kind is a table's.

    ``unit`` is the unit of a time axis, for figures that stand under one another.
    """
    needed = [c for c in (spec.x, spec.y, spec.value, spec.series) if c]
    if spec.kind == "table" or any(c not in table for c in needed) or not table[spec.x]:
        return None
    draw = {"heatmap": _heatmap, "bars": _bars, "stack": _stack, "line": _line}[spec.kind]
    made = draw(spec, table, unit or time_unit(_span(table[spec.x]) if unit_of(spec.x) == "ns" else 0))
    return made if made["data"] else None


def _span(values: Sequence[Any]) -> float:
    numbers = [v for v in values if fmt.is_number(v)]
    return max(numbers) - min(numbers) if numbers else 0.0


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


def _x_axis(spec: Figure, unit: tuple[float, str]) -> Plotly:
    return time_axis(unit[1]) if unit_of(spec.x) == "ns" else axis(fmt.title(spec.x))


def _x_values(spec: Figure, values: Sequence[Any], unit: tuple[float, str]) -> list[Any]:
    if unit_of(spec.x) != "ns":
        return list(values)
    return [round(v / unit[0], 6) if fmt.is_number(v) else None for v in values]


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _step(values: Sequence[float]) -> float:
    """The width of one bin: the smallest distance of two neighbours."""
    ordered = sorted(set(values))
    return min((b - a for a, b in pairwise(ordered)), default=1.0) or 1.0


def _heatmap(spec: Figure, table: PlainTable, unit: tuple[float, str]) -> Plotly:
    """Rows in the order of the table, the first on top; cells without a value stay empty.

    Nanoseconds per bin are shown as the share of the bin: a colour then means the same at every bin width.
    """
    names = _distinct(table[spec.y])
    columns = sorted(set(table[spec.x]))
    step = _step(columns)
    as_share = unit_of(spec.value) == "ns" and unit_of(spec.x) == "ns"
    at_x = {x: i for i, x in enumerate(columns)}
    at_y = {y: i for i, y in enumerate(names)}
    z: list[list[float | None]] = [[None] * len(columns) for _ in names]
    for x, y, value in zip(table[spec.x], table[spec.y], table[spec.value], strict=False):
        if fmt.is_number(value) and value > 0:
            z[at_y[y]][at_x[x]] = round(value / step, 5) if as_share else value
    full = [str(n) for n in names]
    label = "share of the time slice" if as_share else fmt.title(spec.value)
    middles = [round((x + step / 2) / unit[0], 6) for x in columns] if unit_of(spec.x) == "ns" else columns
    trace = {
        "type": "heatmap",
        "x": middles,
        "y": list(range(len(names))),
        "z": z,
        "coloraxis": "coloraxis",
        "xgap": 0,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": f"%{{text}}<br>at %{{x}} {unit[1]}: "
        + ("%{z:.1%} of the slice" if as_share else "%{z}")
        + "<extra></extra>",
    }
    bar = {"orientation": "h", "thickness": 10, "len": 0.4, "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"}
    bar |= {"title": {"text": label, "side": "top"}, "tickformat": PERCENT_TICKS if as_share else "", "nticks": 6}
    layout = base_layout(
        96 + 22 * len(names),
        xaxis=_x_axis(spec, unit),
        yaxis=axis(
            "",
            autorange="reversed",
            tickvals=list(range(len(names))),
            ticktext=[safe(n) for n in short_names(full, LABEL_CHARS)],
            showgrid=False,
            fixedrange=True,
            tickfont={"size": 11},
        ),
        coloraxis={"colorscale": THEMES["light"]["colorscale"], "cmin": 0, "cmax": _most(z, full), "colorbar": bar},
    )
    layout["margin"] = {**layout["margin"], "t": 54}
    return {
        "data": [trace],
        "layout": layout,
        "meta": {"rows": [wrapped(n) for n in full], "labels": True, "time": unit_of(spec.x) == "ns"},
    }


def _most(z: Sequence[Sequence[float | None]], names: Sequence[str]) -> float:
    """The value that gets the strongest colour: the largest, but not of the row that sums up all others."""
    rows = z[:-1] if len(names) > 1 and names[-1] == "other" else z
    return max((v for row in rows for v in row if v), default=1.0)


def _bars(spec: Figure, table: PlainTable, unit: tuple[float, str]) -> Plotly:
    """Horizontal bars, one per row, split by ``series`` where given."""
    names = _distinct(table[spec.y])
    full = [str(n) for n in names]
    short = dict(zip(names, short_names(full, LABEL_CHARS), strict=True))
    traces = []
    for number, (series, picked) in enumerate(_by_series(spec, table)):
        values = [table[spec.x][i] for i in picked]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": safe(fmt.category(spec.series, series)),
                "y": [at for i in picked for at in [names.index(table[spec.y][i])]],
                "x": _x_values(spec, values, unit),
                "customdata": [safe(fmt.quantity(spec.x, v)) for v in values],
                "text": [wrapped(str(table[spec.y][i])) for i in picked],
                "textposition": "none",
                "marker": {"color": PALETTE[number % len(PALETTE)]},
                "hovertemplate": "%{text}<br>%{customdata}<extra>%{fullData.name}</extra>",
            }
        )
    title = f"{fmt.title(spec.x)} ({unit[1]})" if unit_of(spec.x) == "ns" else fmt.title(spec.x)
    layout = base_layout(
        90 + 26 * len(names),
        barmode="stack",
        showlegend=bool(spec.series),
        xaxis=axis(title, rangemode="tozero", **({"tickformat": PERCENT_TICKS} if unit_of(spec.x) == "share" else {})),
        yaxis=axis(
            "",
            autorange="reversed",
            tickvals=list(range(len(names))),
            ticktext=[safe(short[n]) for n in names],
            showgrid=False,
            fixedrange=True,
        ),
    )
    return {"data": traces, "layout": layout, "meta": {"labels": True}}


def _stack(spec: Figure, table: PlainTable, unit: tuple[float, str]) -> Plotly:
    """One bar per bin of ``x``, stacked by ``series``; nanoseconds per bin as a share of the bin.

    A series that is nothing everywhere is left out, but keeps its colour: a class looks alike in every report.
    """
    step = _step(table[spec.x])
    as_share = unit_of(spec.y) == "ns" and unit_of(spec.x) == "ns"
    divisor = unit[0] if unit_of(spec.x) == "ns" else 1
    traces = []
    for number, (series, picked) in enumerate(_by_series(spec, table)):
        values = [table[spec.y][i] for i in picked]
        if not any(values):
            continue
        traces.append(
            {
                "type": "bar",
                "name": safe(fmt.category(spec.series, series)),
                "x": [round((table[spec.x][i] + step / 2) / divisor, 6) for i in picked],
                "y": [round(v / step, 5) if as_share and fmt.is_number(v) else v for v in values],
                "width": round(step / divisor, 9),
                "marker": {"color": PALETTE[number % len(PALETTE)], "line": {"width": 0}},
                "customdata": [safe(fmt.quantity(spec.y, v)) for v in values],
                "hovertemplate": "%{fullData.name}: %{customdata}"
                + (" (%{y:.1%} of the slice)" if as_share else "")
                + f"<br>at %{{x}} {unit[1] if divisor != 1 else ''}<extra></extra>",
            }
        )
    y_axis = axis("share of the time slice" if as_share else fmt.title(spec.y), rangemode="tozero", fixedrange=True)
    if as_share or unit_of(spec.y) == "share":
        y_axis |= {"tickformat": PERCENT_TICKS}
    layout = base_layout(260, barmode="stack", bargap=0, showlegend=True, xaxis=_x_axis(spec, unit), yaxis=y_axis)
    return {"data": traces, "layout": layout, "meta": {"time": unit_of(spec.x) == "ns"}}


def _line(spec: Figure, table: PlainTable, unit: tuple[float, str]) -> Plotly:
    traces = []
    for number, (series, rows) in enumerate(_by_series(spec, table)):
        picked = sorted(rows, key=lambda i: table[spec.x][i])
        values = [table[spec.y][i] for i in picked]
        if not any(fmt.is_number(value) for value in values):
            continue  # the legend would promise a line that is nowhere
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": safe(fmt.category(spec.series, series)),
                "x": _x_values(spec, [table[spec.x][i] for i in picked], unit),
                "y": values,
                "customdata": [safe(fmt.quantity(spec.y, v)) for v in values],
                "line": {"color": PALETTE[number % len(PALETTE)], "width": 1.6},
                "hovertemplate": "%{fullData.name}: %{customdata}<br>at %{x}<extra></extra>",
            }
        )
    y_axis = axis(fmt.title(spec.y), rangemode="tozero", fixedrange=True)
    if unit_of(spec.y) == "share":
        y_axis |= {"tickformat": PERCENT_TICKS}
    layout = base_layout(260, showlegend=bool(spec.series), xaxis=_x_axis(spec, unit), yaxis=y_axis)
    return {"data": traces, "layout": layout, "meta": {"time": unit_of(spec.x) == "ns"}}


def _by_series(spec: Figure, table: PlainTable) -> list[tuple[Any, list[int]]]:
    """(series, row numbers) in order of first appearance; one nameless series where the spec has none."""
    length = min(len(table[c]) for c in (spec.x, spec.y))
    if not spec.series:
        return [("", list(range(length)))]
    groups: dict[Any, list[int]] = {}
    for i in range(length):
        groups.setdefault(table[spec.series][i], []).append(i)
    return list(groups.items())


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
                half = _step(trace["x"]) / 2
                edges += [min(trace["x"]) - half, max(trace["x"]) + half]
    return [round(min(edges), 6), round(max(edges), 6)] if edges else None
