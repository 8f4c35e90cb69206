"""Who launches each kernel: for a few steps of each kind, every launch with its module, its lines and its operator.

CUPTI calls back at each launch, on the thread that launches, whose Python frames tell the rest (frames.py). That takes
some microseconds a launch, so it is done in windows only: from the first step of a kind on, for as many steps as were
asked for. Where steps are not known, because something is compiled (no hook of ours may be in its way) or because there
are no modules, windows are opened by the clock, and after each compilation. In between, nothing is called back.

What a replayed CUDA graph runs is known from its capture, where CUPTI calls back for each node.
"""

from __future__ import annotations

import ctypes
import sys
from _thread import get_native_id
from os import getpid

from . import kinds, marks
from .captures import Captures
from .cupti import CuptiError
from .events import Clock, RLock, SignalsHeld, get_ident
from .frames import Frames
from .interrupts import is_ours
from .operators import Operators

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from .agent import Agent
    from .graphs import Subscription
    from .kinds import Kind

#: All windows of a process together: about two seconds of the launching threads' time at the most.
LAUNCHES_MAX = 100_000
STEPS_MAX = 128
KINDS_MAX = 64
SECONDS_MAX = 60.0

#: One window of steps. A step with more launches than that, or that takes longer, is attributed in part.
_STEPS_LAUNCHES, _STEPS_SECONDS = 20_000, 10.0

#: One window by the clock.
_CLOCK_LAUNCHES, _CLOCK_SECONDS = 5000, 0.5
_CLOCK_WINDOWS_MAX = 12
_COMPILATIONS_MAX = 256

#: Steps without a new model after which only the known ones are watched, and without a new kind after which none is.
WIDE_STEPS, WATCHED_STEPS = 256, 20_000

#: Nodes of graphs whose lines of code are kept; of the ones beyond it is the module only.
NODES_MAX = 50_000

_BATCH = 2000
_THREAD_BITS = 0xFFFFFFFF


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


class _Window:
    __slots__ = ("by_clock", "launches", "over", "reason", "since", "thread", "until")

    def __init__(self, reason: str, by_clock: bool) -> None:
        self.reason, self.by_clock, self.over = reason, by_clock, False
        self.launches = 0
        self.thread = get_ident()
        self.since = Clock.unix_ns()
        self.until = Clock.monotonic() + (_CLOCK_SECONDS if by_clock else _STEPS_SECONDS)


