"""Recorded events through the detector."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer

from spikeprof.cli.inputs import opened
from spikeprof.cli.pierce_known import KnownSource
from spikeprof.cli.pierce_options import Knowledge, Memory, Routing, Showing, Thresholds, Watching
from spikeprof.profiler.errors import UsageError

if TYPE_CHECKING:
    from spikeprof.cli.pierce_session import Session
    from spikeprof.profiler.lookups import Lookups

_FURTHEST_S = 1e12  # no such time is taken in by the detector, and none may stop others from being told apart
_PACED_STEP_S = 0.25  # of event time, between two looks at the clock


def replay(
    path: Path,
    speed: str,
    as_json: bool,
    knowledge: Knowledge,
    thresholds: Thresholds,
    routing: Routing,
    showing: Showing,
) -> int:
    """Read all events, print what fires, and return the exit code. Raises SpikeprofError."""
    from rich.console import Console

    from spikeprof.cli.pierce_session import Plan, Session
    from spikeprof.profiler.collectors.pierce.jsonl import Counts, read_jsonl

    factor = _factor(speed)
    showing.check_page()
    counts = Counts()
    plan = Plan(
        source="standard input" if str(path) == "-" else path.name,
        watching=Watching(thresholds, Memory(baselines="none"), routing, showing),
        known=KnownSource(knowledge),
        live=False,
        quiet=as_json,
        read=lambda: {"lines": counts.lines, "broken": counts.broken},
    )

    async def run(stream: BinaryIO) -> Session:
        async with Session(plan, Console()) as session:
            clock = _Clock(factor)
            async for batch in _read_ahead(read_jsonl(stream, counts)):
                for part in _parts(batch, session, factor, showing.html is not None):
                    await clock.wait_for(part)
                    await session.feed(part)
                    if showing.html is not None:
                        await session.show()
        return session

    with _opened(path) as stream:
        session = asyncio.run(run(stream))
    _print(session, as_json)
    return session.exit_code


async def _read_ahead(batches: Iterator[Lookups]) -> AsyncIterator[Lookups]:
    """The batches, the next one being parsed in a thread while the detector looks at the last."""
    reading = asyncio.create_task(asyncio.to_thread(next, batches, None))
    while (batch := await reading) is not None:
        reading = asyncio.create_task(asyncio.to_thread(next, batches, None))
        yield batch


def _factor(speed: str) -> float:
    try:
        factor = math.inf if speed == "max" else float(speed)
    except ValueError:
        factor = math.nan
    if not factor > 0:
        raise UsageError(f"--speed {speed}: write max, or how many times real time, as in --speed 10")
    return factor


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    with opened(path) as stream:
        yield stream


class _Clock:
    """Lets event time pass ``factor`` times as fast as time does."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._began_s = time.monotonic()
        self._first_s: float | None = None

    async def wait_for(self, part: Lookups) -> None:
        """Wait until it is time for the look-ups; not for those whose time is behind the first."""
        if math.isinf(self._factor) or not len(part):
            return
        newest_s = float(part.ts_s.max())
        if self._first_s is None:
            self._first_s = newest_s
        ahead_s = (newest_s - self._first_s) / self._factor - (time.monotonic() - self._began_s)
        if ahead_s > 0:
            await asyncio.sleep(ahead_s)


def _parts(batch: Lookups, session: Session, factor: float, drawn: bool) -> Iterator[Lookups]:
    """The batch in stretches of event time: one where nobody looks in between, else as fine as the page's points."""
    if drawn:
        yield from stretches(batch, session.step_s)
    elif not math.isinf(factor):
        yield from stretches(batch, _PACED_STEP_S)
    else:
        yield batch


def stretches(batch: Lookups, step_s: float) -> Iterator[Lookups]:
    """Cut where the newest time so far passes a multiple of ``step_s``; the order of look-ups stays."""
    import numpy as np

    from spikeprof.profiler.lookups import Lookups

    plausible = np.where(np.abs(batch.ts_s) < _FURTHEST_S, batch.ts_s, -_FURTHEST_S)
    newest = np.maximum.accumulate(plausible)
    edges = np.flatnonzero(np.diff(np.floor(newest / step_s))) + 1
    for begin, end in zip([0, *edges], [*edges, len(batch)], strict=True):
        yield Lookups(
            batch.ts_s[begin:end],
            batch.keys.slice(begin, end - begin),
            batch.hits[begin:end],
            batch.ttls_s[begin:end],
            batch.tenants.slice(begin, end - begin),
        )


def _print(session: Session, as_json: bool) -> None:
    """The answer: as JSON, or the last lines below the notices that were printed already."""
    if not as_json:
        session.print_closing()
    elif session.run is not None:
        import msgspec

        from spikeprof.reports.pierce.answer import answer

        typer.echo(msgspec.json.format(msgspec.json.encode(answer(session.run), enc_hook=str), indent=1))
