"""What CUDA graphs keep: the table that they go by, and the memory that they copy inputs to."""

import warnings
from array import array
from contextlib import nullcontext

from .inputs import Input
from .launcher import on_stream
from .memory import words_for, words_of
from .mirror import Mirror

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Optional

    from .places import Place

#: Bytes of inputs that are kept, in memory of the GPU; rows and calls of all graphs of it.
BYTES_MAX = 16 << 20
ROWS_MAX = 24576
CALLS_MAX = 16384

#: Tensors of a call, and where each may begin in the memory.
TENSORS_MAX = 8
ALIGNED = 16


class Call:
    """A call of a module in a capture. ``tensors`` are held until the scans of what it gives are launched."""

    __slots__ = (
        "args", "autocast", "closed", "kwargs", "nbytes", "number", "order", "path", "stands", "tensors", "why",
    )  # fmt: skip

    def __init__(self, path: str, order: int) -> None:
        self.path = path
        self.order, self.number = order, -1  # of the next scan when it began; its row in the table
        self.args: Any = ()
        self.kwargs: Any = {}
        self.autocast: Any = None
        self.stands: list[Any] = []  # tensors without memory, in the order of those that were taken
        self.tensors: list[tuple[Any, Optional[int]]] = []  # with their versions
        self.nbytes = 0
        self.closed = False
        self.why = ""  # it cannot be kept


class Kept:
    """Inputs of the module of a bad scan, and of the one around it; ``why`` there are none."""

    def __init__(self, step: int, order: int, place: "Place", why: str) -> None:
        self.step, self.order, self.place, self.why = step, order, place, why
        self.own: Optional[Input] = None
        self.around: Optional[Input] = None
        self.path_around: Optional[str] = None


class Store:
    """Of one GPU: the table of all graphs, and the memory for what is kept."""

    def __init__(self, torch: "Any", device: "Any", kernels: "ModuleType", state: "Any") -> None:
        self._torch, self._device, self._kernels, self._state = torch, device, kernels, state

        with torch.inference_mode(False), torch.no_grad():
            self._rows = words_for(device, ROWS_MAX, kernels.ROW_WORDS)
            self._calls = words_for(device, CALLS_MAX, kernels.CALL_WORDS)
            self.kept = torch.zeros(kernels.KEPT_WORDS, dtype=torch.int64, device=device)
            self.buffer = torch.zeros(BYTES_MAX, dtype=torch.int8, device=device)
        self._row_words, self._call_words = words_of(self._rows), words_of(self._calls)
        self._rows_count = 0
        self._called: list[Call] = []
        self._of_rows: list[tuple[Place, Optional[Call], Optional[Call]]] = []
        with warnings.catch_warnings():  # of the compiler, on the program's standard error
            warnings.simplefilter("ignore")
            self._launch(0, 0, 0, self._stream())  # compiled and loaded now: in a capture that might end it
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # replays may be on other streams

    def add(
        self,
        order: int,
        rows: "list[tuple[int, Place, Optional[Call], Optional[Call]]]",
        stream: int,
    ) -> None:
        """Behind scans from ``order`` on: a launch that keeps what the calls took. Nothing where the table is full."""
        count = rows[-1][0] - order + 1
        if self._rows_count + count > ROWS_MAX or len(self._called) + 2 * len(rows) > CALLS_MAX:
            return
        words = array("q", [-1]) * (count * self._kernels.ROW_WORDS)
        names: list[Any] = [(None, None, None)] * count
        for at, place, own, around in rows:
            if own is not None and around is not None and own.nbytes + around.nbytes > BYTES_MAX:
                around = None  # noqa: PLW2901
            place_in_words = (at - order) * self._kernels.ROW_WORDS
            words[place_in_words], words[place_in_words + 1] = self._number(own), self._number(around)
            names[at - order] = place, own, around
        begin = self._rows_count
        self._row_words[begin * self._kernels.ROW_WORDS : (begin + count) * self._kernels.ROW_WORDS] = words
        self._rows_count += count
        self._of_rows += names
        self._launch(begin, order, count, stream)

    def _number(self, call: "Optional[Call]") -> int:
        if call is None or call.why:
            return -1
        if call.number < 0:
            for tensor, version in call.tensors:
                if version is not None and tensor._version != version:
                    call.why = "what it takes was written to before it could be kept"
                    return -1
            call.number = len(self._called)
            words = [len(call.tensors)]
            for tensor, _ in call.tensors:
                words += [tensor.data_ptr(), span(tensor)]
            begin = call.number * self._kernels.CALL_WORDS
            self._call_words[begin : begin + len(words)] = array("q", words)
            self._called.append(call)
        return call.number

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(self._torch._C._cuda_getCurrentRawStream(self._device.index))

    def _launch(self, row: int, order: int, count: int, stream: int) -> None:
        kernels, device = self._kernels, self._device
        kernel = kernels.spikeprof_numerics_keep[(kernels.PROGRAMS,)]
        pointers = self._state, self._rows, self._calls, self.kept, self.buffer
        there = self._torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with there, on_stream(self._torch, device, stream):
            kernel(*pointers, row, order, count, num_warps=kernels.WARPS)

    def found(self) -> "Optional[Kept]":
        """What was kept; None where nothing was. Waits for the device."""
        row, _, word, _ = self.kept.tolist()
        if row <= 0 or self._of_rows[row - 1][0] is None:
            return None
        place, own, around = self._of_rows[row - 1]
        step, order = (word >> 32) - 1, self._kernels.LAST_ORDER - (word & self._kernels.LAST_ORDER)
        begin = own.nbytes if own is not None and own.number >= 0 else 0
        first = own or around
        kept = Kept(step, order, place, first.why if first else "what it takes was not seen in the capture")
        kept.own, kept.around = self._input(own, 0), self._input(around, begin)
        kept.path_around = around.path if around is not None else None
        return kept

    def _input(self, call: "Optional[Call]", begin: int) -> "Optional[Input]":
        if call is None or call.number < 0:
            return None
        torch, tensors = self._torch, {}
        with torch.inference_mode(False), torch.no_grad():
            for stand in call.stands:
                if stand.device.type != "meta":  # the host's, copied in the capture
                    tensors[id(stand)] = stand
                    continue
                size = span(stand)
                piece = self.buffer[begin : begin + size].clone().view(stand.dtype)
                tensors[id(stand)] = piece.as_strided(stand.size(), stand.stride())
                begin += aligned(size)
            mirror = Mirror(lambda stand: tensors[id(stand)])
            args, kwargs = mirror.of(call.args), mirror.of(call.kwargs)
        return Input(args, kwargs, list(tensors.values()), call.autocast, exact=True)


def aligned(size: int) -> int:
    """Bytes that so many take in the memory."""
    return -(-size // ALIGNED) * ALIGNED


def span(tensor: "Any") -> int:
    """Bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))  # noqa: B905
    return int(elements * tensor.element_size())
