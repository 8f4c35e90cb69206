"""The contract of an analyzer: what it declares, what it returns. No text is made here.

An analyzer is a frozen dataclass whose fields are its options, with ``info`` as a class attribute and one
pure method ``analyze(trace) -> Result``. The runner hands it a trace restricted to the tables it declared.

Rule docstrings: the module docstring of an analyzer has one section per rule, headed by the rule's name
underlined with ``-``, with the fixed paragraphs *What it means*, *How it is found*, *What to do*;
``spikeprof explain RULE`` and the documentation are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from spikeprof.profiler.trace import Trace

Status = Literal["ok", "findings", "not_measured", "not_applicable", "error"]
Severity = Literal["info", "warning", "critical"]
Basis = Literal["measured", "modelled", "inferred"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing an analyzer can find. ``name`` is unique over all analyzers, in kebab-case."""

    name: str
    title: str  # one line, present tense, no numbers
    severity: Severity


@dataclass(frozen=True, slots=True)
class Info:
    """What an analyzer asks, and of which tables."""

    id: str  # kebab-case, the file's name with dashes
    question: str  # ends in a question mark
    needs: tuple[str, ...]  # without these: not_measured
    wants: tuple[str, ...] = ()  # used where present
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One number. The name ends in its unit (``profiler/units.py``); None = not measured, with the reason."""

    name: str
    value: float | int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One checkable number behind a finding, and the limit it was held against."""

    metric: str  # ends in its unit
    value: float
    limit: float | None = None
    limit_source: str = ""  # an option's name, a data sheet, a measurement
    basis: Basis = "measured"


@dataclass(frozen=True, slots=True)
class Saving:
    """An upper bound of what acting on a finding could save. Savings are never added up.

    ``local`` bounds the time of the scope itself, ``total`` the time of the whole run.
    """

    upper_bound_ns: int
    of: Literal["local", "total"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: where, how it was seen, one thing to do. Wording comes from the rule and ``reports/``."""

    rule: str
    severity: Severity
    scope: Mapping[str, str | int]  # e.g. {"kernel": "…", "device": 0}
    evidence: tuple[Evidence, ...]
    recommendation: str  # one action, imperative
    saving: Saving | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing described by the table it shows: ``reports/figures.py`` knows how to draw each kind."""

    id: str
    kind: Literal["heatmap", "bars", "stack", "line", "table", "matrix", "panels", "limits", "roofline", "icicle"]
    table: str  # a key of Result.tables
    x: str
    y: str  # panels: the first of all columns that are drawn
    value: str = ""  # colour of a heatmap or matrix; the limit of bars (limits)
    series: str = ""  # column that splits bars or lines; labels of a matrix; what a roofline's point is


@dataclass(frozen=True, slots=True)
class Result:
    """An analyzer's answer. ``tables`` hold columns of plain values, short enough to print and to put in JSON."""

    analyzer: str
    status: Status
    reason: str = ""  # not_measured / not_applicable / error: why; else what limits the answer
    collect_with: str = ""  # not_measured: the flag or command that would measure it
    metrics: tuple[Metric, ...] = ()
    findings: tuple[Finding, ...] = ()
    tables: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()

    def metric(self, name: str) -> float | int | None:
        """The value of a metric by name, None when absent or not measured."""
        return next((m.value for m in self.metrics if m.name == name), None)


class Analyzer(Protocol):
    """What the registry holds."""

    info: ClassVar[Info]

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. Pure: reads the trace, changes nothing, prints nothing."""
        ...
