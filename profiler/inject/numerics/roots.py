"""The hooks in a model that is watched: in which modules, what torch calls, and how they come and go."""

import sys
import weakref
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import partial

from ..events import get_ident
from ..interrupts import is_from_handler
from .given import careful, gives
from .places import Place
from .unseen import alone, is_compiling

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Optional

    from .watch import Numerics

_COMPILED = "inside a compiled model: its output is checked, not what is in it"


class _Ours:
    """A hook of a module. Pickled with the model, it becomes one that does nothing and needs nothing of ours."""

    __slots__ = ()

    of_spikeprof = True  # see mirror.py

    def __reduce__(self) -> "tuple[Any, ...]":
        """See above."""
        return getattr, (nullcontext(), "__exit__")

    def __deepcopy__(self, _memo: object) -> "Any":
        """A copy of a model is not watched."""
        return nullcontext().__exit__


class Hook(_Ours):
    """Most of them."""

    __slots__ = ("_call",)

    def __init__(self, call: "Callable[..., None]") -> None:
        self._call = call

    def __call__(self, *args: "Any") -> None:
        """What torch calls; never changes what the module gets or gives."""
        if is_compiling():  # first of all, and a plain question: a compiler comes by here
            return
        alone(self._call, *args)


class OutputHook(_Ours, partial):  # type: ignore[type-arg]
    """That of a watched module that direct.py does not see: no call in Python's own between torch's and given.py's.

    An attribute of its own keeps it whole where a program makes a ``partial`` of it: that takes plain ones apart.
    """

    def __init__(self, *_: object) -> None:
        self.is_whole = True


class Root:
    """A model that is watched: the hooks that come and go with the steps that are looked at."""

    def __init__(self, module: "Any", gone: "Callable[[Root], None]") -> None:

        def left(_: object, is_finalizing: "Callable[[], bool]" = sys.is_finalizing) -> None:
            if not is_finalizing():  # when modules have lost their names
                gone(self)

        self.module = weakref.ref(module, left)
        self.number = self.like = 0  # see alike.py
        self.made: dict[tuple[str, str, str], Place] = {}  # path, class and role -> place
        self.left: dict[tuple[str, str, str], Place] = {}  # of a model like this one that is gone
        self.hooks: list[tuple[Any, int, _Ours]] = []  # dictionary of a module, key, hook
        self.outputs: list[tuple[Any, int, _Ours]] = []  # the same, of modules that direct.py sees
        self.places: dict[int, Place] = {}  # of these, by id of the module
        self.handles: list[Any] = []  # of the hooks that tell of steps, where direct.py does not
        self.refused = self._over = False
        self.expected: dict[str, tuple[int, Place]] = {}  # modules that give something: id and place, by path
        self.last: Any = None  # moves the end of the step behind every other hook
        self.taken: Optional[Place] = None  # the model's own inputs, where they are watched
        self.on = self._hooked = False
        self.steps = 0

    def place(self, path: str, class_name: str, role: str) -> "Place":
        """The place of what a module gives or takes."""
        key = path, class_name, role
        if key not in self.made:
            left = self.left
            self.made[key] = left.pop(key) if key in left else Place(self.number, path, class_name, role)
        return self.made[key]

    def hook(self, numerics: "Numerics") -> None:
        """Have hooks tell of its steps, from its next one on."""
        module = self.module()
        if module is None or self._over or self.handles:
            return
        begins = Hook(lambda _, args: numerics.begins(self, args))
        try:
            self.handles.append(module.register_forward_pre_hook(begins))
            self.handles.append(_always(module, Hook(lambda *_: numerics.ends(self))))
        except Exception as error:
            if is_from_handler(error):
                raise
            self.remove()
            self.refused = True
            numerics.looks.unchecked("", "a %s takes no hooks: %s" % (type(module).__name__, type(error).__name__))
            return
        hooks, end = module._forward_hooks, self.handles[-1].id
        self.last = lambda: hooks.move_to_end(end) if end in hooks else None

    def prepare(self, numerics: "Numerics", path: str, module: "Any") -> None:
        """Make the hooks of one of its modules, or enter it into the tables of direct.py."""
        is_root, name = module is self.module(), type(module).__name__
        try:
            if "output" in numerics.roles:
                given = self.place(path, name, "output")
                entry = _entry(module, self._output_hook(numerics, given), after=True)
                if given.writes_input:
                    self.hooks.append(_entry(module, Hook(numerics.flush_in_step), after=False))
                if gives(module):
                    self.expected[path] = (id(module), given)
                if (is_root and self.handles) or name == "OptimizedModule" or not numerics.direct.can_see(module):
                    self.hooks.append(entry)
                else:
                    self.outputs.append(entry)
                    numerics.direct.know(module, given, self.places)
            if "input" in numerics.roles:
                taken = self.place(path, name, "input")
                if is_root:  # torch has made its list of the root's hooks by the time that they are put in
                    self.taken = taken
                else:
                    before = Hook(lambda _, args: numerics.inputs(taken, args))
                    self.hooks.append(_entry(module, before, after=False))
            if "gradient" in numerics.roles:
                got = self.place(path, name, "gradient")
                after = Hook(lambda _, args, output: numerics.gradients.wait(got, output))
                self.hooks.append(_entry(module, after, after=True))
        except Exception as error:  # a class that takes no hooks, as of torch.jit
            if is_from_handler(error):
                raise
            numerics.looks.unchecked(path, "it takes no hooks: %s" % type(error).__name__)

    def _output_hook(self, numerics: "Numerics", place: "Place") -> OutputHook:
        """Asking for a compiler at each module costs as much as a tenth of the watch: only where one may come by."""
        if numerics.direct.may_meet_compiler():
            return OutputHook(careful, numerics.hooked, self, place)
        return OutputHook(numerics.hooked, self, place)

    def be_careful(self) -> None:
        """A compiler may come by from now on."""
        for hooks, are_on in ((self.hooks, self.on), (self.outputs, self._hooked)):
            for at, (owner, key, hook) in enumerate(hooks):
                if isinstance(hook, OutputHook) and hook.func is not careful:
                    hooks[at] = owner, key, OutputHook(careful, hook.func, *hook.args)
                    if are_on:
                        owner[key] = hooks[at][2]

    def flush_before(self, numerics: "Numerics", module: "Any") -> None:
        """Scan what waits before a module runs, from now on."""
        entry = _entry(module, Hook(numerics.flush_in_step), after=False)
        with numerics.lock:
            if not self._over:
                self.hooks.append(entry)
                _switch([entry], True)

    def switch(self, on: bool, direct: bool = False) -> None:
        """Put the hooks in or take them out; ``direct``: all but those of modules that direct.py sees."""
        hooked = on and not direct
        if (on, hooked) == (self.on, self._hooked):
            return
        if on != self.on:
            _switch(self.hooks, on)
        if hooked != self._hooked:
            _switch(self.outputs, hooked)
        self.on, self._hooked = on, hooked
        if self.last is not None:
            self.last()

    def remove(self) -> None:
        """Take out all, for good."""
        self._over = True
        self.switch(False)
        self.hooks.clear()
        self.outputs.clear()
        self.places.clear()
        self.expected.clear()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def _switch(hooks: "list[tuple[Any, int, _Ours]]", on: bool) -> None:
    for owner, key, hook in hooks:
        if on:
            owner[key] = hook
        else:
            owner.pop(key, None)


