"""Power, clocks, utilisation, … one above the other over one time axis."""

from __future__ import annotations

from collections.abc import Sequence

from spikeprof.profiler.units import unit_of
from spikeprof.reports import format as fmt
from spikeprof.reports.figure_parts import Plotly
from spikeprof.reports.model import PlainTable
from spikeprof.reports.panels import Line, Panel, stacked

#: Gauges drawn in one panel, in this order: metrics of one unit share an axis, reasons of slower clocks have their own.
_PANELS = (
    ("W", "Power"),
    ("MHz", "Clocks"),
    ("throttle", "Held back"),
    ("share", "Utilisation"),
    ("gpm", "Units in use"),
    ("bytes", "Memory"),
    ("°C", "Temperature"),
)
_THROTTLE, _GPM = "throttle_", "gpm_"
#: Reasons for lower clocks that are no complaint: nothing to do, or the user's own setting.
_HARMLESS = ("throttle_gpu_idle_share", "throttle_applications_clocks_share")


def gauges_figure(samples: PlainTable, unit: tuple[float, str]) -> Plotly | None:
    """Power, clocks, utilisation, … one above the other over one time axis; None without readings."""
    panels = [(u, name, _of_unit(samples, u)) for u, name in _PANELS]
    panels = [p for p in panels if p[2]]
    if not panels:
        return None
    many = len(set(samples["device"])) > 1
    return stacked([_panel(samples, kind, name, groups, many) for kind, name, groups in panels], unit)


def _panel(samples: PlainTable, kind: str, name: str, groups: dict[tuple[int, str], list[int]], many: bool) -> Panel:
    divisor, shown = _gauge_scale(kind, [samples["value"][i] for rows in groups.values() for i in rows])
    lines = [
        Line(
            _name(metric) + (f", GPU {device}" if many else ""),
            metric,
            [samples["t_ns"][i] for i in picked],
            [samples["value"][i] for i in picked],
        )
        for (device, metric), picked in groups.items()
    ]
    return Panel(name, divisor, shown, lines)


def throttling(samples: PlainTable) -> str:
    """Why the driver held clocks back, and for what share of the readings; empty when it was not asked."""
    found: dict[str, list[float]] = {}
    for metric, value in zip(samples["metric"], samples["value"], strict=False):
        if metric.startswith(_THROTTLE) and metric not in _HARMLESS and fmt.is_number(value):
            found.setdefault(metric, []).append(value)
    if not found:
        return ""
    means = {metric: sum(values) / len(values) for metric, values in found.items()}
    held = [f"{fmt.within(_name(m))} {fmt.share(v)} of the time" for m, v in means.items() if v > 0]
    return f"The driver held clocks back: {fmt.joined(held)}." if held else "The driver did not hold clocks back."


def _name(metric: str) -> str:
    return fmt.title(metric.removeprefix(_THROTTLE).removeprefix(_GPM))


def _of_unit(samples: PlainTable, unit: str) -> dict[tuple[int, str], list[int]]:
    """Row numbers per (device, metric) of one panel. Reasons that never held are left out."""
    groups: dict[tuple[int, str], list[int]] = {}
    for i, (device, metric, value) in enumerate(
        zip(samples["device"], samples["metric"], samples["value"], strict=False)
    ):
        if _kind(metric) == unit and metric not in _HARMLESS and fmt.is_number(value):
            groups.setdefault((device, metric), []).append(i)
    if unit == "throttle":
        return {key: rows for key, rows in groups.items() if any(samples["value"][i] for i in rows)}
    return groups


def _kind(metric: str) -> str | None:
    """Which panel a metric belongs to: by its unit, but for the reasons of slower clocks and what GPM averages."""
    unit = unit_of(metric)
    if metric.startswith(_THROTTLE):
        return "throttle"
    return "gpm" if metric.startswith(_GPM) and unit == "share" else unit


def _gauge_scale(kind: str, values: Sequence[float]) -> tuple[float, str]:
    """(what to divide by, the unit shown)."""
    if kind in ("share", "throttle", "gpm"):
        return 0.01, "%"
    if kind == "bytes":
        return (2.0**30, "GiB") if max(values) >= 2**30 else (2.0**20, "MiB")
    return 1.0, kind
