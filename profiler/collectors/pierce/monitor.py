"""Look-ups of a Redis without a proxy: keys from MONITOR, hits and misses from the statistics of INFO.

MONITOR shows every command with its keys but no reply; INFO counts hits and misses of all keys together but names none.
Both are joined exactly: MONITOR also shows the INFO commands that this source sends, so that what lies between two of
them is what their difference counts. Where such a span had only hits or only misses, the outcome of each look-up in it
is certain. In others it is not known which key missed: those are given as unresolved, and in the totals. MONITOR costs
the server up to half its throughput (https://redis.io/docs/latest/commands/monitor/); it needs the right to run it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from spikeprof.profiler.collectors.pierce.conversation import LOOKUPS
from spikeprof.profiler.errors import InputError
from spikeprof.profiler.lookups import Lookups, lookups, text_of

#: The key under which the totals of all keys are given.
TOTAL_KEY = "(all keys)"
#: What this source cannot know, for a report to say.
CANNOT_KNOW = (
    "which key missed, in spans with both hits and misses: the proxy knows",
    "the field that was looked up in a hash of the totals, and reads of commands other than GET, GETEX, GETDEL, HGET, "
    "MGET, HMGET, HGETALL and EXISTS, which the totals count",
    "how long entries still live",
)
_LINE_BYTES_MAX = 1 << 20
_LINE = re.compile(rb'\+(\d+\.\d+) \[(\d+) ([^\]]*)\] "([^"\\]*)"(.*)', re.DOTALL)
_WORD = re.compile(rb' "((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b"}
_STATS = re.compile(rb"keyspace_(hits|misses):(\d+)")
_ALL_KEYS = frozenset((b"MGET", b"EXISTS"))


@dataclass(slots=True)
class MonitorCounts:
    """What was seen, and what was not."""

    spans: int = 0
    lookups: int = 0
    unresolved_lookups: int = 0
    dropped_lookups: int = 0
    """Beyond ``span_lookups_max`` in one span: in the totals only."""
    broken_lines: int = 0
    reconnects: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """What was looked up between two looks at the statistics.

    ``certain``: look-ups of which the outcome is known. ``unresolved``: keys of the others, ``unresolved_ts_s`` and
    ``unresolved_tenants`` with them. ``totals``: a row of TOTAL_KEY per hit and per miss that the server counted,
    spread evenly over the span.
    """

    certain: Lookups
    unresolved: pa.StringArray
    unresolved_ts_s: np.ndarray
    unresolved_tenants: pa.StringArray
    totals: Lookups
    hits_count: int
    misses_count: int


@dataclass(frozen=True, slots=True)
class MonitorOptions:
    """How a server is watched. The password is not shown when this is printed."""

    every_s: float = 0.1
    """INFO is asked this often; shorter spans are more often certain, and cost the server more."""
    timeout_s: float = 3.0
    """The server must answer in this time."""
    retry_s: float = 1.0
    """A lost connection is made anew after this."""
    span_lookups_max: int = 200_000
    """Look-ups kept of one span."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)


async def watch(
    host: str, port: int, options: MonitorOptions | None = None, counts: MonitorCounts | None = None
) -> AsyncIterator[Span | None]:
    """Watch a server until the caller stops; None where the connection was lost, to be made anew.

    Raises InputError where the first connection fails, or the server refuses MONITOR or INFO.
    """
    options = options or MonitorOptions()
    counts = counts if counts is not None else MonitorCounts()
    first = True
    while True:
        try:
            async with contextlib.aclosing(_spans(host, port, options, counts)) as spans:
                async for span in spans:
                    first = False
                    yield span
        except (OSError, EOFError, TimeoutError, InputError) as error:
            if first and isinstance(error, InputError):
                raise
            if first:
                raise InputError(
                    f"the Redis at {host}:{port} cannot be watched ({error or type(error).__name__}); nothing was "
                    "read; see whether it runs and answers, and name its address"
                ) from error
            counts.reconnects += 1
            yield None
            await asyncio.sleep(options.retry_s)


async def _spans(host: str, port: int, options: MonitorOptions, counts: MonitorCounts) -> AsyncGenerator[Span, None]:
    async with asyncio.timeout(options.timeout_s):
        asking = await _Connection.open(host, port, options)
        watching = await _Connection.open(host, port, options)
        await watching.command(b"MONITOR")
    try:
        span = _OpenSpan(asking.name, counts, options.span_lookups_max)
        lines = asyncio.ensure_future(watching.lines(span))
        before: tuple[int, int] | None = None
        began_s = time.time()
        while True:
            async with asyncio.timeout(options.timeout_s):
                stats = _stats(await asking.command(b"INFO", b"stats"))
                await _first_of(span.marked(), lines)
            now_s = time.time()
            seen = span.close()
            if before is not None:
                counts.spans += 1
                # Statistics that were reset (CONFIG RESETSTAT) count from 0.
                hits, misses = (now if now < then else now - then for now, then in zip(stats, before, strict=True))
                yield _resolved(seen, hits, misses, (began_s, now_s), counts)
            before, began_s = stats, now_s
            await asyncio.sleep(options.every_s)
    finally:
        lines.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await lines
        asking.close()
        watching.close()


async def _first_of(mark: asyncio.Event, lines: asyncio.Future[None]) -> None:
    waiting = asyncio.ensure_future(mark.wait())
    done, _ = await asyncio.wait((waiting, lines), return_when=asyncio.FIRST_COMPLETED)
    if waiting not in done:
        waiting.cancel()
        lines.result()  # raises what ended the lines
        raise EOFError("MONITOR ended")


