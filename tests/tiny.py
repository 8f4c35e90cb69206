"""Tiny traces for tests: rows as plain dicts, every unnamed column filled with a plausible default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote, Manifest, Trace

_DEFAULTS: dict[str, Any] = {
    "name": "kernel",
    "kind": "unknown",
    "state": "traced",
    "reason": "",
    "block_x": 128,
    "block_y": 1,
    "block_z": 1,
    "grid_x": 1,
    "grid_y": 1,
    "grid_z": 1,
    "src_memory": "unknown",
    "dst_memory": "unknown",
    "metric": "power_w",
    "match": "exact",
    "place": "kernels",
    "op": "aten::mm",
    "parent_id": -1,
    "stream": 7,
    "context_id": 1,
    "traced": True,
}


def table(name: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """A table of the schema from rows; ``*_id`` row numbers are filled in, rows must be in order."""
    spec = TABLES[name]
    rows = list(rows)
    own_id = spec.columns[0].name if spec.columns[0].doc == "row number" else None
    columns = {}
    for column in spec.columns:
        is_text = pa.types.is_string(column.type) or pa.types.is_dictionary(column.type)
        default = _DEFAULTS.get(column.name, "" if is_text else 0)
        values = [row.get(column.name, i if column.name == own_id else default) for i, row in enumerate(rows)]
        unknown = {k for row in rows for k in row} - set(spec.arrow.names)
        assert not unknown, f"no such columns in {name}: {unknown}"
        columns[column.name] = table_column(values, column.type)
    return pa.table(columns).cast(spec.arrow)


def table_column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The values as one column of a table."""
    if pa.types.is_dictionary(kind):
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(values, kind)


def trace(
    *,
    duration_ns: int = 1_000_000,
    collectors: Mapping[str, CollectorNote] | None = None,
    **tables: Iterable[Mapping[str, Any]],
) -> Trace:
    """A trace from ``table_name=[row, …]``. A table that is not named was not collected."""
    manifest = Manifest(
        source="spikeprof",
        t0_unix_ns=1_700_000_000_000_000_000,
        duration_ns=duration_ns,
        command=("python", "infer.py"),
        exit_code=0,
        versions={"libcupti": "130001"},
        collectors=collectors if collectors is not None else {"activity": CollectorNote("ok")},
    )
    return Trace(manifest, {name: table(name, rows) for name, rows in tables.items()})
