"""Workloads with one defect each, which a profiler should find, and twins that do the same job right.

``python -m spikeprof.kernels.known_bad`` lists them; with names it runs them.
"""

from __future__ import annotations

from spikeprof.kernels.known_bad import (
    fp16_overflow,
    host_sync,
    l2_thrash,
    pageable_copies,
    straggler,
    strided_kv,
    tiny_kernels,
    unfused_chain,
)
from spikeprof.kernels.known_bad.workload import Workload

_MODULES = (
    tiny_kernels, host_sync, unfused_chain, l2_thrash, strided_kv, pageable_copies, fp16_overflow, straggler,
)  # fmt: skip
WORKLOADS: dict[str, Workload] = {module.WORKLOAD.name: module.WORKLOAD for module in _MODULES}


def workload(name: str) -> Workload:
    """The workload of that name. Raises ValueError for another name."""
    if name not in WORKLOADS:
        raise ValueError(f"name is {name!r}: it can be {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


__all__ = ["WORKLOADS", "Workload", "workload"]
