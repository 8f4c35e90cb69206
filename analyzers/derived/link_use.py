"""Bytes over NVLink and PCIe as they were sampled, from the best source that a trace holds.

Counters of PM sampling come first: they hold every byte at intervals of microseconds. GPM and NVML tell rates and
totals some ten times a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.derived.intervals import Bools, Ints, bin_edges, ints
from spikeprof.profiler.trace import Trace
from spikeprof.profiler.units import NS_PER_S

#: The directions of a GPU's links as metrics call them; ``pcie_read`` comes to the GPU, ``pcie_written`` leaves it.
LINKS = ("nvlink_sent", "nvlink_received", "pcie_read", "pcie_written")

Floats = npt.NDArray[np.float64]
Columns = dict[str, list[Any]]
Peaks = Mapping[tuple[int, str], float | None]  # bytes per second of (device, link); None = unknown

#: Samples longer than this many median ones are none: the first of a session may begin at time 0.
_LENGTHS_MAX = 100

_USE_COLUMNS = ("device", "link", "sampled_by", "total_bytes", "mean_bytes_per_s", "busiest_bytes_per_s",
                "peak_bytes_per_s", "mean_share", "busiest_share", "saturated_time_share")  # fmt: skip


class LinkUse(NamedTuple):
    """One direction of one GPU's link: bytes (``n_bytes``) in each of the intervals ``[start, end)``, ascending."""

    device: int
    link: str
    sampled_by: str  # PM sampling, GPM or NVML
    start: Ints
    end: Ints
    n_bytes: Floats

    @property
    def bytes_per_s(self) -> Floats:
        """The rate in each interval."""
        return self.n_bytes / (self.end - self.start) * NS_PER_S


def link_uses(trace: Trace) -> list[LinkUse]:
    """Every direction of every GPU's links that was sampled, one source each. Needs none of the tables."""
    found: dict[tuple[int, str], LinkUse] = {}
    for use in (*_counted(trace), *_gauged(trace)):
        if len(use.start):
            found.setdefault((use.device, use.link), use)
    return sorted(found.values(), key=lambda use: (LINKS.index(use.link), use.device))


def binned(use: LinkUse, edges: Ints) -> tuple[Floats, Floats]:
    """(bytes, sampled ns) per bin between ascending edges; an interval counts where its middle lies."""
    middle = (use.start + use.end) // 2
    place = np.searchsorted(edges, middle, side="right") - 1
    inside = (place >= 0) & (place < len(edges) - 1)
    count = len(edges) - 1
    n_bytes = np.bincount(place[inside], use.n_bytes[inside], minlength=count).astype(np.float64)
    sampled_ns = np.bincount(place[inside], (use.end - use.start)[inside], minlength=count).astype(np.float64)
    return n_bytes, sampled_ns


