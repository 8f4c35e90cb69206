"""When the memory of a graph's tensors is taken and given back, and how much is held at once.

Memory is taken by the first node that gives a tensor in it and given back after the last node that takes one: views
and in-place results lie in memory that was there before. While a node runs, what it takes and what it gives are both
held. Weights and inputs are the caller's and held throughout; outputs are held to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spikeprof.analyzers.derived.intervals import Bools, Ints
from spikeprof.analyzers.derived.model_nodes import Floats, Nodes


@dataclass(frozen=True, slots=True)
class Memory:
    """One element per storage: positions in the order of nodes, first and last in which it is held.

    ``owner`` is the tensor that it was taken for. ``of_caller``: that of a weight or input. ``live_bytes``: all others
    held, by position.
    """

    owner: Ints
    taken: Ints
    last: Ints
    n_bytes: Floats
    of_caller: Bools
    live_bytes: Floats

    @property
    def peak_at(self) -> int:
        """The first position at which most is held; -1 without nodes."""
        return int(self.live_bytes.argmax()) if len(self.live_bytes) else -1

    @property
    def peak_bytes(self) -> int:
        """What is held there."""
        return int(self.live_bytes.max()) if len(self.live_bytes) else 0

    @property
    def unknown_count(self) -> int:
        """Storages of nodes whose size is not known: the peak is without them."""
        return int((np.isnan(self.n_bytes) & ~self.of_caller).sum())

    def held_at(self, position: int) -> Ints:
        """Storages of nodes that are held at a position, the largest first."""
        held = np.flatnonzero(
            (self.taken <= position) & (self.last >= position) & ~self.of_caller & np.isfinite(self.n_bytes)
        )
        return held[np.argsort(-self.n_bytes[held], kind="stable")]

    def bytes_of_kind(self, nodes: Nodes, kind: str) -> int:
        """Bytes of the storages whose owner is a node of this kind."""
        mine = [i for i, t in enumerate(self.owner.tolist()) if nodes.kind[int(nodes.tensors.node[t])] == kind]
        return int(np.nansum(self.n_bytes[mine]))


def memory(nodes: Nodes, order: Ints) -> Memory:
    """The lifetimes that an order of all nodes implies."""
    count, tensors = len(nodes), nodes.tensors
    position = np.empty(count, np.int64)
    position[order] = np.arange(count)
    number = int(tensors.storage.max()) + 1 if len(tensors.storage) else 0
    at = position[tensors.node]
    kinds = np.array(nodes.kind, object)
    caller_tensor = np.isin(kinds[tensors.node].astype(str), ("parameter", "input"))
    of_caller = np.zeros(number, bool)
    np.logical_or.at(of_caller, tensors.storage, caller_tensor)
    # A weight may be listed after the first tensor in its memory: it is the owner all the same.
    ranked = np.lexsort((at, ~caller_tensor, tensors.storage))
    _, first = np.unique(tensors.storage[ranked], return_index=True)
    owner = ranked[first]
    n_bytes = np.full(number, -1.0)
    np.fmax.at(n_bytes, tensors.storage, tensors.storage_bytes)
    n_bytes[n_bytes < 0] = np.nan
    taken = np.full(number, count, np.int64)
    np.minimum.at(taken, tensors.storage, at)
    last = taken.copy()
    storage, user = _uses(nodes)
    np.maximum.at(last, storage, np.where(kinds[user].astype(str) == "output", count - 1, position[user]))
    if "output" not in nodes.kind:  # what nobody takes is what the graph is for
        taken_by_some = np.zeros(count, bool)
        taken_by_some[nodes.source] = True
        last[tensors.storage[~taken_by_some[tensors.node]]] = count - 1
    mine = ~of_caller & np.isfinite(n_bytes)
    change = np.zeros(count + 1)
    np.add.at(change, taken[mine], n_bytes[mine])
    np.add.at(change, last[mine] + 1, -n_bytes[mine])
    return Memory(owner, taken, last, n_bytes, of_caller, np.cumsum(change)[:count])


def _uses(nodes: Nodes) -> tuple[Ints, Ints]:
    """(storage, node that takes it): one pair for each edge and each tensor of the node it comes from."""
    tensors = nodes.tensors
    by_node = np.argsort(tensors.node, kind="stable")
    number = np.bincount(tensors.node, minlength=len(nodes))
    begin = np.cumsum(number) - number
    per_edge = number[nodes.source]
    first = np.cumsum(per_edge) - per_edge
    within = np.arange(int(per_edge.sum())) - np.repeat(first, per_edge)
    tensor = by_node[np.repeat(begin[nodes.source], per_edge) + within]
    return tensors.storage[tensor], np.repeat(nodes.target, per_edge)
