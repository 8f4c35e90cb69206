"""What a process's event file says of where its launches came from: modules, stacks, launches, operators, graph nodes.

Numbers of modules and stacks are the process's own here; ``owners.py`` makes rows of the trace of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Frame = tuple[str, int, str]  # file, line, function

_LAUNCH = ("correlation", "module", "stack", "t", "thread")
_OP = ("start", "end", "thread")
_NODE = ("node", "source", "graph", "t", "module", "stack", "thread")
_TIMES = ("t", "start", "end")


@dataclass
class Attribution:
    """The events of one process, times as written (Unix ns). Arrays of rows wait in batches, see ``rows``."""

    modules: dict[int, tuple[int, str, str]] = field(default_factory=dict)  # parent, path, class
    stacks: dict[int, tuple[Frame, ...]] = field(default_factory=dict)  # innermost first
    op_names: list[str] = field(default_factory=list)
    op_shapes: list[str] = field(default_factory=list)  # JSON, empty = not known
    op_dtypes: list[str] = field(default_factory=list)
    spans: list[tuple[str, str, int, int]] = field(default_factory=list)  # what, why, begin, end
    dropped: Counter[str] = field(default_factory=Counter)
    batches: dict[str, list[Ints]] = field(default_factory=dict)

    @property
    def tried(self) -> bool:
        """Whether launches or graph nodes were ever attributed."""
        return any(what in ("window", "capture") for what, *_ in self.spans) or any(
            len(batch) for kind in ("launches", "nodes") for batch in self.batches.get(kind, ())
        )

    def rows(self, kind: str) -> dict[str, Ints]:
        """All rows of launches, ops or nodes, by column."""
        columns = _COLUMNS[kind]
        whole = np.concatenate([np.empty((0, len(columns)), np.int64), *self.batches.get(kind, ())])
        return {name: whole[:, i] for i, name in enumerate(columns)}

    def add_nodes(self, nodes: list[list[int]]) -> None:
        """Graph nodes with their origins; those of older spools, without, tell nothing here."""
        self._add("nodes", [row for row in nodes if len(row) == len(_NODE)])

    def _add(self, kind: str, rows: list[Any]) -> None:
        columns = _COLUMNS[kind]
        try:
            batch = np.array(rows, np.int64).reshape(-1, len(columns))
        except OverflowError as error:
            raise ValueError("a number that no id or time has") from error
        if (batch[:, [columns.index(name) for name in columns if name in _TIMES]] < 0).any():
            raise ValueError("a time before all times")
        self.batches.setdefault(kind, []).append(batch)

    def _modules(self, event: dict[str, Any]) -> None:
        self.modules.update({int(i): (int(up), str(path), str(name)) for i, up, path, name in event["modules"]})

    def _stacks(self, event: dict[str, Any]) -> None:
        for number, frames in event["stacks"]:
            read = tuple((str(file), int(line), str(name)) for file, line, name in frames)
            if any(not 0 <= line < 1 << 31 for _, line, _ in read):
                raise ValueError("a line that no file has")
            self.stacks[int(number)] = read

    def _launches(self, event: dict[str, Any]) -> None:
        self.dropped["launches"] += int(event.get("dropped", 0))
        self._add("launches", event["launches"])

    def _ops(self, event: dict[str, Any]) -> None:
        self.dropped["operators"] += int(event.get("dropped", 0))
        texts = [(str(name), _text(shapes), _text(dtypes)) for name, _, _, _, shapes, dtypes in event["ops"]]
        self._add("ops", [row[1:4] for row in event["ops"]])
        for name, shapes, dtypes in texts:
            self.op_names.append(name)
            self.op_shapes.append(shapes)
            self.op_dtypes.append(dtypes)

    def _span(self, event: dict[str, Any]) -> None:
        begin = int(event["t"])
        span = (str(event["what"]), str(event.get("reason") or ""), begin, int(event.get("end") or begin))
        self.spans.append(span)


_COLUMNS = {"launches": _LAUNCH, "ops": _OP, "nodes": _NODE}


def _text(values: list[Any]) -> str:
    return json.dumps(values, ensure_ascii=False) if values else ""


#: Of each kind of event, what to do with it.
HANDLERS: dict[str, Callable[[Attribution, dict[str, Any]], None]] = {
    "modules": Attribution._modules,
    "stacks": Attribution._stacks,
    "launches": Attribution._launches,
    "ops": Attribution._ops,
    "attribution": Attribution._span,
}
