"""What CUPTI records at a moment, and its flushes: calls that switch or flush it come one at a time.

In duty windows and outside a capture range only the recording of kernels is switched off, and that of copies and calls
goes on; what is not wanted of these is left out when the trace is made. For the thread that switches is mostly not the
one that launches, and libcupti 13.0 bears no more: switch calls while another thread is inside a launch, and it takes
all later calls of that thread for parts of that launch, under one correlation id; switch copies, and the program dies.
"""

from __future__ import annotations

from . import cupti
from .control import FAREWELL_SECONDS
from .events import Clock, get_ident, is_alone, pause

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from .agent import Agent
    from .callbacks import Callbacks

#: Flushes after recording was switched off. Going on flushing costs graph replays 0.2 % (measured on H200).
_SETTLING_FLUSHES = 2

#: CUPTI hands over buffers in their order. A kernel that was in flight when kernels were switched off may never get its
#: end (seen with libcupti 13.0): all later buffers wait for it, until CUPTI has all that it may have and drops records.
#: So before kernels are recorded again what has no end is given up, where this many buffers are left with CUPTI so long
#: after: soon where half of all wait, else when also what a long queue of launches held has run.
_GIVEN_UP = ((16, 0.03), (4, 1.0))


class Recorder:
    """Of one process. What switches is called under the agent's lock; all raise CuptiError."""

    def __init__(self, agent: Agent, callbacks: Callbacks) -> None:
        self._agent, self._callbacks = agent, callbacks
        self.turn = cupti.Turn(FAREWELL_SECONDS)
        self._kernels_on = self._copies_on = self._calls_on = False
        self._registered = self._calls_lost = self._devices_told = False
        self._is_ours = False  # else CUPTI must be left alone
        self._flushes_owed = 0
        self._kernels_off_at = 0.0

    def on(self, kernels: bool) -> None:
        """Record copies and calls, and ``kernels``."""
        with self.turn:
            self._is_ours = True
            self._on(kernels)

    def _on(self, kernels: bool) -> None:
        driver = self._agent.driver
        if not self._registered:
            driver.register(self._callbacks.request, self._callbacks.complete)
            self._registered = True
        refused = {}
        if not self._copies_on:
            refused.update(driver.enable_copies())
            self._copies_on = True
        if not self._calls_on:
            if self._calls_lost:
                refused["recording launches"] = "CUPTI records no calls after another profiler"
            else:
                refused.update(driver.enable_calls())
            self._calls_on = True
        if kernels:
            self._give_up()
            driver.enable_kernels()
            self._kernels_on, self._kernels_off_at = True, 0.0
            self._flushes_owed = _SETTLING_FLUSHES
            self._tell_devices()
        if refused:
            self._agent.spool.event(ev="refused", what=refused)

    def _give_up(self) -> None:
        """Have buffers back that wait for kernels without an end."""
        if not self._kernels_off_at:
            return
        self._agent.driver.flush()
        lent, since = self._agent.spool.lent, Clock.monotonic() - self._kernels_off_at
        if any(lent >= buffers and since >= seconds for buffers, seconds in _GIVEN_UP):
            self._agent.driver.flush(forced=True)

    def _tell_devices(self) -> None:
        if not self._devices_told:  # not before: the records would end up with a guest
            self._devices_told = True
            try:
                self._agent.driver.dump_devices()
            except cupti.CuptiError as error:
                self._agent.spool.event(ev="note", text="no device records: %s" % error)

    def off(self, copies: bool, calls: bool, forced: bool = False) -> None:
        """Flush and record no kernels, and no ``copies`` and ``calls`` but where these go on.

        Without copies CUPTI is not ours any more: no flush of ours is under way when this returns, and none comes.
        """
        with self.turn:
            driver = self._agent.driver
            try:
                # CUPTI forgets what it has not yet turned into records when it is switched off: 60 ms of kernels, seen.
                driver.flush(forced)
            finally:
                self._is_ours = copies
                if self._kernels_on:
                    driver.disable_kernels()
                    self._kernels_on, self._kernels_off_at = False, Clock.monotonic()
                    self._count_dropped()
                if not copies:  # what comes back from now on may be a guest's
                    self._kernels_off_at = 0.0
                if self._copies_on and not copies:
                    if not is_alone(get_ident()):
                        pause(cupti.SETTLING_SECONDS)  # until the launches of other threads have ended
                    driver.disable_copies()
                    self._copies_on = False
                if self._calls_on and not calls:
                    driver.disable_calls()
                    self._calls_on = False

    def lose(self) -> None:
        """Another profiler takes CUPTI, with its callbacks."""
        self._registered = False
        self._calls_lost = self._agent.driver.selects_calls

    def flush(self) -> None:
        """Deliver what is complete, while anything is recorded and a little after."""
        with self.turn.lock:
            # Looked at under the lock: the buffers of a guest are not ours to flush.
            if self._kernels_on:
                self._agent.driver.flush()
            elif self._is_ours and self._flushes_owed:
                # Work in flight at the change is recorded a little later; after that, leave the program alone.
                self._flushes_owed -= 1
                self._agent.driver.flush()

    def _count_dropped(self) -> None:
        try:
            dropped = self._agent.driver.dropped()
        except cupti.CuptiError:
            return
        if dropped:
            self._agent.spool.event(ev="dropped", records=dropped)
