"""Look-ups from JSON lines: one object ``{"ts": …, "key": …, "hit": …, "ttl"?: …, "tenant"?: …}`` each.

``ts`` is Unix seconds, ``ttl`` seconds, ``hit`` true or false. Blocks of whole lines are parsed column by column; only
a block that holds a broken line is parsed line by line, and what is broken is counted and left out. Other members are
allowed and ignored.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from spikeprof.profiler.errors import InputError
from spikeprof.profiler.lookups import Lookups, lookups

#: Bytes read at once: some 80,000 events of 100 bytes.
BLOCK_BYTES = 8 << 20
#: A line longer than this is broken, and not held.
LINE_BYTES_MAX = 1 << 20

_SCHEMA = pa.schema(
    [
        ("ts", pa.float64()),
        ("key", pa.string()),
        ("hit", pa.bool_()),
        ("ttl", pa.float64()),
        ("tenant", pa.string()),
    ]
)


class _Event(msgspec.Struct):
    ts: float
    key: str
    hit: bool
    ttl: float | None = None
    tenant: str | None = None


@dataclass(slots=True)
class Counts:
    """What was read: ``lines`` with an event, ``broken`` ones that were skipped, ``late`` ones.

    Late = earlier than ``late_s`` before the latest time seen; they are read like the others.
    """

    lines: int = 0
    broken: int = 0
    late: int = 0
    rotations: int = 0
    """How often a followed file was replaced or cut."""
    late_s: float = 5.0
    latest_s: float = field(default=float("-inf"))


def read_jsonl(stream: BinaryIO, counts: Counts | None = None) -> Iterator[Lookups]:
    """The look-ups of a stream to its end, a block at a time (``BLOCK_BYTES`` of text or what one read gives).

    A last line without its end counts as a line. Raises InputError where the stream cannot be read.
    """
    counts = counts if counts is not None else Counts()
    lines = _Lines(counts)
    read = getattr(stream, "read1", stream.read)  # of a pipe, what is there rather than a full block
    while True:
        try:
            data = read(BLOCK_BYTES)
        except OSError as error:
            raise InputError(
                f"events cannot be read any further ({error.strerror or error}) after {counts.lines} lines; "
                "what was read still counts; give the stream again from there"
            ) from error
        block = lines.complete(data) if data else lines.rest()
        if block:
            yield from _parse(block, counts)
        if not data:
            return


def follow(
    path: Path,
    counts: Counts | None = None,
    *,
    from_start: bool = False,
    poll_s: float = 0.1,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Lookups | None]:
    """The look-ups that are appended to a file, across rotation and truncation, like ``tail -F``.

    Gives None when there is nothing new, at most every ``poll_s`` seconds, so that the caller can let time pass. A
    file that is not there yet, or for a while, is waited for. A replaced file is read to its end first. Ends when
    ``stop`` says so. Raises InputError where the path is a folder or may not be read.
    """
    counts = counts if counts is not None else Counts()
    lines = _Lines(counts)
    stream = _open(path)
    leaving = False
    try:
        if stream is not None and not from_start:
            stream.seek(0, os.SEEK_END)
        while not stop():
            data = stream.read(BLOCK_BYTES) if stream is not None else b""
            if data:
                yield from _parse(lines.complete(data), counts)
                continue
            if stream is not None and stream.tell() > os.fstat(stream.fileno()).st_size:  # cut: begin anew
                counts.rotations += 1
                lines.forget()
                stream.seek(0)
                continue
            if stream is not None and not leaving and _replaced(stream, path):
                leaving = True  # what was written between the last read and the replacement comes first
                continue
            if (stream is None or leaving) and (following := _open(path)) is not None:
                if stream is not None:
                    counts.rotations += 1
                    yield from _parse(lines.rest(), counts)
                    stream.close()
                stream, leaving = following, False
                continue
            yield None
            time.sleep(poll_s)
    finally:
        if stream is not None:
            stream.close()


class _Lines:
    """Blocks of whole lines out of chunks that end anywhere."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._tail: list[bytes] = []
        self._tail_bytes = 0
        self._skipping = False

    def complete(self, data: bytes) -> bytes:
        """The lines that ``data`` completes."""
        if self._skipping:
            at = data.find(b"\n")
            if at < 0:
                return b""
            data, self._skipping = data[at + 1 :], False
        at = data.rfind(b"\n") + 1
        if at:
            block = b"".join([*self._tail, data[:at]])
            self._tail, self._tail_bytes = [data[at:]], len(data) - at
        else:
            block = b""
            self._tail.append(data)
            self._tail_bytes += len(data)
        if self._tail_bytes > LINE_BYTES_MAX:
            self._counts.broken += 1
            self.forget()
            self._skipping = True
        return block

    def rest(self) -> bytes:
        """The last line, where nothing ended it."""
        rest = b"".join(self._tail)
        self.forget()
        return rest

    def forget(self) -> None:
        """Leave out the line that is not complete."""
        self._tail, self._tail_bytes, self._skipping = [], 0, False


def _open(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"{path} cannot be followed ({error.strerror or error}); name a file of JSON lines that may be read"
        ) from error


def _replaced(stream: BinaryIO, path: Path) -> bool:
    here = os.fstat(stream.fileno())
    try:
        there = path.stat()
    except OSError:
        return False  # gone for now: what still comes from the open file counts
    return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)


def _parse(block: bytes, counts: Counts) -> Iterator[Lookups]:
    if not block.strip():
        return
    try:
        table = pj.read_json(
            pa.BufferReader(block),
            read_options=pj.ReadOptions(block_size=2 * LINE_BYTES_MAX),
            parse_options=pj.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore"),
        )
        batch: Lookups | None = _from_table(table)
    except pa.ArrowInvalid:
        batch = _line_by_line(block, counts)
    if batch is None or not len(batch):
        return
    counts.lines += len(batch)
    latest_s = np.maximum.accumulate(np.concatenate(([counts.latest_s], batch.ts_s)))
    counts.late += int(np.count_nonzero(batch.ts_s < latest_s[:-1] - counts.late_s))
    counts.latest_s = float(latest_s[-1])
    yield batch


def _from_table(table: pa.Table) -> Lookups:
    """Raises ArrowInvalid where a line lacks what it must have."""
    ts, key, hit, ttl, tenant = (table.column(name).combine_chunks() for name in _SCHEMA.names)
    key.validate(full=True)  # the parser does not check that strings are UTF-8
    tenant.validate(full=True)
    ts_s = ts.to_numpy(zero_copy_only=False)
    if ts.null_count or key.null_count or hit.null_count or not np.isfinite(ts_s).all():
        raise pa.ArrowInvalid("a line without ts, key or hit")
    return lookups(
        ts_s,
        key,
        hit.to_numpy(zero_copy_only=False),
        pc.fill_null(ttl, float("nan")).to_numpy(zero_copy_only=False),
        pc.fill_null(tenant, "").dictionary_encode(),
    )


def _line_by_line(block: bytes, counts: Counts) -> Lookups | None:
    decode = msgspec.json.Decoder(_Event).decode
    events = []
    for line in block.split(b"\n"):
        if not line.strip():
            continue
        try:
            event = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            counts.broken += 1
            continue
        if math.isfinite(event.ts):
            events.append(event)
        else:
            counts.broken += 1
    if not events:
        return None
    return lookups(
        [event.ts for event in events],
        [event.key for event in events],
        [event.hit for event in events],
        [float("nan") if event.ttl is None else event.ttl for event in events],
        [event.tenant or "" for event in events],
    )
