"""The one seam for annotations: the engine names its phases here, and a profiler may replace what that does.

``mark("decode", step=3, batch=8)`` does nothing by itself. ``replace(hook)`` puts a context manager of the caller's
choice, such as an NVTX range, in its place, for all threads; it must be cheap, and it must not raise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Hook = Callable[..., AbstractContextManager[object]]

_NOTHING = nullcontext()


def _no_hook(_name: str, **_ids: int | str) -> AbstractContextManager[object]:
    return _NOTHING


_hook: list[Hook] = [_no_hook]


def mark(name: str, **ids: int | str) -> AbstractContextManager[object]:
    """A context manager around a phase of the engine; ``ids`` say which one, or how large: ``step``, ``batch``."""
    return _hook[0](name, **ids)


def replace(hook: Hook | None) -> Hook:
    """Let ``hook(name, **ids)`` make the context managers from now on; None = nothing. Returns the one before."""
    before = _hook[0]
    _hook[0] = hook or _no_hook
    return before
