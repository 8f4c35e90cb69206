"""From a Figure spec and its table to a plotly figure: plain dicts, without importing plotly, which takes long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spikeprof.analyzers.base import Figure
from spikeprof.profiler.units import unit_of
from spikeprof.reports import format as fmt
from spikeprof.reports.figure_parts import (
    LABEL_CHARS,
    PALETTE,
    PERCENT_TICKS,
    THEMES,
    Plotly,
    axis,
    base_layout,
    bin_width,
    colour_bar,
    row_axis,
    safe,
    time_axis,
    time_unit,
    wrapped,
)
from spikeprof.reports.kernel_names import short_names
from spikeprof.reports.model import PlainTable


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


def _x_axis(spec: Figure, unit: tuple[float, str]) -> Plotly:
    return time_axis(unit[1]) if unit_of(spec.x) == "ns" else axis(fmt.title(spec.x))


def _x_values(spec: Figure, values: Sequence[Any], unit: tuple[float, str]) -> list[Any]:
    if unit_of(spec.x) != "ns":
        return list(values)
    return [round(v / unit[0], 6) if fmt.is_number(v) else None for v in values]


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _heatmap(spec: Figure, table: PlainTable, unit: tuple[float, str]) -> Plotly:
    """Rows in the order of the table, the first on top; cells without a value stay empty.

    Nanoseconds per bin are shown as the share of the bin: a colour then means the same at every bin width.
    """
    names = _distinct(table[spec.y])
    columns = sorted(set(table[spec.x]))
    step = bin_width(columns)
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
    bar = colour_bar(label, 6, tickformat=PERCENT_TICKS if as_share else "")
    layout = base_layout(
        96 + 22 * len(names),
        xaxis=_x_axis(spec, unit),
        yaxis=row_axis([safe(n) for n in short_names(full, LABEL_CHARS)], tickfont={"size": 11}),
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
        yaxis=row_axis([safe(short[n]) for n in names]),
    )
    return {"data": traces, "layout": layout, "meta": {"labels": True}}


def _stack(spec: Figure, table: PlainTable, unit: tuple[float, str]) -> Plotly:
    """One bar per bin of ``x``, stacked by ``series``; nanoseconds per bin as a share of the bin.

    A series that is nothing everywhere is left out, but keeps its colour: a class looks alike in every report.
    """
    step = bin_width(table[spec.x])
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
