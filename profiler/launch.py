"""The child: its environment, its signals, its exit code, and why it was not traced if it was not."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from spikeprof.profiler import inject
from spikeprof.profiler.errors import CommandNotExecutable, CommandNotFound

#: Signals that ask a program to end or to reread itself: passed on to the child.
_FORWARDED = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


def environment(spool: Path, control: str, options: Mapping[str, object]) -> dict[str, str]:
    """The child's environment: ours, with the agent first on PYTHONPATH and the user's entries kept."""
    env = dict(os.environ)
    env[inject.ENV_SPOOL] = str(spool)
    env[inject.ENV_CONTROL] = control
    env[inject.ENV_OPTIONS] = json.dumps(options)
    given = env.get("PYTHONPATH")
    env["PYTHONPATH"] = os.pathsep.join([inject.SITE_FOLDER, *([given] if given else [])])
    return env


def run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the command with our own stdin, stdout and stderr; returns its exit code, 128 + n for signal n.

    Ctrl-C reaches the child through the terminal; it decides what to do about it, and we wait. Without a
    terminal an interrupt was sent to us alone, and is passed on like any other signal.
    Raises CommandNotFound or CommandNotExecutable; nothing was started then.
    """
    previous: dict[int, object] = {}
    # Handlers must stand before the child does, or a signal in between would be lost on it.
    child: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if not child:
            early.append(number)
        elif child[0].poll() is None:
            with suppress(PermissionError):  # it runs as another user, as under sudo
                child[0].send_signal(number)

    for number in (*_FORWARDED, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: the child is to ignore it, too
            by_terminal = number == signal.SIGINT and _has_terminal()
            previous[number] = signal.signal(number, (lambda *_: None) if by_terminal else forward)
    # Where children are ignored the system keeps no exit code of theirs: wait for ours, and let it ignore its own.
    ignores_children = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if ignores_children:
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        child.append(_start(command, env, _ignore_children if ignores_children else None))
        for number in early:
            forward(number, None)
        code = child[0].wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
    return code if code >= 0 else 128 - code


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _ignore_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _start(
    command: Sequence[str], env: Mapping[str, str], prepare: Callable[[], None] | None
) -> subprocess.Popen[bytes]:
    name = command[0]
    try:
        # Descriptors that we were started with are the child's; ours close themselves.
        return subprocess.Popen(list(command), env=dict(env), close_fds=False, preexec_fn=prepare)  # noqa: PLW1509 (rare)
    except FileNotFoundError as error:
        if Path(name).exists():  # a script whose interpreter is missing
            raise CommandNotExecutable(
                f"cannot run {name}: its interpreter is missing; nothing was recorded"
            ) from error
        raise CommandNotFound(f"command not found: {name}; nothing was recorded") from error
    except OSError as error:
        raise CommandNotExecutable(f"cannot run {name}: {error.strerror}; nothing was recorded") from error


def why_not_traced(command: Sequence[str]) -> str:
    """Why no Python process of this command reported to us, as far as its words tell."""
    words = [Path(command[0]).name, *command[1:]]
    python = next((i for i, w in enumerate(words) if Path(w).name.startswith(("python", "pypy"))), None)
    if python is not None:
        for option, *_ in interpreter_options(words[python + 1 :]):
            blocking = re.match("-[^-WX]*?([SIE])", option)
            if blocking:
                return f"python -{blocking[1]} ignores PYTHONPATH or sitecustomize, through which the agent is started"
        return "the Python process ended before it could report, or its environment was replaced"
    found = shutil.which(command[0])
    if found and _is_script(found):
        return f"{command[0]} started no Python process that kept PYTHONPATH"
    return f"{command[0]} is not a Python program; only Python processes are traced"


def interpreter_options(words: Sequence[str]) -> list[tuple[str, ...]]:
    """The options of a Python command line that are the interpreter's own: what stands before the script, -c, -m or -.

    Each as it was written, with its value where that is a word of its own: ``-sE -W ignore -Ic code`` gives
    ``("-sE",)``, ``("-W", "ignore")``, ``("-I",)``.
    """
    options: list[tuple[str, ...]] = []
    rest = iter(words)
    for word in rest:
        if word == "-" or not word.startswith("-"):
            break
        # What follows -W or -X in the same word is its value, whatever letters that has.
        flags = word if word.startswith("--") else re.split("[WX]", word, maxsplit=1)[0]
        program = None if word.startswith("--") else re.search("[cm]", flags)
        if program:
            options += [(flags[: program.start()],)] if program.start() > 1 else []
            break
        takes_next = word == "--check-hash-based-pycs" or word in (f"{flags}W", f"{flags}X")
        options.append((word, *(itertools.islice(rest, 1) if takes_next else ())))
    return options


def _is_script(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def describe(command: Sequence[str]) -> str:
    """A short name for the trace folder: the script or module that is run."""
    words = list(command)
    for i, word in enumerate(words):
        if word == "-m" and i + 1 < len(words):
            return words[i + 1].rpartition(".")[2] or "run"
        if word.endswith(".py"):
            return Path(word).stem
    return Path(words[0]).name if words else Path(sys.executable).name
