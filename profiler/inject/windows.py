"""Windows in which CUPTI calls back at each launch, and what is seen in them, until the agent's thread writes it.

A callback runs on the thread that launches, whose Python frames tell module and lines (frames.py). It takes some
microseconds: so windows are short, and what all of them together may take is bounded.
"""

from __future__ import annotations

import ctypes

from .cupti import SETTLING_SECONDS, CuptiError
from .events import Clock, RLock, SignalsHeld, allocate_lock, get_ident, is_alone, pause
from .frames import Frames, Place
from .interrupts import is_ours
from .operators import THREAD_BITS, Operators

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from .agent import Agent
    from .graphs import Subscription

#: All windows of a process together: about a second of the launching threads' time.
LAUNCHES_MAX, SECONDS_MAX = 100_000, 60.0

#: Nodes of graphs whose lines of code are kept; of the ones beyond it is the module only.
NODES_MAX = 50_000

#: How long to wait for callbacks in other threads to return.
_PATIENCE_SECONDS = 0.1

#: And for another thread to write what it has taken, at the program's end.
_WRITING_SECONDS = 2.0

#: Rows of one line of the event file.
_BATCH = 2000


class _Call(ctypes.Structure):
    """The head of CUpti_CallbackData."""

    _fields_ = [
        ("site", ctypes.c_int),  # 0 = entering the call
        ("function", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("symbol", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("context_uid", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("correlation", ctypes.c_uint32),
    ]


class Window:
    """One window, of so many launches and so long at the most."""

    __slots__ = ("by_clock", "end", "launches", "left", "over", "reason", "since", "until")

    def __init__(self, reason: str, launches: int, seconds: float, by_clock: bool) -> None:
        self.reason, self.by_clock, self.over = reason, by_clock, False
        self.launches, self.left, self.end = 0, launches, 0
        self.since = Clock.unix_ns()
        self.until = Clock.monotonic() + seconds


class Windows:
    """At most one is open at a time, for all threads."""

    def __init__(self, agent: Agent, subscription: Subscription) -> None:
        self._agent, self._subscription = agent, subscription
        self.frames, self.operators = Frames(), Operators()
        self.current: Window | None = None
        self.count = 0
        self.left = LAUNCHES_MAX
        self.seconds_left = SECONDS_MAX
        self.capturing: dict[int, int] = {}  # threads that capture a graph: their launches are nodes
        self.nodes = 0
        self.broken: Exception | None = None
        self._missed = 0
        self._closed_at = -SETTLING_SECONDS
        self._inside: dict[int, bool] = {}  # threads in a callback
        self._lock = RLock()
        self._writing = allocate_lock()
        self._launches: list[tuple[int, int, int, int, int]] = []
        self._triton: list[tuple[str, int, int, int, Any, Any]] = []

    @property
    def spent(self) -> str:
        """Why no window may be opened any more; empty while one may."""
        if self.left > 0 and self.seconds_left > 0:
            return ""
        return "%d launches in %.1f s are enough" % (LAUNCHES_MAX - self.left, SECONDS_MAX - self.seconds_left)

    @property
    def part_left(self) -> float:
        """Of what all windows together may take."""
        return min(self.left / LAUNCHES_MAX, self.seconds_left / SECONDS_MAX)

    def open(self, reason: str, launches: int, seconds: float, by_clock: bool) -> bool:
        """Have launches called back. False when nothing is recorded now. Raises CuptiError where CUPTI refuses."""
        with SignalsHeld(), self._lock:
            self.close()
            if self._agent.state != "traced" or self._agent.switching:
                return False
            thread, switched_at = self._agent.switched
            settled = Clock.monotonic() >= switched_at + SETTLING_SECONDS
            if not settled and not (thread == get_ident() and is_alone(thread)):
                return False
            self._subscription.watch_launches(True)
            self.current = Window(reason, launches, seconds, by_clock)
            self.count += 1
            return True

    def close(self) -> None:
        """End the window that is open."""
        with SignalsHeld(), self._lock:
            window, self.current = self.current, None
            if window is None:
                return
            try:
                self._subscription.watch_launches(False)
            except CuptiError:  # a guest has CUPTI by now
                pass
            self._closed_at = Clock.monotonic()
            now = Clock.unix_ns()
            self.seconds_left -= (now - window.since) / 1e9
            if window.launches:
                self.event("window", window.reason, window.since, window.end or now)

    def settle(self) -> None:
        """Let no other thread be in a launch that calls back, when recording is switched next."""
        settled, own = self._closed_at + SETTLING_SECONDS, get_ident()
        while Clock.monotonic() < settled or (
            Clock.monotonic() < settled + _PATIENCE_SECONDS and any(thread != own for thread in list(self._inside))
        ):
            pause(0.001)

    def forget(self) -> None:
        """In a forked child: nothing is called back there."""
        self.current, self._lock = None, RLock()
        self._writing = allocate_lock()
        self._inside.clear()
        self.operators.forget()

    def launched(self, data: int, frame: FrameType | None) -> None:
        """CUPTI's callback."""
        call = _Call.from_address(data)
        window = self.current
        if call.site or window is None:
            return
        if window.over:
            self._missed += 1
            return
        thread = get_ident()
        if thread in self.capturing:
            return
        self._inside[thread] = True
        try:
            self._note(window, call.correlation, thread, frame)
        except Exception as error:
            if is_ours(error):  # not of the kind that happens once
                self.broken, window.over = error, True
            raise
        finally:
            self._inside.pop(thread, None)

    def _note(self, window: Window, correlation: int, thread: int, frame: FrameType | None) -> None:
        now = Clock.unix_ns()
        place = self.frames.place(frame)
        self.operators.launched(thread, now)
        self._launches.append((correlation, place.module, place.stack, now, thread & THREAD_BITS))
        self._note_triton(place, now, thread)
        self.left -= 1
        window.left -= 1
        window.launches += 1
        if window.left <= 0 or self.left <= 0:
            window.over, window.end = True, now

    def _note_triton(self, place: Place, at: int, thread: int) -> None:
        """What Triton launches from Python, which torch's profiler does not see, is an operator of one moment."""
        if place.triton is not None:
            kernel, shapes, dtypes = place.triton
            self._triton.append(("triton::" + kernel, at, at + 1, thread & THREAD_BITS, shapes, dtypes))

    def node_created(self, frame: FrameType | None, at: int) -> tuple[int, int]:
        """CUPTI's callback of a node, at that time: its (module, stack)."""
        if self.broken is not None:
            return -1, -1
        self.nodes += 1
        thread = get_ident()
        self.operators.launched(thread, at)
        try:
            place = self.frames.place(frame, with_stack=self.nodes <= NODES_MAX)
            self._note_triton(place, at, thread)
        except Exception as error:
            if is_ours(error):
                self.broken = error
            raise
        return place.module, place.stack

    def event(self, what: str, reason: str, since: int, until: int) -> None:
        """Tell what was attributed when, or why not."""
        self._agent.spool.event(ev="attribution", what=what, reason=reason, t=since, end=until)

    def write(self) -> None:
        """Write what was seen since the last time; rows that another thread has taken are written when this returns."""
        if not self._writing.acquire(timeout=_WRITING_SECONDS):
            return
        try:
            self._write_all()
        finally:
            self._writing.release()

    def _write_all(self) -> None:
        modules, stacks = self.frames.take()
        self._write("modules", modules)
        self._write("stacks", stacks)
        missed, self._missed = self._missed, 0
        self._write("launches", _taken(self._launches), missed)
        triton = _taken(self._triton)
        operators = self.operators.take()
        beyond, self.operators.beyond = self.operators.beyond, 0
        self._write("ops", [*operators, *triton], beyond)

    def _write(self, what: str, rows: list[Any], dropped: int = 0) -> None:
        for begin in range(0, len(rows) or bool(dropped), _BATCH):
            fields: dict[str, Any] = {"ev": what, what: rows[begin : begin + _BATCH]}
            if what in ("launches", "ops"):
                fields["dropped"] = 0 if begin else dropped
            self._agent.spool.event(**fields)


def _taken(rows: list[Any]) -> list[Any]:
    """All rows, taken out; what other threads append meanwhile stays."""
    taken = rows[:]
    del rows[: len(taken)]
    return taken
