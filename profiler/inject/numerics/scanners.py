"""Who scans the tensors of one device: Triton kernels on a GPU, torch operators elsewhere.

Small outputs wait, held, until there are enough of them for one launch: at 2 us each, one for each module would cost
a decode step several percent. They are scanned at the latest when the step ends. Meanwhile the program may have written
them again: torch's version counter tells, where a tensor has one (not in inference mode); what a kernel of the
program's own has changed is not seen, and the record then tells of the new values. Large outputs are scanned at once.
"""

import sys
import warnings
from collections import deque

from . import records, scan_torch
from .formats import FORMATS, NIBBLES
from .memory import RING_RECORDS, memory_for

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any, Optional

    from ..events import Clock
    from .formats import Format

#: Tensors that wait for one launch, elements of one of them, and of all: what they keep from being freed.
WAITING_MAX = 256
WAITING_ITEMS = 1 << 18
WAITING_ITEMS_MAX = 1 << 22

#: Elements from which on a tensor is long: those that are not should not wait for its many programs.
LONG_ITEMS = 1 << 15

#: Programs of one large tensor.
PROGRAMS_MAX = 1056

_NAN, _INF = records.STATISTICS.index("nan"), records.STATISTICS.index("inf")

#: Records of the CPU that wait to be written, and tensors whose numbers are on their way from a GPU without Triton.
BUFFER_RECORDS_MAX = 65536
PENDING_MAX = 4096


class Unchecked(Exception):
    """This tensor cannot be scanned; the text says why."""


def merged(tensor: "Any", dimensions: int) -> "list[int]":
    """Sizes and strides of a view, neighbours that lie as one dimension merged, innermost first, filled up with 1s."""
    pairs: list[list[int]] = []
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):  # noqa: B905 (Python 3.9)
        if size == 1:
            continue
        if pairs and pairs[-1][0] * pairs[-1][1] == stride:
            pairs[-1][0] *= size
        else:
            pairs.append([size, stride])
    if len(pairs) > dimensions:
        raise Unchecked("a view of more than %d strides" % dimensions)
    pairs += [[1, 0]] * (dimensions - len(pairs))
    return [size for size, _ in pairs] + [stride for _, stride in pairs]


