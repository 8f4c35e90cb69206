"""Finds the factory and calls it; whatever goes wrong there becomes one sentence that names its place."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

Made = tuple[Any, tuple[Any, ...], dict[str, Any]]  # model, args, kwargs

_PACKAGE = str(Path(__file__).parent)
_PYTHON = str(Path(os.__file__).parent)
_OTHER_PYTHON = f"; {sys.executable} has no torch (`spikeprof graph --python` names another one)"
_LONGEST = 300  # characters of a message


class Refused(Exception):
    """There is no model to look at; the message says why."""


def make(spec: str) -> Any:
    """Call ``module:function`` or ``path/file.py:function``. Raises Refused; KeyboardInterrupt passes."""
    where, _, name = spec.rpartition(":")
    if not {"", str(Path.cwd())} & {*sys.path}:  # as `python -m` has it
        sys.path.insert(0, str(Path.cwd()))
    found: Any = _guarded(f"{where} cannot be imported", _load, where)
    for part in name.split("."):
        if not hasattr(found, part):
            raise Refused(f"{where} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise Refused(f"{spec} is of type {type(found).__name__}, no function that makes a model")
    return _guarded(f"{spec} failed", found)


def _load(where: str) -> ModuleType:
    if not (where.endswith(".py") or os.sep in where):
        return importlib.import_module(where)
    path = Path(where).resolve()
    if not path.is_file():
        raise Refused(f"there is no file {where}")
    sys.path.insert(0, str(path.parent))  # as `python file.py` has it
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Refused(f"{where} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _guarded(what: str, call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (KeyboardInterrupt, Refused):
        raise
    except SystemExit as end:
        raise Refused(f"{what}: it called sys.exit({'' if end.code is None else repr(end.code)})") from end
    except BaseException as error:
        if os.environ.get("SPIKEPROF_DEBUG"):
            traceback.print_exc()
        no_torch = isinstance(error, ImportError) and error.name == "torch"
        raise Refused(f"{what}: {one_line(error)}{place(error)}{_OTHER_PYTHON if no_torch else ''}") from error


def one_line(error: BaseException) -> str:
    """``ValueError: what it says``, on one line and not too long."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1].rstrip() + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place(error: BaseException, libraries: Sequence[str] = ()) -> str:
    """`` (model.py:12, in build)``: the innermost frame that is not ours, Python's own or in one of these folders."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PACKAGE, "<", *libraries)) and not _is_pythons(frame.filename)
    ]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _is_pythons(path: str) -> bool:
    return path.startswith(_PYTHON) and "-packages" + os.sep not in path


def checked(spec: str, made: Any) -> Made:
    """What the factory returned as (model, args, kwargs). Raises Refused."""
    try:
        import torch
    except ImportError as error:
        raise Refused(f"{one_line(error)}{_OTHER_PYTHON}") from error

    wanted = "it must return (model, args) or (model, args, kwargs)"
    if not isinstance(made, Sequence) or isinstance(made, str) or len(made) not in (2, 3):
        raise Refused(f"{spec} returned {type(made).__name__}: {wanted}")
    # What torch.compile returns runs the model that it holds: the graph is of that.
    model, args = getattr(made[0], "_orig_mod", made[0]), made[1]
    kwargs = made[2] if len(made) == 3 else {}
    if not isinstance(model, torch.nn.Module):
        raise Refused(f"{spec} returned {type(model).__name__} as the model: it must be a torch.nn.Module")
    if not isinstance(args, (tuple, list)):
        raise Refused(f"{spec} returned {type(args).__name__} as args: it must be a tuple of the model's arguments")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise Refused(f"{spec} returned {type(kwargs).__name__} as kwargs: it must be a dict")
    return model, tuple(args), dict(kwargs or {})