class _Connection:
    """A connection that sends one command at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        host, port = writer.get_extra_info("sockname")[:2]
        self.name = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()

    @classmethod
    async def open(cls, host: str, port: int, options: MonitorOptions) -> _Connection:
        connection = cls(*await asyncio.open_connection(host, port, limit=_LINE_BYTES_MAX))
        if options.password is not None:
            user = () if options.user is None else (options.user.encode(),)
            await connection.command(b"AUTH", *user, options.password.encode())
        return connection

    async def command(self, *words: bytes) -> bytes:
        """The reply: a line, or the bytes of a string. Raises InputError for an error."""
        sent = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        self._writer.write(sent)
        line = await self._reader.readuntil(b"\r\n")
        if line.startswith(b"-"):
            raise InputError(
                f"Redis refuses {words[0].decode()} ({text_of(line[1:].strip())}); nothing was read; give a user who "
                "may run MONITOR and INFO, or put the proxy in front"
            )
        if not line.startswith(b"$"):
            return line
        return await self._reader.readexactly(int(line[1:]) + 2)

    async def lines(self, span: _OpenSpan) -> None:
        """Feed the lines of MONITOR until the connection ends."""
        tail, skipping = b"", False
        while data := await self._reader.read(1 << 18):
            block = tail + data
            at = block.rfind(b"\r\n")
            complete, tail = (block[:at], block[at + 2 :]) if at >= 0 else (b"", block)
            for line in complete.split(b"\r\n") if at >= 0 else ():
                if skipping:
                    skipping = False
                else:
                    span.line(line)
            if len(tail) > _LINE_BYTES_MAX:
                span.too_long()
                tail, skipping = b"", True
        raise EOFError("the server closed the connection")

    def close(self) -> None:
        self._writer.close()


class _OpenSpan:
    """The look-ups since the last INFO of ours."""

    def __init__(self, own_name: bytes, counts: MonitorCounts, most: int) -> None:
        self._own = own_name
        self._counts = counts
        self._most = most
        self._mark = asyncio.Event()
        self._closed: list[list[tuple[float, bytes, str]]] = []
        self._seen: list[tuple[float, bytes, str]] = []

    def marked(self) -> asyncio.Event:
        """Set when MONITOR has shown the last INFO."""
        return self._mark

    def close(self) -> list[tuple[float, bytes, str]]:
        """The look-ups before that INFO."""
        seen = self._closed.pop(0)
        if not self._closed:
            self._mark.clear()
        return seen

    def too_long(self) -> None:
        self._counts.broken_lines += 1

    def line(self, line: bytes) -> None:
        """One line: time, database and client, words in quotes."""
        match = _LINE.fullmatch(line)
        if match is None:
            self._counts.broken_lines += 1
            return
        ts, db, client, name, rest = match.groups()
        name = name.upper()
        if name == b"INFO" and client == self._own:
            self._closed.append(self._seen)
            self._seen = []
            self._mark.set()
        elif name in LOOKUPS:
            words = _WORD.findall(rest)
            keys = words if name in _ALL_KEYS else words[:1]
            room = self._most - len(self._seen)
            self._counts.dropped_lookups += max(0, len(keys) - room)
            self._seen += [(float(ts), _plain(key), db.decode()) for key in keys[:room]]


def _plain(word: bytes) -> bytes:
    if b"\\" not in word:
        return word
    return _ESCAPE.sub(lambda match: _unescaped(match[1]), word)


def _unescaped(code: bytes) -> bytes:
    return bytes([int(code[1:], 16)]) if len(code) == 3 else _ESCAPED.get(code, code)


def _stats(text: bytes) -> tuple[int, int]:
    found = {name: int(number) for name, number in _STATS.findall(text)}
    if len(found) != 2:
        raise InputError(
            "INFO stats of this server counts no keyspace_hits and keyspace_misses; it cannot be watched without a "
            "proxy; put the proxy in front of it"
        )
    return found[b"hits"], found[b"misses"]


def _resolved(
    seen: list[tuple[float, bytes, str]], hits: int, misses: int, between_s: tuple[float, float], counts: MonitorCounts
) -> Span:
    ts_s = np.array([ts for ts, _, _ in seen], np.float64)
    keys = pa.array([text_of(key) for _, key, _ in seen], pa.string())
    tenants = pa.array([db for _, _, db in seen], pa.string())
    certain = (hits > 0) != (misses > 0)  # neither: the look-ups failed
    count = len(seen) if certain else 0
    counts.lookups += count
    counts.unresolved_lookups += len(seen) - count
    at = np.arange(hits + misses)
    spread = between_s[0] + (at + 0.5) * (between_s[1] - between_s[0]) / max(1, hits + misses)
    # Misses at even distances among the hits: their order is not known.
    missed = (at + 1) * misses // max(1, hits + misses) > at * misses // max(1, hits + misses)
    return Span(
        lookups(ts_s[:count], keys[:count], np.full(count, hits > 0), tenants=tenants[:count].dictionary_encode()),
        keys[count:],
        ts_s[count:],
        tenants[count:],
        lookups(np.asarray(spread, np.float64), pa.array([TOTAL_KEY] * len(at), pa.string()), ~missed),
        hits,
        misses,
    )
