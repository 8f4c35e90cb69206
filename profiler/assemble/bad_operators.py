"""What a process said at its end of the operator that gave its first bad value, to a row of ``bad_operators``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spikeprof.profiler import store
from spikeprof.profiler.schema import TABLES

_LARGEST = (1 << 63) - 1


def operator_row(event: Mapping[str, Any]) -> dict[str, Any]:
    """The row of an event, but for its rank. Raises KeyError, TypeError and ValueError for what is none."""
    kept = {True: "first", False: "later"}.get(event.get("exact", ""), "none")
    operator = str(event.get("operator", ""))
    output = event.get("output")
    return {
        "step": _whole(event["step"]),
        "order": _whole(event["order"], 31),
        "module": str(event["module"]),
        "class_name": str(event["class_name"]),
        "role": str(event["role"]),
        "kept": kept,
        "taken": json.dumps([_tensor(each) for each in event.get("taken", ())]),
        "run_module": str(event.get("rerun", "")),
        "op": operator,
        "file": str(event.get("file", "")) if operator else "",
        "line": _whole(event.get("line", 0), 31) if operator else 0,
        "function": str(event.get("function", "")) if operator else "",
        "before_count": _whole(event.get("before", 0), 31),
        "inputs": json.dumps([_tensor(each) for each in event.get("inputs", ())]),
        "output": json.dumps(_tensor(output)) if output else "",
        "first_bad_index": _whole(event.get("first_bad", -1)),
        "why_not": "" if operator else str(event["why_not"]),
    }


def write_operators(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the table. Raises OutputError."""
    store.write_table(folder, "bad_operators", TABLES["bad_operators"].of_rows(rows))


def _tensor(each: Mapping[str, Any]) -> dict[str, Any]:
    amax = each["amax"]
    if amax is not None and not (float(amax) >= 0 and math.isfinite(amax)):
        raise ValueError("an amax that is none")
    return {
        "shape": [_whole(size) for size in each["shape"]],
        "dtype": str(each["dtype"]),
        "amax": None if amax is None else float(amax),
        "nan": _whole(each["nan"]),
        "inf": _whole(each["inf"]),
    }


def _whole(value: Any, bits: int = 63) -> int:
    number = int(value)
    if not -1 <= number <= _LARGEST >> 63 - bits:
        raise ValueError("a number that no column holds")
    return number
