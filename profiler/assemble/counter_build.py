"""The samplers' files to tables, once the tables of the GPU work are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spikeprof.profiler import store
from spikeprof.profiler.assemble.counter_overlap import Samples
from spikeprof.profiler.assemble.counter_samples import write_counter_samples
from spikeprof.profiler.assemble.counter_tables import COLUMNS, DeviceCounters, counter_tables
from spikeprof.profiler.collectors.pm_files import SampledSet, SamplerFiles
from spikeprof.profiler.trace import CollectorNote


def assemble_counters(
    samplers: Sequence[SamplerFiles], folder: Path, t0_unix_ns: int, note: CollectorNote
) -> CollectorNote:
    """Write ``counter_samples``, ``kernel_classes``, ``counters`` and ``counter_balance`` into a trace's folder.

    Returns the collector's note with the samples that could not be used. Where nothing was sampled, nothing is written.
    """
    sets = [one for files in samplers for one in files.sets if len(one.rows)]
    if not sets:
        return note
    write_counter_samples(folder, sets, t0_unix_ns)
    kernels, memory_ops, windows = (store.read_columns(folder, name, columns) for name, columns in COLUMNS.items())
    built = counter_tables([_in_trace_time(one, t0_unix_ns) for one in sets], kernels, memory_ops, windows)
    for name, table in built.tables.items():
        store.write_table(folder, name, table)
    unused = sum(device.set_aside_count for device in built.devices)
    remarks = [_timing(device) for device in built.devices if len(kernels)]
    return dataclasses.replace(
        note,
        reason="; ".join(filter(None, [note.reason, *remarks])),
        set_aside_count=unused,
        set_aside_reasons={"sample without a sound time or value": unused} if unused else {},
    )


def _in_trace_time(one: SampledSet, t0_unix_ns: int) -> tuple[int, Samples]:
    times = one.times() - t0_unix_ns
    return one.device, Samples(times[:, 0], times[:, 1], one.values(), one.metrics)


def _timing(device: DeviceCounters) -> str:
    """When the counts of kernels were found to come, against the times that CUPTI records."""
    known = [
        f"counts of {what} begin {skew.begin_ns:.0f} ns after their recorded start and end {skew.end_ns:.0f} ns before "
        f"their recorded end (± {skew.sd_ns:.0f})"
        for what, skew in (("kernels", device.skews.direct), ("kernels in CUDA graphs", device.skews.graph))
        if np.isfinite(skew.sd_ns)
    ]
    return f"GPU {device.device}: {', '.join(known) or 'the times of samples and kernels could not be compared'}"
