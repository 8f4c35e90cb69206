"""Who launches each kernel: when to look, so that each kind of step is seen and the program hardly notices.

Looked at are the first steps of each kind (kinds.py), as many as were asked for, and what runs up to the step that
follows; then one whenever there have been twice as many as at the last look, as kernels change while contexts grow.
Where steps are not known, because something is compiled and no hook of ours may be in its way, or because there are no
modules, the clock opens short windows, ever more rarely, and so does each compilation that has ended.

What a replayed CUDA graph runs is known from its capture, where CUPTI calls back for each node: no window is needed.
"""

from __future__ import annotations

import ctypes
import sys
from _thread import get_native_id
from os import getpid

from . import kinds, marks
from .captures import Captures
from .cupti import SETTLING_SECONDS, CuptiError
from .events import Clock, get_ident
from .frames import STACKS_MAX
from .interrupts import is_ours
from .modules import MODULES_MAX
from .windows import NODES_MAX, Windows

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent
    from .graphs import Subscription
    from .kinds import Kind

#: Kinds of steps, and first steps of all kinds together.
KINDS_MAX, STEPS_MAX = 64, 192

#: A kind that is known is looked at again when there have been so many times as many of its steps, as long as this part
#: of what all windows may take is left (the rest is for new kinds), and so many seconds after the same thread switched
#: recording: where it goes to and fro, it would have to wait for the window's end to settle, next time.
_AGAIN, _AGAIN_LEFT, _AGAIN_SECONDS = 2, 0.5, 1.0

#: Launches and seconds of a window of steps (a step that takes more is attributed in part), and of one by the clock.
_STEPS_WINDOW, _CLOCK_WINDOW = (20_000, 10.0), (5000, 0.5)

#: The clock opens a window after 1, 2, 4, 8 ... seconds, this many times.
_CLOCK_WINDOWS_MAX, _COMPILATIONS_MAX = 12, 256

#: Recorded steps without a new kind after which only known models are watched, and after which nothing is any more.
WIDE_STEPS, WATCHED_STEPS = 256, 20_000


class _Seen:
    """Steps of one kind: all, those that were looked at, and at how many the next look is due, once enough were."""

    __slots__ = ("all", "due", "looked_at")

    def __init__(self) -> None:
        self.all = self.looked_at = self.due = 0


