"""Attributed counters as tables of the trace: ``kernel_classes``, ``counters`` and ``counter_balance``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spikeprof.profiler.assemble.counter_overlap import Ints, Samples, totals
from spikeprof.profiler.assemble.counter_pieces import Work
from spikeprof.profiler.assemble.counter_skew import Skew, Skews
from spikeprof.profiler.assemble.counters import PLACES, Attributed, Estimates, attribute, find_skews
from spikeprof.profiler.counter_metrics import is_additive
from spikeprof.profiler.schema import TABLES

#: What makes launches identical, beside the GPU.
CLASS_COLUMNS = ("name", "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")

#: The columns that are read of each table.
COLUMNS = {
    "kernels": ("rank", "device", "start_ns", "end_ns", "graph_id", *CLASS_COLUMNS),
    "memory_ops": ("device", "start_ns", "end_ns", "kind"),
    "windows": ("rank", "state", "start_ns", "end_ns"),
}

_MATCHES = ("none", "exact", "class")


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """What became of the samples of one GPU."""

    device: int
    skews: Skews
    samples_count: int
    set_aside_count: int  # samples that could not be used


@dataclass(frozen=True, slots=True)
class CounterTables:
    """The tables by name, and what became of each GPU's samples."""

    tables: dict[str, pa.Table]
    devices: tuple[DeviceCounters, ...]


def counter_tables(
    sampled: Sequence[tuple[int, Samples]], kernels: pa.Table, memory_ops: pa.Table, windows: pa.Table
) -> CounterTables:
    """Attribute the samples of every GPU to the kernels of a trace.

    ``sampled`` has (device, samples in trace time); a GPU may come more than once, each time with other metrics. The
    other tables are those of the trace, in their order, with the columns ``COLUMNS`` at least; ``windows`` may be
    empty. Memory: some 300 bytes a kernel and sample, one GPU at a time, and the tables.
    """
    classes, counters, balances, devices = [], [], [], []
    first_class = 0
    for device in sorted({device for device, _ in sampled}):
        sets = [samples for of, samples in sampled if of == device]
        rows, class_id, shapes = _classes(kernels, device)
        work = _work(kernels, memory_ops, windows, device, rows, class_id)
        found = _attributed(sets, work, len(shapes))
        classes.append(_class_table(device, shapes, work, found, first_class))
        counters += [_counter_table(one, rows, class_id, first_class) for one in found]
        balances += [_balance_table(device, one) for one in found]
        samples_count = sum(len(samples.start_ns) for samples in sets)
        devices.append(DeviceCounters(device, found[0].skews, samples_count, sum(one.set_aside_count for one in found)))
        first_class += len(shapes)
    parts = {"kernel_classes": classes, "counters": counters, "counter_balance": balances}
    tables = {
        name: pa.concat_tables(some).unify_dictionaries() if some else TABLES[name].empty()
        for name, some in parts.items()
    }
    return CounterTables(tables, tuple(devices))


def _attributed(sets: Sequence[Samples], work: Work, classes_count: int) -> list[Attributed]:
    """Each set attributed, all with the skews that are known best: there is one clock."""
    if len(sets) == 1:
        return [attribute(sets[0], work, classes_count)]
    found = [find_skews(samples, work) for samples in sets]
    best = Skews(_surest([skews.direct for skews in found]), _surest([skews.graph for skews in found]))
    return [attribute(samples, work, classes_count, best) for samples in sets]


def _surest(skews: Sequence[Skew]) -> Skew:
    return min(skews, key=lambda skew: skew.sd_ns if np.isfinite(skew.sd_ns) else np.inf)


def _classes(kernels: pa.Table, device: int) -> tuple[Ints, npt.NDArray[np.int32], pa.Table]:
    """The rows of a GPU's kernels, the class of each, and one row of the classes' columns for each class."""
    rows = np.flatnonzero(_array(kernels["device"]) == device)
    code, count = np.zeros(len(rows), np.int64), 1
    for name in CLASS_COLUMNS:
        distinct, values = np.unique(_codes(kernels[name])[rows], return_inverse=True)
        if len(distinct) < 2:
            continue
        # Renumbered at each column, so that the product of all their counts never overflows.
        kept, code = np.unique(code * len(distinct) + values, return_inverse=True)
        count = len(kept)
    first = np.full(count if len(rows) else 0, len(rows))
    np.minimum.at(first, code, np.arange(len(rows)))
    shapes = kernels.select(CLASS_COLUMNS).take(rows[first])
    return rows, code.astype(np.int32), shapes


