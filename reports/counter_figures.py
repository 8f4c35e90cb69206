"""Figures of hardware counters: kernel × metric, counters over time, DRAM rates against the peak, roofline."""

from __future__ import annotations

from math import log10
from typing import Any

from spikeprof.analyzers.base import Figure
from spikeprof.profiler.units import unit_of
from spikeprof.reports import format as fmt
from spikeprof.reports.class_names import class_names
from spikeprof.reports.figure_parts import (
    LABEL_CHARS,
    PALETTE,
    THEMES,
    Plotly,
    axis,
    base_layout,
    row_axis,
    safe,
    time_unit,
    wrapped,
)
from spikeprof.reports.model import PlainTable
from spikeprof.reports.panels import Line, Panel, stacked

#: Titles of panels by unit, in the order in which they are drawn; and of shares that are hit rates.
_PANELS = (("bytes/s", "DRAM"), ("hits", "Hit rate"), ("share", "Active"))
#: Points of a roofline nearer than this to one that has its name beside it (in decades) have none.
_APART_X, _APART_Y = 0.4, 0.12
_LABEL_CHARS = 26
_GPUS_APART = 2  # with more, lines of all GPUs have one colour per metric
_ROOF = "#8a8f98"  # stands out on both backgrounds


def matrix(spec: Figure, table: PlainTable) -> Plotly:
    """Kernel classes × metrics; a cell's colour is its place on the metric's own scale, its text the value."""
    rows, columns = (list(dict.fromkeys(table[name])) for name in (spec.y, spec.x))
    first = [table[spec.y].index(row) for row in rows]
    short, full = class_names({name: [values[i] for i in first] for name, values in table.items()}, LABEL_CHARS)
    z: list[list[float | None]] = [[None] * len(columns) for _ in rows]
    text = [[""] * len(columns) for _ in rows]
    hover = [[""] * len(columns) for _ in rows]
    for i, (row, column) in enumerate(zip(table[spec.y], table[spec.x], strict=True)):
        at = rows.index(row), columns.index(column)
        value, low, high = (table[name][i] for name in ("value", "low", "high"))
        z[at[0]][at[1]] = table[spec.value][i]
        text[at[0]][at[1]] = fmt.brief(column, value)
        hover[at[0]][at[1]] = f"{safe(fmt.title(column))}: {safe(fmt.bounded(column, value, low, high))}"
    trace = {
        "type": "heatmap",
        "x": list(range(len(columns))),
        "y": list(range(len(rows))),
        "z": z,
        "text": text,
        "texttemplate": "%{text}",
        "textfont": {"size": 11},
        "customdata": [[f"{wrapped(full[r])}<br>{cell}" for cell in cells] for r, cells in enumerate(hover)],
        "hovertemplate": "%{customdata}<extra></extra>",
        "hoverongaps": False,
        "coloraxis": "coloraxis",
        "xgap": 1,
        "ygap": 1,
    }
    titles = ["<br>".join(map(safe, _two_lines(fmt.title(name)))) for name in columns]
    layout = base_layout(
        62 + 26 * len(rows),
        xaxis=axis("", tickvals=list(range(len(columns))), ticktext=titles, side="top", showgrid=False, fixedrange=True)
        | {"tickangle": 0, "tickfont": {"size": 11}},
        yaxis=row_axis([safe(name) for name in short], tickfont={"size": 11}),
        coloraxis={"colorscale": THEMES["light"]["evenscale"], "cmin": 0, "cmax": 1, "showscale": False},
    )
    layout["margin"] = {**layout["margin"], "t": 48, "b": 10}
    return {"data": [trace], "layout": layout, "meta": {"labels": True, "even": True, "upright": True}}


def _two_lines(text: str) -> list[str]:
    """A title broken at the space nearest to its middle."""
    spaces = [i for i, c in enumerate(text) if c == " "]
    if len(text) <= 10 or not spaces:
        return [text]
    middle = min(spaces, key=lambda i: abs(i - len(text) / 2))
    return [text[:middle], text[middle + 1 :]]


