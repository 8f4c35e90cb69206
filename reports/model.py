"""The Report: what every renderer is given, and what ``report.json`` holds."""

from __future__ import annotations

from dataclasses import dataclass

from spikeprof.analyzers.base import Result
from spikeprof.profiler.trace import Manifest

REPORT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Report:
    """Results of all analyzers on one trace, ``truth`` first, with the manifest they rest on."""

    manifest: Manifest
    results: tuple[Result, ...]
    trace_name: str  # the folder's or file's name, for headings
    version: int = REPORT_VERSION

    def result(self, analyzer: str) -> Result | None:
        """One analyzer's result by id."""
        return next((r for r in self.results if r.analyzer == analyzer), None)
