"""Operators of torch with their shapes, for a while: by torch's first profiler, which leaves Kineto and CUPTI alone.

A session belongs to the thread that began it, and only that thread can end it. The profiler's clock is compared with
ours where a session begins, by marks set between two looks at ours. Sessions are turned into rows by the agent's
thread, later: only those that launched something are kept. The profiler tells no dtypes.
"""

from __future__ import annotations

import sys
from bisect import bisect_left

from .events import Clock, get_ident
from .interrupts import is_ours

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any, Optional

    Row = tuple[str, int, int, int, list[Any], list[str]]  # name, start, end, thread, shapes, dtypes

#: Operators written in a process's life; the rest are counted.
OPERATORS_MAX = 200_000

#: A session is begun anew after this long: a program may call many operators that launch nothing, and all are kept.
RENEW_SECONDS = 1.0

_MARK = "spikeprof clock"
_MARKS = 5

#: What the two clocks may be apart.
_APART_NS = 2000

#: CUPTI's thread ids are the low 32 bits of pthread_self.
THREAD_BITS = 0xFFFFFFFF


class Operators:
    """Sessions of this process. Its methods raise nothing but what a signal handler of the program's raises in them."""

    def __init__(self) -> None:
        self.refused = ""  # why there are no operators
        self.beyond = 0
        self._written = 0
        self._api: Optional[_Legacy] = None
        self._running: dict[int, _Session] = {}  # by thread
        self._ended: list[tuple[_Session, Any]] = []

    @property
    def full(self) -> bool:
        """Whether no more are wanted."""
        return self._written >= OPERATORS_MAX

    @property
    def threads(self) -> list[int]:
        """Threads that have a session."""
        return list(self._running)

    def begin(self) -> bool:
        """Begin a session in this thread; False when there is one, when another profiler runs here, or cannot be."""
        thread = get_ident()
        if thread in self._running or self.full or self.refused:
            return False
        try:
            self._api = self._api or _Legacy(sys.modules["torch"])
            if self._api.enabled():
                return False
            # Known before it begins: a handler that raises leaves none behind that nobody would end.
            session = self._running[thread] = _Session(thread & THREAD_BITS)
            self._api.enable()
            session.marks += [self._api.mark() for _ in range(_MARKS)]
        except Exception as error:  # another torch than those known
            if not is_ours(error):
                raise
            self.refused = "%s: %s" % (type(error).__name__, error)
            self._running.pop(thread, None)
            return False
        return True

    def end(self) -> None:
        """End this thread's session, if it has one."""
        session = self._running.get(get_ident())
        if session is not None and self._api is not None:
            try:
                if self._api.enabled():
                    events = self._api.disable()
                    if session.launches:
                        self._ended.append((session, events))
            except Exception as error:
                if not is_ours(error):  # it may still run: the next time ends it
                    raise
                self.refused = "%s: %s" % (type(error).__name__, error)
            self._running.pop(get_ident(), None)

    @property
    def stale(self) -> bool:
        """Whether a session should be begun anew."""
        limit = Clock.monotonic() - RENEW_SECONDS
        return any(session.since < limit for session in list(self._running.values()))

    def renew(self) -> None:
        """Begin this thread's session anew if it is old; operators that are under way are lost."""
        session = self._running.get(get_ident())
        if session is not None and session.since < Clock.monotonic() - RENEW_SECONDS:
            self.end()
            self.begin()

    def launched(self, thread: int, at: int) -> None:
        """Something was launched by this thread, or put into a graph."""
        session = self._running.get(thread)
        if session is not None:
            session.launches.append(at)

    def forget(self) -> None:
        """In a forked child: a session of the thread that forked goes on there, and ends; the others are gone."""
        self.end()
        self._running.clear()
        self._ended.clear()

    def take(self) -> list[Row]:
        """Rows of the sessions that have ended since the last time."""
        rows: list[Row] = []
        while self._ended:
            session, lists = self._ended.pop(0)
            for events in lists:
                if events and events[0].name() == "__start_profile":  # other threads' events have no clock of ours
                    rows += _rows(events, session)
        room = max(OPERATORS_MAX - self._written, 0)
        self.beyond += max(len(rows) - room, 0)
        del rows[room:]
        self._written += len(rows)
        return rows


class _Session:
    __slots__ = ("launches", "marks", "since", "thread")

    def __init__(self, thread: int) -> None:
        self.thread, self.since = thread, Clock.monotonic()
        self.marks: list[tuple[int, int]] = []  # our clock before and after each
        self.launches: list[int] = []  # our clock, in order


class _Legacy:
    """torch's functions, found once."""

    def __init__(self, torch: Any) -> None:
        from_c, types = torch._C._autograd, torch._C._profiler
        self.enabled = from_c._profiler_enabled
        self.disable = from_c._disable_profiler_legacy
        self._enable = from_c._enable_profiler_legacy
        self._range = types._RecordFunctionFast
        experimental = types._ExperimentalConfig()
        shapes = True
        self._config = types.ProfilerConfig(types.ProfilerState.CPU, shapes, False, False, False, False, experimental)

    def enable(self) -> None:
        """Begin in this thread."""
        self._enable(self._config)

    def mark(self) -> tuple[int, int]:
        """Set a mark; our clock before and after it."""
        before = Clock.unix_ns()
        with self._range(_MARK):
            pass
        return before, Clock.unix_ns()


def _rows(events: list[Any], session: _Session) -> list[Row]:
    first = events[0]
    offset, tightest = 0, 1 << 62
    marks = iter(session.marks)
    found: list[tuple[Any, float, float]] = []
    opened: list[tuple[Any, float]] = []
    for event in events:
        kind = event.kind()
        if kind == "push":
            opened.append((event, first.cpu_elapsed_us(event)))
        elif kind == "pop" and opened:
            begun, start = opened.pop()
            end = first.cpu_elapsed_us(event)
            if begun.name() != _MARK:
                found.append((begun, start, end))
                continue
            before, after = next(marks, (0, 1 << 62))
            if after - before < tightest:
                tightest = after - before
                offset = (before + after) // 2 - int((start + end) * 500)
    last = first.cpu_elapsed_us(events[-1])
    found += [(begun, start, last) for begun, start in opened]
    rows: list[Row] = []
    for begun, start_us, end_us in found:
        start, end = offset + int(start_us * 1000), offset + int(end_us * 1000)
        at = bisect_left(session.launches, start - _APART_NS)
        if at < len(session.launches) and session.launches[at] < end + _APART_NS:
            shapes = begun.shapes()
            rows.append((begun.name(), start, end, session.thread, shapes if any(shapes) else [], []))
    return rows
