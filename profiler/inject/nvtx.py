"""The program's NVTX ranges, kept as its own marks are: those of ``torch.cuda.nvtx`` and of the package ``nvtx``.

Python's side of them is wrapped. An NVTX tool proper is loaded through an environment variable, which every child of
the program would inherit, and CUPTI's records of ranges cost more than what they surround. What C++ pushes is not seen.
"""

from __future__ import annotations

import functools

from .events import get_ident
from .interrupts import is_ours

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from .marks import Mark

#: Ranges that one thread may have open, and all threads between start and end: what is beyond is not followed.
_OPEN_MAX = 256

_pushed: dict[int, list[Mark | None]] = {}  # of each thread; None for what is beyond
_started: dict[Any, Mark] = {}  # by the handle that the program was given


def watch_torch(module: ModuleType) -> None:
    """Wrap ``torch.cuda.nvtx``; its context manager and decorator ``range`` goes through push and pop."""
    _after(module, "range_push", lambda _depth, message: _push(message))
    _after(module, "range_pop", lambda _depth: _pop())
    _after(module, "range_start", _start)
    _after(module, "range_end", lambda _none, handle: _end(handle))


def watch_package(module: ModuleType) -> None:
    """Wrap the package's ranges. Without an NVTX tool, as here, it hands a decorated function back as it was."""
    _after(module, "push_range", lambda _none, message=None, *_, **__: _push(message))
    _after(module, "pop_range", lambda _none, *_, **__: _pop())
    _after(module.annotate, "__enter__", lambda _self, annotation: _push(annotation.init_args[0]))
    _after(module.annotate, "__exit__", lambda _none, *_: _pop())
    decorate = module.annotate.__call__

    def __call__(annotation: Any, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            _push(annotation.init_args[0] or getattr(function, "__name__", ""))
            try:
                return function(*args, **kwargs)
            finally:
                _pop()

        return decorate(annotation, ranged)

    module.annotate.__call__ = functools.wraps(decorate)(__call__)


def _after(owner: Any, name: str, then: Callable[..., object]) -> None:
    """Have ``then(result, *arguments)`` called after the program's own call; it is not called where that fails."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            then(result, *args, **kwargs)
        except Exception as error:  # a fault of ours is not the program's
            if not is_ours(error):
                raise
        return result

    setattr(owner, name, wrapper)


def _mark(message: object) -> Mark:
    from .marks import Mark

    made = Mark("nvtx", message if type(message) is str else "", {})
    made.__enter__()
    return made


def _push(message: object) -> None:
    pushed = _pushed.setdefault(get_ident(), [])
    pushed.append(_mark(message) if len(pushed) < _OPEN_MAX else None)


def _pop() -> None:
    pushed = _pushed.get(get_ident())
    mark = pushed.pop() if pushed else None
    if mark is not None:
        mark.__exit__()


def _start(handle: Any, message: object) -> None:
    if len(_started) < _OPEN_MAX:
        _started[handle] = _mark(message)


def _end(handle: Any) -> None:
    mark = _started.pop(handle, None)
    if mark is not None:
        mark.__exit__()
