"""Find and drive the one libcupti of this process, through ctypes.

A second copy of the library in a process breaks both (PLATFORM: error 39), so the copy that is loaded
already is taken first, then the one that the program's own packages would load.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys

from . import cbids
from .events import RLock

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

KIND_MEMCPY, KIND_MEMSET, KIND_DRIVER, KIND_RUNTIME, KIND_DEVICE = 1, 2, 4, 5, 8
KIND_KERNEL, KIND_OVERHEAD, KIND_MEMCPY_PEER = 10, 17, 22

#: GPU work and CUPTI's own cost. Calls are enabled one by one, see ``cbids``; waits are seen as calls too:
#: KIND_SYNC would cost an eager decode step 26 % more, and goes on costing after it was disabled
#: (measured on H200, libcupti 13.0; docs/overhead.md).
KINDS = (KIND_KERNEL, KIND_MEMCPY, KIND_MEMCPY_PEER, KIND_MEMSET, KIND_OVERHEAD)

#: Those that stay on while kernels are switched. libcupti 13.0 frees memory twice when copies or memsets are switched
#: while a launch of another thread is being recorded: the program dies. 2,100 switches of kernels alone, or of the
#: others while no kernels are recorded, did no harm.
BESIDE_KERNELS = tuple(kind for kind in KINDS if kind != KIND_KERNEL)

#: How long launches that are under way get to end before something is switched that they do not bear: after they were
#: called back, before that, and before copies are switched off. Nothing tells when a thread is through; one may be
#: about to be called back, waiting for the interpreter, and have its launch still before it.
SETTLING_SECONDS = 0.05

DOMAIN_DRIVER_API, DOMAIN_RUNTIME_API, DOMAIN_RESOURCE = 1, 2, 3

FLUSH_FORCED = 1

REQUEST_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
COMPLETE_TYPE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)
CALLBACK_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class CuptiError(Exception):
    """A CUPTI call failed; the message names the call and CUPTI's reason."""


def loaded_library() -> str | None:
    """Path of the libcupti that this process has mapped, or None."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                path = line.rstrip("\n").split(" ", 5)[-1].strip()
                if os.path.basename(path).startswith("libcupti.so"):
                    return path
    except OSError:
        pass
    return None


def library_candidates(paths: Sequence[str] | None = None) -> Iterator[str]:
    """Where a libcupti may lie, best first: packages beside torch, CUDA_HOME, the system, the loader's name."""
    for entry in sys.path if paths is None else paths:
        for pattern in ("nvidia/cu[0-9]*/lib", "nvidia/cuda_cupti/lib"):
            for path in sorted(glob.glob(os.path.join(entry or ".", pattern, "libcupti.so*")), reverse=True):
                yield path
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    for home in filter(None, homes):
        for folder in ("extras/CUPTI/lib64", "lib64"):
            for path in sorted(glob.glob(os.path.join(home, folder, "libcupti.so*")), reverse=True):
                yield path
    for name in ("libcupti.so.13", "libcupti.so.12", "libcupti.so"):
        yield name


def open_library(override: str | None = None) -> tuple[ctypes.CDLL, str]:
    """(library, path) of this process's libcupti. Raises CuptiError when there is none."""
    tried = []
    for path in [override] if override else _not_none([loaded_library()], library_candidates()):
        try:
            return ctypes.CDLL(path), path
        except OSError as error:
            tried.append(str(error))
    raise CuptiError("no libcupti found (%s)" % (tried[-1] if tried else "no candidate"))


def _not_none(first: Iterable[str | None], rest: Iterable[str]) -> Iterator[str]:
    yield from filter(None, first)
    yield from rest


class Turn:
    """Entered by those of our calls that flush or switch CUPTI, which come one at a time.

    Entering raises CuptiError when the one before has not ended in time; who would rather wait takes ``lock``.
    """

    def __init__(self, patience_seconds: float) -> None:
        self.lock = RLock()
        self._patience_seconds = patience_seconds

    def __enter__(self) -> None:
        """Wait for one's turn."""
        if not self.lock.acquire(timeout=self._patience_seconds):
            raise CuptiError("a flush has not returned for %g s" % self._patience_seconds)

    def __exit__(self, *_: object) -> None:
        """Let the next one in."""
        self.lock.release()