class TritonScanner:
    """Of one GPU. Used by one thread at a time; ``lost`` and ``unready`` count scans that could not be made."""

    def __init__(self, torch: "Any", device: "Any", kernels: "ModuleType", pairs: int = 1) -> None:
        self._torch, self._device, self._kernels = torch, device, kernels
        self.memory = memory_for(
            torch, device, kernels.TABLE_WORDS, 2 * kernels.DIMENSIONS, kernels.SCRATCH_WORDS
        )  # fmt: skip
        self._on_gpu = device.type == "cuda"
        self._pairs = pairs  # see scan_triton.py; 1 is for the interpreter
        self.index = device.index or 0
        #: (place, index, tensor, version, order); the watch appends, and hands them to ``scan``.
        self.waiting: list[tuple[Any, int, Any, Optional[int], int]] = []
        self.items = 0  # in what waits
        self.stream = 0  # of what waits
        self._steps_due = 0
        self._ready: dict[tuple[int, bool], dict[str, Any]] = {}  # compile-time arguments
        self.lost = self.unready = 0
        self.every = 1  # in graphs
        self.now: Callable[[], int] = lambda: 0

    def __del__(self) -> None:
        """Nothing is freed: others may use the memory."""
        memory = getattr(self, "memory", None)
        if memory is not None:
            memory.idle = True

    def begin(self) -> None:
        """A step begins."""
        self._steps_due += 1

    def prove(self) -> None:
        """Compile, scan a tensor whose statistics are known, and see that the record comes. Raises what goes wrong."""
        torch, found, form = self._torch, [], FORMATS["float16"]
        with torch.inference_mode(False), torch.no_grad():
            known = torch.arange(-5000, 5001, dtype=torch.int32, device="cpu").to(torch.float16) * 2.0**-20
            tensor = known.to(self._device)
        self.begin()
        self.add(tensor, form, 0)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        self.memory.drain(lambda piece: found.append(piece.cast("q").tolist()), all_of_it=True)
        words = found[0] if found else [0] * records.RECORD_WORDS
        statistics = words[records.FIRST_STATISTIC : records.FIRST_STATISTIC + scan_torch.COUNT]
        if not records.is_whole(tuple(words)) or statistics != scan_torch.scan(known, form):
            raise RuntimeError("the record of a test is wrong: %s" % words)
        self.memory.state[0] = -1

    def capturing(self) -> bool:
        """Whether launches are captured instead of run."""
        return bool(self._on_gpu and self._torch.cuda.is_current_stream_capturing())

    def moved(self) -> bool:
        """Whether the program's current stream is another one than that of what waits."""
        return bool(self._on_gpu and self._torch._C._cuda_getCurrentRawStream(self.index) != self.stream)

    def take_up(self) -> None:
        """What waits from now on is of the current stream."""
        if self._on_gpu:
            self.stream = self._torch._C._cuda_getCurrentRawStream(self.index)

    def add(self, tensor: "Any", form: "Format", tag: int, scanned: int = records.AT_ONCE) -> None:
        """Scan one tensor in a launch of its own. Raises Unchecked."""
        items, address = tensor.numel(), tensor.data_ptr()
        packed = tensor.is_contiguous() and not address % 16  # it is read 16 bytes at a time
        shape = None if packed else merged(tensor, self._kernels.DIMENSIONS)
        parts = -(-items // self._kernels.part_items(form, not packed))
        words = [address, items, tag, records.form_of(tensor, items) | scanned]
        self._on_device(lambda: self._launch(form, not packed, words, min(parts, PROGRAMS_MAX), shape))

    def scan(self, groups: "list[tuple[Format, list[int]]]") -> None:
        """Scan what waited, a launch for each group: rows of the table of tensors that lie in memory as they are."""

        def launch() -> None:
            for form, words in groups:
                parts = -(-max(words[1::4]) // self._kernels.part_items(form, False))
                self._launch(form, False, words, parts, None)

        torch = self._torch
        if self.moved():
            cuda = torch.cuda  # to which the default stream's 0 is no stream of somebody else's
            external = cuda.ExternalStream(self.stream, device=self._device) if self.stream else None
            with cuda.stream(external or cuda.default_stream(self._device)):
                launch()
        else:
            self._on_device(launch)

    def _on_device(self, launch: "Callable[[], None]") -> None:
        if not self._on_gpu or self._torch.cuda.current_device() == self.index:
            launch()
        else:
            with self._torch.cuda.device(self.index):
                launch()

    def _launch(
        self, form: "Format", strided: bool, words: "list[int]", parts: int, shape: "Optional[list[int]]"
    ) -> None:
        capturing, count = self.capturing(), len(words) // 4
        ready = self._ready.get((form.number, strided))
        if ready is not None:
            self._start(ready, words, count, parts, shape, capturing)
        elif capturing:  # compiled and loaded then, the kernel might end the capture
            self.unready += count
        else:
            ready = self._ready[form.number, strided] = {
                **self._kernels.constants(form, strided, self._pairs), "RING": RING_RECORDS, "CLOCK": self._on_gpu,
                "num_warps": self._kernels.WARPS,
            }  # fmt: skip
            with warnings.catch_warnings():  # of the compiler, on the program's standard error
                warnings.simplefilter("ignore")
                self._start(ready, words, count, parts, shape, False)

    def _start(
        self, constants: "dict[str, Any]", words: "list[int]", count: int, parts: int, shape: "Optional[list[int]]",
        capturing: bool,
    ) -> None:  # fmt: skip
        memory = self.memory
        row = memory.reserve(count, capturing)
        if row < 0:
            self.lost += count
            return
        memory.fill(row, words, shape)
        if self._steps_due:
            self._count_steps(capturing)
        self._kernels.spikeprof_numerics_scan[(count, max(parts, 1))](
            memory.table, memory.shapes, memory.finished, memory.ring, memory.state, memory.scratch,
            row, self.every if capturing else 1, 0 if self._on_gpu else self.now(), **constants,
        )  # fmt: skip

    def _count_steps(self, capturing: bool) -> None:
        # A graph begins one step each time; what was begun before and never scanned is counted by the next launch.
        steps = 1 if capturing else self._steps_due
        self._kernels.spikeprof_numerics_step[(1,)](self.memory.state, steps, num_warps=1)
        self._steps_due -= steps


class TorchScanner:
    """Of the CPU, or of a GPU where Triton is missing: one tensor at a time, at once. Used by one thread at a time."""

    def __init__(self, torch: "Any", device: "Any", clock: "type[Clock]") -> None:
        self._torch, self._on_gpu, self._clock = torch, device.type == "cuda", clock
        self._step, self._tickets = -1, 0
        self._pending: deque[tuple[Any, Any, int, int, int, int, int]] = deque()
        self._made: list[bytes] = []
        self.lost = self.unready = 0
        self.saw_bad: Callable[..., None] = lambda *_, **__: None

    def begin(self) -> None:
        """A step begins."""
        self._step += 1

    def capturing(self) -> bool:
        """Whether launches are captured instead of run."""
        return bool(self._on_gpu and self._torch.cuda.is_current_stream_capturing())

    def add(self, tensor: "Any", form: "Format", tag: int, scanned: int = records.AT_ONCE) -> None:
        """Scan one tensor. Raises Unchecked."""
        if self.capturing():
            raise Unchecked("in a CUDA graph, and Triton is missing")
        elements = tensor.numel() * (2 if form.kind == NIBBLES else 1)
        laid_out = records.form_of(tensor, tensor.numel()) | records.AT_ONCE
        with self._torch.no_grad():
            if not self._on_gpu:
                found = scan_torch.scan(tensor, form)
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
