"""Ranges that the program marks itself (spikeprof.step, request, stage), kept until the agent's thread writes them.

Loaded at the program's first mark, see ``profiler/annotate.py``; a program that marks nothing has none of this.
"""

from itertools import count

from .events import Clock, Events, allocate_lock, get_ident

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any, Optional

    from .attribution import Attribution

#: Ranges that wait to be written: 0.1 s of them at 600,000 a second. What comes beyond is counted.
_WAITING_MAX = 65536

#: CUPTI's thread ids are the low 32 bits of pthread_self.
_THREAD_BITS = 0xFFFFFFFF

_steps: "Optional[Attribution]" = None  # who wants to hear of steps
_made: "list[tuple[str, str, int, int, int, dict[str, Any]]]" = []
_beyond = count()  # next() is one step, whatever thread takes it; += is not
_told = [0, 0]  # of what came beyond: how many are written, and how often write() looked, which counts as well
_writing = allocate_lock()


class Mark:
    """One range: from entering to leaving it, in one thread."""

    __slots__ = ("_attributes", "_began", "_kind", "_name", "_told")

    def __init__(self, kind: str, name: str, attributes: "dict[str, Any]") -> None:
        self._kind, self._name, self._attributes = kind, _plain(name), attributes
        self._told: "Optional[Attribution]" = None

    def __enter__(self) -> None:
        """Begin."""
        steps = _steps  # another thread may end the watch
        if steps is not None and self._kind == "step" and steps.mark_begins(self._name, self._attributes):
            self._told = steps
        self._began = Clock.unix_ns()

    def __exit__(self, *_: object) -> None:
        """End."""
        if len(_made) < _WAITING_MAX:
            thread = get_ident() & _THREAD_BITS
            _made.append((self._kind, self._name, self._began, Clock.unix_ns(), thread, self._attributes))
        else:
            next(_beyond)
        if self._told is not None:
            self._told.mark_ends()
            self._told = None


def watch(steps: "Optional[Attribution]") -> None:
    """Tell of the steps that the program marks from now on."""
    global _steps
    _steps = steps


def write(events: Events) -> None:
    """Write what was made since the last time."""
    with _writing:
        written, looks = _told
        beyond = next(_beyond) - looks
        _told[:] = beyond, looks + 1
        rows = [(*row[:5], {str(key): _plain(value) for key, value in row[5].items()}) for row in _made[:_WAITING_MAX]]
        del _made[: len(rows)]  # what other threads appended meanwhile stays
        if rows or beyond > written:
            events.event(ev="ranges", ranges=rows, dropped=beyond - written)


def _plain(value: "Any") -> "Any":
    """What JSON has a form for; of everything else the type: no code of the program may run here."""
    if type(value) in (str, int, bool):
        return value
    if type(value) is float:
        return value if abs(value) < float("inf") else repr(value)
    return "<%s>" % type(value).__name__


def forget() -> None:
    """In a forked child: what waits is the parent's, and its thread may have been writing."""
    global _beyond, _steps, _writing
    _steps = None
    _beyond, _writing = count(), allocate_lock()
    _told[:] = 0, 0
    _made.clear()
