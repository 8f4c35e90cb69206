"""Who launched each kernel, from what a torch.profiler file says of the host: operators, modules, Python frames.

A kernel belongs to the innermost operator, module and frame around the call that launched it, on that call's thread;
where the call is not in the file, around the operator that its ``External id`` names. A replayed CUDA graph tells who
replays it, not who made its kernels: those stay unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler.nesting import Nesting
from spikeprof.profiler.origins import MATCHES, TRITON, Frame, Origins, is_operator, numbered, owner_table, stack_row
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import coded

Ints = npt.NDArray[np.int64]
Tables = Mapping[str, pa.Table]

_MOST_FRAMES = 32
_PLACE = re.compile(r"(?P<file>.+)\((?P<line>\d{1,9})\): (?P<function>.+)", re.DOTALL)
_NUMBERED = re.compile(r"(.+)_\d+")


def owner_tables(tables: Tables, frames: pa.Table | None, external: Mapping[str, Ints]) -> dict[str, pa.Table]:
    """The tables modules, stacks, origins and kernel_owners, as far as the file knows; none where it knows nothing.

    ``tables`` are those of the trace, ``frames`` the calls of Python functions with their ranks, ``external`` the
    external ids (0 = none) of kernels and ops.
    """
    hosts = {"ops": _ops(tables), "modules": _modules(tables), "frames": frames}
    if not any(host is not None and len(host) for host in hosts.values()):
        return {}
    kernels = tables["kernels"]
    rank, thread, time = _launches(tables, external)
    known = np.flatnonzero(time >= 0)
    where = (rank[known], thread[known], time[known])
    found: dict[str, Ints] = {name: _around(host, *where) for name, host in hosts.items()}
    made: dict[str, pa.Table] = {}
    module, stack = np.full(len(known), -1, np.int64), np.full(len(known), -1, np.int64)
    if hosts["modules"] is not None and len(hosts["modules"]):
        numbers, made["modules"] = _module_table(hosts["modules"])
        module = np.where(found["modules"] >= 0, numbers[found["modules"]], -1)
    if frames is not None and len(frames):
        stack, made["stacks"] = _stack_table(frames, found["frames"])
    origins = Origins()
    op, given = _operators(origins, hosts["ops"], found["ops"])
    origin = np.full(len(kernels), -1, np.int64)
    origin[known] = origins.number([rank[known], module, stack, op, given])
    match = np.where(origin >= 0, MATCHES.index("exact"), MATCHES.index("none"))
    return made | {"origins": origins.table(), "kernel_owners": owner_table(origin, match)}


def _column(table: pa.Table, name: str) -> Ints:
    return np.asarray(table.column(name).to_numpy(), np.int64)


def _ops(tables: Tables) -> pa.Table | None:
    """Operators, with their rows in the table ``ops``."""
    if "ops" not in tables:
        return None
    table = tables["ops"]
    codes, names = coded(table.column("name"))
    real = np.array([is_operator(name) for name in names], bool)
    return table.filter(pa.array(real[codes])) if len(codes) else table


def _modules(tables: Tables) -> pa.Table | None:
    """Calls of modules."""
    if "ranges" not in tables:
        return None
    codes, kinds = coded(tables["ranges"].column("kind"))
    chosen = np.isin(codes, [i for i, kind in enumerate(kinds) if kind == "module"])
    return tables["ranges"].filter(pa.array(chosen))


def _lanes(rank: Ints, thread: Ints) -> Ints:
    """Threads of processes, numbered. Thread numbers may be of any size."""
    return numbered(rank, thread).code


def _around(host: pa.Table | None, rank: Ints, thread: Ints, time: Ints) -> Ints:
    """Row of the innermost stretch of the host around each moment, -1 for none."""
    if host is None or not len(host):
        return np.full(len(time), -1, np.int64)
    count = len(host)
    lanes = _lanes(np.append(_column(host, "rank"), rank), np.append(_column(host, "thread_id"), thread))
    nesting = Nesting(lanes[:count], _column(host, "start_ns"), _column(host, "end_ns"))
    return nesting.innermost(lanes[count:], time)


def _launches(tables: Tables, external: Mapping[str, Ints]) -> tuple[Ints, Ints, Ints]:
    """Rank, thread and time at which each kernel was launched; the time is -1 where that is not known."""
    kernels = tables["kernels"]
    rank = _column(kernels, "rank")
    thread, time = np.zeros(len(rank), np.int64), np.full(len(rank), -1, np.int64)
    if "ops" in tables and len(tables["ops"]):
        ops = tables["ops"]
        at = _first(external["ops"], _column(ops, "rank"), external["kernels"], rank)
        thread = np.where(at >= 0, _column(ops, "thread_id")[at], thread)
        time = np.where(at >= 0, _column(ops, "start_ns")[at], time)
    calls = tables["runtime_calls"]
    if len(calls):
        codes, names = coded(calls.column("name"))
        waits = np.array(["Synchronize" in name for name in names], bool)
        replays = np.array(["GraphLaunch" in name for name in names], bool)
        at = _first(_column(calls, "correlation_id"), _column(calls, "rank"), _column(kernels, "correlation_id"), rank)
        launched = (at >= 0) & ~waits[codes[at]]
        thread = np.where(launched, _column(calls, "thread_id")[at], thread)
        time = np.where(launched, _column(calls, "start_ns")[at], time)
        time[launched & replays[codes[at]]] = -1
    time[(_column(kernels, "graph_id") != 0) | (_column(kernels, "graph_node_id") != 0)] = -1
    return rank, thread, time


def _first(keys: Ints, ranks: Ints, wanted: Ints, wanted_ranks: Ints) -> Ints:
    """The first row with each wanted key of that rank, -1 for none; a key of 0 is none."""
    count = len(keys)
    codes = numbered(np.append(ranks, wanted_ranks), np.append(keys, wanted)).code
    first = np.full(int(codes.max(initial=-1)) + 1, -1, np.int64)
    first[codes[:count][::-1]] = np.arange(count - 1, -1, -1)
    return np.where(wanted != 0, first[codes[count:]], -1)


def _operators(origins: Origins, ops: pa.Table | None, rows: Ints) -> tuple[Ints, Ints]:
    """Numbers of the operators and of their inputs in ``origins``, -1 and 0 where there is none."""
    op, given = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
    inside = np.flatnonzero(rows >= 0)
    if ops is None or not len(inside):
        return op, given
    used = ops.take(pa.array(rows[inside]))
    columns = [coded(used.column(name)) for name in ("name", "input_shapes", "input_dtypes")]
    distinct = numbered(*(codes for codes, _ in columns))
    texts = [[labels[i] for i in codes[distinct.first].tolist()] for codes, labels in columns]
    op[inside] = np.array([origins.op(_operator(name)) for name in texts[0]], np.int64)[distinct.code]
    given[inside] = np.array([origins.input(*pair) for pair in zip(*texts[1:], strict=True)], np.int64)[distinct.code]
    return op, given


def _operator(name: str) -> str:
    """torch records a Triton kernel as an operator of the kernel's name."""
    return TRITON + name if name.startswith("triton_") else name


