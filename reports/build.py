"""From a trace to a Report: ask the analyzers, and keep the little of the tables that pages show as recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.base import Analyzer
from spikeprof.analyzers.runner import run_analyzers
from spikeprof.profiler.errors import SpikeprofError
from spikeprof.profiler.schema import GPU_WORK_TABLES, TABLES
from spikeprof.profiler.trace import Trace
from spikeprof.profiler.units import is_running_total
from spikeprof.reports.model import PlainTable, Report

MAX_SAMPLE_POINTS = 300  # per device and metric
MAX_WINDOWS = 200
MAX_PROCESSES = 200

_Ints = npt.NDArray[np.int64]


def build_report(trace: Trace, trace_name: str, analyzers: Iterable[Analyzer] | None = None) -> Report:
    """Ask every analyzer of the registry (or the given ones) and gather the answers into a Report.

    Never raises for a fault inside an analyzer or a damaged table: both become part of the report.
    """
    if analyzers is None:
        from spikeprof.analyzers.registry import ANALYZERS

        analyzers = ANALYZERS
    trace = trace.sound()
    results = tuple(run_analyzers(trace, analyzers))
    makers = (
        ("processes", _processes),
        ("devices", _devices),
        ("windows", _windows),
        ("samples", _samples),
        ("inventory", _inventory),
    )
    tables: dict[str, PlainTable] = {}
    for name, make in makers:
        try:
            made = make(trace)
        except SpikeprofError:  # the inventory and the analyzers name the damaged table
            continue
        if made is not None:
            tables[name] = made
    return Report(trace.manifest, results, trace_name, tables=tables)


def _tally(trace: Trace, table: str, column: str) -> dict[int, int]:
    """How many rows of a table have each value of an ordinal column."""
    values = trace.column(table, column)
    if len(values) and int(values.min()) >= 0 and int(values.max()) < 65_536:  # far cheaper than a sort
        numbers = np.bincount(values)
        found = np.flatnonzero(numbers)
        return dict(zip(found.tolist(), numbers[found].tolist(), strict=True))
    found, numbers = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), numbers.tolist(), strict=True))


def _tallies(trace: Trace, column: str) -> dict[str, dict[int, int]]:
    """The tallies of the tables of GPU work that were collected."""
    return {table: _tally(trace, table, column) for table in GPU_WORK_TABLES if table in trace}


def _work(tallies: dict[str, dict[int, int]], keys: list[int]) -> dict[str, list[Any]]:
    """Kernels and memory operations per rank or device; None where the table was not collected."""
    return {f"{t}_count": [tallies[t].get(k, 0) if t in tallies else None for k in keys] for t in GPU_WORK_TABLES}


def _processes(trace: Trace) -> PlainTable | None:
    """One row per process: what it was, whether it was traced, how much GPU work it did."""
    tallies = _tallies(trace, "rank")
    if "processes" in trace:
        known = trace.table("processes").slice(0, MAX_PROCESSES).to_pydict()
        return {**known, **_work(tallies, known["rank"])}
    ranks = sorted({rank for tally in tallies.values() for rank in tally})
    return {"rank": ranks, **_work(tallies, ranks)} if ranks else None


def _devices(trace: Trace) -> PlainTable | None:
    """One row per GPU, whichever processes saw it."""
    tallies = _tallies(trace, "device")
    work = sorted({device for tally in tallies.values() for device in tally})
    if "devices" not in trace:
        return {"device": work, **_work(tallies, work)} if work else None
    kept: dict[int, dict[str, Any]] = {}
    for row in trace.table("devices").to_pylist():
        entry = kept.setdefault(row["device"], {**row, "ranks": []})
        entry["ranks"].append(row["rank"])
    blank: dict[str, Any] = dict.fromkeys(c.name for c in TABLES["devices"].columns)
    for device in work:
        kept.setdefault(device, {**blank, "device": device, "ranks": []})
    order = sorted(kept)
    names = ("name", "uuid", "sm_arch", "sm_count", "l2_bytes", "mem_bytes", "mem_peak_bytes_per_s", "peak_source")
    columns: dict[str, list[Any]] = {"device": list(order)}
    columns |= {name: [kept[d][name] for d in order] for name in names}
    columns["ranks"] = [", ".join(str(r) for r in sorted(set(kept[d]["ranks"]))) for d in order]
    energy = _energy(trace)
    if energy:
        columns["energy_j"] = [energy.get(device) for device in order]
    return {**columns, **_work(tallies, order)}


def _energy(trace: Trace) -> dict[int, float]:
    """Joules per GPU over the recording: the rise of the driver's counter between its first and last reading."""
    if "samples" not in trace:
        return {}
    codes, metrics = trace.codes("samples", "metric")
    if "energy_j" not in metrics:
        return {}
    mine = np.isin(codes, [i for i, name in enumerate(metrics) if name == "energy_j"])
    mine &= np.isfinite(trace.column("samples", "value"))
    device, value = trace.column("samples", "device")[mine], trace.column("samples", "value")[mine]
    return {int(d): float(np.ptp(value[device == d])) for d in np.unique(device)}


