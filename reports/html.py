"""One self-contained HTML file: works offline from ``file://``, asks the network for nothing, escapes everything.

Autoescape is on for all text; the figures' data is embedded as JSON that no name can break out of; and should
anything slip through, the content security policy runs no script but the two of this page, named by hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from spikeprof.analyzers.base import Finding, Result
from spikeprof.profiler.errors import OutputError
from spikeprof.reports import caches
from spikeprof.reports import counter_figures as counters
from spikeprof.reports import figures as fig
from spikeprof.reports import format as fmt
from spikeprof.reports import sentences as say
from spikeprof.reports import topology as links
from spikeprof.reports.gauges import gauges_figure, throttling
from spikeprof.reports.html_tables import HtmlTable, html_table
from spikeprof.reports.kernel_names import printable
from spikeprof.reports.model import PlainTable, Report, rows
from spikeprof.reports.output import write_private
from spikeprof.reports.truth_line import truth_line

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_TEMPLATES = Path(__file__).parent / "templates"
_STATES = {"value": "fine", "problem": "a problem", "not_measured": "not measured", "note": "to know"}
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}

#: Figures that are drawn as bars inside the cells of the same table.
_DRAWN_IN_TABLES = ("kernel-totals", "device-busy")
_KERNEL_COLUMNS = ("kernel", "launches_count", "total_ns", "gpu_time_share", "mean_ns", "p50_ns", "p90_ns", "p99_ns",
                   "max_ns", "wall_share")  # fmt: skip
_DEVICE_COLUMNS = ("device", "model", "busy_share", "wall_ns", "busy_ns", "gaps_count", "energy_j", "kernels_count",
                   "memory_ops_count", "ranks", "sm_arch", "sm_count", "l2_bytes", "mem_bytes", "mem_peak_bytes_per_s",
                   "uuid")  # fmt: skip
_OWN_SECTIONS = ("truth", "kernel-latency", "cache-miss", "launch-gaps", "topology")


@dataclass(slots=True)
class _Chart:
    """One figure of the page."""

    id: str
    caption: str
    note: str
    height: int
    figure: dict[str, Any]


@dataclass(slots=True)
class _Section:
    """One section of the page: notices, charts, tables, in this order."""

    id: str
    nav: str
    title: str
    count: str = ""
    lead: str = ""
    notices: list[str] = field(default_factory=list)
    charts: list[_Chart] = field(default_factory=list)
    tables: list[HtmlTable] = field(default_factory=list)

    def add(self, *tables: HtmlTable | None) -> None:
        """Add the tables that there are."""
        self.tables += [t for t in tables if t is not None]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.notices or self.charts or self.tables)


def write_html(report: Report, path: Path) -> None:
    """Write the page, whole or not at all, for its owner only. Raises OutputError."""
    write_private(path, render_html(report).encode())


def render_html(report: Report) -> str:
    """The page as text. Raises OutputError when plotly's script cannot be found."""
    from markupsafe import Markup

    version = _version()
    unit = fig.time_unit(max(report.manifest.duration_ns, 1))
    timeline = _timeline(report, unit)
    body = [
        timeline,
        _kernel_section(report),
        _caches_section(report, unit),
        _idle_section(report),
        *_other_sections(report, unit),
    ]
    body += [_links_section(report), _machine_section(report), _missing_section(report)]
    body = [s for s in body if not s.empty]
    charts = [c for s in body for c in s.charts]
    plotly_js = _plotly_script() if charts else ""
    page_js = (_TEMPLATES / "report.js").read_text("utf-8")
    findings = report.findings()
    context = {
        "version": version,
        "csp": _policy([plotly_js, page_js] if charts else [page_js]),
        "page_title": f"{printable(report.trace_name)} · spikeprof",
        "heading": printable(report.trace_name),
        "subtitle": say.subtitle(report),
        "command": fmt.command_line(report.manifest.command) if report.manifest.command else "",
        "truth": truth_line(report),
        "states": _STATES,
        "verdict": say.verdict(report),
        "findings": [_card(f) for f in findings],
        "no_findings": say.nothing_found(report),
        "sections": [{"id": "findings", "nav": "Verdict"}, *body, {"id": "about", "nav": "About"}],
        "body": body,
        "charts": charts,
        "facts": say.facts(report),
        "notes": [printable(n) for n in report.manifest.notes],
        "about_tables": _about_tables(report),
        "footer": f"Made by spikeprof {version}. This page is one file and works offline.",
        "data": Markup(_embedded(_data(charts, report, unit))),
        "css": Markup((_TEMPLATES / "report.css").read_text("utf-8")),
        "plotly_js": Markup(plotly_js),
        "page_js": Markup(page_js),
    }
    return _environment().get_template("report.html.j2").render(context)


