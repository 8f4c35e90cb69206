"""The buffers that CUPTI fills, and the file that takes them.

``<stem>.act`` holds raw activity buffers, each behind a 64-byte header that stands in the same memory, so
that one ``write(2)`` without the GIL stores both. It is appended to, readable by its owner only, and may be
followed live.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct

from . import FRAME_FORMAT, FRAME_HEADER_BYTES, FRAME_MAGIC
from .events import Clock, RLock, above_standard

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from .events import Events

#: Big enough that a full buffer is rare between two flushes, small enough to be written in a few ms.
BUFFER_BYTES = 4 << 20

#: Buffers that may be in flight at once; beyond it CUPTI drops records and counts them.
BUFFERS_MAX = 32

_NOT_OPEN, _CLOSED = -1, -2


class SpoolFull(Exception):
    """The spool cannot take more: disk full, quota, budget or I/O error. The message says which."""


class Spool:
    """Append-only file of one process's buffers. Methods are called from CUPTI's threads."""

    def __init__(self, events: Events, max_bytes: int = 0) -> None:
        self.events, self.event = events, events.event
        self.max_bytes = max_bytes
        self.bytes_written = 0
        self._sequence = 0
        self._fd = _NOT_OPEN
        self._lock = RLock()
        #: Addresses of idle buffers. The one that was idle for longest is lent first: CUPTI may yet write into others.
        self._free: list[int] = []
        self._views: dict[int, memoryview] = {}  # address -> header + payload
        self._write = ctypes.CDLL(None, use_errno=True).write
        self._write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
        self._write.restype = ctypes.c_ssize_t
        # Through PyDLL: a call so short is not worth giving the GIL away, and getting it back may take 5 ms.
        self._seek = ctypes.PyDLL(None).lseek
        self._seek.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int)
        self._seek.restype = ctypes.c_int64

    def lend(self) -> int:
        """The address of an idle buffer's payload, or 0 when too many are in flight."""
        if self._free:
            return self._free.pop(0)
        if len(self._views) >= BUFFERS_MAX:
            return 0
        # Private: shared pages would let a forked child write into its parent's buffers.
        memory = mmap.mmap(-1, FRAME_HEADER_BYTES + BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # The view keeps the mapping alive for as long as the spool lives.
        self._views[base + FRAME_HEADER_BYTES] = memoryview(memory)
        return base + FRAME_HEADER_BYTES

    @property
    def lent(self) -> int:
        """Buffers that CUPTI has."""
        return len(self._views) - len(self._free)

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

    def abandon(self) -> None:
        """Close this process's copy of the file, in a forked child. Lent buffers stay mapped: CUPTI has them."""
        if self._fd >= 0 and self._is_ours():
            os.close(self._fd)
        self._fd = _CLOSED

    def _store(self, view: memoryview, base: int, size: int) -> None:
        with self._lock:  # a frame that comes out in two pieces must not let another in between
            if self._fd == _CLOSED:
                return
            total = FRAME_HEADER_BYTES + size
            if self.max_bytes and self.bytes_written + total > self.max_bytes:
                self._close()
                raise SpoolFull("--max-bytes %d reached" % self.max_bytes)
            struct.pack_into(FRAME_FORMAT, view, 0, FRAME_MAGIC, size, Clock.unix_ns(), self._sequence)
            self._sequence += 1
            try:
                if self._fd == _NOT_OPEN or not self._is_ours():
                    self._open()
                self._write_all(base, total)
            except OSError as error:
                self._close()
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                reason = "disk full" if full else os.strerror(error.errno or 0)
                raise SpoolFull("the trace could not be written (%s)" % reason) from error

    def _write_all(self, base: int, total: int) -> None:
        done = 0
        while done < total:
            n = self._write(self._fd, base + done, total - done)
            if n > 0:
                done += n
                self.bytes_written += n
            elif ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), "write")

    def _is_ours(self) -> bool:
        """Whether our descriptor still is our file: a program may have closed it and opened its own under that number.

        The position of a file that only we append to is what we have written.
        """
        return bool(self._seek(self._fd, 0, os.SEEK_CUR) == self.bytes_written)

    def _open(self) -> None:
        path = self.events.stem + ".act"
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._fd = above_standard(os.open(path, flags, 0o600))
        if os.lseek(self._fd, 0, os.SEEK_END) != self.bytes_written:
            raise OSError(errno.ENOENT, "removed")

    def _close(self) -> None:
        if self._fd >= 0 and self._is_ours():
            os.close(self._fd)
        self._fd = _CLOSED
