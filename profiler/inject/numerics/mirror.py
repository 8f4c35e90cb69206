"""Copies of what modules are and take, tensors exchanged on the way: to keep inputs, and to run a forward on others.

What a forward writes into attributes, lists, caches of a copy does not reach the program's own. Objects are copied as
far as Python sees into them, with ``modules`` also what functions remember from around them; what it does not see into
(extensions, locks, objects that do something when they go) is shared.
"""

import sys
from collections import OrderedDict, defaultdict, deque
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType

from ..modules import held_by
from .outside import Refusing

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

#: Packages whose Python code runs for us: what it raises is our fault, not a signal handler's.
CALLED = ("torch", "triton")

#: Objects of one mirror: a model of some thousand modules has fewer.
OBJECTS_MAX = 200_000

_SHARED = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), slice, range, type, FunctionType,
    BuiltinFunctionType, ModuleType,
)  # fmt: skip

#: Of a module, the dictionaries of hooks.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Refused(Exception):
    """This cannot be copied, or not be run again; the text says why."""


class Mirror:
    """One copy. ``leaf`` gives what stands for a tensor; without ``modules`` a module among the objects is refused.

    What is reached in several ways is copied once, so that what was one thing is one in the copy, too.
    """

    def __init__(self, leaf: "Callable[[Any], Any]", modules: bool = False) -> None:
        torch = sys.modules["torch"]
        self._leaf, self._modules = leaf, modules
        self._tensor, self._module, self._parameter = torch.Tensor, torch.nn.Module, torch.nn.Parameter
        self._memo: dict[int, tuple[Any, Any]] = {}  # id -> original, which keeps the id its own, and copy

    def of(self, value: "Any") -> "Any":
        """The copy. Raises Refused."""
        kind = type(value)  # nothing is asked of the value itself: that might be code of the program's
        if issubclass(kind, _SHARED) and not (self._modules and kind is FunctionType and value.__closure__):
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known[1]
        if len(self._memo) >= OBJECTS_MAX:
            raise Refused("it holds more than %d objects" % OBJECTS_MAX)
        if issubclass(kind, self._tensor):
            if kind is not self._tensor and kind is not self._parameter:
                raise Refused("a tensor of class %s" % kind.__name__)
            return self._know(value, self._leaf(value))
        if issubclass(kind, self._module):
            return self._module_of(value)
        return self._object_of(value, kind)

    def _object_of(self, value: "Any", kind: "Any") -> "Any":
        if kind is FunctionType:
            return self._function_of(value)
        if kind is list:
            copy: Any = self._know(value, [])
            copy.extend(self.of(each) for each in value)
        elif kind in (dict, OrderedDict, defaultdict):
            copy = self._know(value, value.copy())
            for key in list(copy):
                copy[key] = self.of(copy[key])
        elif issubclass(kind, tuple):
            copy = self._know(value, tuple.__new__(kind, [self.of(each) for each in tuple.__iter__(value)]))
        elif kind is MethodType:
            copy = self._know(value, MethodType(value.__func__, self.of(value.__self__)))
        elif kind is partial:
            keywords = {name: self.of(each) for name, each in value.keywords.items()}
            copy = self._know(value, partial(self.of(value.func), *map(self.of, value.args), **keywords))
        elif self._modules and (hasattr(kind, "__next__") or hasattr(kind, "fileno")):
            copy = self._know(value, Refusing("a file" if hasattr(kind, "fileno") else "an iterator"))
        elif self._modules and (built_in := _copied(value, kind)) is not None:
            copy = self._know(value, built_in)
        elif _is_plain(kind):
            copy = self._know(value, object.__new__(kind))
            self._attributes(value, copy)
        else:
            copy = self._know(value, value)
        return copy

    def _function_of(self, function: "Any") -> "Any":
        """A function with what it remembers from around it."""
        cells = tuple(CellType() for _ in function.__closure__)
        copy = self._know(
            function,
            FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells),
        )
        copy.__dict__.update(function.__dict__)
        copy.__kwdefaults__ = function.__kwdefaults__
        for cell, original in zip(cells, function.__closure__):  # noqa: B905 (Python 3.9)
            try:
                cell.cell_contents = self.of(original.cell_contents)
            except ValueError:  # it is empty
                pass
        return copy

    def _know(self, value: "Any", copy: "Any") -> "Any":
        self._memo[id(value)] = (value, copy)
        return copy

    def _attributes(self, value: "Any", copy: "Any") -> None:
        for name, each in _attributes(value):
            object.__setattr__(copy, name, self.of(each))

    def _module_of(self, module: "Any") -> "Any":
        kind, own = type(module), held_by(module)
        if not self._modules:
            raise Refused("it takes a module")
        if isinstance(module, sys.modules["torch"].jit.ScriptModule):
            raise Refused("a module of torch.jit")
        if own.get("_compiled_call_impl") is not None or kind.__name__ == "OptimizedModule":
            raise Refused("compiled by torch.compile")
        copy = self._know(module, object.__new__(kind))
        kept = held_by(copy)
        for name, each in _attributes(module):
            if name in _HOOKS:
                if any(not getattr(hook, "of_spikeprof", False) for hook in each.values()):
                    raise Refused("hooks of the program's own run in it")
                kept[name] = type(each)()
            elif name in own:
                kept[name] = self.of(each)
            else:
                object.__setattr__(copy, name, self.of(each))
        return copy


def _copied(value: "Any", kind: type) -> "Any":
    """A copy of what Python and numpy have built in and programs write to; None of all else."""
    if kind in (set, bytearray, deque) or kind.__name__ in ("Counter", "ndarray"):
        return value.copy()
    if kind.__name__ == "Generator" and hasattr(value, "clone_state"):  # of random numbers, of torch's
        return value.clone_state()
    return None


def _is_plain(kind: type) -> bool:
    """Whether an object of this class is its attributes, and nothing happens when a copy of it goes."""
    return (
        all(getattr(kind, name) is getattr(object, name) for name in ("__new__", "__reduce_ex__", "__reduce__"))
        and not hasattr(kind, "__del__")
        and kind.__module__ not in ("builtins", "_thread", "threading", "weakref")
        and not issubclass(kind, BaseException)
    )


def _attributes(value: "Any") -> "Iterator[tuple[str, Any]]":
    yield from list(held_by(value).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                mangled = "_%s%s" % (kind.__name__.lstrip("_"), name) if name[:2] == "__" != name[-2:] else name
                try:
                    yield mangled, object.__getattribute__(value, mangled)
                except AttributeError:  # not set
                    pass
