"""Structured activity records to the columns of trace tables, batch by batch, then sorted and written.

Columns are kept as narrow as their values allow while they pile up (about 50 bytes a kernel) and widened one
row group at a time when they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler import store
from spikeprof.profiler.inject import cbids
from spikeprof.profiler.schema import TABLES

Columns = dict[str, npt.NDArray[Any]]
Records = npt.NDArray[np.void]

COPY_KINDS = ("unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
MEMORY_KINDS = ("unknown", "pageable", "pinned", "device", "array", "managed", "device", "managed")

#: CUpti_ActivityOverheadKind, by its name in NVIDIA's header.
OVERHEAD_KINDS = {
    0: "unknown",
    1: "driver_compiler",
    1 << 16: "buffer_flush",
    2 << 16: "instrumentation",
    3 << 16: "resource",
    4 << 16: "runtime_triggered_module_loading",
    5 << 16: "lazy_function_loading",
    6 << 16: "command_buffer_full",
    7 << 16: "activity_buffer_request",
    8 << 16: "uvm_activity_init",
}

_OTHER_CALL = "another CUDA call"


@dataclass
class Labels:
    """Texts of one dictionary column: label -> code, in order of first use."""

    codes: dict[str, int] = field(default_factory=dict)

    def code(self, label: str) -> int:
        """The label's code, new if needed."""
        return self.codes.setdefault(label, len(self.codes))

    def translated(self, values: npt.NDArray[Any], text: Callable[[int], str]) -> npt.NDArray[np.int32]:
        """Codes for raw values; ``text`` is asked once per distinct value."""
        distinct, inverse = np.unique(values, return_inverse=True)
        codes = np.fromiter((self.code(text(int(v))) for v in distinct), np.int32, len(distinct))
        return codes[inverse.reshape(values.shape)] if len(distinct) else np.empty(0, np.int32)


class TableBuilder:
    """Piles up column batches of one table, then sorts and writes them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.labels = {f.name: Labels() for f in TABLES[name].arrow if pa.types.is_dictionary(f.type)}
        self._batches: list[Columns] = []

    def add(self, columns: Columns) -> None:
        """One batch of one rank: every column but the row number; missing columns are 0."""
        self._batches.append({name: _narrowed(values) for name, values in columns.items()})

    def renumber(self, column: str, number: Callable[[int, npt.NDArray[Any]], npt.NDArray[Any]]) -> None:
        """Replace a column, batch by batch, by ``number(rank, values)``."""
        for batch in self._batches:
            batch[column] = _narrowed(number(int(batch["rank"][0]), batch[column]))

    @property
    def rows(self) -> int:
        """Rows so far."""
        return sum(len(batch["start_ns"]) for batch in self._batches)

    def write(self, folder: Path) -> int:
        """Write the table sorted by start, row group by row group; returns the bytes on disk."""
        names = sorted({name for batch in self._batches for name in batch})
        columns = {}
        for name in names:  # one column at a time, its batches freed as they are joined
            columns[name] = np.concatenate([batch.pop(name) for batch in self._batches])
        self._batches = []
        order = np.argsort(columns["start_ns"], kind="stable") if columns else np.empty(0, np.int64)
        dictionaries = {name: pa.array(list(labels.codes), pa.string()) for name, labels in self.labels.items()}
        with store.open_table(folder, self.name) as writer:
            for begin in range(0, max(len(order), 1), store.ROW_GROUP_ROWS):
                rows = order[begin : begin + store.ROW_GROUP_ROWS]
                writer.write_table(self._row_group(columns, rows, begin, dictionaries))
        return (folder / f"{self.name}.parquet").stat().st_size

    def _row_group(
        self, columns: Columns, rows: npt.NDArray[np.int64], begin: int, dictionaries: Mapping[str, pa.Array]
    ) -> pa.Table:
        spec = TABLES[self.name]
        arrays = []
        for column in spec.columns:
            if column.doc == "row number":
                arrays.append(pa.array(np.arange(begin, begin + len(rows))))
                continue
            values = columns[column.name][rows] if column.name in columns else np.zeros(len(rows), np.int8)
            if column.name in dictionaries:
                codes = pa.array(values.astype(np.int32))
                arrays.append(pa.DictionaryArray.from_arrays(codes, dictionaries[column.name]))
            else:
                arrays.append(pa.array(values).cast(column.type))
        return pa.Table.from_arrays(arrays, schema=spec.arrow)


def _narrowed(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same numbers in the smallest integer type that holds them."""
    if not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    for narrow in (np.uint8, np.uint16, np.int32, np.uint32):
        limits = np.iinfo(narrow)
        if limits.min <= low and high <= limits.max and np.dtype(narrow).itemsize < values.dtype.itemsize:
            return values.astype(narrow)
    return values


