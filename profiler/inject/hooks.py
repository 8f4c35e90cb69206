"""Wait for CUDA: watch imports, and start the agent at the first CUDA use.

torch is caught at its lazy initialisation, so that importing it costs nothing and a process that never
touches CUDA never loads CUPTI: fork-based workers stay safe. Other packages are caught when imported.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from types import ModuleType
    from typing import Any

    from .agent import Agent

_agent: Agent


def install() -> None:
    """Make this process's agent and begin to watch imports."""
    global _agent
    from .agent import Agent

    _agent = Agent()
    sys.meta_path.insert(0, _Watcher())


def _after_torch_cuda(module: ModuleType) -> None:
    # Queued calls run at the end of torch's lazy initialisation, at once if that has happened.
    module._lazy_call(_agent.activate)


def _activate(_module: ModuleType) -> None:
    _agent.activate()


def _activate_without_torch(_module: ModuleType) -> None:
    # torch imports triton for itself, before CUDA is used: its own hook is the right one.
    if "torch" not in sys.modules:
        _agent.activate()


def _after_torch_profiler(module: ModuleType) -> None:
    from . import guests

    guests.watch_torch(_agent, module)


def _after_proton(module: ModuleType) -> None:
    from . import guests

    guests.watch_proton(_agent, module)


def _after_dynamo(module: ModuleType) -> None:
    """Every torch.compile makes an OptimizeContext before it traces anything; just importing dynamo makes none."""
    context = getattr(module, "OptimizeContext", None)
    if context is None:
        _agent.compiler_came()
        return
    original = context.__init__

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        _agent.compiler_came()
        original(*args, **kwargs)

    context.__init__ = init


#: Module -> what to do when it has been imported.
_WATCHED: dict[str, Callable[[ModuleType], None]] = {
    "torch.autograd.profiler": _after_torch_profiler,
    "triton.profiler.profile": _after_proton,
    "torch._dynamo.eval_frame": _after_dynamo,
    "torch.cuda": _after_torch_cuda,
    "cupy": _activate,
    "numba.cuda": _activate,
    "jax": _activate,
    "cuda.bindings.driver": _activate,
    "cuda.cuda": _activate,  # cuda-bindings before 12.6
    "triton": _activate_without_torch,
}


class _Watcher(importlib.abc.MetaPathFinder):
    """Lets the other finders find a watched module and wraps its loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the next finders give, its loader wrapped; None for every other module."""
        action = _WATCHED.get(name)
        if action is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    _wrap(spec.loader, action)
                return spec
        return None


def _wrap(loader: Loader, action: Callable[[ModuleType], None]) -> None:
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # Restored first: the program may inspect, or reload through, its own loader.
        try:
            del loader.exec_module
        except AttributeError:
            pass
        original(module)
        try:
            action(module)
        except Exception as error:
            _agent.fault("hook", error)

    try:
        loader.exec_module = exec_module  # type: ignore[method-assign]
    except AttributeError:  # a loader with slots: the module is imported untraced
        _agent.spool.event(ev="note", text="the loader of %s cannot be watched" % action.__name__)
