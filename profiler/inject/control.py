"""The line to the supervisor: it asks for kernel names, gives orders, and its absence is an order too.

Activity records hold names as pointers into this process. The supervisor reads the spool as it grows and
asks once for each pointer it has not seen; this thread answers into the spool. It sleeps in ``select``
otherwise, so an idle target is woken by nobody but the windows that the user asked for.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from .agent import Agent

NAME_BYTES_MAX = 16384  # longest mangled names seen are a few thousand bytes
_READ_BYTES = 512

#: How long the end of the program may wait for the supervisor's last question.
FAREWELL_SECONDS = 2.0


class Control:
    """Connection and thread of one process."""

    def __init__(self, agent: Agent, path: str | None) -> None:
        self._agent = agent
        self._path = path
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._memory = -1
        self._buffer = b""

    def start(self) -> None:
        """Connect and begin to listen. Without a supervisor the process records on, names unresolved."""
        self._memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        if self._path:
            try:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(1.0)
                self._socket.connect(self._path)
                self._socket.settimeout(None)
                self._send(pid=os.getpid(), spool=os.path.basename(self._agent.spool.stem))
            except OSError as error:
                self._socket = None
                self._agent.spool.event(ev="note", text="no supervisor: %s" % error)
        self._thread = threading.Thread(target=self._run, name="spikeprof", daemon=True)
        self._thread.start()

    def farewell(self) -> None:
        """Say that the spool is complete and wait, briefly, for the last names to be asked for."""
        if self._socket is None or self._thread is None or not self._thread.is_alive():
            return
        try:
            self._send(bye=True)
            self._done.wait(FAREWELL_SECONDS)
            self._socket.close()
        except OSError:
            pass

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                wait = self._agent.tick()
                if self._socket is None:
                    if wait is None:
                        return
                    time.sleep(wait)
                    continue
                ready, _, _ = select.select([self._socket], [], [], wait)
                if ready and not self._receive():
                    self._agent.stop("the supervisor is gone")
                    return
            except Exception as error:  # the thread must never print a traceback into the program
                self._agent.fault("control", error)
                return

    def _receive(self) -> bool:
        assert self._socket is not None
        data = self._socket.recv(1 << 16)
        if not data:
            return False
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order.get("names"):
                found = [[pointer, self._text_at(pointer)] for pointer in order["names"]]
                self._agent.spool.event(ev="names", names=found)
            if order.get("stop"):
                self._agent.stop(order["stop"])
            if order.get("final"):
                self._done.set()
        return True

    def _text_at(self, pointer: int) -> str | None:
        """The C string at an address, or None. Read through /proc/self/mem: a wild pointer is an error, not a crash."""
        text = b""
        while len(text) < NAME_BYTES_MAX:
            try:
                chunk = os.pread(self._memory, _READ_BYTES, pointer + len(text))
            except (OSError, OverflowError, ValueError):
                break
            end = chunk.find(b"\0")
            if end >= 0:
                return (text + chunk[:end]).decode("utf-8", "replace")
            if not chunk:
                break
            text += chunk
        return text.decode("utf-8", "replace") or None

    def _send(self, **fields: object) -> None:
        assert self._socket is not None
        self._socket.sendall((json.dumps(fields) + "\n").encode())
