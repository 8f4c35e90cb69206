"""In which order the nodes of a graph can run, and a cycle where they cannot. No recursion: depth has no limit."""

from __future__ import annotations

import heapq

import numpy as np

from spikeprof.analyzers.derived.intervals import Ints


def topological(count: int, source: Ints, target: Ints) -> tuple[Ints, list[int]]:
    """The order of the nodes 0 to ``count`` - 1, and a cycle, empty where there is none.

    Kahn's algorithm; among nodes that could run, the first listed goes first, so that a list in a possible order
    keeps it. With a cycle the order holds the nodes that do not wait for one. The cycle is given along its edges,
    beginning with the node listed first.
    """
    takers: list[list[int]] = [[] for _ in range(count)]
    waits = np.bincount(target, minlength=count).tolist() if count else []
    for one, other in zip(source.tolist(), target.tolist(), strict=True):
        takers[one].append(other)
    ready = [node for node in range(count) if not waits[node]]  # sorted: a heap
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for other in takers[node]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, other)
    return np.array(order, np.int64), [] if len(order) == count else _cycle(source, target, {*order})


def _cycle(source: Ints, target: Ints, ordered: set[int]) -> list[int]:
    """Go back from a node that was never ready: one that it waits for is not ready either, and at last one returns."""
    waits_for: dict[int, int] = {}
    for one, other in zip(source.tolist(), target.tolist(), strict=True):
        if one not in ordered and other not in ordered:
            waits_for.setdefault(other, one)
    node = min(waits_for)
    seen: dict[int, int] = {}
    path: list[int] = []
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = waits_for[node]
    cycle = path[seen[node] :][::-1]
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]


def depth(order: Ints, source: Ints, target: Ints) -> int:
    """How many nodes the longest chain of nodes has that wait for one another."""
    levels = [1] * len(order)
    takers: dict[int, list[int]] = {}
    for one, other in zip(source.tolist(), target.tolist(), strict=True):
        takers.setdefault(one, []).append(other)
    for node in order.tolist():
        for other in takers.get(node, ()):
            levels[other] = max(levels[other], levels[node] + 1)
    return max(levels, default=0)
