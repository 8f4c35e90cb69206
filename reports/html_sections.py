"""The sections of the page: which charts, tables and notices stand in each, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from spikeprof.analyzers.base import Result
from spikeprof.reports import caches, fusion, idle, steps
from spikeprof.reports import counter_figures as counters
from spikeprof.reports import format as fmt
from spikeprof.reports import model_graph as graphs
from spikeprof.reports import numerics as num
from spikeprof.reports import occupancy as occ
from spikeprof.reports import ownership as own
from spikeprof.reports import sentences as say
from spikeprof.reports import topology as links
from spikeprof.reports.figure_parts import shade
from spikeprof.reports.figures import plotly_figure
from spikeprof.reports.gauges import gauges_figure, throttling
from spikeprof.reports.html_parts import Chart, Section
from spikeprof.reports.html_tables import HtmlTable, html_table
from spikeprof.reports.model import PlainTable, Report, rows

#: Figures that are drawn as bars inside the cells of the same table, or by their own section.
_DRAWN_IN_TABLES = ("kernel-totals", "device-busy", "step-durations", "ownership-icicle", "node-heat", "live-bytes",
                    "headroom")  # fmt: skip
_KERNEL_COLUMNS = ("kernel", "launches_count", "total_ns", "gpu_time_share", "mean_ns", "p50_ns", "p90_ns", "p99_ns",
                   "max_ns", "wall_share")  # fmt: skip
_DEVICE_COLUMNS = ("device", "model", "busy_share", "wall_ns", "busy_ns", "gaps_count", "energy_j", "kernels_count",
                   "memory_ops_count", "ranks", "sm_arch", "sm_count", "l2_bytes", "mem_bytes", "mem_peak_bytes_per_s",
                   "uuid")  # fmt: skip
_STATUSES = {"no_cuda": "no CUDA"}  # of a process, where another word than the table's reads better
_OWN_SECTIONS = (
    "truth",
    "steps",
    "kernel-latency",
    "ownership",
    "cache-miss",
    "fusion-boundary",
    "fusion-coverage",
    "launch-gaps",
    "late-compilation",
    "topology",
    "model-graph",
    "overflow",
)


def sections(report: Report, unit: tuple[float, str]) -> list[Section]:
    """All sections of the page in order, empty ones too; ``unit`` is that of time (``figure_parts.time_unit``)."""
    return [
        _timeline(report, unit),
        _steps_section(report, unit),
        _ownership_section(report),
        _kernel_section(report),
        _caches_section(report, unit),
        _told(report, "fusion-boundary", Section("occupancy", "Occupancy", "Occupancy and neighbours"), occ),
        _told(report, "fusion-coverage", Section("fusion", "Fusion", "Fusion"), fusion),
        _numerics_section(report),
        _idle_section(report),
        *_other_sections(report, unit),
        _graph_section(report),
        _links_section(report),
        _machine_section(report),
        _missing_section(report),
    ]


def _of_analyzer(report: Report, analyzer: str, section: Section) -> tuple[Section, Result | None]:
    """The section with the notice of an analyzer's result, and the result."""
    result = report.result(analyzer)
    if result is not None and (text := say.notice(result)):
        section.notices.append(text)
    return section, result


class _Words(Protocol):
    """A module that puts the result of one analyzer into words and tables."""

    def summary(self, result: Result, /) -> str:
        """Beside the title."""

    def notes(self, result: Result, /) -> list[str]:
        """Below it."""

    def tables(self, result: Result, /) -> Mapping[str, PlainTable]:
        """By name of their captions."""


def _told(report: Report, analyzer: str, section: Section, words: _Words) -> Section:
    """The section of an analyzer whose words and tables stand in a module of their own; empty without its result."""
    section, result = _of_analyzer(report, analyzer, section)
    if result is not None:
        section.count = words.summary(result)
        section.lead = " ".join(words.notes(result))
        section.add(*(html_table(name, table) for name, table in words.tables(result).items()))
    return section


def _chart(name: str, figure: dict[str, Any] | None) -> list[Chart]:
    if figure is None:
        return []
    caption, note = say.caption(name)
    return [Chart(name, caption, note, figure["layout"]["height"], figure)]


