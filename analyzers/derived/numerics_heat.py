"""Headroom of modules over steps, as a grid: rows in execution order, columns of equally many steps.

Where the model has more modules than there are rows, those of one layer are one row: the first number in a path is the
layer, so that ``layers.7.mlp.up`` belongs to ``layers.7``. A cell has its least headroom, and how many of its scans
were bad.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spikeprof.analyzers.derived.cells import finite
from spikeprof.analyzers.derived.intervals import Bools, Ints, ints
from spikeprof.analyzers.derived.numerics_scans import Scans, first_by_tensor

MODEL = "(model)"


def layer_of(path: str) -> str:
    """The path up to its first number; the whole path where it has none."""
    words = path.split(".")
    at = next((i for i, word in enumerate(words) if word.isascii() and word.isdecimal()), len(words))
    return ".".join(words[: at + 1])


def heat_table(scans: Scans, which: Bools, most_rows: int, most_bins: int) -> Mapping[str, list[Any]]:
    """Cells of the chosen watched tensors (one element per tensor): row, step, last step, headroom, bad scans.

    The headroom is None in cells where it is not known; cells without scans are left out.
    """
    picked = np.flatnonzero(which[scans.tensor])
    names: dict[str, list[Any]] = {
        name: [] for name in ("module", "step", "last_step", "headroom_bits", "bad_scans_count")
    }
    if not len(picked):
        return names
    labels, row_of = _rows(scans, which, most_rows)
    step = scans.step[picked]
    low, span = int(step.min()), int(np.ptp(step)) + 1
    bins = min(most_bins, span)
    column = (step - low) * bins // span
    cell = row_of[scans.tensor[picked]] * bins + column
    least = np.full(len(labels) * bins, np.inf)
    headroom = scans.headroom[picked]
    np.minimum.at(least, cell, np.where(np.isfinite(headroom), headroom, np.inf))
    bad = np.bincount(cell, scans.bad[picked], minlength=len(least))
    edges = low + -(-np.arange(bins + 1) * span // bins)
    for at in np.unique(cell).tolist():
        names["module"].append(labels[at // bins])
        names["step"].append(int(edges[at % bins]))
        names["last_step"].append(int(edges[at % bins + 1]) - 1)
        names["headroom_bits"].append(finite(least[at]))
        names["bad_scans_count"].append(int(bad[at]))
    return names


def _rows(scans: Scans, which: Bools, most: int) -> tuple[list[str], Ints]:
    """(labels of the rows in execution order, the row of each watched tensor)."""
    chosen = np.flatnonzero(which)
    first = first_by_tensor(scans, which[scans.tensor])[chosen]
    in_order = chosen[np.lexsort((scans.order[first], scans.step[first]))].tolist()
    paths = [scans.tensors[tensor].path for tensor in in_order]
    if len(set(paths)) > most:
        paths = [layer_of(path) for path in paths]
    rows = list(dict.fromkeys(paths))
    together = -(-len(rows) // most)
    number = {path: at // together for at, path in enumerate(rows)}
    row_of = np.zeros(len(scans.tensors), np.int64)
    row_of[in_order] = [number[path] for path in paths]
    return [_label(rows[at : at + together]) for at in range(0, len(rows), together)], ints(row_of)


def _label(paths: Sequence[str]) -> str:
    names = [path or MODEL for path in paths]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
