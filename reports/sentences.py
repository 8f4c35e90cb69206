"""Sentences about a report that every renderer says alike: the truth line, findings, what was not measured.

With ``format.py`` the only place where text for people is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from spikeprof.analyzers.base import Metric, Result
from spikeprof.profiler.units import unit_of
from spikeprof.reports import format as fmt
from spikeprof.reports.kernel_names import printable
from spikeprof.reports.model import Report, rows
from spikeprof.reports.titles import IDLE_CLASSES

State = Literal["value", "problem", "not_measured"]

#: What the state of a window means, as it reads after a number of windows.
_WINDOW_STATES = {
    "clean": "left untraced on purpose",
    "yielded": "yielded to the program's own profiler",
    "off": "switched off",
    "stopped": "after recording had stopped",
}

#: Titles of analyzers as headings.
_ANALYZER_TITLES = {"truth": "Truth", "kernel-latency": "Kernel latency", "launch-gaps": "Launch gaps"}

_SOURCES = {"torch.profiler": "imported from torch.profiler", "nsys": "imported from Nsight Systems"}


@dataclass(frozen=True, slots=True)
class TruthItem:
    """One part of the truth line: what it is about, what is known, and in which of the three states that is."""

    label: str
    text: str
    state: State
    headline: str  # the shortest form, for a tile


@dataclass(frozen=True, slots=True)
class Missing:
    """One thing that was not measured, why, and what would measure it (empty = not known)."""

    what: str
    why: str
    how: str


def analyzer_title(analyzer: str) -> str:
    """``launch-gaps`` -> ``Launch gaps``."""
    return _ANALYZER_TITLES.get(analyzer) or fmt.title(printable(analyzer))


def rule_title(rule: str) -> str:
    """A rule's title from the registry; its name in words for a rule that this version does not know."""
    from spikeprof.analyzers.registry import rules

    known = rules().get(rule)
    return known[1].title if known else fmt.title(printable(rule))


def subtitle(report: Report) -> list[str]:
    """What was recorded, in short parts: source, GPUs, processes, length, date."""
    manifest = report.manifest
    parts = [] if manifest.source == "spikeprof" else [_SOURCES.get(manifest.source, printable(manifest.source))]
    devices = report.tables.get("devices", {})
    names = [printable(str(n)) for n in devices.get("name", []) if n]
    if names:
        kinds = dict.fromkeys(names)
        parts.append(fmt.joined([f"{names.count(n)} × {n}" if names.count(n) > 1 else n for n in kinds]))
    elif devices.get("device"):
        parts.append(fmt.plural(len(devices["device"]), "GPU"))
    ranks = report.tables.get("processes", {}).get("rank", [])
    if ranks:
        parts.append(fmt.plural(len(ranks), "process", "processes"))
    parts.append(f"{fmt.duration(manifest.duration_ns)} long")
    if manifest.t0_unix_ns > 0 and (when := fmt.date(manifest.t0_unix_ns)):
        parts.append(when)
    if manifest.exit_code:
        parts.append(f"exit code {manifest.exit_code}")
    return parts


# ---------------------------------------------------------------- the truth line


def truth_line(report: Report) -> list[TruthItem]:
    """What every report begins with. Never empty: without the analyzer's answer it says why there is none."""
    truth = report.result("truth")
    if truth is None or truth.status in ("error", "not_measured"):
        why = truth.reason if truth else "the analyzer of truth was not asked"
        return [TruthItem("Truth", fmt.not_measured(why), "not_measured", "not measured")]
    metrics = {m.name: m for m in truth.metrics}
    items = [
        _step_item(metrics),
        _origin_item(truth, metrics),
        _records_item(truth, metrics),
        _recorded_item(truth, metrics),
        _libcupti_item(report, truth),
    ]
    damaged = rows(truth.tables.get("damaged_tables", {}))
    if damaged:
        text = "; ".join(f"{printable(r['table'])}: {printable(r['reason'])}" for r in damaged)
        items.append(TruthItem("Damaged", text, "problem", fmt.plural(len(damaged), "table")))
    return items


