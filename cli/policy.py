"""``--fail-on`` and ``--policy``: when a report or a coverage fails what the user asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spikeprof.profiler.errors import UsageError

if TYPE_CHECKING:
    from spikeprof.profiler.trace import Trace
    from spikeprof.reports.coverage_policy import Bound
    from spikeprof.reports.model import Report

POLICY_HELP = "Exit with 1 unless fusion coverage keeps to this policy (JSON or YAML)."

SEVERITIES = ("info", "warning", "critical")

#: Of an analyzer that could not look: its tables are missing, or hold nothing that it could judge.
_NOT_LOOKED = ("not_measured", "not_applicable")


def failing(text: str) -> tuple[str, ...]:
    """What ``--fail-on`` names: a severity, or rules, comma separated. Raises UsageError for what is neither."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if names[0] in SEVERITIES[1:] and len(names) == 1:
        return names
    from spikeprof.analyzers.registry import rules

    unknown = [name for name in names if name not in rules()]
    if unknown:
        raise UsageError(
            f"--fail-on {text}: {unknown[0]!r} is no rule; write warning, critical, or rules, comma separated "
            "(`spikeprof explain` lists them)"
        )
    return names


def violations(report: Report, names: Sequence[str]) -> list[str]:
    """Why the report fails, one line each; empty when it passes. ``names`` is what ``failing`` gave.

    It fails on a finding of the severity or above, or of one of the rules, on an analyzer that broke, on a damaged
    table, and when no analyzer with rules could look at all: "could not look" is not "healthy". An analyzer that lacks
    its tables while another one could look does not fail it, unless a rule of it is named; the report says so.
    """
    from spikeprof.reports.model import rows

    severities = SEVERITIES[SEVERITIES.index(names[0]) :] if names[0] in SEVERITIES else ()
    found = Counter(f.rule for r in report.results for f in r.findings if f.severity in severities or f.rule in names)
    lines = [f"{rule} ({count} found)" if count > 1 else rule for rule, count in found.items()]
    lines += [f"{r.analyzer} broke: {r.reason}" for r in report.results if r.status == "error"]
    lines += [row["reason"] for row in rows(report.tables.get("inventory", {})) if row["state"] == "damaged"]
    if not severities:
        return lines + _not_looked_at(report, names)
    asked = [r for r in report.results if r.analyzer != "truth"]
    if not lines and asked and all(r.status in _NOT_LOOKED for r in asked):
        lines.append(f"nothing was measured that could pass ({asked[0].reason})")
    return lines


def _not_looked_at(report: Report, names: Sequence[str]) -> list[str]:
    """Rules that are asked for, of analyzers that lack what they need, or found nothing to judge."""
    from spikeprof.analyzers.registry import rules

    known = rules()
    results = {name: report.result(known[name][0].info.id) for name in names}
    return [
        f"{name}: not measured ({result.reason})" + (f": {result.collect_with}" if result.collect_with else "")
        for name, result in results.items()
        if result is not None and result.status in _NOT_LOOKED
    ]


def unmet(trace: Trace, name: str, bounds: list[Bound]) -> list[str]:
    """Which bounds the fusion coverage of a recording does not keep to, one line each."""
    from spikeprof.reports.coverage import merged
    from spikeprof.reports.coverage_policy import check
    from spikeprof.reports.coverage_sources import of_trace
    from spikeprof.reports.coverage_text import failures

    return failures(check(bounds, merged([of_trace(trace, name)])))