class Cupti:
    """The calls that the agent needs. Every method raises CuptiError with the call's name."""

    def __init__(self, override: str | None = None) -> None:
        self._lib, self.path = open_library(override)
        self._keep: list[object] = []  # callback objects: CUPTI holds bare pointers to them
        self._subscriber = ctypes.c_void_p()
        #: Whether calls are switched on one by one (CUDA 12.4 on), see ``enable_calls``.
        self.selects_calls = hasattr(self._lib, "cuptiActivityEnableRuntimeApi")

    def version(self) -> int:
        """cuptiGetVersion, e.g. 130001."""
        value = ctypes.c_uint32()
        self._call("cuptiGetVersion", ctypes.byref(value))
        return value.value

    def register(self, request: object, complete: object) -> None:
        """Give CUPTI the two buffer callbacks (made with REQUEST_TYPE and COMPLETE_TYPE)."""
        self._keep[:] = [request, complete]
        self._call("cuptiActivityRegisterCallbacks", request, complete)
        self._unix_clock()

    def dump_devices(self) -> None:
        """Have one record written for each GPU."""
        self._call("cuptiActivityEnableAndDump", ctypes.c_int(KIND_DEVICE))

    def record_sizes(self) -> dict[int, int]:
        """{kind: record bytes} as this library says, empty when it is too old to say."""
        sizes = {}
        if hasattr(self._lib, "cuptiActivityGetStructSize"):
            for kind in (*KINDS, KIND_DEVICE, KIND_RUNTIME, KIND_DRIVER):
                size = ctypes.c_size_t()
                try:
                    self._call("cuptiActivityGetStructSize", ctypes.c_int(kind), ctypes.c_uint32(0), ctypes.byref(size))
                except CuptiError:
                    continue
                sizes[kind] = size.value
        return sizes

    def _unix_clock(self) -> None:
        """Make record times Unix nanoseconds again.

        torch.profiler leaves its own clock (processor ticks) installed in CUPTI when it is done. CUPTI wants
        a native ``uint64_t f(void)``; std::chrono's system_clock::now is one, and what CUPTI uses by default.
        """
        try:
            now = ctypes.CDLL("libstdc++.so.6")._ZNSt6chrono3_V212system_clock3nowEv
            self._call("cuptiActivityRegisterTimestampCallback", now)
        except (OSError, AttributeError, CuptiError):
            pass

    def enable_kernels(self) -> None:
        """Start recording kernels; may be called at any time."""
        self._call("cuptiActivityEnable", ctypes.c_int(KIND_KERNEL))

    def disable_kernels(self) -> None:
        """Stop recording kernels, at any time; records of those in flight may still arrive."""
        self._disable(KIND_KERNEL)

    def enable_copies(self) -> dict[str, str]:
        """Start recording the other kinds, while no kernels are. Returns {what: why} for those that are refused."""
        refused: dict[str, str] = {}
        for kind in BESIDE_KERNELS:
            try:
                self._call("cuptiActivityEnable", ctypes.c_int(kind))
            except CuptiError as error:
                refused["activity kind %d" % kind] = str(error)
        return refused

    def disable_copies(self) -> None:
        """Stop recording the other kinds, while no launch is being recorded."""
        for kind in BESIDE_KERNELS:
            self._disable(kind)

    def _disable(self, kind: int) -> None:
        try:
            self._call("cuptiActivityDisable", ctypes.c_int(kind))
        except CuptiError:
            pass

    def enable_calls(self) -> dict[str, str]:
        """Start recording the calls of ``cbids``. Returns {what: why} for the parts that are refused.

        One by one this has an effect only where it is first done before CUDA is in use, and no more after another
        profiler (seen with libcupti 13.0). The whole kind, filtered, would work at any time, but makes every CUDA call
        of the program dearer, also those that are not recorded (docs/overhead.md).
        """
        refused: dict[str, str] = {}
        self._select_calls(1, refused)
        return refused

    def disable_calls(self) -> None:
        """Stop recording calls."""
        self._select_calls(0, {})

    def _select_calls(self, on: int, refused: dict[str, str]) -> None:
        for function, all_kind, wanted in (
            ("cuptiActivityEnableRuntimeApi", KIND_RUNTIME, cbids.RUNTIME),
            ("cuptiActivityEnableDriverApi", KIND_DRIVER, cbids.DRIVER),
        ):
            if not self.selects_calls:  # all calls or none
                if all_kind == KIND_RUNTIME:
                    self._call("cuptiActivityEnable" if on else "cuptiActivityDisable", ctypes.c_int(all_kind))
                continue
            for cbid in wanted:
                try:
                    self._call(function, ctypes.c_uint32(cbid), ctypes.c_uint8(on))
                except CuptiError as error:  # an id newer than this library
                    refused.setdefault(function, str(error))

    def flush(self, forced: bool = False) -> None:
        """Deliver what is complete; ``forced`` also buffers with records still open."""
        self._call("cuptiActivityFlushAll", ctypes.c_uint32(FLUSH_FORCED if forced else 0))

    def dropped(self) -> int:
        """Records that CUPTI had no buffer for, since the last call."""
        value = ctypes.c_size_t()
        self._call("cuptiActivityGetNumDroppedRecords", None, ctypes.c_uint32(0), ctypes.byref(value))
        return value.value

    def subscribe(self, callback: object, points: Sequence[tuple[int, int]]) -> None:
        """Watch (domain, callback id) points. Only one subscriber is allowed in a process."""
        self._call("cuptiSubscribe", ctypes.byref(self._subscriber), callback, None)
        self._callback = callback
        for domain, cbid in points:
            self.watch(domain, cbid, True)

    def watch(self, domain: int, cbid: int, on: bool) -> None:
        """Begin or end calling the subscriber back at a point."""
        self._call(
            "cuptiEnableCallback",
            ctypes.c_uint32(on),
            self._subscriber,
            ctypes.c_int(domain),
            ctypes.c_uint32(cbid),
        )

    def unsubscribe(self) -> None:
        """Give the subscription up, so that another profiler can take it."""
        if self._subscriber.value:
            self._call("cuptiUnsubscribe", self._subscriber)
            self._subscriber = ctypes.c_void_p()

    def graph_node_id(self, node: int) -> int:
        """CUPTI's id of a CUgraphNode; kernel records carry the same."""
        value = ctypes.c_uint64()
        self._call("cuptiGetGraphNodeId", ctypes.c_void_p(node), ctypes.byref(value))
        return value.value

    def graph_id(self, graph: int) -> int:
        """CUPTI's id of a CUgraph."""
        value = ctypes.c_uint32()
        self._call("cuptiGetGraphId", ctypes.c_void_p(graph), ctypes.byref(value))
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._lib, name, None)
        if function is None:
            raise CuptiError("%s is not in %s" % (name, self.path))
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuptiGetResultString(ctypes.c_int(code), ctypes.byref(text))
            raise CuptiError("%s: %s (%d)" % (name, (text.value or b"unknown").decode("ascii", "replace"), code))
