"""Modules folded into a tree that a person can read: layers.0.mlp to layers.15.mlp are one row, ``layers.*.mlp``.

Modules are alike when their parents are, they have one class, and their names differ in numbers only. Those of several
processes are folded together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from spikeprof.analyzers.derived.intervals import Ints, ints
from spikeprof.profiler.trace import Trace

#: Deeper modules count as part of their ancestor at this depth: a table whose parents go in circles ends there.
MOST_DEPTH = 64

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


@dataclass(slots=True)
class Group:
    """Modules that are alike. ``parent`` is a number of a group, -1 for a root; groups come before their children."""

    parent: int
    root: int  # the group that its ancestors end in
    depth: int
    class_name: str
    path: str  # with * for numbers in which the members differ; empty for a root
    label: str = ""  # unique: the path, a root's class, or both where there are several models
    name: str = ""  # the path from its parent on
    members: list[int] = field(default_factory=list)  # rows of modules


class ModuleTree(NamedTuple):
    """Groups in the order parents first, and the group of each row of ``modules``."""

    groups: list[Group]
    group_of: Ints
    parent_of: Ints  # of each row of modules, -1 for a root
    depth_of: Ints
    paths: list[str]
    ranks: Ints

    def with_ancestors(self, exclusive: Ints) -> Ints:
        """What each module and all below it have together, from what each has by itself."""
        whole = exclusive.copy()
        for depth in range(int(self.depth_of.max(initial=0)), 0, -1):
            here = np.flatnonzero(self.depth_of == depth)
            np.add.at(whole, self.parent_of[here], whole[here])
        return whole

    def by_group(self, values: Ints) -> Ints:
        """Values of modules added up by group."""
        return ints(np.bincount(self.group_of, values, minlength=len(self.groups)))


def module_tree(trace: Trace) -> ModuleTree:
    """The tree of the table ``modules``; empty where it is absent."""
    if "modules" not in trace:
        return ModuleTree([], ints([]), ints([]), ints([]), [], ints([]))
    paths = [path or "" for path in trace.table("modules").column("path").to_pylist()]  # of any maker, nulls too
    classes = [name or "" for name in trace.table("modules").column("class_name").to_pylist()]
    ranks = trace.column("modules", "rank").tolist()
    parents, depths = _parents(ints(trace.column("modules", "parent_id")))
    children = np.bincount(parents[parents >= 0], minlength=len(paths))
    order = np.argsort(depths, kind="stable").tolist()
    seen: dict[tuple[int, str, str, int], int] = {}
    groups: list[Group] = []
    group_of = np.full(len(paths), -1, np.int64)
    roots: dict[tuple[int, str], int] = defaultdict(int)
    siblings: dict[tuple[int, str], int] = defaultdict(int)
    for row in order:
        up, parent = int(parents[row]), int(group_of[parents[row]]) if parents[row] >= 0 else -1
        path, class_name = paths[row], classes[row]
        inside = f"{paths[up]}." if up >= 0 and paths[up] else ""
        name = path.removeprefix(inside)
        folded = _folded(name, class_name)
        number = 0
        if up < 0 and children[row]:  # two models of one class are two; functions made on the fly are one
            roots[ranks[row], class_name] += 1
            number = roots[ranks[row], class_name]
        elif folded.endswith("_*") and not children[row]:  # numbered by class: the first, second, … leaf of its parent
            siblings[up, folded] += 1
            number = siblings[up, folded]
        key = (parent, folded, class_name, number)
        if key not in seen:
            seen[key] = len(groups)
            root = groups[parent].root if parent >= 0 else len(groups)
            above = groups[parent].path if parent >= 0 and name != path else ""
            groups.append(Group(parent, root, int(depths[row]), class_name, f"{above}.{folded}" if above else folded))
        group_of[row] = seen[key]
        groups[seen[key]].members.append(row)
    _name(groups, paths)
    return ModuleTree(groups, group_of, parents, depths, paths, ints(ranks))


def _parents(parents: Ints) -> tuple[Ints, Ints]:
    """Sound parents and depths: who is among its own ancestors is a root."""
    rows = np.arange(len(parents))
    parents = np.where((parents >= 0) & (parents < len(parents)) & (parents != rows), parents, -1)
    depth, up = np.zeros(len(parents), np.int64), parents.copy()
    for _ in range(MOST_DEPTH):
        inside = np.flatnonzero(up >= 0)
        if not len(inside):
            return parents, depth
        depth[inside] += 1
        up[inside] = parents[up[inside]]
    # Those that never came to a root go in circles, or are deeper than any model.
    parents[up >= 0] = -1
    depth[up >= 0] = 0
    return _parents(parents)


def _folded(path: str, class_name: str) -> str:
    """The path with ``*`` for numbers: those of lists, and those that torch.profiler gives the modules of a class."""
    folded = _NUMBER.sub("*", path)
    head, dot, last = folded.rpartition(".")
    named = last.startswith(f"{class_name}_") and last[len(class_name) + 1 :].isdecimal()
    return f"{head}{dot}{class_name}_*" if named else folded


def _name(groups: list[Group], paths: Sequence[str]) -> None:
    """A group of one path is called by it, others by the folded one; told apart where two would read alike."""
    models = len({g.root for g in groups if g.parent >= 0}) > 1
    taken: dict[str, int] = {}
    for group in groups:
        members = {paths[row] for row in group.members}
        group.path = members.pop() if len(members) == 1 else group.path
        if group.parent < 0:
            label = group.name = group.path or group.class_name
        else:
            group.name = group.path.removeprefix(f"{groups[group.parent].path}.")
            label = f"{groups[group.root].label}: {group.path}" if models else group.path
        taken[label] = taken.get(label, 0) + 1
        number = f" #{taken[label]}" if taken[label] > 1 else ""
        group.label, group.name = label + number, group.name + number
