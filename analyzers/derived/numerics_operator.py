"""The first bad operator inside the module that gave the first bad value, as the table ``bad_operators`` tells it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from spikeprof.analyzers.base import Basis, Evidence
from spikeprof.analyzers.derived.cells import finite
from spikeprof.analyzers.derived.numerics_formats import headroom_bits, limits
from spikeprof.analyzers.derived.numerics_heat import MODEL
from spikeprof.analyzers.derived.numerics_origin import Origin
from spikeprof.analyzers.derived.numerics_scans import Scans
from spikeprof.profiler.trace import Trace

_NEVER_TOLD = "its process ended in a way that left no time to run the module again"


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor that went into a module or an operator, or came out."""

    shape: tuple[int, ...]
    dtype: str
    amax: float  # NaN = no finite element
    nan: int
    inf: int


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known of one process's first bad operator; ``name`` is empty where it is not, ``why_not`` says why."""

    module: str = ""
    run_module: str = ""
    kept: str = "none"
    taken: tuple[Seen, ...] = ()
    name: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    before: int = 0
    inputs: tuple[Seen, ...] = ()
    output: Seen | None = None
    first_bad: int = -1
    why_not: str = ""

    @property
    def place(self) -> str:
        """``model.py:41``; empty where no line of the program's is known."""
        return f"{PurePosixPath(self.file.replace(chr(92), '/')).name}:{self.line}" if self.line else ""


@dataclass(frozen=True)
class Operators:
    """Of all processes, by rank; none where the trace has no such table, or the process did not tell."""

    by_rank: Mapping[int, Operator] = field(default_factory=dict)
    collected: bool = False

    def of(self, scans: Scans, origin: Origin) -> Operator | None:
        """That of an origin; None where operators were not collected."""
        if not self.collected:
            return None
        module = scans.tensors[scans.tensor[origin.scan]].path
        found = self.by_rank.get(int(scans.rank[origin.scan]), Operator(module=module, why_not=_NEVER_TOLD))
        if found.module != module:  # several devices, each with steps of its own
            return Operator(module=module, why_not=f"{found.module or MODEL} was run again instead")
        return found


def operators_of(trace: Trace) -> Operators:
    """What the table says; texts in it that cannot be read count as nothing."""
    if "bad_operators" not in trace:
        return Operators()
    rows = trace.table("bad_operators").to_pylist()
    return Operators({int(row["rank"]): _operator(row) for row in reversed(rows)}, collected=True)


def _operator(row: Mapping[str, Any]) -> Operator:
    outputs = _tensors(f"[{row['output']}]")
    return Operator(
        row["module"],
        row["run_module"],
        row["kept"],
        _tensors(row["taken"]),
        row["op"],
        row["file"],
        int(row["line"]),
        row["function"],
        int(row["before_count"]),
        _tensors(row["inputs"]),
        outputs[0] if outputs else None,
        int(row["first_bad_index"]),
        row["why_not"],
    )


def _tensors(text: str) -> tuple[Seen, ...]:
    try:
        return tuple(_seen(each) for each in json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()


def _seen(each: Mapping[str, Any]) -> Seen:
    amax = math.nan if each["amax"] is None else float(each["amax"])
    shape = tuple(int(size) for size in each["shape"])
    return Seen(shape, str(each["dtype"]), amax, int(each["nan"]), int(each["inf"]))


def largest(seen: Iterable[Seen]) -> float:
    """The largest finite magnitude in some tensors, NaN where there is none."""
    return max((each.amax for each in seen if math.isfinite(each.amax)), default=math.nan)


def operator_scope(found: Operator | None) -> dict[str, str | int]:
    """Where it is, for a finding."""
    if found is None or not found.name:
        return {}
    scope: dict[str, str | int] = {"operator": found.name}
    return scope | ({"line": found.place} if found.place else {})


def operator_evidence(found: Operator | None, known: Sequence[Evidence]) -> Iterator[Evidence]:
    """What the operator and its module took, where no scan of that is ``known``; inferred where in another step."""
    if found is None:
        return
    basis: Basis = "measured" if found.kept == "first" else "inferred"
    taken, inputs = largest(found.taken), largest(found.inputs)
    if math.isfinite(taken) and all(one.metric != "inputs_amax_value" for one in known):
        yield Evidence("inputs_amax_value", taken, basis=basis)
    if not found.name:
        return
    if math.isfinite(inputs):
        yield Evidence("op_inputs_amax_value", inputs, basis=basis)
    if found.output is not None:
        yield Evidence("op_bad_elements_count", found.output.nan + found.output.inf, 0, "none expected", basis=basis)
    yield Evidence("ops_before_count", found.before)


def operator_table(found: Operator | None) -> Mapping[str, list[Any]]:
    """The operator with a row for each of its tensors; one row with the reason where it is not known.

    ``around`` is the module around the one whose scan was bad, where the operator was found in that one only.
    """
    names = (
        "op",
        "line",
        "around",
        "tensor",
        "shape",
        "dtype",
        "amax_value",
        "nan_count",
        "inf_count",
        "kept",
        "why_not",
    )
    rows: list[tuple[Any, ...]] = []
    if found is not None and found.name:
        around = "" if found.run_module == found.module else found.run_module or MODEL
        sides = [*(("input", each) for each in found.inputs), *([("output", found.output)] if found.output else ())]
        for side, each in sides:
            shape = " × ".join(map(str, each.shape))
            counts = (finite(each.amax), each.nan, each.inf)
            rows.append((found.name, found.place, around, side, shape, each.dtype, *counts, found.kept, ""))
    elif found is not None:
        rows.append(("", "", "", "", "", "", None, None, None, found.kept, found.why_not))
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}


def with_taken(
    around: Mapping[str, list[Any]], scans: Scans, origin: Origin | None, found: Operator | None, fp16_limit: float
) -> Mapping[str, list[Any]]:
    """The scans around the first bad one, and before that what its module took, where only the kept copy tells."""
    if origin is None or found is None or len(origin.inputs) or found.run_module != found.module or not found.taken:
        return around
    rows = _taken_rows(scans, origin, found, fp16_limit)
    at = around["state"].index("first bad")
    return {name: [*values[:at], *(row[name] for row in rows), *values[at:]] for name, values in around.items()}


def _taken_rows(scans: Scans, origin: Origin, found: Operator, fp16_limit: float) -> list[dict[str, Any]]:
    tensor = scans.tensors[scans.tensor[origin.scan]]
    headroom = headroom_bits(
        np.array([each.amax for each in found.taken]), limits([each.dtype for each in found.taken], fp16_limit)
    )
    return [
        {
            "step": int(scans.step[origin.scan]),
            "order": int(scans.order[origin.scan]),
            "state": "input" if found.kept == "first" else "input later",
            "module": tensor.path or MODEL,
            "class_name": tensor.class_name,
            "role": "input",
            "dtype": each.dtype,
            "amax_value": finite(each.amax),
            "headroom_bits": finite(bits),
            "nan_count": each.nan,
            "inf_count": each.inf,
            "elements_count": math.prod(each.shape),
        }
        for each, bits in zip(found.taken, headroom, strict=True)
    ]