def use_tables(
    uses: Sequence[LinkUse], peaks: Peaks, bins_count: int, saturated_share: float
) -> tuple[Columns, Columns]:
    """(one row per GPU and direction of a link, the busiest GPU of each direction over time).

    Bins of one direction are of equal length; one in which nothing was sampled has no value. The time in which a
    link carried more than ``saturated_share`` of its rate is counted by single intervals.
    """
    summary: Columns = {c: [] for c in _USE_COLUMNS}
    over_time: Columns = {c: [] for c in ("bin_start_ns", "link", "bytes_per_s", "link_share")}
    for link, group in groupby(uses, key=lambda use: use.link):
        mine = list(group)
        first, last = min(int(u.start[0]) for u in mine), max(int(u.end[-1]) for u in mine)
        # Two intervals per bin at least: else some bins would have none by chance.
        edges = bin_edges(first, last, min(bins_count, max(1, min(len(u.start) for u in mine) // 2)))
        busiest = np.full((2, len(edges) - 1), np.nan)  # bytes per second, and the share of the link's rate
        for use in mine:
            n_bytes, sampled_ns = binned(use, edges)
            rate = np.divide(n_bytes, sampled_ns, out=np.full(len(n_bytes), np.nan), where=sampled_ns > 0) * NS_PER_S
            peak = peaks.get((use.device, link))
            busiest = np.fmax(busiest, [rate, rate / (peak or np.nan)])
            for column, value in _summary(use, float(np.nanmax(rate)), peak, saturated_share).items():
                summary[column].append(value)
        over_time["bin_start_ns"] += edges[:-1].tolist()
        over_time["link"] += [f"{link}_bytes"] * (len(edges) - 1)
        for column, values in zip(("bytes_per_s", "link_share"), busiest.tolist(), strict=True):
            over_time[column] += [None if np.isnan(value) else value for value in values]
    return summary, over_time


def _summary(use: LinkUse, busiest: float, peak: float | None, saturated_share: float) -> dict[str, Any]:
    length = use.end - use.start
    sampled_ns = int(length.sum())
    mean = float(use.n_bytes.sum()) / sampled_ns * NS_PER_S
    return {
        "device": use.device,
        "link": f"{use.link}_bytes",
        "sampled_by": use.sampled_by,
        "total_bytes": float(use.n_bytes.sum()),
        "mean_bytes_per_s": mean,
        "busiest_bytes_per_s": busiest,
        "peak_bytes_per_s": peak,
        "mean_share": mean / peak if peak else None,
        "busiest_share": busiest / peak if peak else None,
        "saturated_time_share": (
            int(length[use.bytes_per_s > saturated_share * peak].sum()) / sampled_ns if peak else None
        ),
    }


def _counted(trace: Trace) -> Iterator[LinkUse]:
    if "counter_samples" not in trace:
        return
    columns = [trace.column("counter_samples", name) for name in ("device", "start_ns", "end_ns", "value")]
    for link, mine in _rows_of(trace, "counter_samples", {f"{link}_bytes": link for link in LINKS}):
        device, start, end, value = (column[mine] for column in columns)
        for one in np.unique(device).tolist():
            sound = (device == one) & (end > start) & (value >= 0)  # no NaN passes
            length = end - start
            sound &= length <= _LENGTHS_MAX * np.median(length[sound]) if sound.any() else False
            yield LinkUse(one, link, "PM sampling", ints(start[sound]), ints(end[sound]), value[sound])


def _gauged(trace: Trace) -> Iterator[LinkUse]:
    """Rates of GPM and NVML, each taken to hold since the reading before, and the differences of NVML's totals."""
    if "samples" not in trace:
        return
    columns = [trace.column("samples", name) for name in ("device", "t_ns", "value")]
    for prefix, suffix, source in (
        ("gpm_", "_bytes_per_s", "GPM"),
        ("", "_total_bytes", "NVML"),
        ("", "_bytes_per_s", "NVML"),
    ):
        for link, mine in _rows_of(trace, "samples", {f"{prefix}{link}{suffix}": link for link in LINKS}):
            device, t_ns, value = (column[mine] for column in columns)
            for one in np.unique(device).tolist():
                sound = (device == one) & (value >= 0)
                start, end = ints(t_ns[sound])[:-1], ints(t_ns[sound])[1:]
                before, after = value[sound][:-1], value[sound][1:]
                n_bytes = after - before if suffix == "_total_bytes" else after * (end - start) / NS_PER_S
                kept = (end > start) & (n_bytes >= 0)  # a total that falls was set back
                yield LinkUse(one, link, source, start[kept], end[kept], n_bytes[kept])


def _rows_of(trace: Trace, table: str, links: dict[str, str]) -> Iterator[tuple[str, Bools]]:
    """(link, which rows are of it) for each of the metrics that the table holds."""
    codes, labels = trace.codes(table, "metric")
    for code, label in enumerate(labels):
        if label in links:
            yield links[label], codes == code
