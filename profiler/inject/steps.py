"""Step times from CUDA events, with and without tracing: what tracing costs, measured in the same run.

A step is the outermost model call or, outside any, a CUDA-graph replay. Blocks of untraced and traced
steps alternate until the asked number of untraced ones is timed, so that drift hits both alike; then the
hooks are taken out. Times run from one step's event to the next one's: host work between steps counts.
"""

from __future__ import annotations

import sys
from collections import deque

from .events import Clock, get_ident
from .interrupts import is_ours

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent

#: Steps before the first block: allocator, cuBLAS and autotuning warm up.
WARMUP_STEPS = 5
#: Steps of a block; the first after a change pays for the change and is marked so by its window.
BLOCK_STEPS = 6
#: Events wait this many steps before they are read, so that reading never waits for the GPU.
_SETTLE_STEPS = 8

_COMPILER_NOTE = "torch.compile is used: steps are timed at CUDA-graph replays only, model calls are left alone"


class _Step:
    __slots__ = ("at", "attributions", "counts", "event", "kind", "traced")

    def __init__(self, kind: str, traced: bool, event: Any, attributions: tuple[int, bool]) -> None:
        self.kind, self.traced, self.event, self.attributions = kind, traced, event, attributions
        self.at = Clock.unix_ns()
        self.counts = True  # launches that are attributed take longer: not what tracing costs


class Steps:
    """Counts steps, times them, and alternates tracing until enough is known."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._wanted = agent.options.clean_steps
        self._count = 0
        self._clean = 0
        self._pending: deque[_Step] = deque()
        self._replay: Any = None  # CUDAGraph's own, while it is hooked
        self._active = False

    def start(self) -> None:
        """Hook the step boundaries of torch, where they can be hooked without harm."""
        torch = sys.modules.get("torch")
        if torch is None:
            self._say("clean steps need torch: this program's steps are not known")
            return
        self._torch = torch
        self._hook_replay(torch.cuda.CUDAGraph)
        if not self._agent.calls.want(self):
            self._say(_COMPILER_NOTE)
        self._active = True

    def pause(self) -> None:
        """Nothing to give up: events need no CUPTI."""

    def resume(self) -> None:
        """See pause."""

    def compiler_came(self) -> None:
        """The agent has taken the hook out of nn.Module; graph replays are not traced through."""
        if self._active:
            self._say(_COMPILER_NOTE)

    def finish(self) -> None:
        """Read what is left and take the hooks out."""
        if self._active:
            self._read(0)
            self._unhook()

    def forget(self) -> None:
        """In a forked child: no step is timed."""
        self._pending.clear()
        if self._active:
            self._unhook()

    def step_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See calls.py."""
        self._begin("forward")

    def step_ends(self) -> None:
        """Steps are timed from begin to begin."""

    def _hook_replay(self, owner: Any) -> None:
        original = owner.replay
        steps, calls = self, self._agent.calls

        def replay(*args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            if not steps._active or not calls.enter(thread):
                return original(*args, **kwargs)
            try:
                steps._begin("graph_replay")
                return original(*args, **kwargs)
            finally:
                calls.leave(thread)

        replay.__doc__ = original.__doc__
        replay.__wrapped__ = original  # type: ignore[attr-defined]
        owner.replay = replay
        self._replay = original

    def _unhook(self) -> None:
        self._active = False
        self._agent.calls.release(self)
        if self._replay is not None:
            self._torch.cuda.CUDAGraph.replay = self._replay
            self._replay = None

    def _begin(self, kind: str) -> None:
        try:
            cuda = self._torch.cuda
            if cuda.is_current_stream_capturing():
                return
            self._count += 1
            past = self._count - WARMUP_STEPS
            if past >= 1 and (past - 1) % BLOCK_STEPS == 0:
                self._turn()
            if not self._active:
                return
            event = cuda.Event(enable_timing=True)
            event.record()
            attributions = self._agent.attributions
            if self._pending and attributions != (self._pending[-1].attributions[0], False):
                self._pending[-1].counts = False
            traced = self._agent.state == "traced"
            self._pending.append(_Step(kind, traced, event, attributions))
            if not traced and self._agent.state == "clean":
                self._clean += 1
            if len(self._pending) > 4 * _SETTLE_STEPS:
                self._read(_SETTLE_STEPS)
        except Exception as error:
            if not is_ours(error, "torch"):
                raise
            self._agent.spool.event(ev="fault", where="steps", text=str(error))
            self._unhook()
            self._agent.set_condition("clean", None)

    def _turn(self) -> None:
        """A block ends: change over, or finish when enough clean steps are timed."""
        # A graph replay in flight when CUPTI is switched off gets its end time when it is switched on again.
        self._torch.cuda.synchronize()
        if self._agent.state == "clean":
            self._agent.set_condition("clean", None)
        elif self._clean < self._wanted:
            self._agent.set_condition("clean", "--clean-steps")
        else:
            self._read(0)
            self._unhook()

    def _read(self, keep: int) -> None:
        done = []
        while len(self._pending) > keep + 1:
            step, following = self._pending[0], self._pending[1].event
            if not following.query():
                break
            if step.counts:
                done.append([step.kind, step.traced, step.at, int(step.event.elapsed_time(following) * 1e6)])
            self._pending.popleft()
        if done:
            self._agent.spool.event(ev="steps", steps=done)

    def _say(self, text: str) -> None:
        self._agent.spool.event(ev="note", text=text)
