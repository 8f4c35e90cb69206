"""Which models are watched, and the steps that are looked at.

A model is found when it is called for the first time, as the outermost module. What it and its submodules give comes
here by hooks (roots.py) or without (direct.py). An output that several modules hand on is scanned once; the others are
noted as the same. A module that writes into its own input is learned at its first call: from then on what waits is
scanned before it.
"""

from functools import partial

from ..events import RLock, get_ident
from ..interrupts import is_from_handler, is_ours
from . import passed_by, scripts
from .alike import Alike
from .direct import Direct
from .first_bad import FirstBad
from .given import giver
from .gradients import Gradients
from .graph_inputs import GraphInputs
from .looks import Looks
from .named import Named
from .places import tensors_in
from .roots import Root, is_called, watched_modules
from .unseen import is_compiling, is_traced
from .waiting import quick

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Optional

    from .places import Place

ROLES = ("output", "input", "weight", "gradient")

_COMPILER_LOADED = "calls that torch's compiler has compiled, which was loaded since: watch what torch.compile gives"


class Numerics:
    """Watches models. ``say`` takes events; every fault ends the watch, and never reaches the program."""

    def __init__(
        self, say: "Callable[..., None]", every: int = 1, patterns: "tuple[str, ...]" = ("*",),
        roles: "tuple[str, ...]" = ("output",), told_of_compiler: bool = False,
    ) -> None:  # fmt: skip
        self._say, self._every, self.roles = say, max(every, 1), roles
        self.looks = Looks(say, self._every)
        self._modules = partial(watched_modules, patterns=patterns, unchecked=self.looks.unchecked)
        self.first_bad, self.graph_inputs = FirstBad(self), GraphInputs(self)
        self.looks.saw_bad = self.first_bad.saw
        self.waits = quick(self.looks.waiting, self.flush)
        self.gave, self.several, self.hooked = giver(self)
        self.direct = Direct(self, told_of_compiler, always=self._every == 1)
        self.gradients, self._named = Gradients(self), Named(self, say)
        self.lock = RLock()
        self._roots: dict[int, Root] = {}
        self._hides = False  # whether torch.jit does not see our hooks
        self._models: dict[int, Any] = {}  # weak references, also of those that are not watched any more
        self._alike = Alike()
        self.thread = 0  # that is in a step
        self._root: Optional[Root] = None
        self._last: Optional[Root] = None  # that was in a step
        self._again = 0  # calls of that model inside its own
        self.closed = False
        self.after_step: Callable[[], None] = lambda: None
        self.concurrent = 0  # steps not looked at, as another thread was in one

    # -- models -------------------------------------------------------------------------------

    def step_begins(self, module: "Any", args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> None:
        """An outermost call of a module, see calls.py: watch it, if it is not yet."""
        if not self.closed and id(module) not in self._roots:
            self.attach(module)

    def attach(self, module: "Any") -> None:
        """Watch a model and its submodules, from its next step on."""
        try:
            with self.lock:
                self._attach(module)
        except Exception as error:
            self.fault(error)

    def _attach(self, module: "Any") -> None:
        known = self._roots.get(id(module))
        if known is not None:
            if known.module() is module:
                return
            known.remove()
        if "output" in self.roles:
            self.direct.put_in()
        root = self._roots[id(module)] = Root(module, self._gone)
        known_before = self._alike.name(root, self._modules(module))
        self._models[root.number] = root.module
        if not known_before and any(vars(each).get("batch_first") is False for each in module.modules()):
            self._say(ev="numerics_tokens_first", root=root.number)
        if not self.direct.enter(module, root):
            root.hook(self)
        if root.refused:
            return
        if not self._hides:
            self._hides = True
            scripts.put_in()
        for path, each in self._modules(module):
            root.prepare(self, path, each)

    def _gone(self, root: "Root") -> None:
        for key, each in list(self._roots.items()):
            if each is root:
                self._roots.pop(key, None)
        self._models.pop(root.number, None)
        self.direct.forget(root)
        passed_by.tell(self.looks, [root], self._modules)
        self._alike.leave(root)

    def close(self) -> None:
        """Take all hooks out, for good; what was scanned can still be read."""
        if not self.closed:
            self.closed = True
            try:
                passed_by.tell(self.looks, list(self._roots.values()), self._modules)
            except Exception as error:
                if not is_ours(error):  # of a signal handler of the program's
                    raise
        self.let_go()

    def forked(self) -> None:
        """In a child: a thread that is not in it may hold the lock."""
        self.lock = RLock()

    def compiler_came(self) -> None:
        """Something is about to be compiled: take all hooks out."""
        self.direct.told_of_compiler = False  # from now on its being loaded counts
        self.let_go()

    def compiler_loads(self) -> None:
        """torch's compiler, of which nobody has told, is about to be loaded: it is to come upon nothing but hooks."""
        try:
            if not self.closed:
                self.direct.take_out()
                for root in list(self._roots.values()):
                    root.be_careful()
                self.looks.unchecked("", _COMPILER_LOADED)
                if self._root is not None and self.thread == get_ident():
                    self._root.switch(self._root.on)
        except Exception as error:
            self.fault(error)

    def let_go(self) -> None:
        """Take all hooks out."""
        with self.lock:
            roots, self._roots = list(self._roots.values()), {}
            for root in roots:
                root.remove()
            if self._hides:
                self._hides = False
                scripts.take_out()
            self.direct.take_out()
            self.first_bad.take_out()

    def fault(self, error: "Exception") -> None:
        """A fault of ours: the watch is over, the program goes on. Raised again where it is none of ours."""
        if is_from_handler(error):
            raise error
        self._say(ev="note", text="numerics are not checked any more: %s: %s" % (type(error).__name__, error))
        try:
            self.looks.drop()
            self.close()
        except Exception:
            pass

    # -- steps --------------------------------------------------------------------------------

    def begins(self, root: "Root", args: "tuple[Any, ...]") -> None:
        """A model is called."""
        thread = get_ident()
        if self.thread == thread and self._is_under_way(root):
            self._again += self._root is root
            return
        try:
            with self.lock:
                if self.closed or is_compiling() or self.looks.traced():
                    return
                if self.thread not in (0, thread) and self._is_under_way():
                    self.concurrent += 1
                    return
                self.thread, self._root, self._again = thread, root, 0
            self.looks.begin()
            self.gradients.begin()
            looked_at = root.steps % self._every == 0 or self.looks.capturing()
            direct = self.direct.ready()
            if direct:
                self.direct.begins(root, self._roots.values())
            with self.lock:
                if self.closed:  # by another thread, meanwhile
                    return
                if self._last is not None and self._last is not root:
                    self._last.switch(False)  # that model may be a part of this one
                root.switch(looked_at, direct)
                self.direct.turn(looked_at)
                if self.first_bad.busy:
                    self.first_bad.begins(root)
            root.steps += 1
            if root.steps == 1:
                self._weigh(root)
            if looked_at and root.taken is not None:
                self.inputs(root.taken, args)
        except Exception as error:
            self.fault(error)

    def ends(self, root: "Root") -> None:
        """A call of a model has ended."""
        if self.thread != get_ident() or self._root is not root:
            return
        if self._again:  # it had called itself
            self._again -= 1
            return
        try:
            self.looks.flush(ends=True)
            self.direct.turn(False)
        except Exception as error:
            self.fault(error)
        finally:
            # Its hooks stay: torch may be going through them.
            self.thread, self._root, self._last = 0, None, root
        self.after_step()

    def _is_under_way(self, begins: "Optional[Root]" = None) -> bool:
        """Whether the step that began last still goes on: KeyboardInterrupt, SystemExit and the like tell no hook.

        ``begins``: of which model a call has just begun, in this thread.
        """
        root = self._root
        model = root.module() if root is not None else None
        hooked = root is not None and root is begins and root.handles  # a hook is called in the call that begins
        return is_called(model, self.thread, but=1 if hooked else 0)

    def _weigh(self, root: "Root") -> None:
        module = root.module()
        if "weight" in self.roles and module is not None and not self.looks.capturing():
            self._named.weights(root, self._modules(module))

    def capture_comes(self) -> None:
        """A capture is about to begin."""
        if ("output" in self.roles or "input" in self.roles) and self._inner():
            self.graph_inputs.prepare()

    def capture_began(self) -> None:
        """A capture has begun: what waits from before cannot be scanned in it."""
        dropped = self.looks.drop()
        self.looks.waiting.turn_away()  # less may wait from now on
        if dropped:
            self.looks.unchecked("", "%d outputs of before a capture that began in the middle of a step" % dropped)
        self.graph_inputs.begin([(number, *each) for number, model in self._inner() for each in self._modules(model)])

    def _inner(self) -> "list[tuple[int, Any]]":
        """Models, by their numbers, whose inside is watched."""
        with self.lock:
            roots = [(root.number, root.module()) for root in list(self._roots.values())]
        return [each for each in roots if each[1] is not None and type(each[1]).__name__ != "OptimizedModule"]

    def capture_ends(self, *_: object) -> None:
        """A capture is about to end."""
        self.flush()
        self.looks.waiting.turn_away()
        self.graph_inputs.end()

    def flush(self) -> None:
        """Scan what waits: a capture is about to end, or a module about to write into what waits."""
        try:
            self.looks.flush()
        except Exception as error:
            self.fault(error)

    def flush_in_step(self, *_: object) -> None:
        """Scan what waits of this thread's step."""
        if self.thread == get_ident() and not is_traced():
            self.flush()

    def flush_outside(self) -> None:
        """Scan what waits of no step, or of this thread's."""
        with self.lock:
            if self.thread in (0, get_ident()):
                self.flush()

    # -- what modules take and give -----------------------------------------------------------

    def model(self, number: int) -> "Any":
        """A watched model by its number; None if it has gone."""
        known = self._models.get(number)
        return known() if known is not None else None

    def looking(self) -> bool:
        """Whether the step that is under way is looked at."""
        return self._root is not None and self._root.on

    def bisect(self) -> "Optional[dict[str, Any]]":
        """The first bad operator, or why it is not known; None where nothing was bad. Not in a step."""
        with self.lock:
            if self.thread == 0:
                for root in list(self._roots.values()):
                    root.switch(False)
                return self.first_bad.tell()
        return None

    def inputs(self, place: "Place", args: "tuple[Any, ...]") -> None:
        """What a module takes."""
        if self.thread != get_ident() or self.looks.traced():
            return
        try:
            for index, tensor in enumerate(tensors_in(self.looks.tensor, args)):
                self.looks.see(place, index, tensor)
        except Exception as error:
            self.fault(error)

    def look(self, place: "Place", index: int, tensor: "Any", ends: bool = True) -> bool:
        """Scan a tensor outside of the modules' hooks; False where another thread is in a step."""
        with self.lock:
            if self.closed:
                return False
            if self.thread not in (0, get_ident()):
                self.concurrent += 1
                return False
            if self.thread == 0:
                self.looks.outside()
            self.looks.see(place, index, tensor)
            if ends and self.thread == 0:
                self.looks.flush(ends=True)
            return True

    def look_at(
        self, name: str, tensor: "Any", role: str, dtype: str, scale: "Any" = None, zero_point: "Any" = None
    ) -> None:
        """Scan a tensor that the program names, as one of ``dtype`` where that is not the tensor's own.

        ``scale`` and ``zero_point``: numbers or tensors, see scales.py.
        """
        try:
            with self.lock:
                self._named.look(name, tensor, role, dtype, scale, zero_point)
        except Exception as error:
            self.fault(error)

    # -- what was found -----------------------------------------------------------------------

    def drain(self, write: "Callable[[int, Any], None]", all_of_it: bool = False) -> None:
        """Hand over the records made since the last time: ``write(device, bytes)``. Called by another thread."""
        first_bad = self.first_bad

        def look_and_write(device: int, piece: "Any") -> None:
            first_bad.look(piece)
            write(device, piece)

        self.looks.drain(look_and_write, all_of_it)

    def losses(self) -> "dict[str, int]":
        """Scans that could not be made, by reason."""
        return {**self.looks.losses(), "steps of other threads at the same time": self.concurrent}
