"""What modules give without a hook in each: one function in the place of ``nn.Module._call_impl``.

A hook makes torch take its long way, which costs a microsecond for each module, more than all that the watch does with
what the module gives. This function calls the original, and finds the module in a table. It changes nothing in any
module, so that copies, pickles and other hooks do not know of it, and it sees an output as the caller gets it.

It stands there as long as a watch goes on, with one of some steps switched off between them (switched.py). It is never
there when torch's compiler is at work, which would trace it, nor on top of a function that is not torch's own.
"""

import os
import sys
import weakref

from ..events import get_ident
from ..interrupts import leave_out_ours
from .switched import Switched
from .unseen import alone, functions_overridden, is_traced

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, Optional

    from .places import Place
    from .roots import Root
    from .watch import Numerics

#: How often a process puts it in: Python stops caching the attributes of a class that is changed a thousand times.
_TURNS_MAX = 100

#: The parts of the compiler that remember which function is torch's own.
_COMPILER = "torch._dynamo.eval_frame"
_LOADED_FIRST = "torch._dynamo"
_REMEMBER = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")
_REMEMBERED = "unpatched_nn_module_call_impl"

_REPLACED = "calls made while nn.Module._call_impl was the program's own, if there were any"

_turns = 0


class Direct:
    """The function, and the tables of the models that are watched."""

    def __init__(self, numerics: "Numerics", told_of_compiler: bool = False, always: bool = True) -> None:
        self._numerics, self._always = numerics, always
        #: Whether somebody will tell before anything is compiled; else a compiler that is loaded is one that is used.
        self.told_of_compiler = told_of_compiler
        self._owner = sys.modules["torch"].nn.Module
        self._put: Optional[Switched] = None
        self.root: Any = None  # that is in a step, or was the last time
        self.places: dict[int, Place] = {}  # by id of the module
        self.roots: dict[int, Root] = {}  # models whose steps are told here, by id; never replaced
        self._tables: list[dict[int, Place]] = []
        self._joined: dict[int, tuple[int, dict[int, Place]]] = {}  # number of a root -> changes until then, places
        self._changes = 0  # modules that came so far
        self._alive: dict[int, Any] = {}  # weak references, by their own ids
        if not told_of_compiler:
            _loading.tell(numerics)

    def ready(self) -> bool:
        """Whether the function is in its place, and may stay there."""
        put = self._put
        if put is not None and (self._compiles() or not put.is_there()):
            self.take_out()
        return self._put is not None

    def _compiles(self) -> bool:
        return not self.told_of_compiler and _COMPILER in sys.modules

    def may_meet_compiler(self) -> bool:
        """Whether a compiler may come upon hooks: nobody tells of it, and it is there, or being loaded."""
        return not self.told_of_compiler and _LOADED_FIRST in sys.modules

    def can_see(self, module: "Any") -> bool:
        """Whether calls of the module come to the function."""
        return getattr(type(module), "_call_impl", None) is self._owner._call_impl

    def put_in(self) -> None:
        """Put the function in, where that can be done; not to be there ``always``, it is switched off at first."""
        global _turns
        original = vars(self._owner).get("_call_impl")
        if (
            self._put is not None or self._compiles() or _turns >= _TURNS_MAX
            or vars(self._owner).get("__call__") is original  # torch before 2.1: it would have to know the name
            or type(original) is not type(_function_of) or hasattr(original, "__wrapped__")
            or original.__globals__ is not vars(sys.modules[self._owner.__module__])  # of the program's
        ):  # fmt: skip
            return
        _turns += 1
        try:
            put = Switched(self._owner, "_call_impl", _function_of(self, self._numerics, original))
        except AttributeError:  # another Python than CPython: hooks will do
            return
        put.turn(self._always)
        self._put = put

    def turn(self, on: bool) -> None:
        """A step begins, which is looked at or not, or has ended."""
        put = self._put  # another thread may take it out meanwhile
        if put is not None and not self._always:
            put.turn(on)

    def take_out(self) -> None:
        """Put torch's own back, unless somebody has wrapped ours since."""
        put, self._put = self._put, None
        if put is None:
            return
        if self._always and not put.is_there():
            self._numerics.looks.unchecked("", _REPLACED)
        roots = list(self.roots.values())
        self.places = {}  # so that it does nothing any more
        self.roots.clear()
        put.take_out()
        for name in _REMEMBER:
            module = sys.modules.get(name)
            if getattr(module, _REMEMBERED, None) is put.function:
                setattr(module, _REMEMBERED, put.original)
        for root in roots:
            root.hook(self._numerics)

    def enter(self, module: "Any", root: "Root") -> bool:
        """Tell of a model's steps; False where that takes hooks."""
        if not self._always or not self.ready() or not self.can_see(module):
            return False
        number = id(module)
        self._follow(module, lambda: self.roots.pop(number, None))
        self.roots[number] = root
        return True

    def forget(self, root: "Root") -> None:
        """A model is gone."""
        self._joined.pop(root.number, None)
        self._tables = [joined for _, joined in list(self._joined.values())]
        if self.root is root:
            self.root, self.places = None, {}

    def _follow(self, module: "Any", call: "Callable[[], object]") -> None:
        alive = self._alive

        def gone(reference: object) -> None:
            alive.pop(id(reference), None)
            call()

        reference = weakref.ref(module, gone)
        alive[id(reference)] = reference

    def know(self, module: "Any", place: "Place", places: "dict[int, Place]") -> None:
        """Enter a module into a table, for as long as it lives."""
        number = id(module)

        def gone() -> None:
            for each in (places, *self._tables):
                each.pop(number, None)

        self._follow(module, gone)
        self._changes += 1
        places[number] = place

    def begins(self, root: "Root", roots: "Iterable[Root]") -> None:
        """A step of a model begins: its modules go by their names in it, others by those in their own."""
        changes, places = self._joined.get(root.number, (-1, {}))
        if changes != self._changes:
            places = {}
            for each in (*list(roots), root):
                places.update(list(each.places.items()))  # a list: modules may go meanwhile
            self._joined[root.number] = (self._changes, places)
            self._tables = [joined for _, joined in list(self._joined.values())]
        self.root, self.places = root, places


