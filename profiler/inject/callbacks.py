"""CUPTI's two buffer callbacks: they hand memory over and store what comes back, on whatever thread that happens.

No exception of ours may leave them. One of a signal handler of the program's may, in a way: see interrupts.py.
"""

from __future__ import annotations

import ctypes

from . import cupti
from .events import SignalsHeld, start_new_thread
from .spool import BUFFER_BYTES, SpoolFull

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable

    from .agent import Agent


class Callbacks:
    """``request`` and ``complete`` as CUPTI calls them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.request = cupti.REQUEST_TYPE(self._requested)
        self.complete = cupti.COMPLETE_TYPE(self._completed)
        agent.interrupts.watch(self._requested, self._completed)

    def _requested(self, buffer_at: int, size_at: int, records_at: int) -> None:
        address = 0
        try:
            if self._agent.inherited:
                _elsewhere(self._agent.activate)
            address = self._agent.spool.lend()
        except BaseException as error:
            self._agent.interrupts.owe(error)
        ctypes.c_void_p.from_address(buffer_at).value = address
        ctypes.c_size_t.from_address(size_at).value = BUFFER_BYTES if address else 0
        ctypes.c_size_t.from_address(records_at).value = 0

    def _completed(self, _context: int | None, _stream: int, buffer: int, _size: int, valid: int) -> None:
        try:
            self._agent.spool.take(buffer, valid)
        except SpoolFull as full:
            # Disabling from inside CUPTI's worker could wait for itself: let another thread do it.
            _elsewhere(self._agent.stop, str(full))
        except BaseException as error:
            if not self._agent.interrupts.owe(error):
                self._agent.spool.event(ev="fault", where="buffer", text=str(error))


def _elsewhere(what: Callable[..., None], *arguments: str) -> None:
    try:
        with SignalsHeld():
            start_new_thread(what, arguments)
    except Exception:  # the interpreter is ending: so is recording
        pass
