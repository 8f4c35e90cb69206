"""The profiler's home."""

from . import profiler

__all__ = ["profiler"]
