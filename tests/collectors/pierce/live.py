"""A real redis-server, a proxy in a thread, and plain sockets to talk to them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spikeprof.profiler.collectors.pierce.proxy import Address, OnWritten, Proxy, ProxyOptions
from spikeprof.profiler.lookups import Lookups

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Redis:
    """A redis-server of our own, without persistence."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("there is no redis-server on this machine (Debian: apt-get install redis-server)")
        self.port = free_port()
        self._command = ["redis-server", "--port", str(self.port), "--bind", HOST, "--save", "", "--dir", str(folder)]
        self._command += ["--enable-debug-command", "yes", "--repl-diskless-sync-delay", "0", *arguments]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 1):
                return
            time.sleep(0.02)
        raise TimeoutError("redis-server did not start")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Wire:
    """A client that sends bytes and reads bytes."""

    def __init__(self, port: int, timeout: float = 5) -> None:
        self.socket = socket.create_connection((HOST, port), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (more := self.socket.recv(count - len(data))):
            data += more
        return data

    def rest(self) -> bytes:
        """Everything until the other side closes."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while more := self.socket.recv(1 << 16):
                data += more
        return data

    def ask(self, data: bytes, reply: bytes) -> None:
        """Send, and hold the answer against what it must be."""
        self.send(data)
        assert self.read(len(reply)) == reply


def command(*words: str | bytes) -> bytes:
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _new_loop() -> asyncio.AbstractEventLoop:
    """The loop that the proxy is to run on where it is there: uvloop; PIERCE_LOOP=asyncio says otherwise."""
    if os.environ.get("PIERCE_LOOP") != "asyncio" and importlib.util.find_spec("uvloop"):
        loop: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
        return loop
    return asyncio.new_event_loop()


class RunningProxy:
    """A proxy in a thread, with what it found."""

    def __init__(
        self,
        upstream_port: int,
        guard: Callable[[str], str] | None,
        options: ProxyOptions | None,
        on_written: OnWritten | None = None,
    ) -> None:
        self.batches: list[Lookups] = []
        self.slow_s = 0.0
        self._ready = threading.Event()
        self._loop = _new_loop()
        self._stop = asyncio.Event()
        self._arguments = (upstream_port, guard, options, on_written)
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._main(),))
        self._thread.start()
        assert self._ready.wait(5)

    async def _main(self) -> None:
        upstream_port, *how = self._arguments
        self.proxy = Proxy(Address(HOST, 0), Address(HOST, upstream_port), self._take, *how)
        await self.proxy.start()
        self.port = self.proxy.listen.port
        self._ready.set()
        await self._stop.wait()
        await self.proxy.close()

    async def _take(self, batch: Lookups) -> None:
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        self.batches.append(batch)

    def call(self, function: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
            self._loop.close()

    def found(self) -> list[tuple[str, bool, str]]:
        """Close, and tell key, hit and tenant of every look-up."""
        self.close()
        return [row for batch in self.batches for row in rows(batch)]


def rows(batch: Lookups) -> list[tuple[str, bool, str]]:
    return list(zip(batch.keys.to_pylist(), batch.hits.tolist(), batch.tenants.to_pylist(), strict=True))


@contextlib.contextmanager
def proxied(
    upstream_port: int,
    guard: Callable[[str], str] | None = None,
    options: ProxyOptions | None = None,
    on_written: OnWritten | None = None,
) -> Iterator[RunningProxy]:
    running = RunningProxy(upstream_port, guard, options, on_written)
    try:
        yield running
    finally:
        running.close()
