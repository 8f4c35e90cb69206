"""Lines one above the other over one time axis: a panel per unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spikeprof.reports import format as fmt
from spikeprof.reports.figure_parts import PALETTE, Plotly, axis, base_layout, safe, time_axis

_GAP = 0.06  # between panels, as a part of the figure's height


@dataclass(frozen=True, slots=True)
class Line:
    """One line: values of ``metric`` (whose name states their unit) at times in ns; None leaves a gap.

    Lines of one ``group`` share a colour and an entry of the legend.
    """

    name: str
    metric: str
    times_ns: Sequence[float]
    values: Sequence[float | None]
    group: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines that share an axis: its title, what their values are divided by, and the unit shown."""

    title: str
    divisor: float
    shown: str
    lines: Sequence[Line]


def stacked(panels: Sequence[Panel], unit: tuple[float, str]) -> Plotly:
    """The figure of the panels, the first on top. ``unit`` is that of the time axis."""
    traces: list[Plotly] = []
    colours: dict[str, int] = {}
    layout = base_layout(70 + 120 * len(panels), showlegend=True, xaxis=time_axis(unit[1]))
    height = (1 - _GAP * (len(panels) - 1)) / len(panels)
    for row, panel in enumerate(panels):
        suffix = "" if row == 0 else str(row + 1)
        top = 1 - row * (height + _GAP)
        domain = [round(max(top - height, 0), 4), round(top, 4)]
        title = f"{panel.title} ({panel.shown})"
        layout[f"yaxis{suffix}"] = axis(title, domain=domain, rangemode="tozero", fixedrange=True, nticks=4)
        for line in panel.lines:
            number = colours.setdefault(line.group or f"{row} {line.name}", len(colours))
            trace = _trace(line, panel.divisor, suffix, PALETTE[number % len(PALETTE)], unit)
            first = all(trace["name"] != other["name"] for other in traces)
            traces.append(trace | ({"legendgroup": line.group, "showlegend": first} if line.group else {}))
    layout["xaxis"]["anchor"] = f"y{len(panels)}" if len(panels) > 1 else "y"
    return {"data": traces, "layout": layout, "meta": {"time": True}}


def _trace(line: Line, divisor: float, suffix: str, colour: str, unit: tuple[float, str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "yaxis": f"y{suffix}",
        "name": safe(line.group or line.name),
        "x": [round(t / unit[0], 6) for t in line.times_ns],
        "y": [None if v is None else round(v / divisor, 5) for v in line.values],
        "customdata": [safe(fmt.quantity(line.metric, v)) for v in line.values],
        "line": {"color": colour, "width": 1.6},
        "hovertemplate": f"{safe(line.name)}: %{{customdata}}<br>at %{{x}} {unit[1]}<extra></extra>",
    }