def _value(metrics: dict[str, Metric], name: str) -> float | None:
    metric = metrics.get(name)
    return metric.value if metric is not None and fmt.is_number(metric.value) else None


def _why(metrics: dict[str, Metric], name: str) -> str:
    metric = metrics.get(name)
    return fmt.not_measured(metric.reason if metric else "")


def _found(truth: Result, *rules: str) -> bool:
    return any(f.rule in rules for f in truth.findings)


def _step_item(metrics: dict[str, Metric]) -> TruthItem:
    untraced, traced = _value(metrics, "step_untraced_ns"), _value(metrics, "step_traced_ns")
    cost = _value(metrics, "tracing_cost_share")
    if untraced is not None and traced is not None and cost is not None:
        text = f"{fmt.duration(untraced)} without tracing → {fmt.duration(traced)} with tracing ({fmt.change(cost)})"
        state: State = "problem" if cost > 0.05 else "value"
        return TruthItem("Step time", text, state, f"{fmt.duration(untraced)} → {fmt.duration(traced)}")
    if traced is not None:
        text = f"{fmt.duration(traced)} with tracing; without: {_why(metrics, 'step_untraced_ns')}"
        return TruthItem("Step time", text, "not_measured", f"? → {fmt.duration(traced)}")
    if untraced is not None:
        text = f"{fmt.duration(untraced)} without tracing; with tracing: {_why(metrics, 'step_traced_ns')}"
        return TruthItem("Step time", text, "not_measured", f"{fmt.duration(untraced)} → ?")
    return TruthItem("Step time", _why(metrics, "step_untraced_ns"), "not_measured", "not measured")


def _origin_item(truth: Result, metrics: dict[str, Metric]) -> TruthItem:
    known = _value(metrics, "known_origin_share")
    if known is None:
        return TruthItem("Origin", _why(metrics, "known_origin_share"), "not_measured", "not measured")
    text = f"{fmt.share(known)} of GPU time can be traced to the call that launched it"
    return TruthItem("Origin", text, "problem" if _found(truth, "origin-unknown") else "value", fmt.share(known))


def _records_item(truth: Result, metrics: dict[str, Metric]) -> TruthItem:
    numbers = {name: _value(metrics, f"{name}_count") for name in ("dropped", "repaired", "set_aside")}
    kernels = _value(metrics, "kernels_count")
    head = (
        f"{fmt.plural(kernels, 'kernel')}; " if kernels is not None else f"kernels {_why(metrics, 'kernels_count')}; "
    )
    if any(n is None for n in numbers.values()):
        return TruthItem("Records", head + fmt.not_measured(), "not_measured", "not measured")
    if not any(numbers.values()):
        return TruthItem("Records", head + "none dropped, repaired or set aside", "value", "none lost")
    body = ", ".join(f"{fmt.count(n or 0)} {fmt.label(name)}" for name, n in numbers.items())
    reasons = set_aside_reasons(truth)
    text = f"{head}{body}{f' ({reasons})' if reasons else ''}"
    lost = (numbers["dropped"] or 0) + (numbers["set_aside"] or 0)
    worst = next(name for name in ("dropped", "set_aside", "repaired") if numbers[name])
    short = f"{fmt.count(numbers[worst] or 0)} {fmt.label(worst)}"
    return TruthItem("Records", text, "problem" if lost else "value", short)


def set_aside_reasons(truth: Result) -> str:
    """``end before start 3, outside of the run 1``: why records were set aside, over all collectors."""
    sums: dict[str, int] = {}
    for row in rows(truth.tables.get("set_aside", {})):
        sums[row["reason"]] = sums.get(row["reason"], 0) + row["records_count"]
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return ", ".join(f"{fmt.label(reason)} {fmt.count(number)}" for reason, number in ordered if number)


