"""Times copies between GPUs and the host; run as a program of its own by ``copy_probe.py``, never imported.

Standard library and libcuda's driver API only. The argument is JSON (``library``, ``size_bytes``, ``repeats_count``);
on standard output comes a JSON line for each copy as soon as it is known, so that a later crash takes nothing away:
``{"src": UUID or "host", "dst": …, "bytes_per_s": …}``, with ``reason`` instead where it could not be timed, or
``reason`` alone when nothing can.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

HOST = "host"

#: A program may be running: copies take no more than this part of the memory that is free.
_MOST_OF_FREE_MEMORY = 0.25

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED

_int, _size, _pointer, _address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64
_out = ctypes.POINTER
#: What is called, with the types of its arguments: without them ctypes cuts 64-bit handles to 32 bits.
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorString": (_int, _out(ctypes.c_char_p)),
    "cuDeviceGetCount": (_out(_int),),
    "cuDeviceGet": (_out(_int), _int),
    "cuDeviceGetUuid_v2": (ctypes.c_char * 16, _int),
    "cuDevicePrimaryCtxRetain": (_out(_pointer), _int),
    "cuDevicePrimaryCtxRelease_v2": (_int,),
    "cuCtxSetCurrent": (_pointer,),
    "cuDeviceCanAccessPeer": (_out(_int), _int, _int),
    "cuCtxEnablePeerAccess": (_pointer, ctypes.c_uint),
    "cuMemGetInfo_v2": (_out(_size), _out(_size)),
    "cuMemAlloc_v2": (_out(_address), _size),
    "cuMemFree_v2": (_address,),
    "cuMemHostAlloc": (_out(_pointer), _size, ctypes.c_uint),
    "cuMemFreeHost": (_pointer,),
    "cuMemcpyHtoDAsync_v2": (_address, _pointer, _size, _pointer),
    "cuMemcpyDtoHAsync_v2": (_pointer, _address, _size, _pointer),
    "cuMemcpyPeerAsync": (_address, _pointer, _address, _pointer, _size, _pointer),
    "cuStreamCreate": (_out(_pointer), ctypes.c_uint),
    "cuStreamDestroy_v2": (_pointer,),
    "cuEventCreate": (_out(_pointer), ctypes.c_uint),
    "cuEventDestroy_v2": (_pointer,),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventSynchronize": (_pointer,),
    "cuEventElapsedTime": (_out(ctypes.c_float), _pointer, _pointer),
}


class CudaError(Exception):
    """A call that libcuda refused; the message names it."""

    def __init__(self, call: str, why: str, code: int) -> None:
        super().__init__(f"{call.removesuffix('_v2')}: {why}")
        self.code = code


class Cuda:
    """libcuda with checked calls. Raises CudaError."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Make a call of ``_CALLS``."""
        call = getattr(self._library, name)
        call.argtypes, call.restype = _CALLS[name], _int
        code = call(*arguments)
        if code:
            raise CudaError(name, self._why(code), code)

    def made(self, name: str, kind: Any, *arguments: Any) -> Any:
        """The value that a call writes to its first argument."""
        result = kind()
        self(name, ctypes.byref(result), *arguments)
        return result.value

    def _why(self, code: int) -> str:
        text = ctypes.c_char_p()
        found = self._library.cuGetErrorString(code, ctypes.byref(text)) == 0 and text.value
        return f"{found.decode()} ({code})" if found else f"error {code}"


class Gpu:
    """One GPU with its primary context, current on this thread after ``use``."""

    def __init__(self, cuda: Cuda, number: int, cleanup: ExitStack) -> None:
        self.cuda = cuda
        self.device: int = cuda.made("cuDeviceGet", _int, number)
        raw = (ctypes.c_char * 16)()
        cuda("cuDeviceGetUuid_v2", raw, self.device)
        self.uuid = f"GPU-{uuid.UUID(bytes=raw.raw)}"
        self.refusal = ""  # why nothing can be copied here
        self.context: int | None = None
        self.buffer = 0
        self._cleanup = cleanup

    def prepare(self, size_bytes: int) -> None:
        """A context and one buffer, or the reason why not."""
        try:
            self.context = self.cuda.made("cuDevicePrimaryCtxRetain", _pointer, self.device)
            self._cleanup.callback(self.cuda, "cuDevicePrimaryCtxRelease_v2", self.device)
            self.use()
            free, total = _size(), _size()
            self.cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            if size_bytes > _MOST_OF_FREE_MEMORY * free.value:
                self.refusal = f"memory is short: {free.value >> 20} MiB free on the GPU"
                return
            self.buffer = self.cuda.made("cuMemAlloc_v2", _address, size_bytes)
            self._cleanup.callback(self._free)
        except CudaError as error:
            self.refusal = str(error)

    def _free(self) -> None:
        self.use()
        self.cuda("cuMemFree_v2", self.buffer)

    def use(self) -> None:
        """Make its context current."""
        self.cuda("cuCtxSetCurrent", self.context)

    def enable_peer(self, peer: Gpu) -> None:
        """Let this GPU reach the peer's memory where it can; elsewhere the driver copies through the host."""
        if not self.cuda.made("cuDeviceCanAccessPeer", _int, self.device, peer.device):
            return
        self.use()
        try:
            self.cuda("cuCtxEnablePeerAccess", peer.context, 0)
        except CudaError as error:
            if error.code != _ALREADY_ENABLED:
                raise


