"""A driver API that is initialised by a call."""

import ctypes
import os


def cuInit(flags):
    ctypes.CDLL(os.environ["FAKE_LIBCUDA"])
