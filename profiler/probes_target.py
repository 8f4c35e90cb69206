"""What works for the Python of the program under test, which need not be the one that runs spikeprof."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from spikeprof.profiler.errors import CommandNotFound, UsageError
from spikeprof.profiler.inject import SITE_FOLDER
from spikeprof.profiler.launch import interpreter_options
from spikeprof.profiler.probes import Probe
from spikeprof.profiler.target_probe import MARK

OLDEST_PYTHON = (3, 9)
_TIMEOUT_SECONDS = 60
_INTERPRETER = re.compile(r"(python|pypy)[\d.]*(\.exe)?")


def default_command() -> list[str]:
    """The Python that a user would type; spikeprof's own where PATH has none."""
    return [shutil.which("python") or shutil.which("python3") or sys.executable]


def target_probes(command: list[str]) -> list[Probe]:
    """Injection, libcupti and torch for the Python that ``command`` starts.

    ``command`` is an interpreter with its flags, or a Python script with a ``#!`` line (``vllm``, ``torchrun``);
    what follows is ignored. Only the interpreter is started, never the program.
    Raises CommandNotFound, or UsageError when the command is no Python.
    """
    interpreter = interpreter_of(command)
    try:
        facts = _ask(interpreter)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        detail = f"{shlex.join(interpreter)} does not answer: {error}"
        return [Probe("target Python", "no", detail, "name another one: spikeprof doctor -- PYTHON", needed=True)]
    if tuple(facts["version"]) < OLDEST_PYTHON:
        return [_python(facts, interpreter)]
    return [_python(facts, interpreter), _libcupti(facts), _torch(facts)]


def interpreter_of(command: list[str]) -> list[str]:
    """The interpreter and its flags that running ``command`` would start. Raises CommandNotFound, UsageError."""
    found = shutil.which(command[0])
    if found is None:
        raise CommandNotFound(f"{command[0]}: command not found")
    if _INTERPRETER.fullmatch(Path(found).name):
        return [found, *itertools.chain.from_iterable(interpreter_options(command[1:]))]
    with Path(found).open("rb") as file:
        first = file.readline(512)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    if not words or not _INTERPRETER.fullmatch(Path(words[0]).name):
        raise UsageError(f"{command[0]} is neither a Python interpreter nor a Python script: name the Python it uses")
    return interpreter_of(words)


def _ask(interpreter: list[str]) -> dict[str, Any]:
    """Run the probe script in the interpreter, injected as ``spikeprof run`` would."""
    script = Path(__file__).with_name("target_probe.py").read_text(encoding="utf-8")
    before = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SITE_FOLDER, *([before] if before else [])])}
    run = subprocess.run(
        [*interpreter, "-c", script, str(Path(SITE_FOLDER).parent)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        said = run.stderr.strip().splitlines()
        raise ValueError(said[-1] if said else f"it ended with code {run.returncode}")
    facts: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return facts


def _python(facts: dict[str, Any], interpreter: list[str]) -> Probe:
    name = "target Python"
    version = ".".join(map(str, facts["version"]))
    which = f"{version} ({facts['executable']})"
    if tuple(facts["version"]) < OLDEST_PYTHON:
        return Probe(name, "no", f"{which} is older than 3.9", "use a newer Python", needed=True)
    if not facts["injected"]:
        flags = " ".join(interpreter[1:])
        why = (
            "skips sitecustomize (-S)"
            if facts["no_site"]
            else "ignores PYTHONPATH (-I or -E)"
            if facts["ignore_environment"]
            else "did not run our sitecustomize from PYTHONPATH"
        )
        fix = f"start the program without {flags}" if flags else "start the program with an unchanged environment"
        return Probe(name, "no", f"{which} {why}: it would run untraced", fix, needed=True)
    chained = f"; {facts['sitecustomize']} is run, too" if facts["sitecustomize"] else ""
    return Probe(name, "ok", f"{which} loads the agent{chained}", needed=True)


def _libcupti(facts: dict[str, Any]) -> Probe:
    name = "target libcupti"
    if "cupti_path" not in facts:
        return Probe(
            name,
            "no",
            facts.get("cupti_problem", "not found"),
            "torch with CUDA brings it; else pip install nvidia-cuda-cupti there, or set CUDA_HOME",
            needed=True,
        )
    if "cupti_version" in facts:
        return Probe(name, "ok", f"version {facts['cupti_version']} ({facts['cupti_path']})", needed=True)
    return Probe(name, "degraded", f"{facts['cupti_path']}: {facts['cupti_version_problem']}", needed=True)


def _torch(facts: dict[str, Any]) -> Probe:
    if not facts["torch_path"]:
        return Probe("target torch", "degraded", "torch is not installed there; other CUDA packages are traced, too")
    version = facts["torch_version"]
    if "+cpu" in version:
        fix = "install a CUDA build of torch"
        return Probe("target torch", "degraded", f"{version} is a CPU build: it does no GPU work", fix)
    return Probe("target torch", "ok", version or facts["torch_path"])
