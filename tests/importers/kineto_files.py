"""Tiny torch.profiler files for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.trace import Trace


def event(
    cat: str | None, name: str, ts: Any, dur: Any, *, pid: Any = 100, tid: Any = 100, **args: Any
) -> dict[str, Any]:
    """A complete event; ``ts`` and ``dur`` in µs. ``cat=None`` leaves the category out."""
    record = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
    return {key: value for key, value in record.items() if not (key == "cat" and value is None)}


def kernel(name: str, ts: Any, dur: Any, *, device: int = 0, stream: int = 7, **args: Any) -> dict[str, Any]:
    """A kernel, with the device and stream where Kineto writes them: twice."""
    return event("kernel", name, ts, dur, pid=device, tid=stream, device=device, stream=stream, **args)


def read(tmp_path: Path, events: list[dict[str, Any]], **head: Any) -> Trace:
    """The trace of a file with these events."""
    path = tmp_path / "t.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, **head, "traceEvents": events}))
    return open_trace(path)


def rows(trace: Trace, table: str, *columns: str) -> list[tuple[Any, ...]]:
    """Some columns of a table, row by row."""
    data = trace.table(table).select(list(columns)).to_pylist()
    return [tuple(row[c] for c in columns) for row in data]
