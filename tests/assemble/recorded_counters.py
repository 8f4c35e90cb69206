"""The recordings of PM sampling on an H200 as inputs of the attribution, and what Nsight Compute counted."""

from __future__ import annotations

import csv
import gzip
import json
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from paths import SHARED

from spikeprof.profiler.assemble import layouts as lay
from spikeprof.profiler.assemble.counter_overlap import Ints, Samples
from spikeprof.profiler.assemble.counter_pieces import Work
from spikeprof.profiler.assemble.layouts import layout_for
from spikeprof.profiler.assemble.records import decode
from spikeprof.profiler.counter_metrics import METRICS

_FOLDER = SHARED / "recordings"

#: Recordings by name: samples of the workload's own process every 10, 5 and 2 µs, and of another one every 5 µs.
RECORDINGS = ("pm_10000", "pm_5000", "pm_2000", "pm_samples")

#: The workload in its order: class -> number of launches.
LARGE, SMALL, PRODUCT, GATHER = range(4)
LAUNCHES = {LARGE: 5, SMALL: 300, PRODUCT: 3, GATHER: 3}


class Recorded(NamedTuple):
    samples: Samples
    work: Work

    def column(self, metric: str) -> int:
        return self.samples.metrics.index(metric)


@cache
def recorded(name: str) -> Recorded:
    """One recording; times in ns from the first whole sample. Skips where it is not there."""
    path = next((p for p in _FOLDER.glob(f"*/{name}.json.gz")), None)
    if path is None:
        pytest.skip(f"{name}.json.gz is not there")
    data = json.loads(gzip.decompress(path.read_bytes()))
    begin = np.array([sample[0] for sample in data["samples"]], np.int64)
    end = np.array([sample[1] for sample in data["samples"]], np.int64)
    values = np.array([sample[2] for sample in data["samples"]])
    if "acts" in data:
        kernels = np.array([act[:2] for act in data["acts"]], np.int64).T
    else:
        kernels = _activity(path.with_name("activity_kernel10.bin"))
    samples = Samples(begin, end, *_metrics(data["metrics"], values)).shifted(-int(begin[1]))
    none = np.zeros(0, np.int64)
    class_id = np.repeat(list(LAUNCHES), list(LAUNCHES.values()))
    work = Work(*(kernels - begin[1]), class_id, none, none, none, none, none, np.zeros(len(class_id), bool))
    return Recorded(samples, work)


def _metrics(sources: list[str], values: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """All metrics of ours that the recorded ones of CUPTI's make up."""
    columns = {}
    for metric in METRICS.values():
        if set(metric.sources) <= set(sources):
            parts = [values[:, sources.index(source)] for source in metric.sources]
            columns[metric.name] = np.prod(parts, axis=0) * metric.scale
    return np.stack(list(columns.values()), axis=1), tuple(columns)


def _activity(path: object) -> Ints:
    """Begin and end of the kernels of an activity buffer [2, kernels]."""
    layout = layout_for(130001)
    assert layout is not None
    records = decode([np.fromfile(path, np.uint8)], layout).records[lay.KERNEL]
    # In the order of the workload: each class has a grid of its own.
    grids = records["grid_x"].tolist()
    assert grids == [2**18] * 5 + [2**12] * 300 + [2] * 3 + [2**15] * 3
    return np.stack((records["start"], records["end"])).astype(np.int64)


@cache
def nsight_compute() -> dict[int, dict[str, float]]:
    """Class -> metric of CUPTI's -> what Nsight Compute counted: one launch replayed, from empty caches."""
    found: dict[int, dict[str, float]] = {}
    with (_FOLDER / "h200_pm_sampling" / "ncu_truth.csv").open(newline="") as file:
        classes = {"0": LARGE, "1": SMALL, "3": PRODUCT, "4": GATHER}  # 2 is a second launch of SMALL
        for row in csv.DictReader(file):
            if row["ID"] in classes:
                value = float(row["Metric Value"].replace(",", ""))
                found.setdefault(classes[row["ID"]], {})[row["Metric Name"]] = value
    return found