def _recorded_item(truth: Result, metrics: dict[str, Metric]) -> TruthItem:
    share = _value(metrics, "recorded_share")
    if share is None:
        return TruthItem("Recorded", _why(metrics, "recorded_share"), "not_measured", "not measured")
    windows = rows(truth.tables.get("not_measured_windows", {}))
    text = f"{fmt.share(share)} of the time in which the GPU was in use"
    if windows:
        text += "; not recorded: " + "; ".join(window_sentence(w) for w in windows[:4])
        text += f"; and {fmt.plural(len(windows) - 4, 'other reason')}" if len(windows) > 4 else ""
    wanted = all(w["state"] == "clean" for w in windows)
    return TruthItem("Recorded", text, "value" if wanted else "problem", fmt.share(share))


def window_sentence(window: dict[str, Any]) -> str:
    """``110 ms in 20 windows left untraced on purpose (--clean-steps)``."""
    state = _WINDOW_STATES.get(window["state"], fmt.label(window["state"]))
    reason = f" ({printable(window['reason'])})" if window["reason"] else ""
    number = window["windows_count"]
    return f"{fmt.duration(window['total_ns'])} in {fmt.plural(number, 'window')} {state}{reason}"


def _libcupti_item(report: Report, truth: Result) -> TruthItem:
    versions = [v for v in report.tables.get("processes", {}).get("libcupti_version", []) if v]
    versions = versions or [v for v in [report.manifest.versions.get("libcupti", "")] if v]
    faults = rows(truth.tables.get("libcupti_faults", {}))
    if not versions:
        why = "the recording does not name the version"
        return TruthItem("libcupti", f"version unknown: {why}", "not_measured", "version unknown")
    shown = fmt.joined([fmt.cupti_version(str(v)) for v in dict.fromkeys(versions)])
    if not faults:
        return TruthItem("libcupti", f"{shown}, no fault known that would touch these numbers", "value", shown)
    what = [_clause(w) for w in dict.fromkeys(f["what"] for f in faults)]
    known = fmt.plural(len(what), "known fault")
    if len(what) > 3:
        what[2:] = [f"and {len(what) - 2} more in the full report"]
    return TruthItem("libcupti", f"{shown}, {known}: {'; '.join(what)}", "value", f"{shown}, {known}")


