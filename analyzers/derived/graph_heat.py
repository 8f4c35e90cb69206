"""Where in a model the time goes: its nodes by part and layer.

The first number in a module's path is its layer: ``layers.7.mlp.up`` is the part ``layers.*.mlp.up`` in layer 7. Later
numbers (experts) are folded. What has no number is a part outside of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spikeprof.analyzers.derived.model_nodes import Floats

OUTSIDE = -1  # the layer of what is in none
OTHER = "other"


def part_of(module: str) -> tuple[str, int]:
    """(part, layer) of a module's path; the model itself is the part ``(model)``."""
    words = module.split(".") if module else []
    numbers = [at for at, word in enumerate(words) if word.isascii() and word.isdecimal() and len(word) < 10]
    if not numbers:
        return module or "(model)", OUTSIDE
    folded = ("*" if at in numbers else word for at, word in enumerate(words))
    return ".".join(folded), int(words[numbers[0]])


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts in the order in which the model has them, with totals; ``cells`` sums by (part, layer)."""

    name: list[str]
    nodes_count: list[int]
    total_ns: list[float]
    cells: dict[tuple[str, int], float]


def parts(modules: Sequence[str], values: Floats) -> Parts:
    """Sum a value of nodes by part, and by part and layer. NaN counts as nothing; parts without any are left out."""
    number: dict[str, int] = {}
    total: dict[str, float] = {}
    cells: dict[tuple[str, int], float] = {}
    for module, value in zip(modules, values.tolist(), strict=True):
        if np.isnan(value):
            continue
        cell = part_of(module)
        number[cell[0]] = number.get(cell[0], 0) + 1
        total[cell[0]] = total.get(cell[0], 0.0) + value
        cells[cell] = cells.get(cell, 0.0) + value
    return Parts(list(number), list(number.values()), list(total.values()), cells)


def grid(found: Parts, most_parts: int, most_layers: int) -> dict[tuple[str, int], float]:
    """The cells of the parts with most time, in the model's order; the rest as one part; many layers joined.

    A joined layer is called by the first of those in it.
    """
    longest = sorted(zip(found.total_ns, found.name, strict=True), key=lambda one: -one[0])
    kept = {name for _, name in longest[:most_parts]}
    layers = sorted({layer for _, layer in found.cells if layer != OUTSIDE})
    together = -(-len(layers) // most_layers) if layers else 1
    shown = {layer: layers[at - at % together] for at, layer in enumerate(layers)} | {OUTSIDE: OUTSIDE}
    cells: dict[tuple[str, int], float] = {}
    place = {name: at for at, name in enumerate(found.name)} | {OTHER: len(found.name)}
    for (part, layer), value in found.cells.items():
        key = (part if part in kept else OTHER, shown[layer])
        cells[key] = cells.get(key, 0.0) + value
    return dict(sorted(cells.items(), key=lambda cell: (place[cell[0][0]], cell[0][1])))
