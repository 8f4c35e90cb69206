"""The scanner of a GPU: rows of the table, and the launches of the kernels that scan them."""

import warnings
from array import array

from ..interrupts import is_ours
from . import records, scan_torch
from .formats import FORMATS
from .launcher import launcher_for, on_stream
from .memory import RING_RECORDS, memory_for
from .mirror import CALLED

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from .formats import Format
    from .launcher import Launcher

#: Of a row of the table: address, items, tag, how it lies and when it is scanned (records.py).
ROW_WORDS = 4
ITEMS = 1

#: Tensors are read so many bytes at a time; others count as strided.
ALIGNED = 16

#: Parts of a tensor that one program takes by itself.
NARROW_PARTS = 4

#: Programs on each SM of those that share larger tensors, and of those that share the only one of a launch: all at the
#: same time. Elements of a byte have fewer bytes in flight, and gain from twice as many.
SHARING, SHARING_ONE = 3, 4

#: Numbers of programs for a tensor that one launch can have: a step's outputs are of few sizes.
SHARES = 4

#: What waits for a launch keeps so much of the GPU's memory from being freed: a 256th of it, and a 16th of what was
#: free when the watch began. In a capture less, which the graph keeps for good, and where a launch more costs the host
#: nothing; so, too, where the size is not known.
HELD_PART, HELD_OF_FREE = 256, 16
HELD_BYTES = 64 << 20

_SMS = 132  # where the number is not known


class Unchecked(Exception):
    """This tensor cannot be scanned; the text says why."""


class Launch:
    """Rows of the table, those with most items first; of strided ones sizes and strides, too."""

    __slots__ = ("form", "programs", "rows", "shapes", "shares", "strided")

    def __init__(self, form: "Format", strided: bool, rows: "list[int]", shapes: "list[int]") -> None:
        self.form, self.strided = form, strided
        self.rows, self.shapes = array("q", rows), array("q", shapes)
        self.shares: tuple[int, ...] = ()  # see ``shares_of``; until the first launch
        self.programs = 0


