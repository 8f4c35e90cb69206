"""The event file of one process: hello, windows, names, faults; one JSON object a line.

Loaded in every Python process under ``spikeprof run``, most of which never use CUDA: it imports nothing but
built-in modules until CUDA comes, and leaves no file open. A program that closes every descriptor, forks,
or counts its descriptors meets none of ours, and a file of its own under our old number is never written.
"""

import os
import sys
import time

# Kept from before the program runs: gevent and its like replace them in their modules later on.
from _signal import SIG_BLOCK, SIG_SETMASK, pthread_sigmask, valid_signals  # type: ignore[import-not-found]
from _thread import RLock, allocate_lock, get_ident, start_new_thread

__all__ = [
    "Clock",
    "Events",
    "RLock",
    "SignalsHeld",
    "above_standard",
    "allocate_lock",
    "get_ident",
    "is_alone",
    "pause",
    "start_new_thread",
]

TYPE_CHECKING = False  # importing typing would cost every process some milliseconds
if TYPE_CHECKING:
    from typing import Any

#: Lines kept in memory while the disk refuses them; it may take them later.
_UNWRITTEN_MAX = 256

_SIGNALS = valid_signals()


class Clock:
    """The clocks as they are when the interpreter starts: a program may stop or turn those in ``time``.

    In a class: freezegun replaces them wherever a module holds them.
    """

    unix_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)
    perf_counter_ns = staticmethod(time.perf_counter_ns)


class SignalsHeld:
    """Inside it no signal handler of the program runs in this thread, and threads begin deaf to signals.

    A handler that raises would otherwise leave our work half done. And a thread of ours that takes signals
    would die of one that the program has blocked to wait for it.
    """

    def __enter__(self) -> None:
        """Block them all."""
        self._before = pthread_sigmask(SIG_BLOCK, _SIGNALS)

    def __exit__(self, *_: object) -> None:
        """Put the old mask back; what came in between is delivered now."""
        pthread_sigmask(SIG_SETMASK, self._before)


def is_alone(own: int) -> bool:
    """Whether only this thread runs Python of the program's, so that no other one can be in a launch."""
    return all(
        thread == own or frame.f_globals.get("__name__", "").startswith(__package__)
        for thread, frame in sys._current_frames().items()
    )


def pause(seconds: float) -> None:
    """Wait; the program may have replaced what is in ``time``."""
    never = allocate_lock()
    never.acquire()
    never.acquire(timeout=seconds)


def above_standard(file: int) -> int:
    """The open file under a number from 3 on: where a program has closed 0, 1 or 2 it does not expect ours there."""
    low = []
    try:
        while file <= 2:
            low.append(file)
            file = os.dup(file)
    finally:
        for number in low:
            os.close(number)
    return file


class Events:
    """Appends events to ``<stem>.jsonl``. May be called from any thread.

    Its methods raise nothing but what a signal handler of the program's raises in them.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        # Two lives of one pid (exec, or a recycled number) must not meet.
        self.stem = os.path.join(folder, "%d-%d" % (os.getpid(), Clock.unix_ns()))
        self._lock = RLock()
        self._unwritten: "list[str]" = []
        self._said_hello = False

    def hello(self) -> None:
        """Say who this process is; once."""
        if self._said_hello:
            return
        self._said_hello = True
        rank = os.environ.get("RANK")
        self._append(
            '{"ev":"hello","t":%d,"pid":%d,"ppid":%d,"python":"%d.%d.%d","rank":%s,"argv":[%s]}'
            % (
                Clock.unix_ns(),
                os.getpid(),
                os.getppid(),
                *sys.version_info[:3],
                "null" if rank is None else _quoted(rank),
                ",".join(map(_quoted, getattr(sys, "orig_argv", getattr(sys, "argv", ()))[:64])),
            )
        )

    def event(self, **fields: "Any") -> None:
        """Append one event, with its time."""
        import json

        try:
            fields.setdefault("t", Clock.unix_ns())
            self._append(json.dumps(fields, separators=(",", ":"), ensure_ascii=False))
        except (ValueError, TypeError):
            pass

    def _append(self, line: str) -> None:
        try:
            with self._lock:
                # Taken out first: a signal handler may come in here again.
                lines, self._unwritten = [*self._unwritten, line], []
                if not self._write(lines):
                    # A long line must not keep a short one out, which may say why there is no room.
                    lines = [each for each in lines if len(lines) == 1 or not self._write([each])]
                    self._unwritten = (lines + self._unwritten)[:_UNWRITTEN_MAX]
        except Exception as error:
            from .interrupts import is_ours

            if not is_ours(error):
                raise

    def _write(self, lines: "list[str]") -> bool:
        data = "".join(line + "\n" for line in lines).encode("utf-8", "replace")
        try:
            flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
            file = above_standard(os.open(self.stem + ".jsonl", flags, 0o600))
        except OSError:
            return False
        try:
            begin = os.lseek(file, 0, os.SEEK_END)
            try:
                if os.write(file, data) == len(data):
                    return True
            except OSError:
                pass
            os.ftruncate(file, begin)  # a line cut short would spoil the next one
        except OSError:
            pass
        finally:
            os.close(file)
        return False


def _quoted(text: str) -> str:
    """A JSON string; json itself would be a dozen imports."""
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"%s"' % "".join(c if c >= " " else "\\u%04x" % ord(c) for c in text)
