"""A forward that runs once more for us changes no files, reaches no other process and ends in time."""

import _signal  # type: ignore[import-not-found]
import os
import sys

from ..events import Clock, get_ident
from .quiet import Stopped

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: What Python tells of before it does it (``sys.addaudithook``), and what it is.
_EVENTS = {
    "subprocess.": "a process that it starts", "os.system": "a process that it starts",
    "os.exec": "a process that it starts", "os.fork": "a process that it starts",
    "os.posix_spawn": "a process that it starts", "os.spawn": "a process that it starts",
    "_thread.start_new_thread": "a thread that it starts", "os.kill": "a signal that it sends",
    "socket.connect": "a connection that it makes", "socket.bind": "a connection that it makes",
    "socket.sendto": "a message that it sends", "socket.sendmsg": "a message that it sends",
    "os.remove": "a file that it changes", "os.rename": "a file that it changes", "os.mkdir": "a file that it changes",
    "os.rmdir": "a file that it changes", "os.truncate": "a file that it changes", "os.link": "a file that it changes",
    "os.symlink": "a file that it changes", "os.chmod": "a file that it changes", "shutil.": "a file that it changes",
    "sqlite3.connect": "a database that it uses",
}  # fmt: skip

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_watching: "dict[int, bool]" = {}  # threads in which a forward runs for us
_hooked = False


def _heard(event: str, args: "tuple[Any, ...]") -> None:
    if not _watching or get_ident() not in _watching:
        return
    if event == "open" and not _imports():
        flags = args[2] if len(args) > 2 else 0
        if isinstance(flags, int) and flags & _WRITES:
            raise Stopped("a file that it writes")
        return
    for begin, what in _EVENTS.items():
        if event.startswith(begin) and not _imports():
            raise Stopped(what)


def _imports() -> bool:
    """Whether a module is being imported, as torch does with parts of its own: what that does is not the forward's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class Outside:
    """While a forward runs for us, in this thread: nothing reaches what is outside of the process, for so long."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._over = seconds, False
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        """Put it in."""
        global _hooked
        if not _hooked:
            _hooked = True
            sys.addaudithook(_heard)  # it cannot be taken out; it does nothing in all other threads
        caches, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        self._undo.append(lambda: setattr(sys, "dont_write_bytecode", caches))
        self._limit()
        thread, write = get_ident(), os.write
        threads = sys.modules.get("threading")
        if threads is not None:
            self._keep_from_starting(threads.Thread, thread)

        def writes_here(file: int, data: "Any") -> int:
            if get_ident() != thread or _imports():
                return write(file, data)
            if file not in (1, 2):
                raise Stopped("a file that it writes")
            return len(data)

        os.write = writes_here
        self._undo.append(lambda: setattr(os, "write", write))
        self._undo.append(lambda: _watching.pop(thread, None))
        _watching[thread] = True

    def __exit__(self, *_: object) -> None:
        """Take it out."""
        try:
            self._over = True
        finally:
            for undo in reversed(self._undo):
                undo()

    def _keep_from_starting(self, owner: "Any", thread: int) -> None:
        start = owner.start

        def starts(*args: "Any") -> None:
            if get_ident() == thread and not _imports():
                raise Stopped("a thread that it starts")
            start(*args)

        owner.start = starts
        self._undo.append(lambda: setattr(owner, "start", start))

    def _limit(self) -> None:
        """Python has signals in its main thread only; a timer of the program's that is due first is left alone."""
        threading, timer = sys.modules.get("threading"), _signal.ITIMER_REAL
        left, interval = _signal.getitimer(timer)
        if (threading is not None and threading.main_thread().ident != get_ident()) or 0 < left < self._seconds + 1:
            return
        try:
            before = _signal.signal(_signal.SIGALRM, self._late)
        except ValueError:  # no main thread after all
            return
        began = Clock.monotonic()
        if before is not None:  # else it is not Python's
            self._undo.append(lambda: _signal.signal(_signal.SIGALRM, before))
        mask = _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {_signal.SIGALRM})
        self._undo.append(lambda: _signal.pthread_sigmask(_signal.SIG_SETMASK, mask))

        def put_back() -> None:
            rest = max(left - (Clock.monotonic() - began), 0.001) if left else 0.0
            _signal.setitimer(timer, rest, interval)

        self._undo.append(put_back)
        _signal.setitimer(timer, self._seconds)

    def _late(self, *_: object) -> None:
        if not self._over:
            raise Stopped("the end of its time")


class Refusing:
    """In the place of what a forward would use up or write to: files, iterators."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattribute__(self, _name: str) -> "Any":
        raise Stopped("%s that it uses" % object.__getattribute__(self, "_name"))

    __next__ = __iter__ = __enter__ = __call__ = lambda self: self.any