class Attribution:
    """Opens and closes the windows, and keeps what is seen in them until the agent's thread writes it."""

    def __init__(self, agent: Agent, subscription: Subscription) -> None:
        self._agent, self._subscription = agent, subscription
        self._wanted = agent.options.attribute_steps
        self.frames, self.operators = Frames(), Operators()
        self.captures = Captures(self._capture_began, self._capture_ended)
        self._lock = RLock()
        self._window: _Window | None = None
        self._launches: list[tuple[int, int, int, int, int]] = []
        self._triton: list[tuple[str, int, int, int, Any, Any]] = []
        self._missed = self._nodes = 0
        self._by_kind: dict[Any, int] = {}
        self._steps = self._quiet = self._seen = 0
        self._left = LAUNCHES_MAX
        self._seconds = 0.0
        self._clock_windows = self._compilations = 0
        self._clock_at = self._step_at = 0.0
        self._compiling = self._ended = self._waiting = False
        self._said: set[str] = set()
        self._asked = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._on_main_thread)
        agent.interrupts.watch(self._on_main_thread)

    @property
    def attributing(self) -> bool:
        """Whether launches are called back for now, which takes time."""
        return self._window is not None

    # -- a part of the agent --------------------------------------------------------------------

    def start(self) -> None:
        """Learn where steps begin. Nothing is called back before one does."""
        torch = sys.modules.get("torch")
        if hasattr(torch, "nn"):
            self.frames.know_torch(torch)
            self.captures.put_in()
        if not self._agent.calls.want(self):
            self._say("skipped", "steps are not known: %s" % ("a compiler is used" if torch else "no torch"))
        marks.watch(self)

    def pause(self) -> None:
        """Another profiler comes, or recording ends."""
        self.close()
        self.operators.end()

    def resume(self) -> None:
        """Windows come of themselves."""

    def compiler_came(self) -> None:
        """The agent has taken the hook out of nn.Module; from now on compilations are what tells of something new."""
        self._say("skipped", "steps are not known from here on: a compiler is used")
        self._watch_compilations()

    def finish(self) -> None:
        """Write all that is left and take everything out."""
        self.close()
        self.operators.end()
        self._retire("the program ended")
        self.captures.take_out()
        self.write()

    def forget(self) -> None:
        """In a forked child: nothing of this goes on."""
        self._window, self._ended = None, True
        self._lock = RLock()
        self.captures.take_out()
        self.operators.forget()

    # -- steps ----------------------------------------------------------------------------------

    def step_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See calls.py."""
        try:
            if get_ident() not in self.captures.threads:
                self._step(kinds.of_call(module, args, kwargs))
        except Exception as error:
            self._fault(error)

    def step_ends(self) -> None:
        """See calls.py. What the main thread does after a step belongs to it; other threads may not come back."""
        if self.operators.threads and get_native_id() != getpid() and get_ident() not in self.captures.threads:
            self.operators.end()

    def mark_begins(self, name: str, attributes: dict[str, Any]) -> bool:
        """A step that the program marks; False inside another step."""
        thread = get_ident()
        if not self._agent.calls.enter(thread):
            return False
        try:
            self._step(kinds.of_mark(name, attributes))
        except Exception as error:
            self._fault(error)
        return True

    def mark_ends(self) -> None:
        """The same step's end."""
        self._agent.calls.leave(get_ident())
        self.step_ends()

    def _step(self, kind: Kind) -> None:
        if self._ended:
            return
        self._step_at = Clock.monotonic()
        window = self._window
        done = self._by_kind.get(kind.key, 0)
        if done < self._wanted and self._has_room(done) and not self._compiling and self._agent.state == "traced":
            if window is None or window.by_clock or window.over:
                self._open("steps of %s" % kind.text, by_clock=False)
            if self._window is not None:
                self._by_kind[kind.key] = done + 1
                self._steps += 1
                self._quiet = 0 if not done else self._quiet
                self.operators.begin()
        else:
            if window is not None and not window.by_clock and (window.over or window.thread == get_ident()):
                self.close()
            self.operators.end()
            self._watch_less()

    def _watch_less(self) -> None:
        self._quiet += 1
        if self._quiet == WIDE_STEPS:
            self._agent.calls.narrow(self)
        elif self._quiet >= WATCHED_STEPS:
            self._retire("no new kind of step for %d steps" % WATCHED_STEPS)

    def _has_room(self, done: int = 0) -> bool:
        if self._left <= 0 or self._seconds >= SECONDS_MAX:
            self._retire("%d launches in %.1f s are enough" % (LAUNCHES_MAX - self._left, self._seconds))
            return False
        if not done and (len(self._by_kind) >= KINDS_MAX or self._steps >= STEPS_MAX):
            self._say("skipped", "kinds of steps beyond the first %d" % len(self._by_kind))
            return False
        return self._steps < STEPS_MAX

    # -- windows --------------------------------------------------------------------------------

    def _open(self, reason: str, by_clock: bool) -> bool:
        with SignalsHeld(), self._lock:
            self.close()
            if self._ended or self._agent.state != "traced":
                return False
            self._window = _Window(reason, by_clock)
            try:
                self._subscription.watch_launches(True)
            except CuptiError as error:
                self._window = None
                self._retire("CUPTI does not call back: %s" % error)
            return self._window is not None

    def close(self) -> None:
        """End the window that is open; the operators of other threads than this one end by themselves."""
        with SignalsHeld(), self._lock:
            window, self._window = self._window, None
            if window is None:
                return
            try:
                self._subscription.watch_launches(False)
            except CuptiError:  # a guest has it by now
                pass
            now = Clock.unix_ns()
            self._seconds += (now - window.since) / 1e9
            if window.launches:
                self._agent.spool.event(ev="attribution", what="window", reason=window.reason, t=window.since, end=now)

    def launched(self, data: int, frame: FrameType | None) -> None:
        """CUPTI's callback of a launch, in a window."""
        window = self._window
        call = _Call.from_address(data)
        if window is None or call.site:
            return
        now, thread = Clock.unix_ns(), get_ident()
        if window.over:
            self._missed += 1
            return
        if thread in self.captures.threads:
            return
        place = self.frames.place(frame)
        self.operators.launched(thread, now)
        thread &= _THREAD_BITS
        self._launches.append((call.correlation, place.module, place.stack, now, thread))
        if place.triton is not None:
            kernel, shapes, dtypes = place.triton
            self._triton.append(("triton::" + kernel, now, now + 1, thread, shapes, dtypes))
        self._left -= 1
        window.launches += 1
        window.over = window.launches >= (_CLOCK_LAUNCHES if window.by_clock else _STEPS_LAUNCHES) or self._left <= 0

    def node_created(self, frame: FrameType | None) -> tuple[int, int]:
        """(module, stack) of a node of a graph, at its creation."""
        self._nodes += 1
        self.operators.launched(get_ident(), Clock.unix_ns())
        place = self.frames.place(frame, with_stack=self._nodes <= NODES_MAX)
        return place.module, place.stack

    # -- by the clock ---------------------------------------------------------------------------

    def tick(self) -> None:
        """The agent's thread: end what is over, begin what is due, write."""
        now = Clock.monotonic()
        window = self._window
        if window is not None:
            if window.over or now >= window.until or self._agent.state != "traced":
                self.close()
        elif (
            not self._ended
            and not self._compiling
            and now >= self._clock_at
            and now - self._step_at >= 1.0
            and self._clock_windows < _CLOCK_WINDOWS_MAX
            and self._has_room()
        ):
            self._clock_at = now + 2.0**self._clock_windows
            self._clock_windows += 1
            self._open("no steps known", by_clock=True)
        if self._agent.compiler_used and not self._ended:
            self._watch_compilations()
        window = self._window
        if window.by_clock if window is not None else self.operators.threads:
            self._ask_main_thread()
        self.write()

    def _ask_main_thread(self) -> None:
        if not self._waiting and "torch" in sys.modules:
            self._waiting = ctypes.pythonapi.Py_AddPendingCall(self._asked, None) == 0

    def _on_main_thread(self, _unused: int | None) -> int:
        """Between two steps of the interpreter: begin or end the operators of a window that no step began."""
        try:
            self._waiting = False
            window = self._window
            if get_ident() in self.captures.threads:
                pass
            elif window is None:
                self.operators.end()
            elif window.by_clock and not window.over and not self._compiling:
                self.operators.begin()
        except BaseException as error:
            self._agent.interrupts.owe(error)
        return 0

    # -- compilations and captures --------------------------------------------------------------

    def _watch_compilations(self, on: bool = True) -> None:
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        begins, ends = getattr(handler, "start_callbacks", None), getattr(handler, "end_callbacks", None)
        for calls, mine in ((begins, self._compilation_begins), (ends, self._compilation_ends)):
            if isinstance(calls, list) and (mine in calls) != on:  # torch._dynamo.reset() takes them out
                (calls.append if on else calls.remove)(mine)

    def _compilation_begins(self, *_: object) -> None:
        """What a compiler runs to find out, and its tuning, are no part of the model."""
        try:
            self._compiling = True
            self.close()
            self.operators.end()
        except Exception as error:
            self._fault(error)

    def _compilation_ends(self, *_: object) -> None:
        try:
            self._compiling = False
            self._compilations += 1
            due = not self._ended and self._compilations <= _COMPILATIONS_MAX and self._has_room()
            if due and self._open("something was compiled", by_clock=True) and get_native_id() == getpid():
                self.operators.begin()
        except Exception as error:
            self._fault(error)

    def _capture_began(self) -> None:
        if self._nodes < NODES_MAX:
            self.operators.begin()

    def _capture_ended(self, since: int, now: int) -> None:
        window = self._window
        if window is None or window.thread != get_ident():
            self.operators.end()
        self._agent.spool.event(ev="attribution", what="capture", reason="", t=since, end=now)

    # -- what is kept ---------------------------------------------------------------------------

    def write(self) -> None:
        """Write what was seen since the last time."""
        modules, stacks = self.frames.take()
        self._write("modules", modules)
        self._write("stacks", stacks)
        launches = self._launches[:]
        del self._launches[: len(launches)]
        missed, self._missed = self._missed, 0
        self._write("launches", launches, missed)
        triton = self._triton[:]
        del self._triton[: len(triton)]
        beyond, self.operators.beyond = self.operators.beyond, 0
        self._write("ops", [*self.operators.take(), *triton], beyond)

    def _write(self, what: str, rows: list[Any], dropped: int = 0) -> None:
        for begin in range(0, len(rows) or bool(dropped), _BATCH):
            fields: dict[str, Any] = {"ev": what, what: rows[begin : begin + _BATCH]}
            if what in ("launches", "ops"):
                fields["dropped"] = 0 if begin else dropped
            self._agent.spool.event(**fields)

    def _retire(self, reason: str) -> None:
        """No more windows; captures are followed on."""
        if not self._ended:
            self._ended = True
            self._agent.calls.release(self)
            marks.watch(None)
            self._watch_compilations(False)
            self._say("ended", reason)

    def _say(self, what: str, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            now = Clock.unix_ns()
            self._agent.spool.event(ev="attribution", what=what, reason=reason, t=now, end=now)

    def _fault(self, error: Exception) -> None:
        if not is_ours(error):  # of a signal handler of the program's
            raise error
        self._retire("fault: %s: %s" % (type(error).__name__, error))
        self.close()
        self.operators.end()