def _work(
    kernels: pa.Table, memory_ops: pa.Table, windows: pa.Table, device: int, rows: Ints, class_id: npt.NDArray[np.int32]
) -> Work:
    ranks = np.unique(_array(kernels["rank"])[rows])
    ops = np.flatnonzero(_array(memory_ops["device"]) == device)
    off = np.flatnonzero(
        ~np.asarray(pc.equal(windows["state"].cast(pa.string()), "traced")) & np.isin(_array(windows["rank"]), ranks)
    )
    return Work(
        _array(kernels["start_ns"])[rows],
        _array(kernels["end_ns"])[rows],
        class_id,
        _array(memory_ops["start_ns"])[ops],
        _array(memory_ops["end_ns"])[ops],
        _codes(memory_ops["kind"])[ops],
        _array(windows["start_ns"])[off],
        _array(windows["end_ns"])[off],
        _array(kernels["graph_id"])[rows] != 0,
    )


def _array(column: pa.ChunkedArray) -> Ints:
    return np.asarray(column.combine_chunks(), np.int64)


def _codes(column: pa.ChunkedArray) -> Ints:
    """The values of a column of numbers; of one of text, a number for each distinct one."""
    if pa.types.is_dictionary(column.type):
        column = pa.chunked_array([column.unify_dictionaries().combine_chunks().indices])
    return _array(column)


def _class_table(device: int, shapes: pa.Table, work: Work, found: Sequence[Attributed], first_class: int) -> pa.Table:
    count = len(shapes)
    sampled = np.any([one.covered > 0 for one in found], axis=0)
    class_id, duration = work.kernel_class[sampled], (work.kernel_end_ns - work.kernel_start_ns)[sampled]
    columns = {
        "class_id": np.arange(first_class, first_class + count),
        "device": np.full(count, device),
        "launches_count": np.bincount(class_id, minlength=count),
        "total_ns": totals(class_id, duration, count).astype(np.int64),
    }
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    for name in CLASS_COLUMNS:
        table = table.append_column(name, shapes[name])
    return table.select(TABLES["kernel_classes"].arrow.names).cast(TABLES["kernel_classes"].arrow)


def _counter_table(found: Attributed, rows: Ints, class_id: npt.NDArray[np.int32], first_class: int) -> pa.Table:
    """The classes that were launched, metric by metric, then the launches with values of their own."""
    launched = np.flatnonzero(np.bincount(class_id, minlength=len(found.match)) > 0)
    none = np.full(len(launched), -1)
    of_classes = _estimates(found.classes, launched, none, launched + first_class, found.match[launched], found.metrics)
    own = np.arange(len(found.kernels))
    classes = class_id[found.kernels].astype(np.int64) + first_class
    matches = np.full(len(own), _MATCHES.index("exact"))
    return pa.concat_tables(
        [of_classes, _estimates(found.exact, own, rows[found.kernels], classes, matches, found.metrics)]
    )


def _estimates(
    found: Estimates,
    at: Ints,
    kernel_id: Ints,
    class_id: Ints,
    matches: npt.NDArray[np.integer],
    metrics: tuple[str, ...],
) -> pa.Table:
    width, count = len(metrics), len(at)
    metric = np.repeat(np.arange(width, dtype=np.int32), count)
    match = np.tile(matches.astype(np.int32), width)
    columns = {
        "kernel_id": pa.array(np.tile(kernel_id, width)),
        "class_id": pa.array(np.tile(class_id, width)),
        "metric": pa.DictionaryArray.from_arrays(metric, pa.array(metrics, pa.string())),
        "value": pa.array(found.value[at].T.ravel()),
        "low": pa.array(found.low[at].T.ravel()),
        "high": pa.array(found.high[at].T.ravel()),
        "match": pa.DictionaryArray.from_arrays(match, pa.array(_MATCHES)),
    }
    return pa.table(columns).cast(TABLES["counters"].arrow)


def _balance_table(device: int, found: Attributed) -> pa.Table:
    sums = [(m, metric) for m, metric in enumerate(found.metrics) if is_additive(metric)]
    columns = {
        "device": [device] * len(sums) * len(PLACES),
        "metric": [metric for _, metric in sums for _ in PLACES],
        "place": [place for _ in sums for place in PLACES],
        "value": [float(value) for m, _ in sums for value in found.balance[:, m]],
        "time_ns": [int(ns) for _ in sums for ns in found.balance_ns],
    }
    return pa.table(columns, schema=TABLES["counter_balance"].arrow)
