"""Other profilers in the same process: yield CUPTI to them, resume when they are done.

torch.profiler (Kineto) gets no GPU events while we hold a subscription, and once it has run, our buffer
callbacks are gone: so we step aside before it prepares and register again after it has stopped.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FunctionType

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType
    from typing import Any

    from .agent import Agent


def watch_torch(agent: Agent, module: ModuleType) -> None:
    """Wrap ``torch.autograd.profiler``, which every torch.profiler session goes through."""

    def yield_to_it(*args: object) -> None:
        agent.end_operators()  # a thread has one profiler at a time, whatever it looks at
        if _uses_gpu(args):
            agent.host("torch.profiler", True)

    for name in ("_prepare_profiler", "_enable_profiler"):
        _around(module, name, before=yield_to_it)
    _around(module, "_disable_profiler", after=lambda *args: agent.host("torch.profiler", False))


def watch_torch_legacy(agent: Agent, module: ModuleType) -> None:
    """Wrap torch's first profiler, which is the one that we use for operators."""
    _around(module, "_enable_profiler_legacy", before=lambda *args: agent.end_operators())


def watch_torch_monitor(agent: Agent, module: ModuleType) -> None:
    """Wrap torch's own reader of CUPTI's buffers (torch 2.13 on), which may stay on between its sessions."""
    _around(module.CuptiMonitor, "start", before=lambda *args: agent.host("torch's CuptiMonitor", True))
    _around(module.CuptiMonitor, "stop", after=lambda *args: agent.host("torch's CuptiMonitor", False))


def watch_proton(agent: Agent, module: ModuleType) -> None:
    """Wrap ``triton.profiler.profile``: Proton holds CUPTI from start to finalize."""
    _around(module, "start", before=lambda *args: agent.host("triton.profiler", True))
    _around(module, "finalize", after=lambda *args: agent.host("triton.profiler", False))


def watch_cudart(agent: Agent, torch: ModuleType | None) -> bool:
    """Follow cudaProfilerStart and Stop where torch's programs call them; False when they do not go through torch.

    Better than CUPTI's callback of the same calls: on H200 with libcupti 13.0, no cudaGraphLaunch was recorded after
    recording had been switched on from inside that callback.
    """
    cudart = getattr(getattr(torch, "_C", None), "_cudart", None)
    if not hasattr(cudart, "cudaProfilerStart") or not hasattr(cudart, "cudaProfilerStop"):
        return False
    _around(cudart, "cudaProfilerStart", after=lambda *args: agent.set_condition("range", None))
    _around(cudart, "cudaProfilerStop", before=lambda *args: agent.set_condition("range", "after cudaProfilerStop"))
    return True


def watch_dynamo(agent: Agent, module: ModuleType) -> None:
    """Wrap ``torch._dynamo.eval_frame``: every torch.compile makes an OptimizeContext before it traces anything."""
    hide_from_dynamo()
    context = getattr(module, "OptimizeContext", None)
    if context is None:
        agent.compiler_came()
        return
    _around(context, "__init__", before=lambda *_: _compiler_comes(agent))


def watch_dynamo_capture(agent: Agent, module: ModuleType) -> None:
    """Wrap ``torch._dynamo.convert_frame``: torch.export traces a model whole, and makes no OptimizeContext."""
    _around(module, "fullgraph_capture", before=lambda *_: _compiler_comes(agent))


def _compiler_comes(agent: Agent) -> None:
    if not agent.compiler_used:
        hide_from_dynamo()  # what was loaded since
    agent.compiler_came()


def hide_from_dynamo() -> None:
    """Have no function of ours compiled when CUPTI calls it back in the middle of a program that is."""
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is None:
        return
    package = __name__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(package + "."):
            waiting = list(_functions(vars(module), module.__name__))
            while waiting:
                code = waiting.pop()
                skip(code)
                waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _functions(names: Mapping[str, Any], module: str) -> Iterator[CodeType]:
    for value in list(names.values()):
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(value, type) and value.__module__ == module:
            yield from _functions(vars(value), module)
        elif isinstance(inner, FunctionType) and inner.__module__ == module:
            yield inner.__code__


def _uses_gpu(arguments: tuple[object, ...]) -> bool:
    """Whether a Kineto session records GPU work: (config, activities), activities a set of enums."""
    activities: Any = arguments[1] if len(arguments) > 1 else ()
    return not activities or any("CPU" not in str(activity) for activity in activities)


def _around(
    owner: Any,
    name: str,
    before: Callable[..., object] | None = None,
    after: Callable[..., object] | None = None,
) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if before:
            before(*args)
        try:
            return original(*args, **kwargs)
        finally:
            if after:
                after(*args)

    setattr(owner, name, wrapper)