def _entry(module: "Any", hook: "_Ours", after: bool) -> "tuple[Any, int, _Ours]":
    """A hook that is not there yet, and where it belongs: torch gives the key, and says if it can be hooked at all."""
    hooks = module._forward_hooks if after else module._forward_pre_hooks
    handle = module.register_forward_hook(hook) if after else module.register_forward_pre_hook(hook)
    hooks.pop(handle.id, None)
    return hooks, handle.id, hook


def watched_modules(
    model: "Any", patterns: "tuple[str, ...]", unchecked: "Callable[[str, str], None]"
) -> "Iterator[tuple[str, Any]]":
    """(path, module) of those that can be watched, and that a pattern names; shared ones under their first name.

    What is compiled is a whole: of an ``OptimizedModule`` hooks see the output, of what is inside nothing.
    """
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        path, each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if getattr(each, "_compiled_call_impl", None) is not None:
            unchecked(path, _COMPILED)
            continue
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            yield path, each
        if type(each).__name__ == "OptimizedModule":
            unchecked("%s._orig_mod" % path if path else "_orig_mod", _COMPILED)
            continue
        inner = [(name, one) for name, one in each._modules.items() if one is not None]
        waiting += [("%s.%s" % (path, name) if path else name, one) for name, one in reversed(inner)]


def _always(module: "Any", hook: "Hook") -> "Any":
    """Register a hook that is also called when the module raises, where this torch can."""
    try:
        return module.register_forward_hook(hook, always_call=True)  # also when the step raises
    except TypeError:
        return module.register_forward_hook(hook)


def is_called(module: "Any", thread: int, but: int) -> bool:
    """Whether more calls of a module than ``but`` are under way in a thread: asked where steps meet, which is rare."""
    if module is None:
        return False
    torchs_own = vars(sys.modules["torch.nn.modules.module"])
    frame: Any = sys._getframe() if thread == get_ident() else sys._current_frames().get(thread)
    while frame is not None:
        is_call = frame.f_code.co_name == "_call_impl" and frame.f_globals is torchs_own
        if is_call and frame.f_locals.get("self") is module:
            but -= 1
            if but < 0:
                return True
        frame = frame.f_back
    return False
