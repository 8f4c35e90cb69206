"""One run of the detector with everything around it: notices out, table, metrics, baselines, page, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from spikeprof.cli.pierce_known import KnownSource
from spikeprof.cli.pierce_light import give_memory_back, keep_small
from spikeprof.cli.pierce_memory import BaselineKeeper
from spikeprof.cli.pierce_options import SEVERITIES, Watching, detector_options
from spikeprof.cli.pierce_routes import make_routes, secret

if TYPE_CHECKING:
    from rich.console import Console

    from spikeprof.analyzers.cache_pierce.guard import Guard
    from spikeprof.analyzers.cache_pierce.model import Alert, Snapshot
    from spikeprof.profiler.lookups import Lookups
    from spikeprof.reports.pierce.run import PierceRun

TICK_S = 0.5  # how often event time advances where no look-up tells, and the table is drawn
SAVE_S = 30.0  # how often baselines are kept


def say(text: str) -> None:
    """One line on standard error, where somebody reads it: watching goes on when nobody does."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"spikeprof: {text}\n")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a verb asks of a run. ``source`` says what is watched, in the heading and as the owner of baselines.

    ``live``: there is a table to look at, and event time goes on while nothing comes: with the clock (``is_now``, the
    source stamps look-ups itself) or from the last look-up on. ``read`` counts what came from the source.
    """

    source: str
    watching: Watching
    known: KnownSource | None = None
    guard: Guard | None = None
    live: bool = True
    is_now: bool = True
    quiet: bool = False  # nothing on standard output: the answer is JSON
    read: Callable[[], Mapping[str, int]] = dict
    cannot_know: Sequence[str] = ()  # what this source hides from the detector


class Session:
    """Use as an asynchronous context; ``feed`` it; ask for ``exit_code`` and ``answer`` after it.

    The detector lives in a thread of its own: whoever serves connections in this loop is not held up.
    """

    def __init__(self, plan: Plan, console: Console) -> None:
        from spikeprof.analyzers.cache_pierce.detector import Detector
        from spikeprof.reports.pierce.dispatcher import Dispatcher
        from spikeprof.reports.pierce.history import History
        from spikeprof.reports.pierce.live import TerminalRoute
        from spikeprof.reports.pierce.metrics import PierceMetrics
        from spikeprof.reports.pierce.redact import Redactor

        if plan.live:
            keep_small()
        showing, routing = plan.watching.showing, plan.watching.routing
        self._plan = plan
        self._redactor: Redactor | None = None
        if showing.redact or showing.redact_secret_env:
            name = showing.redact_secret_env
            self._redactor = Redactor(secret(name, "--redact-secret-env").encode() if name else b"")
        self.problems: list[str] = []
        self._keeper = BaselineKeeper(plan.watching.memory, plan.source, self._problem)
        options = detector_options(plan.watching.thresholds.settings)
        self._detector = Detector(options, baselines=self._keeper.load())
        heading = f"cache_pierce_detector: {plan.source}"
        self._view = TerminalRoute(console, heading, table=plan.live and not plan.quiet, known_by=_known_by(plan))
        routes = make_routes(routing, say)
        prints_itself = plan.quiet or not plan.live
        self._dispatcher = Dispatcher(routes if prints_itself else [self._view, *routes], say)
        self._metrics = PierceMetrics()
        self._history = History()
        self._fired: Counter[str] = Counter()  # by severity; the history is bounded
        self._thread = ThreadPoolExecutor(1, "detector")
        self._ticking: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._saved_s = self._told_s = time.monotonic()
        self._event_s: float | None = None
        self._building: asyncio.Task[None] | None = None
        self.run: PierceRun | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        plan = self._plan
        if plan.known is not None and plan.known.is_asked:
            await asyncio.to_thread(plan.known.build)
            self._use_known()
        if plan.watching.routing.metrics_port is not None:
            port = self._metrics.serve(plan.watching.routing.metrics_port, plan.watching.routing.metrics_host)
            say(f"metrics at http://{plan.watching.routing.metrics_host}:{port}/metrics")
        self._dispatcher.start()
        for text in plan.cannot_know:
            say(f"note: {text}")
        self._view.__enter__()
        if plan.live:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._stop)
            self._ticking = loop.create_task(self._tick())
            self._ticking.add_done_callback(lambda task: self.stop())  # it ends by a fault alone, or with the session
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure: BaseException | None = None
        if self._ticking is not None:
            self._ticking.cancel()
            (failure,) = await asyncio.gather(self._ticking, return_exceptions=True)
        if self._building is not None:
            self._building.cancel()
        try:
            if error is None:
                self._take(await self._ask(self._detector.finish))
            snapshot = await self._show()
            await self._dispatcher.close(self._plan.watching.routing.flush_s)
        finally:
            self._view.__exit__(kind, error, trace)
            self._metrics.close()
        await self._save()
        self._thread.shutdown()
        self._close(snapshot)
        if isinstance(failure, Exception) and error is None:
            raise failure

    def _stop(self) -> None:
        """End in good order; a second signal ends at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        self.stop()

    def stop(self) -> None:
        """Ask for the end."""
        self._stopped.set()

    async def until_stopped(self, seconds: float = 0.0) -> None:
        """Wait for Ctrl-C or SIGTERM, for at most so many seconds where that is not 0."""
        try:
            await asyncio.wait_for(self._stopped.wait(), seconds or None)
        except TimeoutError:
            return

    @property
    def step_s(self) -> float:
        """The resolution that the page has by now, in seconds of event time."""
        return self._history.step_s

    @property
    def is_stopped(self) -> bool:
        """Whether the user asked for the end."""
        return self._stopped.is_set()

    # -- look-ups in, notices out ------------------------------------------------------------------------------------

    async def feed(self, lookups: Lookups) -> None:
        """Take look-ups in."""
        if self._plan.known is not None:
            self._plan.known.saw(lookups)
            self._use_known()
        self._take(await self._ask(self._detector.feed, lookups))
        self._told_s, self._event_s = time.monotonic(), None

    async def feed_counts(self, *columns: Any) -> None:
        """Take counts in, as ``Detector.feed_counts``."""
        self._take(await self._ask(self._detector.feed_counts, *columns))

    async def show(self) -> None:
        """Look at how things stand now: for sources whose time is not that of the clock."""
        await self._show()

    async def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, question, *arguments)

    def _take(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            shown = self._redactor.alert(alert) if self._redactor else alert
            self._metrics.count(shown)
            self._history.note(shown)
            self._fired[alert.severity] += alert.kind != "recovered"
            if not (self._plan.live or self._plan.quiet):
                self._view.show(shown)
            self._dispatcher.submit(shown)

    async def _show(self) -> Snapshot:
        snapshot: Snapshot = await self._ask(self._detector.snapshot)
        if self._event_s is None:
            self._event_s = snapshot.ts_s
        if self._plan.known is not None and self._plan.known.problem:
            self._problem(self._plan.known.problem)
        guard = self._plan.guard
        if guard is not None:
            # not for one hot key: what is refused counts as missed, so that such an alert would keep itself alive
            held = frozenset(alert.pattern for alert in snapshot.active if alert.rule != "hot-missing-key")
            guard.watch(held)
        shown = self._redactor.snapshot(snapshot) if self._redactor else snapshot
        read = self._plan.read()
        if read.get("receiver_errors"):
            self._problem("some look-ups were not judged: the detector failed on them (please report it)")
        self._history.add(shown)
        self._metrics.update(shown, self._dispatcher.counts, guard.counts if guard else None, read)
        self._view.update(shown, [f"{name}: {count:,}" for name, count in read.items() if count])
        return shown

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._advance()
            await self._show()
            await self._ask(give_memory_back)
            if time.monotonic() - self._saved_s >= SAVE_S:
                await self._save()
            known = self._plan.known
            if known is not None and known.is_due() and (self._building is None or self._building.done()):
                self._building = asyncio.create_task(self._rebuild(known))

    async def _advance(self) -> None:
        """Let event time go on."""
        now_s, elapsed_s = time.time(), time.monotonic() - self._told_s
        if not self._plan.is_now:
            if self._event_s is None or elapsed_s < TICK_S:  # look-ups tell the time themselves
                return
            now_s = self._event_s + elapsed_s
        self._take(await self._ask(self._detector.advance, now_s))

    # -- known keys and baselines ------------------------------------------------------------------------------------

    def _use_known(self) -> None:
        known = self._plan.known
        if known is not None and known.current is not self._detector.known:
            self._detector.known = known.current
            if self._plan.guard is not None:
                self._plan.guard.known = known.current

    async def _rebuild(self, known: KnownSource) -> None:
        from spikeprof.profiler.errors import SpikeprofError

        try:
            await asyncio.to_thread(known.build)
        except SpikeprofError as error:
            self._problem(f"known keys were not built anew, the filter before stays in use: {error}")
        self._use_known()

    async def _save(self) -> None:
        self._saved_s = time.monotonic()
        rows = await self._ask(self._detector.baseline_rows)
        await asyncio.to_thread(self._keeper.save, rows)

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
            say(text)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _close(self, snapshot: Snapshot) -> None:
        from spikeprof.reports.pierce.run import PierceRun

        self.run = PierceRun(
            source=self._plan.source,
            history=self._history,
            snapshot=snapshot,
            options=self._detector.options,
            read=self._plan.read(),
            routes=self._dispatcher.counts,
            guard=self._plan.guard.counts if self._plan.guard else None,
            problems=self.problems,
            notes=self._plan.cannot_know,
            redacted=self._redactor is not None,
            known_by=_known_by(self._plan),
        )
        if self._plan.watching.showing.html is not None:
            from spikeprof.reports.pierce.html import write_html

            write_html(self.run, self._plan.watching.showing.html)
            say(f"the page is {self._plan.watching.showing.html}")

    def print_closing(self) -> None:
        """The last lines of a run that ended by itself, below the notices that were printed already."""
        from spikeprof.reports.pierce import texts

        for line in texts.closing(self.run) if self.run else ():
            sys.stdout.write(f"{line}\n")

    @property
    def exit_code(self) -> int:
        """1 where ``--fail-on`` asks for it, else 0."""
        fail_on = self._plan.watching.showing.fail_on
        if fail_on is None:
            return 0
        failing = SEVERITIES[SEVERITIES.index(fail_on) :]
        found = sum(self._fired[severity] for severity in failing)
        if found:
            say(f"--fail-on {fail_on.value}: {found} alert(s) of this severity or above")
        return 1 if found else 0


def _known_by(plan: Plan) -> str:
    """Options that would tell which keys exist; empty for sources without such keys."""
    return "--known FILE or --known-learn S" if plan.known is not None else ""
