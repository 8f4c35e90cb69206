"""How long entries still live, asked of the upstream for some of the keys that were found."""

from __future__ import annotations

import asyncio
import ssl

from spikeprof.profiler.collectors.pierce.resp import integer

_NAN = float("nan")


class TtlProbe:
    """A connection of its own that asks PTTL, in database 0. It never raises: what it cannot learn is NaN.

    ``failures``: how often the connection failed or was refused; it is made anew for the next keys.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        tls_name: str | None = None,
        user: str | None = None,
        password: str | None = None,
        timeout_s: float = 1.0,
    ) -> None:
        self.failures = 0
        self._where = (host, port)
        self._tls, self._tls_name = tls, tls_name
        self._login = () if password is None else tuple(part.encode() for part in (user, password) if part is not None)
        self._timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, keys: list[bytes]) -> list[float]:
        """Seconds left of each; NaN for an entry without end, one that is gone, and where there was no answer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = self._streams or await self._connect()
                writer.write(b"".join(_command(b"PTTL", key) for key in keys))
                return [_seconds(await reader.readuntil(b"\r\n")) for _ in keys]
        except (OSError, EOFError, TimeoutError, ValueError):
            self.failures += 1
            self.close()
            return [_NAN] * len(keys)

    def close(self) -> None:
        """End the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = None if self._tls is None else self._tls_name or self._where[0]
        streams = await asyncio.open_connection(*self._where, ssl=self._tls, server_hostname=name)
        self._streams = streams
        if self._login:
            streams[1].write(_command(b"AUTH", *self._login))
            if await streams[0].readuntil(b"\r\n") != b"+OK\r\n":
                raise ValueError("AUTH was refused")
        return streams


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _seconds(line: bytes) -> float:
    left_ms = integer(line[1:-2]) if line.startswith(b":") else None
    if left_ms is None:
        raise ValueError("PTTL was refused")
    return left_ms / 1000 if left_ms >= 0 else _NAN
