"""Rows of the table ``tensor_stats`` for tests: written by hand, or of real tensors by the collector's own scan."""

from __future__ import annotations

import math
from typing import Any

import tiny

from spikeprof.analyzers.base import Finding, Result
from spikeprof.analyzers.overflow import Overflow
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.trace import CollectorNote


def scan(step: int, order: int, module: str, amax: float = 1.0, **more: Any) -> dict[str, Any]:
    """A scan of 1,000 elements in fp16 without anything special, but for what is given."""
    row = {
        "step": step,
        "order": order,
        "module": module,
        "class_name": "Linear",
        "role": "output",
        "dtype": "float16",
        "elements_count": 1000,
        "amax_value": amax,
        "smallest_value": 0.001,
        "real_amax_value": math.nan,
        "first_bad_index": 0 if more.get("nan_count") or more.get("inf_count") else -1,
        "scanned": "at_once",
        "t_ns": 1000 * step + order,
    }
    return {**row, **more}


def bad(step: int, order: int, module: str, **more: Any) -> dict[str, Any]:
    """A scan with five NaN and two Inf from element 7 on."""
    return scan(step, order, module, **{"nan_count": 5, "inf_count": 2, "first_bad_index": 7, **more})


def of_tensor(tensor: Any, step: int, order: int, module: str, dtype: str = "", **more: Any) -> dict[str, Any]:
    """The row of a real tensor, by the scan that the collector runs on the CPU; ``dtype`` names packed formats."""
    from spikeprof.profiler.inject.numerics.formats import FORMATS
    from spikeprof.profiler.inject.numerics.records import form_of, rows_of
    from spikeprof.profiler.inject.numerics.scan_torch import scan as scan_tensor

    name = dtype or str(tensor.dtype).removeprefix("torch.")
    amax, smallest, nan, inf, subnormal, zero, saturated, first_bad, bad_rows = scan_tensor(tensor, FORMATS[name])
    values = [FORMATS[name].value(bits) for bits in (amax, smallest)]
    row = {
        "elements_count": tensor.numel() * (2 if name == "int4" else 1),
        "amax_value": math.nan if values[0] is None else values[0],
        "smallest_value": math.nan if values[1] is None else values[1],
        "nan_count": nan,
        "inf_count": inf,
        "subnormal_count": subnormal,
        "zero_count": zero,
        "saturated_count": saturated,
        "first_bad_index": first_bad,
        "dimensions_count": tensor.dim(),
        "rows_count": rows_of(tensor.numel(), form_of(tensor, tensor.numel())),
        "bad_rows": bad_rows % (1 << 64),
        "dtype": name,
    }
    return scan(step, order, module, **{**row, **more})


def asked(
    *rows: dict[str, Any], analyzer: Overflow | None = None, note: CollectorNote | None = None, **tables: Any
) -> Result:
    """The analyzer's answer to these scans."""
    collectors = {"numerics": note} if note else None
    trace = tiny.trace(tensor_stats=list(rows), collectors=collectors, **tables)
    return run_one(trace, analyzer or Overflow())


def found(result: Result, rule: str) -> list[Finding]:
    """The findings of one rule."""
    return [finding for finding in result.findings if finding.rule == rule]


def evidence(finding: Finding) -> dict[str, float]:
    """The evidence of a finding by metric."""
    return {item.metric: item.value for item in finding.evidence}


def rules(result: Result) -> list[str]:
    """The rules that were found, each once, in order."""
    return list(dict.fromkeys(finding.rule for finding in result.findings))