class Attribution:
    """A part of the agent. What it hears of steps comes from calls.py and marks.py."""

    def __init__(self, agent: Agent, subscription: Subscription) -> None:
        self._agent = agent
        self._wanted = agent.options.attribute_steps
        self.windows = Windows(agent, subscription)
        self._operators = self.windows.operators
        self._captures = Captures(self._capture_began, self._capture_ended)
        self.windows.capturing = self._captures.threads
        self._by_kind: dict[Any, _Seen] = {}  # of which any was looked at
        self._looked_at: set[int] = set()  # threads in such a step, or after it
        self._steps = self._quiet = 0
        self._clock_windows = self._compilations = 0
        self._clock_at = self._step_at = 0.0
        self._knows_torch = self._compiling = self._ended = self._waiting = False
        self._said: set[str] = set()
        self._asked = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._on_main_thread)
        agent.interrupts.watch(self._on_main_thread)

    # -- a part of the agent --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen; nothing is called back before a step begins or the clock opens a window."""
        marks.watch(self)
        window = self._agent.options.window
        if window and window[0] <= SETTLING_SECONDS:  # see Windows.open
            self._say("skipped", "no launches are looked at in parts of --window of %g s or less" % SETTLING_SECONDS)
        self.torch_came()

    def torch_came(self) -> None:
        """Learn where steps begin, if this is a program with torch."""
        torch = sys.modules.get("torch")
        if self._knows_torch or not hasattr(torch, "nn"):
            return
        self._knows_torch = True
        try:
            self.windows.frames.know_torch(torch)
            self._captures.put_in()
            if not self._agent.calls.want(self):
                self._say("skipped", "calls of models are not followed: a compiler is used")
        except Exception as error:
            self._fault(error)

    def pause(self) -> None:
        """Another profiler comes, or recording ends."""
        self.windows.close()
        self._operators.end()

    def resume(self) -> None:
        """Windows come of themselves."""

    def compiler_came(self) -> None:
        """The agent has taken the hook out of nn.Module; compilations tell of something new from now on."""
        if not self._ended:
            self._say("skipped", "calls of models are not followed any more: a compiler is used")
            self._watch_compilations(True)

    def finish(self) -> None:
        """Write all that is left and take everything out."""
        self.pause()
        self._retire("the program ended")
        self._captures.take_out()
        self._say_what_is_not_known()
        self.windows.write()

    def forget(self) -> None:
        """In a forked child: nothing of this goes on."""
        self._ended = True
        self._captures.take_out()
        self._watch_compilations(False)
        self.windows.forget()

    # -- steps ----------------------------------------------------------------------------------

    def step_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost call of a module."""
        try:
            if get_ident() not in self.windows.capturing:
                self._step(kinds.of_call(module, args, kwargs))
        except Exception as error:
            self._fault(error)

    def step_ends(self) -> None:
        """Its end. What the main thread does up to its next step is looked at, too; other threads may not come back."""
        thread = get_ident()
        if thread in self._looked_at and thread not in self.windows.capturing and not _is_main_thread():
            self._looked_at.discard(thread)
            self._operators.end()

    def mark_begins(self, name: str, attributes: dict[str, Any]) -> bool:
        """A step that the program marks; False inside another step."""
        if not self._agent.calls.enter(get_ident()):
            return False
        try:
            self._step(kinds.of_mark(name, attributes))
        except Exception as error:
            self._fault(error)
        return True

    def mark_ends(self) -> None:
        """Its end."""
        self._agent.calls.leave(get_ident())
        self.step_ends()

    def _step(self, kind: Kind) -> None:
        if self._ended:
            return
        self._step_at = Clock.monotonic()
        window = self.windows.current
        seen = self._by_kind.get(kind.key) or _Seen()
        seen.all += 1
        if self._is_wanted(seen) and self._may_look(seen):
            if window is None or window.by_clock or window.over:
                self._looked_at.clear()
                self._open("steps of %s" % kind.text, by_clock=False)
            window = self.windows.current
            if window is not None and not window.by_clock:
                self._by_kind[kind.key] = seen
                self._steps += seen.looked_at < self._wanted
                self._quiet = self._quiet if seen.looked_at else 0
                seen.looked_at += 1
                seen.due = _AGAIN * seen.all
                self._looked_at.add(get_ident())
                self._operators.begin()
                return
        self._looked_at.discard(get_ident())
        if window is not None and not window.by_clock and (window.over or not self._looked_at):
            self.windows.close()
        if window is None or not window.by_clock:
            self._operators.end()
        if self._agent.state != "traced":
            return
        self._quiet += 1
        if self._quiet >= WATCHED_STEPS or (self._quiet == WIDE_STEPS and not self._agent.calls.narrow(self)):
            self._retire("no new kind of step for %d steps" % self._quiet)

    def _is_wanted(self, seen: _Seen) -> bool:
        """Whether a step is to be looked at, if it may be: the first ones, then ever more rarely."""
        if seen.looked_at < self._wanted:
            return True
        if seen.all < seen.due or self.windows.part_left < _AGAIN_LEFT:
            return False
        thread, switched_at = self._agent.switched
        return thread != get_ident() or Clock.monotonic() >= switched_at + _AGAIN_SECONDS

    def _may_look(self, seen: _Seen | None = None) -> bool:
        """Whether a window may be opened now, for a kind of steps or by the clock."""
        if self._ended or self._compiling or self._agent.state != "traced":
            return False
        if self.windows.spent:
            self._retire(self.windows.spent)
        elif seen is None or seen.looked_at >= self._wanted:
            return True
        elif not seen.looked_at and len(self._by_kind) >= KINDS_MAX:
            self._say("skipped", "kinds of steps beyond the first %d" % len(self._by_kind))
        elif self._steps >= STEPS_MAX:
            self._say("skipped", "first steps beyond %d of all kinds together" % self._steps)
        else:
            return True
        return False

    def _open(self, reason: str, by_clock: bool) -> bool:
        try:
            return self.windows.open(reason, *(_CLOCK_WINDOW if by_clock else _STEPS_WINDOW), by_clock)
        except CuptiError as error:
            self._retire("CUPTI does not call back: %s" % error)
            return False

    # -- by the clock ---------------------------------------------------------------------------

    def tick(self) -> None:
        """The agent's thread: end what is over, begin what is due, write."""
        now = Clock.monotonic()
        window = self.windows.current
        if window is not None and (window.over or now >= window.until):
            self.windows.close()
        if self.windows.broken is not None:
            self._retire("fault: %r" % self.windows.broken)
        elif window is None and self._is_due(now) and self._may_look():
            self._clock_at = now + 2.0**self._clock_windows
            self._clock_windows += 1
            self._open("by the clock: no steps are known", by_clock=True)
        self._say_what_is_not_known()
        if self._agent.compiler_used and not self._ended:
            self._watch_compilations(True)
        window = self.windows.current
        if self._operators.stale or (window.by_clock if window is not None else self._operators.threads):
            self._ask_main_thread()
        self.windows.write()

    def _is_due(self, now: float) -> bool:
        return self._clock_windows < _CLOCK_WINDOWS_MAX and now >= self._clock_at and now >= self._step_at + 1

    def _ask_main_thread(self) -> None:
        if not self._waiting and "torch" in sys.modules:
            self._waiting = ctypes.pythonapi.Py_AddPendingCall(self._asked, None) == 0

    def _on_main_thread(self, _unused: int | None) -> int:
        """Between two steps of the interpreter: begin, renew or end the operators of this thread."""
        try:
            self._waiting = False
            window = self.windows.current
            if get_ident() in self.windows.capturing:
                pass
            elif window is None:
                self._operators.end()
            elif window.by_clock and not window.over and not self._compiling:
                self._operators.begin()
            self._operators.renew()
        except BaseException as error:
            self._agent.interrupts.owe(error)
        return 0

    # -- compilations and captures --------------------------------------------------------------

    def _watch_compilations(self, on: bool) -> None:
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        for name, mine in (("start_callbacks", self._compilation_begins), ("end_callbacks", self._compilation_ends)):
            calls = getattr(handler, name, None)
            if isinstance(calls, list) and (mine in calls) != on:  # torch._dynamo.reset() takes them out
                (calls.append if on else calls.remove)(mine)

    def _compilation_begins(self, *_: object) -> None:
        """What a compiler runs to find out, and its tuning, are no part of the model."""
        try:
            self._compiling = True
            self.pause()
        except Exception as error:
            self._fault(error)

    def _compilation_ends(self, *_: object) -> None:
        try:
            self._compiling = False
            self._compilations += 1
            due = self._compilations <= _COMPILATIONS_MAX and self._may_look()
            if due and self._open("after a compilation", by_clock=True) and _is_main_thread():
                self._operators.begin()
        except Exception as error:
            self._fault(error)

    def _capture_began(self) -> None:
        if self.windows.nodes < NODES_MAX:
            self._operators.begin()

    def _capture_ended(self, since: int, until: int) -> None:
        if self.windows.current is None or get_ident() not in self._looked_at:
            self._operators.end()
        self.windows.event("capture", "", since, until)

    # -- ends -----------------------------------------------------------------------------------

    def _retire(self, reason: str) -> None:
        """No more windows, no more hooks but those of captures."""
        if not self._ended:
            self._ended = True
            self._agent.calls.release(self)
            marks.watch(None)
            self._watch_compilations(False)
            self._say("ended", reason)

    def _say_what_is_not_known(self) -> None:
        if self._operators.refused:
            self._say("skipped", "operators are not known: %s" % self._operators.refused)
        frames = self.windows.frames
        for limit, beyond, what in (
            (STACKS_MAX, frames.beyond, "stacks"),
            (MODULES_MAX, frames.modules.beyond, "modules"),
        ):
            if beyond:
                self._say("skipped", "%s beyond the first %d" % (what, limit))

    def _say(self, what: str, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            now = Clock.unix_ns()
            self.windows.event(what, reason, now, now)

    def _fault(self, error: Exception) -> None:
        """A fault of ours ends this part; what a signal handler of the program's raised goes on."""
        if not is_ours(error):
            raise error
        self._retire("fault: %s: %s" % (type(error).__name__, error))
        self.pause()


def _is_main_thread() -> bool:
    return get_native_id() == getpid()
