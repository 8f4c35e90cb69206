"""What keeps a run that goes on for long small in memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


def keep_small() -> None:
    """Before the first look-up: allocate where memory can be given back, and leave pandas out.

    Arrow imports pandas when it is first given a sequence, only to see whether that is one of pandas'; that costs 40 MB
    and nothing here uses it. Where pandas is imported already, nothing is changed.
    """
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())
    if _MALLOPT is not None:  # each further thread would have an arena of its own, with gaps of its own
        _MALLOPT(_M_ARENA_MAX, _ARENAS)
    if "pandas" in sys.modules:
        return
    without = _Without()
    sys.meta_path.insert(0, without)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(without)


class _Without(MetaPathFinder):
    """Says that pandas is not installed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Let all others be found as ever."""
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is left out", name=fullname)


def _glibc(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library
        return None


_TRIM, _MALLOPT = _glibc("malloc_trim"), _glibc("mallopt")
_M_ARENA_MAX, _ARENAS = -8, 2


def give_memory_back() -> None:
    """Return what was freed to the system, which threads that free each other's blocks otherwise keep; some ms."""
    if _TRIM is not None:
        _TRIM(0)
