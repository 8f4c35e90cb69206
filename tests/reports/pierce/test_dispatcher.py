from __future__ import annotations

import asyncio
import time

import pytest
from reports.pierce import made

from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.reports.pierce.dispatcher import Dispatcher, DispatchOptions
from spikeprof.reports.pierce.routes import RouteError, notice_id

QUICK = DispatchOptions(queue_count=3, attempt_s=0.2, first_wait_s=0.01, longest_wait_s=0.02, give_up_s=5)


class FakeRoute:
    """Fails as often as told, then keeps what it is given."""

    def __init__(self, name: str = "fake", failures: list[Exception] | None = None) -> None:
        self.name = name
        self.failures = failures or []
        self.got: list[Alert] = []
        self.attempts = 0
        self.closed = False

    async def send(self, alert: Alert) -> None:
        self.attempts += 1
        if self.failures:
            raise self.failures.pop(0)
        self.got.append(alert)

    async def close(self) -> None:
        self.closed = True


class StuckRoute(FakeRoute):
    async def send(self, alert: Alert) -> None:
        self.attempts += 1
        await asyncio.sleep(60)


def again(text: str = "HTTP 503", wait_s: float = 0.0) -> RouteError:
    return RouteError(text, again=True, wait_s=wait_s)


async def settled(dispatcher: Dispatcher) -> None:
    async with asyncio.timeout(5):
        while dispatcher.waiting_count:
            await asyncio.sleep(0.005)


def numbered(count: int) -> list[Alert]:
    return [made.alert(alert_id=f"a{i}") for i in range(count)]


def test_every_route_gets_every_notice_once_and_a_failing_one_is_tried_again_alone() -> None:
    good, bad = FakeRoute("good"), FakeRoute("bad", [again("HTTP 503"), again("HTTP 502"), again("HTTP 500")])
    said: list[str] = []

    async def run() -> Dispatcher:
        dispatcher = Dispatcher([good, bad], said.append, QUICK)
        dispatcher.start()
        dispatcher.submit(made.alert())
        await settled(dispatcher)
        dispatcher.submit(made.alert())  # the same notice once more, after it was delivered with retries
        assert dispatcher.waiting_count == 0
        assert await dispatcher.close(1) == 0
        return dispatcher

    counts = asyncio.run(run()).counts
    assert (len(good.got), good.attempts) == (1, 1)
    assert (len(bad.got), bad.attempts) == (1, 4)
    assert (counts["bad"].sent_count, counts["bad"].failures_count, counts["bad"].lost_count) == (1, 3, 0)
    assert counts["good"].failures_count == 0
    assert said == [
        "bad: a notice was not delivered: HTTP 503; it is tried again for up to 5 s; all other routes go on",
        "bad: delivers again after 3 failed attempt(s)",
    ]
    assert good.closed
    assert bad.closed


def test_what_cannot_succeed_is_given_up_at_once_and_the_next_notice_goes_out() -> None:
    route = FakeRoute(failures=[RouteError("HTTP 404", again=False)])
    said: list[str] = []

    async def run() -> Dispatcher:
        dispatcher = Dispatcher([route], said.append, QUICK)
        dispatcher.start()
        for alert in numbered(2):
            dispatcher.submit(alert)
        await settled(dispatcher)
        await dispatcher.close(1)
        return dispatcher

    counts = asyncio.run(run()).counts["fake"]
    assert [a.alert_id for a in route.got] == ["a1"]
    assert (counts.sent_count, counts.lost_count) == (1, 1)
    assert "given up" in said[0]
    assert "1 notice(s) lost" in said[1]


def test_an_attempt_without_an_answer_is_unclear_and_not_made_again() -> None:
    route = StuckRoute()
    said: list[str] = []

    async def run() -> Dispatcher:
        dispatcher = Dispatcher([route], said.append, QUICK)
        dispatcher.start()
        dispatcher.submit(made.alert())
        await settled(dispatcher)
        await dispatcher.close(1)
        return dispatcher

    counts = asyncio.run(run()).counts["fake"]
    assert route.attempts == 1
    assert (counts.unclear_count, counts.lost_count, counts.sent_count) == (1, 0, 0)
    assert "may have arrived, and is not sent again" in said[0]