def _version() -> str:
    """The version that renders, which need not be the one that recorded."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("spikeprof")
    except PackageNotFoundError:
        return "(not installed)"


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    environment.filters["code"] = _with_code
    return environment


def _with_code(text: str) -> Markup:
    """A sentence, escaped, with what stands between backticks as code."""
    from markupsafe import Markup

    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick that is not closed is only a backtick
        return Markup.escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else p for i, p in enumerate(parts))


def _plotly_script() -> str:
    """plotly.js as the installed package ships it, read without importing the package."""
    spec = find_spec("plotly")
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / "package_data" / "plotly.min.js" if folders else Path("plotly.min.js")
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise OutputError(
            f"the charts need plotly's script, and {path} cannot be read ({error.strerror}): reinstall plotly"
        ) from error


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy: the given inline scripts, inline styles, no network at all."""
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "font-src data:; base-uri 'none'; form-action 'none'"
    )


def _embedded(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or begins markup."""
    return msgspec.json.encode(data).decode().translate(_ESCAPES)


def _data(charts: Sequence[_Chart], report: Report, unit: tuple[float, str]) -> dict[str, Any]:
    over_time = [c.figure for c in charts if c.figure["meta"].get("time")]
    shown = fig.time_range(over_time)
    for figure in over_time:
        if shown:
            figure["layout"]["xaxis"]["range"] = shown
    whole = [0, round(report.manifest.duration_ns / unit[0], 6)]
    return {"themes": fig.THEMES, "figures": {c.id: c.figure for c in charts}, "whole": whole}


def _card(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "title": say.rule_title(finding.rule),
        "rule": printable(finding.rule),
        "scope": fmt.scope(finding.scope, 90),
        "scope_full": printable(", ".join(f"{k} {v}" for k, v in finding.scope.items())),
        "evidence": [
            {
                "name": fmt.title(e.metric),
                "value": fmt.quantity(e.metric, e.value),
                "limit": fmt.limit(e),
                "source": f"option {e.limit_source}" if fmt.is_option(e.limit_source) else "",
                "basis": "" if e.basis == "measured" else e.basis,
            }
            for e in finding.evidence
        ],
        "action": printable(finding.recommendation),
        "saving": fmt.saving(finding.saving) if finding.saving else "",
    }


# ---------------------------------------------------------------- sections


def _chart(name: str, figure: dict[str, Any] | None) -> list[_Chart]:
    if figure is None:
        return []
    caption, note = say.caption(name)
    return [_Chart(name, caption, note, figure["layout"]["height"], figure)]


def _charts(result: Result | None, unit: tuple[float, str], over_time: bool) -> list[_Chart]:
    """The figures of a result that are drawn, those over time or the others."""
    found: list[_Chart] = []
    for spec in result.figures if result else ():
        table = result.tables.get(spec.table, {}) if result else {}
        draw = counters.draw if spec.kind in counters.KINDS else fig.plotly_figure
        figure = None if spec.id in _DRAWN_IN_TABLES else draw(spec, table, unit)
        if figure is not None and bool(figure["meta"].get("time")) == over_time:
            found += _chart(spec.id, figure)
    return found


def _timeline(report: Report, unit: tuple[float, str]) -> _Section:
    section = _Section("timeline", "Timeline", "Timeline")
    for result in report.results:
        section.charts += _charts(result, unit, over_time=True)
    samples = report.tables.get("samples")
    if samples:
        for chart in _chart("gauges", gauges_figure(samples, unit)):
            chart.note = f"{chart.note} {throttling(samples)}".strip()
            section.charts.append(chart)
    windows = rows(report.tables.get("windows", {}))
    if windows and len({w["rank"] for w in windows}) == 1 == len(report.tables.get("processes", {}).get("rank", [0])):
        for chart in section.charts:
            fig.shade(chart.figure, [(w["start_ns"], w["end_ns"]) for w in windows], unit)
        section.lead = "Grey stretches were not recorded. "
    if section.charts:
        section.lead += "Drag to zoom, double-click to zoom back: all charts here move together."
    return section


def _kernel_section(report: Report) -> _Section:
    section = _Section("kernels", "Kernels", "Kernels")
    result = report.result("kernel-latency")
    if result is None:
        return section
    if text := say.notice(result):
        section.notices.append(text)
    table = result.tables.get("kernels", {})
    number = result.metric("distinct_kernels_count")
    if number:
        shown = len(table.get("name", []))
        part = f"the {fmt.count(shown)} that took most time of " if shown < number else ""
        launches = fmt.plural(result.metric("kernels_count") or 0, "launch", "launches")
        section.count = f"{part}{fmt.plural(number, 'kernel')}, {launches}"
    several = any((n or 0) > 1 for n in table.get("devices_count", []))
    columns = (*_KERNEL_COLUMNS, "devices_count") if several else _KERNEL_COLUMNS
    section.add(html_table("kernels", _renamed(table, "kernel"), columns))
    section.add(html_table("nodes", _renamed(result.tables.get("nodes", {}), "kernel")))
    return section


def _renamed(table: PlainTable, name: str) -> PlainTable:
    """The table with its column ``name`` called after what it names."""
    return {name if column == "name" else column: values for column, values in table.items()}


def _caches_section(report: Report, unit: tuple[float, str]) -> _Section:
    section = _Section("caches", "Caches and DRAM", "Caches and DRAM")
    result = report.result("cache-miss")
    if result is None:
        return section
    if text := say.notice(result):
        section.notices.append(text)
    section.count = caches.summary(result)
    section.charts = _charts(result, unit, over_time=False)
    section.lead = " ".join(caches.notes(result))
    for name, table in caches.tables(result).items():
        section.add(html_table(name, table))
    return section


def _idle_section(report: Report) -> _Section:
    section = _Section("idle", "Idle", "GPU idle")
    result = report.result("launch-gaps")
    if result is None:
        return section
    if text := say.notice(result):
        section.notices.append(text)
    section.count = ", ".join(part for part in (say.idle_summary(result), say.gaps_summary(result)) if part)
    classes = say.idle_classes(result)
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
    return section


def _other_sections(report: Report, unit: tuple[float, str]) -> list[_Section]:
    """Analyzers without a section of their own here: their figures and all their tables."""
    sections: list[_Section] = []
    for result in report.results:
        if result.analyzer in _OWN_SECTIONS:
            continue
        title = say.analyzer_title(result.analyzer)
        section = _Section(f"analyzer-{len(sections)}", title, title)
        if text := say.notice(result):
            section.notices.append(text)
        section.charts = _charts(result, unit, over_time=False)
        drawn = {f.table for f in result.figures if f.kind != "table"}
        section.add(*(html_table(name, t) for name, t in result.tables.items() if name not in drawn))
        sections.append(section)
    return sections


def _links_section(report: Report) -> _Section:
    section = _Section("links", "Links", "Links of the GPUs")
    result = report.result("topology")
    if result is None:
        return section
    if text := say.notice(result):
        section.notices.append(text)
    section.lead = links.suits(result)
    section.add(html_table("link-matrix", links.matrix(result)), html_table("link-hosts", links.hosts(result)))
    section.notices += links.notes(result)
    for name, table in (("link-totals", "use"), ("kernel_links", "kernel_links")):
        used = dict(result.tables.get(table, {}))
        section.add(html_table(name, used | {"link": [fmt.title(link) for link in used.get("link", [])]}))
    return section


def _machine_section(report: Report) -> _Section:
    section = _Section("machine", "GPUs and processes", "GPUs and processes")
    devices = dict(report.tables.get("devices", {}))
    for analyzer, names in (("kernel-latency", ("wall_ns", "busy_ns", "busy_share")), ("launch-gaps", ("gaps_count",))):
        result = report.result(analyzer)
        by_device = {r["device"]: r for r in rows(result.tables.get("devices", {}))} if result else {}
        if by_device:
            for name in names:
                devices[name] = [by_device.get(d, {}).get(name) for d in devices.get("device", [])]
    section.add(
        html_table("devices", _renamed(devices, "model"), _DEVICE_COLUMNS),
        html_table("processes", report.tables.get("processes", {})),
    )
    return section


def _missing_section(report: Report) -> _Section:
    items = say.missing(report)
    section = _Section("missing", "Not measured", "Not measured", count=fmt.count(len(items)) if items else "nothing")
    table: PlainTable = {
        "what": [m.what for m in items],
        "why": [m.why for m in items],
        "what_would_measure_it": [m.how for m in items],
    }
    section.add(html_table("missing", table))
    return section


def _about_tables(report: Report) -> list[HtmlTable]:
    truth = report.result("truth")
    tables = dict(truth.tables) if truth else {}
    if aside := tables.get("set_aside"):
        tables["set_aside"] = {**aside, "reason": [fmt.label(r) for r in aside["reason"]]}
    names = ("collectors", "set_aside", "not_measured_windows", "libcupti_faults", "damaged_tables")
    made = [html_table(name, tables.get(name, {})) for name in names]
    made.append(html_table("inventory", report.tables.get("inventory", {})))
    return [t for t in made if t is not None]
