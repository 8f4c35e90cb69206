"""The Report: what every renderer is given, and what ``report.json`` holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spikeprof.analyzers.base import Finding, Result
from spikeprof.profiler.trace import Manifest

REPORT_VERSION = 1

#: Columns of plain values, short enough to print and to put in JSON.
PlainTable = Mapping[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Report:
    """Results of all analyzers on one trace, ``truth`` first, with the manifest they rest on.

    ``tables`` are the few things that readers want to see as they were recorded, cut down to what a page
    can show (``reports/build.py``): ``processes``, ``devices``, ``windows``, ``samples``, ``inventory``.
    """

    manifest: Manifest
    results: tuple[Result, ...]
    trace_name: str  # the folder's or file's name, for headings
    version: int = REPORT_VERSION
    tables: Mapping[str, PlainTable] = field(default_factory=dict)

    def result(self, analyzer: str) -> Result | None:
        """One analyzer's result by id."""
        return next((r for r in self.results if r.analyzer == analyzer), None)

    def findings(self) -> list[Finding]:
        """All findings: the gravest first, within one severity the one that may save most first."""
        order = ("critical", "warning", "info")
        found = [f for r in self.results for f in r.findings]
        return sorted(found, key=lambda f: (order.index(f.severity), -(f.saving.upper_bound_ns if f.saving else -1)))


def rows(table: PlainTable) -> list[dict[str, Any]]:
    """A plain table row by row; columns of unequal length are cut to the shortest."""
    names = list(table)
    return [dict(zip(names, values, strict=True)) for values in zip(*table.values(), strict=False)]
