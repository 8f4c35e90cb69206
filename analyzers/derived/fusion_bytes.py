"""What kernels read from DRAM and write to it, per launch: as counted, else as modelled from operators and shapes.

A model takes every input of the operator for read once and its result for written once, which holds for large tensors;
of what still lies in L2 it is an upper bound. Shapes of results follow from those of the inputs; a reduction is taken
for one along the last dimension. Where neither counters nor an operator of known traffic is there, nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from spikeprof.analyzers.derived.cells import json_list
from spikeprof.analyzers.derived.counters import Estimate, Floats, kernel_classes
from spikeprof.analyzers.derived.intervals import Bools, Ints, ints
from spikeprof.analyzers.derived.kernel_families import Work, of_operator
from spikeprof.analyzers.derived.launch_shapes import Launches
from spikeprof.profiler.trace import Trace

#: Where bytes are known from, the surest last.
SOURCES = ("unknown", "modelled", "counted")

#: No tensor has more elements, whatever a record says; nor do its bytes.
_MOST_ELEMENTS = 2**53
_DRAM = ("dram_read_bytes", "dram_written_bytes")
_ELEMENT_BYTES = {
    "double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2, "half": 2,
    "bfloat16": 2, "short": 2, "bool": 1, "unsigned char": 1, "signed char": 1, "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}  # fmt: skip
#: Operand, sums and result of nvjet's products: hsh, tst, sss.
_NVJET = re.compile(r"^nvjet_(?:sm\d+_)?([hts])s\1_")
_TYPE_IN_NAME = re.compile(r"\b(c10::Half|c10::BFloat16|float|double|long|bool|int)\b")
_TO_BOOL = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isinf")
#: Operators whose inputs and results are of more than one type.
_OF_TWO_TYPES = (*_TO_BOOL, "where", "masked_fill")
_FILLED = ("fill", "fill_", "zero_", "zeros_like", "ones_like", "full_like")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per launch, one element per class of launches; NaN = unknown. ``spread``: how far off both may be."""

    read: Floats
    written: Floats
    spread: Floats
    source: Ints  # index into SOURCES

    @property
    def both(self) -> Floats:
        """Read and written."""
        return self.read + self.written

    @property
    def known(self) -> Bools:
        """The classes of which both are known."""
        return np.isfinite(self.both)


def traffic(trace: Trace, of: Launches, owners: Ints, work: Sequence[Work]) -> Traffic:
    """Of each class. ``owners``: the row of ``origins`` of each row of ``kernels``, -1 = none; ``work`` by class."""
    read, written, spread = _counted(trace, of)
    source = np.where(np.isfinite(read + written), SOURCES.index("counted"), 0)
    if (owners >= 0).any():
        model = _modelled(trace, of, owners, work)
        missing = (source == 0) & np.isfinite(model.sum(axis=0))
        source[missing] = SOURCES.index("modelled")
        read, written = (np.where(missing, m, v) for m, v in zip(model, (read, written), strict=True))
        spread = np.where(missing, 0.0, spread)
    known = np.isfinite(read + written)
    return Traffic(np.where(known, read, np.nan), np.where(known, written, np.nan), spread, ints(source))


def _counted(trace: Trace, of: Launches) -> tuple[Floats, Floats, Floats]:
    unknown = np.full(len(of.names), np.nan)
    if "counters" not in trace or "kernel_classes" not in trace or not (of.counted >= 0).any():
        return unknown, unknown, np.zeros(len(of.names))
    counted = kernel_classes(trace).counted
    row = np.maximum(of.counted, 0)
    parts = [_nothing_less(counted.per_launch(metric).of(row)) for metric in _DRAM]
    sums = parts[0].plus(parts[1])
    spread = np.nan_to_num(np.fmax(sums.high - sums.value, sums.value - sums.low), posinf=np.inf)
    read, written = (np.where(of.counted >= 0, part.value, np.nan) for part in parts)
    return read, written, np.asarray(spread, np.float64)


def _nothing_less(of: Estimate) -> Estimate:
    return of.within(0.0, np.inf)


# ---------------------------------------------------------------- from operators and shapes


class Moved(NamedTuple):
    """What one call of an operator reads and writes: in bytes, or in elements of a size that its shapes do not tell."""

    read: float
    written: float
    in_elements: bool = False