def main(library: str, size_bytes: int, repeats_count: int) -> None:
    """Time every copy and print what came of it."""
    try:
        cuda = Cuda(library)
        cuda("cuInit", 0)
        with ExitStack() as cleanup:
            gpus = [Gpu(cuda, n, cleanup) for n in range(cuda.made("cuDeviceGetCount", _int))]
            for gpu in gpus:
                gpu.prepare(size_bytes)
            for copy in _copies(cuda, gpus, size_bytes, cleanup):
                _tell(src=copy.src, dst=copy.dst, **_timed(cuda, copy, size_bytes, repeats_count))
    except (OSError, CudaError) as error:
        _tell(reason=str(error))


class Copy(NamedTuple):
    """One copy: from and to where, the GPUs at its ends, why it cannot be made, how to put it on a stream."""

    src: str
    dst: str
    gpus: tuple[Gpu, ...]
    refusal: str
    enqueue: Callable[[Any], None]


def _copies(cuda: Cuda, gpus: list[Gpu], size: int, cleanup: ExitStack) -> Iterator[Copy]:
    host, why_no_host = _pinned(cuda, gpus, size, cleanup)
    for gpu in gpus:
        refusal = gpu.refusal or why_no_host
        to = partial(cuda, "cuMemcpyHtoDAsync_v2", gpu.buffer, host, size)
        back = partial(cuda, "cuMemcpyDtoHAsync_v2", host, gpu.buffer, size)
        yield Copy(HOST, gpu.uuid, (gpu,), refusal, to)
        yield Copy(gpu.uuid, HOST, (gpu,), refusal, back)
    for a, b in permutations(gpus, 2):
        across = partial(cuda, "cuMemcpyPeerAsync", b.buffer, b.context, a.buffer, a.context, size)
        yield Copy(a.uuid, b.uuid, (a, b), a.refusal or b.refusal, across)


def _pinned(cuda: Cuda, gpus: list[Gpu], size: int, cleanup: ExitStack) -> tuple[int, str]:
    """Host memory for all GPUs, or why there is none."""
    usable = next((gpu for gpu in gpus if not gpu.refusal), None)
    if usable is None:
        return 0, "no GPU can be used"
    try:
        usable.use()
        host: int = cuda.made("cuMemHostAlloc", _pointer, size, _PORTABLE)
    except CudaError as error:
        return 0, str(error)
    cleanup.callback(cuda, "cuMemFreeHost", host)
    return host, ""


def _timed(cuda: Cuda, copy: Copy, size_bytes: int, repeats_count: int) -> dict[str, Any]:
    """Bytes per second of the median repeat, after one that does not count; or the reason why there is none."""
    if copy.refusal:
        return {"reason": copy.refusal}
    try:
        for a, b in permutations(copy.gpus, 2):
            a.enable_peer(b)
        copy.gpus[0].use()
        with _made(cuda, "Stream", _NON_BLOCKING) as stream, _made(cuda, "Event") as begin, _made(cuda, "Event") as end:
            times_ms = []
            for _ in range(repeats_count + 1):
                cuda("cuEventRecord", begin, stream)
                copy.enqueue(stream)
                cuda("cuEventRecord", end, stream)
                cuda("cuEventSynchronize", end)
                times_ms.append(cuda.made("cuEventElapsedTime", ctypes.c_float, begin, end))
    except CudaError as error:
        return {"reason": str(error)}
    median_ms = statistics.median(times_ms[1:])
    return {"bytes_per_s": size_bytes / (median_ms / 1e3)} if median_ms > 0 else {"reason": "it took no time"}


@contextmanager
def _made(cuda: Cuda, what: str, flags: int = 0) -> Iterator[Any]:
    thing = cuda.made(f"cu{what}Create", _pointer, flags)
    try:
        yield thing
    finally:
        cuda(f"cu{what}Destroy_v2", thing)


def _tell(**result: Any) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
