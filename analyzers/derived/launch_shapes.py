"""Classes of launches: kernels of one name, grid, block, registers and shared memory on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spikeprof.analyzers.derived.counters import SHAPE, Classes, Estimate, Floats, kernel_classes
from spikeprof.analyzers.derived.groups import first_of_groups, group_codes
from spikeprof.analyzers.derived.intervals import Integers, Ints, ints, overlap_with, total, union
from spikeprof.analyzers.derived.occupancy import Occupancy, Shapes, Waves, occupancy, waves
from spikeprof.analyzers.derived.work import measured_spans
from spikeprof.profiler import hardware
from spikeprof.profiler.hardware import Architecture
from spikeprof.profiler.trace import Trace

#: A grid has no more blocks than this, whatever a record says: products of its sides stay exact.
_MOST_BLOCKS = 2**53


@dataclass(frozen=True, slots=True)
class Launches:
    """Classes of launches, one element per class; ``of_kernel`` is the class of each row of ``kernels``, -1 = none.

    ``counted`` is the row of ``kernel_classes`` with the counters of a class, -1 = none. ``clock_mhz`` is the mean of
    the SM clock at its launches, NaN = not sampled. ``sm_count`` 0 = unknown.
    """

    names: list[str]
    shape: Mapping[str, Ints]  # SHAPE by class
    device: Ints
    shapes: Shapes
    architectures: list[Architecture | None]
    sm_count: Ints
    launches: Ints
    total_ns: Ints
    of_kernel: Ints
    counted: Ints
    clock_mhz: Floats

    @property
    def grid_blocks(self) -> Ints:
        """Blocks of the grid; 0 = not recorded."""
        return _product(self.shape, "grid")

    def occupancy(self) -> Occupancy:
        """Of each class."""
        return occupancy(self.shapes, self.architectures)

    def waves(self, occupied: Occupancy) -> Waves:
        """Of each class. Clusters are not recorded: each block counts by itself."""
        return waves(occupied, self.grid_blocks, self.sm_count)

    def scope(self, row: int) -> dict[str, str | int]:
        """Which launches a class is, for a finding; the GPU where there are several."""
        where: dict[str, str | int] = {"kernel": self.names[row]}
        where |= {name: int(self.shape[name][row]) for name in SHAPE}
        return where | ({"device": int(self.device[row])} if len(set(self.device.tolist())) > 1 else {})


def launches(trace: Trace) -> Launches:
    """All classes, in the order of their first launch. Needs ``kernels``; uses devices, counters and samples."""
    start, end = (trace.column("kernels", name) for name in ("start_ns", "end_ns"))
    rows = np.flatnonzero(end >= start)
    names, labels = trace.codes("kernels", "name")
    columns = {name: trace.column("kernels", name)[rows] for name in (*SHAPE, "device", "registers_count")}
    shared = sum(ints(trace.column("kernels", f"shared_{kind}_bytes")[rows]) for kind in ("static", "dynamic"))
    codes, count = group_codes(names[rows], *columns.values(), ints(shared))
    first = first_of_groups(codes, count)
    one = {name: ints(values[first]) for name, values in columns.items()}
    shape = {name: one[name] for name in SHAPE}
    of_kernel = np.full(len(start), -1, np.int64)
    of_kernel[rows] = codes
    architectures, arch_of, sms_of = _devices(trace)
    arch = ints([arch_of.get(device, -1) for device in one["device"].tolist()])
    number = np.bincount(codes, minlength=count)
    clocks = np.bincount(codes, _clocks(trace, columns["device"], start[rows]), minlength=count)
    kernel_names = [labels[i] for i in names[rows][first]]
    return Launches(
        kernel_names,
        shape,
        one["device"],
        Shapes(_product(shape, "block"), one["registers_count"], np.maximum(ints(shared)[first], 0), arch),
        architectures,
        ints([sms_of.get(device, 0) for device in one["device"].tolist()]),
        ints(number),
        ints(np.bincount(codes, (end - start)[rows], minlength=count)),
        of_kernel,
        _counted(trace, kernel_names, shape, one["device"]),
        clocks / np.maximum(number, 1),
    )


def _product(shape: Mapping[str, Ints], of: str) -> Ints:
    """Blocks of a grid, or threads of a block; 0 where a side is not recorded."""
    sides = [np.maximum(shape[f"{of}_{axis}"], 0).astype(np.float64) for axis in "xyz"]
    return ints(np.minimum(sides[0] * sides[1] * sides[2], _MOST_BLOCKS))


def _devices(trace: Trace) -> tuple[list[Architecture | None], dict[int, int], dict[int, int]]:
    """(architectures, the place of each GPU's in them, SMs of each GPU): what the trace says, else the product's."""
    found: list[Architecture | None] = []
    places: dict[int, int] = {}
    sms: dict[int, int] = {}
    for row in trace.table("devices").to_pylist() if "devices" in trace else ():
        stated = hardware.lookup(row["name"] or "") or hardware.Gpu("")
        architecture = hardware.architecture(row["sm_arch"] or "")
        if architecture is not None and row["device"] not in places:
            if architecture not in found:
                found.append(architecture)
            places[row["device"]] = found.index(architecture)
        count = row["sm_count"] or (stated.sm_count.value if stated.sm_count else 0)
        sms[row["device"]] = sms.get(row["device"]) or int(count)
    return found, places, sms


def _clocks(trace: Trace, device: Integers, times: Ints) -> Floats:
    """The SM clock (MHz) of a GPU by the reading nearest to each time; NaN without one."""
    result = np.full(len(times), np.nan)
    for one in np.unique(device).tolist():
        t_ns, value = readings(trace, one, "sm_clock_mhz")
        mine = device == one
        if len(t_ns):
            after = np.searchsorted(t_ns, times[mine])
            before, after = np.maximum(after - 1, 0), np.minimum(after, len(t_ns) - 1)
            nearer = times[mine] - t_ns[before] <= t_ns[after] - times[mine]
            result[mine] = value[np.where(nearer, before, after)]
    return result


def readings(trace: Trace, device: int, metric: str) -> tuple[Ints, Floats]:
    """(times in ns ascending, values) of one gauge of one GPU; none when it was not sampled."""
    if "samples" not in trace:
        return ints([]), np.empty(0)
    codes, labels = trace.codes("samples", "metric")
    value = trace.column("samples", "value")
    mine = (codes == (labels.index(metric) if metric in labels else -1)) & np.isfinite(value)
    mine &= trace.column("samples", "device") == device
    t_ns = ints(trace.column("samples", "t_ns")[mine])
    order = np.argsort(t_ns, kind="stable")
    return t_ns[order], value[mine][order]


# ---------------------------------------------------------------- counters


def _counted(trace: Trace, names: list[str], shape: Mapping[str, Ints], device: Ints) -> Ints:
    """The row of ``kernel_classes`` of the same name, grid, block and GPU, -1 for none."""
    if "kernel_classes" not in trace or "counters" not in trace or not names:
        return np.full(len(names), -1, np.int64)
    codes, labels = trace.codes("kernel_classes", "name")
    number = {label: i for i, label in enumerate(labels)}
    columns: list[Integers] = [np.concatenate([codes, ints([number.get(name, -1) for name in names])]) + 1]
    columns += [ints(np.concatenate([trace.column("kernel_classes", name), shape[name]])) for name in SHAPE]
    columns.append(ints(np.concatenate([trace.column("kernel_classes", "device"), device])))
    keys, keys_count = group_codes(*columns)
    row_of_key = np.full(keys_count, -1, np.int64)
    row_of_key[keys[: len(codes)]] = np.arange(len(codes))
    return row_of_key[keys[len(codes) :]]


@dataclass(frozen=True, slots=True)
class Activity:
    """What was counted of each class: the share of SMs at work while it ran, and warp instructions per active cycle."""

    sm_active: Estimate
    per_cycle: Estimate


def activity(trace: Trace, of: Launches, max_bounds_ratio: float) -> Activity:
    """Counters of each class, unknown where not counted.

    Instructions per cycle are those of a launch over its SM cycles with a warp: SMs times the share of them at work,
    times the clock, times the duration. Where the upper bound is more than ``max_bounds_ratio`` times the lower one,
    they are unknown: the quotient of two numbers that may be nearly nothing is none.
    """
    unknown = Estimate.unknown(len(of.names))
    if not (of.counted >= 0).any():
        return Activity(unknown, unknown)
    classes: Classes = kernel_classes(trace)
    counted = classes.counted
    row = np.maximum(of.counted, 0)
    known = of.counted >= 0

    def of_class(metric: str) -> Estimate:
        return Estimate(*(np.where(known, part, np.nan) for part in counted.per_launch(metric).of(row)))

    sm_active = of_class("sm_active_share").within(0, 1)
    cycles = of.sm_count * counted.mean_ns[row] * of.clock_mhz / 1000
    per_cycle = of_class("instructions_count").over(sm_active.times(cycles))
    usable = (per_cycle.low > 0) & (per_cycle.high <= max_bounds_ratio * per_cycle.low)
    return Activity(sm_active, Estimate(*(np.where(usable, part, np.nan) for part in per_cycle)))


@dataclass(frozen=True, slots=True)
class HeldWarps:
    """Warps on all GPUs as shares of the slots for them, over ``time_ns`` in which both could be known."""

    measured: float
    modelled: float
    time_ns: int


def held_warps(trace: Trace, of: Launches, held_share: Floats) -> HeldWarps | None:
    """Warps as GPM measured them beside what theory says; None where they were not sampled while kernels were recorded.

    ``held_share``: by class, warps over the slots for them on the whole GPU while it runs. A reading is the mean since
    the one before; those that reach out of the recorded time are left out, and those before the first kernel and
    after the last.
    """
    start, end, device = (trace.column("kernels", name) for name in ("start_ns", "end_ns", "device"))
    time_ns, measured, modelled = 0, 0.0, 0.0
    for one in np.unique(device[of.of_kernel >= 0]).tolist():
        t_ns, value = readings(trace, one, "gpm_occupancy_share")
        mine = np.flatnonzero((device == one) & (of.of_kernel >= 0))
        ranks = np.unique(trace.column("kernels", "rank")[mine]).tolist()
        begins, ends = t_ns[:-1], t_ns[1:]
        whole = overlap_with(begins, ends, measured_spans(trace, ranks)) == ends - begins
        whole &= (ends > start[mine].min()) & (begins < end[mine].max())
        spans = union(begins[whole], ends[whole])
        overlap = overlap_with(start[mine], end[mine], spans)
        held = held_share[of.of_kernel[mine]]
        if not total(spans) or np.isnan(held[overlap > 0]).any():
            continue
        time_ns += total(spans)
        measured += float((value[1:][whole] * (ends - begins)[whole]).sum())
        modelled += float((np.nan_to_num(held) * overlap).sum())
    return HeldWarps(measured / time_ns, modelled / time_ns, time_ns) if time_ns else None