def _charts(result: Result | None, unit: tuple[float, str], over_time: bool) -> list[Chart]:
    """The figures of a result that are drawn, those over time or the others."""
    found: list[Chart] = []
    for spec in result.figures if result else ():
        table = result.tables.get(spec.table, {}) if result else {}
        draw = counters.draw if spec.kind in counters.KINDS else plotly_figure
        figure = None if spec.id in _DRAWN_IN_TABLES else draw(spec, table, unit)
        if figure is not None and bool(figure["meta"].get("time")) == over_time:
            found += _chart(spec.id, figure)
    return found


def _timeline(report: Report, unit: tuple[float, str]) -> Section:
    section = Section("timeline", "Timeline", "Timeline")
    for result in report.results:
        section.charts += _charts(result, unit, over_time=True)
    samples = report.tables.get("samples")
    if samples:
        for chart in _chart("gauges", gauges_figure(samples, unit)):
            chart.note = f"{chart.note} {throttling(samples)}".strip()
            section.charts.append(chart)
    section.lead = _shaded(report, section.charts, unit)
    if section.charts:
        section.lead += "Drag to zoom, double-click to zoom back: all charts here move together."
    return section


def _shaded(report: Report, charts: list[Chart], unit: tuple[float, str]) -> str:
    """Grey behind the charts where nothing was recorded, and what to say of it; nothing where processes differ."""
    windows = rows(report.tables.get("windows", {}))
    if not windows or not len({w["rank"] for w in windows}) == 1 == len(
        report.tables.get("processes", {}).get("rank", [0])
    ):
        return ""
    for chart in charts:
        shade(chart.figure, [(w["start_ns"], w["end_ns"]) for w in windows], unit)
    return "Grey stretches were not recorded. "


def _steps_section(report: Report, unit: tuple[float, str]) -> Section:
    section = _told(report, "steps", Section("steps", "Steps", "Steps"), steps)
    if result := report.result("steps"):
        section.charts = _chart("step-durations", steps.figure(result, unit))
        _shaded(report, section.charts, unit)
    return section


def _ownership_section(report: Report) -> Section:
    section = _told(report, "ownership", Section("modules", "Modules", "Time by module, operator and line"), own)
    if result := report.result("ownership"):
        section.charts = _chart("ownership-icicle", own.figure(result))
    return section


def _caches_section(report: Report, unit: tuple[float, str]) -> Section:
    section = _told(report, "cache-miss", Section("caches", "Caches and DRAM", "Caches and DRAM"), caches)
    section.charts = _charts(report.result("cache-miss"), unit, over_time=False)
    return section


def _numerics_section(report: Report) -> Section:
    section = _told(report, "overflow", Section("numerics", "Numerics", "Numerics"), num)
    if result := report.result("overflow"):
        section.charts = _chart("headroom", num.heat_figure(result))
    return section


def _graph_section(report: Report) -> Section:
    section = _told(report, "model-graph", Section("model-graph", "Model graph", "Model graph"), graphs)
    if result := report.result("model-graph"):
        section.charts = _chart("node-heat", graphs.heat_figure(result))
        section.charts += _chart("live-bytes", graphs.live_figure(result))
    return section


def _kernel_section(report: Report) -> Section:
    section, result = _of_analyzer(report, "kernel-latency", Section("kernels", "Kernels", "Kernels"))
    if result is None:
        return section
    table = result.tables.get("kernels", {})
    number = result.metric("distinct_kernels_count")
    if number:
        shown = len(table.get("name", []))
        part = f"the {fmt.count(shown)} that took most time of " if shown < number else ""
        launches = fmt.plural(result.metric("kernels_count") or 0, "launch", "launches")
        section.count = f"{part}{fmt.plural(number, 'kernel')}, {launches}"
    several = any((n or 0) > 1 for n in table.get("devices_count", []))
    owners = own.owners(report.result("ownership"))
    if owners and any(module or op for module, op, _ in owners.values()):
        of = [owners.get(name, ("", "", 0.0)) for name in table.get("name", [])]
        table = {**table, "module": [module for module, _, _ in of], "op": [op for _, op, _ in of]}
    columns = (*_KERNEL_COLUMNS, *(("devices_count",) if several else ()), "module", "op")
    section.add(html_table("kernels", _renamed(table, "kernel"), columns))
    section.add(html_table("nodes", _renamed(result.tables.get("nodes", {}), "kernel")))
    return section


