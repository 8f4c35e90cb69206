"""Trace: the immutable tables of one recording plus its manifest. What every analyzer is handed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spikeprof.profiler.errors import DamagedTrace, MissingTable
from spikeprof.profiler.schema import TABLES

#: A time so far from the session's start (104 days) is none: sums of ns are exact below it, also as float64.
FURTHEST_NS = 2**53

#: Reasons for which records are set aside that are no fault: GPU work was being recorded for a part of the time only.
RECORDED_WHILE_OFF = "recorded while recording was off"
IN_FLIGHT_AT_PAUSE = "in flight when recording paused"
EXPECTED_REASONS = frozenset({RECORDED_WHILE_OFF, IN_FLIGHT_AT_PAUSE})

#: Where a null says that a number is unknown.
_NULLABLE = ("devices", "topology", "origins", "model_graphs", "model_nodes", "model_tensors")


def coded(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[str]]:
    """A column of texts as (codes, labels): ``labels[codes[i]]`` is row i's text; a null has code -1."""
    data = column.combine_chunks()
    if isinstance(data, pa.ChunkedArray):  # a column of zero chunks stays chunked
        return np.empty(0, np.int32), []
    if not pa.types.is_dictionary(data.type):
        data = data.dictionary_encode()
    indices = pc.fill_null(data.indices, -1) if data.indices.null_count else data.indices
    return np.asarray(indices).astype(np.int32, copy=False), data.dictionary.to_pylist()


@dataclass(frozen=True, slots=True)
class CollectorNote:
    """What one collector did: the part of the manifest that says what was *not* measured and why."""

    state: str  # ok, degraded, refused or off (not asked for)
    reason: str = ""  # why not ok; when ok, at most what this machine rightly does not have
    records_count: int = 0
    dropped_count: int = 0  # lost before they reached us (CUPTI's own count, full queues)
    repaired_count: int = 0  # wrong in a way that could be put right
    set_aside_count: int = 0  # broken: counted, not in the tables
    set_aside_reasons: Mapping[str, int] = field(default_factory=dict)
    cost_ns: int = 0  # time it took from the program, where known

    @property
    def broken_count(self) -> int:
        """Records set aside for another reason than that recording was to be off then."""
        return self.set_aside_count - sum(self.set_aside_reasons.get(reason, 0) for reason in EXPECTED_REASONS)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a trace is of: source, versions, clock, collectors.

    ``source`` is ``spikeprof``, ``torch.profiler`` or ``nsys``. ``versions`` maps a component
    (``spikeprof driver cuda libcupti torch python``) to its version, absent = unknown.
    """

    source: str
    t0_unix_ns: int
    duration_ns: int
    command: tuple[str, ...] = ()
    exit_code: int | None = None
    host: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    collectors: Mapping[str, CollectorNote] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)  # recording options, as text
    notes: tuple[str, ...] = ()  # whatever else a reader must know, one sentence each


@dataclass(frozen=True)
class Trace:
    """One recording. Tables conform to ``schema.TABLES``; an absent table was not collected.

    Tables may be given as zero-argument loaders, so that opening a large trace reads only what is
    asked for. ``damaged`` maps a table that could not be read to the reason. ``is_part``: cut out of a recording.
    """

    manifest: Manifest
    tables: Mapping[str, pa.Table | Callable[[], pa.Table]]
    damaged: Mapping[str, str] = field(default_factory=dict)
    is_part: bool = False

    @cached_property
    def _loaded(self) -> dict[str, pa.Table]:
        return {}

    def __contains__(self, name: str) -> bool:
        return name in self.tables

    def table(self, name: str) -> pa.Table:
        """The table, loaded on first use. Raises MissingTable when it was not collected."""
        if name not in self.tables:
            known = "" if name in TABLES else " (no such table in the schema)"
            why = f": {self.damaged[name]}" if name in self.damaged else ""
            raise MissingTable(f"this trace holds no table {name!r}{known}{why}")
        if name not in self._loaded:
            value = self.tables[name]
            self._loaded[name] = value() if callable(value) else value
        return self._loaded[name]

    def column(self, table: str, column: str) -> npt.NDArray[Any]:
        """One numeric column as a NumPy array (zero-copy where Arrow can)."""
        return np.asarray(self.table(table).column(column).to_numpy())

    def codes(self, table: str, column: str) -> tuple[npt.NDArray[np.int32], list[str]]:
        """A dictionary column as (codes, labels): ``labels[codes[i]]`` is row i's text."""
        return coded(self.table(table).column(column))

    def sound(self) -> Trace:
        """The same trace without the tables whose damage shows only on reading them; they are named as damaged.

        So are those whose rows cannot be true. What we record or import has such rows set aside one by one; this is
        for tables that come from elsewhere.
        """
        damaged = dict(self.damaged)
        for name in self.tables:
            try:
                if fault := _fault(self.table(name), name):
                    damaged[name] = fault
            except DamagedTrace as error:
                damaged[name] = str(error)
        kept = {name: partial(self.table, name) for name in self.tables if name not in damaged}
        return replace(self, tables=MappingProxyType(kept), damaged=MappingProxyType(damaged))

    def restricted(self, names: Iterable[str]) -> Trace:
        """The same trace showing only the named tables: an analyzer never sees what it did not declare."""
        wanted = set(names)
        kept = {name: partial(self.table, name) for name in self.tables if name in wanted}
        return replace(self, tables=MappingProxyType(kept))

    def narrowed(self, start_ns: int, end_ns: int) -> Trace:
        """The rows that begin in ``[start_ns, end_ns)``, and the recording windows cut to it.

        Tables without a time (devices, processes, graph nodes) stay whole: they say what things are. So do the
        runtime calls: what runs here may have been launched before. Counters per launch stay what they are over the
        whole recording; where its counts went is no more known.
        """
        kept: dict[str, pa.Table | Callable[[], pa.Table]] = {}
        for name in self.tables:
            key = TABLES[name].sort_by if name != "runtime_calls" else None
            key = key if key in ("start_ns", "t_ns") else None
            cut = _cut if name == "windows" else _between
            kept[name] = partial(cut, self, name, key, start_ns, end_ns) if key else self.tables[name]
        # A trace that says nothing of windows was recorded throughout: now only here.
        if "windows" not in self.tables:
            kept["windows"] = partial(_one_window, self, start_ns, end_ns)
        kept.pop("counter_balance", None)
        return replace(self, tables=MappingProxyType(kept), is_part=True)


