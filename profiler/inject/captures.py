"""Where captures of CUDA graphs begin and end, as ``torch.cuda.CUDAGraph`` tells it: operators are recorded in between.

Which module and line a node of a graph comes from needs none of this: CUPTI calls back at its creation (graphs.py).
"""

from __future__ import annotations

import sys

from .events import Clock, get_ident
from .interrupts import is_ours, leave_out_ours

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Captures:
    """Hooks of the two calls; all three are called in the thread that captures, ``comes`` before it does."""

    def __init__(
        self, began: Callable[[], None], ended: Callable[[int, int], None], comes: Callable[[], None] = lambda: None
    ) -> None:
        self.threads: dict[int, int] = {}  # that capture -> since when
        self._began, self._ended, self._comes = began, ended, comes
        self._undo: list[tuple[type, str, Any, Any]] = []

    def put_in(self) -> None:
        """Hook the class, where this torch has it."""
        owner = getattr(getattr(sys.modules.get("torch"), "cuda", None), "CUDAGraph", None)
        if owner is not None and not self._undo:
            self._hook(owner, "capture_begin", before=self._is_near, after=self._begins)
            self._hook(owner, "capture_end", before=self._ends)

    def take_out(self) -> None:
        """Take the hooks out, but for one that somebody has hooked since: that one does nothing from now on."""
        undo, self._undo = self._undo, []
        for owner, name, hook, original in undo:
            hook.alive[0] = False
            if vars(owner).get(name) is hook:
                setattr(owner, name, original)

    def _hook(
        self,
        owner: type,
        name: str,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        original, alive = vars(owner).get(name), [True]
        if original is None:
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None and alive[0]:
                before()
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                leave_out_ours(error)
                raise
            if after is not None and alive[0]:
                after()
            return result

        for copied in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(call, copied, getattr(original, copied, None))
        call.__wrapped__ = original  # type: ignore[attr-defined]
        call.alive = alive  # type: ignore[attr-defined]
        setattr(owner, name, call)
        self._undo.append((owner, name, call, original))

    def _is_near(self) -> None:
        try:
            self._comes()
        except Exception as error:
            if not is_ours(error):
                raise

    def _begins(self) -> None:
        try:
            self.threads[get_ident()] = Clock.unix_ns()
            self._began()
        except Exception as error:
            if not is_ours(error):
                raise

    def _ends(self) -> None:
        try:
            since = self.threads.pop(get_ident(), None)
            if since is not None:
                self._ended(since, Clock.unix_ns())
        except Exception as error:
            if not is_ours(error):
                raise
