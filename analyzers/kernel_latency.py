"""Where GPU time goes, kernel by kernel: counts, totals, percentiles, shares, and when each ran.

Percentiles are nearest rank: p99 of n executions is the ``ceil(0.99 n)``-th shortest, a duration that
occurred. Sums of durations count concurrent kernels several times; shares of the wall never do (unions).

many-tiny-kernels
-----------------
What it means: most launches run for so short a time that launching them, not computing, sets the pace.

How it is found: at least ``min_tiny_launches_share`` of all kernels are shorter than ``tiny_ns``, and either
they are at least ``min_tiny_time_share`` of the kernels' time, or gaps of at most ``short_gap_ns`` between pieces of
work are at least ``min_short_gaps_share`` of the wall (longer gaps have other causes: see launch-gaps).

What to do: capture the step in a CUDA graph, or fuse the kernels (``torch.compile``, fused operators).

long-tail
---------
What it means: a kernel usually takes much less time than its slowest executions, at the same launch shape.

How it is found: among executions of one kernel with one grid and block size, p99 is more than ``tail_ratio``
times p50; there are at least ``min_tail_samples_count`` of them, with at least ``min_tail_time_share`` of the
kernels' time.

What to do: look at when the slow executions happen (the heatmap): other work beside them, clocks, input sizes.

dominant-kernel
---------------
What it means: one kernel is more than half of all kernel time: improving anything else cannot help much.

How it is found: the kernel's share of the sum of all kernel durations is above ``dominant_share``.

What to do: study that kernel first, for example its memory traffic and its occupancy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from spikeprof.analyzers.base import Evidence, Figure, Finding, Info, Metric, Result, Rule, Saving
from spikeprof.analyzers.derived import (
    DeviceTime,
    Integers,
    Ints,
    bin_edges,
    covered_by_group,
    device_times,
    first_of_groups,
    gpu_work,
    group_codes,
    group_percentile,
    ints,
    overlap_with,
    parts,
    sorted_in_groups,
    total,
    union,
)
from spikeprof.profiler.trace import Trace

Columns = dict[str, list[Any]]
_SHAPE = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")


class _Kernels(NamedTuple):
    """The kernels that do not end before they start: arrays of one element each, and the names behind the codes.

    Sources that round to microseconds hold kernels of 0 ns: they count as launches.
    """

    rows: Integers  # in the table
    code: Integers  # names[code] is the kernel's name; every code occurs
    names: list[str]
    device: Integers
    start: Ints
    end: Ints
    length: Ints


@dataclass(frozen=True)
class KernelLatency:
    """Options: sizes of the tables, and the limits of the rules."""

    top_count: int = 20
    bins_count: int = 60
    nodes_count: int = 50
    tiny_ns: int = 5_000
    min_tiny_launches_share: float = 0.5
    min_tiny_time_share: float = 0.2
    short_gap_ns: int = 50_000
    min_short_gaps_share: float = 0.2
    tail_ratio: float = 3.0
    min_tail_samples_count: int = 100
    min_tail_time_share: float = 0.01
    dominant_share: float = 0.5
    max_findings_count: int = 3  # of one rule

    info: ClassVar[Info] = Info(
        id="kernel-latency",
        question="Which kernels does the GPU time go to, and how steady are they?",
        needs=("kernels",),
        wants=("memory_ops", "windows"),
        rules=(
            Rule("many-tiny-kernels", "Most launches are too short to be worth launching one by one", "warning"),
            Rule("long-tail", "A kernel is far slower at times than usually", "warning"),
            Rule("dominant-kernel", "One kernel takes most of the GPU time", "info"),
        ),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. ``not_applicable`` when no kernel ran."""
        kernels = _kernels(trace)
        if not len(kernels.rows):
            return Result(self.info.id, "not_applicable", reason="no kernel ran while recording")
        devices = device_times(trace, gpu_work(trace))
        wall = sum(d.wall_ns for d in devices)
        table, order = _by_name(kernels, devices)
        top = order[: self.top_count]
        metrics = (*_metrics(trace, kernels, devices, wall), *self._tiny_metrics(kernels))
        findings = (
            *self._tiny(trace, kernels, devices),
            *self._tails(trace, kernels),
            *self._dominant(kernels, table, int(order[0])),
        )
        tables = {
            "kernels": {name: [values[i] for i in top] for name, values in table.items()},
            "nodes": _by_node(trace, kernels, self.nodes_count),
            "heatmap": _heatmap(kernels, top, self.bins_count, devices),
            "devices": _by_device(kernels, devices),
        }
        figures = (
            Figure("kernel-time", "heatmap", "heatmap", x="bin_start_ns", y="kernel", value="busy_ns"),
            Figure("kernel-totals", "bars", "kernels", x="name", y="total_ns"),
            Figure("device-busy", "bars", "devices", x="device", y="busy_share"),
            Figure("graph-nodes", "table", "nodes", x="graph_node_id", y="total_ns"),
        )
        return Result(
            self.info.id,
            "findings" if findings else "ok",
            metrics=metrics,
            findings=findings,
            tables=tables,
            figures=figures,
        )

    def _tiny_metrics(self, kernels: _Kernels) -> list[Metric]:
        tiny = kernels.length < self.tiny_ns
        whole = int(kernels.length.sum())
        share = int(kernels.length[tiny].sum()) / whole if whole else None
        return [
            Metric("tiny_launches_share", float(tiny.mean())),
            Metric("tiny_time_share", share, "" if whole else "all kernels last 0 ns"),
        ]

    def _tiny(self, trace: Trace, kernels: _Kernels, devices: list[DeviceTime]) -> list[Finding]:
        launches, time_share = (metric.value or 0.0 for metric in self._tiny_metrics(kernels))
        wall = sum(d.wall_ns for d in devices)
        gaps = [d.idle.starts for d in devices], [d.idle.ends for d in devices]
        gap_start, gap_end = (np.concatenate([ints([]), *part]) for part in gaps)
        short = gap_end - gap_start <= self.short_gap_ns
        gap_share = int((gap_end - gap_start)[short].sum()) / wall if wall else 0.0
        harm = time_share >= self.min_tiny_time_share or gap_share >= self.min_short_gaps_share
        if launches < self.min_tiny_launches_share or not harm:
            return []
        tiny = np.flatnonzero(kernels.length < self.tiny_ns)
        in_graphs = float((trace.column("kernels", "graph_id")[kernels.rows[tiny]] != 0).mean())
        evidence = (
            Evidence("tiny_launches_share", launches, self.min_tiny_launches_share, "min_tiny_launches_share"),
            Evidence("tiny_time_share", time_share, self.min_tiny_time_share, "min_tiny_time_share"),
            Evidence("short_gaps_share", gap_share, self.min_short_gaps_share, "min_short_gaps_share"),
            Evidence("tiny_kernels_count", len(tiny)),
            Evidence("tiny_in_graphs_share", in_graphs),
        )
        graph = "Capture the step in a CUDA graph, or fuse the kernels (torch.compile, fused operators)."
        fuse = "Fuse the kernels of the graph (torch.compile, fused operators)."
        # The time of both together; what happens on several devices at once counts once.
        busy, quiet = union(kernels.start[tiny], kernels.end[tiny]), union(gap_start[short], gap_end[short])
        bound = total(busy) + total(quiet) - int(overlap_with(*quiet, busy).sum())
        action = fuse if in_graphs > 0.5 else graph
        return [Finding("many-tiny-kernels", "warning", {}, evidence, action, Saving(bound, "total"))]

    def _tails(self, trace: Trace, kernels: _Kernels) -> list[Finding]:
        """Per launch shape, so that a kernel used on inputs of several sizes is not called unsteady."""
        shapes = [trace.column("kernels", name)[kernels.rows] for name in _SHAPE]
        codes, count = group_codes(kernels.code, *shapes)
        ordered, offsets = sorted_in_groups(codes, kernels.length, count)
        p50, p99 = group_percentile(ordered, offsets, 50), group_percentile(ordered, offsets, 99)
        totals = np.diff(np.append(0, np.cumsum(ordered))[offsets])
        shares = totals / max(int(totals.sum()), 1)
        samples = np.diff(offsets)
        long = (samples >= self.min_tail_samples_count) & (p50 > 0) & (p99 > self.tail_ratio * p50)
        found = np.flatnonzero(long & (shares >= self.min_tail_time_share))
        excess = {g: int(np.maximum(ordered[offsets[g] : offsets[g + 1]] - p50[g], 0).sum()) for g in found.tolist()}
        first = first_of_groups(codes, count)
        action = "See in the heatmap when the slow executions happen, and what runs beside them."
        return [
            Finding(
                "long-tail",
                "warning",
                {
                    "kernel": kernels.names[kernels.code[first[g]]],
                    **{name: int(shape[first[g]]) for name, shape in zip(_SHAPE, shapes, strict=True)},
                },
                (
                    Evidence("p99_over_p50_ratio", float(p99[g] / p50[g]), self.tail_ratio, "tail_ratio"),
                    Evidence("p50_ns", int(p50[g])),
                    Evidence("p99_ns", int(p99[g])),
                    Evidence("samples_count", int(samples[g]), self.min_tail_samples_count, "min_tail_samples_count"),
                    Evidence("gpu_time_share", float(shares[g]), self.min_tail_time_share, "min_tail_time_share"),
                ),
                action,
                Saving(excess[g], "local"),
            )
            for g in sorted(excess, key=lambda g: -excess[g])[: self.max_findings_count]
        ]

    def _dominant(self, kernels: _Kernels, table: Columns, first: int) -> list[Finding]:
        share = table["gpu_time_share"][first]
        if share <= self.dominant_share or len(kernels.names) == 1:
            return []
        evidence = (
            Evidence("gpu_time_share", share, self.dominant_share, "dominant_share"),
            Evidence("total_ns", table["total_ns"][first]),
            Evidence("launches_count", table["launches_count"][first]),
        )
        scope = {"kernel": kernels.names[first]}
        return [Finding("dominant-kernel", "info", scope, evidence, "Study this kernel first.")]


