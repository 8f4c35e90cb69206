"""A short way to launch a kernel that Triton has compiled: through the driver, with what never changes prepared.

Triton looks at every argument anew, compile-time ones too, which takes the host 20 us and more. What it has compiled is
an ordinary function of the driver: pointers and numbers in the order of its source, and behind them pointers to scratch
memory, none here, as many as its version has. That is read from the function's own code; if it is not so, there is no
short way, nor for what is launched once for each graph (graph_store.py).
"""

import ctypes
import re
from contextlib import nullcontext

TYPE_CHECKING = False  # importing typing would cost the program a millisecond
if TYPE_CHECKING:
    from typing import Any, Optional

#: Pointers to scratch memory that a version of Triton may add; those that a kernel does not have are not read.
_SCRATCH_MAX = 4

_WARP = 32
_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER


class Launcher:
    """Of one compiled kernel. Used by one thread at a time."""

    def __init__(
        self, driver: "Any", function: int, threads: int, shared: int, pointers: "list[int]", count: int
    ) -> None:
        self._function, self._threads, self._shared = ctypes.c_void_p(function), threads, shared
        self._driver_call = driver.cuLaunchKernel
        self._numbers = (ctypes.c_int32 * count)()
        self._pointers = (ctypes.c_void_p * (len(pointers) + _SCRATCH_MAX))(*pointers)
        places = [ctypes.addressof(self._pointers) + 8 * at for at in range(len(pointers) + _SCRATCH_MAX)]
        places[len(pointers) : len(pointers)] = [ctypes.addressof(self._numbers) + 4 * at for at in range(count)]
        self._places = (ctypes.c_void_p * len(places))(*places)

    def launch(self, programs: int, stream: int, numbers: "tuple[int, ...]") -> None:
        """Start so many programs in a row. Raises RuntimeError."""
        self._numbers[:] = numbers  # type: ignore[call-overload]
        error = self._driver_call(
            self._function, programs, 1, 1, self._threads, 1, 1, self._shared, stream, self._places, None
        )
        if error:
            raise RuntimeError("cuLaunchKernel failed: error %d" % error)


def on_stream(torch: "Any", device: "Any", stream: int) -> "Any":
    """The context in which what Triton launches goes to this stream of a device, known by its handle."""
    cuda = torch.cuda
    if device.type != "cuda" or torch._C._cuda_getCurrentRawStream(device.index or 0) == stream:
        return nullcontext()
    # To ExternalStream the default stream's 0 is no stream.
    return cuda.stream(cuda.ExternalStream(stream, device=device) if stream else cuda.default_stream(device))


def launcher_for(compiled: "Any", pointers: "tuple[Any, ...]", count: int) -> "Optional[Launcher]":
    """A launcher of what a launch by Triton gave, for these tensors and ``count`` 32-bit numbers; None if in doubt."""
    try:
        metadata = compiled.metadata
        threads = _WARP * metadata.num_warps
        if not _takes(compiled.asm["ptx"], len(pointers), count, threads) or metadata.shared > 48 << 10:
            return None
        if getattr(metadata, "num_ctas", 1) != 1 or getattr(metadata, "launch_cooperative_grid", False):
            return None
        driver = ctypes.CDLL("libcuda.so.1")
        call = driver.cuLaunchKernel
        call.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        addresses = [_on_device(driver, each.data_ptr()) for each in pointers]
        return Launcher(driver, int(compiled.function), threads, metadata.shared, addresses, count)
    except Exception:  # a Triton or a driver that is not as those that are known
        return None


def _on_device(driver: "Any", address: int) -> int:
    """The address by which the device knows this memory, be it the host's. Raises RuntimeError."""
    found = ctypes.c_uint64()
    error = driver.cuPointerGetAttribute(ctypes.byref(found), _DEVICE_POINTER, ctypes.c_uint64(address))
    if error:
        raise RuntimeError("cuPointerGetAttribute failed: error %d" % error)
    return found.value


def _takes(ptx: str, pointers: int, numbers: int, threads: int) -> bool:
    """Whether the kernel takes so many pointers, then so many numbers, then pointers only, in blocks of ``threads``."""
    begin = ptx.index(".entry")
    head = ptx[begin : ptx.index("{", begin)]
    kinds = re.findall(r"\.param\s+\.(\w+)", head)
    expected = ["u64"] * pointers + ["u32"] * numbers
    rest = kinds[len(expected) :]
    block = re.search(r"\.(?:req|max)ntid\s+(\d+)", head)
    return (
        ptx.count(".entry") == 1
        and kinds[: len(expected)] == expected
        and set(rest) <= {"u64"}
        and len(rest) <= _SCRATCH_MAX
        and (block is None or int(block.group(1)) == threads)
    )
