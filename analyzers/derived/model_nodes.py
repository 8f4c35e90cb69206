"""A model's static graph as arrays: its nodes, the edges between them, and the tensors that they give.

The tables may come from elsewhere: rows that name no node are left out, sizes that cannot be read are unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.derived.cells import json_list
from spikeprof.analyzers.derived.intervals import Ints
from spikeprof.profiler.trace import Trace

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tensors:
    """One element per tensor; ``storage`` numbers the memory it lies in, from 0. NaN and None: unknown."""

    node: Ints
    storage: Ints
    storage_bytes: Floats
    element_bytes: Ints
    offset: Floats  # elements
    dtype: list[str]
    shape: list[list[Any] | None]
    strides: list[list[int] | None]  # elements

    def bytes_of(self, at: int) -> float:
        """What its elements take, without gaps; NaN where a size is not known."""
        return tensor_bytes(self.shape[at], int(self.element_bytes[at]))


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of one graph, as listed, with its edges by node number; ``missing`` says what was not collected."""

    ids: Ints
    name: list[str]
    kind: list[str]
    op: list[str]
    module: list[str]
    latency_ns: Floats
    host_ns: Floats
    source: Ints
    target: Ints
    tensors: Tensors
    facts: dict[str, Any]  # the row of model_graphs; empty where there is none
    missing: str = ""

    def __len__(self) -> int:
        return len(self.name)

    @property
    def first_tensor(self) -> dict[int, int]:
        """Each node's first tensor, by node."""
        found: dict[int, int] = {}
        for at, node in enumerate(self.tensors.node.tolist()):
            found.setdefault(node, at)
        return found


def storages(nodes: Nodes) -> tuple[list[set[int]], list[set[int]]]:
    """(memory that what each node gives lies in, memory that what it takes lies in), by node."""
    gives: list[set[int]] = [set() for _ in nodes.name]
    for node, storage in zip(nodes.tensors.node.tolist(), nodes.tensors.storage.tolist(), strict=True):
        gives[node].add(storage)
    takes: list[set[int]] = [set() for _ in nodes.name]
    for source, target in zip(nodes.source.tolist(), nodes.target.tolist(), strict=True):
        takes[target] |= gives[source]
    return gives, takes


def tensor_bytes(shape: list[Any] | None, element_bytes: int) -> float:
    """Elements times their size; NaN where a size is not known."""
    if shape is None or element_bytes <= 0 or not all(type(n) is int for n in shape):
        return float("nan")
    return float(np.prod([float(n) for n in shape])) * element_bytes


def model_nodes(trace: Trace) -> Nodes:
    """The first graph of a trace that has the table ``model_nodes``."""
    model = trace.column("model_nodes", "model_id")
    mine = np.flatnonzero(model == model[0]) if len(model) else np.empty(0, np.int64)
    ids = trace.column("model_nodes", "node_id")[mine]
    number = {one: at for at, one in enumerate(ids.tolist())}
    facts: dict[str, Any] = {}
    if "model_graphs" in trace and len(mine):
        rows = trace.table("model_graphs").to_pylist()
        facts = next((row for row in rows if row["model_id"] == model[0]), {})
    lacking = [name for name in ("model_edges", "model_tensors") if name not in trace]
    source, target = _edges(trace, number)
    table = trace.table("model_nodes").take(mine)
    return Nodes(
        ids,
        table.column("name").to_pylist(),
        table.column("kind").to_pylist(),
        table.column("op").to_pylist(),
        table.column("module").to_pylist(),
        _floats(table.column("latency_ns")),
        _floats(table.column("host_ns")),
        source,
        target,
        _tensors(trace, number),
        facts,
        " and ".join(f"the table {name!r}" for name in lacking) + " was not collected" if lacking else "",
    )


def _floats(column: Any) -> Floats:
    return np.array([float("nan") if value is None else value for value in column.to_pylist()], np.float64)


def _numbers(ids: npt.NDArray[Any], number: dict[int, int]) -> Ints:
    return np.array([number.get(one, -1) for one in ids.tolist()], np.int64)


def _edges(trace: Trace, number: dict[int, int]) -> tuple[Ints, Ints]:
    if "model_edges" not in trace:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    ends = [_numbers(trace.column("model_edges", name), number) for name in ("src_node_id", "dst_node_id")]
    known = (ends[0] >= 0) & (ends[1] >= 0)
    return ends[0][known], ends[1][known]


def _tensors(trace: Trace, number: dict[int, int]) -> Tensors:
    if "model_tensors" not in trace:
        none = np.empty(0, np.int64)
        return Tensors(none, none, np.empty(0), none, np.empty(0), [], [], [])
    table = trace.table("model_tensors")
    node = _numbers(trace.column("model_tensors", "node_id"), number)
    kept = np.flatnonzero(node >= 0)
    table = table.take(kept)
    _, storage = np.unique(table.column("storage_id").to_numpy(), return_inverse=True)
    return Tensors(
        node[kept],
        storage.astype(np.int64),
        _floats(table.column("storage_bytes")),
        table.column("element_bytes").to_numpy().astype(np.int64),
        _floats(table.column("offset_count")),
        table.column("dtype").to_pylist(),
        [json_list(text) for text in table.column("shape").to_pylist()],
        [_integers(text) for text in table.column("strides").to_pylist()],
    )


def _integers(text: str) -> list[int] | None:
    found = json_list(text)
    return found if found is not None and all(type(n) is int for n in found) else None
