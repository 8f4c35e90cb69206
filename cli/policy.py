"""``--fail-on`` and ``--policy``: when a report or a coverage fails what the user asked for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spikeprof.profiler.trace import Trace
    from spikeprof.reports.coverage_policy import Bound
    from spikeprof.reports.model import Report

POLICY_HELP = "Exit with 1 unless fusion coverage keeps to this policy (JSON or YAML)."

SEVERITIES = ("info", "warning", "critical")


def violations(report: Report, severity: str) -> list[str]:
    """Why the report fails, one line each; empty when it passes.

    It fails on a finding of the severity or above, on an analyzer that broke, on a damaged table, and when no
    analyzer with rules could look at all: "could not look" is not "healthy". An analyzer that lacks its tables while
    another one could look does not fail it; the report says so.
    """
    from spikeprof.reports.model import rows

    failing = SEVERITIES[SEVERITIES.index(severity) :]
    found = Counter(f.rule for r in report.results for f in r.findings if f.severity in failing)
    lines = [f"{rule} ({count} found)" if count > 1 else rule for rule, count in found.items()]
    lines += [f"{r.analyzer} broke: {r.reason}" for r in report.results if r.status == "error"]
    lines += [row["reason"] for row in rows(report.tables.get("inventory", {})) if row["state"] == "damaged"]
    asked = [r for r in report.results if r.analyzer != "truth"]
    if not lines and asked and all(r.status == "not_measured" for r in asked):
        lines.append(f"nothing was measured that could pass ({asked[0].reason})")
    return lines


def unmet(trace: Trace, name: str, bounds: list[Bound]) -> list[str]:
    """Which bounds the fusion coverage of a recording does not keep to, one line each."""
    from spikeprof.reports.coverage import merged
    from spikeprof.reports.coverage_policy import check
    from spikeprof.reports.coverage_sources import of_trace
    from spikeprof.reports.coverage_text import failures

    return failures(check(bounds, merged([of_trace(trace, name)])))