def _clause(sentence: str) -> str:
    """A sentence as a part of another."""
    text = printable(sentence).rstrip(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


# ---------------------------------------------------------------- idle time


@dataclass(frozen=True, slots=True)
class Idle:
    """One class of idle time, over all devices."""

    name: str
    meaning: str
    total_ns: float
    share: float  # of all idle time, 0 to 1


def idle_classes(result: Result) -> list[Idle]:
    """The measured classes of idle time that are not nothing, the largest first."""
    whole = result.metric("idle_ns")
    found = []
    for key, (name, meaning) in IDLE_CLASSES.items():
        value = result.metric(f"idle_{key}_ns")
        if whole and value:
            found.append(Idle(name, meaning, value, value / whole))
    return sorted(found, key=lambda idle: -idle.total_ns)


def idle_summary(result: Result) -> str:
    """``74.6 % of 283 ms active time``; empty when idle time is not known."""
    share, wall = result.metric("idle_share"), result.metric("wall_ns")
    if share is None or wall is None:
        return ""
    return f"{fmt.share(share)} of {fmt.duration(wall)} active time"


def gaps_summary(result: Result) -> str:
    """``13,475 gaps, the median one 4.67 µs``; empty when there are none."""
    gaps, median = result.metric("gaps_count"), result.metric("median_gap_ns")
    if not gaps:
        return ""
    return fmt.plural(gaps, "gap") + (f", the median one {fmt.duration(median)}" if median is not None else "")


# ---------------------------------------------------------------- what was not measured


def missing(report: Report) -> list[Missing]:
    """Everything that was not measured: whole questions, single numbers, collectors that did not run."""
    found: dict[tuple[str, str], Missing] = {}
    for item in _missing(report):
        found.setdefault((item.what, item.why), item)
    return list(found.values())


def _missing(report: Report) -> Iterator[Missing]:
    for result in report.results:
        what = analyzer_title(result.analyzer)
        if result.status == "not_measured":
            yield Missing(what, printable(result.reason), printable(result.collect_with))
        elif result.status == "error":
            why = f"failed with an internal error: {printable(result.reason)}"
            yield Missing(what, why, "please report this as a bug")
        else:
            yield from _missing_metrics(result)
    for name, note in report.manifest.collectors.items():
        if note.state in ("refused", "degraded"):
            what = f"Collector {fmt.label(name)} ({printable(note.state)})"
            yield Missing(what, printable(note.reason) or "no reason was recorded", "spikeprof doctor")


def _missing_metrics(result: Result) -> Iterator[Missing]:
    """Metrics without a value, those with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for metric in result.metrics:
        if metric.value is None or (unit_of(metric.name) and not fmt.is_number(metric.value)):
            by_reason.setdefault(metric.reason, []).append(fmt.title(metric.name).lower())
    for reason, names in by_reason.items():
        text = fmt.joined(list(dict.fromkeys(names)))
        how = printable(result.collect_with)
        yield Missing(text[:1].upper() + text[1:], printable(reason) or "no reason was recorded", how)


# ---------------------------------------------------------------- figures and sections


_CAPTIONS = {
    "kernel-time": ("Kernels over time", "Colour: how much of each time slice the kernel ran."),
    "idle-over-time": ("GPU idle over time", "Share of each time slice, by what the GPU waited for."),
    "gauges": ("Power, clocks and utilisation", "As the driver reports them, averaged over short stretches."),
    "kernels": ("Kernels by time", ""),
    "nodes": ("Nodes of CUDA graphs by time", ""),
    "idle-classes": ("Idle time by cause", ""),
    "longest": ("Longest gaps", ""),
    "devices": ("GPUs", ""),
    "processes": ("Processes", ""),
    "missing": ("What, why, and what would measure it", ""),
    "versions": ("Versions", ""),
    "options": ("Recording options", ""),
    "collectors": ("Collectors", ""),
    "set_aside": ("Records set aside", ""),
    "not_measured_windows": ("Windows that were not recorded", ""),
    "libcupti_faults": ("Known faults of this libcupti", ""),
    "damaged_tables": ("Damaged tables", ""),
    "inventory": ("Tables of the trace", ""),
}


def caption(name: str) -> tuple[str, str]:
    """Heading and note of a figure or table."""
    return _CAPTIONS.get(name, (fmt.title(printable(name)), ""))


def notice(result: Result) -> str:
    """Why an analyzer has no, or not the whole, answer; empty when it has."""
    if result.status in ("ok", "findings"):
        return ""
    what = {"not_measured": "Not measured", "not_applicable": "Does not apply", "error": "Failed"}[result.status]
    how = f" To measure it: {printable(result.collect_with)}" if result.collect_with else ""
    return f"{what}: {printable(result.reason) or 'no reason was given'}.{how}"


def nothing_found(report: Report) -> str:
    """What stands in place of findings: what was looked at, or that nothing could be."""
    asked = [analyzer_title(r.analyzer).lower() for r in report.results if r.status == "ok"]
    return f"Looked at: {fmt.joined(asked)}." if asked else "Nothing could be looked at: see what was not measured."


_COMPONENTS = {"driver": "Driver", "cuda": "CUDA", "python": "Python", "torch": "PyTorch"}


def facts(report: Report) -> list[tuple[str, str]]:
    """The manifest in short, as pairs of name and value; unknown values are left out."""
    manifest = report.manifest
    pairs = [
        ("Trace", printable(report.trace_name)),
        ("Source", _SOURCES.get(manifest.source, printable(manifest.source))),
        ("Host", printable(manifest.host)),
        ("Started", fmt.date(manifest.t0_unix_ns)),
        ("Length", fmt.duration(manifest.duration_ns)),
        ("Exit code", "" if manifest.exit_code is None else str(manifest.exit_code)),
        *((_COMPONENTS.get(n, printable(n)), fmt.quantity(n, v)) for n, v in manifest.versions.items()),
        *((f"Option {fmt.label(name)}", printable(value)) for name, value in manifest.options.items()),
    ]
    return [(name, value) for name, value in pairs if value]