def test_a_full_queue_gives_up_the_oldest_and_says_so_once() -> None:
    route = FakeRoute(failures=[again() for _ in range(1000)])
    said: list[str] = []

    async def run() -> Dispatcher:
        dispatcher = Dispatcher([route], said.append, QUICK)
        dispatcher.start()
        dispatcher.submit(made.alert(alert_id="first"))
        await asyncio.sleep(0.03)  # on its way, and failing
        before = time.monotonic()
        for alert in numbered(6):
            dispatcher.submit(alert)
        assert time.monotonic() - before < 0.05  # never in the detector's way
        assert dispatcher.waiting_count == 4
        route.failures.clear()
        await settled(dispatcher)
        await dispatcher.close(1)
        return dispatcher

    counts = asyncio.run(run()).counts["fake"]
    assert [a.alert_id for a in route.got] == ["first", "a3", "a4", "a5"]
    assert (counts.sent_count, counts.lost_count) == (4, 3)
    assert sum("oldest are given up" in text for text in said) == 1
    assert said[-1].endswith("3 notice(s) lost")


def test_the_end_waits_for_what_can_be_delivered_and_no_longer_than_the_deadline() -> None:
    stuck, slow = StuckRoute("stuck"), FakeRoute("slow", [again(), again()])
    said: list[str] = []
    options = DispatchOptions(attempt_s=30, first_wait_s=20, longest_wait_s=20)

    async def run() -> tuple[int, float]:
        dispatcher = Dispatcher([stuck, slow], said.append, options)
        dispatcher.start()
        dispatcher.submit(made.alert())
        await asyncio.sleep(0.05)  # slow is in a pause of 10 s or more by now
        before = time.monotonic()
        left = await dispatcher.close(1.5)
        return left, time.monotonic() - before

    left, took_s = asyncio.run(run())
    assert left == 1
    assert 1.4 < took_s < 2.5
    assert len(slow.got) == 1
    assert "stuck: 1 notice(s) not delivered within 1.5 s" in said


def test_a_fault_of_one_route_stops_nothing() -> None:
    broken, good = FakeRoute("broken", [ZeroDivisionError("secret in here")]), FakeRoute("good")
    said: list[str] = []

    async def run() -> None:
        dispatcher = Dispatcher([broken, good], said.append, QUICK)
        dispatcher.start()
        dispatcher.submit(made.alert())
        await settled(dispatcher)
        await dispatcher.close(1)

    asyncio.run(run())
    assert len(good.got) == 1
    assert "ZeroDivisionError" in said[0]
    assert "secret" not in said[0]


def test_a_receiver_that_asks_to_wait_is_left_alone_for_so_long() -> None:
    route = FakeRoute(failures=[again("HTTP 429", wait_s=0.3)])

    async def run() -> float:
        dispatcher = Dispatcher([route], lambda text: None, QUICK)
        dispatcher.start()
        before = time.monotonic()
        dispatcher.submit(made.alert())
        await settled(dispatcher)
        await dispatcher.close(1)
        return time.monotonic() - before

    assert asyncio.run(run()) >= 0.3
    assert len(route.got) == 1


def test_routes_of_one_name_are_told_apart() -> None:
    async def run() -> list[str]:
        return list(Dispatcher([FakeRoute(), FakeRoute(), FakeRoute("other")], print, QUICK).counts)

    assert asyncio.run(run()) == ["fake", "fake (2)", "other"]


@pytest.mark.parametrize("change", [{"kind": "recovered"}, {"ts_s": 1.0}, {"alert_id": "b"}, {"severity": "critical"}])
def test_notices_that_differ_have_other_ids(change: dict[str, object]) -> None:
    assert notice_id(made.alert()) == notice_id(made.alert(keys=()))
    assert notice_id(made.alert()) != notice_id(made.alert(**change))
