"""Bytes per launch that kernels send over NVLink and PCIe, from the counters that were attributed to them."""

from __future__ import annotations

import numpy as np

from spikeprof.analyzers.derived.link_use import LINKS, Columns, Floats, Peaks
from spikeprof.profiler.trace import Trace
from spikeprof.profiler.units import NS_PER_S

_COLUMNS = ("kernel", "device", "link", "launches_count", "mean_ns", "launch_bytes", "low_bytes", "high_bytes",
            "link_share")  # fmt: skip


def kernel_links(trace: Trace, peaks: Peaks, most: int) -> Columns:
    """One row per class of identical launches and direction of a link: those that moved most bytes.

    Classes that moved nothing are left out; ``low_bytes`` and
    ``high_bytes`` bound the bytes per launch.
    """
    table: Columns = {name: [] for name in _COLUMNS}
    if "counters" not in trace or "kernel_classes" not in trace:
        return table
    launches = trace.column("kernel_classes", "launches_count")
    mean_ns = trace.column("kernel_classes", "total_ns") / np.maximum(launches, 1)
    device = trace.column("kernel_classes", "device")
    name_codes, names = trace.codes("kernel_classes", "name")
    found: list[tuple[float, int, str, Floats]] = []  # (bytes of all launches, class, link, value with its bounds)
    for link in LINKS:
        values = _per_launch(trace, f"{link}_bytes", len(launches))
        total = np.nan_to_num(values[:, 0]) * launches
        order = np.argsort(-total, kind="stable")[:most]
        found += [(float(total[i]), i, link, values[i]) for i in order.tolist() if total[i] > 0]
    found.sort(key=lambda item: -item[0])
    for _, i, link, (value, low, high) in found[:most]:
        peak = peaks.get((int(device[i]), link))
        share = value / mean_ns[i] * NS_PER_S / peak if peak and mean_ns[i] else None
        row = (names[name_codes[i]], int(device[i]), f"{link}_bytes", int(launches[i]), float(mean_ns[i]))
        numbers = (*map(float, (value, low, high)), None if share is None else float(share))
        for column, cell in zip(_COLUMNS, (*row, *numbers), strict=True):
            table[column].append(cell)
    return table


def _per_launch(trace: Trace, metric: str, classes_count: int) -> Floats:
    """Value, low and high per launch of each class, NaN where there is none: the class's own, else the mean of its
    launches."""
    codes, labels = trace.codes("counters", "metric")
    value = trace.column("counters", "value")
    classes, kernel = trace.column("counters", "class_id"), trace.column("counters", "kernel_id")
    mine = np.isin(codes, [i for i, label in enumerate(labels) if label == metric])
    mine &= np.isfinite(value) & (classes >= 0) & (classes < classes_count)
    result = np.full((classes_count, 3), np.nan)
    columns = np.stack([trace.column("counters", c) for c in ("value", "low", "high")], axis=1)
    for rows in (np.flatnonzero(mine & (kernel >= 0)), np.flatnonzero(mine & (kernel < 0))):
        count = np.bincount(classes[rows], minlength=classes_count)
        some = count > 0
        for c in range(3):
            sums = np.bincount(classes[rows], columns[rows, c], minlength=classes_count)
            result[some, c] = sums[some] / count[some]
    return result
