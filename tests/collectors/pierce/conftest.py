"""One redis-server for the tests of a module that leave nothing behind that matters to others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from collectors.pierce.live import Redis, Wire, command


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    server = Redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis(_server: Redis) -> Redis:
    """A running redis-server without keys."""
    with Wire(_server.port) as wire:
        wire.ask(command("FLUSHALL"), b"+OK\r\n")
    return _server