def panels(spec: Figure, table: PlainTable, unit: tuple[float, str]) -> Plotly | None:
    """All columns that state a unit over the time ``spec.x``: rates, hit rates and shares one above the other."""
    step = _bin_ns(table[spec.x])
    devices = list(dict.fromkeys(table[spec.series]))
    made = []
    for kind, title in _PANELS:
        names = [name for name in table if name not in (spec.x, spec.series) and _kind(name) == kind]
        lines = [_line(spec, table, name, device, step, len(devices)) for name in names for device in devices]
        if lines:
            most = max((v for line in lines for v in line.values if v is not None), default=0.0)
            made.append(Panel(title, *_scale(names[0], most), lines))
    return stacked(made, unit) if made else None


def _kind(name: str) -> str | None:
    return "hits" if name.endswith("_hit_share") else unit_of(name)


def _bin_ns(starts: list[Any]) -> float:
    ordered = sorted(set(starts))
    return (ordered[-1] - ordered[0]) / (len(ordered) - 1) if len(ordered) > 1 else 0.0


def _line(spec: Figure, table: PlainTable, name: str, device: Any, step: float, gpus: int) -> Line:
    picked = [i for i, d in enumerate(table[spec.series]) if d == device]
    title = fmt.title(name)
    times, values = [table[spec.x][i] + step / 2 for i in picked], [table[name][i] for i in picked]
    name_here = title + (f", GPU {device}" if gpus > 1 else "")
    return Line(name_here, name, times, values, group=title if gpus > _GPUS_APART else "")


def _scale(name: str, most: float) -> tuple[float, str]:
    """(what to divide by, the unit shown) so that an axis has readable numbers."""
    return (0.01, "%") if unit_of(name) == "share" else fmt.scale(name, most)


def limited_bars(spec: Figure, table: PlainTable) -> Plotly:
    """A stacked bar per kernel class, and a line at the limit ``spec.value``."""
    rows = list(dict.fromkeys(table[spec.y]))
    first = [table[spec.y].index(row) for row in rows]
    short, full = class_names({name: [values[i] for i in first] for name, values in table.items()}, LABEL_CHARS)
    limits = sorted({v for v in table[spec.value] if fmt.is_number(v)})
    sums = [sum(v for v, row in zip(table[spec.x], table[spec.y], strict=True) if row == one) for one in rows]
    widest = max([*limits, *sums])
    divisor, shown = fmt.scale(spec.x, widest)
    traces: list[Plotly] = []
    for number, series in enumerate(dict.fromkeys(table[spec.series])):
        picked = [i for i, s in enumerate(table[spec.series]) if s == series]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": safe(fmt.title(str(series))),
                "y": [rows.index(table[spec.y][i]) for i in picked],
                "x": [table[spec.x][i] / divisor for i in picked],
                "customdata": [safe(fmt.quantity(spec.x, table[spec.x][i])) for i in picked],
                "text": [wrapped(full[rows.index(table[spec.y][i])]) for i in picked],
                "textposition": "none",
                "marker": {"color": PALETTE[number % len(PALETTE)]},
                "hovertemplate": "%{text}<br>%{fullData.name}: %{customdata}<extra></extra>",
            }
        )
    for limit in limits:
        text = f"{fmt.title(spec.value)} {fmt.quantity(spec.value, limit)}"
        traces.append(_roof([limit / divisor] * 2, [-0.5, len(rows) - 0.5], text))
    ticks = {"tickvals": list(range(len(rows))), "ticktext": [safe(name) for name in short]}
    layout = base_layout(
        96 + 26 * len(rows),
        barmode="stack",
        showlegend=True,
        xaxis=axis(f"{fmt.title(spec.x)} ({shown})", range=[0, 1.04 * widest / divisor]),
        yaxis=axis("", range=[len(rows) - 0.5, -0.5], showgrid=False, fixedrange=True, **ticks),
    )
    return {"data": traces, "layout": layout, "meta": {"labels": True}}


