"""Tables about a model's graph: its nodes with time, heat and kernels, its parts, its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spikeprof.analyzers.derived.cells import finite
from spikeprof.analyzers.derived.graph_heat import OUTSIDE, grid, parts
from spikeprof.analyzers.derived.graph_kernels import Joined
from spikeprof.analyzers.derived.graph_layout import Rows, rows_of
from spikeprof.analyzers.derived.graph_memory import Memory
from spikeprof.analyzers.derived.intervals import Ints
from spikeprof.analyzers.derived.model_nodes import Floats, Nodes, Tensors
from spikeprof.profiler.trace import Trace

Columns = Mapping[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Study:
    """A graph and what was found out about it: by node its kernels' names, launches and time, and what heat is of."""

    nodes: Nodes
    order: Ints
    memory: Memory | None
    joined: Joined
    joined_share: float
    kernels: dict[int, list[str]]
    launches: Ints
    gpu_time_ns: Floats
    heat_ns: Floats
    heat_from: str  # kernels, latency, or empty

    @staticmethod
    def of(trace: Trace, nodes: Nodes, order: Ints, memory: Memory | None, joined: Joined) -> Study:
        """Put together; heat is of kernels where any were joined."""
        gpu_time = np.full(len(nodes), np.nan)
        launches = np.zeros(len(nodes), np.int64)
        share = 0.0
        names: dict[int, list[str]] = {}
        if not joined.why_none:
            known = joined.known
            duration = trace.column("kernels", "end_ns") - trace.column("kernels", "start_ns")
            node = joined.node[known]
            launches = np.bincount(node, minlength=len(nodes))
            sums = np.bincount(node, duration[known].astype(np.float64), minlength=len(nodes))
            gpu_time = np.where(launches > 0, sums, np.nan)
            share = float(duration[known].sum()) / max(float(duration.sum()), 1.0)
            names = _kernel_names(trace, joined, duration)
        timed = bool(np.isfinite(nodes.latency_ns).any())
        heat_from = "latency" if joined.why_none and timed else "" if joined.why_none else "kernels"
        heat = gpu_time if heat_from == "kernels" else nodes.latency_ns
        return Study(nodes, order, memory, joined, share, names, launches, gpu_time, heat, heat_from)

    @property
    def heat(self) -> list[float | None]:
        """Each node's share of the hottest one's time; None where it has none."""
        return _shares(self.heat_ns)


def _shares(values: Floats) -> list[float | None]:
    most = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
    return [float(value) / most if most > 0 and np.isfinite(value) else None for value in values.tolist()]


def _kernel_names(trace: Trace, joined: Joined, duration: Ints) -> dict[int, list[str]]:
    """The kernels of each node, the one that took most time first."""
    codes, labels = trace.codes("kernels", "name")
    known = joined.known
    table = pa.table({"node": joined.node[known], "name": codes[known], "ns": duration[known]})
    sums = (
        table.group_by(["node", "name"])
        .aggregate([("ns", "sum")])
        .sort_by([("node", "ascending"), ("ns_sum", "descending")])
    )
    found: dict[int, list[str]] = {}
    for node, name in zip(sums.column("node").to_pylist(), sums.column("name").to_pylist(), strict=True):
        found.setdefault(node, []).append(labels[name])
    return found


def shape_text(tensors: Tensors, at: int) -> str:
    """``8×50257``; ``scalar`` for a tensor without dimensions, empty where the shape is not known."""
    shape = tensors.shape[at]
    return "" if shape is None else "×".join(str(n) for n in shape) or "scalar"


def node_table(study: Study, most: int) -> Columns:
    """The hottest nodes, all of them in the graph's order where no time is known."""
    nodes = study.nodes
    heat = study.heat
    chosen = [n for n in range(len(nodes)) if nodes.kind[n] == "op"]
    if study.heat_from:
        chosen = sorted((n for n in chosen if heat[n] is not None), key=lambda n: -(heat[n] or 0.0))
    chosen = chosen[:most]
    tensor = nodes.first_tensor
    first = [tensor.get(n) for n in chosen]
    gives: list[Rows | None] = [None if at is None else rows_of(nodes.tensors, at) for at in first]
    table: dict[str, list[Any]] = {
        "node_id": [int(nodes.ids[n]) for n in chosen],
        "node": [nodes.name[n] for n in chosen],
        "op": [nodes.op[n] for n in chosen],
        "module": [nodes.module[n] for n in chosen],
    }
    if study.heat_from == "kernels":
        table["kernel"] = [study.kernels[n][0] for n in chosen]
        table["distinct_kernels_count"] = [len(study.kernels[n]) for n in chosen]
        table["launches_count"] = [int(study.launches[n]) for n in chosen]
        table["gpu_time_ns"] = [finite(study.gpu_time_ns[n]) for n in chosen]
    if np.isfinite(nodes.latency_ns).any():
        table["latency_ns"] = [finite(nodes.latency_ns[n]) for n in chosen]
    if np.isfinite(nodes.host_ns).any():
        table["host_ns"] = [finite(nodes.host_ns[n]) for n in chosen]
    if study.heat_from:
        table["heat_share"] = [heat[n] for n in chosen]
    table["shape"] = ["" if at is None else shape_text(nodes.tensors, at) for at in first]
    table["dtype"] = ["" if at is None else nodes.tensors.dtype[at] for at in first]
    table["output_bytes"] = [None if at is None else finite(nodes.tensors.bytes_of(at)) for at in first]
    table["row_alignment_bytes"] = [found.alignment_bytes if found else None for found in gives]
    table["input_alignment_bytes"] = _input_alignments(nodes, chosen)
    return table


