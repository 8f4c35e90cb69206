"""What programs under test launch kernels with."""

import ctypes
import os

_lib = ctypes.CDLL(os.environ["FAKE_CUPTI"])

launch = _lib.fake_launch
launch_distinct = _lib.fake_launch_distinct
generate = _lib.fake_generate
capture = _lib.fake_capture
profiler = _lib.fake_profiler
guest_begin = _lib.fake_guest_begin
guest_end = _lib.fake_guest_end
for _function in (launch, launch_distinct, generate, capture, profiler, guest_begin, guest_end):
    _function.restype = ctypes.c_int


def launch_at(count: int, pointer: int) -> None:
    """Kernels whose name lies at an address."""
    _lib.fake_launch_at(count, ctypes.c_void_p(pointer))
