"""The terminal summary: truth line, verdict, where the time went, what was not measured. About a screen or two.

The order of its sections. Each stands beside the words and tables about the same question; all are made of the
lines and tables of ``screen.py``.
"""

from __future__ import annotations

from rich.console import Console

from spikeprof.reports import (
    caches,
    fusion,
    idle,
    kernel_latency,
    model_graph_text,
    numerics,
    occupancy,
    ownership,
    steps,
    topology,
)
from spikeprof.reports import format as fmt
from spikeprof.reports import sentences as say
from spikeprof.reports.kernel_names import clip, printable
from spikeprof.reports.model import Report
from spikeprof.reports.screen import Screen, print_finding
from spikeprof.reports.truth_line import truth_line

_MAX_FINDINGS = 6
_MAX_MISSING = 8

_MARKS = {"value": ("✓", "green"), "problem": ("!", "yellow"), "not_measured": ("?", "cyan"), "note": ("·", "dim")}


def render_terminal(report: Report, console: Console) -> None:
    """Print the summary of a report. Never raises for what the report holds or lacks."""
    screen = Screen.of(console)
    _header(screen, report)
    _truth(screen, report)
    _verdict(screen, report)
    steps.print_section(screen, report)
    ownership.print_section(screen, report)
    kernel_latency.print_section(screen, report)
    caches.print_section(screen, report)
    occupancy.print_section(screen, report)
    fusion.print_section(screen, report)
    numerics.print_section(screen, report)
    idle.print_section(screen, report)
    model_graph_text.print_section(screen, report)
    topology.print_section(screen, report)
    _missing(screen, report)


def _header(screen: Screen, report: Report) -> None:
    screen.line(screen.text(clip(f"spikeprof {printable(report.trace_name)}", screen.width), "bold"))
    screen.prose(" · ".join(say.subtitle(report)), "dim")
    if report.manifest.command:
        screen.line(screen.text(clip(f"$ {fmt.command_line(report.manifest.command)}", screen.width), "dim"))


def _truth(screen: Screen, report: Report) -> None:
    screen.heading("How far to trust this")
    items = truth_line(report)
    indent = max(len(item.label) for item in items) + 4
    for item in items:
        mark, style = _MARKS[item.state]
        screen.hanging(
            screen.text(mark, style).append_text(screen.text(f" {item.label}")), screen.text(item.text), indent
        )


def _verdict(screen: Screen, report: Report) -> None:
    findings = report.findings()
    screen.heading(f"Verdict: {say.verdict(report)}")
    if not findings:
        screen.prose(say.nothing_found(report))
    for finding in findings[:_MAX_FINDINGS]:
        print_finding(screen, finding)
    if len(findings) > _MAX_FINDINGS:
        screen.prose(f"… and {fmt.plural(len(findings) - _MAX_FINDINGS, 'more finding')} in the full report", "dim")


def _missing(screen: Screen, report: Report) -> None:
    items = [item for item in say.missing(report) if not item.in_truth_line]
    if not items:
        return
    screen.heading("Not measured")
    for item in items[:_MAX_MISSING]:
        text = screen.text(item.what, "bold").append_text(screen.text(f": {item.why}"))
        if item.how:
            text.append_text(screen.text(f" → {item.how}", "green"))
        screen.hanging(screen.text("?", "cyan"), text, 2)
    if len(items) > _MAX_MISSING:
        screen.prose(f"… and {len(items) - _MAX_MISSING} more in the full report", "dim")
