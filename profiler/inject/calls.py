"""Where steps begin: the one hook in ``nn.Module.__call__``, for all parts that need to know.

A step is a thread's outermost call of a module that holds parameters or other modules.

Two hooks in one attribute, taken out in the wrong order, would break the program: so there is this one. It is there for
as long as somebody needs it, and never where a compiler could come upon it. Where only models that are known already
have to be watched it moves to their classes, and costs nothing between one call of a model and the next.

A hook in a class that another has hooked since is not taken out under it: it stays and does nothing.
"""

from __future__ import annotations

import sys

from .events import RLock, get_ident
from .interrupts import leave_out_ours
from .modules import held_by

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any, Protocol

    class _Listener(Protocol):  # faults of its own stay inside
        def step_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
        def step_ends(self) -> None: ...


#: Classes of models that are watched one by one.
_CLASSES_MAX = 16


class Calls:
    """Tells its listeners of each thread's outermost calls of modules."""

    def __init__(self) -> None:
        self._listeners: tuple[_Listener, ...] = ()
        self._wide: set[int] = set()  # ids of the listeners that must hear of models never seen
        self._classes: dict[type, None] = {}  # of the models seen
        self._hooked: dict[type, tuple[Any, Any]] = {}  # class -> (our hook, what stood there before or None)
        self._inside: set[int] = set()  # threads in a step
        self._compiler = False
        self._lock = RLock()

    def want(self, listener: _Listener) -> bool:
        """Tell this listener of all steps from now on; False where a compiler or a missing torch forbids it."""
        with self._lock:
            if self._compiler or "torch" not in sys.modules:
                return False
            self._listeners += (listener,)
            self._wide.add(id(listener))
            self._settle()
            return True

    def narrow(self, listener: _Listener) -> bool:
        """From now on the models seen so far are enough for this listener; False when none of them can be watched."""
        with self._lock:
            self._wide.discard(id(listener))
            self._settle()
            return bool(self._hooked)

    def release(self, listener: _Listener) -> None:
        """Tell this listener no more."""
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each is not listener)
            self._wide.discard(id(listener))
            self._settle()

    def compiler_came(self) -> None:
        """Take every hook out, for good: none may end up in a compiled frame."""
        with self._lock:
            self._compiler = True
            self._settle()

    def forget(self) -> None:
        """In a forked child: no hook, no listener."""
        self._lock = RLock()
        self._listeners = ()
        self._settle()

    def enter(self, thread: int) -> bool:
        """Begin a step that is not a module call; False inside another one."""
        if thread in self._inside:
            return False
        self._inside.add(thread)
        return True

    def leave(self, thread: int) -> None:
        """End it."""
        self._inside.discard(thread)

    def _settle(self) -> None:
        """Have hooks where they are needed, and nowhere else."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        if self._compiler or not self._listeners:
            wanted: list[type] = []
        else:
            wanted = [torch.nn.Module] if self._wide else list(self._classes)
        for owner in [owner for owner in self._hooked if owner not in wanted]:
            self._take_out(owner)
        for owner in wanted:
            if owner not in self._hooked:
                self._put_in(owner, torch.nn.Module)

    def _put_in(self, owner: type, base: type) -> None:
        before = vars(owner).get("__call__")
        if before is None and owner is base:
            return
        hook = self._hook(owner, before)
        try:
            type.__setattr__(owner, "__call__", hook)
        except TypeError:  # a class that forbids it
            return
        self._hooked[owner] = (hook, before)

    def _take_out(self, owner: type) -> None:
        hook, before = self._hooked[owner]
        del self._hooked[owner]
        hook.alive[0] = False
        if vars(owner).get("__call__") is not hook:  # somebody has hooked it since
            return
        if before is None:
            type.__delattr__(owner, "__call__")
        else:
            type.__setattr__(owner, "__call__", before)

    def _hook(self, owner: Any, before: Any) -> Any:
        inside, alive = self._inside, [True]

        def call(*args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            outermost = alive[0] and thread not in inside and self._begins(thread, args, kwargs)
            try:
                if before is not None:
                    return before(*args, **kwargs)
                above: Any = super(owner, args[0])
                return above.__call__(*args[1:], **kwargs)
            except BaseException as error:
                leave_out_ours(error)
                raise
            finally:
                if outermost:
                    self._ends(thread)

        shown = before if before is not None else owner.__call__
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(call, name, getattr(shown, name, None))
        call.__wrapped__ = shown  # type: ignore[attr-defined]
        call.alive = alive  # type: ignore[attr-defined]
        return call

    def _begins(self, thread: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not args or _holds_nothing(args[0]) or _is_traced(sys.modules["torch"]):
            return False
        self._inside.add(thread)
        try:
            owner = type(args[0])
            if owner not in self._classes and len(self._classes) < _CLASSES_MAX and _is_named(owner):
                self._classes[owner] = None
            for listener in self._listeners:
                listener.step_begins(args[0], args[1:], kwargs)
        except BaseException:  # of a signal handler of the program's
            self._inside.discard(thread)
            raise
        return True

    def _ends(self, thread: int) -> None:
        try:
            for listener in self._listeners:
                listener.step_ends()
        finally:
            self._inside.discard(thread)


def _holds_nothing(module: Any) -> bool:
    """Whether it has neither parameters nor modules: what servers sample tokens with is no model, its call no step."""
    held = held_by(module)
    return bool(held.get("_parameters") == {} and held.get("_modules") == {})


def _is_traced(torch: Any) -> bool:
    """Whether this call is no step but somebody's look at the model: of a compiler, an exporter or a tracer."""
    core, compiler = torch._C, getattr(torch, "compiler", None)
    return any(
        ask is not None and ask()
        for ask in (
            getattr(compiler, "is_compiling", None),
            getattr(core, "_get_tracing_state", None),
            getattr(core, "_len_torch_dispatch_stack", None),
        )
    )


def _is_named(owner: type) -> bool:
    """Whether the class is pickled by its name: of others the contents are, and a hook would be among them."""
    module = sys.modules.get(owner.__module__)
    found: Any = module if owner.__module__ != "__main__" else None
    for name in owner.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is owner
