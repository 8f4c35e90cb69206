"""Which modules are watched, and what becomes of their outputs on the way to a scanner.

A model is found when it is called for the first time, as the outermost module; its submodules get forward hooks, for
the steps that are looked at. An output that several modules hand on is scanned once; the others are noted as the same.
A module that writes into its own input is learned at its first call: from then on what waits is scanned before it.
"""

import sys
import weakref
from contextlib import nullcontext
from fnmatch import fnmatchcase

from ..events import Clock, RLock, get_ident
from .formats import FORMATS
from .scanners import Unchecked, scanner_for

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Optional

    from .formats import Format

ROLES = ("output", "input", "weight")

#: Tensors of one output that are looked at, and how deep they may lie in it.
_TENSORS_MAX, _DEPTH_MAX = 16, 4

#: Points, and reasons why something is not checked, that are kept.
POINTS_MAX = (1 << 24) - 1
_REASONS_MAX = 2000

_COMPILED = "inside a compiled model: its output is checked, not what is in it"

#: Wait for scans under way at the end.
_PATIENCE_MS = 50

#: Classes that hand their input on as it is.
_HAND_ON = ("Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout")


class Place:
    """A watched module: its names, its points, what is known of it."""

    __slots__ = ("class_name", "inputs", "outputs", "path", "root", "same", "writes_input")

    def __init__(self, root: int, path: str, class_name: str) -> None:
        self.root, self.path, self.class_name = root, path, class_name
        self.outputs: dict[int, int] = {}  # which output -> point
        self.inputs: dict[int, int] = {}
        self.same: set[tuple[int, int]] = set()
        self.writes_input = False


class _Hook:
    """A hook of a module. Pickled with the model, it becomes one that does nothing and needs nothing of ours."""

    __slots__ = ("_call",)

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


class _Root:
    """A model that is watched: its places, and the hooks that come and go with the steps that are looked at."""

    def __init__(self, module: "Any", number: int) -> None:
        self.module, self.number = weakref.ref(module), number
        self.hooks: list[tuple[Any, int, _Hook]] = []  # dictionary of a module, key, hook
        self.handles: list[Any] = []
        self.last: Any = None  # moves the end of the step behind every other hook
        self.place: Optional[Place] = None  # its own, where it is watched
        self.on = False
        self.first = True
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


