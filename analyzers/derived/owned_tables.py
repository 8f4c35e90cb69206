"""Tables of the analyzer ``ownership``: kernel time by module, operator, line and kernel, and one tree of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spikeprof.analyzers.derived.groups import first_of_groups, group_codes
from spikeprof.analyzers.derived.intervals import Bools, Integers, Ints, ints
from spikeprof.analyzers.derived.module_tree import ModuleTree
from spikeprof.analyzers.derived.owned import Owned
from spikeprof.profiler.trace import Trace

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Study:
    """What all tables are made from. ``group`` is the folded module of each pair, -1 = not known."""

    found: Owned
    tree: ModuleTree
    module: Ints  # of each pair
    group: Ints
    op: Ints
    whole_ns: int

    @classmethod
    def of(cls, found: Owned, tree: ModuleTree) -> Study:
        """Look up what each pair of origin and kernel belongs to."""
        module = found.of_pairs(found.module)
        group = np.append(tree.group_of, -1)[module] if len(tree.group_of) else np.full(len(module), -1, np.int64)
        return cls(found, tree, module, group, found.of_pairs(found.op), int(found.length.sum()))

    def share(self, ns: Iterable[int]) -> list[float]:
        """Shares of all kernel time."""
        return [value / self.whole_ns if self.whole_ns else 0.0 for value in ns]

    def labels(self, groups: Integers) -> list[str]:
        """What folded modules are called; empty where not known."""
        return [self.tree.groups[g].label if g >= 0 else "" for g in groups.tolist()]

    def ops(self, codes: Integers) -> list[str]:
        """Names of operators; empty where not known."""
        return [self.found.ops[c] if c >= 0 else "" for c in codes.tolist()]

    def largest(self, groups: Ints, count: int, values: Ints) -> Ints:
        """Of each group of pairs, the value that most of its time has. -1 for an empty group."""
        pairs, pairs_count = group_codes(groups, values)
        total = ints(np.bincount(pairs, self.found.pairs.total, minlength=pairs_count))
        first = first_of_groups(pairs, pairs_count)
        out = np.full(count, -1, np.int64)
        order = np.argsort(total, kind="stable")  # the last to be written is the largest
        out[groups[first[order]]] = values[first[order]]
        return out


def by_module(study: Study, most: int) -> Columns:
    """Folded modules as a tree, those with most time below them; parents before children, the largest first."""
    groups, tree, pairs = study.tree.groups, study.tree, study.found.pairs
    inside = study.module >= 0
    count = len(tree.group_of)
    own = ints(np.bincount(study.module[inside], pairs.total[inside], minlength=count))
    launches = ints(np.bincount(study.module[inside], pairs.launches[inside], minlength=count))
    exclusive, inclusive = tree.by_group(own), tree.by_group(tree.with_ancestors(own))
    launched = tree.by_group(tree.with_ancestors(launches))
    order = _tree_order([g.parent for g in groups], inclusive, most)
    return {
        "module": [groups[i].label for i in order],
        "name": [groups[i].name for i in order],
        "class": [groups[i].class_name for i in order],
        "depth": [groups[i].depth for i in order],
        "modules_count": [len(groups[i].members) for i in order],
        "launches_count": launched[order].tolist(),
        "inclusive_ns": inclusive[order].tolist(),
        "inclusive_share": study.share(inclusive[order].tolist()),
        "exclusive_ns": exclusive[order].tolist(),
        "exclusive_share": study.share(exclusive[order].tolist()),
    }


def _tree_order(parents: Sequence[int], size: Ints, most: int) -> list[int]:
    """The largest nodes of a tree, depth first. A parent is never smaller than its children, and comes before them."""
    kept = sorted(range(len(parents)), key=lambda i: (-int(size[i]), i))[:most]
    children: dict[int, list[int]] = {}
    for i in kept:
        if size[i] > 0:
            children.setdefault(parents[i], []).append(i)
    order: list[int] = []
    waiting = children.get(-1, [])[::-1]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += children.get(node, [])[::-1]
    return order


def by_operator(study: Study, most: int) -> Columns:
    """Operators by time, whatever their shapes."""
    pairs = study.found.pairs
    rows = np.flatnonzero(study.op >= 0)
    count = len(study.found.ops)
    total = ints(np.bincount(study.op[rows], pairs.total[rows], minlength=count))
    launches = ints(np.bincount(study.op[rows], pairs.launches[rows], minlength=count))
    kinds = ints(np.bincount(_distinct(study.op[rows], pairs.name[rows]), minlength=count))
    largest = study.largest(study.op + 1, count + 1, study.group)[1:] if len(study.op) else ints([])
    order = _most(total, most)
    return {
        "op": [study.found.ops[i] for i in order],
        "launches_count": launches[order].tolist(),
        "distinct_kernels_count": kinds[order].tolist(),
        "total_ns": total[order].tolist(),
        "gpu_time_share": study.share(total[order].tolist()),
        "module": study.labels(largest[order]),
    }


def _distinct(keys: Ints, values: Ints) -> Ints:
    """The key of each distinct combination."""
    codes, count = group_codes(keys, values)
    return keys[first_of_groups(codes, count)]


def _most(total: Ints, most: int) -> Ints:
    """The rows with most time, the largest first; those without any are left out."""
    order = np.argsort(-total, kind="stable")[:most]
    return order[total[order] > 0]


def by_inputs(study: Study, most: int) -> Columns:
    """Operators with the shapes of their inputs, where they are known."""
    found, pairs = study.found, study.found.pairs
    texts: dict[tuple[str, str], int] = {}
    given = ints([texts.setdefault(pair, len(texts)) for pair in zip(found.shapes, found.dtypes, strict=True)])
    bare = texts.get(("", ""), -1)
    of_pair = found.of_pairs(np.where(given == bare, -1, given))
    rows = np.flatnonzero((study.op >= 0) & (of_pair >= 0))
    codes, count = group_codes(study.op[rows], of_pair[rows])
    first = rows[first_of_groups(codes, count)]
    total = ints(np.bincount(codes, pairs.total[rows], minlength=count))
    launches = ints(np.bincount(codes, pairs.launches[rows], minlength=count))
    order = _most(total, most)
    keys = list(texts)
    return {
        "op": study.ops(study.op[first[order]]),
        "input_shapes": [keys[i][0] for i in of_pair[first[order]].tolist()],
        "input_dtypes": [keys[i][1] for i in of_pair[first[order]].tolist()],
        "launches_count": launches[order].tolist(),
        "total_ns": total[order].tolist(),
        "gpu_time_share": study.share(total[order].tolist()),
    }


def by_line(study: Study, trace: Trace, most: int) -> Columns:
    """Lines of the program that launched most kernel time, over all processes."""
    if "stacks" not in trace:
        return {name: [] for name in ("file", "line", "function", "launches_count", "total_ns", "gpu_time_share")}
    stacks = trace.table("stacks").select(["file", "line", "function"]).to_pydict()
    places: dict[tuple[str, int, str], int] = {}
    line = ints([places.setdefault(row, len(places)) for row in zip(*stacks.values(), strict=True)])
    pairs = study.found.pairs
    stack = study.found.of_pairs(study.found.stack)
    rows = np.flatnonzero(stack >= 0)
    total = ints(np.bincount(line[stack[rows]], pairs.total[rows], minlength=len(places)))
    launches = ints(np.bincount(line[stack[rows]], pairs.launches[rows], minlength=len(places)))
    order = _most(total, most).tolist()
    keys = list(places)
    return {
        "file": [keys[i][0] for i in order],
        "line": [keys[i][1] for i in order],
        "function": [keys[i][2] for i in order],
        "launches_count": launches[order].tolist(),
        "total_ns": total[order].tolist(),
        "gpu_time_share": study.share(total[order].tolist()),
    }


def by_kernel(study: Study, most: int) -> Columns:
    """Kernels by time, each with the folded module and operator that most of its time belongs to."""
    pairs = study.found.pairs
    count = len(study.found.names)
    total = ints(np.bincount(pairs.name, pairs.total, minlength=count))
    owner, _ = group_codes(study.group + 1, study.op + 1)
    cell, cells = group_codes(pairs.name, owner)
    time = ints(np.bincount(cell, pairs.total, minlength=cells))
    first = first_of_groups(cell, cells)
    best = np.full(count, -1, np.int64)
    order = np.argsort(time, kind="stable")
    best[pairs.name[first[order]]] = order  # of each name the cell with most time
    known: Bools = (study.group[first] >= 0) | (study.op[first] >= 0)
    several = ints(np.bincount(pairs.name[first[known]], minlength=count))
    top = _most(total, most)
    chosen = first[best[top]]
    part = time[best[top]] / np.maximum(total[top], 1)
    return {
        "kernel": [study.found.names[i] for i in top],
        "module": study.labels(study.group[chosen]),
        "op": study.ops(study.op[chosen]),
        "owner_share": part.tolist(),
        "owners_count": several[top].tolist(),
        "total_ns": total[top].tolist(),
    }
