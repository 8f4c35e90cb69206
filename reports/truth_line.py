"""The truth line in sentences: what every report begins with, and what each number in it rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from spikeprof.analyzers.base import Metric, Result
from spikeprof.reports import format as fmt
from spikeprof.reports.kernel_names import printable
from spikeprof.reports.model import Report, rows
from spikeprof.reports.ownership import truth as owned

#: A note is neither good nor bad news: something to know.
State = Literal["value", "problem", "not_measured", "note"]

#: What the state of a window means, as it reads after a number of windows.
_WINDOW_STATES = {
    "clean": "left untraced on purpose",
    "yielded": "yielded to the program's own profiler",
    "off": "switched off",
    "stopped": "after recording had stopped",
}


@dataclass(frozen=True, slots=True)
class TruthItem:
    """One part of the truth line: what it is about, what is known, and in which state that is."""

    label: str
    text: str
    state: State
    headline: str  # the shortest form, for a tile


def truth_line(report: Report) -> list[TruthItem]:
    """What every report begins with. Never empty: without the analyzer's answer it says why there is none."""
    truth = report.result("truth")
    if truth is None or truth.status in ("error", "not_measured"):
        why = truth.reason if truth else "the analyzer of truth was not asked"
        return [TruthItem("Truth", fmt.not_measured(why), "not_measured", "not measured")]
    metrics = {m.name: m for m in truth.metrics}
    why = no_gpu_work(report)
    items = [_gpu_item(why)] if why else _gpu_items(report, truth, metrics)
    items += _numerics_items(report)
    damaged = rows(truth.tables.get("damaged_tables", {}))
    if damaged:
        text = "; ".join(f"{printable(r['table'])}: {printable(r['reason'])}" for r in damaged)
        items.append(TruthItem("Damaged", text, "problem", fmt.plural(len(damaged), "table")))
    return items


def no_gpu_work(report: Report) -> str:
    """Why no GPU work at all could be recorded; empty where some could: each number then has its own reason."""
    note = report.manifest.collectors.get("activity")
    return printable(note.reason) if note is not None and note.state == "refused" and not note.records_count else ""


def _gpu_item(why: str) -> TruthItem:
    return TruthItem("GPU work", fmt.not_measured(why), "not_measured", "not measured")


def _gpu_items(report: Report, truth: Result, metrics: dict[str, Metric]) -> list[TruthItem]:
    return [
        _step_item(metrics),
        _origin_item(truth, metrics, owned(report.result("ownership"))),
        _records_item(truth, metrics),
        _recorded_item(truth, metrics),
        _libcupti_item(report, truth),
    ]


def _numerics_items(report: Report) -> list[TruthItem]:
    """How many scans of tensors there are, and how many were lost; nothing where none were asked for."""
    result = report.result("overflow")
    scans = result.metric("scans_count") if result is not None else None
    if result is None or not scans:
        return []
    looked, lost = f"{fmt.plural(scans, 'scan')} of tensors", result.metric("scans_dropped_count")
    if lost is None:
        return [TruthItem("Numerics", f"{looked}; whether any were lost is not known", "note", looked)]
    how_many = f"{fmt.count(lost) if lost else 'none'} lost"
    return [TruthItem("Numerics", f"{looked}; {how_many}", "problem" if lost else "value", how_many)]


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


def _origin_item(truth: Result, metrics: dict[str, Metric], module: str) -> TruthItem:
    known = _value(metrics, "known_origin_share")
    if known is None:
        return TruthItem("Origin", _why(metrics, "known_origin_share"), "not_measured", "not measured")
    text = f"{fmt.share(known)} of GPU time can be traced to the call that launched it"
    text += f"; {module}" if module else ""
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
        state: State = "not_measured" if kernels is None else "value"
        return TruthItem("Records", head + "none dropped, repaired or set aside", state, "none lost")
    body = ", ".join(f"{fmt.count(n or 0)} {fmt.label(name)}" for name, n in numbers.items())
    reasons = set_aside_reasons(truth)
    text = f"{head}{body}{f' ({reasons})' if reasons else ''}"
    lost = any(f.severity != "info" for f in truth.findings if f.rule in ("records-dropped", "records-set-aside"))
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
    return TruthItem("libcupti", f"{shown}, {known}: {'; '.join(what)}", "note", f"{shown}, {known}")


def _clause(sentence: str) -> str:
    """A sentence as a part of another."""
    return fmt.within(printable(sentence).rstrip("."))