def shares_of(parts: "list[int]", sms: int) -> "list[int]":
    """[tensors, programs for each of them] times ``SHARES``, of tensors of so many parts, the largest first.

    Each program gets as many parts as any other. What is not among them has one program a tensor.
    """
    wide = [count for count in parts if count > NARROW_PARTS]
    programs = sms * (SHARING_ONE if len(wide) == 1 else SHARING)
    each = max(-(-sum(wide) // max(programs - len(wide), 1)), 2)
    runs: list[list[int]] = []
    for count in wide:
        share = -(-count // each)
        if runs and runs[-1][1] == share:
            runs[-1][0] += 1
        else:
            runs.append([1, share])
    while len(runs) > SHARES:  # take two as one where it costs fewest programs that have nothing to do
        at = min(range(len(runs) - 1), key=lambda at: runs[at + 1][0] * (runs[at][1] - runs[at + 1][1]))
        runs[at][0] += runs.pop(at + 1)[0]
    return [number for run in runs + [[0, 1]] * (SHARES - len(runs)) for number in run]


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


def held_bytes_of(cuda: "Any", device: "Any") -> int:
    """What may wait on a GPU. Memory that torch has set aside and not given out is free."""
    free, total = cuda.mem_get_info(device)
    try:
        free += cuda.memory_reserved(device) - cuda.memory_allocated(device)
    except RuntimeError as error:  # an allocator of the program's, which tells nothing of that
        if not is_ours(error, *CALLED):  # of a signal handler of the program's
            raise
    return int(min(total // HELD_PART, free // HELD_OF_FREE))


class TritonScanner:
    """Of one GPU. Used by one thread at a time; ``lost`` and ``unready`` count scans that could not be made."""

    def __init__(self, torch: "Any", device: "Any", kernels: "ModuleType", pairs: int = 1) -> None:
        self._torch, self._device, self._kernels = torch, device, kernels
        self.memory = memory_for(torch, device, ROW_WORDS, 2 * kernels.DIMENSIONS, kernels.SCRATCH_WORDS)
        self._on_gpu = device.type == "cuda"
        self._pairs = pairs  # see scan_triton.py; 1 is for the interpreter
        self.index = device.index or 0
        self._held, self._sms = HELD_BYTES, _SMS
        if self._on_gpu:
            self._held = held_bytes_of(torch.cuda, device)
            self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        #: The handle of a device's current stream.
        self.stream_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if self._on_gpu else lambda _: 0
        own = self.index
        self._current: Callable[[], int] = torch._C._cuda_getDevice if self._on_gpu else lambda: own
        self._capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing if self._on_gpu else bool
        self._steps_due = 0
        self._ready: dict[tuple[int, bool], dict[str, Any]] = {}  # compile-time arguments
        self._launchers: dict[tuple[int, bool], Launcher] = {}
        self._short_way = self._on_gpu  # whether launchers are used
        self.lost = self.unready = self.launches = 0
        self.every = 1  # in graphs
        self.now: Callable[[], int] = lambda: 0

    def __del__(self) -> None:
        """Nothing is freed: others may use the memory."""
        memory = getattr(self, "memory", None)
        if memory is not None:
            memory.idle = True

    def begin(self, steps: int = 1) -> None:
        """So many steps have begun."""
        self._steps_due += steps

    def prove(self) -> None:
        """Compile, scan a tensor whose statistics are known, and see that the record comes. Raises what goes wrong.

        Then the same by the short way to launch, which is given up if anything is wrong with it.
        """
        self._prove()
        if self._launchers:
            try:
                self._prove()
            except Exception:
                self._short_way = False
                self._launchers.clear()
        self.memory.begin_anew()
        self._steps_due = 0

    def _prove(self) -> None:
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

    def capturing(self) -> bool:
        """Whether launches are captured instead of run."""
        return self._capturing()

    def held_bytes(self) -> int:
        """What may wait for a launch."""
        return min(self._held, HELD_BYTES) if self.capturing() else self._held

    def row_of(self, tensor: "Any", form: "Format", tag: int) -> "tuple[bool, list[int], list[int]]":
        """(whether it is strided, its row of the table but for when, its sizes and strides if so). Raises Unchecked."""
        items, address = tensor.numel(), tensor.data_ptr()
        if items and not address:
            raise Unchecked("a tensor without memory")
        strided = bool(address % ALIGNED) or not tensor.is_contiguous()
        shape = merged(tensor, self._kernels.DIMENSIONS) if strided else []
        return strided, [address, items, tag, records.form_of(tensor, items)], shape

    def add(self, tensor: "Any", form: "Format", tag: int) -> None:
        """Scan one tensor in a launch of its own. Raises Unchecked."""
        strided, row, shape = self.row_of(tensor, form, tag)
        row[-1] |= records.AT_ONCE
        self.scan([Launch(form, strided, row, shape)], self.stream_of(self.index))

    def scan(self, launches: "list[Launch]", stream: int) -> None:
        """Launch scans of what a stream has made."""
        if self._current() == self.index:
            self._scan(launches, stream)
        else:
            with self._torch.cuda.device(self.index):
                self._scan(launches, stream)

    def _scan(self, launches: "list[Launch]", stream: int) -> None:
        capturing, memory = self.capturing(), self.memory
        for each in launches:
            count, key = len(each.rows) // ROW_WORDS, (each.form.number, each.strided)
            if capturing and key not in self._ready:  # compiled and loaded then, the kernel might end the capture
                self.unready += count
                continue
            row = memory.reserve(count, capturing)
            if row < 0:
                self.lost += count
                continue
            memory.fill(row, each.rows, each.shapes)
            if not each.shares:
                self._share_out(each)
            # A graph begins one step each time; what was begun before and never scanned is counted by the next launch.
            steps = min(self._steps_due, 1) if capturing else self._steps_due
            every, now = self.every if capturing else 1, 0 if self._on_gpu else self.now()
            self._start(key, each.form, each.programs, stream, (row, *each.shares, steps, every, now))
            self._steps_due -= steps
            self.launches += 1

    def _share_out(self, launch: Launch) -> None:
        part = int(self._kernels.part_items(launch.form, launch.strided))
        sms = self._sms * (2 if launch.form.item_bytes == 1 else 1)
        parts = [-(-items // part) for items in launch.rows[ITEMS::ROW_WORDS]]
        shares = shares_of(parts, sms)
        launch.shares = tuple(shares)
        launch.programs = len(parts) + sum(
            count * (share - 1)
            for count, share in zip(shares[::2], shares[1::2])  # noqa: B905 (Python 3.9)
        )

    def _start(
        self, key: "tuple[int, bool]", form: "Format", programs: int, stream: int, numbers: "tuple[int, ...]"
    ) -> None:
        launcher = self._launchers.get(key)
        if launcher is not None:
            launcher.launch(programs, stream, numbers)
            return
        constants = self._ready.get(key)
        if constants is not None:
            self._start_by_triton(constants, programs, stream, numbers)
            return
        constants = self._ready[key] = {
            **self._kernels.constants(form, key[1], self._pairs), "RING": RING_RECORDS, "CLOCK": self._on_gpu,
        }  # fmt: skip
        with warnings.catch_warnings():  # of the compiler, on the program's standard error
            warnings.simplefilter("ignore")
            compiled = self._start_by_triton(constants, programs, stream, numbers)
        if self._short_way:
            launcher = launcher_for(compiled, self._pointers(), len(numbers))
            if launcher is not None:
                self._launchers[key] = launcher

    def _start_by_triton(
        self, constants: "dict[str, Any]", programs: int, stream: int, numbers: "tuple[int, ...]"
    ) -> "Any":
        kernel = self._kernels.spikeprof_numerics_scan[(programs,)]
        with on_stream(self._torch, self._device, stream):
            return kernel(*self._pointers(), *numbers, **constants)

    def _pointers(self) -> "tuple[Any, ...]":
        memory = self.memory
        return memory.table, memory.shapes, memory.finished, memory.ring, memory.state, memory.scratch
