"""Where the fields of CUPTI's activity records lie, by libcupti version.

Records are packed C structs that only ever grow at the end: every version of a kind shares the offsets of
the fields read here, and differs in its size. Both come from NVIDIA's ``cupti_activity.h`` of CUDA 12.0 to
13.1 and from what libcupti 13.1 to 13.5 says of itself; a test holds them against the dtypes of the
installed cupti-python. So a spool can be decoded on a machine that has no libcupti.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

MEMCPY, MEMSET, DRIVER, RUNTIME, DEVICE = 1, 2, 4, 5, 8
KERNEL, OVERHEAD, MEMCPY_PEER, CUDA_EVENT, SYNC, EXTERNAL_CORRELATION = 10, 17, 22, 36, 38, 39

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

#: libcupti version (cuptiGetVersion) from which a size holds -> {kind: record bytes}. The last three kinds are
#: never enabled here, but another profiler in the same process may leave some of their records behind.
_SIZES_SINCE: dict[int, dict[int, int]] = {
    18: {MEMCPY: 88, MEMSET: 88, DRIVER: 40, RUNTIME: 40, DEVICE: 176, KERNEL: 208, OVERHEAD: 40, MEMCPY_PEER: 96}
    | {CUDA_EVENT: 24, SYNC: 40, EXTERNAL_CORRELATION: 24},
    20: {DEVICE: 184},
    21: {OVERHEAD: 48},
    22: {OVERHEAD: 56},
    26: {MEMCPY: 96, SYNC: 56, CUDA_EVENT: 56},
    130000: {KERNEL: 216},
    130100: {KERNEL: 224},
    130200: {DEVICE: 192},
    130300: {KERNEL: 232},
    130400: {KERNEL: 248, MEMCPY: 112, MEMSET: 104},
}

#: Versions whose sizes were seen, CUDA 12.2 to 12.9 and 13.0 to 13.5: they counted 1, 2, … before they became
#: CUDA's own numbers. A newer library has to say its sizes itself, as all do since 13.1.
KNOWN_VERSIONS = ((20, 28), (130000, 130500))

#: CUDA 11.8, 12.0 and 12.1 all say 18; only the file's name tells them apart, and 11.8 wrote other records.
_SHARED_VERSION, _SHARED_FILE = 18, "libcupti.so.12"

_KINDS_MAX, _RECORD_BYTES_MAX = 256, 2040  # what records.py can walk


@dataclass(frozen=True, slots=True)
class Layout:
    """Record sizes in bytes and field dtypes, by activity kind."""

    size_of: Mapping[int, int]
    dtype_of: Mapping[int, np.dtype[np.void]]


def layout_for(version: int, sizes: Mapping[int, int] | None = None, library: str = "") -> Layout | None:
    """The layout of a libcupti version; ``sizes`` are what that library said itself, and win.

    ``library`` is the path of the library, needed only for CUDA 12.0 and 12.1. None when the layout is not
    known, or when the sizes cannot be true: the records cannot be decoded, and must not be guessed.
    """
    known: dict[int, int] = {}
    shared = version == _SHARED_VERSION and _SHARED_FILE in PurePath(library).name
    if shared or any(first <= version <= last for first, last in KNOWN_VERSIONS):
        for since, changes in _SIZES_SINCE.items():
            if version >= since:
                known |= changes
    known |= {kind: size for kind, size in (sizes or {}).items() if size}
    if KERNEL not in known or not all(_can_be(kind, size) for kind, size in known.items()):
        return None
    dtypes = {kind: _dtype(fields, known[kind]) for kind, fields in _FIELDS.items() if kind in known}
    return Layout(known, dtypes)


def _can_be(kind: int, size: int) -> bool:
    """Whether records of this kind can have this size: whole words, and room for the fields that are read."""
    return 0 < kind < _KINDS_MAX and size % 8 == 0 and _least_bytes(kind) <= size <= _RECORD_BYTES_MAX


def _least_bytes(kind: int) -> int:
    fields = _FIELDS.get(kind, {"kind": ("u4", 0)})
    return max(offset + np.dtype(format_).itemsize for format_, offset in fields.values())


def _dtype(fields: Mapping[str, tuple[str, int]], itemsize: int) -> np.dtype[np.void]:
    names = list(fields)
    formats = [format_ if format_.startswith("V") else "<" + format_ for format_, _ in fields.values()]
    offsets = [offset for _, offset in fields.values()]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})