def _metrics(trace: Trace, kernels: _Kernels, devices: list[DeviceTime], wall: int) -> list[Metric]:
    busy = sum(d.busy_ns for d in devices)
    why = "" if wall else trace.damaged.get("windows", "no kernel ran in a recorded window")
    if "memory_ops" not in trace:
        why = trace.damaged.get("memory_ops", "copies were not recorded, so busy time is not known")
    return [
        Metric("kernels_count", len(kernels.rows)),
        Metric("distinct_kernels_count", len(kernels.names)),
        Metric("kernel_time_ns", int(kernels.length.sum())),
        Metric("wall_ns", None if why else wall, why),
        Metric("busy_ns", None if why else busy, why),
        Metric("busy_share", None if why else busy / wall, why),
    ]


def _kernels(trace: Trace) -> _Kernels:
    start, end = trace.column("kernels", "start_ns"), trace.column("kernels", "end_ns")
    raw, labels = trace.codes("kernels", "name")
    rows = np.flatnonzero(end >= start).astype(np.int32)
    raw, start, end = raw[rows], start[rows], end[rows]
    used = np.flatnonzero(np.bincount(raw, minlength=len(labels)))
    number = np.zeros(len(labels), np.int32)
    number[used] = np.arange(len(used))
    device = trace.column("kernels", "device")[rows]
    return _Kernels(rows, number[raw], [labels[i] for i in used], device, start, end, end - start)


