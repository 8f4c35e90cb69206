"""The module that gave the first bad value, and the one around it: how they are found, and reached at the end."""

import sys
import weakref

from ..modules import held_by

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .inputs import Input
    from .places import Place

#: Bytes of parameters up to which a module is kept alive that the program drops.
HELD_BYTES_MAX = 64 << 20


class Candidate:
    """An input that was kept, and how to get its module."""

    def __init__(self, path: str, module: "Callable[[], Any]", kept: "Input") -> None:
        self.path, self.module, self.kept = path, module, kept


def way_to(module: "Any") -> "Callable[[], Any]":
    """How to get a module later: it is kept alive, unless it is large."""
    seen: dict[int, Any] = {}
    waiting = [module]
    while waiting:
        own = held_by(waiting.pop())
        seen.update((id(each), each) for name in ("_parameters", "_buffers") for each in own.get(name, {}).values())
        waiting += [each for each in own.get("_modules", {}).values() if each is not None and id(each) not in seen]
        seen.update((id(each), None) for each in own.get("_modules", {}).values())
    sizes = [each.numel() * each.element_size() for each in seen.values() if each is not None]
    return weakref.ref(module) if sum(sizes) > HELD_BYTES_MAX else lambda: module


def culprits(model: "Any", place: "Place") -> "list[tuple[str, Any]]":
    """The module whose output is bad, and the next one around it that is called; of a bad input only that one."""
    if model is None or place.role not in ("output", "input"):
        return []
    chain, module = [("", model)], model
    for name in place.path.split(".") if place.path else ():
        module = module._modules.get(name)
        if module is None:
            return []
        path = "%s.%s" % (chain[-1][0], name) if chain[-1][0] else name
        chain.append((path, module))
    no_forward = sys.modules["torch"].nn.Module.forward
    around = [each for each in reversed(chain[:-1]) if type(each[1]).forward is not no_forward]
    own = [chain[-1]] if place.role == "output" else []
    return own + around[:1]
