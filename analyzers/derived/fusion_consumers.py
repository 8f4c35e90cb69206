"""Whether another kernel needs what lies between the kernels of a chain, by the static graph of the model.

Kernels are joined to the graph's nodes by module and operator (``derived/graph_kernels.py``). What a kernel writes for
a later kernel of its own node is the node's own business; what it writes as the node's result is read by the nodes that
take it, through views of it, too. Those must be nodes of the chain's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spikeprof.analyzers.derived.fusion_chains import READERS, Chain
from spikeprof.analyzers.derived.graph_kernels import joined
from spikeprof.analyzers.derived.model_nodes import Nodes, model_nodes, storages
from spikeprof.profiler.trace import Trace

_ALONE, _OTHERS, _UNKNOWN = READERS
#: Operators that look at shapes and types, not at elements.
_CHECKS = ("_assert", "sym_")


def readers(trace: Trace, found: Sequence[Chain]) -> list[list[str]]:
    """Of each chain and each of its kernels but the last, one of ``READERS``.

    Wants the tables of a model's graph and those of kernel ownership.
    """
    nothing = [[_UNKNOWN] * (len(one.members) - 1) for one in found]
    if "model_nodes" not in trace or "model_edges" not in trace:
        return nothing
    nodes = model_nodes(trace)
    join = joined(trace, nodes)
    if join.why_none or not found:
        return nothing
    takers, looks = _takers(nodes), _looks(nodes)
    return [_of_chain(join.node[one.rows].tolist(), takers, looks) for one in found]


def _of_chain(of_kernel: list[int], takers: Mapping[int, list[int]], looks: set[int]) -> list[str]:
    """Of the results between the kernels, which are of these nodes."""
    inside, found = set(of_kernel), []
    for place, node in enumerate(of_kernel[:-1]):
        read_by = _readers(node, takers, looks)
        if node >= 0 and node in of_kernel[place + 1 :]:
            found.append(_ALONE)
        elif not read_by:
            found.append(_UNKNOWN)
        else:
            found.append(_ALONE if read_by <= inside else _OTHERS)
    return found


def _readers(node: int, takers: Mapping[int, list[int]], looks: set[int]) -> set[int]:
    """The nodes that read what a node gives; views of it are followed."""
    ahead, seen, found = list(takers.get(node, ())), set(), set()
    while ahead:
        one = ahead.pop()
        if one not in looks:
            found.add(one)
        elif one not in seen:
            seen.add(one)
            ahead += takers.get(one, ())
    return found


def _takers(nodes: Nodes) -> dict[int, list[int]]:
    """The nodes that take what each node gives, without those that torch.export adds to check its assumptions."""
    found: dict[int, list[int]] = {}
    for source, target in zip(nodes.source.tolist(), nodes.target.tolist(), strict=True):
        if not nodes.op[target].removeprefix("aten::").startswith(_CHECKS):
            found.setdefault(source, []).append(target)
    return found


def _looks(nodes: Nodes) -> set[int]:
    """The nodes that only look at memory of others: all that they give lies where what they take does."""
    gives, takes = storages(nodes)
    return {
        node
        for node, kind in enumerate(nodes.kind)
        if kind == "op"
        and not nodes.op[node].endswith("_")  # in place: a reader
        and gives[node] <= takes[node]
        and (gives[node] or nodes.op[node] == "getitem")
    }
