"""Tables of classes of identical launches: names, what tells apart classes of one kernel, values with their bounds."""

from __future__ import annotations

from collections.abc import Sequence

from spikeprof.reports.kernel_names import printable, short_names
from spikeprof.reports.model import PlainTable


def class_names(table: PlainTable, width: int) -> tuple[list[str], list[str]]:
    """(short names of ``width`` characters, full names), one per row of a table with the columns of a class.

    The grid is added where one kernel has several, the GPU where there are several.
    """
    kernels = [str(name) for name in table["kernel"]]
    grids = shapes(table, "grid")
    several = {kernel for kernel, grid in dict.fromkeys(zip(kernels, grids, strict=True))}
    ambiguous = {k for k in several if len({g for n, g in zip(kernels, grids, strict=True) if n == k}) > 1}
    many_gpus = len(set(table["device"])) > 1
    marks = [
        (f" [{grid}]" if kernel in ambiguous else "") + (f" GPU {device}" if many_gpus else "")
        for kernel, grid, device in zip(kernels, grids, table["device"], strict=True)
    ]
    room = width - max(map(len, marks), default=0)
    short = [name + mark for name, mark in zip(short_names(kernels, room), marks, strict=True)]
    full = [f"{printable(kernel)}, grid {grid}" for kernel, grid in zip(kernels, grids, strict=True)]
    return short, full


def shapes(table: PlainTable, of: str) -> list[str]:
    """Grids or blocks as ``132×1×1``; trailing ones are left out: ``132``."""
    parts: Sequence[tuple[int, int, int]] = list(zip(*(table[f"{of}_{side}"] for side in ("x", "y", "z")), strict=True))
    return ["×".join(str(n) for n in (x, y, z)[: 3 if z != 1 else 2 if y != 1 else 1]) for x, y, z in parts]


def with_bounds(table: PlainTable, columns: Sequence[str]) -> PlainTable:
    """Those of the columns that there are, in this order, and behind them their bounds (``low_…``, ``high_…``)."""
    kept = [name for name in columns if name in table]
    bounds = [f"{bound}_{name}" for name in kept for bound in ("low", "high")]
    return {name: table[name] for name in (*kept, *bounds) if name in table}
