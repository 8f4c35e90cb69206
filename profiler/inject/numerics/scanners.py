"""Who scans the tensors of one device: Triton kernels on a GPU, torch operators elsewhere.

On a GPU outputs wait, held, for a common launch (waiting.py): at 2 us each, one for each module would cost a decode
step several percent, and the host more. They are scanned at the latest when the step ends. Meanwhile the program may
have written them again: torch's version counter tells, where a tensor has one (not in inference mode); what a kernel
of the program's own has changed is not seen, and the record then tells of the new values.
"""

import sys
from collections import deque

from ..interrupts import is_ours
from . import records, scan_torch
from .formats import NIBBLES
from .mirror import CALLED
from .scanner import TritonScanner, Unchecked

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any, Optional

    from ..events import Clock
    from .formats import Format

_NAN, _INF = records.STATISTICS.index("nan"), records.STATISTICS.index("inf")

#: Records of the CPU that wait to be written, and tensors whose numbers are on their way from a GPU without Triton.
BUFFER_RECORDS_MAX = 65536
PENDING_MAX = 4096


class TorchScanner:
    """Of the CPU, or of a GPU where Triton is missing: one tensor at a time, at once. Used by one thread at a time."""

    def __init__(self, torch: "Any", device: "Any", clock: "type[Clock]") -> None:
        self._torch, self._on_gpu, self._clock = torch, device.type == "cuda", clock
        self._step, self._tickets = -1, 0
        self._pending: deque[tuple[Any, Any, int, int, int, int, int]] = deque()
        self._made: list[bytes] = []
        self.lost = self.unready = 0
        self.saw_bad: Callable[..., None] = lambda *_, **__: None

    def begin(self, steps: int = 1) -> None:
        """So many steps have begun."""
        self._step += steps

    def capturing(self) -> bool:
        """Whether launches are captured instead of run."""
        return bool(self._on_gpu and self._torch.cuda.is_current_stream_capturing())

    def add(self, tensor: "Any", form: "Format", tag: int) -> None:
        """Scan one tensor. Raises Unchecked."""
        if self.capturing():
            raise Unchecked("in a CUDA graph, and Triton is missing")
        if _is_without_memory(tensor):
            raise Unchecked("a tensor without memory")
        elements = tensor.numel() * (2 if form.kind == NIBBLES else 1)
        laid_out = records.form_of(tensor, tensor.numel()) | records.AT_ONCE
        if not self._on_gpu:
            try:
                found = scan_torch.scan(tensor, form)
            except (RuntimeError, ValueError) as error:
                if not is_ours(error, *CALLED):  # of a signal handler of the program's
                    raise
                raise Unchecked("torch cannot scan it: %s" % str(error).partition("\n")[0][:100]) from None
            self._write(self._step, tag, self._clock.unix_ns(), elements, found, laid_out)
        elif len(self._pending) >= PENDING_MAX:
            self.lost += 1
        else:
            values = self._torch.empty(scan_torch.COUNT, dtype=self._torch.int64, device="cpu", pin_memory=True)
            values.copy_(scan_torch.scan_on_device(tensor, form), non_blocking=True)
            done = self._torch.cuda.Event()
            done.record()
            self._pending.append((done, values, self._step, tag, self._clock.unix_ns(), elements, laid_out))
        self._settle(wait=False)

    def take(self, all_of_it: bool) -> bytes:
        """The records made since the last time."""
        if all_of_it:
            self._settle(wait=True)
        made = self._made[:]
        del self._made[: len(made)]  # the other thread may have appended meanwhile
        return b"".join(made)

    def _settle(self, wait: bool) -> None:
        while self._pending:
            done, values, step, tag, when, elements, laid_out = self._pending[0]
            if not wait and not done.query():
                return
            if wait:
                done.synchronize()
            self._pending.popleft()
            self._write(step, tag, when, elements, values.tolist(), laid_out)

    def _write(self, step: int, tag: int, when_ns: int, elements: int, found: "list[int]", laid_out: int) -> None:
        if found[_NAN] or found[_INF]:
            self.saw_bad(step, tag, now=not self._on_gpu)
        if len(self._made) >= BUFFER_RECORDS_MAX:
            self.lost += 1
            return
        self._made.append(records.pack(self._tickets, step, tag, when_ns, elements, found, laid_out))
        self._tickets += 1


def _is_without_memory(tensor: "Any") -> bool:
    """Whether the program gave its storage up: operators would read it all the same, and end the process."""
    try:
        return bool(tensor.numel()) and not tensor.untyped_storage().nbytes()
    except (RuntimeError, AttributeError) as error:  # of torch.func, which has others' storage; torch before 2.0
        if not is_ours(error, *CALLED):  # of a signal handler of the program's
            raise
        return False


def _has_pairs(torch: "Any", device: "Any") -> bool:
    return not torch.version.hip and torch.cuda.get_device_capability(device)[0] >= 9


def load_kernels(needs_gpu: bool) -> "Optional[ModuleType]":
    """The Triton kernels, where Triton is installed and does what is asked; None elsewhere."""
    import importlib
    import os

    if (os.environ.get("TRITON_INTERPRET", "0") == "1") == needs_gpu:
        return None
    try:
        importlib.import_module("triton")
        importlib.import_module("triton.language.extra.cuda")
        return importlib.import_module(".scan_triton", __package__)
    except Exception:  # a Triton that does not fit this torch or this machine
        return None


def scanner_for(device: "Any", clock: "type[Clock]", note: "Callable[[str], object]") -> "Any":
    """The scanner that suits a device; ``note`` hears why it is not the usual one. Waits for the device, this once."""
    torch = sys.modules["torch"]
    if device.type == "cuda":
        kernels = load_kernels(needs_gpu=True)
        if kernels is None:
            note("Triton is missing: outputs are scanned by torch operators, those in CUDA graphs not at all")
            return TorchScanner(torch, device, clock)
        for pairs in (2, 0) if _has_pairs(torch, device) else (0,):
            try:
                scanner = TritonScanner(torch, device, kernels, pairs)
                scanner.prove()
            except Exception as error:  # no C compiler, a driver that is too old, …
                why = "%s: %s" % (type(error).__name__, str(error).partition("\n")[0])
            else:
                return scanner
        note("Triton does not work here (%s): outputs in CUDA graphs are not scanned" % why)
    return TorchScanner(torch, device, clock)
