"""One Agent per process: decides when CUPTI records, and survives whatever the program does.

What is recorded at a moment follows from a few independent conditions, each set by its own part::

    stopped  budget used up, disk full, supervisor gone, fault    for good
    yielded  another profiler runs in this process                guests.py
    range    outside --capture-range                              graphs.py
    off      outside the on-part of --window                      tick()
    clean    steps timed without tracing (--clean-steps)          steps.py
    traced   none of the above                                    (and attribution.py at work, for a few steps)

Every change is written to the spool as a window, so that a report can say what was not measured and why.
"""

from __future__ import annotations

import os
import sys

from . import ENV_CONTROL, ENV_OPTIONS, ENV_SPOOL, cupti
from .callbacks import Callbacks
from .calls import Calls
from .control import FAREWELL_SECONDS, Control
from .events import Clock, Events, RLock, SignalsHeld, get_ident
from .interrupts import Interrupts
from .options import Options
from .parts import Parts
from .recorder import Recorder
from .spool import Spool

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable

#: Conditions in order of precedence.
_STATES = ("stopped", "yielded", "range", "off", "clean")

#: Conditions in which copies and calls are recorded.
_CALLS_ON = frozenset(("traced", "range", "off"))

#: Conditions in which CUPTI must be left alone: it is somebody else's, or recording is over.
_HANDS_OFF = frozenset(("stopped", "yielded"))

_ENDED = "the program ended"

#: Longest wait for a call of ours in another thread: nothing may hang.
_PATIENCE_SECONDS = FAREWELL_SECONDS

#: What a killed process may lose. cuptiActivityFlushPeriod delivers full buffers only, so we flush ourselves.
FLUSH_SECONDS = 0.1


