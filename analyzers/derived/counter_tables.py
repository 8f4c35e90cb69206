"""The tables and metrics of the analyzer ``cache-miss``: columns of plain values, None = not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spikeprof.analyzers.base import Metric
from spikeprof.analyzers.derived.cells import numbers
from spikeprof.analyzers.derived.counter_balance import Balance
from spikeprof.analyzers.derived.counters import BOUNDS, Classes, Counted, Estimate, Floats, Peaks
from spikeprof.analyzers.derived.intervals import Ints, total, union
from spikeprof.analyzers.derived.memory_patterns import NO_PATTERN, PATTERNS
from spikeprof.analyzers.derived.memory_use import MemoryUse
from spikeprof.profiler.counter_metrics import SETS
from spikeprof.profiler.trace import Trace
from spikeprof.profiler.units import NS_PER_S

Columns = dict[str, list[Any]]

#: A kernel whose tensor pipes work less than this has no place in a roofline of tensor work.
_MIN_TENSOR_SHARE = 0.001

#: Numbers that need a sentence beside them, or repeat another.
_NOT_IN_MATRIX = ("l2_filled_ratio", "dram_per_asked_ratio", "l2_per_dram_ratio", "dram_bytes_per_s")


def class_table(classes: Classes, use: MemoryUse, pattern: Ints, most: int) -> Columns:
    """One row per class, the longest-running first."""
    rows = longest(classes, most)
    counted = classes.counted
    return {
        **_which(classes, rows),
        "launches_count": counted.launches[rows].tolist(),
        "mean_ns": counted.mean_ns[rows].tolist(),
        "total_ns": counted.total_ns[rows].tolist(),
        "match": [counted.match[i] for i in rows],
        "pattern": ["" if pattern[i] == NO_PATTERN else PATTERNS[pattern[i]] for i in rows],
        **_numbers(counted, use, rows),
    }


def launch_table(trace: Trace, kernels: Ints, classes: Classes, launches: Counted, use: MemoryUse) -> Columns:
    """One row per single launch that has counters of its own, in the order given."""
    rows = np.arange(len(kernels))
    return {
        **_which(classes, launches.class_id),
        "start_ns": trace.column("kernels", "start_ns")[kernels].tolist() if len(kernels) else [],
        "duration_ns": launches.total_ns.tolist(),
        **_numbers(launches, use, rows),
    }


def _which(classes: Classes, rows: Ints) -> Columns:
    """The columns that tell which kernel class a row is of."""
    return {
        "class_id": rows.tolist(),
        "kernel": [classes.names[i] for i in rows],
        **{name: values[rows].tolist() for name, values in classes.shape.items()},
        "device": classes.counted.device[rows].tolist(),
    }


def longest(classes: Classes, most: int) -> Ints:
    """The classes that took most time, the longest first; without those that were not launched."""
    order = np.argsort(-classes.counted.total_ns, kind="stable").astype(np.int64)
    return order[classes.counted.launches[order] > 0][:most]


def _estimates(counted: Counted, use: MemoryUse) -> Iterator[tuple[str, Estimate]]:
    """All that is shown of a row, by name; what was not recorded is unknown."""
    yield "l1_hit_share", use.l1_hit
    yield "l2_hit_share", use.l2_hit
    yield "l2_filled_ratio", use.l2_filled
    yield "l2_sectors_count", counted.per_launch("l2_sectors_count")
    yield "dram_read_bytes", use.dram_read
    yield "dram_written_bytes", use.dram_written
    yield "dram_bytes_per_s", use.dram_rate
    yield "dram_peak_share", use.peak_share
    yield "l2_per_dram_ratio", use.reuse
    yield "dram_per_asked_ratio", use.overfetch
    yield "bank_conflict_share", use.conflicts
    yield "sm_active_share", counted.per_launch("sm_active_share").within(0, 1)
    yield "tensor_active_share", counted.per_launch("tensor_active_share").within(0, 1)


def _numbers(counted: Counted, use: MemoryUse, rows: Ints) -> Columns:
    """Three columns per number: the value, and ``low_`` and ``high_`` before its name; none where no row has it."""
    table: Columns = {}
    for name, estimate in _estimates(counted, use):
        if np.isfinite(estimate.value[rows]).any():
            for bound, part in zip(BOUNDS, estimate, strict=True):
                table[name if bound == "value" else f"{bound}_{name}"] = numbers(part[rows])
    return table


def matrix(classes: Classes, use: MemoryUse, most: int) -> Columns:
    """One row per class and number, each number also on a scale of its own from 0 to 1.

    Shares are their own scale; for all others 1 is the largest of the classes shown.
    """
    rows = longest(classes, most)
    which = _which(classes, rows)
    table: Columns = {name: [] for name in (*which, "metric", "scaled_share", *BOUNDS)}
    for name, estimate in _estimates(classes.counted, use):
        shown = estimate.of(rows)
        known = np.isfinite(shown.value)
        if not known.any() or name in _NOT_IN_MATRIX:
            continue
        largest = 1.0 if name.endswith("_share") else max(float(shown.value[known].max()), 1e-300)
        for column, values in which.items():
            table[column] += values
        table["metric"] += [name] * len(rows)
        table["scaled_share"] += numbers(np.clip(shown.value / largest, 0, 1))
        for bound, part in zip(BOUNDS, shown, strict=True):
            table[bound] += numbers(part)
    return table


def roofline(classes: Classes, use: MemoryUse, limits: Mapping[int, Peaks], most: int) -> Columns:
    """Points of kernels and corners of roofs (``kind``), both as FLOP per DRAM byte and FLOP per second.

    FLOP are inferred from ``tensor_active_share``; nothing without it, or where no peak is known.
    """
    active = classes.counted.per_launch("tensor_active_share").value
    known = [limits.get(int(device)) for device in classes.counted.device]
    flop_rate = active * np.array([one.fp16.value if one and one.fp16 else np.nan for one in known])
    with np.errstate(divide="ignore", invalid="ignore"):
        intensity = flop_rate / use.dram_rate.value
    drawn = np.isfinite(intensity) & (intensity > 0) & (active >= _MIN_TENSOR_SHARE) & np.isfinite(use.peak)
    rows = longest(classes, len(drawn))
    rows = rows[drawn[rows]][:most]
    models = dict.fromkeys(one for i in rows.tolist() if (one := known[i]) and one.fp16)
    # A roof has three corners: left of all points, at the ridge, right of all points.
    x, peak, bandwidth = _corners(list(models), intensity[rows])
    corners = len(x)
    time_ns = classes.counted.total_ns
    which = _which(classes, rows)
    return {
        "kind": ["kernel"] * len(rows) + ["roof"] * corners,
        **{column: values + [-1] * corners for column, values in which.items() if column != "kernel"},
        "kernel": which["kernel"] + [one.model for one in models for _ in range(3)],
        "tensor_flop_per_byte": intensity[rows].tolist() + x,
        "tensor_flop_per_s": flop_rate[rows].tolist()
        + [min(p, b * at) for at, p, b in zip(x, peak, bandwidth, strict=True)],
        "counted_time_share": (time_ns[rows] / max(int(time_ns.sum()), 1)).tolist() + [None] * corners,
        "peak_flop_per_s": [None] * len(rows) + peak,
        "dram_peak_bytes_per_s": [None] * len(rows) + bandwidth,
    }


def _corners(models: list[Peaks], intensity: Floats) -> tuple[list[float], list[float], list[float]]:
    """(FLOP per byte, peak FLOP per second, peak bytes per second) of three corners per model."""
    x: list[float] = []
    peak = [one.fp16.value for one in models for _ in range(3) if one.fp16]
    bandwidth = [one.dram_bytes_per_s for one in models for _ in range(3)]
    for p, b in zip(peak[::3], bandwidth[::3], strict=True):
        x += [min(float(intensity.min()), p / b) / 4, p / b, max(float(intensity.max()), p / b) * 4]
    return x, peak, bandwidth


def memory_roof(classes: Classes, use: MemoryUse, most: int) -> Columns:
    """DRAM bytes per second of each class, read and written apart, with the peak of its GPU."""
    rows = longest(classes, len(classes.names))
    rows = rows[np.isfinite(use.dram_rate.value[rows])][:most]
    which = _which(classes, rows)
    seconds = classes.counted.mean_ns[rows] / NS_PER_S
    return {
        **{column: values * 2 for column, values in which.items()},
        "way": ["read"] * len(rows) + ["written"] * len(rows),
        "dram_bytes_per_s": [
            *(use.dram_read.value[rows] / seconds).tolist(),
            *(use.dram_written.value[rows] / seconds).tolist(),
        ],
        "dram_peak_bytes_per_s": numbers(use.peak[rows]) * 2,
    }


# ---------------------------------------------------------------- metrics


def summary(
    trace: Trace, classes: Classes, use: MemoryUse, found: list[Balance], limits: Mapping[int, Peaks]
) -> tuple[Metric, ...]:
    """The numbers of the whole recording. What is missing says which set of counters measures it."""
    counted = classes.counted
    total_ns = max(int(counted.total_ns.sum()), 1)
    times = {
        match: int(sum(ns for ns, m in zip(counted.total_ns.tolist(), counted.match, strict=True) if m == match))
        for match in ("exact", "class")
    }
    return (
        Metric("kernel_classes_count", len(classes.names)),
        Metric("exact_time_share", times["exact"] / total_ns),
        Metric("class_time_share", times["class"] / total_ns),
        *_sampled(trace, found),
        *_sums(counted, found),
        *_bandwidth(counted, found, limits),
        *_outside(found),
        *_cpu(trace),
    )


def _total(counted: Counted, found: list[Balance], metric: str) -> float | None:
    """What kernels counted, over all GPUs; None when it was not recorded."""
    mine = [b for b in found if b.metric == metric]
    if mine:
        return float(sum(b.counts.get("kernels", 0.0) for b in mine))
    value = counted.per_launch(metric).value * counted.launches
    return float(np.nansum(value)) if np.isfinite(value).any() else None


def _sampled(trace: Trace, found: list[Balance]) -> Iterator[Metric]:
    """The part of the time in which kernels ran that was sampled for DRAM or L2: sums are of that part."""
    metric = next((m for m in ("dram_read_bytes", "l2_sectors_count") if any(b.metric == m for b in found)), None)
    if metric is None or "kernels" not in trace:
        return
    device, start, end = (trace.column("kernels", c) for c in ("device", "start_ns", "end_ns"))
    ran = sum(total(union(start[device == one], end[device == one])) for one in np.unique(device).tolist())
    sampled = sum(b.time_ns.get("kernels", 0) for b in found if b.metric == metric)
    if ran:
        yield Metric("sampled_kernel_time_share", min(sampled / ran, 1.0))


def _set_of(metric: str) -> str:
    return next(name for name, metrics in SETS.items() if metric in metrics)


def _missing(name: str, metric: str) -> Metric:
    counters = _set_of(metric)
    flag = "--counters" if counters == "memory" else f"--counters={counters}"
    return Metric(name, None, f"the counters of the set {counters} were not recorded ({flag})")


def _sums(counted: Counted, found: list[Balance]) -> Iterator[Metric]:
    for metric in ("dram_read_bytes", "dram_written_bytes", "l2_sectors_count"):
        value = _total(counted, found, metric)
        yield Metric(metric, value) if value is not None else _missing(metric, metric)
    for name, part, whole in (
        ("l2_hit_share", "l2_hit_sectors_count", "l2_sectors_count"),
        ("l1_hit_share", "l1_hit_sectors_count", "l1_sectors_count"),
        ("bank_conflict_share", "shared_conflicts_count", "shared_wavefronts_count"),
    ):
        values = _total(counted, found, part), _total(counted, found, whole)
        if values[0] is None or values[1] is None:
            yield _missing(name, part)
        elif values[1] > 0:
            yield Metric(name, min(max(values[0] / values[1], 0.0), 1.0))
        else:
            yield Metric(name, None, "kernels had none of these accesses")


def _bandwidth(counted: Counted, found: list[Balance], limits: Mapping[int, Peaks]) -> Iterator[Metric]:
    """DRAM bytes per second while kernels ran, and their share of the peak."""
    moved = [_total(counted, found, name) for name in ("dram_read_bytes", "dram_written_bytes")]
    if moved[0] is None or moved[1] is None:
        yield _missing("dram_bytes_per_s", "dram_read_bytes")
        return
    time_ns = {b.device: b.time_ns.get("kernels", 0) for b in found if b.metric == "dram_read_bytes"}
    if not time_ns:
        known = np.isfinite(counted.per_launch("dram_read_bytes").value)
        devices = np.unique(counted.device).tolist()
        time_ns = {device: int(counted.total_ns[known & (counted.device == device)].sum()) for device in devices}
    seconds = sum(time_ns.values()) / NS_PER_S
    if not seconds:
        yield Metric("dram_bytes_per_s", None, "no time of kernels was sampled")
        return
    yield Metric("dram_bytes_per_s", (moved[0] + moved[1]) / seconds)
    could = sum(ns / NS_PER_S * limits[d].dram_bytes_per_s if d in limits else np.nan for d, ns in time_ns.items())
    has_peak = bool(np.isfinite(could)) and could > 0
    why = "" if has_peak else "the peak bandwidth of the GPU is not known"
    yield Metric("dram_peak_share", float((moved[0] + moved[1]) / could) if has_peak else None, why)


def _outside(found: list[Balance]) -> Iterator[Metric]:
    """What of the DRAM bytes fell outside of kernels."""
    mine = [b for b in found if b.metric in ("dram_read_bytes", "dram_written_bytes")]
    whole = sum(b.total for b in mine)
    if whole > 0:
        inside = sum(b.counts.get("kernels", 0.0) for b in mine)
        yield Metric("dram_outside_kernels_share", 1 - inside / whole)


def _cpu(trace: Trace) -> Iterator[Metric]:
    """Miss shares of the CPU's caches beside it, where they were counted."""
    if "cpu_cache" not in trace:
        return
    codes, labels = trace.codes("cpu_cache", "metric")
    sums = np.bincount(codes, trace.column("cpu_cache", "value_count"), minlength=len(labels))
    by_name = dict(zip(labels, sums.tolist(), strict=True))
    for cache in ("l1d", "llc"):
        reads, misses = by_name.get(f"{cache}_read_count"), by_name.get(f"{cache}_read_miss_count")
        if reads and misses is not None:
            yield Metric(f"cpu_{cache}_miss_share", min(misses / reads, 1.0))
