"""The prefix cache of an inference engine: its events, live or recorded, or its counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikeprof.cli.inputs import opened
from spikeprof.cli.pierce_live import console, counted, ended, feed_all, until_stopped
from spikeprof.cli.pierce_options import Memory, Watching
from spikeprof.cli.pierce_session import Plan, Session, say
from spikeprof.profiler.errors import InputError, UsageError

if TYPE_CHECKING:
    from spikeprof.profiler.collectors.pierce.prometheus import Rates

TOKENS_PER_LOOKUP = 16  # counters count tokens; engines look up blocks of about so many
_EVENTS_HIDE = "Events tell of hits only where a block is followed by another one: miss rates are upper bounds."
_COUNTERS_HIDE = "Counters have no keys: which prompts missed, and how many different ones, is not known."


@dataclass(frozen=True, slots=True)
class EngineWanted:
    """What was asked for, as on the command line."""

    zmq: str
    zmq_replay: str
    events: Path | None
    metrics: str
    every_s: float


def engine(
    wanted: EngineWanted,
    watching: Watching,
) -> int:
    """Watch until Ctrl-C or the end of the file. Raises SpikeprofError where it cannot start."""
    watching.showing.check_page()
    named = [name for name in (wanted.zmq, wanted.events, wanted.metrics) if name]
    if len(named) != 1:
        raise UsageError("name one source: --zmq ENDPOINT, --events FILE or --metrics URL")
    if wanted.zmq_replay and not wanted.zmq:
        raise UsageError("--zmq-replay goes with --zmq")
    source = _counters(wanted) if wanted.metrics else _events(wanted)
    plan = Plan(
        source=f"prefix cache, {source.name}",
        watching=replace(watching, memory=Memory(baselines="none")) if wanted.events else watching,
        live=not wanted.events,
        is_now=False,
        read=source.read,
        cannot_know=(source.hides,),
    )

    async def run() -> Session:
        async with Session(plan, console()) as session:
            await until_stopped(session, watching.length, source.run(session))
        return session

    return ended(asyncio.run(run()))


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    hides: str
    run: Callable[[Session], Any]
    read: Callable[[], Mapping[str, int]]


def _events(wanted: EngineWanted) -> _Source:
    from spikeprof.profiler.collectors.pierce.engine import KvEvents, read_events, subscribe

    events = KvEvents()

    async def live(session: Session) -> None:
        stop = lambda: session.is_stopped  # noqa: E731
        await feed_all(subscribe(wanted.zmq, wanted.zmq_replay or None, events, stop=stop), session)

    async def recorded(session: Session) -> None:
        assert wanted.events is not None
        with opened(wanted.events) as stream:
            await feed_all(read_events(stream, events), session)

    name = f"events in {wanted.events}" if wanted.events else f"events from {wanted.zmq}"
    return _Source(name, _EVENTS_HIDE, recorded if wanted.events else live, lambda: counted(events.counts))


@dataclass(slots=True)
class _Scrapes:
    """What came of scraping."""

    scrapes: int = 0
    failed_scrapes: int = 0
    counter_resets: int = 0
    told: str = field(default="", repr=False)


def _counters(wanted: EngineWanted) -> _Source:
    from spikeprof.profiler.collectors.pierce.prometheus import PrefixCounters, scrape

    counters, counts = PrefixCounters(), _Scrapes()

    async def run(session: Session) -> None:
        rates = counters.update(await asyncio.to_thread(scrape, wanted.metrics), time.time())
        while not session.is_stopped:
            await session.until_stopped(wanted.every_s)
            try:
                rates = counters.update(await asyncio.to_thread(scrape, wanted.metrics), time.time())
            except InputError as error:
                counts.failed_scrapes += 1
                if counts.told != str(error):
                    counts.told = str(error)
                    say(f"{error}; scraping goes on")
                continue
            counts.scrapes += 1
            counts.counter_resets += sum(rate.reset for rate in rates)
            if rates:
                await session.feed_counts(*_columns(rates))

    read = lambda: {k: v for k, v in counted(counts).items() if k != "told"}  # noqa: E731
    return _Source(f"counters at {wanted.metrics.rsplit('@', 1)[-1]}", _COUNTERS_HIDE, run, read)


def _columns(rates: list[Rates]) -> tuple[Any, ...]:
    """Arguments of ``Detector.feed_counts``: look-ups of blocks, per model."""
    import numpy as np

    queries = np.array([rate.queries_count for rate in rates]) / TOKENS_PER_LOOKUP
    hits = np.minimum(np.array([rate.hits_count for rate in rates]) / TOKENS_PER_LOOKUP, queries)
    return (
        np.array([rate.ts_s - rate.span_s for rate in rates]),
        np.array([rate.ts_s for rate in rates]),
        [rate.model for rate in rates],
        [f"{rate.engine}/prefix-cache" for rate in rates],
        queries,
        queries - hits,
    )
