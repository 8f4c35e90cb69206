"""What the watch asks of tensors and computes from them is nobody else's: modes, tracers and compilers do not see it.

A program may have every operator, or every function of torch's, come by a mode of its own that counts or records it.
"""

import importlib
import sys
from contextlib import contextmanager

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_torch = sys.modules["torch"]


def _none() -> int:
    return 0


def _never() -> bool:
    return False


#: How many modes of either kind are on in this thread; a torch without them has none.
functions_overridden: "Callable[[], int]" = getattr(_torch._C, "_len_torch_function_stack", _none)
operators_overridden: "Callable[[], int]" = getattr(_torch._C, "_len_torch_dispatch_stack", _none)

#: A compiler that comes upon it knows the answer, and leaves out what depends on it.
is_compiling: "Callable[[], bool]" = getattr(getattr(_torch, "compiler", None), "is_compiling", _never)

is_traced: "Callable[[], object]" = getattr(_torch._C, "_get_tracing_state", _never)


def overridden() -> bool:
    """Whether somebody would see what we do with tensors."""
    return bool(functions_overridden() or operators_overridden())


def alone(call: "Callable[..., None]", *args: "Any") -> None:
    """Call this, and have no mode see it."""
    if overridden():
        with unseen():
            call(*args)
    else:
        call(*args)


@contextmanager
def unseen() -> "Iterator[None]":
    """No mode is on."""
    modes = importlib.import_module("torch.utils._python_dispatch")
    with _torch._C.DisableTorchFunction():
        if operators_overridden() and hasattr(modes, "_disable_current_modes"):
            with modes._disable_current_modes():
                yield
        else:
            yield
