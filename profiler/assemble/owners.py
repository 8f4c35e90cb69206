"""Who owns each kernel: launches and graph nodes whose Python was seen, joined to the kernels of the trace.

A kernel launched one by one has its launch's origin, found by process and correlation id; a kernel of a graph has the
origin of the node that its own was cloned from. All others are asked of ``carry.py``. The operator is the innermost
one of the launching thread at that moment. Copies and memsets get no owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spikeprof.profiler import store
from spikeprof.profiler.assemble.attributed import Names, Ops, Seen
from spikeprof.profiler.assemble.attribution import Attribution
from spikeprof.profiler.assemble.carry import PLACE, WANTED, Only, carry, stretches
from spikeprof.profiler.assemble.spool import ProcessSpool
from spikeprof.profiler.origins import MATCHES, TRITON, Origins, numbered, owner_table
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote, coded

Ints = npt.NDArray[np.int64]

#: What ``write_owners`` writes.
WRITTEN = ("modules", "stacks", "ops", "origins", "kernel_owners")

#: Clones of clones are followed so far.
_MOST_CLONINGS = 16

_NONE, _EXACT, _GRAPH, _POSITION, _SIGNATURE = range(len(MATCHES))


def write_owners(folder: Path, traced: Sequence[ProcessSpool], t0_unix_ns: int) -> CollectorNote | None:
    """Write modules, stacks, ops, origins and kernel_owners; none of them where nothing was attributed.

    The table of kernels must be there. Returns the note for the manifest, None where the spool says nothing of it.
    """
    attributed = [p for p in traced if p.attribution.tried]
    if attributed and (folder / "kernels.parquet").exists():
        names = Names(attributed)
        ops = Ops(attributed, t0_unix_ns)
        seen = Seen.of(attributed, names, ops, t0_unix_ns)
        owners = _Owners(_Kernels.read(folder, attributed, t0_unix_ns), names, ops, seen)
        for process in attributed:
            owners.find(process)
        owners.carry_over()
        store.write_table(folder, "modules", TABLES["modules"].of_rows(names.modules))
        store.write_table(folder, "stacks", TABLES["stacks"].of_rows(names.stacks))
        store.write_table(folder, "origins", owners.origins.table())
        if ops.count:
            store.write_table(folder, "ops", ops.table())
        with store.open_table(folder, "kernel_owners") as writer:
            for begin in range(0, max(len(owners.origin), 1), store.ROW_GROUP_ROWS):
                rows = slice(begin, begin + store.ROW_GROUP_ROWS)
                writer.write_table(owner_table(owners.origin[rows], owners.match[rows], begin))
    return _note([p.attribution for p in traced])


def _note(attributions: Sequence[Attribution]) -> CollectorNote | None:
    told = [a for a in attributions if a.spans or a.tried]
    if not told:
        return None
    skipped = dict.fromkeys(why for a in told for what, why, *_ in a.spans if what == "skipped" and why)
    faults = dict.fromkeys(
        why for a in told for what, why, *_ in a.spans if what == "ended" and why.startswith("fault")
    )
    dropped = {what: sum(a.dropped[what] for a in told) for what in ("launches", "operators")}
    lost = [f"{count} {what} came too fast to be kept" for what, count in dropped.items() if count]
    tried = any(a.tried for a in told)
    return CollectorNote(
        state="refused" if not tried else "degraded" if lost or faults else "ok",
        reason="; ".join([*faults, *lost, *skipped][:3]) or ("" if tried else "no launch was attributed"),
        records_count=sum(len(a.rows(kind)["t"]) for a in told for kind in ("launches", "nodes")),
        dropped_count=sum(dropped.values()),
    )


@dataclass(frozen=True)
class _Kernels:
    """What is needed of the table of kernels."""

    rank: npt.NDArray[Any]
    sequence: npt.NDArray[Any]  # equal on one stream of one process, as long as it was recorded without a pause
    correlation: npt.NDArray[Any]
    graph: npt.NDArray[Any]
    node: npt.NDArray[Any]
    name: npt.NDArray[Any]
    names: list[str]
    grid: npt.NDArray[Any]

    @classmethod
    def read(cls, folder: Path, processes: Sequence[ProcessSpool], t0_unix_ns: int) -> _Kernels:
        """Read them column by column, each as narrow as it may be."""

        def column(name: str) -> npt.NDArray[Any]:
            return _narrow(store.read_columns(folder, "kernels", [name]).column(name).to_numpy())

        def several(*names: str, more: Sequence[npt.NDArray[Any]] = ()) -> npt.NDArray[np.int32]:
            return numbered(*(column(name) for name in names), *more).code.astype(np.int32)

        rank = column("rank")
        resumed = {p.rank: times for p in processes if len(times := _resumed(p, t0_unix_ns)) > 1}
        pauses = [_parts(resumed, rank, column("start_ns"))] if resumed else []
        name, names = coded(store.read_columns(folder, "kernels", ["name"]).column("name"))
        return cls(
            rank=rank,
            sequence=several("rank", "context_id", "stream", more=pauses),
            correlation=column("correlation_id"),
            graph=column("graph_id"),
            node=column("graph_node_id"),
            name=name,
            names=names,
            grid=several("grid_x", "grid_y", "grid_z"),
        )

    @property
    def in_graph(self) -> npt.NDArray[np.bool_]:
        """Whether a graph launched it."""
        return np.asarray((self.graph != 0) | (self.node != 0))


def _resumed(process: ProcessSpool, t0_unix_ns: int) -> list[int]:
    """When recording came on: before the first of its kernels, and after each pause."""
    states = ["", *(state for _, state, _ in process.windows)]
    times = [at - t0_unix_ns for at, _, _ in process.windows] if process.clock_held else []
    return [at for at, before, state in zip(times, states, states[1:], strict=False) if before != "traced" == state]


def _parts(resumed: Mapping[int, Sequence[int]], rank: npt.NDArray[Any], start: npt.NDArray[Any]) -> Ints:
    """Between which two pauses of its process each kernel ran: kernels on both sides of one are no neighbours."""
    part = np.zeros(len(rank), np.int64)
    for number, times in resumed.items():
        mine = rank == number
        part[mine] = np.searchsorted(times, start[mine], side="right")
    return part


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    limits = np.iinfo(np.int32)
    fits = len(values) and limits.min <= values.min() and values.max() <= limits.max
    return values.astype(np.int32) if fits else values


class _Owners:
    """The origin and match of every kernel, as they are found."""

    def __init__(self, kernels: _Kernels, names: Names, ops: Ops, seen: Seen) -> None:
        self._kernels, self._names, self._ops, self._seen = kernels, names, ops, seen
        self.origins = Origins()
        count = len(kernels.rank)
        self.origin = np.full(count, -1, np.int32)
        self.match = np.full(count, _NONE, np.int8)
        self._launched = np.zeros(count, bool)  # its own launch was seen, whatever is known of it
        self._in_graph = kernels.in_graph

    def find(self, process: ProcessSpool) -> None:
        """Give one process's kernels the origins of their own launches and nodes."""
        mine = self._kernels.rank == process.rank
        eager, replayed = np.flatnonzero(mine & ~self._in_graph), np.flatnonzero(mine & self._in_graph)
        # A correlation id of 0 is none.
        found = self._seen.find(self._seen.launches[process.rank], self._kernels.correlation[eager])
        found[self._kernels.correlation[eager] == 0] = -1
        self._launched[eager] = found >= 0
        self._assign(eager, found, _EXACT)
        distinct, inverse = np.unique(self._kernels.node[replayed], return_inverse=True)
        created = _created(process.nodes, distinct.astype(np.int64))
        self._assign(replayed, self._seen.find(self._seen.nodes[process.rank], created)[inverse], _GRAPH)

    def _assign(self, rows: Ints, seen: Ints, match: int) -> None:
        rows, seen = rows[seen >= 0], seen[seen >= 0]
        if not len(rows):
            return
        stack = self._seen.columns["stack"][seen]
        triton = np.append(np.array(self._names.triton, bool), False)[stack]  # the last: of no stack
        bare = triton & (self._seen.columns["op"][seen] < 0)
        # What one launch or node launched has one name, but for graphs that were launched in the meantime.
        distinct = numbered(seen, np.where(bare, self._kernels.name[rows], -1))
        first, shown = seen[distinct.first], np.where(bare, self._kernels.name[rows], -1)[distinct.first]
        op, given = self._operators(self._seen.columns["op"][first], shown)
        columns = [self._seen.columns[name][first] for name in ("rank", "module", "stack")]
        origin = self.origins.number([*columns, op, given])[distinct.code]
        self.origin[rows] = origin
        self.match[rows] = np.where(origin >= 0, match, _NONE)

    def _operators(self, op: Ints, triton: Ints) -> tuple[Ints, Ints]:
        """Numbers of operators and of their inputs, from rows of ``ops``, else from names of Triton's kernels."""
        ops, kernels = self._ops, self._kernels.names
        texts = numbered(*(np.where(op >= 0, codes[op] if ops.count else -1, -1) for codes in
                           (ops.name, ops.shape, ops.dtype)), triton)  # fmt: skip
        pairs = []
        for i in texts.first.tolist():
            row = int(op[i])
            if row >= 0:
                given = self.origins.input(ops.shapes[ops.shape[row]], ops.dtypes[ops.dtype[row]])
                pairs.append((self.origins.op(ops.names[ops.name[row]]), given))
            else:
                pairs.append((self.origins.op(TRITON + kernels[triton[i]]) if triton[i] >= 0 else -1, 0))
        found = np.array(pairs, np.int64).reshape(-1, 2)[texts.code]
        return found[:, 0], found[:, 1]

    def carry_over(self) -> None:
        """Ask the launches that were seen about the others."""
        eager = ~self._in_graph
        if not self._launched.any() or not (eager & ~self._launched).any():
            return
        rows = self._sequences()
        made = self.origins.rows()
        place_of, first = self._places(made)
        seen, launched = self.origin[rows], self._launched[rows] | self._in_graph[rows]
        kernels = self._kernels
        in_graph = self._in_graph[rows]
        # A replay of a graph is one step in a sequence, called after the graph.
        token = numbered(kernels.rank[rows], in_graph, np.where(in_graph, kernels.graph[rows], kernels.name[rows])).code
        place = np.where(launched, np.append(place_of, -1)[seen], WANTED)
        carried = carry(kernels.sequence[rows], token, kernels.grid[rows], place)
        found = np.flatnonzero(carried.place >= 0)
        if not len(found):
            return
        stretch = stretches(kernels.sequence[rows], token)
        shown = np.flatnonzero((place >= 0) & ~in_graph)
        told = carried.place[found].astype(np.int64)
        origin = self._with_inputs(made[:, 4], place_of, rows, shown, found, told, stretch)
        open_ = np.flatnonzero(origin < 0)
        needed = numbered(carried.place[found[open_]])
        bare = [self._without_inputs(int(first[p])) for p in carried.place[found[open_]][needed.first].tolist()]
        origin[open_] = np.array(bare, np.int64)[needed.code]
        self.origin[rows[found]] = origin
        self.match[rows[found]] = np.where(carried.length[found] >= PLACE, _POSITION, _SIGNATURE)

    def _with_inputs(
        self, given: Ints, place_of: Ints, rows: Ints, seen: Ints, found: Ints, place: Ints, stretch: Ints
    ) -> Ints:
        """The origin of kernels of known places, where what was seen there tells their inputs.

        ``given`` and ``place_of`` are of each origin; ``seen`` and ``found`` are indices into ``rows``, ``stretch``
        numbers what runs up to each. Asked are the launches of the place with that grid after the same kernels, else
        all with that grid. -1 where the inputs of some such launches differed, be it at another grid or after other
        kernels: then these do not tell them. And -1 where there was but one: the next may have had others. After
        kernels that were seen once that is one of all launches of the place.
        """
        grid = self._kernels.grid[rows]
        after = np.where(stretch >= 0, stretch * (int(grid.max()) + 1) + grid, -1)
        origin = self.origin[rows[seen]].astype(np.int64)
        told = np.full(len(found), -1, np.int64)
        # Launches of one place may differ in what called it: any origin with these inputs will do.
        inputs = int(given.max()) + 1
        pairs, first, times = np.unique(
            place_of[origin] * inputs + given[origin], return_index=True, return_counts=True
        )
        for kind in (grid, after):  # the closer one has the last word
            of_seen, asked, kinds = kind[seen], kind[found], int(kind.max()) + 1
            keys = np.where(of_seen >= 0, place_of[origin] * kinds + of_seen, -1)
            known = Only(keys, given[origin])
            at = known.find(place * kinds + asked)
            pair = np.minimum(np.searchsorted(pairs, place * inputs + known.value[at]), len(pairs) - 1)
            torn = place_of[origin][(of_seen >= 0) & (known.value[known.find(keys)] < 0)]
            often = times[pair] if kind is after else known.count[at]
            enough = (often > 1) & ~np.isin(place, torn)
            told = np.where((at >= 0) & (asked >= 0) & (known.value[at] >= 0) & enough, pair, told)
        return np.where(told >= 0, origin[first[told]], -1)

    def _sequences(self) -> Ints:
        """Kernels stream behind stream, each in order; of those that one graph launch ran on a stream, the first."""
        kernels = self._kernels
        rows = np.argsort(kernels.sequence, kind="stable")
        same = (kernels.sequence[rows[1:]] == kernels.sequence[rows[:-1]]) & self._in_graph[rows[1:]]
        same &= self._in_graph[rows[:-1]] & (kernels.correlation[rows[1:]] == kernels.correlation[rows[:-1]])
        return np.asarray(rows[np.append(True, ~same)])

    def _places(self, rows: Ints) -> tuple[Ints, Ints]:
        """Of each origin the number of its module, line and operator; and one origin of each such place."""
        line = np.append(np.array(self._names.lines, np.int64), -1)[rows[:, 2]]
        return numbered(rows[:, 0], rows[:, 1], line, rows[:, 3])

    def _without_inputs(self, origin: int) -> int:
        """An origin of the same place that says nothing of shapes: they differ from one launch to the next there."""
        row = self.origins.row(origin)
        if row[4] == 0:
            return origin
        self.origins.add([(*row[:4], 0)])
        return self.origins.count - 1


def _created(nodes: Sequence[tuple[int, int, int, int]], wanted: Ints) -> Ints:
    """The node that each one was cloned from in the end: created while its kernel was captured."""
    clones = np.array([node[:2] for node in nodes if node[1]], np.int64).reshape(-1, 2)
    if not len(clones):
        return wanted
    clones = clones[np.argsort(clones[:, 0], kind="stable")]
    clone, source = clones[:, 0], clones[:, 1]
    found = np.array(wanted)
    for _ in range(_MOST_CLONINGS):
        at = np.searchsorted(clone, found, side="right") - 1
        cloned = (at >= 0) & (clone[np.maximum(at, 0)] == found)
        if not cloned.any():
            break
        found[cloned] = source[at[cloned]]
    return found
