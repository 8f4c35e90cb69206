"""The supervisor's end of the line to the targets: asks for kernel names as they appear, says farewell.

One thread, one socket per traced process. A target that ends says so and waits a moment for the last
question; a target whose line breaks was killed. Losing this server only costs names, never the program.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spikeprof.profiler.assemble.layouts import layout_for
from spikeprof.profiler.assemble.names import NameTail
from spikeprof.profiler.assemble.spool import read_process
from spikeprof.profiler.errors import OutputError

_POLL_SECONDS = 0.05

#: Longest path of a socket, terminator included (``sun_path``).
_SOCKET_PATH_BYTES = 108

#: Pointers asked for at once: a target reads so many names in a few ms, and no question fills its line.
_NAMES_PER_ORDER = 1000

#: How long a target may take to stop when the command has ended.
_STOP_SECONDS = 2.0


@dataclass
class _Target:
    """One connected process."""

    connection: socket.socket
    stem: str = ""
    tail: NameTail | None = None
    buffer: bytes = b""
    pid: int = 0
    unasked: list[int] = field(default_factory=list)
    told_to_stop: bool = False
    unreadable: bool = False


class ControlServer:
    """Listens on a socket in a private folder. ``path`` goes into the targets' environment."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._folder = _private_folder()
        self.path = str(self._folder / "control")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._stopping, self._ending = threading.Event(), threading.Event()
        self._targets: dict[int, _Target] = {}  # by file descriptor
        self._thread = threading.Thread(target=self._run, name="spikeprof-control", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self, patience_s: float = 2.0) -> list[int]:
        """Serve until all targets are gone, at most ``patience_s``; returns the pids that still run.

        Those are told to stop recording, and to hand over what they have.
        """
        # A child of a program that just ended may be about to connect: one round is always waited for.
        time.sleep(2 * _POLL_SECONDS)
        self._wait(patience_s)
        running = sorted(t.pid for t in list(self._targets.values()) if t.pid)
        if running:
            self._ending.set()
            self._wait(_STOP_SECONDS)
        self._stopping.set()
        self._thread.join(timeout=5.0)
        for target in list(self._targets.values()):
            target.connection.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return running

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._targets and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 2)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(_POLL_SECONDS):
                if key.data is None:
                    self._accept()
                else:
                    self._safely(self._read, key.data)
            for target in list(self._targets.values()):
                self._safely(self._ask, target)
                if self._ending.is_set() and not target.told_to_stop:
                    target.told_to_stop = True
                    self._safely(self._send, target, stop="the command ended")

    def _safely(self, do: Callable[..., None], target: _Target, **arguments: Any) -> None:
        """What one target sends, or leaves in its spool, may cost that target its line and no other."""
        try:
            do(target, **arguments)
        except Exception:
            self._drop(target)

    def _send(self, target: _Target, **order: object) -> None:
        target.connection.sendall((json.dumps(order) + "\n").encode())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(True)
        connection.settimeout(1.0)
        target = _Target(connection)
        self._targets[connection.fileno()] = target
        self._selector.register(connection, selectors.EVENT_READ, target)

    def _read(self, target: _Target) -> None:
        try:
            data = target.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(target)
            return
        target.buffer += data
        *lines, target.buffer = target.buffer.split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if "spool" in message:
                # The name of a file in our own folder, nothing else: it comes from another process.
                target.stem, target.pid = Path(str(message["spool"])).name, int(message.get("pid", 0))
            if message.get("bye"):
                self._ask(target, final=True)

    def _ask(self, target: _Target, *, final: bool = False) -> None:
        """Send the pointers that are new in the target's spool: some at a time, all of them when it is final."""
        if not target.unreadable:
            try:
                target.unasked += self._pointers(target)
            except Exception:  # its kernels are shown by address then; its line must hold, or it would stop recording
                target.unreadable = True
        while target.unasked:
            some, target.unasked = target.unasked[:_NAMES_PER_ORDER], target.unasked[_NAMES_PER_ORDER:]
            self._send(target, names=some)
            if not final:
                break
        if final:
            self._send(target, names=[], final=True)

    def _pointers(self, target: _Target) -> list[int]:
        if target.tail is None:
            events = self._spool / f"{target.stem}.jsonl"
            if not target.stem or not events.exists():
                return []
            process = read_process(events)
            layout = layout_for(process.libcupti or 0, process.sizes, process.libcupti_path)
            if not process.activated_ns or layout is None:
                return []
            target.tail = NameTail(process.records, layout)
        return target.tail.new_pointers()

    def _drop(self, target: _Target) -> None:
        number = target.connection.fileno()
        if number in self._targets:
            self._selector.unregister(target.connection)
            del self._targets[number]
            target.connection.close()


def _private_folder() -> Path:
    """A new folder of ours for the socket, with a path short enough for one; not in the trace, whose path is not."""
    for parent in (None, "/tmp", "/dev/shm"):
        try:
            folder = Path(tempfile.mkdtemp(prefix="spikeprof-", dir=parent))
        except OSError:
            continue
        if len(os.fsencode(folder / "control")) < _SOCKET_PATH_BYTES:
            return folder
        folder.rmdir()
    raise OutputError("no folder for temporary files can be written, or its path is too long; set TMPDIR")