def _by_name(kernels: _Kernels, devices: list[DeviceTime]) -> tuple[Columns, Ints]:
    """One row per kernel name, by code; and the codes by descending total."""
    count = len(kernels.names)
    ordered, offsets = sorted_in_groups(kernels.code, kernels.length, count)
    totals = np.diff(np.append(0, np.cumsum(ordered))[offsets])
    samples = np.diff(offsets)
    pairs, pairs_count = group_codes(kernels.code, kernels.device)  # time on one device is a union over its streams
    name_of_pair = kernels.code[first_of_groups(pairs, pairs_count)]
    start, end, pairs = _in_active_time(kernels, pairs, devices)
    covered = covered_by_group(start, end, pairs, pairs_count)
    del start, end, pairs
    wall = sum(d.wall_ns for d in devices)
    unions = ints(np.bincount(name_of_pair, covered, minlength=count))
    table: Columns = {
        "name": kernels.names,
        "launches_count": samples.tolist(),
        "total_ns": totals.tolist(),
        "mean_ns": (totals / samples).tolist(),
        **{f"p{p}_ns": group_percentile(ordered, offsets, p).tolist() for p in (50, 90, 99)},
        "min_ns": ordered[offsets[:-1]].tolist(),
        "max_ns": ordered[offsets[1:] - 1].tolist(),
        "gpu_time_share": (totals / max(int(totals.sum()), 1)).tolist(),
        "wall_share": (unions / wall).tolist() if wall else [None] * count,
        "devices_count": np.bincount(name_of_pair, minlength=count).tolist(),
    }
    return table, ints(np.argsort(-totals, kind="stable"))


