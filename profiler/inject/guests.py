"""Other profilers in the same process: yield CUPTI to them, resume when they are done.

torch.profiler (Kineto) gets no GPU events while we hold a subscription, and once it has run, our buffer
callbacks are gone: so we step aside before it prepares and register again after it has stopped.
"""

from __future__ import annotations

import functools


def watch_torch(agent, module):
    """Wrap ``torch.autograd.profiler``, which every torch.profiler session goes through."""
    for name in ("_prepare_profiler", "_enable_profiler"):
        _around(module, name, before=lambda *args: _uses_gpu(args) and agent.set_condition("yielded", "torch.profiler"))
    _around(module, "_disable_profiler", after=lambda *args: agent.set_condition("yielded", None))


def watch_proton(agent, module):
    """Wrap ``triton.profiler.profile``: Proton holds CUPTI from start to finalize."""
    _around(module, "start", before=lambda *args: agent.set_condition("yielded", "triton.profiler"))
    _around(module, "finalize", after=lambda *args: agent.set_condition("yielded", None))


def _uses_gpu(arguments):
    """Whether a Kineto session records GPU work: (config, activities), activities a set of enums."""
    activities = arguments[1] if len(arguments) > 1 else ()
    return not activities or any("CPU" not in str(activity) for activity in activities)


def _around(module, name, before=None, after=None):
    original = getattr(module, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if before:
            before(*args)
        try:
            return original(*args, **kwargs)
        finally:
            if after:
                after(*args)

    setattr(module, name, wrapper)
