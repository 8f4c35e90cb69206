"""Exceptions that signal handlers of the program raise while the main thread is in a callback of ours.

Python runs a signal handler between any two steps of the main thread, and CUPTI's callbacks are such steps.
An exception that a handler raises there, as ``sys.exit`` does for SIGTERM, would end in ctypes, which prints
and drops it: the program would not hear of its signal. So it is kept, and raised again at the next call or
return after the callback, which a profile function sees. (An exception thrown from another thread would not
do: threads change over where C code calls back, so it would hit the next callback.)
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import sys
from functools import partial

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any


class Interrupts:
    """Keeps such exceptions and raises them where they belong."""

    def __init__(self) -> None:
        self._callbacks: list[object] = []
        self._owed: BaseException | None = None

    def watch(self, *callbacks: object) -> None:
        """Catch what hits a callback before its first line or after its last, where no ``except`` of its own can."""
        if not self._callbacks:
            before = sys.unraisablehook

            def hook(unraisable: Any) -> None:
                if unraisable.object not in self._callbacks or not self.owe(unraisable.exc_value):
                    before(unraisable)

            sys.unraisablehook = hook
        self._callbacks += callbacks

    def owe(self, error: BaseException | None) -> bool:
        """Keep the exception if it is the program's; False when it is our own, or cannot be raised again."""
        if error is None or (isinstance(error, Exception) and is_ours(error)):
            return False
        if sys.getprofile() not in (None, self._pay):
            return False
        self._owed = error
        sys.setprofile(self._pay)
        return True

    def _pay(self, frame: FrameType | None, _event: str, _argument: object) -> None:
        while frame is not None:
            if _is_our_module(frame.f_globals.get("__name__")):
                return
            frame = frame.f_back
        sys.setprofile(None)
        owed, self._owed = self._owed, None
        if owed is not None:
            raise owed


def hold_garbage() -> bool:
    """Collect no garbage of the program's in a callback: it may call CUDA to go. True = ``gc.enable`` must follow."""
    collects = gc.isenabled()
    if collects:
        gc.disable()
    return collects


def is_ours(error: BaseException, *called: str) -> bool:
    """Whether it was raised by code of ours, and not by a signal handler of the program's that came in between.

    ``called`` are packages whose Python code ours calls: what that raises is ours, too.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_globals.get("__name__") if trace is not None else None
    return _is_our_module(name) or (isinstance(name, str) and name.partition(".")[0] in called)


def leave_out_ours(error: BaseException, *ours: object) -> None:
    """Take the frame that caught it out of its traceback, and those of ours below it, known by their code.

    The program's traceback is its own then (from Python 3.11 on). Whoever calls this is to hold no part of it: a frame
    that held itself would keep all that the program's frames hold.
    """
    trace = error.__traceback__
    while trace is not None and (trace is error.__traceback__ or trace.tb_frame.f_code in ours):
        trace = trace.tb_next
    error.__traceback__ = trace


def is_from_handler(error: BaseException) -> bool:
    """Whether it came through a signal handler of the program's, whatever code that hit."""
    codes = {id(_code_of(_signal.getsignal(number))) for number in range(1, _signal.NSIG)}
    trace = error.__traceback__
    while trace is not None:
        if id(trace.tb_frame.f_code) in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> object:
    """The code of a function, a method, what ``partial`` made of one, or an object that can be called; else None."""
    if isinstance(handler, partial):
        handler = handler.func
    for each in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004 (its code is asked for)
        code = getattr(getattr(each, "__func__", each), "__code__", None)
        if code is not None:
            return code
    return None


def _is_our_module(name: object) -> bool:
    return isinstance(name, str) and (name.startswith("_spikeprof") or "spikeprof.profiler.inject" in name)