def _input_alignments(nodes: Nodes, chosen: Sequence[int]) -> list[int | None]:
    """The worst alignment of rows among what each node takes; None where no layout is known."""
    tensors: dict[int, list[int]] = {}
    for at, node in enumerate(nodes.tensors.node.tolist()):
        tensors.setdefault(node, []).append(at)
    wanted = {*chosen}
    takes: dict[int, list[int]] = {}
    for source, target in zip(nodes.source.tolist(), nodes.target.tolist(), strict=True):
        if target in wanted:
            takes.setdefault(target, []).extend(tensors.get(source, ()))
    found = ((rows_of(nodes.tensors, at) for at in takes.get(node, ())) for node in chosen)
    return [min((one.alignment_bytes for one in some if one), default=None) for some in found]


def part_table(study: Study, most: int) -> Columns:
    """Parts of the model by time; none where no time is known."""
    found = parts(study.nodes.module, study.heat_ns)
    whole = sum(found.total_ns) or 1.0
    order = sorted(range(len(found.name)), key=lambda at: -found.total_ns[at])[:most]
    layers: dict[str, int] = {}
    for name, _ in found.cells:
        layers[name] = layers.get(name, 0) + 1
    return {
        "part": [found.name[at] for at in order],
        "layers_count": [layers[found.name[at]] for at in order],
        "nodes_count": [found.nodes_count[at] for at in order],
        "total_ns": [found.total_ns[at] for at in order],
        "part_time_share": [found.total_ns[at] / whole for at in order],
    }


def heat_table(study: Study, most_parts: int, most_layers: int) -> Columns:
    """Layers × parts: the time there, and its share of the hottest cell; layer -1 is outside of layers."""
    cells = grid(parts(study.nodes.module, study.heat_ns), most_parts, most_layers)
    hottest = max(cells.values(), default=0.0) or 1.0
    return {
        "part": [part for part, _ in cells],
        "layer": [layer for _, layer in cells],
        "total_ns": list(cells.values()),
        "heat_share": [value / hottest for value in cells.values()],
    }


def has_layers(table: Columns) -> bool:
    """Whether a table of layers × parts has more than what is outside of layers."""
    return any(layer != OUTSIDE for layer in table.get("layer", ()))


def live_table(study: Study, bins: int) -> Columns:
    """Bytes held while nodes run, by position in the order; of many nodes the most of each stretch of them.

    Weights and inputs that are listed first are left out: nothing else is held yet.
    """
    if study.memory is None or not study.memory.live_bytes.any():
        return {"position": [], "live_bytes": []}
    first = int(np.flatnonzero(study.memory.live_bytes)[0])
    live = study.memory.live_bytes[first:]
    starts = np.unique(np.arange(bins) * len(live) // bins)
    most = np.maximum.reduceat(live, starts)
    return {"position": (starts + first).tolist(), "live_bytes": [int(n) for n in most.tolist()]}


def peak_table(study: Study, most: int) -> Columns:
    """The largest tensors that are held at the peak."""
    held, nodes = study.memory, study.nodes
    names = ("node", "module", "shape", "dtype", "storage_bytes", "peak_share", "made_at", "last_used_by")
    chosen = held.held_at(held.peak_at)[:most].tolist() if held is not None else []
    if held is None or not chosen or not held.peak_bytes:
        return {name: [] for name in names}
    tensor = [int(held.owner[storage]) for storage in chosen]
    maker = [int(nodes.tensors.node[at]) for at in tensor]
    return {
        "node": [nodes.name[n] for n in maker],
        "module": [nodes.module[n] for n in maker],
        "shape": [shape_text(nodes.tensors, at) for at in tensor],
        "dtype": [nodes.tensors.dtype[at] for at in tensor],
        "storage_bytes": [int(held.n_bytes[storage]) for storage in chosen],
        "peak_share": [float(held.n_bytes[storage]) / held.peak_bytes for storage in chosen],
        "made_at": [int(held.taken[storage]) for storage in chosen],
        "last_used_by": [nodes.name[int(study.order[held.last[storage]])] for storage in chosen],
    }


def unaligned_table(nodes: Nodes, found: Sequence[tuple[int, Rows]], most: int) -> Columns:
    """Large tensors whose rows are not aligned."""
    kept = found[:most]
    return {
        "node": [nodes.name[int(nodes.tensors.node[at])] for at, _ in kept],
        "module": [nodes.module[int(nodes.tensors.node[at])] for at, _ in kept],
        "shape": [shape_text(nodes.tensors, at) for at, _ in kept],
        "dtype": [nodes.tensors.dtype[at] for at, _ in kept],
        "tensor_bytes": [nodes.tensors.bytes_of(at) for at, _ in kept],
        "row_pitch_bytes": [rows.pitch_bytes for _, rows in kept],
        "row_alignment_bytes": [rows.alignment_bytes for _, rows in kept],
    }