def _in_active_time(kernels: _Kernels, pairs: Ints, devices: list[DeviceTime]) -> tuple[Ints, Ints, Ints]:
    """What of each kernel lies in its device's active time, as the wall does: starts, ends, and ``pairs`` of each."""
    found: list[tuple[Ints, Ints, Ints]] = [(ints([]), ints([]), ints([]))]
    for d in devices:
        mine = np.flatnonzero(kernels.device == d.device)
        start, end, source = parts(kernels.start[mine], kernels.end[mine], d.active)
        found.append((start, end, pairs[mine[source]]))
    start, end, of_pair = (np.concatenate(column) for column in zip(*found, strict=True))
    return start, end, of_pair


def _by_node(trace: Trace, kernels: _Kernels, most: int) -> Columns:
    """One row per kernel node of an executable graph: the largest totals."""
    node = trace.column("kernels", "graph_node_id")[kernels.rows]
    inside = np.flatnonzero(node != 0)
    rank = trace.column("kernels", "rank")[kernels.rows][inside]
    graph = trace.column("kernels", "graph_id")[kernels.rows][inside]
    codes, count = group_codes(rank, graph, node[inside], kernels.code[inside])
    ordered, offsets = sorted_in_groups(codes, kernels.length[inside], count)
    totals = np.diff(np.append(0, np.cumsum(ordered))[offsets])
    first = first_of_groups(codes, count)
    top = np.argsort(-totals, kind="stable")[:most]
    p50 = group_percentile(ordered, offsets, 50)
    return {
        "rank": rank[first][top].tolist(),
        "graph_id": graph[first][top].tolist(),
        "graph_node_id": node[inside][first][top].tolist(),
        "name": [kernels.names[i] for i in kernels.code[inside][first][top]],
        "launches_count": np.diff(offsets)[top].tolist(),
        "total_ns": totals[top].tolist(),
        "p50_ns": p50[top].tolist(),
    }


def _heatmap(kernels: _Kernels, top: Ints, bins: int, devices: list[DeviceTime]) -> Columns:
    """Kernel time per kernel and time bin, in ns; each kernel is shared out exactly over the bins it overlaps.

    Kernels beyond the first are summed up as "other". A bin in which nothing was being recorded has no value.
    """
    others = len(top) < len(kernels.names)
    row_of_code = np.full(len(kernels.names), len(top))
    row_of_code[top] = np.arange(len(top))
    row = row_of_code[kernels.code]
    edges = bin_edges(int(kernels.start.min()), int(kernels.end.max()), bins)
    bins = len(edges) - 1
    rows = len(top) + others
    # a kernel of 0 ns at the very end begins behind the last bin: it adds nothing wherever it is counted
    first = np.minimum(np.searchsorted(edges, kernels.start, side="right") - 1, bins - 1)
    last = np.maximum(np.searchsorted(edges, kernels.end - 1, side="right") - 1, first)
    # float64 sums of whole ns are exact below 2**53 ns = 104 days
    busy = np.zeros(rows * bins)
    whole = first == last
    busy += np.bincount(row[whole] * bins + first[whole], kernels.length[whole], minlength=rows * bins)
    r, f, t = row[~whole], first[~whole], last[~whole]
    busy += np.bincount(r * bins + f, edges[f + 1] - kernels.start[~whole], minlength=rows * bins)
    busy += np.bincount(r * bins + t, kernels.end[~whole] - edges[t], minlength=rows * bins)
    through = np.bincount(r * bins + f + 1, minlength=rows * bins) - np.bincount(r * bins + t, minlength=rows * bins)
    busy += (np.cumsum(through.reshape(rows, bins), axis=1) * np.diff(edges)).ravel()
    measured = sum((overlap_with(edges[:-1], edges[1:], d.measured) for d in devices), ints(np.zeros(bins)))
    seen = np.tile((measured > 0) | (busy.reshape(rows, bins).sum(axis=0) > 0), rows)
    names = [kernels.names[i] for i in top] + ["other"] * others
    return {
        "kernel": [name for name in names for _ in range(bins)],
        "bin_start_ns": edges[:-1].tolist() * rows,
        "busy_ns": [ns if here else None for ns, here in zip(ints(busy).tolist(), seen.tolist(), strict=True)],
    }


def _by_device(kernels: _Kernels, devices: list[DeviceTime]) -> Columns:
    counts = [int((kernels.device == d.device).sum()) for d in devices]
    return {
        "device": [d.device for d in devices],
        "kernels_count": counts,
        "wall_ns": [d.wall_ns for d in devices],
        "busy_ns": [d.busy_ns for d in devices],
        "idle_ns": [d.idle_ns for d in devices],
        "busy_share": [d.busy_ns / d.wall_ns if d.wall_ns else None for d in devices],
    }