def _renamed(table: PlainTable, name: str) -> PlainTable:
    """The table with its column ``name`` called after what it names."""
    return {name if column == "name" else column: values for column, values in table.items()}


def _idle_section(report: Report) -> Section:
    section, result = _of_analyzer(report, "launch-gaps", Section("idle", "Idle", "GPU idle"))
    if result is None:
        return section
    section.count = ", ".join(part for part in (idle.summary(result), idle.gaps(result)) if part)
    classes = idle.classes(result)
    table: PlainTable = {
        "class": [c.name for c in classes],
        "total_ns": [c.total_ns for c in classes],
        "part_of_idle_share": [c.share for c in classes],
        "meaning": [c.meaning for c in classes],
    }
    section.add(html_table("idle-classes", table))
    devices = result.tables.get("devices", {})
    if len(devices.get("device", [])) > 1:
        section.add(html_table("idle-devices", devices))
    section.add(html_table("longest", result.tables.get("longest", {})))
    compiled = report.result("late-compilation")
    section.add(html_table("compile-stalls", compiled.tables.get("compile-stalls", {}) if compiled else {}))
    return section


def _other_sections(report: Report, unit: tuple[float, str]) -> list[Section]:
    """Analyzers without a section of their own here: their figures and all their tables."""
    sections: list[Section] = []
    for result in report.results:
        if result.analyzer in _OWN_SECTIONS:
            continue
        title = say.analyzer_title(result.analyzer)
        section = Section(f"analyzer-{len(sections)}", title, title)
        if text := say.notice(result):
            section.notices.append(text)
        section.charts = _charts(result, unit, over_time=False)
        drawn = {f.table for f in result.figures if f.kind != "table"}
        section.add(*(html_table(name, t) for name, t in result.tables.items() if name not in drawn))
        sections.append(section)
    return sections


def _links_section(report: Report) -> Section:
    section, result = _of_analyzer(report, "topology", Section("links", "Links", "Links of the GPUs"))
    if result is None:
        return section
    section.lead = links.suits(result)
    section.add(html_table("link-matrix", links.matrix(result)), html_table("link-hosts", links.hosts(result)))
    section.notices += links.notes(result)
    for name, table in (("link-totals", "use"), ("kernel_links", "kernel_links")):
        used = dict(result.tables.get(table, {}))
        section.add(html_table(name, used | {"link": [fmt.title(link) for link in used.get("link", [])]}))
    return section


def _machine_section(report: Report) -> Section:
    section = Section("machine", "GPUs and processes", "GPUs and processes")
    devices = dict(report.tables.get("devices", {}))
    for analyzer, names in (("kernel-latency", ("wall_ns", "busy_ns", "busy_share")), ("launch-gaps", ("gaps_count",))):
        result = report.result(analyzer)
        by_device = {r["device"]: r for r in rows(result.tables.get("devices", {}))} if result else {}
        if by_device:
            for name in names:
                devices[name] = [by_device.get(d, {}).get(name) for d in devices.get("device", [])]
    processes = dict(report.tables.get("processes", {}))
    if "status" in processes:
        processes["status"] = [_STATUSES.get(status) or fmt.label(status or "") for status in processes["status"]]
    section.add(
        html_table("devices", _renamed(devices, "model"), _DEVICE_COLUMNS),
        html_table("processes", processes),
    )
    return section


def _missing_section(report: Report) -> Section:
    items = say.missing(report)
    section = Section("missing", "Not measured", "Not measured", count=fmt.count(len(items)) if items else "nothing")
    table: PlainTable = {
        "what": [m.what for m in items],
        "why": [m.why for m in items],
        "what_would_measure_it": [m.how for m in items],
    }
    section.add(html_table("missing", table))
    return section


def about_tables(report: Report) -> list[HtmlTable]:
    """What the recording was made with and what became of its records."""
    truth = report.result("truth")
    tables = dict(truth.tables) if truth else {}
    if aside := tables.get("set_aside"):
        tables["set_aside"] = {**aside, "reason": [fmt.label(r) for r in aside["reason"]]}
    names = ("collectors", "set_aside", "not_measured_windows", "libcupti_faults", "damaged_tables")
    made = [html_table(name, tables.get(name, {})) for name in names]
    made.append(html_table("inventory", report.tables.get("inventory", {})))
    return [t for t in made if t is not None]
