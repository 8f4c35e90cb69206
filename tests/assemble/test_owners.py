"""Spools with attributed launches, and whose each kernel must become."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from assemble.spools import T0, events, frame, work, write

from spikeprof.profiler import store
from spikeprof.profiler.assemble import layouts as lay
from spikeprof.profiler.assemble.build import Assembly, assemble
from spikeprof.profiler.origins import Origins
from spikeprof.profiler.trace import Manifest, Trace

MODEL = "/home/u/model.py"
LINEAR = "/v/lib/python3.12/site-packages/torch/nn/modules/linear.py"
JIT = "/v/lib/python3.12/site-packages/triton/runtime/jit.py"
NAMES = {1000: "gemm", 2000: "add", 3000: "silu_kernel", 4000: "softmax"}
MODULES = [[0, -1, "", "Net"], [1, 0, "layers.0", "Layer"], [2, 0, "layers.1", "Layer"]]
STACKS = [
    [0, [[LINEAR, 125, "forward"], [MODEL, 7, "forward"], ["/home/u/run.py", 40, "main"]]],
    [1, [[JIT, 347, "run"], [MODEL, 9, "forward"]]],
    [2, [["/usr/lib/python3.12/threading.py", 1012, "run"]]],
]


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"ev": kind, "t": T0 + 5, **fields}


def kernel(name: int, start: int, correlation: int, **fields: Any) -> bytes:
    where = {"device": 0, "context": 1, "stream": 7, "grid_x": 1, "name": name, "correlation": correlation}
    return work(lay.KERNEL, start, start + 10, **{**where, **fields})


def launch(correlation: int, module: int, stack: int, t: int, thread: int = 7) -> list[int]:
    return [correlation, module, stack, T0 + t, thread]


def built(
    folder: Path, kernels: Sequence[bytes], *more: dict[str, Any], window: bool = True
) -> tuple[Assembly, Trace, list[tuple[Any, ...]]]:
    """The assembly, its trace, and of each kernel module, line, operator, shapes and match."""
    lines = events()
    lines[-2:-2] = [
        event("names", names=[[pointer, name] for pointer, name in NAMES.items()]),
        event("modules", modules=MODULES),
        event("stacks", stacks=STACKS),
        *([event("attribution", what="window", reason="", end=T0 + 9)] if window else []),
        *more,
    ]
    write(folder / "spool", frames=[frame(b"".join(kernels))], lines=lines)
    assembly, trace = _read(folder)
    return assembly, trace, _owners(trace)


def _read(folder: Path) -> tuple[Assembly, Trace]:
    out = store.create_folder(folder / "trace")
    assembly = assemble(folder / "spool", out, T0)
    store.write_manifest(out, Manifest("spikeprof", T0, assembly.end_ns, collectors={"activity": assembly.note}))
    trace = store.read_trace(out)
    assert not trace.sound().damaged
    return assembly, trace


def _owners(trace: Trace) -> list[tuple[Any, ...]]:
    if "kernel_owners" not in trace:
        return []
    origins, modules, stacks = (trace.table(name).to_pylist() for name in ("origins", "modules", "stacks"))
    found = []
    for i, row in enumerate(trace.table("kernel_owners").to_pylist()):
        assert row["kernel_id"] == i
        if row["origin_id"] < 0:
            found.append((None, None, None, "", row["match"]))
            continue
        origin = origins[row["origin_id"]]
        module = modules[origin["module_id"]]["path"] if origin["module_id"] >= 0 else None
        line = stacks[origin["stack_id"]]["line"] if origin["stack_id"] >= 0 else None
        found.append((module, line, origin["op"], origin["input_shapes"], row["match"]))
    return found


def test_a_launch_gives_its_kernel_module_line_and_the_innermost_operator_of_its_thread(tmp_path: Path) -> None:
    kernels = [kernel(1000, 1000, 11), kernel(2000, 1100, 12), kernel(3000, 1200, 13), kernel(2000, 1300, 14)]
    assembly, trace, owners = built(
        tmp_path,
        [*kernels, kernel(4000, 1400, 0)],
        event("ops", ops=[["aten::linear", T0 + 400, T0 + 500, 7, [[2, 4], [8, 4]], []]], dropped=0),
        event("ops", ops=[["aten::mm", T0 + 410, T0 + 450, 7, [[2, 4], [4, 8]], ["Half", "Half"]]], dropped=0),
        event("ops", ops=[["aten::add", T0 + 410, T0 + 450, 8, [], []], ["## region", T0 + 590, T0 + 700, 7, [], []]]),
        event(
            "launches",
            launches=[
                launch(11, 1, 0, 420),
                launch(12, 0, 0, 460, thread=2**32 + 7),
                launch(13, 2, 1, 600),
                launch(14, -1, 2, 610),
                launch(0, 1, 0, 420),
            ],
            dropped=0,
        ),
    )
    assert owners == [
        ("layers.0", 7, "aten::mm", "[[2, 4], [4, 8]]", "exact"),
        ("", 7, "aten::linear", "[[2, 4], [8, 4]]", "exact"),
        ("layers.1", 9, "triton::silu_kernel", "", "exact"),  # launched by Triton, outside of any operator
        (None, 1012, None, "", "exact"),  # no frame but a library's
        (None, None, None, "", "none"),  # a correlation id of 0 is none
    ]
    assert trace.table("origins").column("input_dtypes").to_pylist()[0] == '["Half", "Half"]'
    assert trace.table("modules").to_pylist() == [
        {"module_id": 0, "rank": 0, "parent_id": -1, "path": "", "class_name": "Net"},
        {"module_id": 1, "rank": 0, "parent_id": 0, "path": "layers.0", "class_name": "Layer"},
        {"module_id": 2, "rank": 0, "parent_id": 0, "path": "layers.1", "class_name": "Layer"},
    ]
    stack = trace.table("stacks").to_pylist()[0]
    assert (stack["file"], stack["line"], stack["function"]) == (MODEL, 7, "forward")
    assert json.loads(stack["frames"]) == [f"{LINEAR}:125 forward", f"{MODEL}:7 forward", "/home/u/run.py:40 main"]
    ops = trace.table("ops").to_pylist()
    assert [(op["op_id"], op["name"], op["start_ns"], op["end_ns"], op["thread_id"]) for op in ops] == [
        (0, "aten::linear", 400, 500, 7),
        (1, "aten::mm", 410, 450, 7),
        (2, "aten::add", 410, 450, 8),
        (3, "## region", 590, 700, 7),
    ]
    note = assembly.ownership
    assert note is not None
    assert (note.state, note.reason, note.records_count, note.dropped_count) == ("ok", "", 5, 0)


def test_a_kernel_of_a_graph_belongs_to_the_node_that_its_own_was_cloned_from(tmp_path: Path) -> None:
    def node(number: int, source: int, t: int, module: int, stack: int) -> list[int]:
        return [number, source, 1, T0 + t, module, stack, 7]

    replay = {"graph": 3}
    kernels = [
        kernel(1000, 1000, 21, graph_node=31, **replay),
        kernel(2000, 1100, 21, graph_node=22, **replay),
        kernel(2000, 1200, 21, graph_node=13, **replay),
        kernel(1000, 1300, 22, graph_node=31, **replay),
        kernel(4000, 1400, 22, graph_node=99, **replay),
        kernel(4000, 1500, 22, graph_node=88, **replay),
    ]
    nodes = [
        node(11, 0, 200, 1, 0),
        node(12, 0, 220, 2, 1),
        node(13, 0, 240, 2, 0),  # launched as it was created
        node(21, 0, 300, -1, 2),  # told as created, too, by who makes the graph executable
        node(21, 11, 300, -1, 2),
        node(22, 12, 301, -1, 2),
        node(31, 21, 302, -1, 2),  # a clone of a clone
        node(99, 98, 303, -1, 2),  # of a node that was never seen
    ]
    _, trace, owners = built(
        tmp_path,
        kernels,
        event("graph_nodes", nodes=nodes),
        event("ops", ops=[["aten::mm", T0 + 190, T0 + 210, 7, [[1, 2]], []]]),
        # The call that replays the graph carries the kernels' correlation id: it owns none of them.
        event("launches", launches=[launch(21, 0, 2, 400), launch(22, 0, 2, 410)], dropped=0),
    )
    first = ("layers.0", 7, "aten::mm", "[[1, 2]]", "graph")
    assert owners == [
        first,
        ("layers.1", 9, "triton::add", "", "graph"),
        ("layers.1", 7, None, "", "graph"),
        first,
        (None, None, None, "", "none"),
        (None, None, None, "", "none"),
    ]
    assert len(trace.table("graph_nodes")) == 7  # each node once


def _steps(count: int, seen: Sequence[int], **changed: Any) -> tuple[list[bytes], list[list[int]], list[list[Any]]]:
    """Steps of 40 kernels with one name, after one of another; those of ``seen`` are attributed."""
    kernels, launches, ops = [], [], []
    for step in range(count):
        for i in range(41):
            number = step * 41 + i
            kernels.append(kernel(4000 if i == 0 else 1000, 1000 + 20 * number, number + 1, **changed))
            if step in seen:
                launches.append(launch(number + 1, 1 + i % 2, 0, 100 + number))
                rows = 1 if i % 3 else step
                ops.append([f"aten::op{i}", T0 + 100 + number, T0 + 101 + number, 7, [[rows]], []])
    return kernels, launches, ops


def test_kernels_of_other_steps_get_the_origin_of_the_same_place(tmp_path: Path) -> None:
    kernels, launches, ops = _steps(5, seen=(1, 2))
    _, _, owners = built(tmp_path, kernels, event("launches", launches=launches), event("ops", ops=ops))
    place = [(f"layers.{i % 2}", 7, f"aten::op{i}") for i in range(41)]
    assert [row[:3] for row in owners] == place * 5
    assert [row[4] for row in owners] == ["position"] * 41 + ["exact"] * 82 + ["position"] * 82
    # Where the shapes differ from step to step they are those of no other step.
    assert [row[3] for row in owners[-41:]] == ["[[1]]" if i % 3 else "" for i in range(41)]


def test_one_seen_launch_does_not_tell_the_shapes_of_the_next(tmp_path: Path) -> None:
    kernels, launches, ops = _steps(3, seen=(1,))
    _, _, owners = built(tmp_path, kernels, event("launches", launches=launches), event("ops", ops=ops))
    assert {row[3] for row in owners[:41]} == {""}
    assert [row[2] for row in owners[:41]] == [f"aten::op{i}" for i in range(41)]


def test_shapes_seen_before_are_told_after_kernels_that_were_seen_once(tmp_path: Path) -> None:
    """The first step is a prefill; from the fourth on another kernel runs among them, which one look has seen."""
    kernels, launches, ops = _steps(6, seen=(0, 1, 2, 4))
    for step in (3, 4, 5):
        number = step * 41 + 5
        kernels[number] = kernel(2000, 1000 + 20 * number, number + 1)
    for step, looked_at in enumerate((0, 1, 2, 4)):
        for i in range(41):
            ops[41 * step + i][4] = [[128 if looked_at == 0 else 7 if (looked_at, i) == (4, 9) else 1]]
    _, _, owners = built(tmp_path, kernels, event("launches", launches=launches), event("ops", ops=ops))
    assert [row[3] for row in owners[41 * 5 + 6 : 41 * 5 + 12]] == ["[[1]]", "[[1]]", "[[1]]", "", "[[1]]", "[[1]]"]


def test_one_line_that_launches_twice_a_step_tells_shapes_by_what_ran_before(tmp_path: Path) -> None:
    """Kernels 10 and 20 of 41 come from one line and operator and have one grid: queries and keys that are turned."""
    kernels, launches, ops = _steps(4, seen=(1, 2))
    again = [0, [[LINEAR, 125, "forward"], [MODEL, 7, "forward"], ["/home/u/run.py", 99, "called from elsewhere"]]]
    for step in range(2):
        for i, rows in ((10, 8), (20, 2)):
            launches[41 * step + i][1:3] = 1, 3 * step  # the second step has another caller
            ops[41 * step + i][0], ops[41 * step + i][4] = "aten::turn", [[rows, 64]]
    stacks = event("stacks", stacks=[[3, again[1]]])
    _, _, owners = built(tmp_path, kernels, stacks, event("launches", launches=launches), event("ops", ops=ops))
    assert owners[41 * 3 + 10][:4] == ("layers.0", 7, "aten::turn", "[[8, 64]]")
    assert owners[41 * 3 + 20][:4] == ("layers.0", 7, "aten::turn", "[[2, 64]]")
    assert owners[10][:4] == ("layers.0", 7, "aten::turn", "")  # too little ran before


def test_kernels_on_both_sides_of_a_pause_are_no_neighbours(tmp_path: Path) -> None:
    # 5 follows 4 in one place and 5 in another. The third 5 follows 5, but recording was off in between.
    rows = [(4000, 0), (2000, 1), (2000, 2), (4000, -1), (2000, -1), (2000, -1)]
    kernels = [kernel(name, 1000 + 100 * i, 50 + i) for i, (name, _) in enumerate(rows)]
    launches = [launch(50 + i, module, 0, 100) for i, (_, module) in enumerate(rows) if module >= 0]
    off = [event("window", state=state, reason="") | {"t": T0 + at} for state, at in (("off", 1450), ("traced", 1460))]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    *_, whole = built(tmp_path / "a", kernels, event("launches", launches=launches))
    assert [row[0] for row in whole[3:]] == ["", "layers.0", "layers.1"]
    *_, paused = built(tmp_path / "b", kernels, event("launches", launches=launches), *off)
    assert [row[0] for row in paused[3:]] == ["", "layers.0", None]


def test_replays_of_a_graph_are_one_step_in_a_sequence(tmp_path: Path) -> None:
    kernels, launches = [], []
    for i in range(3):  # a graph of two kernels, then one launched by itself, whose place the graph tells
        at, graph = 1000 + 100 * i, 3 + i % 2
        kernels += [kernel(1000, at + 20 * k, 50 + i, graph=graph, graph_node=k + 1) for k in range(2)]
        kernels.append(kernel(2000, at + 60, 60 + i))
    launches = [launch(60, 1, 0, 100), launch(61, 2, 0, 200)]
    _, _, owners = built(tmp_path, kernels, event("launches", launches=launches))
    assert [row[0] for row in owners] == [None, None, "layers.0", None, None, "layers.1", None, None, "layers.0"]
    assert owners[-1][4] == "signature"


def test_processes_have_modules_stacks_and_kernels_of_their_own(tmp_path: Path) -> None:
    for rank, path in enumerate(("a", "b")):
        lines = events(pid=41 + rank, rank=str(rank))
        lines[-2:-2] = [
            event("names", names=[[1000, "gemm"]]),
            event("modules", modules=[[0, -1, path, "Net"]]),
            event("attribution", what="window", reason="", end=T0 + 9),
            event("launches", launches=[launch(11, 0, -1, 420)], dropped=0),
        ]
        kernels = [kernel(1000, 1000 + rank, 11), kernel(1000, 1100 + rank, 12 + rank)]
        write(tmp_path / "spool", f"{41 + rank}-{T0}", [frame(b"".join(kernels))], lines)
    _, trace = _read(tmp_path)
    assert trace.column("kernels", "rank").tolist() == [0, 1, 0, 1]
    assert [row[0] for row in _owners(trace)] == ["a", "b", "a", "b"]


def test_what_was_attributed_but_launched_nothing_has_empty_tables(tmp_path: Path) -> None:
    _, trace, owners = built(tmp_path, [])
    assert owners == []
    assert {"modules", "stacks", "origins", "kernel_owners"} <= set(trace.tables)
    assert "ops" not in trace


@pytest.mark.parametrize(
    ("more", "state", "reason"),
    [
        ((), None, None),
        (({"what": "skipped", "reason": "another profiler is on"},), "refused", "another profiler is on"),
        (({"what": "ended", "reason": "the program ended"},), "refused", "no launch was attributed"),
        (({"what": "window"}, {"what": "skipped", "reason": "a compiler is used"}), "ok", "a compiler is used"),
        (({"what": "window"}, {"what": "ended", "reason": "fault: OSError"}), "degraded", "fault: OSError"),
    ],
)
def test_the_note_says_what_became_of_it(tmp_path: Path, more: Any, state: str | None, reason: str | None) -> None:
    told = [event("attribution", **fields) for fields in more]
    assembly, trace, _ = built(tmp_path, [kernel(1000, 1000, 11)], *told, window=False)
    note = assembly.ownership
    assert (note and note.state, note and note.reason) == (state, reason)
    assert ("kernel_owners" in trace) == (state in ("ok", "degraded"))


def test_what_came_too_fast_is_counted(tmp_path: Path) -> None:
    lost = [event("launches", launches=[], dropped=3), event("ops", ops=[], dropped=2)]
    assembly, _, _ = built(tmp_path, [], *lost)
    assert assembly.ownership is not None
    assert (assembly.ownership.state, assembly.ownership.dropped_count) == ("degraded", 5)
    assert assembly.ownership.reason == "3 launches came too fast to be kept; 2 operators came too fast to be kept"


def test_damaged_and_odd_lines_cost_nothing_but_themselves(tmp_path: Path) -> None:
    odd = [
        event("launches", launches=[[1, 2]]),
        event("launches", launches=[[2**70, 0, 0, 0, 0]]),
        event("launches", launches="all"),
        event("modules", modules=[[5, 5, "own.parent", "X"], [6, 99, "unknown.parent", "Y"]]),
        event("stacks", stacks=[[3, []]]),
        event("ops", ops=[["aten::mm", T0 + 500, T0 + 400, 7, [], []]]),
        event("launches", launches=[launch(11, 77, 88, 420), launch(12, 6, 3, 430)]),
    ]
    assembly, trace, owners = built(tmp_path, [kernel(1000, 1000, 11), kernel(1000, 1100, 12)], *odd)
    assert owners == [(None, None, None, "", "none"), ("unknown.parent", 0, None, "", "exact")]
    assert trace.table("modules").column("parent_id").to_pylist() == [-1, 0, 0, -1, -1]
    assert assembly.processes[0].damaged_lines == 3
    assert "ops" not in trace  # the one that there was ends before it begins


def test_what_cannot_be_joined_costs_no_more_than_the_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: object) -> pa.Table:  # met when modules and stacks are written already
        return pa.table({"origin_id": pa.array([2**63], pa.int32())})

    monkeypatch.setattr(Origins, "table", unable)
    seen = event("launches", launches=[launch(11, 1, 0, 420)])
    assembly, trace, owners = built(tmp_path, [kernel(1000, 1000, 11)], seen)
    note = assembly.ownership
    assert note is not None
    assert note.state == "refused"
    assert re.fullmatch(r"could not be joined: (ArrowInvalid|OverflowError): .+", note.reason)
    assert owners == []
    assert not {"modules", "stacks", "ops", "origins", "kernel_owners"} & set(trace.tables)
    assert trace.table("kernels").num_rows == assembly.kernels_count == 1
    assert {"processes", "windows"} <= set(trace.tables)  # written after them, and before


def test_older_spools_without_any_of_this_are_read(tmp_path: Path) -> None:
    lines = events()
    lines[-2:-2] = [event("graph_nodes", nodes=[[9, 0, 2, T0 + 5]])]
    write(tmp_path / "spool", frames=[frame(kernel(1000, 1000, 11))], lines=lines)
    assembly, trace = _read(tmp_path)
    assert assembly.ownership is None
    assert not {"modules", "stacks", "origins", "kernel_owners", "ops"} & set(trace.tables)
