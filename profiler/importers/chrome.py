"""Chrome-trace JSON as torch.profiler writes it, into typed records. Nothing here knows what they mean."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from spikeprof.profiler.errors import DamagedTrace, ForeignFile
from spikeprof.profiler.importers.payload import Payload

_CHUNK_EVENTS = 65_536

#: A JSON string, or one of the words for numbers that JSON does not have but Python's writer emits.
_STRING_OR_NON_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*+"|-?(?:NaN|Infinity)', re.DOTALL)


class Args(msgspec.Struct, gc=False):
    """Those of an event's ``args`` that a table has a column for. Values are whatever the file holds."""

    device: Any = None
    context: Any = None
    stream: Any = None
    correlation: Any = None
    external_id: Any = msgspec.field(name="External id", default=None)
    external_id_old: Any = msgspec.field(name="external id", default=None)
    graph_id: Any = msgspec.field(name="graph id", default=None)
    graph_node_id: Any = msgspec.field(name="graph node id", default=None)
    grid: Any = None
    block: Any = None
    registers: Any = msgspec.field(name="registers per thread", default=None)
    shared_memory: Any = msgspec.field(name="shared memory", default=None)
    bytes: Any = None
    sync_kind: Any = msgspec.field(name="cuda_sync_kind", default=None)
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    input_dims_old: msgspec.Raw = msgspec.field(name="Input dims", default=msgspec.Raw(b""))
    input_types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b""))


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event. ``ts`` and ``dur`` are microseconds, decimal as written: a float would round them.

    Since 1970, a microsecond takes 51 of a float's 53 bits: its nanoseconds would be lost.
    """

    ph: str = ""
    cat: str | None = None
    name: Any = ""
    pid: Any = None
    tid: Any = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    args: Args | None = None


class _Phase(msgspec.Struct):
    ph: str = ""


class Head(msgspec.Struct):
    """What stands beside the events. Absent in the array form of torch 1.8."""

    trace_events: list[msgspec.Raw] | None = msgspec.field(name="traceEvents", default=None)
    schema_version: Any = msgspec.field(name="schemaVersion", default=None)
    base_time_ns: Any = msgspec.field(name="baseTimeNanoseconds", default=None)
    device_properties: Any = msgspec.field(name="deviceProperties", default=None)
    distributed_info: Any = msgspec.field(name="distributedInfo", default=None)
    host_name: Any = None
    torch_version: Any = None
    cuda_runtime_version: Any = None
    cuda_driver_version: Any = None
    cupti_version: Any = None
    hip_runtime_version: Any = None
    hip_driver_version: Any = None
    roctracer_version: Any = None
    record_shapes: Any = None
    profile_memory: Any = None
    with_stack: Any = None
    with_flops: Any = None
    with_modules: Any = None
    errors: Any = msgspec.field(name="ERROR", default=None)
    warnings: Any = msgspec.field(name="WARNING", default=None)


@dataclass(frozen=True, slots=True)
class Document:
    """A file taken apart: its head and its events, still as text. ``repaired_count`` = NaN and the like."""

    head: Head
    events: list[msgspec.Raw]
    repaired_count: int = 0


def decode(data: Payload, path: Path) -> Document:
    """Take a Chrome trace apart. ``path`` is for messages. Raises ForeignFile or DamagedTrace."""
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    try:
        return _decode(data, path)
    except msgspec.ValidationError as error:
        raise ForeignFile(f"{path} is JSON, but not a Chrome trace: {error}") from error
    except msgspec.DecodeError as error:
        problem = error
    if b"NaN" in data or b"Infinity" in data:
        plain, repaired_count = _without_non_numbers(data)
        try:
            return replace(_decode(plain, path), repaired_count=repaired_count)
        except msgspec.DecodeError as error:
            problem = error
    raise DamagedTrace(_where(data, path, problem)) from problem


def _decode(data: Payload, path: Path) -> Document:
    if data.lstrip(b" \t\r\n")[:1] == b"[":
        events = msgspec.json.decode(data, type=list[msgspec.Raw])
        first = msgspec.json.decode(events[0]) if events else {"ph": ""}
        if not isinstance(first, dict) or "ph" not in first:
            raise ForeignFile(f"{path} is a JSON array, but not of trace events")
        return Document(Head(), events)
    head = msgspec.json.decode(data, type=Head)
    if head.trace_events is None:
        keys = list(msgspec.json.decode(data, type=dict[str, msgspec.Raw]))
        kind = "a PyTorch execution trace (ET): " if {"schema", "nodes"} <= set(keys) else ""
        if {"format", "schema_version", "manifest"} <= set(keys):
            raise ForeignFile(f"{path} is a part of a trace: name its folder, {path.parent}")
        raise ForeignFile(f"{path} is JSON without traceEvents: {kind}it holds {', '.join(keys[:6]) or 'nothing'}")
    events, head.trace_events = head.trace_events, None
    return Document(head, events)


def chunks(events: Sequence[msgspec.Raw], broken: Counter[str]) -> Iterator[list[Event]]:
    """The events as records, some ten thousand at a time, so that only their columns need stay in memory.

    An event that does not fit the types is counted in ``broken`` under its reason and left out,
    unless it is no slice (flow, metadata): those are nobody's loss.
    """
    decoder = msgspec.json.Decoder(Event)
    for first in range(0, len(events), _CHUNK_EVENTS):
        records: list[Event] = []
        for raw in events[first : first + _CHUNK_EVENTS]:
            try:
                records.append(decoder.decode(raw))
            except msgspec.DecodeError as error:  # includes ValidationError
                if _is_slice(raw):
                    broken[_reason(error)] += 1
        yield records


def _is_slice(raw: msgspec.Raw) -> bool:
    try:
        return msgspec.json.decode(raw, type=_Phase).ph == "X"
    except msgspec.DecodeError:
        return True


def _reason(error: msgspec.DecodeError) -> str:
    field = re.search(r"`\$\.(\w+)", str(error))
    return f"unreadable {field[1]}" if field else "unreadable event"


def _without_non_numbers(data: Payload) -> tuple[bytes, int]:
    """NaN and the infinities as empty strings, padded: every byte stays where it was, for messages."""
    count = 0

    def blank(match: re.Match[bytes]) -> bytes:
        nonlocal count
        if match[0].startswith(b'"'):
            return match[0]
        count += 1
        return b'""'.ljust(len(match[0]))

    return _STRING_OR_NON_NUMBER.sub(blank, data), count


def _offset(error: msgspec.DecodeError) -> int | None:
    found = re.search(r"\(byte (\d+)\)", str(error))
    return int(found[1]) if found else None


def _where(data: Payload, path: Path, error: msgspec.DecodeError) -> str:
    offset = _offset(error)
    if offset is None:
        if "truncated" in str(error):
            return f"{path} is truncated at byte {len(data)}: the JSON text stops before its end"
        return f"{path} is damaged: {error}"
    line = data.count(b"\n", 0, offset) + 1
    column = offset - data.rfind(b"\n", 0, offset)
    what = str(error).removeprefix("JSON is malformed: ").split(" (byte", 1)[0]
    return f"{path} is damaged: not JSON at byte {offset}, line {line}, column {column} ({what})"
