"""Inputs of modules in CUDA graphs, where no Python runs when a value turns bad: the graph itself keeps them.

While a graph is captured, what each watched module takes is held until the scan of what it gives is launched, as that
is, too. Behind the scans goes one more small kernel (keep_triton.py) with a table of where the inputs lie: in the first
replay with a bad value it copies those of the module that gave it, and those of the module around it, to memory that
was set aside before the capture. All that is done in Python is done once for each graph.
"""

import importlib
import sys
import warnings
from array import array

from ..events import get_ident
from ..interrupts import is_ours
from .inputs import Input, autocast_now
from .memory import words_of
from .mirror import CALLED, Mirror, Refused
from .roots import Hook

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Optional

    from .looks import Place
    from .watch import Numerics

#: Bytes of inputs that are kept, in memory of the GPU; rows and calls of all graphs of it.
BYTES_MAX = 16 << 20
ROWS_MAX = 24576
CALLS_MAX = 16384

#: Tensors that a call may take: see keep_triton.py.
TENSORS_MAX = 8

#: Bytes of inputs that are held at a time while a graph is captured.
HELD_BYTES_MAX = 64 << 20


class Call:
    """A call of a module in a capture. ``tensors`` are held until the scans of what it gives are launched."""

    __slots__ = (
        "args",
        "autocast",
        "changed",
        "closed",
        "kwargs",
        "nbytes",
        "number",
        "order",
        "path",
        "stands",
        "tensors",
        "why",
    )

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
        pinned = device.type == "cuda"
        self._torch, self._device, self._kernels, self._state = torch, device, kernels, state

        def host(*sizes: int) -> "Any":
            return torch.zeros(*sizes, dtype=torch.int64, device="cpu", pin_memory=pinned)

        with torch.inference_mode(False), torch.no_grad():
            self._rows, self._calls = host(ROWS_MAX, kernels.ROW_WORDS), host(CALLS_MAX, kernels.CALL_WORDS)
            self.kept = torch.zeros(kernels.KEPT_WORDS, dtype=torch.int64, device=device)
            self.buffer = torch.zeros(BYTES_MAX, dtype=torch.int8, device=device)
        self._row_words, self._call_words = words_of(self._rows), words_of(self._calls)
        self._rows_count = 0
        self._called: list[Call] = []
        self._of_rows: list[tuple[Place, Optional[Call], Optional[Call]]] = []
        with warnings.catch_warnings():  # of the compiler, on the program's standard error
            warnings.simplefilter("ignore")
            self._launch(0, 0, 0, self._stream())  # compiled and loaded now: in a capture that might end it
        if pinned:
            torch.cuda.current_stream(device).synchronize()  # replays may be on other streams

    def add(
        self,
        order: int,
        rows: "list[tuple[int, Place, Optional[Call], Optional[Call]]]",
        stream: "Optional[int]" = None,
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
        self._launch(begin, order, count, self._stream() if stream is None else stream)

    def _number(self, call: "Optional[Call]") -> int:
        if call is None or call.why:
            return -1
        if call.number < 0:
            for tensor, version in call.tensors:
                if version is not None and tensor._version != version:
                    call.why = "what it takes was written to before it could be kept"
                    return -1
            call.number = len(self._called)
            words = [len(call.tensors), call.nbytes]
            for tensor, _ in call.tensors:
                words += [tensor.data_ptr(), _span(tensor)]
            begin = call.number * self._kernels.CALL_WORDS
            self._call_words[begin : begin + len(words)] = array("q", words)
            self._called.append(call)
        return call.number

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(self._torch._C._cuda_getCurrentRawStream(self._device.index))

    def _launch(self, row: int, order: int, count: int, stream: int) -> None:
        kernels, cuda = self._kernels, self._torch.cuda
        kernel = kernels.spikeprof_numerics_keep[(kernels.PROGRAMS,)]
        pointers = self._state, self._rows, self._calls, self.kept, self.buffer
        if self._device.type != "cuda":
            kernel(*pointers, row, order, count, num_warps=kernels.WARPS)
            return
        with cuda.device(self._device):
            if stream == self._stream():
                kernel(*pointers, row, order, count, num_warps=kernels.WARPS)
                return
            there = cuda.ExternalStream(stream, device=self._device) if stream else cuda.default_stream(self._device)
            with cuda.stream(there):
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
                size = _span(stand)
                piece = self.buffer[begin : begin + size].clone().view(stand.dtype)
                tensors[id(stand)] = piece.as_strided(stand.size(), stand.stride())
                begin += -(-size // self._kernels.ALIGNED) * self._kernels.ALIGNED
            mirror = Mirror(lambda stand: tensors[id(stand)])
            args, kwargs = mirror.of(call.args), mirror.of(call.kwargs)
        return Input(args, kwargs, list(tensors.values()), call.autocast, exact=True)


def _span(tensor: "Any") -> int:
    """Bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))  # noqa: B905
    return int(elements * tensor.element_size())


class Keeping:
    """What the watched modules take while a graph is captured. Used by the thread that captures."""

    def __init__(self, numerics: "Numerics") -> None:
        self._numerics, self._torch = numerics, sys.modules["torch"]
        self.stores: dict[int, Optional[Store]] = {}  # by GPU; None where there is none
        self._handles: list[Any] = []
        self._calls: dict[tuple[int, str], list[Call]] = {}
        self._held_bytes = 0

    def prepare(self) -> None:
        """A capture is about to begin: have memory and a kernel ready."""
        for number, scanner in list(self._numerics.looks.quick.items()):
            if number >= 0 and number not in self.stores:
                self.stores[number] = None
                try:
                    kernels = importlib.import_module(".keep_triton", __package__)
                    self.stores[number] = Store(self._torch, scanner.memory.device, kernels, scanner.memory.state)
                except Exception as error:  # no memory is left, …
                    if not is_ours(error, *CALLED):  # of a signal handler of the program's
                        raise

    def begin(self, modules: "list[tuple[int, str, Any]]") -> None:
        """A capture has begun: hook (root, path, module) of all that are watched."""
        self.end()
        if not any(self.stores.values()):
            return
        self._numerics.looks.launched = self.flushed
        for root, path, module in modules:
            if type(module).__name__ == "OptimizedModule":  # a hook more in it would have it compiled anew
                continue
            before = Hook(lambda _, args, kwargs, key=(root, path): self._takes(key, args, kwargs))
            after = Hook(lambda _module, _args, _output, key=(root, path): self._gave(key))
            try:
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after))
            except Exception as error:  # a class that takes no hooks
                if not is_ours(error, *CALLED):
                    raise

    def end(self) -> None:
        """The capture is over."""
        self._numerics.looks.launched = None
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        for calls in self._calls.values():
            for call in calls:
                call.tensors.clear()
        self._calls.clear()
        self._held_bytes = 0

    def _takes(self, key: "tuple[int, str]", args: "Any", kwargs: "Any") -> None:
        numerics = self._numerics
        if numerics.thread != get_ident():
            return
        waiting = numerics.looks.waiting
        call = Call(key[1], waiting.begin + len(waiting.tensors))
        try:
            self._hold(call, args, kwargs)
        except Refused as why:
            call.why = str(why)
        except Exception as error:
            if not is_ours(error, *CALLED):  # of a signal handler of the program's
                raise
            call.why = "what it takes could not be held: %s" % type(error).__name__
        if call.why:
            call.tensors.clear()
        self._held_bytes += call.nbytes if call.tensors else 0
        self._calls.setdefault(key, []).append(call)

    def _hold(self, call: Call, args: "Any", kwargs: "Any") -> None:
        torch = self._torch

        def leaf(tensor: "Any") -> "Any":
            if tensor.layout != torch.strided:
                raise Refused("it takes a tensor of layout %s" % tensor.layout)
            if tensor.get_device() not in self.stores:
                if tensor.is_cuda:
                    raise Refused("it takes tensors of another GPU")
                call.stands.append(tensor.detach().clone())
                return call.stands[-1]
            call.nbytes += -(-_span(tensor) // 16) * 16
            if call.nbytes > BYTES_MAX:
                raise Refused("its inputs take more than %d MiB" % (BYTES_MAX >> 20))
            if self._held_bytes + call.nbytes > HELD_BYTES_MAX:
                raise Refused("inputs of more than %d MiB would have been held at a time" % (HELD_BYTES_MAX >> 20))
            call.tensors.append((tensor, None if tensor.is_inference() else tensor._version))
            call.stands.append(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"))
            return call.stands[-1]

        with torch.inference_mode(False), torch.no_grad():
            mirror = Mirror(leaf)
            call.args, call.kwargs = mirror.of(tuple(args)), mirror.of(dict(kwargs))
        if len(call.tensors) > TENSORS_MAX:
            raise Refused("it takes more than %d tensors" % TENSORS_MAX)
        call.autocast = autocast_now(torch, "cuda")

    def _gave(self, key: "tuple[int, str]") -> None:
        for call in reversed(self._calls.get(key, ())):
            if not call.closed:
                call.closed = True
                return

    def flushed(self, device: int, held: "list[tuple[Any, Any, Any, int]]", stream: int) -> None:
        """Scans of these (tensor, spot, version, tag) were launched: keep the inputs of their modules behind them."""
        store = self.stores.get(device)
        if store is None or not held:
            return
        try:
            self._keep(store, held, stream)
        except Exception as error:
            if not is_ours(error, *CALLED):
                raise
            self.stores[device] = None

    def _keep(self, store: Store, held: "list[tuple[Any, Any, Any, int]]", stream: int) -> None:
        places, rows = self._numerics.looks.places, []
        for _, spot, _, tag in held:
            place = places[spot.point]
            if place.role in ("output", "input"):
                order = tag >> 32
                own = self._call(place.root, place.path, order) if place.role == "output" else None
                rows.append((order, place, own, self._around(place, order)))
        if rows:
            store.add(rows[0][0], rows, stream)
        self._let_go(held[-1][3] >> 32)

    def _call(self, root: int, path: str, order: int) -> "Optional[Call]":
        return next((call for call in reversed(self._calls.get((root, path), ())) if call.order <= order), None)

    def _around(self, place: "Place", order: int) -> "Optional[Call]":
        path = place.path
        while path:
            path = path.rpartition(".")[0]
            call = self._call(place.root, path, order)
            if call is not None:
                return call
        return None

    def _let_go(self, order: int) -> None:
        """Hold no inputs any more of modules whose scans were launched."""
        for calls in self._calls.values():
            for call in calls:
                if call.closed and call.tensors and call.order <= order:
                    call.tensors.clear()
                    self._held_bytes -= call.nbytes
            calls[:] = [call for call in calls if call.tensors or not call.closed]