def kernel_columns(records: Records, labels: Mapping[str, Labels], name_of: Callable[[int], str]) -> Columns:
    """Kernel records; ``name_of`` turns a name pointer into text."""
    columns = _work_columns(records)
    columns["name"] = labels["name"].translated(records["name"], name_of)
    for source, target in (
        ("grid_x", "grid_x"),
        ("grid_y", "grid_y"),
        ("grid_z", "grid_z"),
        ("block_x", "block_x"),
        ("block_y", "block_y"),
        ("block_z", "block_z"),
        ("registers", "registers_count"),
        ("shared_static", "shared_static_bytes"),
        ("shared_dynamic", "shared_dynamic_bytes"),
        ("local", "local_bytes"),
    ):
        columns[target] = np.ascontiguousarray(records[source]).astype(np.int32)
    return columns


def copy_columns(records: Records, labels: Mapping[str, Labels]) -> Columns:
    """Copy records, peer to peer or not."""
    columns = _work_columns(records)
    columns["kind"] = labels["kind"].translated(records["copy_kind"], lambda v: _at(COPY_KINDS, v))
    columns["src_memory"] = labels["src_memory"].translated(records["src_kind"], lambda v: _at(MEMORY_KINDS, v))
    columns["dst_memory"] = labels["dst_memory"].translated(records["dst_kind"], lambda v: _at(MEMORY_KINDS, v))
    columns["size_bytes"] = records["bytes"].astype(np.int64)
    return columns


def memset_columns(records: Records, labels: Mapping[str, Labels]) -> Columns:
    """Memset records."""
    columns = _work_columns(records)
    count = len(records)
    columns["kind"] = np.full(count, labels["kind"].code("memset"), np.int32)
    columns["src_memory"] = np.full(count, labels["src_memory"].code("unknown"), np.int32)
    columns["dst_memory"] = np.full(count, labels["dst_memory"].code("device"), np.int32)
    columns["size_bytes"] = records["bytes"].astype(np.int64)
    return columns


def call_columns(records: Records, labels: Mapping[str, Labels], *, driver: bool) -> Columns:
    """Runtime or driver call records."""
    names = cbids.DRIVER if driver else cbids.RUNTIME
    return {
        "thread_id": records["thread"].astype(np.int64),
        "correlation_id": records["correlation"].astype(np.int64),
        "name": labels["name"].translated(records["cbid"], lambda v: names.get(v, _OTHER_CALL)),
        "return_code": records["return_value"].astype(np.int32),
        **_times(records),
    }


def overhead_columns(records: Records, labels: Mapping[str, Labels]) -> Columns:
    """CUPTI overhead records."""
    of_thread = records["object_kind"] == 2  # CUPTI_ACTIVITY_OBJECT_THREAD
    return {
        "thread_id": np.where(of_thread, records["thread"], 0).astype(np.int64),
        "kind": labels["kind"].translated(records["overhead_kind"], lambda v: OVERHEAD_KINDS.get(v, "unknown")),
        **_times(records),
    }


def _work_columns(records: Records) -> Columns:
    return {
        "device": records["device"].astype(np.int32),
        "context_id": records["context"].astype(np.int32),
        "stream": records["stream"].astype(np.int32),
        "correlation_id": records["correlation"].astype(np.int64),
        "graph_id": records["graph"].astype(np.int32),
        "graph_node_id": records["graph_node"].astype(np.int64),
        **_times(records),
    }


def _times(records: Records) -> Columns:
    return {"start_ns": records["start"].astype(np.int64), "end_ns": records["end"].astype(np.int64)}


def _at(names: tuple[str, ...], index: int) -> str:
    return names[index] if index < len(names) else "unknown"
