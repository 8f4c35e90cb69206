"""The operators of a module's forward, recorded on fake tensors: nothing is computed, nothing of it changes.

A fake tensor has a shape, a dtype and a device, but no memory (``torch._subclasses.fake_tensor``). The forward runs
on a mirror of the module, once, in Python; each operator that it comes to becomes a line of the tape. Recording stops
at the first thing that cannot be told so: a value that is needed on the host, a kernel of the program's own, an
operator that talks to other processes. What was recorded up to there is a tape as well.
"""

import os
import sys

from ..events import Clock
from .mirror import Mirror, Refused
from .outside import Outside
from .places import tensors_in
from .quiet import Quiet, Stopped

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Operators of a tape.
OPERATORS_MAX = 20_000

#: Namespaces of operators that compute and do nothing else.
_PURE = frozenset(("aten", "prims", "quantized", "_quantized", "torchvision"))

#: Those that take memory instead of tensors, which a fake tensor has none of.
_OF_MEMORY = frozenset(("aten::set_", "aten::resize_"))

#: Those that ask for a property: no work.
_QUESTIONS = frozenset(("prim",))

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Slot:
    """What stands for a tensor on a tape."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Op:
    """One operator: its arguments with slots for tensors, the slots of what it gives and of what it writes to."""

    __slots__ = ("args", "function", "kwargs", "line", "outputs", "writes")

    def __init__(self, function: "Any", args: "Any", kwargs: "Any", outputs: "Any", writes: "list[Slot]") -> None:
        self.function, self.args, self.kwargs, self.outputs, self.writes = function, args, kwargs, outputs, writes
        self.line: tuple[str, int, str] = ("", 0, "")  # that it came from


class Tape:
    """What was recorded. ``given`` are the real tensors of slots that no operator made."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.given: dict[int, Any] = {}
        self.written: set[int] = set()  # slots in given whose memory some operator writes to
        self.outputs: Any = None  # of the forward, with slots; None where recording stopped before
        self.stopped = ""  # why
        self.deadline_ns = 0


def mapped(change: "Callable[[Any], Any]", value: "Any") -> "Any":
    """Lists, tuples and dictionaries anew, with something else for each of their other elements."""
    if isinstance(value, (list, tuple)):
        items = [mapped(change, each) for each in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: mapped(change, each) for key, each in value.items()}
    return change(value)


def record(module: "Any", args: "Any", kwargs: "Any", around: "Callable[[], Any]", seconds: float) -> "Tape":
    """The tape of ``module(*args, **kwargs)``. ``around`` gives a context for the forward, such as autocast.

    ``seconds`` are those until the tape's deadline, from when torch has loaded what this takes.

    Raises Refused where the module, or this torch, is none that can be run so.
    """
    torch = sys.modules["torch"]
    if torch.nn.modules.module._has_any_global_hook():
        raise Refused("hooks of all modules are there")
    tape = Tape()
    with Quiet(torch), torch.inference_mode(False), torch.no_grad():
        mode = _fake_mode()
        tape.deadline_ns = Clock.perf_counter_ns() + int(seconds * 1e9)
        recorder = _Recorder(torch, mode, tape)
        mirror = Mirror(recorder.fake, modules=True)
        copy = mirror.of(module)
        args, kwargs = mirror.of(args), mirror.of(kwargs)
        try:
            with Outside(seconds), around(), mode, recorder.functions, recorder.operators:
                given = copy(*args, **kwargs)
            tape.outputs = [
                recorder.slots[id(each)] for each in tensors_in(torch.Tensor, given) if id(each) in recorder.slots
            ]
        except Stopped as why:
            tape.stopped = str(why)
        except (Exception, SystemExit) as error:
            tape.stopped = recorder.reason(error)
    tape.written = recorder.written()
    return tape


def _fake_mode() -> "Any":
    import importlib

    fakes = importlib.import_module("torch._subclasses.fake_tensor")
    mode = fakes.FakeTensorMode()
    if not hasattr(mode, "_allow_unsafe_data_ptr_access"):
        raise Refused("this torch cannot keep kernels from reading what is not there")
    # Whoever asks a fake tensor for its memory is to be told, not to get a null pointer for a kernel to run on.
    mode._allow_unsafe_data_ptr_access = False
    return mode