class Agent:
    """Recording in this process. All methods are safe to call from any thread and never raise."""

    def __init__(self, events: Events | None = None) -> None:
        self.options = Options(os.environ.get(ENV_OPTIONS))
        self.spool = Spool(events or Events(os.environ[ENV_SPOOL]), self.options.max_bytes)
        self.cupti: cupti.Cupti | None = None
        self.compiler_used = False
        self._watches_all = bool(self.options.numerics_every)  # not only models that the program names
        self._earlier: list[Spool] = []  # of before a fork: CUPTI may still hold their buffers
        self.interrupts = Interrupts()
        # Made once and kept: CUPTI may call them for as long as the process lives.
        self._callbacks = Callbacks(self)
        self._begin()

    def _begin(self) -> None:
        """The state of a process that has not used CUDA yet."""
        self._lock, self.recorder = RLock(), Recorder(self, self._callbacks)
        self._conditions: dict[str, str] = {}  # condition -> reason
        self._state: str | None = None
        self._entered: tuple[str, str] | None = None
        self._activated = self.inherited = self._finished = self.switching = False
        self._began = 0.0
        self.switched = (0, 0.0)  # the thread that went from one state to another last, and when
        self._control: Control | None = None
        self._parts = Parts(self)
        self.calls = Calls()
        if self.compiler_used:
            self.calls.compiler_came()
        self._guests: set[str] = set()

    @property
    def activated(self) -> bool:
        """Whether CUDA was used here, as far as we know."""
        return self._activated

    @property
    def has_thread(self) -> bool:
        """Whether a thread of ours looks after what was recorded."""
        return self._control is not None

    @property
    def state(self) -> str | None:
        """What is recorded now, see above; None before activation."""
        return self._state

    @property
    def stopped(self) -> bool:
        """Whether recording is over for good."""
        return "stopped" in self._conditions

    @property
    def yielded(self) -> bool:
        """Whether CUPTI is left to another profiler."""
        return "yielded" in self._conditions

    @property
    def attributions(self) -> tuple[int, bool]:
        """How often launches were attributed, which slows them down, and whether they are now."""
        windows = self._parts.attribution.windows if self._parts.attribution is not None else None
        return (windows.count, windows.current is not None) if windows is not None else (0, False)

    @property
    def driver(self) -> cupti.Cupti:
        """This process's CUPTI. Raises CuptiError before it was found."""
        if self.cupti is None:
            raise cupti.CuptiError("not activated")
        return self.cupti

    # -- life ---------------------------------------------------------------------------------

    def activate(self) -> None:
        """Start recording: called at the process's first CUDA use."""
        with SignalsHeld(), self._lock:
            if self._activated and not self.inherited:
                if self._parts.attribution is not None:
                    self._parts.attribution.torch_came()
                return
            self._activated, self.inherited = True, False
            began = Clock.perf_counter_ns()
            sizes: dict[int, int] = {}
            self.spool.events.hello()
            try:
                self.take_leave_in_workers()
                self.cupti = self.cupti or cupti.Cupti(self.options.libcupti)
                self._began = Clock.monotonic()
                if self.options.capture_range:
                    self._conditions["range"] = "before cudaProfilerStart"
                self._parts.start()
                self._apply()
                sizes = self.driver.record_sizes()
                self.recorder.flush()  # a buffer that is open when the process forks would be lost to the child
                self._control = Control(self, os.environ.get(ENV_CONTROL))
                self._control.start()
            except Exception as error:
                self.fault("activate", error)
            self.spool.event(
                ev="activated",
                libcupti=getattr(self.cupti, "path", None),
                version=self._version(),
                sizes=sizes,
                torch=getattr(sys.modules.get("torch"), "__version__", None),
                cost_ns=Clock.perf_counter_ns() - began,
            )

    def torch_came(self) -> None:
        """torch was imported, and CUDA may never be used: begin what needs none."""
        if self._watches_all:
            try:
                with SignalsHeld(), self._lock:
                    self._parts.watch_numerics()
            except Exception as error:  # of ours: GPU work can still be recorded
                self.spool.event(ev="note", text="numerics: %s: %s" % (type(error).__name__, error))

    def finish(self) -> None:
        """Flush and say farewell: the program is about to end."""
        with SignalsHeld():
            if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
                return
            try:
                if self._finished or self.inherited or not (self._activated or self._parts.numerics):
                    return
                self._finished = True
                self._finish()
                control = self._control
            finally:
                self._lock.release()
            if control is not None:  # outside the lock: its thread may need it
                control.farewell()

    def _finish(self) -> None:
        began = Clock.perf_counter_ns()
        try:
            self._parts.each("finish")
            if self.cupti is not None and self._state is not None and self._state not in _HANDS_OFF:
                self._parts.settle()
                self._leave("stopped", forced=True)
            self._write_marks()
            self._conditions["stopped"] = _ENDED  # the thread must not call CUPTI while the process is torn down
            self._enter("stopped", _ENDED)
        except Exception as error:
            self.fault("finish", error)
        if self._parts.numerics is not None:  # in children that leave past atexit; nothing is recorded any more
            self._parts.numerics.tell_operator()
        self.spool.event(ev="finished", cost_ns=Clock.perf_counter_ns() - began)

    def forked(self, events: Events) -> None:
        """In a forked child: nothing of the parent's recording may be touched, its own may begin.

        Where the parent had used CUDA the child cannot, with us or without. Where the parent had only loaded
        a CUDA package, the child may: torch's initialisation tells, or else CUPTI, which goes on recording in
        the child, by its first wish for a buffer.
        """
        if self._control is not None:
            self._control.abandon()
        self.calls.forget()
        self._parts.each("forget")
        self.spool.abandon()
        self._earlier.append(self.spool)
        inherited = self._activated and self.cupti is not None and "stopped" not in self._conditions
        self.spool = Spool(events, self.options.max_bytes)
        self._begin()
        self.inherited = inherited
        self._activated = inherited
        if "torch" in sys.modules and not inherited:
            self.torch_came()

    def stop(self, reason: str) -> None:
        """Stop recording for good; the program goes on."""
        self.set_condition("stopped", reason)

    def fault(self, where: str, error: Exception) -> None:
        """A fault of ours: note it, stop recording, keep the program."""
        text = str(error) if isinstance(error, cupti.CuptiError) else "%s: %s" % (type(error).__name__, error)
        self.spool.event(ev="fault", where=where, text=text)
        try:
            self.stop("fault in %s: %s" % (where, error))
        except Exception:
            pass

    # -- what is recorded when ----------------------------------------------------------------

    def set_condition(self, condition: str, reason: str | None) -> None:
        """Set (reason) or clear (None) one condition and start or stop CUPTI accordingly."""
        with SignalsHeld(), self._lock:
            if self._conditions.get(condition) == reason:
                return
            if reason is None:
                self._conditions.pop(condition, None)
            else:
                self._conditions[condition] = reason
            if self.cupti is None or self.inherited or self._finished:  # remembered for activate()
                return
            try:
                self._apply()
            except Exception as error:
                self.spool.event(ev="fault", where="apply", text=str(error))
                self._conditions["stopped"] = "fault: %s" % error
                self._enter("stopped", self._conditions["stopped"])
                self._let_go()

    def _let_go(self) -> None:
        try:  # a guest may be waiting for the subscription
            self._parts.each("pause")
        except cupti.CuptiError:
            pass

    def host(self, guest: str, here: bool) -> None:
        """Another profiler comes or goes; CUPTI is left alone until the last has gone."""
        with self._lock:
            (self._guests.add if here else self._guests.discard)(guest)
            self.set_condition("yielded", ", ".join(sorted(self._guests)) or None)

    def end_operators(self) -> None:
        """Another profiler is about to begin in this thread."""
        if self._parts.attribution is not None:
            self._parts.attribution.windows.operators.end()

    def tick(self) -> float | None:
        """Act on clocks: flush, budget of seconds, duty windows. Returns seconds until the next look, None = never."""
        if not self._activated or "stopped" in self._conditions:
            return None
        self.recorder.flush()
        self._write_marks()
        self._parts.tick()
        waits = [FLUSH_SECONDS]
        age = Clock.monotonic() - self._began
        if self.options.max_seconds:
            if age >= self.options.max_seconds:
                self.stop("--max-seconds %g reached" % self.options.max_seconds)
                return None
            waits.append(self.options.max_seconds - age)
        if self.options.window:
            on, off = self.options.window
            position = age % (on + off)
            self.set_condition("off", None if position < on else "--window")
            waits.append(on - position if position < on else on + off - position)
        return min(waits)

    def _write_marks(self) -> None:
        marks = sys.modules.get("%s.marks" % __package__)
        if marks is not None:
            marks.write(self.spool.events)

    def _apply(self) -> None:
        was = self._state
        state = next((s for s in _STATES if s in self._conditions), "traced")
        began = Clock.unix_ns()
        if state != was:
            self.switching = True  # no window of launches is opened meanwhile
            try:
                began = self._switch(was, state)
            finally:
                self.switching = False
                if was is not None:
                    self.switched = (get_ident(), Clock.monotonic())
        self._enter(state, self._conditions.get(state, ""), began)

    def _switch(self, was: str | None, state: str) -> int:
        """Go from one state to another; the time from which on it may hold."""
        self._parts.settle()
        if was == "traced" or (was not in (None, *_HANDS_OFF) and state not in _CALLS_ON):
            # At the end what is in flight has no other chance, nor what CUPTI holds back for it.
            self._leave(state, forced=state == "stopped")
        if state == "yielded":
            self.recorder.lose()
        if state in _HANDS_OFF and was not in _HANDS_OFF:
            self._parts.each("pause")
        elif state not in _HANDS_OFF and was in _HANDS_OFF:
            self._parts.each("resume")
        # A traced window holds all that may have been recorded: from before CUPTI is on until after it is off.
        began = Clock.unix_ns()
        if state in _CALLS_ON:
            self.recorder.on(kernels=state == "traced")
        return began

    def _leave(self, state: str, forced: bool = False) -> None:
        """Switch off what ``state`` does not record."""
        try:
            self.recorder.off(copies=state not in _HANDS_OFF, calls=state in _CALLS_ON, forced=forced)
        finally:
            self._state = state

    def _enter(self, state: str, reason: str, at: int | None = None) -> None:
        if (state, reason) != self._entered:
            self._entered = (state, reason)
            shown = "off" if state == "range" else state
            self.spool.event(ev="window", state=shown, reason=reason, t=at or Clock.unix_ns())
        self._state = state

    # -- parts and process --------------------------------------------------------------------

    def watch_model(self, model: object, every: int, patterns: tuple[str, ...], roles: tuple[str, ...]) -> None:
        """Scan what the modules of this model give: the program asks for it itself."""
        with SignalsHeld(), self._lock:
            try:
                if self._parts.numerics is not None:
                    self._parts.numerics.attach(model)
                    return
                options = self.options
                if not options.numerics_every:
                    options.numerics_every, options.numerics_modules, options.numerics_roles = every, patterns, roles
                self._parts.watch_numerics(model)
            except Exception as error:
                self.spool.event(ev="note", text="spikeprof.watch: %s: %s" % (type(error).__name__, error))

    def look_at(
        self, name: str, tensor: object, role: str, dtype: str, scale: object = None, zero_point: object = None
    ) -> None:
        """Scan a tensor that the program names."""
        if self._parts.numerics is not None:
            self._parts.numerics.look_at(name, tensor, role, dtype, scale, zero_point)

    def aside(self, work: Callable[[], None]) -> None:
        """Do something on the GPU that is not the program's: it is not recorded."""
        before = self._conditions.get("off")
        self.set_condition("off", "a module is run again")
        try:
            work()
        finally:
            self.set_condition("off", before)

    def compiler_came(self) -> None:
        """Something is about to be compiled: no Python hook of ours may end up in a compiled frame's guards."""
        if not self.compiler_used:
            self.compiler_used = True
            self.calls.compiler_came()
            self._parts.each("compiler_came")

    def take_leave_in_workers(self) -> None:
        """multiprocessing's children leave through os._exit, past atexit, but run their own finalizers."""
        process, util = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.util")
        if process is not None and util is not None and process.parent_process() is not None:
            util.Finalize(None, self.finish, exitpriority=-100)

    def _version(self) -> int | None:
        try:
            return self.driver.version()
        except Exception:
            return None
