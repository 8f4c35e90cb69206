"""A method of a class that can be exchanged as often as one likes.

Setting an attribute of a class makes Python forget what it has learned about the class and all that are derived from
it, and after a thousand times not learn it any more. So there it is set once, to a ``partial`` without arguments, which
is C, costs a call up to 30 ns, and can be told in place to call something else.
"""

import ctypes
from functools import partial
from types import FunctionType, MethodType

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any


class _Function(partial):  # type: ignore[type-arg]
    """What the class gives when it is asked; to programs, which put it into classes or pickle it, the original."""

    __slots__ = ("_name", "_owner")
    _name: str
    _owner: type

    __class__ = property(lambda _: FunctionType)

    def __get__(self, instance: "Any", _owner: object = None) -> "Any":
        """Of instances, where a program has put it into a class: a method."""
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> "Any":
        """What functions have and this has not."""
        return getattr(self.__dict__["__wrapped__"], name)

    def __reduce__(self) -> "tuple[Any, ...]":
        """Pickled and copied it is what the class then has."""
        return getattr, (self._owner, self._name)


class Switched:
    """Stands in ``owner`` for the function of this name, and is ``other`` where that is turned on."""

    def __init__(self, owner: type, name: str, other: "Any") -> None:
        self.original: Any = vars(owner)[name]
        #: What the class gives.
        self.function = _Function(self.original)
        self.function._owner, self.function._name = owner, name
        told = self.function.__dict__
        told["__wrapped__"] = self.original
        told.update((each, getattr(self.original, each)) for each in ("__module__", "__doc__"))
        self._states: dict[bool, Any] = {  # as ``partial.__setstate__`` takes them
            False: (self.original, (), {}, told),
            True: (other, (), {}, told),
        }
        # A ``partial`` alone does not hand on the instance, but by Python code.
        new = ctypes.PyDLL(None).PyInstanceMethod_New
        new.argtypes, new.restype = [ctypes.py_object], ctypes.py_object
        self._owner, self._name, self._method = owner, name, new(self.function)
        setattr(owner, name, self._method)

    def is_there(self) -> bool:
        """Whether the class has it still, be it put back by a program that had asked for it."""
        there = vars(self._owner).get(self._name)
        return there is self._method or there is self.function

    def turn(self, on: bool) -> None:
        """Have calls from now on come to the one or the other."""
        state = self._states[on]
        if self.function.func is not state[0]:
            self.function.__setstate__(state)

    def take_out(self) -> None:
        """The original is back, unless another function is there by now; who has kept this one calls the original."""
        self.turn(False)
        if self.is_there():
            setattr(self._owner, self._name, self.original)
