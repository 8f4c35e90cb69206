"""Hardware counters per launch as they were attributed to kernels, with their bounds: of classes and of launches.

A class is a set of identical launches (name, grid, block, GPU). Its value is its own row of ``counters``; where it has
none, the mean of its launches that have values of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.derived.groups import group_codes
from spikeprof.analyzers.derived.intervals import Bools, Integers, Ints, ints
from spikeprof.profiler import hardware
from spikeprof.profiler.trace import Trace

Floats = npt.NDArray[np.float64]

SHAPE = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
BOUNDS = ("value", "low", "high")

#: How a row came by its values, the surest first.
MATCHES = ("exact", "class", "none")


class Estimate(NamedTuple):
    """A number per row with its bounds; NaN = not measured."""

    value: Floats
    low: Floats
    high: Floats

    @classmethod
    def unknown(cls, count: int) -> Estimate:
        """Nothing measured in any of the rows."""
        return cls(*(np.full(count, np.nan) for _ in BOUNDS))

    def times(self, factor: Floats | float) -> Estimate:
        """All of it times a factor that is not negative."""
        return Estimate(*(part * factor for part in self))

    def plus(self, other: Estimate) -> Estimate:
        """The sum of two; its bounds are those of both at worst."""
        return Estimate(*(a + b for a, b in zip(self, other, strict=True)))

    def less(self, other: Estimate) -> Estimate:
        """The difference of two; its bounds are those of both at worst."""
        return Estimate(self.value - other.value, self.low - other.high, self.high - other.low)

    def over(self, other: Estimate) -> Estimate:
        """The quotient, where the divisor is above 0; its bounds are those of both at worst, or infinite."""
        known = np.isfinite(self.value) & (other.value > 0)
        least = np.where(other.low > 0, other.low, np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = self.value / other.value
            ends = [a / b for a in (self.low, self.high) for b in (least, other.high)]
        low = np.where(np.isnan(least), np.where(self.low < 0, -np.inf, ends[1]), np.fmin(ends[0], ends[1]))
        high = np.where(np.isnan(least), np.where(self.high > 0, np.inf, ends[3]), np.fmax(ends[2], ends[3]))
        return Estimate(*(np.where(known, part, np.nan) for part in (value, low, high)))

    def within(self, low: float, high: float) -> Estimate:
        """All of it clipped to a range that the number cannot leave."""
        return Estimate(*(np.clip(part, low, high) for part in self))

    def of(self, rows: Integers | Bools) -> Estimate:
        """Some of the rows."""
        return Estimate(*(part[rows] for part in self))


@dataclass(frozen=True, slots=True)
class Counted:
    """Rows (classes, or single launches) with their counters. Arrays have one element per row.

    ``total_ns`` is the time of all launches of a row together. A metric that was not recorded is not in ``counts``.
    """

    class_id: Ints
    device: Ints
    launches: Ints
    total_ns: Ints
    match: list[str]
    counts: Mapping[str, Estimate]  # per launch, by metric

    def per_launch(self, metric: str) -> Estimate:
        """One metric, unknown where it was not recorded."""
        return self.counts.get(metric, Estimate.unknown(len(self.class_id)))

    @property
    def mean_ns(self) -> Floats:
        """The mean duration of a launch."""
        return self.total_ns / np.maximum(self.launches, 1)


@dataclass(frozen=True, slots=True)
class Classes:
    """The table ``kernel_classes`` with its counters."""

    names: list[str]  # by class
    shape: Mapping[str, Ints]  # SHAPE by class
    counted: Counted

    def scope(self, row: int) -> dict[str, str | int]:
        """Which kernel a class is, for a finding."""
        return {"kernel": self.names[row], **{name: int(self.shape[name][row]) for name in SHAPE}}


def kernel_classes(trace: Trace) -> Classes:
    """All classes. Needs ``kernel_classes`` and ``counters``.

    Of a part of a recording, the launches are those in it (needs ``kernels``), and what each counts is the mean over
    the whole recording.
    """
    launches, total_ns = (ints(trace.column("kernel_classes", c)) for c in ("launches_count", "total_ns"))
    device = ints(trace.column("kernel_classes", "device"))
    codes, labels = trace.codes("kernel_classes", "name")
    match, counts = _of_classes(trace, len(launches))
    shape = {name: ints(trace.column("kernel_classes", name)) for name in SHAPE}
    counted = Counted(ints(np.arange(len(launches))), device, launches, total_ns, match, counts)
    classes = Classes([labels[code] for code in codes], shape, counted)
    return _of_part(trace, classes) if trace.is_part and "kernels" in trace else classes


def _of_part(trace: Trace, classes: Classes) -> Classes:
    """The classes with the launches of a part of the recording."""
    of_kernel = _class_of_kernels(trace, classes)
    known = of_kernel >= 0
    length = trace.column("kernels", "end_ns") - trace.column("kernels", "start_ns")
    count = len(classes.names)
    launches = ints(np.bincount(of_kernel[known], minlength=count))
    total_ns = ints(np.bincount(of_kernel[known], length[known], minlength=count))
    return replace(classes, counted=replace(classes.counted, launches=launches, total_ns=total_ns))


def _of_classes(trace: Trace, count: int) -> tuple[list[str], dict[str, Estimate]]:
    """(match, counters per launch) by class."""
    codes, labels = trace.codes("counters", "metric")
    matches, match_labels = trace.codes("counters", "match")
    kernel, class_id = trace.column("counters", "kernel_id"), trace.column("counters", "class_id")
    columns = [trace.column("counters", name) for name in BOUNDS]
    usable = np.isfinite(columns[0]) & (class_id >= 0) & (class_id < count)
    width = len(labels)
    found = np.full((3, count * width), np.nan)
    rank = np.full(count, len(MATCHES) - 1)
    order = ints([MATCHES.index(m) if m in MATCHES else len(MATCHES) - 1 for m in match_labels])
    # The mean of single launches first: where a class has a value of its own, that counts.
    for rows in (np.flatnonzero(usable & (kernel >= 0)), np.flatnonzero(usable & (kernel < 0))):
        key = class_id[rows].astype(np.int64) * width + codes[rows]
        number = np.bincount(key, minlength=count * width)
        some = number > 0
        for part, column in zip(found, columns, strict=True):
            part[some] = np.bincount(key, column[rows], minlength=count * width)[some] / number[some]
        rank[class_id[rows]] = order[matches[rows]]
    estimates = found.reshape(3, count, width)
    counts = {label: Estimate(*estimates[:, :, i]) for i, label in enumerate(labels)}
    return [MATCHES[i] for i in rank], counts


def single_launches(trace: Trace, metric: str, most: int) -> tuple[Ints, Counted]:
    """(rows of ``kernels``, their counters): the launches with values of their own that count most of a metric."""
    codes, labels = trace.codes("counters", "metric")
    kernel, class_id = _kernel_rows(trace), trace.column("counters", "class_id")
    columns = [trace.column("counters", name) for name in BOUNDS]
    usable = np.isfinite(columns[0]) & (kernel >= 0)
    usable &= (class_id >= 0) & (class_id < trace.table("kernel_classes").num_rows)
    ranked = np.flatnonzero(usable & (codes == (labels.index(metric) if metric in labels else -1)))
    chosen = ranked[np.argsort(-columns[0][ranked], kind="stable")][:most]
    picked = ints(kernel[chosen])
    counts: dict[str, Estimate] = {}
    if not len(picked):
        return picked, Counted(picked, picked, picked, picked, [], counts)
    by_kernel = np.argsort(picked)
    theirs = np.flatnonzero(usable & np.isin(kernel, picked))
    for code, label in enumerate(labels):
        rows = theirs[codes[theirs] == code]
        at = by_kernel[np.searchsorted(picked[by_kernel], kernel[rows])]
        counts[label] = Estimate.unknown(len(picked))
        for part, column in zip(counts[label], columns, strict=True):
            part[at] = column[rows]
    length = ints(trace.column("kernels", "end_ns")[picked] - trace.column("kernels", "start_ns")[picked])
    device = ints(trace.column("kernels", "device")[picked])
    ones = np.ones(len(picked), np.int64)
    return picked, Counted(ints(class_id[chosen]), device, ones, length, ["exact"] * len(picked), counts)


def _kernel_rows(trace: Trace) -> Ints:
    """The row of ``kernels`` that each row of ``counters`` is about, -1 where it is of a class, or not here."""
    number = trace.column("counters", "kernel_id")
    known = trace.column("kernels", "kernel_id") if "kernels" in trace else ints([])
    if not len(known):
        return np.full(len(number), -1, np.int64)
    row = np.minimum(np.searchsorted(known, number), len(known) - 1)
    return ints(np.where(known[row] == number, row, -1))


def followers(trace: Trace, classes: Classes, per_launch: Floats) -> Floats:
    """Per class, the mean of ``per_launch`` over the kernels that come right after its launches on their stream.

    ``per_launch`` is by class; kernels of no class, and those without a value, count as nothing. NaN if none follows.
    """
    count = len(classes.names)
    if "kernels" not in trace or not count:
        return np.full(count, np.nan)
    of_kernel = _class_of_kernels(trace, classes)
    device, stream = trace.column("kernels", "device"), trace.column("kernels", "stream")
    rank, context = trace.column("kernels", "rank"), trace.column("kernels", "context_id")
    lane, _ = group_codes(rank, device, context, stream)
    order = np.lexsort((trace.column("kernels", "start_ns"), lane))
    before, after = order[:-1], order[1:]
    pairs = (lane[before] == lane[after]) & (of_kernel[before] >= 0)
    before, after = of_kernel[before[pairs]], of_kernel[after[pairs]]
    value = np.where(after >= 0, np.nan_to_num(per_launch)[np.maximum(after, 0)], 0.0)
    number = np.bincount(before, minlength=count)
    sums = np.bincount(before, value, minlength=count)
    result = np.full(count, np.nan)
    np.divide(sums, number, out=result, where=number > 0)
    return result


def _class_of_kernels(trace: Trace, classes: Classes) -> Ints:
    """The class of each row of ``kernels``, -1 for none."""
    codes, labels = trace.codes("kernels", "name")
    number = {label: i for i, label in enumerate(labels)}
    name = ints([number.get(label, -1) for label in classes.names])
    count = len(name)
    columns: list[Integers] = [np.concatenate([name + 1, codes.astype(np.int64) + 1])]
    for column in (*SHAPE, "device"):
        mine = classes.counted.device if column == "device" else classes.shape[column]
        columns.append(np.concatenate([mine, ints(trace.column("kernels", column))]))
    keys, keys_count = group_codes(*columns)
    of_key = np.full(keys_count, -1)
    of_key[keys[:count]] = np.arange(count)
    return ints(of_key[keys[count:]])


class Peaks(NamedTuple):
    """What a GPU can do at most; NaN or None = unknown."""

    model: str
    dram_bytes_per_s: float
    dram_source: str
    l2_bytes: float
    fp16: hardware.Peak | None  # FLOP per second of dense matrix products


def peaks(trace: Trace) -> dict[int, Peaks]:
    """By GPU: what the trace says, else what the vendor states of the product. Empty without ``devices``."""
    found: dict[int, Peaks] = {}
    rows = trace.table("devices").to_pylist() if "devices" in trace else []
    for row in rows:
        stated = hardware.lookup(row["name"] or "") or hardware.Gpu("")
        dram, source = row["mem_peak_bytes_per_s"], row["peak_source"] or ""
        if not dram and stated.dram_bytes_per_s:
            dram, source = stated.dram_bytes_per_s.value, stated.dram_bytes_per_s.source
        l2 = row["l2_bytes"] or (stated.l2_bytes.value if stated.l2_bytes else np.nan)
        one = Peaks(row["name"] or "", float(dram or np.nan), source, float(l2), stated.fp16_flop_per_s)
        if row["device"] not in found or not found[row["device"]].dram_bytes_per_s > 0:
            found[row["device"]] = one
    return found
