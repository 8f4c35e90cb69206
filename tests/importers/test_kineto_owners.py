"""Whose each kernel is, from torch.profiler's operators, modules and Python functions."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from importers.kineto_files import event, kernel, read, rows
from paths import SHARED, needs_shared

from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.trace import Trace

EAGER = SHARED / "traces/AMD-AGI+TraceLens/tests/traces/b200/eager_trace.json.gz"


def launch(correlation: int, ts: float, tid: int = 100, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return event("cuda_runtime", name, ts, 1, tid=tid, correlation=correlation)


def function(name: str, ts: float, dur: float, tid: int = 100) -> dict[str, Any]:
    return event("python_function", name, ts, dur, tid=tid)


def owners(trace: Trace) -> list[tuple[Any, ...]]:
    """Module path, operator, shapes, line and match of each kernel."""
    origins = trace.table("origins").to_pylist()
    modules = trace.table("modules").to_pylist() if "modules" in trace else []
    stacks = trace.table("stacks").to_pylist() if "stacks" in trace else []
    found = []
    for row in trace.table("kernel_owners").to_pylist():
        o = origins[row["origin_id"]] if row["origin_id"] >= 0 else None
        if o is None:
            found.append((None, None, "", None, row["match"]))
            continue
        module = modules[o["module_id"]] if o["module_id"] >= 0 else None
        stack = stacks[o["stack_id"]] if o["stack_id"] >= 0 else None
        place = f"{stack['file']}:{stack['line']}" if stack else None
        found.append((module and module["path"], o["op"], o["input_shapes"], place, row["match"]))
    return found


def test_the_innermost_operator_module_and_line_of_the_launching_thread_own_a_kernel(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            function("run.py(3): main", 0, 100),
            function("nn.Module: Net_0", 10, 80),
            function("model.py(7): forward", 11, 78),
            function("nn.Module: Linear_0", 20, 20),
            function("torch/nn/modules/linear.py(114): forward", 21, 18),
            function("<built-in function linear>", 22, 16),
            function("nn.Module: Linear_1", 50, 20),
            event("cpu_op", "aten::linear", 23, 14, **{"Input Dims": [[2, 4], [8, 4]]}),
            event("cpu_op", "aten::mm", 24, 10, **{"Input Dims": [[2, 4], [4, 8]], "Input type": ["float", "float"]}),
            event("cpu_op", "aten::add", 24, 10, tid=7),  # of another thread at the same time
            launch(1, 26),
            launch(2, 36),
            launch(3, 55),
            launch(4, 95),
            launch(5, 200),
            *(kernel(f"k{i}", 300 + i, 1, correlation=i) for i in range(1, 7)),
        ],
    )
    assert owners(trace) == [
        ("Linear_0", "aten::mm", "[[2, 4], [4, 8]]", "model.py:7", "exact"),
        ("Linear_0", "aten::linear", "[[2, 4], [8, 4]]", "model.py:7", "exact"),
        ("Linear_1", None, "", "model.py:7", "exact"),
        (None, None, "", "run.py:3", "exact"),
        (None, None, "", None, "none"),
        (None, None, "", None, "none"),  # its call is not in the file
    ]
    assert rows(trace, "modules", "module_id", "parent_id", "path", "class_name") == [
        (0, -1, "", "Net"),
        (1, 0, "Linear_0", "Linear"),
        (2, 0, "Linear_1", "Linear"),
    ]
    assert rows(trace, "stacks", "file", "line", "function", "frames")[0] == (
        "model.py",
        7,
        "forward",
        json.dumps(
            [
                "<built-in>:0 <built-in function linear>",
                "torch/nn/modules/linear.py:114 forward",
                "model.py:7 forward",
                "run.py:3 main",
            ]
        ),
    )


def test_a_replay_tells_nothing_of_who_made_the_graph(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            event("cpu_op", "aten::mm", 0, 50),
            launch(1, 5, name="cudaGraphLaunch"),
            launch(2, 8),
            kernel("old", 60, 1, correlation=1),  # no graph id: an old torch
            kernel("new", 62, 1, correlation=2, **{"graph id": 3, "graph node id": 9}),
            kernel("eager", 64, 1, correlation=2),
        ],
    )
    assert [row[1] for row in owners(trace)] == [None, None, "aten::mm"]


def test_an_external_id_stands_in_for_a_call_that_is_not_there(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            function("nn.Module: Net_0", 0, 50),
            event("cpu_op", "aten::mm", 5, 5, **{"External id": 77}),
            event("cpu_op", "aten::add", 15, 5, **{"External id": 78}),
            kernel("a", 60, 1, correlation=1, **{"External id": 78}),
            kernel("b", 62, 1, correlation=2, **{"external id": "77"}),
            kernel("c", 64, 1, correlation=3, **{"External id": 0}),
            kernel("d", 66, 1, correlation=3, **{"External id": 79}),
        ],
    )
    assert [row[:2] for row in owners(trace)] == [("", "aten::add"), ("", "aten::mm"), (None, None), (None, None)]


def test_stretches_around_operators_are_none_and_triton_kernels_are_told_as_such(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            event("cpu_op", "## Call CompiledFxGraph abc ##", 0, 50),
            event("cpu_op", "Torch-Compiled Region: 0/0", 0, 50),
            event("cpu_op", "triton_poi_fused_add_0", 10, 10),
            launch(1, 12, name="cuLaunchKernel"),
            launch(2, 30),
            kernel("triton_poi_fused_add_0", 60, 1, correlation=1),
            kernel("x", 62, 1, correlation=2),
        ],
    )
    assert [row[1] for row in owners(trace)] == ["triton::triton_poi_fused_add_0", None]


def test_files_of_gpu_work_alone_have_no_owners(tmp_path: Path) -> None:
    trace = read(tmp_path, [kernel("a", 1, 2), launch(1, 0)])
    assert not {"modules", "stacks", "origins", "kernel_owners"} & set(trace.tables)


def test_one_name_under_two_parents_is_two_modules(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        [
            function("nn.Module: Block_0", 0, 10),
            function("nn.Module: Act_0", 2, 5),
            function("nn.Module: Block_1", 20, 10),
            function("nn.Module: Act_0", 22, 5),
            function("nn.Module: Block_0", 40, 10),
            function("nn.Module: Act_0", 42, 5),
            *(launch(i, t) for i, t in ((1, 3), (2, 23), (3, 43))),
            *(kernel("k", 60 + i, 1, correlation=i) for i in (1, 2, 3)),
        ],
    )
    origins = [row["module_id"] for row in trace.table("origins").to_pylist()]
    assert rows(trace, "modules", "parent_id", "path") == [(-1, ""), (-1, ""), (0, "Act_0"), (1, "Act_0")]
    assert [origins[row] for (row,) in rows(trace, "kernel_owners", "origin_id")] == [2, 3, 2]


@needs_shared
def test_a_real_trace_against_a_slow_join() -> None:
    trace = open_trace(EAGER)
    with gzip.open(EAGER) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]

    def around(kind: str, prefix: str, call: dict[str, Any]) -> str | None:
        """The shortest stretch of that kind around the call, by its own thread."""
        found = [
            e
            for e in events
            if e.get("cat") == kind
            and e["name"].startswith(prefix)
            and e["tid"] == call["tid"]
            and e["ts"] <= call["ts"] < e["ts"] + e["dur"]
        ]
        return min(found, key=lambda e: e["dur"])["name"] if found else None

    calls = {e["args"].get("correlation"): e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])[::40]
    found = owners(trace)[::40]
    assert len(kernels) == len(found) == 20
    for one, (path, op, _, _, match) in zip(kernels, found, strict=True):
        call = calls[one["args"]["correlation"]]
        assert op == around("cpu_op", "", call)
        module = around("python_function", "nn.Module: ", call)
        assert match == "exact"
        assert (path is None) == (module is None)
        if path and module:
            assert path.rpartition(".")[2] == module.removeprefix("nn.Module: ")


@needs_shared
@pytest.mark.parametrize("column", ["module_id", "stack_id"])
def test_a_real_trace_names_modules_and_lines_for_nearly_all(column: str) -> None:
    trace = open_trace(EAGER)
    origins = trace.column("origins", column)
    known = origins[trace.column("kernel_owners", "origin_id")] >= 0
    assert known.mean() > 0.99
