"""Sources that go on: a proxy, a file that grows, MONITOR of a Redis."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from spikeprof.cli.pierce_known import KnownSource, Scan
from spikeprof.cli.pierce_options import Knowledge, Length, Watching, address
from spikeprof.cli.pierce_routes import secret
from spikeprof.cli.pierce_session import Plan, Session, say
from spikeprof.profiler.errors import UsageError

if TYPE_CHECKING:
    from spikeprof.analyzers.cache_pierce.guard import Guard
    from spikeprof.profiler.collectors.pierce.monitor import Span
    from spikeprof.profiler.collectors.pierce.proxy import Address
    from spikeprof.profiler.lookups import Lookups


@dataclass(frozen=True, slots=True)
class ProxyWanted:
    """What was asked of the proxy, as on the command line."""

    listen: str
    upstream: str
    tls: bool
    tls_ca: Path | None
    tls_name: str
    tenant: str
    hash_fields: bool
    known_scan: bool
    guard_nil: bool
    guard_limit: float | None
    user: str
    password_env: str
    ttl_keys: int
    reply_timeout_s: float

    @property
    def password(self) -> str:
        """The password of the detector's own user; empty without one. Raises UsageError."""
        return secret(self.password_env, "--redis-password-env") if self.password_env else ""


def proxy(
    wanted: ProxyWanted,
    knowledge: Knowledge,
    watching: Watching,
) -> int:
    """Serve until Ctrl-C. Raises SpikeprofError where it cannot start."""
    from spikeprof.profiler.collectors.pierce.proxy import Address, Proxy, ProxyOptions

    watching.showing.check_page()
    upstream = Address(*address(wanted.upstream, "--upstream"))
    options = ProxyOptions(
        tenant_of=cast(Literal["none", "user", "db"], wanted.tenant),
        hash_fields=wanted.hash_fields,
        upstream_tls=_tls(wanted),
        upstream_name=wanted.tls_name or None,
        ttl_keys_max=wanted.ttl_keys,
        ttl_user=wanted.user or None,
        ttl_password=wanted.password or None,
        reply_timeout_s=wanted.reply_timeout_s or None,
    )
    known = KnownSource(knowledge, _scan(wanted, upstream))
    guard = _guard(wanted, known)
    served: list[Proxy] = []
    plan = Plan(
        source=f"proxy to {upstream}",
        watching=watching,
        known=known,
        guard=guard,
        read=lambda: counted(served[0].counts) if served else {},
    )

    def wrote(keys: list[str] | None) -> None:
        known.wrote(keys)
        if guard is not None and guard.known is not known.current:  # the filter before, for a moment yet
            guard.wrote(keys)

    async def run() -> Session:
        listen = Address(*address(wanted.listen, "--listen"))
        async with Session(plan, console()) as session:
            verdict = None if guard is None else cast("Callable[[str], str]", guard.verdict)
            server = Proxy(listen, upstream, session.feed, verdict, options, wrote if known.is_asked else None)
            await server.start()
            served.append(server)
            say(f"clients connect to {server.listen}; Ctrl-C ends it")
            try:
                await session.until_stopped(watching.length.seconds)
            finally:
                await server.close()
        return session

    return ended(_quick_loop(run()))


