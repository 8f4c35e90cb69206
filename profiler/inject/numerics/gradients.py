"""Gradients of what modules give: looked at once they are there, in the order of the backward pass."""

import sys
import weakref

from ..events import get_ident
from .places import tensors_in
from .unseen import unseen

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any

    from .places import Place
    from .watch import Numerics


class Gradients:
    """Those of the last step of a watch."""

    def __init__(self, numerics: "Numerics") -> None:
        self._numerics = numerics
        self._engine = sys.modules["torch"].autograd.Variable._execution_engine
        self._awaited: dict[int, Any] = {}  # weak references to outputs of the step
        self._backward = False  # whether the end of a backward pass is waited for

    def begin(self) -> None:
        """A step begins."""
        self._awaited.clear()

    def wait(self, place: "Place", output: "Any") -> None:
        """Wait for those of what a module gave."""
        numerics = self._numerics
        if numerics.thread != get_ident():
            return
        try:
            for index, tensor in enumerate(tensors_in(numerics.looks.tensor, output)):
                if not numerics.looks.is_plain(tensor):  # whose code may be the program's
                    continue
                known = self._awaited.get(id(tensor))
                if tensor.requires_grad and (known is None or known() is not tensor):  # parents hand on the same
                    self._awaited[id(tensor)] = weakref.ref(tensor)
                    tensor.register_hook(lambda gradient, index=index: self._came(place, index, gradient))
        except Exception as error:
            numerics.fault(error)

    def _came(self, place: "Place", index: int, gradient: "Any") -> None:
        try:
            with unseen():
                seen = self._numerics.look(place, index, gradient, ends=False)
            if seen and not self._backward:
                self._backward = True
                self._engine.queue_callback(self._backward_ends)
        except Exception as error:
            self._numerics.fault(error)

    def _backward_ends(self) -> None:
        self._backward = False
        self._numerics.flush_outside()
