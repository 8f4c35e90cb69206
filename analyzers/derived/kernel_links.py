"""Bytes per launch that kernels send over NVLink and PCIe, from the counters that were attributed to them."""

from __future__ import annotations

import numpy as np

from spikeprof.analyzers.derived.counters import Estimate, kernel_classes
from spikeprof.analyzers.derived.link_use import LINKS, Columns, Peaks
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
    classes = kernel_classes(trace)
    counted = classes.counted
    found: list[tuple[float, int, str, Estimate]] = []  # (bytes of all launches, class, link, bytes per launch)
    for link in LINKS:
        values = counted.per_launch(f"{link}_bytes")
        total = np.nan_to_num(values.value) * counted.launches
        order = np.argsort(-total, kind="stable")[:most]
        found += [(float(total[i]), i, link, values.of(np.array([i]))) for i in order.tolist() if total[i] > 0]
    found.sort(key=lambda item: -item[0])
    for _, i, link, of_one in found[:most]:
        value, low, high = (float(part[0]) for part in of_one)
        device, mean_ns = int(counted.device[i]), float(counted.mean_ns[i])
        peak = peaks.get((device, link))
        share = value / mean_ns * NS_PER_S / peak if peak and mean_ns else None
        row = (classes.names[i], device, f"{link}_bytes", int(counted.launches[i]), mean_ns, value, low, high, share)
        for column, cell in zip(_COLUMNS, row, strict=True):
            table[column].append(cell)
    return table
