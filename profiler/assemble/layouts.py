"""Where the fields of CUPTI's activity records lie, by libcupti version.

Records are packed C structs that only ever grow at the end: every version of a kind shares the offsets of
the fields read here, and differs in its size. Sizes come from NVIDIA's ``cupti_activity.h``; a test holds
both against the dtypes of the installed cupti-python. So a spool of any libcupti from 12.0 on can be
decoded on a machine that has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MEMCPY, MEMSET, DRIVER, RUNTIME, DEVICE = 1, 2, 4, 5, 8
CONTEXT, KERNEL, OVERHEAD, MEMCPY_PEER, SYNC = 9, 10, 17, 22, 38

_FIELDS: dict[int, dict[str, tuple[str, int]]] = {
    KERNEL: {
        "registers": ("u2", 6),
        "start": ("u8", 16),
        "end": ("u8", 24),
        "device": ("u4", 40),
        "context": ("u4", 44),
        "stream": ("u4", 48),
        "grid_x": ("i4", 52),
        "grid_y": ("i4", 56),
        "grid_z": ("i4", 60),
        "block_x": ("i4", 64),
        "block_y": ("i4", 68),
        "block_z": ("i4", 72),
        "shared_static": ("i4", 76),
        "shared_dynamic": ("i4", 80),
        "local": ("u4", 84),
        "correlation": ("u4", 92),
        "name": ("u8", 104),
        "graph_node": ("u8", 144),
        "graph": ("u4", 156),
    },
    MEMCPY: {
        "copy_kind": ("u1", 4),
        "src_kind": ("u1", 5),
        "dst_kind": ("u1", 6),
        "bytes": ("u8", 8),
        "start": ("u8", 16),
        "end": ("u8", 24),
        "device": ("u4", 32),
        "context": ("u4", 36),
        "stream": ("u4", 40),
        "correlation": ("u4", 44),
        "graph_node": ("u8", 64),
        "graph": ("u4", 72),
    },
    MEMCPY_PEER: {
        "copy_kind": ("u1", 4),
        "src_kind": ("u1", 5),
        "dst_kind": ("u1", 6),
        "bytes": ("u8", 8),
        "start": ("u8", 16),
        "end": ("u8", 24),
        "device": ("u4", 32),
        "context": ("u4", 36),
        "stream": ("u4", 40),
        "correlation": ("u4", 60),
        "graph_node": ("u8", 72),
        "graph": ("u4", 80),
    },
    MEMSET: {
        "bytes": ("u8", 8),
        "start": ("u8", 16),
        "end": ("u8", 24),
        "device": ("u4", 32),
        "context": ("u4", 36),
        "stream": ("u4", 40),
        "correlation": ("u4", 44),
        "graph_node": ("u8", 64),
        "graph": ("u4", 72),
    },
    RUNTIME: {
        "cbid": ("u4", 4),
        "start": ("u8", 8),
        "end": ("u8", 16),
        "thread": ("u4", 28),
        "correlation": ("u4", 32),
        "return_value": ("u4", 36),
    },
    SYNC: {
        "type": ("i4", 4),
        "start": ("u8", 8),
        "end": ("u8", 16),
        "correlation": ("u4", 24),
        "context": ("u4", 28),
        "stream": ("u4", 32),
    },
    OVERHEAD: {
        "overhead_kind": ("i4", 4),
        "object_kind": ("i4", 8),
        "process": ("u4", 12),
        "thread": ("u4", 16),
        "start": ("u8", 24),
        "end": ("u8", 32),
    },
    DEVICE: {
        "mem_bandwidth_kb": ("u8", 8),
        "mem_bytes": ("u8", 16),
        "l2_bytes": ("u4", 28),
        "sm_count": ("u4", 44),
        "sm_major": ("u4", 104),
        "sm_minor": ("u4", 108),
        "device": ("u4", 112),
        "uuid": ("V16", 120),
        "name": ("u8", 136),
    },
}
_FIELDS[DRIVER] = _FIELDS[RUNTIME]

#: libcupti version from which a size holds -> {kind: record bytes}. 13.0 was checked on an H200; 12.x is by
#: NVIDIA's headers. From 13.1 on the library itself tells (cuptiActivityGetStructSize), and the spool says so.
_SIZES_SINCE: dict[int, dict[int, int]] = {
    120400: {KERNEL: 208, MEMCPY: 88, MEMCPY_PEER: 96, MEMSET: 88, RUNTIME: 40, DRIVER: 40}
    | {SYNC: 40, OVERHEAD: 56, DEVICE: 184},
    120800: {MEMCPY: 96, SYNC: 56},
    130000: {KERNEL: 216},
}

#: cuptiGetVersion counted 1, 2, … before 12.x adopted CUDA's numbering: those records are not known here.
OLDEST_VERSION = 120400


@dataclass(frozen=True, slots=True)
class Layout:
    """Record sizes in bytes and field dtypes, by activity kind."""

    size_of: Mapping[int, int]
    dtype_of: Mapping[int, np.dtype[np.void]]


def layout_for(version: int, sizes: Mapping[int, int] | None = None) -> Layout | None:
    """The layout of a libcupti version; ``sizes`` are what that library said itself, and win.

    None when neither is known: the records cannot be decoded, and must not be guessed.
    """
    known: dict[int, int] = {}
    for since, changes in _SIZES_SINCE.items():
        if version >= since:
            known |= changes
    if version > max(_SIZES_SINCE) + 99 and not sizes:
        return None
    known |= dict(sizes or {})
    if KERNEL not in known:
        return None
    dtypes = {kind: _dtype(fields, known[kind]) for kind, fields in _FIELDS.items() if kind in known}
    return Layout(known, dtypes)


def _dtype(fields: Mapping[str, tuple[str, int]], itemsize: int) -> np.dtype[np.void]:
    names = list(fields)
    formats = [format_ if format_.startswith("V") else "<" + format_ for format_, _ in fields.values()]
    offsets = [offset for _, offset in fields.values()]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})
