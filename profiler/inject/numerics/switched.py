"""A method of a class that can be exchanged as often as one likes.

Setting an attribute of a class makes Python forget what it has learned about the class and all that are derived from
it, and after a thousand times not learn it any more. So there it is set once, to a ``partial`` without arguments, which
is C, costs a call some 30 ns, and can be told in place to call something else.
"""

import ctypes
from functools import partial

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any

#: What programs ask of a function, by ``inspect`` or as torch's compiler does of what it is to compile.
_OF_FUNCTIONS = (
    "__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__code__", "__globals__", "__defaults__",
    "__kwdefaults__", "__closure__",
)  # fmt: skip


class Switched:
    """Stands for the function ``original``, and is ``other`` where that is turned on."""

    def __init__(self, original: "Any", other: "Any") -> None:
        #: What the class is asked for gives.
        self.function: Any = partial(original)
        told = self.function.__dict__
        told.update((name, getattr(original, name, None)) for name in _OF_FUNCTIONS)
        told["__wrapped__"] = original
        self._original: Any = (original, (), {}, told)  # as ``partial.__setstate__`` takes it
        self._other: Any = (other, (), {}, told)
        self.is_on = False

    def method(self) -> "Any":
        """What the class is to hold: a ``partial`` alone does not pass the object on, as a function does."""
        new = ctypes.PyDLL(None).PyInstanceMethod_New
        new.argtypes, new.restype = [ctypes.py_object], ctypes.py_object
        return new(self.function)

    def turn(self, on: bool) -> None:
        """Have calls from now on come to the one or the other."""
        if on != self.is_on:
            self.function.__setstate__(self._other if on else self._original)
            self.is_on = on
