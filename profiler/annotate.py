"""Markers for engines: ``spikeprof.step(...)``, ``request(...)``, ``stage(...)`` name stretches of host time.

    with spikeprof.step("decode", batch=8, tokens=8):
        ...

Under ``spikeprof run`` they become ranges of the trace; otherwise they do nothing, which takes a third of a
microsecond. Attributes carry OpenTelemetry-style names (``llm.request_id``, ``llm.token_usage.total``). A range belongs
to the thread that enters and leaves it. Needs nothing but the standard library.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

Value = str | int | float | bool

_NOTHING = nullcontext()


def _recorder() -> type | None:
    """What makes ranges in a process that ``spikeprof run`` records; None elsewhere."""
    if "_spikeprof" not in sys.modules:
        return None
    try:
        from _spikeprof.marks import Mark  # type: ignore[import-not-found]
    except ImportError:  # an agent older than this package
        return None
    found: type = Mark
    return found


_mark = _recorder()


def step(
    kind: str = "step", *, batch: int | None = None, tokens: int | None = None, **attributes: Value
) -> AbstractContextManager[None]:
    """One step of the engine, of a kind such as ``prefill`` or ``decode``: sequences in it, and tokens it works on."""
    if _mark is None:
        return _NOTHING
    if batch is not None:
        attributes["llm.batch_size"] = batch
    if tokens is not None:
        attributes["llm.token_usage.total"] = tokens
    return _mark("step", kind, attributes)  # type: ignore[no-any-return]


def request(
    request_id: Value, *, request_class: str | None = None, **attributes: Value
) -> AbstractContextManager[None]:
    """Work on one request; ``request_class`` such as ``realtime``, ``interactive``, ``batch``."""
    if _mark is None:
        return _NOTHING
    attributes["llm.request_id"] = request_id
    if request_class is not None:
        attributes["llm.request_class"] = request_class
    return _mark("request", str(request_id), attributes)  # type: ignore[no-any-return]


def stage(name: str, **attributes: Value) -> AbstractContextManager[None]:
    """A stage of a step or request, such as ``sampling`` or ``detokenise``."""
    if _mark is None:
        return _NOTHING
    return _mark("stage", name, attributes)  # type: ignore[no-any-return]
