"""One tree of all kernel time: modules, in them operators, in them kernels; cut down to what can be drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from spikeprof.analyzers.derived.groups import first_of_groups, group_codes
from spikeprof.analyzers.derived.intervals import ints
from spikeprof.analyzers.derived.owned_tables import Columns, Study

#: What a cell stands for. ``unknown``: of what is in it, no module or operator is known; ``others``: too small to draw.
KINDS = ("all", "module", "op", "kernel", "unknown", "others")


@dataclass(slots=True)
class _Cell:
    kind: str
    label: str
    full: str
    total: int = 0
    children: list[_Cell] = field(default_factory=list)


def icicle(study: Study, min_share: float, most: int) -> Columns:
    """Cells, parents before children and the largest child first. The children of a cell add up to it exactly.

    Cells smaller than ``min_share`` of all kernel time, or beyond the ``most`` largest, are one cell in their parent.
    """
    root = _Cell("all", "", "")
    cells = [_Cell("module", g.name, g.label) for g in study.tree.groups]
    for cell, group in zip(cells, study.tree.groups, strict=True):
        (cells[group.parent] if group.parent >= 0 else root).children.append(cell)
    _hang_kernels(study, root, cells)
    table: Columns = {n: [] for n in ("cell_id", "parent_id", "kind", "label", "full", "total_ns", "gpu_time_share")}
    _write(table, root, _floor(_sum_up(root), int(study.whole_ns * min_share), most))
    table["gpu_time_share"] = study.share(table["total_ns"])
    return table


def _hang_kernels(study: Study, root: _Cell, modules: list[_Cell]) -> None:
    """Operators and kernels into the cells of their modules."""
    pairs = study.found.pairs
    codes, count = group_codes(study.group + 1, study.op + 1, pairs.name)
    first = first_of_groups(codes, count)
    total = ints(np.bincount(codes, pairs.total, minlength=count)).tolist()
    places: dict[tuple[int, int], _Cell] = {}
    unknown: _Cell | None = None
    columns = (study.group[first].tolist(), study.op[first].tolist(), pairs.name[first].tolist())
    for group, op, name, ns in zip(*columns, total, strict=True):
        if group >= 0:
            place = modules[group]
        elif not modules and op >= 0:  # no module is known anywhere: operators are all there is
            place = root
        else:
            if unknown is None:
                unknown = _Cell("unknown", "", "")
                root.children.append(unknown)
            place = unknown
        if op >= 0:
            if (group, op) not in places:
                places[group, op] = _Cell("op", study.found.ops[op], study.found.ops[op])
                place.children.append(places[group, op])
            place = places[group, op]
        place.children.append(_Cell("kernel", study.found.names[name], study.found.names[name], ns))


def _sum_up(root: _Cell) -> list[_Cell]:
    """Give all cells the totals of their children, the largest of them first; returns all cells."""
    cells = [root]
    for cell in cells:  # grows as it goes
        cells += cell.children
    for cell in reversed(cells):
        if cell.children:
            cell.total = sum(child.total for child in cell.children)
            cell.children.sort(key=lambda child: -child.total)
    return cells


def _floor(cells: list[_Cell], least: int, most: int) -> int:
    """The size from which on cells are drawn."""
    sizes = sorted((cell.total for cell in cells), reverse=True)
    return max(least, sizes[most] + 1 if len(sizes) > most else 0, 1)


def _write(table: Columns, root: _Cell, least: int) -> None:
    waiting = [(root, -1)]
    while waiting:
        cell, parent = waiting.pop()
        number = len(table["cell_id"])
        row = (number, parent, cell.kind, cell.label, cell.full, cell.total)
        for column, value in zip(table, row, strict=False):
            table[column].append(value)
        drawn = [child for child in cell.children if child.total >= least]
        rest = sum(child.total for child in cell.children if child.total < least)
        if rest and drawn:
            count = sum(0 < child.total < least for child in cell.children)
            drawn.append(_Cell("others", str(count), "", rest))
        waiting += [(child, number) for child in reversed(drawn)]
