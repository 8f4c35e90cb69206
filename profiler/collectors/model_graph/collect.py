"""Reads a model's graph in a process of its own, which may print, crash, exit or hang as it likes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spikeprof.profiler.errors import CommandNotFound, InputError, UsageError

WAYS = ("auto", "export", "fx")
DEFAULT_RUNS = 10
NOT_ASKED = "not asked for (--no-time)"

_CHILD = Path(__file__).with_name("child")
_PATIENCE_SECONDS = 2.0
_FACTORY = re.compile(r".+:[^\W\d]\w*(\.[^\W\d]\w*)*")

#: Loads the folder as a private package: the program's own modules may be called anything.
_START = """
import importlib.util, json, os, sys
folder, options = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    "_spikeprof_graph", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
package = sys.modules["_spikeprof_graph"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from _spikeprof_graph.main import main
try:
    code = main(json.loads(options))
except KeyboardInterrupt:
    code = 130
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # whatever threads the model's libraries still have
"""


@dataclass(frozen=True, slots=True)
class Read:
    """A graph as it was read: descriptions of its nodes, its times (none: why not), and what else was told of it."""

    name: str
    via: str
    nodes: Sequence[dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    not_timed: str = ""
    runs_count: int = 0


def is_factory(text: str) -> bool:
    """Whether the text has the form ``module:function`` or ``path/file.py:function``."""
    return _FACTORY.fullmatch(text) is not None


def check_factory(text: str) -> None:
    """Raises UsageError where the text names no factory."""
    if not is_factory(text):
        raise UsageError(f"{text!r} names no factory: write package.module:function or path/file.py:function")


def read_factory(
    factory: str, python: Sequence[str] = (sys.executable,), via: str = "auto", runs: int = DEFAULT_RUNS
) -> Read:
    """Call a factory in the given Python, read its model's graph and time its nodes ``runs`` times (0 = not).

    What the factory prints goes to standard error. Raises InputError when there is no graph, CommandNotFound when
    there is no such Python, UsageError for what can be neither.
    """
    check_factory(factory)
    with tempfile.TemporaryDirectory(prefix="spikeprof-graph-") as folder:
        result = Path(folder, "result.jsonl")
        options = json.dumps({"factory": factory, "via": via, "runs": runs, "result": str(result)})
        code = _run([*python, "-c", _START, str(_CHILD), options])
        told: dict[str, Any] = {}
        for line in _lines(result):
            told.update(line)
    if "failed" in told:
        raise InputError(f"no graph: {told['failed']}")
    stage = told.get("stage", "starting")
    if "graph" not in told:
        raise InputError(f"no graph: the process that reads it {_ending(code)} while {stage}")
    facts = told["graph"]
    why = told.get("not_timed", "")
    if runs and not why and "timing" not in told:
        why = f"the process {_ending(code)} while {stage}"
    return Read(
        factory,
        facts.pop("via"),
        facts.pop("nodes"),
        facts,
        told.get("timing", {}),
        why if runs else NOT_ASKED,
        runs if "timing" in told else 0,
    )


def _run(command: Sequence[str]) -> int:
    """Run to the end; an interrupt ends the child, too, whatever it does about it. Raises CommandNotFound."""
    try:
        # Standard output is ours alone: what the child prints there goes beside it.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=_stderr())
    except OSError as error:
        raise CommandNotFound(f"cannot start {command[0]}: {error.strerror}") from error
    try:
        return child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _stderr() -> int:
    try:
        os.fstat(2)
    except OSError:  # started with it closed
        return subprocess.DEVNULL
    return 2


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of the result; a last one that was cut off is left out."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
