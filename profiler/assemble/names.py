"""Kernel names: the pointers that a spool mentions, and readable C++ names from mangled ones."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.assemble.layouts import DEVICE, KERNEL, Layout
from spikeprof.profiler.assemble.records import BATCH_BYTES, decode, frames


class NameTail:
    """Follows a growing spool file and tells which name pointers are new in it."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path, self._layout = path, layout
        self._offset = 0
        self._seen: set[int] = set()

    def new_pointers(self) -> list[int]:
        """Pointers in frames that were completed since the last call. Missing file = none yet."""
        if not self._path.exists() or self._path.stat().st_size <= self._offset:
            return []
        found: set[int] = set()
        payloads: list[npt.NDArray[np.uint8]] = []
        for frame in frames(self._path, self._offset):
            if frame.end <= self._offset:  # still being written
                break
            self._offset = frame.end
            payloads.append(frame.payload)
            if sum(map(len, payloads)) >= BATCH_BYTES:  # far behind: bound the memory
                found |= _pointers(payloads, self._layout)
                payloads = []
        found |= _pointers(payloads, self._layout)
        new = sorted(found - self._seen - {0})
        self._seen.update(new)
        return new


def _pointers(payloads: Sequence[npt.NDArray[np.uint8]], layout: Layout) -> set[int]:
    if not payloads:
        return set()
    records = decode(payloads, layout).records
    found: set[int] = set()
    for kind in (KERNEL, DEVICE):
        if kind in records:
            found.update(np.unique(records[kind]["name"]).tolist())
    return found


def demangle(name: str) -> str:
    """``_Z…`` through the C++ runtime's own demangler, everything else unchanged."""
    function = _demangler()
    if function is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    text = function(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        return ctypes.string_at(text).decode("utf-8", "replace") if status.value == 0 else name
    finally:
        _libc().free(ctypes.c_void_p(text))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@functools.cache
def _demangler() -> ctypes._NamedFuncPointer | None:
    for library in ("libstdc++.so.6", "libc++abi.so.1", None):
        try:
            function = ctypes.CDLL(library).__cxa_demangle
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_void_p
        return function
    return None