class Numerics:
    """Watches models. ``say`` takes events; every fault ends the watch, and never reaches the program."""

    def __init__(
        self, say: "Callable[..., None]", every: int = 1, patterns: "tuple[str, ...]" = ("*",),
        roles: "tuple[str, ...]" = ("output",),
    ) -> None:  # fmt: skip
        torch = sys.modules["torch"]
        self._torch, self._say = torch, say
        self._every, self._patterns, self._roles = max(every, 1), patterns, roles
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._forms: dict[Any, Format] = {
            getattr(torch, name): form for name, form in FORMATS.items() if hasattr(torch, name) and name != "int4"
        }
        self._lock = RLock()
        self._roots: dict[int, _Root] = {}
        self._points: list[list[Any]] = []  # yet to be told
        self._points_count = self._roots_count = 0
        self._reasons: dict[tuple[str, str], None] = {}
        self._reasons_told = 0
        self._thread = 0  # that is in a step
        self._root: Optional[_Root] = None
        self._order = 0
        self._held: dict[int, tuple[Any, Optional[int], int]] = {}  # id -> (tensor or weak reference, version, point)
        self.scanners: dict[Any, Any] = {}  # by device
        self.closed = False
        self.concurrent = 0  # steps not looked at, as another thread was in one

    # -- models -------------------------------------------------------------------------------

    def step_begins(self, module: "Any", args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> None:
        """An outermost call of a module, see calls.py: watch it, if it is not yet."""
        if not self.closed and id(module) not in self._roots:
            self.attach(module)

    def step_ends(self) -> None:
        """The hooks of the root tell."""

    def attach(self, module: "Any") -> None:
        """Watch a model and its submodules, from its next step on."""
        try:
            with self._lock:
                self._attach(module)
        except Exception as error:
            self.fault(error)

    def _attach(self, module: "Any") -> None:
        known = self._roots.get(id(module))
        if known is not None:
            if known.module() is module:
                return
            known.remove()
        root = self._roots[id(module)] = _Root(module, self._roots_count)
        self._roots_count += 1
        for path, each in self._modules(module):
            place = Place(root.number, path, type(each).__name__)
            if each is module:
                root.place = place
            self._hook(root, place, each)
        root.handles += [
            module.register_forward_pre_hook(_Hook(lambda _, args: self._begins(root, args))),
            _always(module, _Hook(lambda *_: self._ends(root))),
        ]
        hooks, end = module._forward_hooks, root.handles[-1].id
        root.last = lambda: hooks.move_to_end(end) if end in hooks else None

    def _modules(self, module: "Any") -> "Iterator[tuple[str, Any]]":
        """(path, module) of those that can be watched, and that a pattern names; shared ones under their first name.

        What is compiled is a whole: of an ``OptimizedModule`` hooks see the output, of what is inside nothing.
        """
        seen: set[int] = set()
        waiting = [("", module)]
        while waiting:
            path, each = waiting.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if getattr(each, "_compiled_call_impl", None) is not None:
                self._unchecked(path, _COMPILED)
                continue
            if any(fnmatchcase(path, pattern) for pattern in self._patterns):
                yield path, each
            if type(each).__name__ == "OptimizedModule":
                self._unchecked("%s._orig_mod" % path if path else "_orig_mod", _COMPILED)
                continue
            inner = [(name, one) for name, one in each._modules.items() if one is not None]
            waiting += [("%s.%s" % (path, name) if path else name, one) for name, one in reversed(inner)]

    def _hook(self, root: "_Root", place: "Place", module: "Any") -> None:
        handles = []
        try:
            if "output" in self._roles:
                hook = _Hook(lambda own, args, output: self._outputs(root, place, own, args, output))
                handles.append((module._forward_hooks, module.register_forward_hook(hook), hook))
            if (
                "input" in self._roles and place is not root.place
            ):  # torch has made its list of the root's hooks already
                hook = _Hook(lambda own, args: self._inputs(place, args))
                handles.append((module._forward_pre_hooks, module.register_forward_pre_hook(hook), hook))
        except Exception as error:  # a class that takes no hooks, as of torch.jit
            self._unchecked(place.path, "it takes no hooks: %s" % type(error).__name__)
        for hooks, handle, hook in handles:
            hooks.pop(handle.id, None)
            root.hooks.append((hooks, handle.id, hook))

    def close(self) -> None:
        """Take all hooks out, for good; what was scanned can still be read."""
        self.closed = True
        self.let_go()

    def let_go(self) -> None:
        """Take all hooks out."""
        with self._lock:
            roots, self._roots = list(self._roots.values()), {}
            for root in roots:
                root.remove()

    def fault(self, error: "Exception") -> None:
        """A fault of ours: the watch is over, the program goes on."""
        self._say(ev="note", text="numerics are not checked any more: %s: %s" % (type(error).__name__, error))
        try:
            self._give_up()
            self.close()
        except Exception:
            pass

    # -- steps --------------------------------------------------------------------------------

    def _begins(self, root: "_Root", args: "tuple[Any, ...]") -> None:
        thread = get_ident()
        if self._thread == thread and self._root is not root:  # a root inside another
            return
        try:
            with self._lock:
                if self.closed or self._is_compiling():
                    return
                if self._thread not in (0, thread):
                    self.concurrent += 1
                    return
                self._thread, self._root = thread, root
            self._give_up()  # of a step that was left by an exception that no hook sees
            for scanner in self.scanners.values():
                scanner.begin()
            looks = root.steps % self._every == 0 or self._is_capturing()
            root.steps += 1
            root.switch(looks)
            self._order = 0
            if root.first:
                root.first = False
                self._weights(root)
            if looks and root.place is not None and "input" in self._roles:
                self._inputs(root.place, args)
        except Exception as error:
            self.fault(error)

    def _ends(self, root: "_Root") -> None:
        if self._thread != get_ident() or self._root is not root:
            return
        try:
            self._flush()
        except Exception as error:
            self.fault(error)
        finally:
            self._held.clear()
            self._thread, self._root = 0, None

    def _is_compiling(self) -> bool:
        ask = getattr(getattr(self._torch, "compiler", None), "is_compiling", None)
        return bool(ask is not None and ask())

    def _is_capturing(self) -> bool:
        return any(scanner.capturing() for scanner in self.scanners.values())

    def _flush(self) -> None:
        for scanner in self.scanners.values():
            scanner.flush()
        self._held.clear()

    def _give_up(self) -> None:
        self._held.clear()
        for scanner in self.scanners.values():
            scanner.drop()

    def capture_began(self) -> None:
        """A capture has begun: what waits from before cannot be scanned in it."""
        dropped = sum(scanner.drop() for scanner in self.scanners.values())
        self._held.clear()
        if dropped:
            self._unchecked("", "%d outputs of before a capture that began in the middle of a step" % dropped)

    def capture_ends(self) -> None:
        """A capture is about to end: what waits belongs to it."""
        try:
            self._flush()
        except Exception as error:
            self.fault(error)

    # -- tensors ------------------------------------------------------------------------------

    def _outputs(self, root: "_Root", place: "Place", module: "Any", args: "tuple[Any, ...]", output: "Any") -> None:
        if self._thread != get_ident():
            return
        try:
            if type(output) in self._plain:
                self._output(root, place, 0, module, args, output)
                return
            none = True
            for index, tensor in enumerate(_tensors(self._torch.Tensor, output)):
                none = False
                self._output(root, place, index, module, args, tensor)
            if none:
                self._unchecked(place.path, "its output holds no tensor: %s" % type(output).__name__)
        except Exception as error:
            self.fault(error)

    def _output(
        self, root: "_Root", place: "Place", index: int, module: "Any", args: "tuple[Any, ...]", tensor: "Any"
    ) -> None:
        version = None if tensor.is_inference() else tensor._version
        held = self._held.get(id(tensor))
        point = place.outputs.get(index)
        if point is None:
            point = self._point(place, "output", index)
            place.outputs[index] = point
        if held is not None and (held[0] is tensor or (type(held[0]) is weakref.ref and held[0]() is tensor)):
            written = held[1] != version if version is not None else _takes(args, tensor) and not _hands_on(module)
            if not written:
                if (index, held[2]) not in place.same and held[2] != point:
                    place.same.add((index, held[2]))
                    self._points.append([point, place.root, place.path, place.class_name, "output", index, held[2]])
                return
        if not place.writes_input and _takes(args, tensor) and not _hands_on(module):
            place.writes_input = True
            hook = _Hook(lambda *_: self._flush_before())
            handle = module.register_forward_pre_hook(hook)
            root.hooks.append((module._forward_pre_hooks, handle.id, hook))
        self._see(place.path, point, tensor, version)

    def _inputs(self, place: "Place", args: "tuple[Any, ...]") -> None:
        if self._thread != get_ident():
            return
        try:
            for index, tensor in enumerate(_tensors(self._torch.Tensor, args)):
                if id(tensor) in self._held:
                    continue
                if index not in place.inputs:
                    place.inputs[index] = self._point(place, "input", index)
                version = None if tensor.is_inference() else tensor._version
                self._see(place.path, place.inputs[index], tensor, version)
        except Exception as error:
            self.fault(error)

    def _flush_before(self) -> None:
        if self._thread == get_ident():
            self.capture_ends()

    def _weights(self, root: "_Root") -> None:
        """Parameters and buffers, once; shared ones under their first name."""
        module = root.module()
        if "weight" not in self._roles or module is None or self._is_capturing():
            return
        seen: set[int] = set()
        for path, each in self._modules(module):
            for name, tensor in [*each._parameters.items(), *each._buffers.items()]:
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    full = "%s.%s" % (path, name) if path else name
                    point = self._point(Place(root.number, full, type(each).__name__), "weight", 0)
                    self._see(full, point, tensor, None)
        self._flush()

    def _see(self, path: str, point: int, tensor: "Any", version: "Optional[int]") -> None:
        if type(tensor) not in self._plain:
            self._unchecked(path, "a tensor of class %s" % type(tensor).__name__)
            return
        form = self._forms.get(tensor.dtype)
        if form is None:
            self._unchecked(path, "dtype %s" % str(tensor.dtype).rpartition(".")[2])
            return
        if tensor.layout != self._torch.strided:
            self._unchecked(path, "layout %s" % tensor.layout)
            return
        scanner = self.scanners.get(tensor.device)
        if scanner is None:
            scanner = self._scanner(path, tensor.device)
            if scanner is None:
                return
        tag = self._order << 32 | form.number << 24 | point
        self._order += 1
        try:
            waits = scanner.add(tensor, form, tag, version)
        except Unchecked as why:
            self._unchecked(path, str(why))
            return
        self._held[id(tensor)] = (tensor if waits else weakref.ref(tensor), version, point)
        if waits and scanner.is_full():
            self._flush()

    def _scanner(self, path: str, device: "Any") -> "Any":
        if device.type not in ("cpu", "cuda"):
            self._unchecked(path, "on device %s" % device.type)
            return None
        if device.type == "cuda" and self._torch.cuda.is_current_stream_capturing():
            self._unchecked(path, "the first look at %s was during a capture" % device)
            return None
        scanner = scanner_for(device, Clock, lambda text: self._say(ev="note", text=text))
        scanner.every = self._every
        scanner.begin()
        self.scanners[device] = scanner
        return scanner

    def _point(self, place: "Place", role: str, index: int) -> int:
        if self._points_count >= POINTS_MAX:
            raise Unchecked("more than %d points" % POINTS_MAX)
        point = self._points_count
        self._points_count += 1
        self._points.append([point, place.root, place.path, place.class_name, role, index, -1])
        return point

    def _unchecked(self, path: str, reason: str) -> None:
        if len(self._reasons) < _REASONS_MAX:
            self._reasons[path, reason] = None

    # -- what was found -----------------------------------------------------------------------

    def drain(self, write: "Callable[[int, Any], None]", all_of_it: bool = False) -> None:
        """Hand over the records made since the last time: ``write(device, bytes)``. Called by another thread."""
        points = self._points[:]
        del self._points[: len(points)]
        if points:
            self._say(ev="numerics_points", points=points)
        reasons = list(self._reasons)
        if len(reasons) > self._reasons_told:
            self._say(ev="numerics_unchecked", places=reasons[self._reasons_told :])
            self._reasons_told = len(reasons)
        for device, scanner in list(self.scanners.items()):
            number = -1 if device.type == "cpu" else device.index
            if hasattr(scanner, "memory"):
                if all_of_it:
                    scanner.memory.settle(_PATIENCE_MS)
                scanner.memory.drain(lambda piece, number=number: write(number, piece), all_of_it)
            else:
                made = scanner.take(all_of_it)
                if made:
                    write(number, made)

    def losses(self) -> "dict[str, int]":
        """Scans that could not be made, by reason."""
        scanners = list(self.scanners.values())
        return {
            "no room in the table": sum(scanner.lost for scanner in scanners),
            "first seen during a capture": sum(scanner.unready for scanner in scanners),
            "steps of other threads at the same time": self.concurrent,
        }


def _always(module: "Any", hook: "_Hook") -> "Any":
    try:
        return module.register_forward_hook(hook, always_call=True)  # also when the step raises
    except TypeError:
        return module.register_forward_hook(hook)


def _takes(args: "tuple[Any, ...]", tensor: "Any") -> bool:
    """Whether the tensor is one of the arguments."""
    return any(each is tensor for each in args)


def _hands_on(module: "Any") -> bool:
    return type(module).__name__ in _HAND_ON and not (module.training and getattr(module, "p", 0))


def _tensors(tensor: "Any", value: "Any") -> "Iterator[Any]":
    """Tensors in nested tuples, lists, dictionaries and dataclasses, in order."""
    found = 0
    waiting = [(value, 0)]
    while waiting and found < _TENSORS_MAX:
        each, depth = waiting.pop()
        if isinstance(each, tensor):
            found += 1
            yield each
        elif depth < _DEPTH_MAX:
            inner: Any = ()
            if isinstance(each, (tuple, list)):
                inner = each[:_TENSORS_MAX]
            elif isinstance(each, dict):
                inner = list(each.values())[:_TENSORS_MAX]
            elif hasattr(type(each), "__dataclass_fields__"):
                inner = (
                    [vars(each).get(name) for name in type(each).__dataclass_fields__]
                    if hasattr(each, "__dict__")
                    else ()
                )
            waiting += [(one, depth + 1) for one in reversed(inner)]
