"""What one process left in the spool, read back: its life from the event file, its records from the other.

Both files may end in the middle of a line or a record: the process may have been killed. What is whole counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec


@dataclass
class ProcessSpool:
    """One process's spool: who it was, what was recorded when, and the small tables it kept."""

    stem: Path  # path without suffix
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
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def records(self) -> Path:
        """The file of raw activity buffers; absent when nothing was recorded."""
        return self.stem.with_name(self.stem.name + ".act")


def read_processes(folder: Path) -> list[ProcessSpool]:
    """Every process of a spool folder, in the order in which they started."""
    found = [read_process(path) for path in sorted(folder.glob("*.jsonl"))]
    return sorted(found, key=lambda p: p.hello_ns)


def read_process(path: Path) -> ProcessSpool:
    """One process from its event file. Lines that cannot be read are left out: only the last can be cut."""
    process = ProcessSpool(path.with_suffix(""))
    for event in _events(path):
        process.last_ns = max(process.last_ns, int(event.get("t", 0)))
        handler = _HANDLERS.get(event.get("ev", ""))
        if handler is not None:
            handler(process, event)
    return process


def _events(path: Path) -> Iterator[dict[str, Any]]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    with path.open("rb") as file:
        for line in file:
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError:
                continue


def _hello(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.pid, process.parent_pid = int(event["pid"]), int(event["ppid"])
    process.argv, process.python = tuple(map(str, event["argv"])), str(event["python"])
    rank = event.get("rank")
    process.env_rank = int(rank) if rank is not None and str(rank).isdigit() else None
    process.hello_ns = int(event["t"])


def _activated(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.libcupti, process.libcupti_path = event.get("version"), event.get("libcupti") or ""
    process.torch = event.get("torch") or ""
    process.sizes = {int(kind): int(size) for kind, size in (event.get("sizes") or {}).items()}
    process.activated_ns = int(event["t"])
    process.cost_ns += int(event["cost_ns"])


def _finished(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.finished = True
    process.cost_ns += int(event["cost_ns"])


def _window(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.windows.append((int(event["t"]), str(event["state"]), str(event["reason"])))


def _names(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.names.update({int(pointer): name for pointer, name in event["names"] if name})


def _nodes(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.nodes.extend((int(a), int(b), int(c), int(d)) for a, b, c, d in event["nodes"])


def _steps(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.steps.extend((str(k), bool(traced), int(at), int(ns)) for k, traced, at, ns in event["steps"])


def _dropped(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.dropped += int(event["records"])


def _fault(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.faults.append(f"{event.get('where')}: {event.get('text')}")


def _note(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.notes.append(str(event.get("text")))


def _refused(process: ProcessSpool, event: dict[str, Any]) -> None:
    process.notes.extend(f"{what} refused: {why}" for what, why in event["what"].items())


_HANDLERS = {
    "hello": _hello,
    "activated": _activated,
    "finished": _finished,
    "window": _window,
    "names": _names,
    "graph_nodes": _nodes,
    "steps": _steps,
    "dropped": _dropped,
    "fault": _fault,
    "note": _note,
    "refused": _refused,
}
