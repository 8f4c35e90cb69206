"""The two spool files of one process, and the buffers that CUPTI fills.

``<pid>-<n>.act`` holds raw activity buffers, each behind a 64-byte header that stands in the same memory,
so that one ``write(2)`` without the GIL stores both. ``<pid>-<n>.jsonl`` holds everything else, one JSON
object a line. Both are appended to and readable by their owner only; a reader may follow them live.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
import time

from . import FRAME_FORMAT, FRAME_HEADER_BYTES, FRAME_MAGIC

#: Big enough that a full buffer is rare between two flushes, small enough to be written in a few ms.
BUFFER_BYTES = 4 << 20

#: Buffers that may be in flight at once; beyond it CUPTI drops records and counts them.
BUFFERS_MAX = 32


class SpoolFull(Exception):
    """The spool cannot take more: disk full, quota, budget or I/O error. The message says which."""


class Spool:
    """Append-only files of one process. Buffer methods are called from CUPTI's threads."""

    def __init__(self, folder: str, max_bytes: int = 0) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.bytes_written = 0
        self.dropped_frames = 0
        self._sequence = 0
        self._act_fd = -1
        self._free: list[int] = []  # addresses of idle buffers
        self._views: dict[int, memoryview] = {}  # address -> memoryview of header + payload
        self._event_fd = -1
        # Two spools of one pid (exec, or a recycled number) must not meet.
        self.stem = os.path.join(folder, "%d-%d" % (os.getpid(), time.time_ns()))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._write = self._libc.write
        self._write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
        self._write.restype = ctypes.c_ssize_t

    def event(self, **fields: object) -> None:
        """Append one line to the event file. Never raises: an event that cannot be stored is lost."""
        try:
            if self._event_fd < 0:
                self._event_fd = _open(self.stem + ".jsonl")
            fields.setdefault("t", time.time_ns())
            os.write(self._event_fd, (json.dumps(fields, separators=(",", ":")) + "\n").encode("utf-8", "replace"))
        except (OSError, ValueError, TypeError):
            pass

    def lend(self) -> int:
        """The address of an idle buffer's payload, or 0 when too many are in flight."""
        if self._free:
            return self._free.pop()
        if len(self._views) >= BUFFERS_MAX:
            return 0
        memory = mmap.mmap(-1, FRAME_HEADER_BYTES + BUFFER_BYTES)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # The view keeps the mapping alive for as long as the spool lives.
        self._views[base + FRAME_HEADER_BYTES] = memoryview(memory)
        return base + FRAME_HEADER_BYTES

    def take(self, address: int, size: int) -> None:
        """Store a filled buffer and make it idle again. Raises SpoolFull when recording must end."""
        view = self._views.get(address)
        if view is None:  # lent by a spool of before a fork
            return
        try:
            if size:
                self._store(view, address - FRAME_HEADER_BYTES, size)
        finally:
            self._free.append(address)

    def _store(self, view: memoryview, base: int, size: int) -> None:
        if self._act_fd == -2:
            self.dropped_frames += 1
            return
        total = FRAME_HEADER_BYTES + size
        if self.max_bytes and self.bytes_written + total > self.max_bytes:
            self._act_fd = -2
            raise SpoolFull("--max-bytes %d reached" % self.max_bytes)
        if self._act_fd == -1:
            self._act_fd = _open(self.stem + ".act")
        struct.pack_into(FRAME_FORMAT, view, 0, FRAME_MAGIC, size, time.time_ns(), self._sequence)
        self._sequence += 1
        done = 0
        while done < total:
            n = self._write(self._act_fd, base + done, total - done)
            if n <= 0:
                code = ctypes.get_errno()
                if code == errno.EINTR:
                    continue
                self._act_fd = -2
                self.dropped_frames += 1
                reason = "disk full" if code in (errno.ENOSPC, errno.EDQUOT) else os.strerror(code)
                raise SpoolFull("the trace could not be written (%s)" % reason)
            done += n
        self.bytes_written += total


def _open(path: str) -> int:
    return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
