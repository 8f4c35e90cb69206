"""From a graph that was read to the tables ``model_graphs``, ``model_nodes``, ``model_tensors``, ``model_edges``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from spikeprof.profiler.collectors.model_graph.collect import NOT_ASKED, Read
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote

Rows = list[dict[str, Any]]


def tables(read: Read) -> dict[str, pa.Table]:
    """The tables of one graph, by name."""
    made: dict[str, Rows] = {
        "model_graphs": [_graph(read)],
        "model_nodes": list(_nodes(read)),
        "model_tensors": list(_tensors(read)),
        "model_edges": [
            {"src_node_id": source, "dst_node_id": at, "position": position}
            for at, node in enumerate(read.nodes)
            for position, source in enumerate(node["inputs"])
        ],
    }
    return {name: TABLES[name].of_rows(rows) for name, rows in made.items()}


def note_of(read: Read) -> CollectorNote:
    """What the manifest says of a graph: degraded where export refused, or where nodes could not be timed."""
    problems = [*_refused(read)]
    if read.not_timed and read.not_timed != NOT_ASKED and read.via != "json":
        problems.append(f"not timed: {read.not_timed}")
    return CollectorNote("degraded" if problems else "ok", "; ".join(problems), records_count=len(read.nodes))


def remark(read: Read) -> str:
    """What limits the graph, one line; empty where nothing does."""
    return "; ".join([*_refused(read), *read.facts.get("remarks", [])])


def _refused(read: Read) -> list[str]:
    return [f"torch.{way} refused: {why}" for way, why in read.facts.get("refused", {}).items()]


def _graph(read: Read) -> dict[str, Any]:
    timing, facts = read.timing, read.facts
    return {
        "model_id": 0,
        "name": read.name,
        "model": facts.get("model", ""),
        "via": read.via,
        "remark": remark(read),
        "device": facts.get("device", ""),
        "device_name": facts.get("device_name", ""),
        "torch_version": facts.get("torch", ""),
        "timed_with": timing.get("with", ""),
        "timed_reason": read.not_timed,
        "runs_count": read.runs_count,
        "floor_ns": timing.get("floor"),
        "forward_ns": timing.get("forward"),
        "weights_bytes": facts.get("weights_bytes"),
        "graph_peak_bytes": timing.get("graph_peak"),
        "model_peak_bytes": timing.get("model_peak"),
    }


def _nodes(read: Read) -> Iterable[dict[str, Any]]:
    # JSON knows no keys but text.
    times = {name: read.timing.get(name, {}) for name in ("latency", "low", "host")}
    for at, node in enumerate(read.nodes):
        yield {
            "node_id": at,
            "model_id": 0,
            **{name: node[name] for name in ("name", "kind", "op", "module", "class_name", "device")},
            "latency_ns": times["latency"].get(str(at)),
            "latency_low_ns": times["low"].get(str(at)),
            "host_ns": times["host"].get(str(at)),
        }


def _tensors(read: Read) -> Iterable[dict[str, Any]]:
    number = 0
    for at, node in enumerate(read.nodes):
        for index, tensor in enumerate(node["tensors"]):
            strides = tensor["strides"]
            yield {
                "tensor_id": number,
                "node_id": at,
                "index": index,
                "storage_id": tensor["storage"],
                "shape": json.dumps(tensor["shape"]),
                "strides": "" if strides is None else json.dumps(strides),
                "offset_count": tensor["offset"],
                "dtype": tensor["dtype"],
                "element_bytes": tensor["element_bytes"],
                "storage_bytes": tensor["storage_bytes"],
            }
            number += 1
