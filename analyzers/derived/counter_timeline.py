"""Counter samples over time: rates and shares per bin of each GPU, whatever ran there."""

from __future__ import annotations

from typing import Any

import numpy as np

from spikeprof.analyzers.derived.counters import Floats
from spikeprof.analyzers.derived.intervals import Bools, Ints, bin_edges
from spikeprof.profiler.trace import Trace
from spikeprof.profiler.units import NS_PER_S

_RATES = {"dram_read_bytes": "dram_read_bytes_per_s", "dram_written_bytes": "dram_written_bytes_per_s"}
_QUOTIENTS = {"l2_hit_share": ("l2_hit_sectors_count", "l2_sectors_count"),
              "l1_hit_share": ("l1_hit_sectors_count", "l1_sectors_count")}  # fmt: skip
_MEANS = ("sm_active_share", "tensor_active_share")

#: A bin with less than this share of the lookups of the busiest one has no hit rate: it would be that of noise.
_MIN_LOOKUPS_SHARE = 0.005


def counter_timeline(trace: Trace, bins_count: int, max_rows_count: int) -> dict[str, list[Any]]:
    """One row per GPU and bin, over the time in which kernels ran, or that was sampled.

    A column per metric that was sampled at all; None in bins without samples. Samples count where their middle lies,
    and bins hold two of them at least.
    """
    table: dict[str, list[Any]] = {"bin_start_ns": [], "device": []}
    if "counter_samples" not in trace or not trace.table("counter_samples").num_rows:
        return table
    device, start, end, value = (trace.column("counter_samples", c) for c in ("device", "start_ns", "end_ns", "value"))
    codes, labels = trace.codes("counter_samples", "metric")
    devices = np.unique(device).tolist()
    wanted = [m for m in (*_RATES, *(m for pair in _QUOTIENTS.values() for m in pair), *_MEANS) if m in labels]
    sound = (end > start) & np.isfinite(value)
    if not sound.any() or not wanted:
        return table
    first, last = _extent(trace, start, end, sound)
    if last <= first:
        return table
    length = int(np.median((end - start)[sound]))
    bins = max(1, min(bins_count, max_rows_count // len(devices), (last - first) // (2 * max(length, 1))))
    edges = bin_edges(first, last, bins)
    columns: dict[str, list[Any]] = {}
    for one in devices:
        sums = {}
        for metric in wanted:
            rows = np.flatnonzero(sound & (device == one) & (codes == labels.index(metric)))
            weight = (end - start)[rows] if metric in _MEANS else 1
            sums[metric] = _binned(start[rows], end[rows], value[rows] * weight, edges)
        table["bin_start_ns"] += edges[:-1].tolist()
        table["device"] += [one] * (len(edges) - 1)
        for name, values in _series(sums).items():
            columns.setdefault(name, []).extend(_plain(values))
    return table | {name: values for name, values in columns.items() if any(v is not None for v in values)}


def _extent(trace: Trace, start: Ints, end: Ints, sound: Bools) -> tuple[int, int]:
    if "kernels" in trace and trace.table("kernels").num_rows:
        return int(trace.column("kernels", "start_ns").min()), int(trace.column("kernels", "end_ns").max())
    return int(start[sound].min()), int(end[sound].max())


def _binned(start: Ints, end: Ints, value: Floats, edges: Ints) -> tuple[Floats, Floats]:
    """(sum of the values, sampled ns) per bin."""
    count = len(edges) - 1
    place = np.searchsorted(edges, (start + end) // 2, side="right") - 1
    inside = (place >= 0) & (place < count)
    sums: Floats = np.bincount(place[inside], value[inside], minlength=count).astype(np.float64)
    sampled: Floats = np.bincount(place[inside], (end - start)[inside], minlength=count).astype(np.float64)
    return sums, sampled


def _series(sums: dict[str, tuple[Floats, Floats]]) -> dict[str, Floats]:
    """The columns that can be made of the sums per bin; NaN where nothing was sampled."""
    found = {}
    for metric, name in _RATES.items():
        if metric in sums:
            found[name] = _over(*sums[metric]) * NS_PER_S
    for name, (hits, lookups) in _QUOTIENTS.items():
        if hits in sums and lookups in sums:
            whole = sums[lookups][0]
            enough = np.where(whole >= _MIN_LOOKUPS_SHARE * whole.max(initial=0), whole, 0)
            found[name] = np.clip(_over(sums[hits][0], enough), 0, 1)
    for metric in _MEANS:
        if metric in sums:
            found[metric] = np.clip(_over(*sums[metric]), 0, 1)
    return found


def _over(value: Floats, divisor: Floats) -> Floats:
    result = np.full(len(value), np.nan)
    np.divide(value, divisor, out=result, where=divisor > 0)
    return result


def _plain(values: Floats) -> list[float | None]:
    """For a table: six digits are more than a drawing shows."""
    return [None if np.isnan(v) else float(f"{v:.6g}") for v in values.tolist()]
