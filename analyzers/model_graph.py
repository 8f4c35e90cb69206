"""The model's static graph: in which order its nodes run, what memory their tensors need, where its time goes.

The graph comes from ``torch.export``, ``torch.fx`` or a JSON file (`spikeprof graph`). *Lifetimes*: memory is taken by
the node that gives a tensor and given back after the last node that takes it; views and in-place results lie in memory
that was there before; weights and inputs are the caller's; outputs are held to the end. The *peak* is the most that all
other tensors hold while one node runs. Allocators round up, and some kernels ask for room of their own: what a run
really allocated stands beside it where the nodes were timed on a GPU.

*Latency* of a node is the median over runs, between two CUDA events around it, with the GPU held busy until the host
has launched it, so that nothing of the host's is in it; ``elapsed_time`` resolves 0.5 us, and a node that does nothing
reads ``floor_ns``. On a CPU it is the host's clock around the call. *Heat* is a node's share of the hottest one's time:
of its kernels' time where kernels were recorded with their modules (``kernel_owners``), else of its latency. Kernels
are joined by module, operator and order within the module; what order does not tell stays open.

graph-cycle
-----------
What it means: some nodes wait for one another. No order lets them run, and no lifetimes can be told.

How it is found: Kahn's algorithm ends before all nodes are in order; one cycle among the rest is named. Graphs of
torch have none: this is for graphs from files.

What to do: remove one of the edges that the finding names.

unaligned-rows
--------------
What it means: the rows of a large tensor do not begin at multiples of 16 bytes. Kernels that read or write it fall back
to narrow accesses, and matrix units to slower layouts: a vocabulary of 50,257 in fp16 is the classic.

How it is found: the begin of the tensor and the distances between its rows have no common divisor of ``vector_bytes``,
in tensors of at least ``min_tensor_bytes`` with rows of at least ``min_row_bytes``. One tensor for each memory.

What to do: pad the last size to the number that the finding gives, or begin the slice at an aligned element.

peak-of-one-tensor
------------------
What it means: one tensor makes up much of the memory that the model needs beyond its weights. Often it is the logits of
all positions, of which only the last ones are wanted, or an attention matrix.

How it is found: at the peak of at least ``min_tensor_bytes``, one tensor holds more than ``large_peak_share`` of it.

What to do: compute only the rows that are needed, or split the work on it into parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from spikeprof.analyzers.base import Evidence, Figure, Finding, Info, Metric, Result, Rule
from spikeprof.analyzers.derived.graph_kernels import joined
from spikeprof.analyzers.derived.graph_layout import Rows, rows_of
from spikeprof.analyzers.derived.graph_memory import Memory, memory
from spikeprof.analyzers.derived.graph_order import depth, topological
from spikeprof.analyzers.derived.graph_tables import (
    Study,
    heat_table,
    live_table,
    node_table,
    part_table,
    peak_table,
    shape_text,
    unaligned_table,
)
from spikeprof.analyzers.derived.intervals import Ints
from spikeprof.analyzers.derived.model_nodes import Nodes, model_nodes
from spikeprof.profiler.trace import Trace

_MEASURE_WITH = "spikeprof run --graph MODULE:FACTORY -- CMD (on a GPU)"
_SHOWN_IN_CYCLE = 8
_FACTS = ("name", "model", "via", "remark", "device", "device_name", "torch_version", "timed_with", "runs_count")


@dataclass(frozen=True)
class ModelGraph:
    """Options: sizes of the tables, and the limits of the rules."""

    top_count: int = 200
    peak_tensors_count: int = 10
    bins_count: int = 400
    parts_count: int = 14
    layers_count: int = 128
    vector_bytes: int = 16
    min_tensor_bytes: int = 1 << 20
    min_row_bytes: int = 64
    large_peak_share: float = 0.5
    max_findings_count: int = 3  # of one rule

    info: ClassVar[Info] = Info(
        id="model-graph",
        question="What does the model's graph ask for: order, memory, alignment, and time of each node?",
        needs=("model_nodes",),
        wants=(
            "model_graphs",
            "model_edges",
            "model_tensors",
            "kernels",
            "kernel_owners",
            "origins",
            "modules",
            "stacks",
        ),
        rules=(
            Rule("graph-cycle", "Nodes of the graph wait for one another", "critical"),
            Rule("unaligned-rows", "Rows of a large tensor are not aligned for wide accesses", "info"),
            Rule("peak-of-one-tensor", "One tensor makes up much of the memory at the peak", "info"),
        ),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. ``not_applicable`` when the graph has no nodes."""
        nodes = model_nodes(trace)
        if not len(nodes):
            return Result(self.info.id, "not_applicable", reason="the graph has no nodes")
        order, cycle = topological(len(nodes), nodes.source, nodes.target)
        held = memory(nodes, order) if not cycle and not nodes.missing else None
        study = Study.of(trace, nodes, order, held, joined(trace, nodes))
        unaligned = list(_unaligned(nodes, self.vector_bytes, self.min_tensor_bytes, self.min_row_bytes))
        findings = (
            *self._cycle(nodes, cycle),
            *self._rows(nodes, unaligned),
            *self._peak(study),
        )
        why = nodes.missing or ("the graph has a cycle" if cycle else "")
        return Result(
            self.info.id,
            "findings" if findings else "ok",
            reason=str(nodes.facts.get("remark", "")),
            collect_with=_MEASURE_WITH,
            metrics=(*_sizes(nodes, order, why), *_memory(study, why), *_times(study), *_joined(study)),
            findings=findings,
            tables={
                "graph": {name: [nodes.facts[name]] if nodes.facts else [] for name in _FACTS},
                "cycle": {"node": [nodes.name[n] for n in cycle[: self.top_count]]},
                "nodes": node_table(study, self.top_count),
                "parts": part_table(study, self.top_count),
                "heat": heat_table(study, self.parts_count, self.layers_count),
                "live": live_table(study, self.bins_count),
                "peak_tensors": peak_table(study, self.peak_tensors_count),
                "unaligned": unaligned_table(nodes, unaligned, self.top_count),
            },
            figures=(
                Figure("node-heat", "heatmap", "heat", x="layer", y="part", value="heat_share"),
                Figure("live-bytes", "line", "live", x="position", y="live_bytes"),
            ),
        )

    def _cycle(self, nodes: Nodes, cycle: list[int]) -> Iterator[Finding]:
        if not cycle:
            return
        names = [nodes.name[n] for n in cycle]
        shown = names if len(names) <= _SHOWN_IN_CYCLE else [*names[: _SHOWN_IN_CYCLE - 1], "…", names[-1]]
        yield Finding(
            "graph-cycle",
            "critical",
            {"cycle": " → ".join([*shown, names[0]])},
            (Evidence("cycle_nodes_count", len(cycle), 0, "none expected"),),
            "Remove one of these edges.",
        )

    def _rows(self, nodes: Nodes, unaligned: list[tuple[int, Rows]]) -> Iterator[Finding]:
        """The largest first, those of one shape once."""
        seen: dict[tuple[str, str], int] = {}
        alike = [(shape_text(nodes.tensors, at), nodes.tensors.dtype[at]) for at, _ in unaligned]
        for key, (at, found) in zip(alike, unaligned, strict=True):
            if key in seen or len(seen) == self.max_findings_count:
                continue
            seen[key] = at
            node = int(nodes.tensors.node[at])
            yield Finding(
                "unaligned-rows",
                "info",
                {"node": nodes.name[node], **_module(nodes, node), "shape": key[0], "dtype": key[1]},
                (
                    Evidence(
                        "row_alignment_bytes", found.alignment_bytes, self.vector_bytes, "vector_bytes", "modelled"
                    ),
                    Evidence("row_pitch_bytes", found.pitch_bytes, basis="modelled"),
                    Evidence("tensor_bytes", nodes.tensors.bytes_of(at), basis="modelled"),
                    Evidence("like_it_count", alike.count(key), basis="modelled"),
                ),
                self._aligned(nodes, at, found),
            )

    def _aligned(self, nodes: Nodes, at: int, found: Rows) -> str:
        """What makes the rows of a tensor aligned."""
        size = int(nodes.tensors.element_bytes[at])
        if found.pitch_bytes % self.vector_bytes == 0:
            return f"Begin the slice at a multiple of {max(self.vector_bytes // size, 1)} elements."
        padded = -(-found.pitch_bytes // self.vector_bytes) * self.vector_bytes // size
        return f"Pad its rows from {found.pitch_bytes // size} to {padded} elements."

    def _peak(self, study: Study) -> Iterator[Finding]:
        held = study.memory
        if held is None or held.peak_bytes < self.min_tensor_bytes:
            return
        largest = int(held.held_at(held.peak_at)[0])
        share = float(held.n_bytes[largest]) / held.peak_bytes
        if share <= self.large_peak_share:
            return
        nodes, at = study.nodes, int(held.owner[largest])
        node = int(nodes.tensors.node[at])
        yield Finding(
            "peak-of-one-tensor",
            "info",
            {"node": nodes.name[node], **_module(nodes, node), "shape": shape_text(nodes.tensors, at)},
            (
                Evidence("peak_share", share, self.large_peak_share, "large_peak_share", "modelled"),
                Evidence("tensor_bytes", float(held.n_bytes[largest]), basis="modelled"),
                Evidence("activations_peak_bytes", held.peak_bytes, basis="modelled"),
            ),
            "Compute only the rows that are needed, or split the work on it into parts.",
        )


def _module(nodes: Nodes, node: int) -> dict[str, str | int]:
    return {"module": nodes.module[node]} if nodes.module[node] else {}


def _unaligned(nodes: Nodes, vector: int, min_tensor: int, min_row: int) -> Iterator[tuple[int, Rows]]:
    """(tensor, its rows) of those that are not aligned, the first for each memory, the largest first."""
    tensors = nodes.tensors
    sizes = [tensors.bytes_of(at) for at in range(len(tensors.shape))]
    seen: set[int] = set()
    for at in sorted((i for i, size in enumerate(sizes) if size >= min_tensor), key=lambda i: -sizes[i]):
        found = rows_of(tensors, at)
        if found is None or not found.is_side_by_side or found.row_bytes < min_row or found.alignment_bytes >= vector:
            continue
        storage = int(tensors.storage[at])
        if storage not in seen:
            seen.add(storage)
            yield at, found


# ---------------------------------------------------------------- metrics


def _sizes(nodes: Nodes, order: Ints, why: str) -> tuple[Metric, ...]:
    return (
        Metric("nodes_count", len(nodes)),
        Metric("operators_count", nodes.kind.count("op")),
        Metric("edges_count", len(nodes.source)),
        Metric("chain_nodes_count", None, why)
        if why
        else Metric("chain_nodes_count", depth(order, nodes.source, nodes.target)),
    )


def _memory(study: Study, why: str) -> Iterator[Metric]:
    held, facts = study.memory, study.nodes.facts
    if held is None:
        yield from (Metric(name, None, why) for name in ("weights_bytes", "inputs_bytes", "activations_peak_bytes"))
        return
    # A leaf module of torch.fx hides its weights, and tensors that are plain attributes are no declared weights.
    in_graph = held.bytes_of_kind(study.nodes, "parameter")
    yield Metric("weights_bytes", max(in_graph, facts.get("weights_bytes") or 0))
    yield Metric("inputs_bytes", held.bytes_of_kind(study.nodes, "input"))
    no_sizes = bool(len(held.n_bytes)) and bool(np.isnan(held.n_bytes[~held.of_caller]).all())
    if not study.nodes.tensors.shape or (no_sizes and held.unknown_count):
        yield Metric("activations_peak_bytes", None, "the sizes of tensors are not known")
        return
    yield Metric("activations_peak_bytes", held.peak_bytes)
    if held.unknown_count:
        yield Metric("tensors_of_unknown_size_count", held.unknown_count)
    yield from _measured_peaks(held, study.nodes)


def _measured_peaks(held: Memory, nodes: Nodes) -> Iterator[Metric]:
    why = nodes.facts.get("timed_reason") or "memory is measured on GPUs only"
    for name in ("graph_peak_bytes", "model_peak_bytes"):
        value = nodes.facts.get(name)
        yield Metric(f"measured_{name}", value, "" if value is not None else why)
    measured = nodes.facts.get("graph_peak_bytes")
    if measured is not None and held.peak_bytes:
        yield Metric("peak_difference_share", measured / held.peak_bytes - 1)


def _times(study: Study) -> Iterator[Metric]:
    nodes, facts = study.nodes, study.nodes.facts
    why = facts.get("timed_reason") or "the nodes were not timed"
    timed = bool(np.isfinite(nodes.latency_ns).any())
    yield Metric("nodes_latency_ns", float(np.nansum(nodes.latency_ns)) if timed else None, "" if timed else why)
    for name in ("forward_ns", "floor_ns"):
        value = facts.get(name)
        yield Metric(name, value, "" if value is not None else why)
    if np.isfinite(nodes.host_ns).any():
        yield Metric("nodes_host_ns", float(np.nansum(nodes.host_ns)))


def _joined(study: Study) -> Iterator[Metric]:
    if study.joined.why_none:
        yield Metric("joined_time_share", None, study.joined.why_none)
    else:
        yield Metric("joined_time_share", study.joined_share)
