"""Takes notices from the detector to every route: queued, retried, counted, and never in the detector's way.

One bounded queue and one task per route, so that a receiver that is down holds up nobody else. A notice that a route
has delivered is never given to it again, whoever submits it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.reports.pierce.routes import Route, RouteError, notice_id

_CLOSE_S = 2.0  # what a route may take to give its connection back
_REMEMBERED_COUNT = 10_000  # notices that a route is known to have been given
_LAST_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """``queue_count``: notices that wait per route; when it is full, the oldest makes room.

    ``attempt_s``: limit of one attempt. ``first_wait_s`` doubles after every failure up to ``longest_wait_s``, each
    time between half and all of it. ``give_up_s``: how long one notice is tried.
    """

    queue_count: int = 1000
    attempt_s: float = 20.0
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    give_up_s: float = 900.0


@dataclass(slots=True)
class RouteCounts:
    """What became of the notices of one route. ``lost_count`` is every notice that was given up, for any reason."""

    sent_count: int = 0
    failures_count: int = 0
    unclear_count: int = 0
    lost_count: int = 0


@dataclass(slots=True)
class _Lane:
    """One route, what waits for it and what is on its way. ``failing``: failures since it last delivered."""

    route: Route
    name: str
    counts: RouteCounts = field(default_factory=RouteCounts)
    waiting: deque[Alert] = field(default_factory=deque)
    current: Alert | None = None
    seen: OrderedDict[str, None] = field(default_factory=OrderedDict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    failing: int = 0
    lost_while_failing: int = 0
    full_told: bool = False

    @property
    def open_count(self) -> int:
        """Notices that wait or are on their way."""
        return len(self.waiting) + (self.current is not None)

    def remember(self, identity: str) -> bool:
        """Whether the notice is new to the route."""
        if identity in self.seen:
            return False
        self.seen[identity] = None
        if len(self.seen) > _REMEMBERED_COUNT:
            self.seen.popitem(last=False)
        return True


class Dispatcher:
    """``submit`` notices from the loop in which it was started; ``close`` at the end.

    ``say`` gets one line when a route begins to fail and one when it delivers again.
    """

    def __init__(
        self, routes: Sequence[Route], say: Callable[[str], None], options: DispatchOptions | None = None
    ) -> None:
        self._options = options or DispatchOptions()
        self._say = say
        self._lanes = [_Lane(route, name) for route, name in zip(routes, _unlike(routes), strict=True)]
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()

    def start(self) -> None:
        """Begin to deliver. Must be called in a running loop."""
        self._tasks = [asyncio.create_task(self._work(lane)) for lane in self._lanes]

    def submit(self, alert: Alert) -> None:
        """Queue one notice for every route. Returns at once."""
        identity = notice_id(alert)
        for lane in self._lanes:
            if not lane.remember(identity):
                continue
            if len(lane.waiting) >= self._options.queue_count:
                lane.waiting.popleft()
                self._lose(lane)
                if not lane.full_told:
                    lane.full_told = True
                    self._say(
                        f"{lane.name}: {self._options.queue_count} notices wait, the oldest are given up for "
                        "newer ones; all other routes go on"
                    )
            lane.waiting.append(alert)
            lane.wake.set()

    @property
    def counts(self) -> dict[str, RouteCounts]:
        """Counts by the route's name."""
        return {lane.name: lane.counts for lane in self._lanes}

    @property
    def waiting_count(self) -> int:
        """Notices that wait or are on their way, over all routes."""
        return sum(lane.open_count for lane in self._lanes)

    async def close(self, deadline_s: float) -> int:
        """Deliver what waits for at most ``deadline_s``, then stop. Returns how many notices were left undelivered."""
        self._closing.set()
        for lane in self._lanes:
            lane.wake.set()
        if self._tasks:
            _, running = await asyncio.wait(self._tasks, timeout=deadline_s)
            for task in running:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        left = 0
        for lane in self._lanes:
            if lane.open_count:
                left += lane.open_count
                self._say(f"{lane.name}: {lane.open_count} notice(s) not delivered within {deadline_s:g} s")
                lane.counts.lost_count += lane.open_count
            with suppress(Exception):
                await asyncio.wait_for(lane.route.close(), _CLOSE_S)
        return left

    async def _work(self, lane: _Lane) -> None:
        while lane.waiting or not self._closing.is_set():
            if lane.waiting:
                lane.current = lane.waiting.popleft()
                await self._deliver(lane, lane.current)
                lane.current = None
            else:
                lane.wake.clear()
                await lane.wake.wait()

    async def _deliver(self, lane: _Lane, alert: Alert) -> None:
        """Try until it is delivered, cannot be, or has been tried for too long."""
        options, began, wait_s = self._options, time.monotonic(), self._options.first_wait_s
        while failure := await self._attempt(lane.route, alert):
            lane.counts.failures_count += 1
            lane.counts.unclear_count += failure.unclear
            self._fails(lane, failure)
            pause_s = max(wait_s * random.uniform(0.5, 1.0), failure.wait_s)
            if not failure.again or time.monotonic() + pause_s - began > options.give_up_s:
                if not failure.unclear:
                    self._lose(lane)
                return
            await self._pause(pause_s)
            wait_s = min(2 * wait_s, options.longest_wait_s)
        lane.counts.sent_count += 1
        self._delivers(lane)

    async def _pause(self, pause_s: float) -> None:
        """Wait; at the end of the run no longer than a moment, for there may be time for one attempt more."""
        if self._closing.is_set():
            await asyncio.sleep(min(pause_s, _LAST_PAUSE_S))
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), pause_s)

    async def _attempt(self, route: Route, alert: Alert) -> RouteError | None:
        try:
            async with asyncio.timeout(self._options.attempt_s):
                await route.send(alert)
        except RouteError as error:
            return error
        except TimeoutError:
            return RouteError(f"no answer within {self._options.attempt_s:g} s", again=False, unclear=True)
        except Exception as error:  # a fault of one route must stop neither the others nor the detector
            return RouteError(f"internal error: {type(error).__name__}", again=False)
        return None

    def _fails(self, lane: _Lane, failure: RouteError) -> None:
        lane.failing += 1
        if lane.failing > 1:
            return
        then = (
            f"it is tried again for up to {self._options.give_up_s:g} s"
            if failure.again
            else "it may have arrived, and is not sent again"
            if failure.unclear
            else "it is given up: put right what the message says"
        )
        self._say(f"{lane.name}: a notice was not delivered: {failure}; {then}; all other routes go on")

    def _lose(self, lane: _Lane) -> None:
        lane.counts.lost_count += 1
        lane.lost_while_failing += 1

    def _delivers(self, lane: _Lane) -> None:
        if lane.failing or lane.full_told:
            lost = f", {lane.lost_while_failing} notice(s) lost" if lane.lost_while_failing else ""
            self._say(f"{lane.name}: delivers again after {lane.failing} failed attempt(s){lost}")
        lane.failing = lane.lost_while_failing = 0
        lane.full_told = False


def _unlike(routes: Sequence[Route]) -> list[str]:
    """Names of routes, those that are there twice with a number."""
    names = [route.name for route in routes]
    return [name if name not in names[:i] else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]
