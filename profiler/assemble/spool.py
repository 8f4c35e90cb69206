"""What one process left in the spool, read back: its life from the event file, its records from the other.

Both files may end in the middle of a line or a record: the process may have been killed. What is whole counts,
and what is not is counted too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from spikeprof.profiler.assemble import attribution, numerics

#: A longer RANK is not a launcher's.
_RANK_DIGITS_MAX = 6


@dataclass
class ProcessSpool:
    """One process's spool: who it was, what was recorded when, and the small tables it kept.

    A process that replaced itself (exec) has two spools with one pid; they are told apart by ``stem``.
    """

    stem: Path  # path without suffix
    rank: int = 0  # its number in the trace, given by small.number()
    pid: int = 0
    parent_pid: int = 0
    argv: tuple[str, ...] = ()
    python: str = ""
    env_rank: int | None = None
    libcupti: int | None = None  # version
    libcupti_path: str = ""
    torch: str = ""
    sizes: dict[int, int] = field(default_factory=dict)
    activated_ns: int = 0  # unix; 0 = CUDA was never used
    hello_ns: int = 0
    last_ns: int = 0  # unix time of the last event
    finished: bool = False  # it said goodbye
    cost_ns: int = 0
    dropped: int = 0
    windows: list[tuple[int, str, str]] = field(default_factory=list)  # (unix ns, state, reason)
    names: dict[int, str] = field(default_factory=dict)
    nodes: list[tuple[int, int, int, int]] = field(default_factory=list)
    steps: list[tuple[str, bool, int, int]] = field(default_factory=list)
    ranges: list[tuple[str, str, int, int, int, str]] = field(default_factory=list)  # kind … thread, attributes
    ranges_dropped: int = 0
    attribution: attribution.Attribution = field(default_factory=attribution.Attribution)
    numerics: numerics.NumericsEvents = field(default_factory=numerics.NumericsEvents)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    damaged_lines: int = 0  # of the event file, not counting a last one that was cut short

    @property
    def collected(self) -> bool:
        """Whether recording was ever on: then an absence of records means that nothing happened."""
        if not self.windows:
            return self.records.exists()
        return any(state == "traced" for _, state, _ in self.windows)

    @property
    def clock_held(self) -> bool:
        """Whether its windows come one after another: else the clock was set back, and cannot tell what they hold."""
        times = [at for at, _, _ in self.windows]
        return bool(times) and times == sorted(times)

    @property
    def records(self) -> Path:
        """The file of raw activity buffers; absent when nothing was recorded."""
        return self.stem.with_name(self.stem.name + ".act")


def read_processes(folder: Path) -> list[ProcessSpool]:
    """Every process of a spool folder, in the order in which they started."""
    found = [read_process(path) for path in sorted(folder.glob("*.jsonl"))]
    return sorted(found, key=lambda p: p.hello_ns)


def read_process(path: Path) -> ProcessSpool:
    """One process from its event file. Lines that cannot be read are left out and counted."""
    process = ProcessSpool(path.with_suffix(""))
    pid, _, began = process.stem.name.partition("-")
    if pid.isdecimal() and began.isdecimal():  # what its first line would say, should that be damaged
        process.pid, process.hello_ns = int(pid), int(began)
    for line in _lines(path):
        event = _event(line)
        try:
            handler = _HANDLERS.get(event["ev"]) if event else None
            at = _time(event["t"]) if event else 0
            if handler is not None and event:
                handler(process, event)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            event = None
        if event:
            process.last_ns = max(process.last_ns, at)
        else:
            process.damaged_lines += line.endswith(b"\n")
    return process


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _event(line: bytes) -> dict[str, Any] | None:
    """One line as an object, None when it is not one. Text that is not Unicode becomes question marks."""
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError:
        pass
    try:  # an argument with bytes that no encoding explains: Python gave us half a surrogate pair
        return _DECODER.decode(json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None


_DECODER = msgspec.json.Decoder(dict[str, Any])


def _whole(value: Any, bits: int = 64) -> int:
    """A number that a column of so many bits can hold. Raises ValueError."""
    number = int(value)
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise ValueError("a number that no column holds")
    return number


def _time(value: Any) -> int:
    """A time or a duration in ns: never negative, so that the session's begin can be taken off. Raises ValueError."""
    number = _whole(value)
    if number < 0:
        raise ValueError("a time before all times")
    return number


def _hello(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.pid, process.parent_pid = _whole(event["pid"]), _whole(event["ppid"])
    process.argv, process.python = tuple(map(str, event["argv"])), str(event["python"])
    rank = str(event.get("rank"))
    process.env_rank = int(rank) if rank.isdecimal() and len(rank) <= _RANK_DIGITS_MAX else None
    process.hello_ns = int(event["t"])


def _activated(process: ProcessSpool, event: dict[str, Any]) -> None:
    version = event.get("version")
    process.libcupti = None if version is None else int(version)
    process.libcupti_path, process.torch = str(event.get("libcupti") or ""), str(event.get("torch") or "")
    process.sizes = {int(kind): int(size) for kind, size in (event.get("sizes") or {}).items()}
    process.activated_ns = int(event["t"])
    process.cost_ns += int(event["cost_ns"])


def _finished(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.finished = True
    process.cost_ns += int(event["cost_ns"])


def _window(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.windows.append((int(event["t"]), str(event["state"]), str(event["reason"])))


def _names(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.names.update({int(pointer): str(name) for pointer, name in event["names"] if name})


def _nodes(process: ProcessSpool, event: dict[str, Any]) -> None:
    nodes = [(_whole(a), _whole(b), _whole(c, bits=32), _time(d)) for a, b, c, d, *_ in event["nodes"]]
    process.attribution.add_nodes(event["nodes"])
    process.nodes += nodes


def _steps(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.steps += [(str(kind), bool(traced), _time(at), _time(ns)) for kind, traced, at, ns in event["steps"]]


def _ranges(process: ProcessSpool, event: dict[str, Any]) -> None:
    ranges = []
    for kind, name, begin, end, thread, attributes in event["ranges"]:
        text = json.dumps(attributes, ensure_ascii=False) if attributes else ""
        ranges.append((str(kind), str(name), _time(begin), _time(end), _whole(thread), text))
    process.ranges_dropped += int(event.get("dropped", 0))
    process.ranges += ranges


def _dropped(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.dropped += int(event["records"])


def _fault(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.faults.append(f"{event.get('where')}: {event.get('text')}")


def _note(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.notes.append(str(event.get("text")))


def _refused(process: ProcessSpool, event: dict[str, Any]) -> None:
    notes = [f"{what} refused: {why}" for what, why in event["what"].items()]
    process.notes.extend(note for note in notes if note not in process.notes)


def _attributed(process: ProcessSpool, event: dict[str, Any]) -> None:
    attribution.HANDLERS[event["ev"]](process.attribution, event)


def _scanned(process: ProcessSpool, event: dict[str, Any]) -> None:
    numerics.HANDLERS[event["ev"]](process.numerics, event)


_HANDLERS = (
    dict.fromkeys(attribution.HANDLERS, _attributed)
    | dict.fromkeys(numerics.HANDLERS, _scanned)
    | {
        "hello": _hello,
        "activated": _activated,
        "finished": _finished,
        "window": _window,
        "names": _names,
        "graph_nodes": _nodes,
        "steps": _steps,
        "ranges": _ranges,
        "dropped": _dropped,
        "fault": _fault,
        "note": _note,
        "refused": _refused,
    }
)
