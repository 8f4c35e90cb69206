"""Sources that go on: a proxy, a file that grows."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from spikeprof.cli.pierce_known import KnownSource
from spikeprof.cli.pierce_options import Knowledge, Length, Memory, Routing, Showing, Thresholds, address
from spikeprof.cli.pierce_session import Plan, Session, say
from spikeprof.profiler.errors import UsageError

if TYPE_CHECKING:
    from spikeprof.analyzers.cache_pierce.guard import Guard
    from spikeprof.profiler.collectors.pierce.proxy import Address


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


def proxy(
    wanted: ProxyWanted,
    knowledge: Knowledge,
    thresholds: Thresholds,
    memory: Memory,
    routing: Routing,
    showing: Showing,
    length: Length,
) -> int:
    """Serve until Ctrl-C. Raises SpikeprofError where it cannot start."""
    from spikeprof.profiler.collectors.pierce.proxy import Address, Proxy, ProxyOptions

    check_html(showing)
    upstream = Address(*address(wanted.upstream, "--upstream"))
    options = ProxyOptions(
        tenant_of=cast(Literal["none", "user", "db"], wanted.tenant),
        hash_fields=wanted.hash_fields,
        upstream_tls=_tls(wanted),
        upstream_name=wanted.tls_name or None,
    )
    known = KnownSource(knowledge, _scan(wanted, upstream))
    guard = _guard(wanted, known)
    served: list[Proxy] = []
    plan = Plan(
        source=f"proxy to {upstream}",
        thresholds=thresholds,
        routing=routing,
        showing=showing,
        memory=memory,
        known=known,
        guard=guard,
        read=lambda: counted(served[0].counts) if served else {},
    )

    async def run() -> Session:
        listen = Address(*address(wanted.listen, "--listen"))
        async with Session(plan, console()) as session:
            verdict = None if guard is None else cast("Callable[[str], str]", guard.verdict)
            server = Proxy(listen, upstream, session.feed, verdict, options)
            await server.start()
            served.append(server)
            say(f"clients connect to {server.listen}; Ctrl-C ends it")
            try:
                await session.until_stopped(length.seconds)
            finally:
                await server.close()
        return session

    return asyncio.run(run()).exit_code


def follow(
    path: Path,
    from_start: bool,
    knowledge: Knowledge,
    thresholds: Thresholds,
    memory: Memory,
    routing: Routing,
    showing: Showing,
    length: Length,
) -> int:
    """Follow until Ctrl-C. Raises SpikeprofError where it cannot start."""
    from spikeprof.profiler.collectors.pierce import jsonl

    check_html(showing)
    counts = jsonl.Counts()
    plan = Plan(
        source=f"events in {path}",
        thresholds=thresholds,
        routing=routing,
        showing=showing,
        memory=memory,
        known=KnownSource(knowledge),
        is_now=False,
        read=lambda: {"lines": counts.lines, "broken": counts.broken, "rotations": counts.rotations},
    )

    async def run() -> Session:
        async with Session(plan, console()) as session:
            batches = jsonl.follow(path, counts, from_start=from_start, stop=lambda: session.is_stopped)
            await until_stopped(session, length, feed_all(batches, session))
        return session

    return asyncio.run(run()).exit_code


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


def console() -> Any:
    """Where the table and notices are shown."""
    from rich.console import Console

    return Console()


def check_html(showing: Showing) -> None:
    """Refuse before the start a page that could not be written at the end. Raises OutputError."""
    from spikeprof.cli import outputs

    if showing.html is not None:
        outputs.check(showing.html, outputs.is_html_report)


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
    return Guard(known.current, Limits(wanted.guard_nil, wanted.guard_limit))


def _scan(wanted: ProxyWanted, upstream: Address) -> Callable[[], Iterable[str]] | None:
    raise NotImplementedError
