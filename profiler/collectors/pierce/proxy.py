"""A proxy in front of Redis that tells which look-ups hit and which missed.

Every chunk is handed on as it comes, in both directions and byte for byte; a copy is looked into afterwards, for a
bounded share of the time. Where that falls behind, connections cease to be followed until they are quiet, and the
bytes are counted: traffic never waits for analysis. One connection of the upstream belongs to each client, so that
AUTH, SELECT, MULTI, pub/sub and blocking commands need no help. Full buffers pause the other side's reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler.collectors.pierce.conversation import Conversation, TenantOf
from spikeprof.profiler.collectors.pierce.found import Found, ProxyCounts, Run
from spikeprof.profiler.collectors.pierce.guarded import GuardedClient
from spikeprof.profiler.collectors.pierce.link import Client
from spikeprof.profiler.collectors.pierce.ttl import TtlProbe
from spikeprof.profiler.errors import UsageError
from spikeprof.profiler.lookups import Lookups, lookups, text_of

#: How long copies are looked into before traffic is served again.
_SLICE_S = 0.001
#: Slices after which it is seen whether too much waits.
_LOOK_AT_BYTES_EVERY = 8

#: Connections that wait to be accepted, as Redis has it (tcp-backlog).
_BACKLOG = 511

OnLookups = Callable[[Lookups], Awaitable[None]]
#: Of a key: "pass" it to the upstream, answer "nil" at once, or refuse it since its pattern is at its "limit".
Guard = Callable[[str], str]
#: Of the keys that a command may write, before it is sent; None where they cannot be told.
OnWritten = Callable[[list[str] | None], None]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """How the proxy runs."""

    tenant_of: TenantOf = "none"
    """What names the tenant of a look-up: nothing, the user of AUTH or HELLO, or the number of the database."""
    hash_fields: bool = False
    """Look-ups in hashes count per field, as ``key/field``, not per hash."""
    upstream_tls: ssl.SSLContext | None = None
    """Speak TLS to the upstream in this context."""
    upstream_name: str | None = None
    """The name to hold the upstream's certificate against, where it is not the host."""
    connect_timeout_s: float = 3.0
    """A client gets an error when the upstream cannot be reached in this time."""
    ttl_keys_max: int = 0
    """Of each batch, for at most so many entries that were found the upstream is asked how long they still live."""
    ttl_user: str | None = None
    ttl_password: str | None = field(default=None, repr=False)
    """Who asks."""
    reply_timeout_s: float | None = None
    """A client gets an error, and its connection ends, when a command was not answered for so long; commands that may
    block, and scripts, are waited for. None = wait as long as the client does."""
    batch_s: float = 0.05
    """Look-ups are handed over at most this often."""
    held_lookups_max: int = 150_000
    """Look-ups that wait for a busy receiver; further ones are dropped and counted."""
    analysis_every_s: float = 0.02
    """Copies are looked into this long after they were made, so that several are looked into at once."""
    analysis_share_max: float = 0.5
    """Looking into copies takes at most this share of the time, in slices between which traffic is served."""
    unread_bytes_max: int = 16 << 20
    """Copies that wait to be looked into; with more, connections cease to be followed."""
    quiet_s: float = 0.05
    """Such a connection is followed again after a pause as long as this, once every command was answered."""