def _modelled(trace: Trace, of: Launches, owners: Ints, work: Sequence[Work]) -> Floats:
    """[read or written, class]: means over the launches whose operator's traffic is known; NaN where there are none."""
    table = trace.table("origins").select(["op", "input_shapes", "input_dtypes"]).to_pydict()
    moved = [moved_by(op or "", shapes or "", dtypes or "") for op, shapes, dtypes in zip(*table.values(), strict=True)]
    per_origin = np.array([(m.read, m.written) if m else (np.nan, np.nan) for m in moved]).T.reshape(2, -1)
    in_elements = np.array([bool(m and m.in_elements) for m in moved], bool)
    element = np.array([element_bytes(name) for name in of.names])
    element[[one.part for one in work]] = np.nan
    whole = np.where([one.part for one in work], np.nan, 1.0)
    count = len(of.names)
    rows = np.flatnonzero((owners >= 0) & (of.of_kernel >= 0))
    # An operator may launch more than its own kind of kernel: addmm copies its bias before some products.
    kinds = sorted({*(one.kind for one in work), *(of_operator(op or "").kind for op in table["op"])})
    of_class, of_origin = (
        np.array([kinds.index(kind) for kind in some], np.int64)
        for some in ([one.kind for one in work], [of_operator(op or "").kind for op in table["op"]])
    )
    rows = rows[of_class[of.of_kernel[rows]] == of_origin[owners[rows]]]
    kernel_class, origin = of.of_kernel[rows], owners[rows]
    factor = np.where(in_elements[origin], element[kernel_class], whole[kernel_class])
    result = np.full((2, count), np.nan)
    for side in (0, 1):
        values = per_origin[side][origin] * factor
        good = np.isfinite(values)
        number = np.bincount(kernel_class[good], minlength=count)
        sums = np.bincount(kernel_class[good], values[good], minlength=count)
        np.divide(sums, number, out=result[side], where=number > 0)
    return result


def element_bytes(name: str) -> float:
    """The size of an element by the first type in a kernel's name, NaN where it names none."""
    if product := _NVJET.match(name):
        return 4.0 if product[1] == "s" else 2.0
    found = _TYPE_IN_NAME.search(name)
    return float(_ELEMENT_BYTES[found[1]]) if found else float("nan")


@lru_cache(maxsize=4096)
def moved_by(operator: str, shapes: str, dtypes: str) -> Moved | None:
    """What a call of an operator reads and writes; ``shapes`` and ``dtypes`` as in ``origins``. None = not known."""
    work, inputs = of_operator(operator), _inputs(shapes, dtypes)
    elements = [n for n, _ in inputs]
    if not inputs or work.verdict == "unknown" or max(elements) > _MOST_ELEMENTS:
        return None
    sizes = [size for _, size in inputs]
    known = all(size is not None for size in sizes)
    name = work.operators[0]
    if not known and (work.kind == "copy" or name in _OF_TWO_TYPES or any(size is not None for size in sizes)):
        return None
    unit = [float(size) if size is not None else 1.0 for size in sizes] if known else [1.0] * len(sizes)
    made = _result(name, work.kind, elements, unit, _shape_list(shapes))
    return None if made is None or sum(made) > _MOST_ELEMENTS else Moved(*made, in_elements=not known)


def _result(
    name: str, kind: str, elements: list[int], unit: list[float], shapes: list[list[int]]
) -> tuple[float, float] | None:
    """(read, written) of an operator whose inputs have so many elements of so many bytes."""
    read, first = sum(n * size for n, size in zip(elements, unit, strict=True)), elements[0] * unit[0]
    found: tuple[float, float] | None = None
    if name in _FILLED:
        found = 0.0, first
    elif kind == "pointwise":
        width = 1.0 if name in _TO_BOOL else {"where": unit[-1], "masked_fill": unit[0]}.get(name, max(unit))
        found = read, _broadcast(shapes) * width
    elif name in ("copy", "copy_") and len(elements) > 1:  # into the first from the second
        found = elements[1] * unit[1], first
    elif kind == "copy":
        found = read, read
    elif kind == "norm":
        found = read, first
    elif kind == "reduction":
        found = read, first / max(shapes[0][-1], 1)
    elif kind == "gemm" and (out := _product(shapes)) is not None:
        found = read, out * unit[-1]
    return found


def _inputs(shapes: str, dtypes: str) -> list[tuple[int, int | None]]:
    """(elements, bytes of an element or None) of each input that is a tensor, lists of tensors taken apart."""
    found: list[tuple[int, int | None]] = []
    names = json_list(dtypes) or []
    for number, shape in enumerate(json_list(shapes) or []):
        size = _ELEMENT_BYTES.get(str(names[number])) if number < len(names) else None
        for one in _tensors(shape):
            found.append((prod(one), size))
    return found


def _shape_list(shapes: str) -> list[list[int]]:
    return [one for shape in json_list(shapes) or [] for one in _tensors(shape)]


def _tensors(shape: object) -> list[list[int]]:
    """The shapes in one entry: one tensor's, those of a list, or none. What has no dimensions counts as none."""
    if not isinstance(shape, list) or not shape:
        return []
    if all(isinstance(n, int) and n >= 0 for n in shape):
        return [shape]
    return [one for one in shape if isinstance(one, list) and one and all(isinstance(n, int) and n >= 0 for n in one)]


def _broadcast(shapes: list[list[int]]) -> int:
    """Elements of what all shapes together broadcast to."""
    rank = max(map(len, shapes))
    padded = [[1] * (rank - len(shape)) + shape for shape in shapes]
    return prod(max(sides) if min(sides) > 0 else 0 for sides in zip(*padded, strict=True))


def _product(shapes: list[list[int]]) -> int | None:
    """Elements of the product of the last two matrices, whose inner sides must agree."""
    matrices = [shape for shape in shapes if len(shape) >= 2][-2:]
    if len(matrices) < 2 or matrices[0][-1] != matrices[1][-2]:
        return None
    return prod(matrices[0][:-1]) * matrices[1][-1]
