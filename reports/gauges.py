"""Power, clocks, utilisation, … one above the other over one time axis."""

from __future__ import annotations

from collections.abc import Sequence

from spikeprof.profiler.units import unit_of
from spikeprof.reports import format as fmt
from spikeprof.reports.figures import PALETTE, Plotly, axis, base_layout, safe, time_axis
from spikeprof.reports.model import PlainTable

#: Gauges drawn in one panel, in this order: metrics of one unit share an axis.
_PANELS = (("W", "Power"), ("MHz", "Clocks"), ("share", "Utilisation"), ("bytes", "Memory"), ("°C", "Temperature"))


def gauges_figure(samples: PlainTable, unit: tuple[float, str]) -> Plotly | None:
    """Power, clocks, utilisation, … one above the other over one time axis; None without readings."""
    panels = [(u, name, _of_unit(samples, u)) for u, name in _PANELS]
    panels = [p for p in panels if p[2]]
    if not panels:
        return None
    traces: list[Plotly] = []
    layout = base_layout(70 + 120 * len(panels), showlegend=True, xaxis=time_axis(unit[1]))
    gap = 0.06
    height = (1 - gap * (len(panels) - 1)) / len(panels)
    many = len(set(samples["device"])) > 1
    number = 0
    for row, (kind, name, groups) in enumerate(panels):
        suffix = "" if row == 0 else str(row + 1)
        top = 1 - row * (height + gap)
        domain = [round(max(top - height, 0), 4), round(top, 4)]
        divisor, shown = _gauge_scale(kind, [samples["value"][i] for rows in groups.values() for i in rows])
        layout[f"yaxis{suffix}"] = axis(
            f"{name} ({shown})", domain=domain, rangemode="tozero", fixedrange=True, nticks=4
        )
        for (device, metric), picked in groups.items():
            values = [samples["value"][i] for i in picked]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "yaxis": f"y{suffix}",
                    "name": safe(fmt.title(metric) + (f", GPU {device}" if many else "")),
                    "x": [round(samples["t_ns"][i] / unit[0], 6) for i in picked],
                    "y": [round(v / divisor, 5) for v in values],
                    "customdata": [safe(fmt.quantity(metric, v)) for v in values],
                    "line": {"color": PALETTE[number % len(PALETTE)], "width": 1.6},
                    "hovertemplate": f"%{{fullData.name}}: %{{customdata}}<br>at %{{x}} {unit[1]}<extra></extra>",
                }
            )
            number += 1
    layout["xaxis"]["anchor"] = f"y{len(panels)}" if len(panels) > 1 else "y"
    return {"data": traces, "layout": layout, "meta": {"time": True}}


def _of_unit(samples: PlainTable, unit: str) -> dict[tuple[int, str], list[int]]:
    groups: dict[tuple[int, str], list[int]] = {}
    for i, (device, metric, value) in enumerate(
        zip(samples["device"], samples["metric"], samples["value"], strict=False)
    ):
        if unit_of(metric) == unit and fmt.is_number(value):
            groups.setdefault((device, metric), []).append(i)
    return groups


def _gauge_scale(kind: str, values: Sequence[float]) -> tuple[float, str]:
    """(what to divide by, the unit shown)."""
    if kind == "share":
        return 0.01, "%"
    if kind == "bytes":
        return (2.0**30, "GiB") if max(values) >= 2**30 else (2.0**20, "MiB")
    return 1.0, kind
