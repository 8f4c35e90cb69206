"""The line to the supervisor: it asks for kernel names, gives orders, and its absence is an order too.

Activity records hold names as pointers into this process. The supervisor reads the spool as it grows and
asks once for each pointer it has not seen; this thread answers into the spool. Between two flushes it sleeps
in ``poll``, and for good once recording has stopped.

The socket is kept as a bare descriptor, looked at before each use: a program may close all descriptors and
open its own under the same number. ``threading`` does not know this thread, nor do the program's trace and
profile functions.
"""

from __future__ import annotations

import ctypes
import json
import os

from .events import SignalsHeld, above_standard, allocate_lock, start_new_thread

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from .agent import Agent

NAME_BYTES_MAX = 16384  # longest mangled names seen are a few thousand bytes
_READ_BYTES = 512

#: How long the end of the program may wait for the supervisor's last question.
FAREWELL_SECONDS = 2.0

_CONNECT_SECONDS = 1.0
_POLLIN = 1
_MSG_NOSIGNAL = 0x4000  # a program may have given SIGPIPE its deadly default back


class _PollFd(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


class Control:
    """Connection and thread of one process."""

    def __init__(self, agent: Agent, path: str | None) -> None:
        self._agent = agent
        self._path = path
        self._fd = -1
        self._buffer = b""
        self._leaving = False
        self._started = False
        self._ended = allocate_lock()  # held while the thread lives
        self._poll = ctypes.CDLL(None).poll
        # PyDLL: calls of a microsecond, not worth giving the GIL away.
        self._libc = ctypes.PyDLL(None)
        self._libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
        self._libc.pread.restype = ctypes.c_ssize_t
        self._chunk = ctypes.create_string_buffer(_READ_BYTES)

    def start(self) -> None:
        """Connect and begin to listen. Without a supervisor the process records on, names unresolved."""
        self._connect()
        self._ended.acquire()
        with SignalsHeld():
            start_new_thread(self._run, ())
        self._started = True

    def farewell(self) -> None:
        """Say that the spool is complete and wait, briefly, for the last names to be asked for."""
        if not self._started:
            return
        self._leaving = True
        if self._send(bye=True) and self._ended.acquire(timeout=FAREWELL_SECONDS):
            self._ended.release()

    def abandon(self) -> None:
        """Close this process's copy of the socket, in a forked child."""
        if self._is_ours():
            os.close(self._fd)
        self._fd = -1

    def _connect(self) -> bool:
        if not self._path:
            return False
        import _socket

        try:
            line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            try:
                line.settimeout(_CONNECT_SECONDS)
                line.connect(self._path)
            except OSError:
                line.close()
                raise
        except (ConnectionRefusedError, FileNotFoundError):
            self._fd = -1
            self._agent.stop("the supervisor is gone")
            return False
        except OSError as error:  # it has too much to do, say
            self._fd = -1
            self._agent.spool.event(ev="note", text="no line to the supervisor: %s" % error)
            return False
        self._fd, self._buffer = above_standard(line.detach()), b""
        return self._send(pid=os.getpid(), spool=os.path.basename(self._agent.spool.events.stem))

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # the thread must never print a traceback into the program
            self._agent.fault("control", error)
        finally:
            self.abandon()
            self._ended.release()

    def _turn(self) -> bool:
        try:
            wait = self._agent.tick()
        except Exception as error:  # recording ends, but names can still be asked for
            self._agent.fault("tick", error)
            wait = None
        if self._fd >= 0:
            return self._listen(wait)
        if wait is None or self._leaving:
            return False
        self._poll(None, 0, int(wait * 1000) + 1)
        return True

    def _listen(self, wait: float | None) -> bool:
        """Wait for an order, at most so many seconds, and follow it. False = there will be no more."""
        ask = _PollFd(self._fd, _POLLIN, 0)
        ready = self._poll(ctypes.byref(ask), 1, -1 if wait is None else int(wait * 1000) + 1)
        if not self._is_ours():  # the program has closed it, and may use the number itself
            return self._connect() or self._lost()
        if ready <= 0:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            return self._lost()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return all(self._follow(json.loads(line)) for line in lines)  # nothing follows the last order

    def _lost(self) -> bool:
        if not self._leaving:
            self._agent.stop("the supervisor is gone")
        return False

    def _follow(self, order: dict[str, object]) -> bool:
        pointers, reason = order.get("names"), order.get("stop")
        if isinstance(pointers, list) and pointers:
            self._agent.spool.event(ev="names", names=self._texts_at(pointers))
        if reason:
            self._agent.stop(str(reason))
            self._leaving = True
            self._send(bye=True)
        return not order.get("final")

    def _texts_at(self, pointers: list[int]) -> list[list[object]]:
        """[pointer, C string there or None] for each. A wild pointer is an error of ``pread``, not a crash."""
        try:
            memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._agent.spool.event(ev="note", text="kernel names cannot be read: %s" % error)
            return []
        try:
            return [[pointer, self._text_at(memory, pointer)] for pointer in pointers]
        finally:
            os.close(memory)

    def _text_at(self, memory: int, pointer: int) -> str | None:
        text = b""
        while 0 < pointer < 1 << 63 and len(text) < NAME_BYTES_MAX:
            n = self._libc.pread(memory, self._chunk, _READ_BYTES, pointer + len(text))
            if n <= 0:
                break
            chunk = self._chunk.raw[:n]
            end = chunk.find(b"\0")
            if end >= 0:
                found = (text + chunk[:end]).decode("utf-8", "replace")
                return found if found.isprintable() else None
            text += chunk
        return None

    def _is_ours(self) -> bool:
        """Whether the descriptor still is our socket: connected to the supervisor's path."""
        if self._fd < 0 or not self._path:
            return False
        name = ctypes.create_string_buffer(128)
        size = ctypes.c_uint32(len(name))
        if self._libc.getpeername(self._fd, name, ctypes.byref(size)) != 0:
            return False
        return name.raw[2 : size.value].rstrip(b"\0") == os.fsencode(self._path)

    def _send(self, **fields: object) -> bool:
        if not self._is_ours():
            return False
        data = (json.dumps(fields) + "\n").encode()
        return bool(self._libc.send(self._fd, data, ctypes.c_size_t(len(data)), _MSG_NOSIGNAL) == len(data))