class _Loading:
    """A finder that finds nothing, and tells when torch's compiler is about to be loaded.

    It is there for good: taken out of the list while another thread goes through it, it would hide another finder.
    """

    def __init__(self) -> None:
        self._listeners: list[Any] = []  # weak references; no WeakSet, whose code would run when a watch goes

    def tell(self, numerics: "Numerics") -> None:
        self._listeners = [each for each in self._listeners if each() is not None] + [weakref.ref(numerics)]
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        for each in self._listeners:
            numerics = each()
            if numerics is not None:
                numerics.forked()

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name == _LOADED_FIRST:
            for each in self._listeners:
                numerics = each()
                if numerics is not None:
                    numerics.compiler_loads()


_loading = _Loading()


def _function_of(direct: "Direct", numerics: "Numerics", original: "Any") -> "Any":
    waits, several, gave = numerics.waits, numerics.several, numerics.gave
    plain, roots = numerics.looks.tensor, direct.roots

    def step(root: "Root", args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> "Any":
        if not direct.ready():  # hooks tell from now on
            return original(*args, **kwargs)
        alone(numerics.begins, root, args[1:])
        try:
            output = original(*args, **kwargs)
            place = direct.places.get(id(args[0]))
            if place is not None and numerics.thread == get_ident():
                gave(direct.root, place, args, output)
            return output
        finally:
            alone(numerics.ends, root)

    def call(*args: "Any", **kwargs: "Any") -> "Any":
        number = id(args[0])
        root = roots.get(number)
        try:
            if root is not None:
                return step(root, args, kwargs)
            output = original(*args, **kwargs) if kwargs else original(*args)
        except BaseException as error:
            leave_out_ours(error, *ours)
            raise
        if direct.places and numerics.thread == get_ident():  # in this order for a compiler that kept the function
            place = direct.places.get(number)
            if place is not None and (
                functions_overridden()
                or is_traced()
                or not (
                    waits(place.spots[0], args, output)
                    if type(output) is plain
                    else several(direct.root, place, args, output)
                )
            ):
                gave(direct.root, place, args, output)
        return output

    ours = (call.__code__, step.__code__)
    return call
