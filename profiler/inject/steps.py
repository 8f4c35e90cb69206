"""Step times from CUDA events, with and without tracing: what tracing costs, measured in the same run.

A step is the outermost model call or, outside any, a CUDA-graph replay. Blocks of untraced and traced
steps alternate until the asked number of untraced ones is timed, so that drift hits both alike; then the
hooks are taken out. Times run from one step's event to the next one's: host work between steps counts.
"""

from __future__ import annotations

import sys
from collections import deque

from .events import Clock

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


class Steps:
    """Counts steps, times them, and alternates tracing until enough is known."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._wanted = agent.options.clean_steps
        self._depth = 0
        self._count = 0
        self._clean = 0
        self._pending: deque[tuple[str, bool, int, Any]] = deque()  # (kind, traced, unix ns, event)
        self._undo: list[tuple[Any, str, Any]] = []
        self._active = False

    def start(self) -> None:
        """Hook the step boundaries of torch, where they can be hooked without harm."""
        torch = sys.modules.get("torch")
        if torch is None:
            self._say("clean steps need torch: this program's steps are not known")
            return
        self._torch = torch
        self._hook(torch.cuda.CUDAGraph, "replay", "graph_replay")
        if self._agent.compiler_used:
            self._say(_COMPILER_NOTE)
        else:
            self._hook(torch.nn.Module, "__call__", "forward")
        self._active = True

    def pause(self) -> None:
        """Nothing to give up: events need no CUPTI."""

    def resume(self) -> None:
        """See pause."""

    def compiler_came(self) -> None:
        """Take the hook out of nn.Module before anything is compiled; graph replays are not traced through."""
        for hook in [h for h in self._undo if h[1] == "__call__"]:
            setattr(*hook)
            self._undo.remove(hook)
            self._say(_COMPILER_NOTE)

    def finish(self) -> None:
        """Read what is left and take the hooks out."""
        if self._active:
            self._read(0)
            self._unhook()

    def _hook(self, owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)
        steps = self

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if steps._depth or not steps._active:
                return original(*args, **kwargs)
            steps._depth = 1
            try:
                steps._begin(kind)
                return original(*args, **kwargs)
            finally:
                steps._depth = 0

        wrapper.__name__, wrapper.__doc__ = name, original.__doc__
        wrapper.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)
        self._undo.append((owner, name, original))

    def _unhook(self) -> None:
        self._active = False
        for owner, name, original in self._undo:
            setattr(owner, name, original)
        self._undo = []

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
            traced = self._agent.state == "traced"
            self._pending.append((kind, traced, Clock.unix_ns(), event))
            if not traced and self._agent.state == "clean":
                self._clean += 1
            if len(self._pending) > 4 * _SETTLE_STEPS:
                self._read(_SETTLE_STEPS)
        except Exception as error:
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
            kind, traced, at, event = self._pending[0]
            following = self._pending[1][3]
            if not following.query():
                break
            done.append([kind, traced, at, int(event.elapsed_time(following) * 1e6)])
            self._pending.popleft()
        if done:
            self._agent.spool.event(ev="steps", steps=done)

    def _say(self, text: str) -> None:
        self._agent.spool.event(ev="note", text=text)
