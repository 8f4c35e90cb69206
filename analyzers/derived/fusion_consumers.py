"""Whether another kernel needs what lies between the kernels of a chain, by the static graph of the model.

A kernel is looked up in the graph by its module and its operator. The graph may name an operator otherwise than the
run does: all products of matrices count as one operator, and so do all copies; in-place operators count as the others.
Who reads a result is who reads its memory: views of it lead further and count as no readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spikeprof.analyzers.derived.fusion_bytes import operators
from spikeprof.analyzers.derived.fusion_chains import Chain
from spikeprof.analyzers.derived.intervals import Ints
from spikeprof.analyzers.derived.kernel_families import is_view, of_operator
from spikeprof.profiler.trace import Trace

#: What was found: nobody else reads it, somebody does, or it could not be looked up.
READERS = ("chain_only", "others_too", "not_checked")

_TABLES = ("model_nodes", "model_tensors", "model_edges", "origins", "modules")

#: A node of the graph as a kernel can be told to be one: its module and its operator.
Key = tuple[str, str]


def readers(trace: Trace, found: Sequence[Chain], owners: Ints) -> list[str]:
    """Of each chain, one of ``READERS``. ``owners``: the row of ``origins`` of each row of ``kernels``, -1 = none."""
    if any(name not in trace for name in _TABLES) or not trace.table("model_nodes").num_rows:
        return ["not_checked"] * len(found)
    graph = _readers_by_key(trace)
    of_origin = _keys_of_origins(trace)
    return [_of_chain([of_origin[o] if o >= 0 else None for o in owners[one.rows].tolist()], graph) for one in found]


def _of_chain(keys: Sequence[Key | None], graph: dict[Key, list[set[Key]]]) -> str:
    """What holds for all nodes that the members can be; members that are told alike may be either of them."""
    inside, answer = {key for key in keys if key}, "chain_only"
    for key in keys[:-1]:
        nodes = graph.get(key, []) if key else []
        alone = [bool(of) and of <= inside for of in nodes]
        if not nodes or any(alone) != all(alone):
            answer = "not_checked"
        elif not any(alone):
            return "others_too"
    return answer


def _normal(module: str, operator: str) -> Key:
    work = of_operator(operator)
    if work.kind in ("gemm", "copy"):
        return module, work.kind
    return module, operator.rstrip("_")


def _keys_of_origins(trace: Trace) -> list[Key | None]:
    paths = dict(zip(*trace.table("modules").select(["module_id", "path"]).to_pydict().values(), strict=True))
    module = trace.table("origins").column("module_id").to_pylist()
    return [
        _normal(paths[m], name) if m in paths and name else None
        for m, name in zip(module, operators(trace), strict=True)
    ]


def _readers_by_key(trace: Trace) -> dict[Key, list[set[Key]]]:
    """For each key, the readers of what each of its nodes gives."""
    nodes = trace.table("model_nodes").select(["node_id", "model_id", "kind", "op", "module"]).to_pylist()
    key = {row["node_id"]: _normal(row["module"] or "", row["op"] or row["kind"] or "") for row in nodes}
    looks = {row["node_id"] for row in nodes if is_view(row["op"] or "")}
    model = {row["node_id"]: row["model_id"] for row in nodes}
    memory: dict[int, set[tuple[int, int]]] = {}
    for node, storage in _pairs(trace, "model_tensors", ("node_id", "storage_id")):
        memory.setdefault(node, set()).add((model.get(node, -1), storage))
    reading: dict[tuple[int, int], set[int]] = {}
    for source, reader in _pairs(trace, "model_edges", ("src_node_id", "dst_node_id")):
        if reader not in looks:
            for place in memory.get(source, ()):
                reading.setdefault(place, set()).add(reader)
    found: dict[Key, list[set[Key]]] = {}
    for row in nodes:
        node = row["node_id"]
        if row["kind"] == "op" and node not in looks:
            who = {reader for place in memory.get(node, ()) for reader in reading.get(place, ())} - {node}
            found.setdefault(key[node], []).append({key[reader] for reader in who if reader in key})
    return found


def _pairs(trace: Trace, table: str, columns: tuple[str, str]) -> Iterable[tuple[int, int]]:
    return zip(*(trace.column(table, name).tolist() for name in columns), strict=True)
