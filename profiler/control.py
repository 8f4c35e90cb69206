"""The supervisor's end of the line to the targets: asks for kernel names as they appear, says farewell.

One thread, one socket per traced process. A target that ends says so and waits a moment for the last
question; a target whose line breaks was killed. Losing this server only costs names, never the program.
"""

from __future__ import annotations

import json
import selectors
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spikeprof.profiler.assemble.layouts import layout_for
from spikeprof.profiler.assemble.names import NameTail
from spikeprof.profiler.assemble.spool import read_process

_POLL_SECONDS = 0.05


@dataclass
class _Target:
    """One connected process."""

    connection: socket.socket
    stem: str = ""
    tail: NameTail | None = None
    buffer: bytes = b""
    pid: int = 0


class ControlServer:
    """Listens on a socket in a private folder. ``path`` goes into the targets' environment."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        # Not in the trace folder: a socket's path may have 107 bytes at most.
        self._folder = Path(tempfile.mkdtemp(prefix="spikeprof-"))
        self.path = str(self._folder / "control")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._stopping = threading.Event()
        self._targets: dict[int, _Target] = {}  # by file descriptor
        self._thread = threading.Thread(target=self._run, name="spikeprof-control", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self, patience_s: float = 2.0) -> list[int]:
        """Serve until all targets are gone, at most ``patience_s``; returns the pids that still run.

        Those see the line break and stop recording by themselves.
        """
        deadline = time.monotonic() + patience_s
        # A child of a program that just ended may be about to connect: one round is always waited for.
        time.sleep(2 * _POLL_SECONDS)
        while self._targets and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        running = sorted(t.pid for t in list(self._targets.values()) if t.pid)
        self._stopping.set()
        self._thread.join(timeout=5.0)
        for target in list(self._targets.values()):
            target.connection.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return running

    def _run(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(_POLL_SECONDS):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            for target in list(self._targets.values()):
                self._ask(target)

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
            try:
                message: dict[str, Any] = json.loads(line)
            except ValueError:
                self._drop(target)
                return
            if "spool" in message:
                # The name of a file in our own folder, nothing else: it comes from another process.
                target.stem, target.pid = Path(str(message["spool"])).name, int(message.get("pid", 0))
            if message.get("bye"):
                self._ask(target, final=True)

    def _ask(self, target: _Target, *, final: bool = False) -> None:
        """Send the pointers that are new in the target's spool."""
        try:
            pointers = self._pointers(target)
        except OSError:
            pointers = []
        if pointers or final:
            try:
                target.connection.sendall((json.dumps({"names": pointers, "final": final}) + "\n").encode())
            except OSError:
                self._drop(target)

    def _pointers(self, target: _Target) -> list[int]:
        if target.tail is None:
            events = self._spool / f"{target.stem}.jsonl"
            if not target.stem or not events.exists():
                return []
            process = read_process(events)
            layout = layout_for(process.libcupti or 0, process.sizes)
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
