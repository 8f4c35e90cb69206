"""What several analyzers derive from a trace: busy and measured time, origin of GPU work, groups.

Definitions, the same in every analyzer:

* **GPU work**: rows of ``kernels`` and ``memory_ops`` whose end is after their start.
* **busy**: the union of the GPU work of one device, over all processes and streams. Never a sum.
* **measured**: the time in which a device's processes were being recorded: traced windows of any process
  that has work on the device, less the windows in which such a process was alive but not recorded.
  Idle time outside of it is not known, and is never counted as idle.
* **active**: per measured window, the stretch from its first to its last GPU work; its length is the *wall*
  that idle and busy shares refer to. The start-up and the rest before and after are not idle time.
* **origin**: the call that launched a piece of work, found by (rank, correlation id);
  a call that only waits launched nothing.
* **gap**: one stretch of idle time of one device; ``derived/idle.py`` cuts gaps into classes of cause.
"""

from spikeprof.analyzers.derived.groups import (
    encoded,
    first_of_groups,
    group_codes,
    group_percentile,
    sorted_in_groups,
)
from spikeprof.analyzers.derived.idle import CLASSES, Gaps, Pieces, classify, find_gaps, following, whole_gaps
from spikeprof.analyzers.derived.intervals import (
    EMPTY,
    Bools,
    Integers,
    Ints,
    Lanes,
    Spans,
    bin_edges,
    complement,
    covered_by_group,
    hulls,
    intersect,
    ints,
    overlap_with,
    parts,
    subtract,
    total,
    union,
)
from spikeprof.analyzers.derived.work import (
    CALL_KINDS,
    DeviceTime,
    GpuWork,
    call_kinds,
    device_times,
    gpu_work,
    link,
    linked_share,
    measured_spans,
    work_column,
)

__all__ = [
    "CALL_KINDS",
    "CLASSES",
    "EMPTY",
    "Bools",
    "DeviceTime",
    "Gaps",
    "GpuWork",
    "Integers",
    "Ints",
    "Lanes",
    "Pieces",
    "Spans",
    "bin_edges",
    "call_kinds",
    "classify",
    "complement",
    "covered_by_group",
    "device_times",
    "encoded",
    "find_gaps",
    "first_of_groups",
    "following",
    "gpu_work",
    "group_codes",
    "group_percentile",
    "hulls",
    "intersect",
    "ints",
    "link",
    "linked_share",
    "measured_spans",
    "overlap_with",
    "parts",
    "sorted_in_groups",
    "subtract",
    "total",
    "union",
    "whole_gaps",
    "work_column",
]
