"""The route into a file of JSON lines: one OpenTelemetry log record per notice."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path

import msgspec

from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.profiler.errors import OutputError
from spikeprof.reports.pierce.records import record
from spikeprof.reports.pierce.routes import RouteError


class JsonlRoute:
    """Appends to ``path``, which is made with permissions 0600, and made anew after log rotation moved it away.

    A line is written whole or not at all. Raises OutputError where the file cannot be opened.
    """

    name = "jsonl"

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = self._open()
        except OSError as error:
            raise OutputError(f"cannot append alerts to {path}: {error.strerror or error}") from error

    async def send(self, alert: Alert) -> None:
        """Append one line."""
        line = msgspec.json.encode(record(alert), enc_hook=str) + b"\n"
        try:
            await asyncio.to_thread(self._append, line)
        except OSError as error:
            reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
            raise RouteError(f"cannot append to {self._path}: {reason}", again=True) from error

    async def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _append(self, line: bytes) -> None:
        if self._was_moved():
            opened = self._open()
            os.close(self._file)
            self._file = opened
        is_file = stat.S_ISREG(os.fstat(self._file).st_mode)
        before = os.fstat(self._file).st_size
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            if is_file and written:  # half a line would break the next one, too
                os.ftruncate(self._file, before)
            raise

    def _was_moved(self) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return True
        ours = os.fstat(self._file)
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)