def _fault(table: pa.Table, name: str) -> str:
    """What makes it impossible to work with the table, or empty."""
    for column in table.column_names:
        values = table.column(column)
        if values.null_count and name not in _NULLABLE:
            return f"{values.null_count} row(s) of the table {name!r} have no value in the column {column!r}"
        if column.endswith("_ns") and values.null_count < len(values):
            extremes = pc.min_max(values).as_py()
            if max(-extremes["min"], extremes["max"]) > FURTHEST_NS:
                return f"times in the table {name!r} cannot be on the session's clock: see its column {column!r}"
    return ""


def _between(trace: Trace, name: str, key: str, start_ns: int, end_ns: int) -> pa.Table:
    table = trace.table(name)
    times = table.column(key)
    return table.filter(pc.and_(pc.greater_equal(times, start_ns), pc.less(times, end_ns)))


def _cut(trace: Trace, name: str, _key: str, start_ns: int, end_ns: int) -> pa.Table:
    table = trace.table(name)
    begins = pc.max_element_wise(table.column("start_ns"), start_ns)
    ends = pc.min_element_wise(table.column("end_ns"), end_ns)
    for column, values in (("start_ns", begins), ("end_ns", ends)):
        table = table.set_column(table.schema.get_field_index(column), column, values.cast(pa.int64()))
    return table.filter(pc.less(begins, ends))


def _one_window(trace: Trace, start_ns: int, end_ns: int) -> pa.Table:
    ranks = pc.unique(trace.table("processes").column("rank")) if "processes" in trace else pa.array([0], pa.int32())
    count = len(ranks)
    columns = [
        ranks,
        pa.array(["traced"] * count).dictionary_encode(),
        pa.array(["--between"] * count).dictionary_encode(),
        pa.array([start_ns] * count, pa.int64()),
        pa.array([end_ns] * count, pa.int64()),
    ]
    return pa.table(columns, names=TABLES["windows"].arrow.names).cast(TABLES["windows"].arrow)