def _module_table(calls: pa.Table) -> tuple[Ints, pa.Table]:
    """The module of each call, and the table. One name below one module is one module."""
    lanes = _lanes(_column(calls, "rank"), _column(calls, "thread_id"))
    parent = Nesting(lanes, _column(calls, "start_ns"), _column(calls, "end_ns")).parents()
    ranks = _column(calls, "rank")
    names, labels = coded(calls.column("name"))
    module = np.full(len(parent), -1, np.int64)
    rows: list[dict[str, Any]] = []
    depth = _depths(parent)
    order = np.argsort(depth, kind="stable")
    edges = np.searchsorted(depth[order], np.arange(int(depth.max()) + 2))
    for begin, end in pairwise(edges.tolist()):
        level = order[begin:end]
        above = np.where(parent[level] >= 0, module[parent[level]], -1)
        distinct = numbered(ranks[level], above, names[level])
        module[level] = distinct.code + len(rows)
        for i, up in zip(level[distinct.first].tolist(), above[distinct.first].tolist(), strict=True):
            label = labels[names[i]]
            numbered_name = _NUMBERED.fullmatch(label)
            above_it = rows[up]["path"] if up >= 0 else ""
            rows.append(
                {
                    "rank": int(ranks[i]),
                    "parent_id": up,
                    "path": "" if up < 0 else f"{above_it}.{label}" if above_it else label,
                    "class_name": numbered_name[1] if numbered_name else label,
                }
            )
    return module, TABLES["modules"].of_rows(rows)


def _depths(parent: Ints) -> Ints:
    depth, up = np.zeros(len(parent), np.int64), parent.copy()
    inside = np.flatnonzero(up >= 0)
    while len(inside):
        depth[inside] += 1
        up[inside] = parent[up[inside]]
        inside = inside[up[inside] >= 0]
    return depth


def _stack_table(frames: pa.Table, innermost: Ints) -> tuple[Ints, pa.Table]:
    """The stack of each launch from its innermost frame (-1 = none), and the table."""
    lanes = _lanes(_column(frames, "rank"), _column(frames, "thread_id"))
    parent = np.append(Nesting(lanes, _column(frames, "start_ns"), _column(frames, "end_ns")).parents(), -1)
    names, labels = coded(frames.column("name"))
    names = np.append(names, -1)
    used = numbered(innermost)
    at, columns = innermost[used.first], []
    ranks = np.append(_column(frames, "rank"), -1)[at]
    for _ in range(_MOST_FRAMES):
        columns.append(names[at])
        at = np.where(at >= 0, parent[at], -1)
    distinct = numbered(ranks, *columns)
    parsed = [_frame(label) for label in labels]
    rows: list[dict[str, Any]] = []
    number = np.full(len(distinct.first), -1, np.int64)
    for i, first in enumerate(distinct.first.tolist()):
        stack = [parsed[column[first]] for column in columns if column[first] >= 0]
        if stack:
            number[i] = len(rows)
            rows.append(stack_row(int(ranks[first]), stack))
    return number[distinct.code][used.code], TABLES["stacks"].of_rows(rows)


def _frame(name: str) -> Frame:
    """``model.py(12): forward`` taken apart; a built-in function has no file."""
    found = _PLACE.fullmatch(name)
    return (found["file"], int(found["line"]), found["function"]) if found else ("<built-in>", 0, name)
