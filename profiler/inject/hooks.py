"""Wait for CUDA: watch imports, and start the agent at the first CUDA use.

torch is caught at its lazy initialisation, so that importing it costs nothing and a process that never
touches CUDA never loads CUPTI: fork-based workers stay safe. Other packages are caught when imported.

Until then nothing but built-in modules is imported here: the agent itself is loaded when it is needed.
"""

import atexit
import os
import sys

from . import ENV_SPOOL
from .events import Events, allocate_lock

TYPE_CHECKING = False  # importing typing would cost every process some milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Optional

    from .agent import Agent

_events: "Events"
_agent: "Optional[Agent]" = None
_making = allocate_lock()
_ENDINGS_MAX = 100  # a timer may raise again and again
_passed_over = False  # a CUDA package was imported, and not taken for the first CUDA use


def install() -> None:
    """Report this process and begin to watch imports."""
    global _events
    _events = Events(os.environ[ENV_SPOOL])
    _events.hello()
    # Registered before anything of the program's: it runs after all of that.
    atexit.register(_finish)
    os.register_at_fork(after_in_child=_forked)
    sys.meta_path.insert(0, _Watcher())


def the_agent() -> "Agent":
    """This process's agent, made at its first use."""
    global _agent
    with _making:
        if _agent is None:
            from .agent import Agent

            _agent = Agent(_events)
        return _agent


def _finish() -> None:
    # A signal handler of the program may raise here. Nobody is left to catch that, and our end must be whole. One that
    # comes again and again may also hit the lines that catch the one before.
    try:
        _insist()
    except BaseException:
        _insist()


def _insist() -> None:
    for _ in range(_ENDINGS_MAX):
        try:
            _end()
            break
        except BaseException:
            pass


def _end() -> None:
    if _agent is not None:
        _agent.finish()
    if _passed_over and not (_agent is not None and _agent.activated) and _has_a_context():
        _events.event(ev="fault", where="hooks", text="CUDA was used, but not by torch, which it was expected of")


def _has_a_context() -> bool:
    """Whether this process has one on a GPU: to ask how many GPUs there are, as programs of the CPU do, takes none."""
    import ctypes

    count, flags, active, current = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int(), ctypes.c_void_p()
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:  # not initialised
            return False
        for device in range(count.value):
            driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
            if active.value:
                return True
        return driver.cuCtxGetCurrent(ctypes.byref(current)) == 0 and bool(current.value)
    except (OSError, AttributeError):
        return False


def _forked() -> None:
    global _events, _making
    _making = allocate_lock()
    _events = Events(_events.folder)
    marks = sys.modules.get("%s.marks" % __package__)
    if marks is not None:
        marks.forget()
    if _agent is not None:
        _agent.forked(_events)


def _after_torch_cuda(module: "ModuleType") -> None:
    # Queued calls run at the end of torch's lazy initialisation, at once if that has happened.
    module._lazy_call(the_agent().activate)


def _after_torch(_module: "ModuleType") -> None:
    the_agent().torch_came()


def _activate(_module: "ModuleType") -> None:
    the_agent().activate()


def _activate_without_torch(_module: "ModuleType") -> None:
    # torch imports these for itself, long before CUDA is used: its own hook is the right one.
    global _passed_over
    if "torch" in sys.modules:
        _passed_over = True
    else:
        the_agent().activate()


def _after_torch_profiler(module: "ModuleType") -> None:
    from . import guests

    guests.watch_torch(the_agent(), module)


def _after_torch_legacy(module: "ModuleType") -> None:
    from . import guests

    guests.watch_torch_legacy(the_agent(), module)


def _after_torch_monitor(module: "ModuleType") -> None:
    from . import guests

    guests.watch_torch_monitor(the_agent(), module)


def _after_proton(module: "ModuleType") -> None:
    from . import guests

    guests.watch_proton(the_agent(), module)


def _after_dynamo(module: "ModuleType") -> None:
    from . import guests

    guests.watch_dynamo(the_agent(), module)


def _after_dynamo_capture(module: "ModuleType") -> None:
    from . import guests

    guests.watch_dynamo_capture(the_agent(), module)


def _after_torch_nvtx(module: "ModuleType") -> None:
    from . import nvtx

    nvtx.watch_torch(module)


def _after_nvtx(module: "ModuleType") -> None:
    from . import nvtx

    nvtx.watch_package(module)


#: Module -> what to do when it has been imported.
_WATCHED: "dict[str, Callable[[ModuleType], None]]" = {
    "torch": _after_torch,
    "torch.autograd.profiler": _after_torch_profiler,
    "torch.autograd.profiler_legacy": _after_torch_legacy,
    "triton.profiler.profile": _after_proton,
    "torch.profiler._cupti_monitor": _after_torch_monitor,
    "torch._dynamo.eval_frame": _after_dynamo,
    "torch._dynamo.convert_frame": _after_dynamo_capture,
    "torch.cuda": _after_torch_cuda,
    "torch.cuda.nvtx": _after_torch_nvtx,
    "nvtx.nvtx": _after_nvtx,
    "cupy": _activate,
    "numba.cuda": _activate,
    "jax": _activate,
    "cuda.bindings.driver": _activate_without_torch,
    "cuda.cuda": _activate_without_torch,  # cuda-bindings before 12.6
    "triton": _activate_without_torch,
}


class _Watcher:
    """A finder that lets the others find a watched module and wraps its loader."""

    def find_spec(
        self, name: str, path: "Optional[Sequence[str]]" = None, target: "Optional[ModuleType]" = None
    ) -> "Optional[ModuleSpec]":
        """The spec that the next finders give, its loader wrapped; None for every other module."""
        action = _WATCHED.get(name)
        if action is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: "Any" = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    _wrap(spec.loader, name, action)
                return spec  # type: ignore[no-any-return]
        return None


def _wrap(loader: "Loader", name: str, action: "Callable[[ModuleType], None]") -> None:
    original = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        original(module)
        if module.__name__ != name:  # a loader of many modules
            return
        # Taken off: the program may inspect, or reload through, its own loader.
        try:
            del loader.exec_module
        except AttributeError:
            pass
        try:
            action(module)
        except Exception as error:
            _events.event(ev="fault", where="hook for %s" % name, text="%s: %s" % (type(error).__name__, error))

    # Tracebacks leave importlib's frames out: let ours be one of them.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    try:
        loader.exec_module = exec_module  # type: ignore[method-assign]
    except AttributeError:  # a loader with slots: the module is imported untraced
        _events.event(ev="note", text="the loader of %s cannot be watched" % name)