def _roof(x: list[float], y: list[float], text: str) -> Plotly:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": safe(text),
        "x": x,
        "y": y,
        "line": {"color": _ROOF, "width": 2, "dash": "dash"},
        "hovertemplate": "%{fullData.name}<extra></extra>",
    }


def roofline(spec: Figure, table: PlainTable) -> Plotly:
    """Kernels as points under the roofs of their GPU, both axes logarithmic; a point's area is its share of time."""
    points = [i for i, kind in enumerate(table[spec.series]) if kind == "kernel"]
    corners = [i for i, kind in enumerate(table[spec.series]) if kind == "roof"]
    short, full = class_names({name: [values[i] for i in points] for name, values in table.items()}, _LABEL_CHARS)
    named = _apart([(table[spec.x][i], table[spec.y][i]) for i in points])
    shares = [table["counted_time_share"][i] for i in points]
    divisor, shown = fmt.scale(spec.y, max(table[spec.y]))
    traces: list[Plotly] = []
    for model in dict.fromkeys(table["kernel"][i] for i in corners):
        mine = [i for i in corners if table["kernel"][i] == model]
        peaks = (fmt.quantity(name, table[name][mine[0]]) for name in ("dram_peak_bytes_per_s", "peak_flop_per_s"))
        x, y = [table[spec.x][i] for i in mine], [table[spec.y][i] / divisor for i in mine]
        traces.append(_roof(x, y, f"{model}: {', '.join(peaks)}"))
    traces.append(
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "kernels",
            "x": [table[spec.x][i] for i in points],
            "y": [table[spec.y][i] / divisor for i in points],
            "text": [safe(name) if n in named else "" for n, name in enumerate(short)],
            "textposition": "bottom center",
            "textfont": {"size": 11},
            "customdata": [
                "<br>".join(
                    (
                        wrapped(full[n]),
                        *(safe(fmt.quantity(c, table[c][i])) for c in (spec.y, spec.x)),
                        f"{safe(fmt.share(shares[n]))} of the counted time",
                    )
                )
                for n, i in enumerate(points)
            ],
            "marker": {
                "color": PALETTE[0],
                "opacity": 0.85,
                "size": [round(8 + 26 * share**0.5, 1) for share in shares],
                "line": {"width": 0},
            },
            "hovertemplate": "%{customdata}<extra></extra>",
            "cliponaxis": False,
        }
    )
    layout = base_layout(
        420,
        showlegend=True,
        xaxis=axis(fmt.title(spec.x), type="log", dtick=1, ticks="outside"),
        yaxis=axis(f"{fmt.title(spec.y)} ({shown})", type="log", dtick=1),
    )
    layout["margin"] = {**layout["margin"], "l": 70}
    return {"data": traces, "layout": layout, "meta": {"points": True}}


def _apart(points: list[tuple[float, float]]) -> list[int]:
    """Points whose names do not overlap: each in turn that is far enough from those taken before."""
    taken: list[int] = []
    for number, (x, y) in enumerate(points):
        far = [abs(log10(x / points[i][0])) > _APART_X or abs(log10(y / points[i][1])) > _APART_Y for i in taken]
        if all(far):
            taken.append(number)
    return taken


def draw(spec: Figure, table: PlainTable, unit: tuple[float, str] | None = None) -> Plotly | None:
    """A figure of one of the kinds here; None where its table is empty."""
    if not table.get(spec.x):
        return None
    if spec.kind == "panels":
        return panels(spec, table, unit or time_unit(max(table[spec.x]) - min(table[spec.x])))
    return {"matrix": matrix, "limits": limited_bars, "roofline": roofline}[spec.kind](spec, table)


KINDS = ("matrix", "panels", "limits", "roofline")
