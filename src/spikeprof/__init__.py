"""spikeprof: GPU profiling and bottleneck diagnosis for LLM inference.

``spikeprof run -- python infer.py`` records an unchanged program; ``open_trace`` reads what it wrote.
Importing this package is cheap: nothing below is loaded before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spikeprof.profiler.annotate import request, stage, step
    from spikeprof.profiler.importers import open_trace
    from spikeprof.profiler.trace import Trace
    from spikeprof.profiler.watching import watch
    from spikeprof.reports.coverage import register_postprocessor

__version__ = "0.1.0"
__all__ = ["Trace", "__version__", "open_trace", "register_postprocessor", "request", "stage", "step", "watch"]

_LAZY = {
    "open_trace": "spikeprof.profiler.importers",
    "Trace": "spikeprof.profiler.trace",
    "watch": "spikeprof.profiler.watching",
    "register_postprocessor": "spikeprof.reports.coverage",
    **dict.fromkeys(("request", "stage", "step"), "spikeprof.profiler.annotate"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        found = getattr(import_module(_LAZY[name]), name)
        globals()[name] = found  # the next use must cost nothing: markers stand in inner loops
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
