"""Inputs of modules in CUDA graphs, where no Python runs when a value turns bad: the graph itself keeps them.

While a graph is captured, what each watched module takes is held until the scan of what it gives is launched, as that
is, too. Behind the scans goes one more small kernel (keep_triton.py) with a table of where the inputs lie: in the first
replay with a bad value it copies those of the module that gave it, and those of the module around it, to memory that
was set aside before the capture. All that is done in Python is done once for each graph.
"""

import importlib
import sys

from ..events import get_ident
from ..interrupts import is_ours
from . import graph_store
from .graph_store import TENSORS_MAX, Call, Store, aligned, span
from .inputs import autocast_now
from .mirror import CALLED, Mirror, Refused
from .records import order_of
from .roots import Hook

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any, Optional

    from .places import Place
    from .watch import Numerics

#: Bytes of inputs that are held at a time while a graph is captured.
HELD_BYTES_MAX = 64 << 20


class GraphInputs:
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
        call = Call(key[1], numerics.looks.waiting.order)
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
            call.nbytes += aligned(span(tensor))
            if call.nbytes > graph_store.BYTES_MAX:
                raise Refused("its inputs take more than %d MiB" % (graph_store.BYTES_MAX >> 20))
            if self._held_bytes + call.nbytes > HELD_BYTES_MAX:
                raise Refused("inputs of more than %d MiB would have been held at a time" % (HELD_BYTES_MAX >> 20))
            call.tensors.append((tensor, None if tensor.is_inference() else tensor._version))
            call.stands.append(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"))
            return call.stands[-1]

        with torch.inference_mode(False):
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
                order = order_of(tag)
                own = self._call(place.root, place.path, order) if place.role == "output" else None
                rows.append((order, place, own, self._around(place, order)))
        if rows:
            store.add(rows[0][0], rows, stream)
        self._let_go(order_of(held[-1][3]))

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
