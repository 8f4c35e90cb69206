"""The hooks in a model that is watched: what torch calls, and how they come and go."""

import weakref
from contextlib import nullcontext

from ..events import get_ident
from .scanners import WAITING_ITEMS, WAITING_ITEMS_MAX, WAITING_MAX

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Optional

    from .looks import Place
    from .watch import Numerics

#: Classes that hand their input on as it is.
_HAND_ON = ("Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout")


class Hook:
    """A hook of a module. Pickled with the model, it becomes one that does nothing and needs nothing of ours."""

    __slots__ = ("_call",)

    of_spikeprof = True  # see mirror.py

    def __init__(self, call: "Callable[..., None]") -> None:
        self._call = call

    def __call__(self, *args: "Any") -> None:
        """What torch calls; never changes what the module gets or gives."""
        self._call(*args)

    def __reduce__(self) -> "tuple[Any, ...]":
        """See above."""
        return getattr, (nullcontext(), "__exit__")

    def __deepcopy__(self, _memo: object) -> "Any":
        """A copy of a model is not watched."""
        return nullcontext().__exit__


class OutputHook(Hook):
    """The hook that every watched module has: what it does for small tensors on a GPU, it does by itself."""

    __slots__ = ("_looks", "_numerics", "_place", "_root")

    def __init__(self, numerics: "Numerics", root: "Root", place: "Place") -> None:
        self._numerics, self._looks, self._root, self._place = numerics, numerics.looks, root, place

    def __call__(self, module: "Any", args: "tuple[Any, ...]", output: "Any") -> None:
        """What torch calls."""
        numerics = self._numerics
        if numerics.thread != get_ident():
            return
        try:
            plain = self._looks.tensor
            if type(output) is plain:
                if not self._waits(args, 0, output):
                    numerics.output(self._root, self._place, module, args, 0, output)
                return
            if type(output) is tuple:
                for each in output:
                    if type(each) is not plain:
                        break
                else:
                    for index, each in enumerate(output):
                        if not self._waits(args, index, each):
                            numerics.output(self._root, self._place, module, args, index, each)
                    return
            numerics.outputs(self._root, self._place, module, args, output)
        except Exception as error:
            numerics.fault(error)

    def _waits(self, args: "tuple[Any, ...]", index: int, tensor: "Any") -> bool:
        """Let a small tensor on a GPU wait for its scan; False for all others."""
        for each in args:
            if each is tensor:
                return False
        looks = self._looks
        scanner = looks.quick.get(tensor.get_device())
        if scanner is None:
            return False
        items = tensor.numel()
        if items > WAITING_ITEMS:
            return False
        version = None if looks.inference or tensor.is_inference() else tensor._version
        waiting = scanner.waiting
        if not waiting or scanner.moved():
            looks.wait(scanner, self._place, index, tensor, version, items)
            return True
        waiting.append((self._place, index, tensor, version, looks.order))
        looks.order += 1
        scanner.items += items
        if len(waiting) >= WAITING_MAX or scanner.items >= WAITING_ITEMS_MAX:
            looks.flush()
        return True


class Root:
    """A model that is watched: the hooks that come and go with the steps that are looked at."""

    def __init__(self, module: "Any", number: int) -> None:
        self.module, self.number = weakref.ref(module), number
        self.hooks: list[tuple[Any, int, Hook]] = []  # dictionary of a module, key, hook
        self.handles: list[Any] = []
        self.last: Any = None  # moves the end of the step behind every other hook
        self.taken: Optional[Place] = None  # the model's own inputs, where they are watched
        self.on = False
        self.steps = 0

    def switch(self, on: bool) -> None:
        """Put the hooks in or take them out."""
        if on != self.on:
            self.on = on
            for hooks, key, hook in self.hooks:
                if on:
                    hooks[key] = hook
                else:
                    hooks.pop(key, None)
            if self.last is not None:
                self.last()

    def remove(self) -> None:
        """Take out all, for good."""
        self.switch(False)
        self.hooks.clear()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def always(module: "Any", hook: "Hook") -> "Any":
    """Register a hook that is also called when the module raises, where this torch can."""
    try:
        return module.register_forward_hook(hook, always_call=True)  # also when the step raises
    except TypeError:
        return module.register_forward_hook(hook)


def hands_on(module: "Any") -> bool:
    """Whether the module gives what it takes, unchanged."""
    return type(module).__name__ in _HAND_ON and not (module.training and getattr(module, "p", 0))
