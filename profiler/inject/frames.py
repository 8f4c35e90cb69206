"""Where a launch comes from, read from the Python frames of the thread that launches: modules and lines of code.

Of the frames of ``nn.Module.__call__`` the variable ``self`` is read, of all others the code and the place in it. Up to
Python 3.12, reading a frame's variables makes a copy that lives as long as the frame: of these frames, which hold their
arguments to their end anyway, nothing lives longer for it. No frame is kept.
"""

from __future__ import annotations

import os
import sys

from .events import RLock
from .kinds import shape_of
from .modules import Modules

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

#: Frames of a stack that are kept, innermost first.
STACK_FRAMES_MAX = 32

#: Different stacks that get a number; what comes beyond has none.
STACKS_MAX = 8_000

#: Code objects known at a time: a program may make new ones for ever.
_CODES_MAX = 20_000

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep

#: What a code object is to us.
_CODE, _HIDDEN, _MODULE_CALL, _TRITON_RUN = range(4)

#: Files whose ``run`` launches a kernel of Triton's: its own, and the launchers of torch.compile.
_TRITON_FILES = (
    os.path.join("triton", "runtime", "jit.py"),
    os.path.join("_inductor", "runtime", "static_triton_launcher.py"),
    os.path.join("_inductor", "runtime", "static_cuda_launcher.py"),
)


class Place:
    """Where one launch comes from; -1 = not known."""

    __slots__ = ("module", "stack", "triton")

    def __init__(self, module: int, stack: int, triton: tuple[str, list[Any], list[str]] | None) -> None:
        self.module, self.stack, self.triton = module, stack, triton


class Frames:
    """Reads frames; numbers stacks. ``rows`` are the stacks that are yet to be written."""

    def __init__(self) -> None:
        self.modules = Modules()
        self.rows: list[tuple[int, list[tuple[str, int, str]]]] = []
        self.beyond = 0
        self._count = 0
        self._lock = RLock()
        self._codes: dict[int, tuple[CodeType, int]] = {}  # by id; held, so that no other gets it
        self._stacks: dict[tuple[int, ...], int] = {}  # ids of code objects and places in them
        self._calls: dict[CodeType, int] = {}

    def know_torch(self, torch: Any) -> None:
        """Learn which frames are calls of modules."""
        own = vars(torch.nn.Module)
        call = own.get("_wrapped_call_impl") or own.get("_call_impl") or own.get("__call__")
        names = {"_call_impl": _HIDDEN, "_slow_forward": _HIDDEN}
        found: dict[Any, int] = {getattr(own.get(name), "__code__", None): what for name, what in names.items()}
        found[getattr(call, "__code__", None)] = _MODULE_CALL
        found.pop(None, None)
        with self._lock:
            self._calls = found
            self._forget_codes()

    def place(self, frame: FrameType | None, with_stack: bool = True) -> Place:
        """Where the code that runs in this frame, and in those that called it, stands."""
        codes = self._codes
        innermost = frame
        key: list[int] = []
        chain = []
        triton = None
        while frame is not None:
            code = frame.f_code
            known = codes.get(id(code))
            what = self._known(code) if known is None else known[1]
            if what == _MODULE_CALL:
                chain.append(frame.f_locals.get("self"))
            elif what != _HIDDEN:
                if with_stack and len(key) < 2 * STACK_FRAMES_MAX:
                    key += (id(code), frame.f_lasti)
                if what == _TRITON_RUN and triton is None and with_stack:
                    triton = _triton_launch(frame.f_locals)
            frame = frame.f_back
        chain.reverse()
        module = self.modules.index(chain)
        if not with_stack:
            return Place(module, -1, None)
        stack = self._stacks.get(tuple(key))
        return Place(module, self._numbered(tuple(key), innermost) if stack is None else stack, triton)

    def take(self) -> tuple[list[Any], list[Any]]:
        """Rows of modules and of stacks made since the last time."""
        modules, stacks = self.modules.rows[:], self.rows[:]
        del self.modules.rows[: len(modules)], self.rows[: len(stacks)]  # others may have appended meanwhile
        return modules, stacks

    def _known(self, code: CodeType) -> int:
        with self._lock:
            what = self._calls.get(code)
            if what is None:
                what = _CODE
                if code.co_filename.startswith(_HERE):
                    what = _HIDDEN
                elif code.co_name == "run" and code.co_filename.endswith(_TRITON_FILES):
                    what = _TRITON_RUN
            if len(self._codes) >= _CODES_MAX:
                self._forget_codes()
            self._codes[id(code)] = (code, what)
            return what

    def _forget_codes(self) -> None:
        self._stacks.clear()  # before the ids in it can come to mean something else
        self._codes.clear()

    def _numbered(self, key: tuple[int, ...], frame: FrameType | None) -> int:
        with self._lock:
            if self._count >= STACKS_MAX:
                self.beyond += 1
                return -1
            number = self._count
            self._count += 1
            self.rows.append((number, self._lines(frame)))
            if all(identity in self._codes for identity in key[::2]):
                self._stacks[key] = number
            return number

    def _lines(self, frame: FrameType | None) -> list[tuple[str, int, str]]:
        lines: list[tuple[str, int, str]] = []
        while frame is not None and len(lines) < STACK_FRAMES_MAX:
            code = frame.f_code
            if self._known(code) not in (_HIDDEN, _MODULE_CALL):
                name = getattr(code, "co_qualname", code.co_name)
                lines.append((code.co_filename, frame.f_lineno or 0, name))
            frame = frame.f_back
        return lines


def _triton_launch(variables: Any) -> tuple[str, list[Any], list[str]] | None:
    """Kernel, shapes and dtypes of the arguments of a ``run``; shapes are [] for what is no tensor."""
    owner = variables.get("self")
    kernel = getattr(owner, "__name__", None) or getattr(owner, "name", None)
    bound = variables.get("bound_args")
    values = list(bound.values()) if isinstance(bound, dict) else list(variables.get("args") or ())
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if not isinstance(kernel, str) or tensor is None:
        return None
    shapes: list[Any] = []
    dtypes: list[str] = []
    for value in values:
        known = issubclass(type(value), tensor)
        shapes.append([int(size) for size in shape_of(torch, value)] if known else [])
        dtypes.append(str(value.dtype).rpartition(".")[2] if known else "")
    return kernel, shapes, dtypes
