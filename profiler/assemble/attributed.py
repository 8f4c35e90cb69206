"""What attribution says of all processes, in numbers of the trace: modules, stacks, operators, launches, nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler.assemble.attribution import Attribution
from spikeprof.profiler.assemble.spool import ProcessSpool
from spikeprof.profiler.nesting import Nesting
from spikeprof.profiler.origins import by_triton, is_operator, line_of, stack_row, texts_of
from spikeprof.profiler.schema import TABLES

Ints = npt.NDArray[np.int64]


class Names:
    """Modules and stacks of all processes, numbered as in the trace."""

    def __init__(self, processes: Sequence[ProcessSpool]) -> None:
        self.modules: list[dict[str, Any]] = []
        self.stacks: list[dict[str, Any]] = []
        self.lines: list[int] = []  # of each stack, equal for stacks of one rank with one line
        self.triton: list[bool] = []  # of each stack, whether Triton launched there
        self._module_of: dict[tuple[int, int], int] = {}  # (rank, number in the process) -> row
        self._stack_of: dict[tuple[int, int], int] = {}
        numbers: dict[tuple[int, str, int, str], int] = {}
        for process in processes:
            found = process.attribution
            self._add_modules(process.rank, found)
            for number, frames in sorted(found.stacks.items()):
                self._stack_of[process.rank, number] = len(self.stacks)
                self.stacks.append(stack_row(process.rank, frames))
                self.lines.append(numbers.setdefault((process.rank, *line_of(frames)), len(numbers)))
                self.triton.append(by_triton(frames))

    def _add_modules(self, rank: int, found: Attribution) -> None:
        order = sorted(found.modules)
        self._module_of |= {(rank, number): len(self.modules) + i for i, number in enumerate(order)}
        for number in order:
            parent, path, name = found.modules[number]
            row = self._module_of.get((rank, parent), -1) if parent != number else -1
            self.modules.append({"rank": rank, "parent_id": row, "path": path, "class_name": name})

    def module(self, rank: int, numbers: Ints) -> Ints:
        """Rows of ``modules`` of a process's numbers, -1 for unknown ones."""
        return _translated(numbers, lambda number: self._module_of.get((rank, number), -1))

    def stack(self, rank: int, numbers: Ints) -> Ints:
        """Rows of ``stacks`` of a process's numbers, -1 for unknown ones."""
        return _translated(numbers, lambda number: self._stack_of.get((rank, number), -1))


def _translated(values: Ints, of: Callable[[int], int]) -> Ints:
    distinct, inverse = np.unique(values, return_inverse=True)
    return np.fromiter((of(v) for v in distinct.tolist()), np.int64, len(distinct))[inverse.reshape(values.shape)]


class Ops:
    """Operators of all processes in order of start, and which of them surrounds a moment."""

    def __init__(self, processes: Sequence[ProcessSpool], t0_unix_ns: int) -> None:
        found = [p.attribution for p in processes]
        parts = [a.rows("ops") for a in found]
        start, end, thread = (_joined([part[name] for part in parts]) for name in ("start", "end", "thread"))
        rank = np.repeat([p.rank for p in processes], [len(part["start"]) for part in parts])
        order = np.argsort(start, kind="stable")
        order = order[end[order] >= start[order]]
        self.rank, self.thread, self.start, self.end = rank[order], thread[order], start[order], end[order]
        self.start, self.end = self.start - t0_unix_ns, self.end - t0_unix_ns
        name, self.names = texts_of([text for a in found for text in a.op_names])
        shapes, self.shapes = texts_of([text for a in found for text in a.op_shapes])
        dtypes, self.dtypes = texts_of([text for a in found for text in a.op_dtypes])
        self.name, self.shape, self.dtype = name[order], shapes[order], dtypes[order]
        real = np.array([is_operator(text) for text in self.names], bool)
        self._rows = np.flatnonzero(real[self.name]) if len(order) else order
        lanes = _lane(self.rank, self.thread)[self._rows]
        self._nesting = Nesting(lanes, self.start[self._rows], self.end[self._rows])

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.start)

    def at(self, rank: Ints, thread: Ints, time: Ints) -> Ints:
        """Row of the innermost operator around each moment (ns, on the session's clock), -1 for none."""
        found = self._nesting.innermost(_lane(rank, thread), time)
        return np.where(found >= 0, self._rows[found], -1) if len(self._rows) else found

    def table(self) -> pa.Table:
        """The table ``ops``."""
        texts = [
            pa.DictionaryArray.from_arrays(codes, pa.array(labels, pa.string()))
            for codes, labels in ((self.name, self.names), (self.shape, self.shapes), (self.dtype, self.dtypes))
        ]
        name, *inputs = texts
        arrays = [np.arange(self.count), self.rank, self.thread, name, self.start, self.end, *inputs]
        return pa.table(dict(zip(TABLES["ops"].arrow.names, arrays, strict=True))).cast(TABLES["ops"].arrow)


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _lane(rank: npt.NDArray[Any], thread: npt.NDArray[Any]) -> Ints:
    """A thread of a process as one number: both are below 32 bits."""
    return rank.astype(np.int64) << 32 | thread & 0xFFFFFFFF


@dataclass(frozen=True)
class Seen:
    """Launches and graph nodes whose origin was seen, of all processes: one element each."""

    columns: Mapping[str, Ints]  # rank, module, stack, op (row of ops)
    key: Ints  # correlation id, or node
    launches: Mapping[int, slice]  # of each rank
    nodes: Mapping[int, slice]

    @classmethod
    def of(cls, processes: Sequence[ProcessSpool], names: Names, ops: Ops, t0_unix_ns: int) -> Seen:
        """Gather them."""
        parts: list[dict[str, Ints]] = []
        places: dict[str, dict[int, slice]] = {"launches": {}, "nodes": {}}
        count = 0
        for process in processes:
            for kind, id_name in (("launches", "correlation"), ("nodes", "node")):
                found = process.attribution.rows(kind)
                time = found["t"] - t0_unix_ns
                rank = np.full(len(time), process.rank, np.int64)
                parts.append(
                    {
                        "key": found[id_name],
                        "rank": rank,
                        "module": names.module(process.rank, found["module"]),
                        "stack": names.stack(process.rank, found["stack"]),
                        "op": ops.at(rank, found["thread"], time),
                    }
                )
                places[kind][process.rank] = slice(count, count + len(time))
                count += len(time)
        columns = {name: _joined([part[name] for part in parts]) for name in ("key", "rank", "module", "stack", "op")}
        return cls(columns, columns.pop("key"), places["launches"], places["nodes"])

    def find(self, where: slice, wanted: Ints) -> Ints:
        """The last of those with each key, -1 for none."""
        if where.start == where.stop:
            return np.full(len(wanted), -1, np.int64)
        keys = self.key[where]
        order = np.argsort(keys, kind="stable")
        at = np.searchsorted(keys[order], wanted, side="right") - 1
        found = order[np.maximum(at, 0)]
        return np.where((at >= 0) & (keys[found] == wanted), found + where.start, -1)