class _Recorder:
    """Sees each operator before the fake mode does."""

    def __init__(self, torch: "Any", mode: "Any", tape: "Tape") -> None:
        import importlib

        self._torch, self._mode, self._tape = torch, mode, tape
        self._fake = importlib.import_module("torch._subclasses.fake_tensor").FakeTensor
        self._inside = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
        self.slots: dict[int, Slot] = {}  # id of a fake tensor -> its slot
        self._alive: list[Any] = []  # so that no id comes twice
        self._memory: dict[int, list[int]] = {}  # memory of a fake tensor -> slots given in it
        self._written: set[int] = set()  # memory that is written to
        self._line: tuple[str, int, str] = ("", 0, "")
        self._at = ""
        self._why = ""  # it was stopped; raised again should the program have caught it
        classes = importlib.import_module("torch.utils._python_dispatch"), importlib.import_module("torch.overrides")
        self.operators, self.functions = self._modes(classes[0].TorchDispatchMode, classes[1].TorchFunctionMode)

    def _modes(self, dispatch: "Any", function: "Any") -> "tuple[Any, Any]":
        recorder, data_ptr = self, self._torch.Tensor.data_ptr

        class Operators(dispatch):  # type: ignore[misc]
            def __torch_dispatch__(self, func: "Any", types: "Any", args: "Any" = (), kwargs: "Any" = None) -> "Any":
                return recorder.operator(func, args, kwargs or {})

        class Functions(function):  # type: ignore[misc]
            def __torch_function__(self, func: "Any", types: "Any", args: "Any" = (), kwargs: "Any" = None) -> "Any":
                if func is data_ptr:
                    recorder.stop("a kernel that is no operator of torch's%s" % recorder.where())
                return func(*args, **(kwargs or {}))

        return Operators(), Functions()

    def fake(self, tensor: "Any") -> "Any":
        """What stands for a real tensor."""
        if isinstance(tensor, self._fake):
            return tensor
        fake = self._mode.from_tensor(tensor)
        slot = self._slot(fake)
        self._tape.given[slot.number] = tensor
        self._memory.setdefault(_memory(fake), []).append(slot.number)
        return fake

    def _slot(self, fake: "Any") -> "Slot":
        slot = self.slots.get(id(fake))
        if slot is None:
            slot = self.slots[id(fake)] = Slot(len(self._alive))
            self._alive.append(fake)
        return slot

    def operator(self, func: "Any", args: "Any", kwargs: "Any") -> "Any":
        """Record one, and let the fake mode say what it gives."""
        if self._why:
            raise Stopped(self._why)
        if func.namespace in _QUESTIONS:
            return func(*args, **kwargs)
        self._line, self._at = self._place(), func._schema.name
        if func.namespace not in _PURE:
            self.stop("an operator of its own, %s%s" % (func._schema.name, self.where()))
        if func._schema.name in _OF_MEMORY:
            self.stop("%s%s" % (func._schema.name, self.where()))
        if len(self._tape.ops) >= OPERATORS_MAX:
            self.stop("more than %d operators" % OPERATORS_MAX)
        if Clock.perf_counter_ns() > self._tape.deadline_ns:
            self.stop("the end of its time")
        tensor = self._torch.Tensor
        args, kwargs = (mapped(lambda each: self.fake(each) if isinstance(each, tensor) else each, value)
                        for value in (args, kwargs))  # fmt: skip
        given = func(*args, **kwargs)
        as_slot = lambda each: self._slot(each) if isinstance(each, tensor) else each  # noqa: E731
        written = self._written_by(func, args, kwargs)
        self._written.update(map(_memory, written))
        writes = [self._slot(each) for each in written]
        op = Op(func, mapped(as_slot, args), mapped(as_slot, kwargs), mapped(as_slot, given), writes)
        op.line = self._line
        self._tape.ops.append(op)
        return given

    def stop(self, why: str) -> None:
        """Raise Stopped, also at every operator from now on."""
        self._why = why
        raise Stopped(why)

    def _written_by(self, func: "Any", args: "Any", kwargs: "Any") -> "list[Any]":
        found = []
        schema = func._schema
        if schema.is_mutable or "batch_norm" in schema.name:  # which does not say that it keeps statistics
            for at, argument in enumerate(schema.arguments):
                alias = argument.alias_info
                if (alias is not None and alias.is_write) or argument.name in ("running_mean", "running_var"):
                    value = kwargs[argument.name] if argument.name in kwargs else args[at] if at < len(args) else None
                    found += [
                        each for each in (value if isinstance(value, (list, tuple)) else (value,))
                        if isinstance(each, self._torch.Tensor)
                    ]  # fmt: skip
        return found

    def written(self) -> "set[int]":
        """Slots of given tensors whose memory is written to."""
        return {slot for memory in self._written for slot in self._memory.get(memory, ())}

    def _place(self) -> "tuple[str, int, str]":
        """The innermost line that is neither torch's nor ours."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith((self._inside, _OWN_FOLDER)) and not file.startswith("<"):
                return file, frame.f_lineno or 0, frame.f_code.co_name
            if file == __file__ and frame.f_code.co_name == "record":
                break
            frame = frame.f_back
        return "", 0, ""

    def where(self) -> str:
        """Where the forward is, for a reason."""
        file, line, _ = self._place()
        return " at %s:%d" % (file, line) if line else ""

    def reason(self, error: "BaseException") -> str:
        """Why the forward could not go on."""
        name = type(error).__name__
        place = " at %s:%d" % self._line[:2] if self._line[1] else ""
        if name in ("DataDependentOutputException", "DynamicOutputShapeException"):
            return "a value that is needed on the host (%s%s)" % (self._at, place)
        if "data pointer" in str(error) or "data_ptr" in str(error):
            return "a kernel that is no operator of torch's%s" % place
        text = str(error).strip().partition("\n")[0][:200]
        return "what cannot be run without data, after %s%s: %s: %s" % (self._at or "its begin", place, name, text)


def _memory(tensor: "Any") -> int:
    return int(tensor.untyped_storage()._cdata)
