"""One self-contained HTML file: works offline from ``file://``, asks the network for nothing, escapes everything.

Autoescape is on for all text; the figures' data is embedded as JSON that no name can break out of; and should
anything slip through, the content security policy runs no script but the two of this page, named by hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from spikeprof.analyzers.base import Finding
from spikeprof.profiler.errors import OutputError
from spikeprof.reports import figure_parts as fig
from spikeprof.reports import finding_text
from spikeprof.reports import format as fmt
from spikeprof.reports import sentences as say
from spikeprof.reports.html_parts import Chart, Section
from spikeprof.reports.html_sections import about_tables, sections
from spikeprof.reports.kernel_names import printable
from spikeprof.reports.model import Report
from spikeprof.reports.output import write_private
from spikeprof.reports.truth_line import no_gpu_work, truth_line

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_TEMPLATES = Path(__file__).parent / "templates"
_STATES = {"value": "fine", "problem": "a problem", "not_measured": "not measured", "note": "to know"}
_NOTES_IN_SIGHT = 3
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def write_html(report: Report, path: Path) -> None:
    """Write the page, whole or not at all, for its owner only. Raises OutputError."""
    write_private(path, render_html(report).encode())


def render_html(report: Report) -> str:
    """The page as text. Raises OutputError when plotly's script cannot be found."""
    unit = fig.time_unit(max(report.manifest.duration_ns, 1))
    body = [section for section in sections(report, unit) if not section.empty]
    if no_gpu_work(report):  # most sections only say so: what was measured, such as numerics, comes before them
        body.sort(key=lambda section: not section.charts and not section.tables)
    shown, folded = _in_sight(report.findings())
    context = {
        "page_title": f"{printable(report.trace_name)} · spikeprof",
        "heading": printable(report.trace_name),
        "subtitle": say.subtitle(report),
        "command": fmt.command_line(report.manifest.command) if report.manifest.command else "",
        "truth": truth_line(report),
        "verdict": say.verdict(report),
        "findings": [_card(f) for f in shown],
        "folded": [_card(f) for f in folded],
        "folded_title": fmt.plural(len(folded), "note"),
        "no_findings": say.nothing_found(report),
        "facts": say.facts(report),
        "notes": [printable(n) for n in report.manifest.notes],
        "about_tables": about_tables(report),
    }
    whole = [0, round(report.manifest.duration_ns / unit[0], 6)]
    return render_page(context, body, whole)


def _in_sight(findings: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """What is shown at once, and the notes that open with a click: many of them would hide the charts."""
    notes = [f for f in findings if f.severity == "info"]
    if len(notes) <= _NOTES_IN_SIGHT or len(notes) == len(findings):
        return findings, []
    return [f for f in findings if f.severity != "info"], notes


def render_page(context: Mapping[str, Any], body: Sequence[Section], whole: Sequence[float], css: str = "") -> str:
    """Any report of ours as a page: ``context`` is its text, ``body`` its sections between verdict and about.

    ``whole`` is the stretch of time that its time axes show when zoomed out, in their unit; ``css`` is added to the
    style. Raises OutputError when plotly's script cannot be found.
    """
    from markupsafe import Markup

    version = _version()
    charts = [c for s in body for c in s.charts]
    plotly_js = _plotly_script() if charts else ""
    page_js = (_TEMPLATES / "report.js").read_text("utf-8")
    shared = {
        "version": version,
        "csp": _policy([plotly_js, page_js] if charts else [page_js]),
        "states": _STATES,
        "sections": [{"id": "findings", "nav": "Verdict"}, *body, {"id": "about", "nav": "About"}],
        "body": body,
        "charts": charts,
        "footer": f"Made by spikeprof {version}. This page is one file and works offline.",
        "data": Markup(_embedded(_data(charts, whole))),
        "css": Markup((_TEMPLATES / "report.css").read_text("utf-8") + css),
        "plotly_js": Markup(plotly_js),
        "page_js": Markup(page_js),
    }
    return _environment().get_template("report.html.j2").render({**context, **shared})


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


def _data(charts: Sequence[Chart], whole: Sequence[float]) -> dict[str, Any]:
    over_time = [c.figure for c in charts if c.figure["meta"].get("time")]
    shown = fig.time_range(over_time)
    for figure in over_time:
        if shown:
            figure["layout"]["xaxis"]["range"] = shown
    return {"themes": fig.THEMES, "figures": {c.id: c.figure for c in charts}, "whole": whole}


def _card(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "title": say.rule_title(finding.rule),
        "rule": printable(finding.rule),
        "scope": finding_text.scope(finding.scope, 90),
        "scope_full": printable(", ".join(f"{k} {v}" for k, v in finding.scope.items())),
        "evidence": [
            {
                "name": fmt.title(e.metric),
                "value": fmt.quantity(e.metric, e.value),
                "limit": finding_text.limit(e),
                "source": f"option {e.limit_source}" if finding_text.is_option(e.limit_source) else "",
                "basis": "" if e.basis == "measured" else e.basis,
            }
            for e in finding.evidence
        ],
        "action": printable(finding.recommendation),
        "saving": finding_text.saving(finding.saving) if finding.saving else "",
    }
