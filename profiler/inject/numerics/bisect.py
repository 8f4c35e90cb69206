"""The first bad operator inside a module: its forward on fake tensors, then its operators on an input that was kept.

At the end of the program, or when it asks: never while its steps run. The generators of random numbers are put back,
what operators write to is written to copies; nothing of it is more than a note if it fails.
"""

import importlib
import sys
from contextlib import nullcontext

from .contents import contents_of, shown
from .inputs import Input
from .mirror import Refused
from .rerun import INPUTS_MAX, Rerun
from .tape import record

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any, Optional

    from .rerun import Found

#: All of it: the forward on fake tensors and the operators.
SECONDS_MAX = 5.0


def bisect(module: "Any", kept: Input) -> "dict[str, Any]":
    """The operator, as ``operator``, ``file``, ``line``, ``function``, ``inputs`` …, or ``why_not``.

    ``taken`` is what was kept, where it came to that.
    """
    taken: list[Any] = []
    try:
        with _RandomNumbers(kept.tensors):
            taken += _statistics(kept.tensors)
            tape = record(module, kept.args, kept.kwargs, lambda: _autocast(kept.autocast), SECONDS_MAX)
            run = Rerun(tape, kept.tensors)
            found = run.run()
    except Refused as why:
        return {"taken": taken, "why_not": "it cannot be run again: %s" % why}
    except Exception as error:
        text = str(error).strip().partition("\n")[0][:200]
        return {"taken": taken, "why_not": "it could not be run again: %s: %s" % (type(error).__name__, text)}
    return {"taken": taken, **_told(run, found)}


def _statistics(tensors: "list[Any]") -> "list[dict[str, Any]]":
    with sys.modules["torch"].no_grad():
        every = [(each, contents_of(each)) for each in tensors[:INPUTS_MAX]]
    return [shown(each, seen) for each, seen in every if seen is not None]


def _told(run: Rerun, found: "Optional[Found]") -> "dict[str, Any]":
    if found is not None:
        schema = found.op.function._schema
        name = schema.name + (".%s" % schema.overload_name if schema.overload_name else "")
        file, line, function = found.op.line
        return {
            "operator": name, "file": file, "line": line, "function": function, "before": found.before,
            "inputs": found.inputs, "output": found.output, "first_bad": found.seen.first_bad, "why_not": "",
        }  # fmt: skip
    if run.bad_given:
        return {"why_not": "%s was bad already" % run.bad_given}
    if run.stopped:
        return {"why_not": "the %d operators before %s gave fine values" % (run.ran, run.stopped.rstrip("."))}
    if run.gave_bad:
        return {"why_not": "it gives an infinite value that it was given, or puts in by intention"}
    return {"why_not": "run again on the same input, it gave no bad value: it depends on more than what it takes"}


class _RandomNumbers:
    """Puts the generators back to where they were."""

    def __init__(self, tensors: "list[Any]") -> None:
        self._torch = sys.modules["torch"]
        self._devices = {each.device for each in tensors if each.is_cuda}

    def __enter__(self) -> None:
        self._cpu = self._torch.get_rng_state()
        self._gpus = [(device, self._torch.cuda.get_rng_state(device)) for device in self._devices]
        random, numpy = sys.modules.get("random"), sys.modules.get("numpy.random")
        self._others = []
        if random is not None:
            self._others.append((random.setstate, random.getstate()))
        if numpy is not None:
            self._others.append((numpy.set_state, numpy.get_state()))

    def __exit__(self, *_: object) -> None:
        self._torch.set_rng_state(self._cpu)
        for device, state in self._gpus:
            self._torch.cuda.set_rng_state(state, device)
        for put, state in self._others:
            put(state)


def _autocast(kept: "Any") -> "Any":
    if kept is None:
        return nullcontext()
    autocast = importlib.import_module("torch.amp.autocast_mode").autocast
    return autocast(kept[0], dtype=kept[1], cache_enabled=False)