class Proxy:
    """Listens for clients of the upstream, on loopback unless told otherwise.

    ``on_lookups`` is awaited with each batch; while it runs, look-ups are collected. ``guard`` is asked of each key
    that is looked up outside MULTI, before the command is sent; without one, nothing is ever held back. Where a
    client has not shown that the upstream serves it, the guard is not asked: it must not replace authentication.
    An ACL that forbids a key does not hold for what the guard answers. With a guard, ``on_written`` is called with
    keys before they are written, so that clients read what they wrote; what it does must be quick. Raises UsageError
    for a share of time that is none.
    """

    def __init__(
        self,
        listen: Address,
        upstream: Address,
        on_lookups: OnLookups,
        guard: Guard | None = None,
        options: ProxyOptions | None = None,
        on_written: OnWritten | None = None,
    ) -> None:
        if not 0 < (options or ProxyOptions()).analysis_share_max <= 1:
            raise UsageError("the share of time for analysis must be above 0 and at most 1")
        self.listen = listen
        self.upstream = upstream
        self.guard = guard
        self.on_written = on_written
        self.options = options or ProxyOptions()
        self.found = Found()
        self._slices = 0
        self._counts = ProxyCounts()
        self._on_lookups = on_lookups
        self._server: asyncio.Server | None = None
        self._clients: set[Client] = set()
        self._waiting: deque[Client] = deque()
        self._timer: asyncio.Handle | None = None
        self._next_slice_s = 0.0
        self._closing = asyncio.Event()
        self._probe: TtlProbe | None = None
        if self.options.ttl_keys_max:
            self._probe = TtlProbe(
                upstream.host,
                upstream.port,
                tls=self.options.upstream_tls,
                tls_name=self.options.upstream_name,
                user=self.options.ttl_user,
                password=self.options.ttl_password,
            )
        self._handing_over: asyncio.Task[None] | None = None

    @property
    def counts(self) -> ProxyCounts:
        """What was seen and left out so far: a copy."""
        return replace(self._counts)

    @property
    def live_counts(self) -> ProxyCounts:
        """The counts themselves, for the connections to add to."""
        return self._counts

    async def start(self) -> None:
        """Listen. With port 0 a free one is taken, and ``listen`` says which. Raises UsageError where that fails."""
        loop = asyncio.get_running_loop()
        kind = Client if self.guard is None else GuardedClient
        try:
            self._server = await loop.create_server(
                lambda: kind(self), self.listen.host, self.listen.port, backlog=_BACKLOG
            )
        except OSError as error:
            raise UsageError(
                f"cannot listen on {self.listen}: {error.strerror or error}; choose another address with --listen"
            ) from error
        self.listen = Address(self.listen.host, self._server.sockets[0].getsockname()[1])
        self._handing_over = loop.create_task(self._hand_over())

    async def close(self) -> None:
        """Stop listening, end all connections, and hand over what was found."""
        if self._server is not None:
            self._server.close()
        for client in list(self._clients):
            client.abort()
        self._closing.set()
        if self._handing_over is not None:
            await self._handing_over
            self._handing_over = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            self._waiting.popleft().analyse(float("inf"))
        self._counts.dropped_lookups += self.found.drop_beyond(self.options.held_lookups_max)
        await self._batch()
        if self._probe is not None:
            self._probe.close()

    # -- what connections call ---------------------------------------------------------------------------------------

    def opened(self, client: Client) -> Conversation:
        """A client has come."""
        self._clients.add(client)
        self._counts.connections += 1
        self._counts.open_connections += 1
        conversation = Conversation(self._counts, self.options.tenant_of, self.options.hash_fields)
        conversation.found = self.found
        return conversation

    def closed(self, client: Client) -> None:
        """A client has gone."""
        if client in self._clients:
            self._clients.discard(client)
            self._counts.open_connections -= 1

    def enqueue(self, client: Client) -> None:
        """A client has copies to be looked into."""
        self._waiting.append(client)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.options.analysis_every_s, self._analyse)

    def hurry(self) -> None:
        """Copies may grow fast: look into them now, unless that was done just before."""
        if self._timer is not None and time.perf_counter() >= self._next_slice_s:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_soon(self._analyse)

    # -- analysis ----------------------------------------------------------------------------------------------------

    def _analyse(self) -> None:
        options, waiting = self.options, self._waiting
        self._slices += 1
        if self._slices % _LOOK_AT_BYTES_EVERY == 1:
            self._fall_behind()
        until_s = time.perf_counter() + _SLICE_S
        while waiting and time.perf_counter() < until_s:
            client = waiting.popleft()
            if not client.analyse(until_s):
                waiting.append(client)
        self._counts.dropped_lookups += self.found.drop_beyond(options.held_lookups_max)
        self._timer = None
        pause_s = _SLICE_S * (1 / options.analysis_share_max - 1)
        self._next_slice_s = time.perf_counter() + pause_s
        if waiting:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._analyse)

    def _fall_behind(self) -> None:
        """Where too much waits, give up the connections that have most to read, and follow the others."""
        sizes = {client: client.unread_bytes for client in self._waiting}
        total = sum(sizes.values())
        if total <= self.options.unread_bytes_max:
            return
        for client in sorted(sizes, key=sizes.__getitem__, reverse=True):
            client.give_up()
            total -= sizes[client]
            if total <= self.options.unread_bytes_max // 2:
                break

    # -- handing over ------------------------------------------------------------------------------------------------

    async def _hand_over(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self.options.batch_s)
            await self._batch()
            if self.options.reply_timeout_s is not None:
                now_s = time.monotonic()
                for client in list(self._clients):
                    client.check_stall(now_s, self.options.reply_timeout_s)

    async def _ttls_s(self, keys: list[bytes], hits: list[bool], runs: list[Run]) -> npt.NDArray[np.float64] | None:
        """Seconds left of some of the entries found in database 0, NaN for the others; None where nobody asks."""
        if self._probe is None:
            return None
        starts, _, _, databases = zip(*runs, strict=True)
        asked_db = np.repeat(np.array(databases) == "0", np.diff([*starts, len(keys)]))
        at = np.flatnonzero(np.array(hits, np.bool_) & asked_db)
        at = at[:: max(1, -(-len(at) // self.options.ttl_keys_max))]
        ttls_s = np.full(len(keys), np.nan)
        if len(at):
            ttls_s[at] = await self._probe.ask([keys[index] for index in at])
        self._counts.ttl_failures = self._probe.failures
        return ttls_s

    async def _batch(self) -> None:
        if not self.found.keys:
            return
        keys, hits, runs = self.found.take()
        ttls_s = await self._ttls_s(keys, hits, runs)
        batch = as_lookups(keys, hits, runs, ttls_s)
        self._counts.lookups += len(batch)
        try:
            await self._on_lookups(batch)
        except Exception:  # whatever the receiver does wrong, traffic goes on
            self._counts.receiver_errors += 1


def as_lookups(
    keys: list[bytes], hits: list[bool], runs: list[Run], ttls_s: npt.NDArray[np.float64] | None = None
) -> Lookups:
    """What was found as one batch; how long entries still live is not known unless the upstream was asked."""
    binary = pa.array(keys, pa.binary())
    try:
        texts = binary.cast(pa.string())
    except pa.ArrowInvalid:  # not UTF-8
        texts = pa.array([text_of(key) for key in keys], pa.string())
    starts, tenants, ts_s, _ = zip(*runs, strict=True)
    lengths = np.diff([*starts, len(keys)])
    names = pa.array(tenants, pa.string()).dictionary_encode()
    codes = np.repeat(names.indices.to_numpy(), lengths)
    column = pa.DictionaryArray.from_arrays(pa.array(codes), names.dictionary)
    return lookups(np.repeat(ts_s, lengths), texts, np.array(hits, np.bool_), ttls_s, column)
