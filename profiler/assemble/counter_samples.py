"""What the samplers wrote to the table ``counter_samples``: row group by row group, whatever its length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler import store
from spikeprof.profiler.collectors.pm_files import SampledSet
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import FURTHEST_NS

_NAME = "counter_samples"


def write_counter_samples(folder: Path, sets: Sequence[SampledSet], t0_unix_ns: int) -> int:
    """Write the samples of every list of metrics, sorted by begin; returns the number of samples.

    Left out are those whose times cannot be true, as after a power cut: one would make a reader doubt all the others.
    A sample of m metrics is m rows. Memory: some 16 bytes a sample and one row group.
    """
    sets = [one for one in sets if len(one.rows)]
    sound = [_sound(one, t0_unix_ns) for one in sets]
    names = list(dict.fromkeys(metric for one in sets for metric in one.metrics))
    labels = pa.array(names, pa.string())
    of = np.repeat(np.arange(len(sets)), [len(rows) for rows in sound])
    row = np.concatenate(sound) if sets else np.empty(0, np.int64)
    begin = np.concatenate([one.times()[rows, 0] for one, rows in zip(sets, sound, strict=True)]) if sets else row
    order = np.argsort(begin, kind="stable")
    widest = max((len(one.metrics) for one in sets), default=1)
    step = max(store.ROW_GROUP_ROWS // widest, 1)
    with store.open_table(folder, _NAME) as writer:
        for at in range(0, max(len(order), 1), step):
            some = order[at : at + step]
            parts = [_rows(one, row[some[of[some] == i]], names, labels, t0_unix_ns) for i, one in enumerate(sets)]
            table = pa.concat_tables(parts) if parts else TABLES[_NAME].empty()
            writer.write_table(table.sort_by("start_ns").cast(TABLES[_NAME].arrow) if len(parts) > 1 else table)
    return len(order)


def _sound(one: SampledSet, t0_unix_ns: int) -> npt.NDArray[np.intp]:
    """The samples that end after they begin, not too far from the session's start."""
    times = one.times() - t0_unix_ns
    near = (np.abs(times) <= FURTHEST_NS).all(axis=1)
    return np.flatnonzero(near & (times[:, 1] > times[:, 0]))


def _rows(
    one: SampledSet, rows: np.ndarray[tuple[int], np.dtype[np.int64]], names: list[str], labels: pa.Array, t0: int
) -> pa.Table:
    """Some samples of one list, a row for each metric."""
    width = len(one.metrics)
    times = np.repeat(one.times()[rows] - t0, width, axis=0)
    codes = np.tile([names.index(metric) for metric in one.metrics], len(rows)).astype(np.int32)
    columns = [
        pa.array(np.full(len(rows) * width, one.device, np.int32)),
        pa.array(times[:, 0]),
        pa.array(times[:, 1]),
        pa.DictionaryArray.from_arrays(pa.array(codes), labels),
        pa.array(one.values()[rows].ravel()),
    ]
    return pa.Table.from_arrays(columns, schema=TABLES[_NAME].arrow)