def _windows(trace: Trace) -> PlainTable | None:
    """The windows in which a process was not recorded, longest first."""
    if "windows" not in trace:
        return None
    rows = [r for r in trace.table("windows").to_pylist() if r["state"] != "traced"]
    rows.sort(key=lambda r: r["start_ns"] - r["end_ns"])
    names = ("rank", "state", "reason", "start_ns", "end_ns")
    return {name: [r[name] for r in rows[:MAX_WINDOWS]] for name in names}


def _samples(trace: Trace) -> PlainTable | None:
    """Gauges as means over at most ``MAX_SAMPLE_POINTS`` equal stretches of time, per device and metric.

    Of a gauge that never changes the first and the last reading are kept. Counters are not gauges.
    """
    if "samples" not in trace:
        return None
    metric_codes, metrics = trace.codes("samples", "metric")
    device = trace.column("samples", "device").astype(np.int64)
    t_ns = trace.column("samples", "t_ns")
    value = trace.column("samples", "value")
    sound = np.isfinite(value)
    out: dict[str, list[Any]] = {"device": [], "metric": [], "t_ns": [], "value": []}
    for one in np.unique(device).tolist():
        for code, name in enumerate(metrics):
            mine = (device == one) & (metric_codes == code) & sound
            if is_running_total(name) or not mine.any():
                continue
            times, means = _binned(t_ns[mine], value[mine])
            if len(times) > 2 and min(means) == max(means):
                times, means = [times[0], times[-1]], [means[0], means[-1]]
            out["device"] += [one] * len(times)
            out["metric"] += [name] * len(times)
            out["t_ns"] += times
            out["value"] += means
    return out


def _binned(t_ns: _Ints, value: npt.NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """Mean time and mean value of each stretch that holds a reading. Both arrays: one element per reading."""
    if len(t_ns) <= MAX_SAMPLE_POINTS:
        order = np.argsort(t_ns, kind="stable")
        return t_ns[order].tolist(), value[order].tolist()
    first, last = int(t_ns.min()), int(t_ns.max())
    bins = (t_ns - first) * MAX_SAMPLE_POINTS // max(last - first + 1, 1)
    number = np.bincount(bins, minlength=MAX_SAMPLE_POINTS)
    held = number > 0
    times = np.bincount(bins, weights=(t_ns - first).astype(np.float64), minlength=MAX_SAMPLE_POINTS)
    sums = np.bincount(bins, weights=value, minlength=MAX_SAMPLE_POINTS)
    mean_t = (times[held] / number[held]).astype(np.int64) + first
    return mean_t.tolist(), np.round(sums[held] / number[held], 6).tolist()


def _inventory(trace: Trace) -> PlainTable:
    """Every table of the schema: collected, absent or damaged (and how)."""
    states = ["collected" if n in trace else "damaged" if n in trace.damaged else "absent" for n in TABLES]
    return {"table": list(TABLES), "state": states, "reason": [trace.damaged.get(n, "") for n in TABLES]}
