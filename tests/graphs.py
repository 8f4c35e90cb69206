"""Small graphs as traces: nodes as plain dicts, with what the tables need filled in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tiny

from spikeprof.profiler.trace import Trace

_UNKNOWN = ("floor_ns", "forward_ns", "weights_bytes", "graph_peak_bytes", "model_peak_bytes")


def node(name: str, *inputs: str, shape: Sequence[int] | None = None, **more: Any) -> dict[str, Any]:
    """An operator that takes ``inputs`` and gives a contiguous float16 tensor; ``storage``: a node it is a view of."""
    return {"name": name, "inputs": inputs, "shape": shape, **more}


def tables(nodes: Iterable[Mapping[str, Any]], **facts: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows of the four tables about graphs."""
    nodes = list(nodes)
    number = {one["name"]: at for at, one in enumerate(nodes)}
    tensors = []
    for at, one in enumerate(nodes):
        shape = one.get("shape")
        if shape is None:
            continue
        size = one.get("element_bytes", 2)
        strides, elements = [], 1
        for n in reversed(shape):
            strides.append(elements)
            elements *= n
        tensors.append(
            {
                "node_id": at,
                "storage_id": number[one.get("storage", one["name"])],
                "shape": json.dumps(list(shape)),
                "strides": json.dumps(one.get("strides", strides[::-1])),
                "offset_count": one.get("offset", 0),
                "dtype": "float16",
                "element_bytes": size,
                "storage_bytes": one.get("bytes", elements * size),
            }
        )
    return {
        "model_graphs": [{"name": "m:f", "via": "export", **dict.fromkeys(_UNKNOWN), **facts}],
        "model_nodes": [
            {
                "name": one["name"],
                "kind": one.get("kind", "op"),
                "op": one.get("op", "aten::add"),
                "module": one.get("module", ""),
                "latency_ns": one.get("latency"),
                "latency_low_ns": one.get("latency"),
                "host_ns": one.get("host"),
            }
            for one in nodes
        ],
        "model_tensors": tensors,
        "model_edges": [
            {"src_node_id": number[source], "dst_node_id": at, "position": position}
            for at, one in enumerate(nodes)
            for position, source in enumerate(one["inputs"])
        ],
    }


def trace(nodes: Iterable[Mapping[str, Any]], facts: Mapping[str, Any] | None = None, **more: Any) -> Trace:
    """A trace of a graph, and whatever else it is to hold."""
    return tiny.trace(**tables(nodes, **(facts or {})), **more)


def kernels(*owned: tuple[str, str, str], ns: int = 1000) -> dict[str, list[dict[str, Any]]]:
    """Kernels one after the other, each (name, module path, operator), with their owners.

    A number behind ``@`` is the operator's line (a negative one: of another file), one behind ``#`` its input's size:
    ``aten::mm@2#64``.
    """
    paths = list(dict.fromkeys(path for _, path, _ in owned))
    origins = list(dict.fromkeys((path, op) for _, path, op in owned))
    lines = [int(op.partition("#")[0].partition("@")[2] or 0) for _, op in origins]
    return {
        "kernels": [
            {"name": name, "start_ns": at * 2 * ns, "end_ns": at * 2 * ns + ns} for at, (name, _, _) in enumerate(owned)
        ],
        "modules": [{"path": path, "parent_id": -1} for path in paths],
        "stacks": [{"file": "model.py" if line >= 0 else "other.py", "line": abs(line)} for line in lines],
        "origins": [
            {
                "module_id": paths.index(path),
                "stack_id": at if lines[at] else -1,
                "op": op.partition("#")[0].partition("@")[0],
                "input_shapes": f"[[{op.partition('#')[2] or 8}]]",
            }
            for at, (path, op) in enumerate(origins)
        ],
        "kernel_owners": [
            {"kernel_id": at, "origin_id": origins.index((path, op))} for at, (_, path, op) in enumerate(owned)
        ],
    }
