"""Traces with hardware counters for tests: of any classes, and of four kernels whose truth is known."""

from __future__ import annotations

from typing import Any

import tiny

from spikeprof.profiler.trace import Trace

H200 = {"name": "NVIDIA H200", "l2_bytes": 62_914_560, "mem_peak_bytes_per_s": 4.8e12, "peak_source": "data sheet"}
READ, WRITTEN, SECTORS, HITS = "dram_read_bytes", "dram_written_bytes", "l2_sectors_count", "l2_hit_sectors_count"
L1, L1_HITS = "l1_sectors_count", "l1_hit_sectors_count"
TENSOR, WAVES, CONFLICTS = "tensor_active_share", "shared_wavefronts_count", "shared_conflicts_count"

#: (grid, duration in ns, DRAM read, DRAM written, L2 sectors, of these hit) as Nsight Compute measured them on an H200,
#: and L1 sectors, hits: of 2-byte elements 16 to a sector read and written; of the gather 8-byte indices, a sector for
#: each of 2^24 elements, and the result. The product of matrices loads by TMA, past L1.
NCU = {
    "mul_512_mib": (262_144, 248_672, 536_894_976, 513_211_648, 51_953_216, 26_200_339, 2**28 // 8, 0),
    "mul_8_mib": (4_096, 5_920, 8_394_496, 0, 825_255, 417_960, 2**22 // 8, 0),
    "gemm": (2, 1_455_200, 1_150_114_816, 130_324_224, 256_169_192, 190_605_223, 1_500, 0),
    "gather": (32_768, 466_016, 1_168_698_112, 35_047_424, 44_760_169, 6_049_653, 2**24 * 21 // 16, 420_000),
}


def counters(class_id: int, spread: float = 0.0, kernel_id: int = -1, match: str = "exact", **values: float) -> Any:
    """Rows of ``counters`` with bounds that are ``spread`` of the value away from it."""
    same = {"class_id": class_id, "kernel_id": kernel_id, "match": match}
    return [
        {**same, "metric": m, "value": v, "low": v - abs(v) * spread, "high": v + abs(v) * spread}
        for m, v in values.items()
    ]


def kernel_class(name: str, total_ns: int, launches: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "launches_count": launches, "total_ns": total_ns, **more}


def trace(classes: list[dict[str, Any]], rows: list[dict[str, Any]], **tables: Any) -> Trace:
    return tiny.trace(kernel_classes=classes, counters=rows, **{"devices": [H200], **tables})


def four(
    with_l1: bool = True, hits: dict[str, float] | None = None, names: tuple[str, ...] = (), **tables: Any
) -> Trace:
    """The four kernels; ``hits`` replaces those of some, ``names`` all their names."""
    classes, rows = [], []
    for number, (name, (grid, ns, read, written, sectors, hit, l1, l1_hit)) in enumerate(NCU.items()):
        values = {READ: read, WRITTEN: written, SECTORS: sectors, HITS: (hits or {}).get(name, hit)}
        if with_l1:
            values |= {L1: l1, L1_HITS: l1_hit}
        # The short one ran 300 times, as in the recordings: else it would not be a twentieth of the time.
        many = 300 if name == "mul_8_mib" else 1
        classes.append(kernel_class(names[number] if names else name, ns * many, many, grid_x=grid))
        rows += counters(number, 0.02, match="class" if many > 1 else "exact", **values)
    return trace(classes, rows, **tables)
