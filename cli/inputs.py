"""What a verb reads: a trace or a foreign file, or a stretch of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from spikeprof.profiler.errors import InputError, UsageError
from spikeprof.profiler.units import NS_PER_S

if TYPE_CHECKING:
    from spikeprof.profiler.trace import Trace

BETWEEN_HELP = "Look at this stretch only: seconds since the recording began, e.g. 7.6,7.9."


def open_input(path: Path, between: str) -> tuple[Trace, str]:
    """The trace at ``path``, cut to ``between`` (seconds, ``BEGIN,END``; empty = all), and a name for headings."""
    limits = _limits(between)
    from spikeprof.profiler.importers import open_trace

    trace, name = open_trace(path), path.name or path.resolve().name
    if limits is None:
        return trace, name
    begin, end = limits
    if begin * NS_PER_S >= trace.manifest.duration_ns:
        length = trace.manifest.duration_ns / NS_PER_S
        raise UsageError(f"--between {between}: the recording is {length:.3f} s long, nothing of it lies there")
    return trace.narrowed(int(begin * NS_PER_S), int(end * NS_PER_S)), f"{name}, {begin:g} s to {end:g} s"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes. Raises InputError."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    with stream:
        yield stream


def two_numbers(text: str) -> tuple[float, float] | None:
    """``A,B`` as two finite numbers; None when it is anything else."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        return None
    return (first, second) if math.isfinite(first) and math.isfinite(second) else None


def _limits(between: str) -> tuple[float, float] | None:
    if not between:
        return None
    limits = two_numbers(between)
    if limits is None or not 0 <= limits[0] < limits[1]:
        raise UsageError(f"--between {between!r}: write begin and end in seconds, as in --between 7.6,7.9")
    return limits
