"""Charts of the page: look-ups per second, miss rate and alerts of each pattern over one axis of time in UTC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from spikeprof.reports import figure_parts as fig
from spikeprof.reports.html_parts import Chart
from spikeprof.reports.kernel_names import clip
from spikeprof.reports.pierce import texts
from spikeprof.reports.pierce.history import History, Incident, Place, Point

MAX_LINES = 8
MAX_BARS = 40
_GAP_STEPS = 3  # a line is broken where a pattern was not among the busiest for longer
_COLOURS = {"warn": "#8a8420", "alert": "#c76a12", "critical": "#c9433f"}
_LABEL_CHARS = 34


def timeline(history: History) -> list[Chart]:
    """The charts of a history; none of an empty one."""
    span = history.span_s
    if span is None:
        return []
    places = history.places(MAX_LINES)
    incidents = history.incidents()
    step = f"each point is the highest within {history.step_s:g} s"
    rates = _lines(history, places, "look-ups per second", "qps", lambda p: p.qps, lambda p: p.usual_qps)
    misses = _lines(
        history, places, "share that misses", "miss_rate", lambda p: p.miss_rate, lambda p: p.usual_miss_rate
    )
    misses["layout"]["yaxis"] |= {"tickformat": fig.PERCENT_TICKS, "range": [0, 1.02]}
    for figure in (rates, misses):
        fig.shade(figure, [(start * 1e9, end * 1e9) for start, end in _open_stretches(incidents, span[1])], (1e6, "ms"))
    charts = [
        Chart("pierce-qps", "Look-ups per second", f"{step}; dotted: the usual of patterns that alerted", 300, rates),
        Chart("pierce-miss", "Miss rate", "grey stretches: an alert was open", 300, misses),
    ]
    if incidents:
        bars = _bars(incidents[:MAX_BARS], span[1])
        charts.append(Chart("pierce-alerts", "Alerts", "from raised to recovered", bars["layout"]["height"], bars))
    for chart in charts:
        chart.figure["layout"]["xaxis"]["range"] = whole(history)
        chart.figure["layout"]["margin"]["l"] = fig.LEFT_MARGIN if incidents else 70
    return charts


def _open_stretches(incidents: Sequence[Incident], end_s: float) -> list[tuple[float, float]]:
    """When at least one alert was open: overlapping stretches as one."""
    made: list[tuple[float, float]] = []
    for start, end in sorted((i.start_s, end_s if i.end_s is None else i.end_s) for i in incidents):
        if made and start <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((start, end))
    return made


def whole(history: History) -> list[float]:
    """The axis of time zoomed out, in ms since 1970, a little wider than what was seen."""
    start, end = history.span_s or (0.0, 1.0)
    edge = max(end - start, 1.0) * 0.01
    return [_ms(start - edge), _ms(end + edge)]


def _lines(
    history: History,
    places: Sequence[Place],
    title: str,
    metric: str,
    value_of: Callable[[Point], float | None],
    usual_of: Callable[[Point], float | None],
) -> fig.Plotly:
    alerted = {(n.tenant, n.pattern) for n in history.notices}
    data = []
    for number, place in enumerate(places):
        points = sorted(history.series[place].items())
        name = fig.safe(clip(texts.place(*place), _LABEL_CHARS))
        colour = fig.PALETTE[number % len(fig.PALETTE)]
        line = _line(history, points, value_of, metric)
        data.append({**line, "name": name, "legendgroup": name, "line": {"color": colour, "width": 1.8}})
        if place in alerted and any(usual_of(point) is not None for _, point in points):
            usual = _line(history, points, usual_of, metric)
            look = {"color": colour, "width": 1.2, "dash": "dot"}
            data.append({**usual, "name": f"{name}, usual", "legendgroup": name, "showlegend": False, "line": look})
    layout = fig.base_layout(
        300, showlegend=True, xaxis=_axis(), yaxis=fig.axis(title, rangemode="tozero", fixedrange=True)
    )
    return {"data": data, "layout": layout, "meta": {"time": True}}


def _line(
    history: History, points: Sequence[tuple[int, Point]], value_of: Callable[[Point], float | None], metric: str
) -> dict[str, Any]:
    x: list[float] = []
    y: list[float | None] = []
    before = None
    for cell, point in points:
        if before is not None and cell - before > _GAP_STEPS:
            x.append(_ms((before + 1) * history.step_s))
            y.append(None)
        x.append(_ms((cell + 0.5) * history.step_s))
        value = value_of(point)
        y.append(None if value is None else round(value, 5))
        before = cell
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(points) == 1 else "lines",
        "x": x,
        "y": y,
        "customdata": [texts.number(metric, value) for value in y],
        "hovertemplate": "%{fullData.name}: %{customdata}<br>%{x|%H:%M:%S}<extra></extra>",
    }


def _bars(incidents: Sequence[Incident], end_s: float) -> fig.Plotly:
    """One row per rule and pattern, the incident that began first on top; colours are severities, which may rise."""
    ordered = sorted(incidents, key=lambda i: i.start_s)
    rows = list(dict.fromkeys(_row(i) for i in ordered))
    data: list[dict[str, Any]] = []
    for severity, colour in _COLOURS.items():
        stretches = [s for i in ordered for s in _stretches(i, end_s) if s[0] == severity]
        if not stretches:
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": severity,
                "base": [_ms(start) for _, start, _, _ in stretches],
                "x": [_ms(max(end - start, 0.0)) for _, start, end, _ in stretches],
                "y": [rows.index(_row(i)) for *_, i in stretches],
                "text": [fig.wrapped(texts.summary(i.worst)) for *_, i in stretches],
                "textposition": "none",
                "customdata": [texts.seconds(end - start) for _, start, end, _ in stretches],
                "marker": {"color": colour},
                "hovertemplate": "%{text}<br>%{customdata} as " + severity + "<extra></extra>",
                "width": 0.6,
            }
        )
    labels = [fig.safe(clip(row, _LABEL_CHARS)) for row in rows]
    layout = fig.base_layout(
        90 + 26 * len(rows),
        barmode="overlay",
        showlegend=True,
        xaxis=_axis(),
        yaxis=fig.axis(
            "",
            range=[len(rows) - 0.4, -0.6],
            tickvals=list(range(len(rows))),
            ticktext=labels,
            showgrid=False,
            fixedrange=True,
        ),
    )
    return {"data": data, "layout": layout, "meta": {"time": True, "labels": True}}


def _row(incident: Incident) -> str:
    notice = incident.worst
    return "keys that exist nowhere" if notice.rule == "illegal-keys" else texts.where(notice)


def _stretches(incident: Incident, end_s: float) -> list[tuple[str, float, float, Incident]]:
    """(severity, start, end, incident): one for each severity that it had."""
    last = end_s if incident.end_s is None else incident.end_s
    begun = [n for n in incident.notices if n.kind != "recovered"]
    ends = [b.ts_s for _, b in pairwise(begun)] + [last]
    return [(n.severity, n.ts_s, end, incident) for n, end in zip(begun, ends, strict=True)]


def _axis() -> fig.Plotly:
    return fig.axis("time (UTC)", type="date", showgrid=False, ticks="outside")


def _ms(ts_s: float) -> float:
    return round(ts_s * 1000, 1)
