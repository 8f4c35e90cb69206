"""Hand-made spools: records from named fields, buffers, frames, event files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.assemble.layouts import Layout, layout_for
from spikeprof.profiler.inject import FRAME_FORMAT, FRAME_HEADER_BYTES, FRAME_MAGIC

VERSION = 130001
LAYOUT = layout_for(VERSION)
assert LAYOUT is not None

#: Unix time of the trace's zero in these spools, and of the process's first line.
T0 = 1_790_000_000_000_000_000


def record(kind: int, layout: Layout = LAYOUT, **fields: Any) -> bytes:
    """One record; fields that are not named are 0."""
    raw = np.zeros(layout.size_of[kind], np.uint8)
    raw[:4].view(np.uint32)[0] = kind
    if not fields:
        return raw.tobytes()
    view = raw.view(layout.dtype_of[kind])
    for name, value in fields.items():
        view[name] = np.void(value) if isinstance(value, bytes) else value
    return raw.tobytes()


def work(kind: int, start: int, end: int, **fields: Any) -> bytes:
    """A record whose times are given from T0 on."""
    return record(kind, start=T0 + start, end=T0 + end, **fields)


def buffer(data: bytes) -> npt.NDArray[np.uint8]:
    """Bytes as a payload."""
    return np.frombuffer(data, np.uint8)


def frame(payload: bytes, unix_ns: int = T0 + 10_000, sequence: int = 0) -> bytes:
    """One buffer behind its header."""
    header = struct.pack(FRAME_FORMAT, FRAME_MAGIC, len(payload), unix_ns, sequence)
    return header.ljust(FRAME_HEADER_BYTES, b"\0") + payload


def events(**changes: Any) -> list[dict[str, Any]]:
    """The event file of a process that lived from T0 to T0 + 10 µs, traced all along."""
    hello = {
        "ev": "hello",
        "t": T0,
        "pid": 41,
        "ppid": 40,
        "argv": ["python", "x.py"],
        "python": "3.12.3",
        "rank": None,
    }
    activated = {"ev": "activated", "t": T0 + 100, "libcupti": "/lib/libcupti.so.13", "version": VERSION}
    activated |= {"sizes": {}, "torch": "2.11.0", "cost_ns": 7}
    for event in (hello, activated):
        event.update({name: value for name, value in changes.items() if name in event})
    return [
        hello,
        {"ev": "window", "t": T0 + 50, "state": "traced", "reason": ""},
        activated,
        {"ev": "window", "t": T0 + 10_000, "state": "stopped", "reason": "the program ended"},
        {"ev": "finished", "t": T0 + 10_000, "cost_ns": 3},
    ]


def write(
    folder: Path,
    stem: str = f"41-{T0}",
    frames: Iterable[bytes] | None = (),
    lines: Iterable[dict[str, Any]] | None = None,
) -> Path:
    """One process's two files; ``frames=None`` writes no records. Returns the path of the event file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{stem}.jsonl"
    given = events() if lines is None else lines
    path.write_text("".join(json.dumps(line) + "\n" for line in given))
    if frames is not None:
        (folder / f"{stem}.act").write_bytes(b"".join(frames))
    return path