def _quick_loop(main: Coroutine[Any, Any, Session]) -> Session:
    """Run on uvloop, which serves connections at half the cost, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def follow(
    path: Path,
    from_start: bool,
    knowledge: Knowledge,
    watching: Watching,
) -> int:
    """Follow until Ctrl-C. Raises SpikeprofError where it cannot start."""
    from spikeprof.profiler.collectors.pierce import jsonl

    watching.showing.check_page()
    counts = jsonl.Counts()
    plan = Plan(
        source=f"events in {path}",
        watching=watching,
        known=KnownSource(knowledge),
        is_now=False,
        read=lambda: {"lines": counts.lines, "broken": counts.broken, "rotations": counts.rotations},
    )

    async def run() -> Session:
        async with Session(plan, console()) as session:
            batches = jsonl.follow(path, counts, from_start=from_start, stop=lambda: session.is_stopped)
            await until_stopped(session, watching.length, feed_all(batches, session))
        return session

    return ended(asyncio.run(run()))


def monitor(
    where: str,
    user: str,
    password_env: str,
    every_s: float,
    knowledge: Knowledge,
    watching: Watching,
) -> int:
    """Watch until Ctrl-C. Raises SpikeprofError where it cannot start."""
    from spikeprof.profiler.collectors.pierce.monitor import CANNOT_KNOW, MonitorCounts, MonitorOptions, watch

    watching.showing.check_page()
    host, port = address(where, "--redis")
    password = secret(password_env, "--redis-password-env") if password_env else None
    options = MonitorOptions(every_s=every_s, user=user or None, password=password)
    counts = MonitorCounts()
    plan = Plan(
        source=f"MONITOR of {where}",
        watching=watching,
        known=KnownSource(knowledge),
        is_now=False,  # MONITOR has the server's clock
        read=lambda: counted(counts),
        cannot_know=(
            "Where a span had hits and misses, misses are shared out evenly over its keys: shares are estimates, and "
            "the rule of one missing key cannot fire.",
            *(f"Not known: {what}." for what in CANNOT_KNOW),
        ),
    )

    async def run() -> Session:
        async with Session(plan, console()) as session:
            await until_stopped(session, watching.length, _spans(watch(host, port, options, counts), session))
        return session

    return ended(asyncio.run(run()))


async def _spans(spans: AsyncIterator[Span | None], session: Session) -> None:
    async with contextlib.aclosing(cast("AsyncGenerator[Span | None, None]", spans)) as watched:
        async for span in watched:
            if session.is_stopped:
                return
            if span is not None and len(span.certain):
                await session.feed(span.certain)
            if span is not None and len(span.unresolved):
                await session.feed(shared_out(span))


def shared_out(span: Span) -> Lookups:
    """Look-ups of a span whose outcomes are not known, with its misses evenly among them."""
    import numpy as np

    from spikeprof.profiler.lookups import lookups

    at = np.arange(len(span.unresolved))
    share = span.misses_count / max(span.hits_count + span.misses_count, 1)
    missed = np.floor((at + 1) * share) > np.floor(at * share)
    tenants = span.unresolved_tenants.dictionary_encode()
    return lookups(span.unresolved_ts_s, span.unresolved, ~missed, tenants=tenants)


_END: Any = object()


async def feed_all(batches: Iterable[Any], session: Session) -> None:
    """Feed a source that blocks, from a thread; None stands for nothing new."""
    iterator = iter(batches)
    while (batch := await asyncio.to_thread(next, iterator, _END)) is not _END:
        if batch is not None:
            await session.feed(batch)


async def until_stopped(session: Session, length: Length, source: Any) -> None:
    """Run a source until it ends, the user stops it, or its time is over. Raises what the source raises."""
    reading = asyncio.ensure_future(source)
    stopped = asyncio.ensure_future(session.until_stopped(length.seconds))
    await asyncio.wait((reading, stopped), return_when=asyncio.FIRST_COMPLETED)
    session.stop()
    stopped.cancel()
    await reading


def ended(session: Session) -> int:
    """Say what came of a run; its exit code."""
    session.print_closing()
    return session.exit_code


def console() -> Any:
    """Where the table and notices are shown."""
    from rich.console import Console

    return Console()


def counted(counts: Any) -> Mapping[str, int]:
    """Counts of a source by name, those that are not nothing."""
    return {name: value for name, value in dataclasses.asdict(counts).items() if value}


def _tls(wanted: ProxyWanted) -> ssl.SSLContext | None:
    if not wanted.tls:
        if wanted.tls_ca or wanted.tls_name:
            raise UsageError("--upstream-ca and --upstream-name need --upstream-tls")
        return None
    try:
        return ssl.create_default_context(cafile=wanted.tls_ca)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--upstream-ca {wanted.tls_ca}: no certificates can be read from it: {error}") from error


def _guard(wanted: ProxyWanted, known: KnownSource) -> Guard | None:
    """Protection, where it was asked for."""
    if not wanted.guard_nil and wanted.guard_limit is None:
        return None
    from spikeprof.analyzers.cache_pierce.guard import Guard, Limits

    if wanted.guard_nil and not known.is_asked:
        raise UsageError("--guard-nil needs to know which keys exist: add --known FILE or --known-scan")
    if wanted.guard_nil and wanted.hash_fields:
        raise UsageError("--guard-nil knows keys, not fields of hashes: leave --hash-fields out")
    if wanted.guard_nil and not known.is_refreshed:
        raise UsageError(
            "--guard-nil answers nil for keys that others than its clients wrote after the filter was built: bound how "
            "long with --known-refresh S"
        )
    return Guard(known.current, Limits(wanted.guard_nil, wanted.guard_limit))


def _scan(wanted: ProxyWanted, upstream: Address) -> Scan | None:
    """All keys of the Redis, read anew each time; None where that was not asked for."""
    if not wanted.known_scan:
        return None
    if wanted.hash_fields:
        raise UsageError("--known-scan finds keys, not fields of hashes: leave --hash-fields out, or use --known FILE")
    if wanted.tls_name:
        raise UsageError("--known-scan verifies the host itself: leave --upstream-name out, or use --known FILE")
    from spikeprof.profiler.pierce_scan import scan

    password = wanted.password
    return lambda: scan(upstream.host, upstream.port, wanted.user, password, tls=wanted.tls, tls_ca=wanted.tls_ca)
