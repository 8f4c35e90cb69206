"""Graphs of real torch modules: read in this process, where that is all that is tested, else in a real child."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from collectors import graph_models

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.model_graph import ModelGraph
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.collectors.model_graph import collect
from spikeprof.profiler.collectors.model_graph.child import main as child
from spikeprof.profiler.collectors.model_graph.collect import Read, read_factory
from spikeprof.profiler.collectors.model_graph.tables import note_of, tables
from spikeprof.profiler.errors import CommandNotFound, InputError, UsageError
from spikeprof.profiler.trace import Manifest, Trace

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed here")

MODELS = str(Path(graph_models.__file__))
GATED = str(Path(MODELS).with_name("graph_gated.py"))
F32 = 4


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Reads a factory without a process of its own: torch is imported once for all tests."""

    def run(command: Any) -> int:
        before, path = sys.argv[:], sys.path[:]
        try:
            return child.main(json.loads(command[-1]))
        finally:
            sys.argv[:], sys.path[:] = before, path

    monkeypatch.setattr(collect, "_run", run)
    return lambda name, path=MODELS, **options: read_factory(f"{path}:{name}", **options)


def answer(read: Read) -> Result:
    return run_one(Trace(Manifest("spikeprof", 0, 0), tables(read)), ModelGraph())


def by_name(read: Read) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in read.nodes}


# -- what is read ----------------------------------------------------------------------------------------------------


def test_views_and_in_place_results_lie_in_the_memory_of_their_source(here: Any) -> None:
    read = here("mlp", runs=0)
    nodes = by_name(read)
    storage = {name: node["tensors"][0]["storage"] for name, node in nodes.items() if node["tensors"]}
    assert read.via == "export"
    assert storage["add_"] == storage["silu"] == storage["view"] == storage["transpose"] == storage["getitem"]
    assert storage["linear"] != storage["silu"] != storage["mul"]
    assert [t["storage"] for t in nodes["split_with_sizes"]["tensors"]] == [storage["silu"]] * 2
    assert storage["down_weight"] == storage["again_weight"]  # tied
    assert nodes["transpose"]["tensors"][0]["strides"] == [16, 32, 1]
    assert nodes["linear"]["module"] == "up"
    assert (nodes["linear"]["op"], nodes["add_"]["op"], nodes["getitem"]["op"]) == (
        "aten::linear",
        "aten::add_",
        "getitem",
    )


def test_peak_and_weights_by_hand(here: Any) -> None:
    result = answer(here("mlp", runs=0))
    # [4, 32] twice while silu runs, and never more: up's result ends there.
    assert result.metric("activations_peak_bytes") == 2 * 4 * 32 * F32
    # up: 32*8+32, down: 8*32+8, again: only its bias is its own.
    assert result.metric("weights_bytes") == (32 * 8 + 32 + 8 * 32 + 8 + 8) * F32
    assert result.metric("inputs_bytes") == 4 * 8 * F32


def test_fx_gives_the_same_peak(here: Any) -> None:
    read = here("mlp", via="fx", runs=0)
    assert read.via == "fx"
    assert read.facts["remarks"] == ["shapes by running the graph on tensors without data"]
    nodes = by_name(read)
    assert (nodes["up"]["op"], nodes["up"]["module"], nodes["up"]["class_name"]) == ("Linear", "up", "Linear")
    result = answer(read)
    assert result.metric("activations_peak_bytes") == 2 * 4 * 32 * F32
    assert result.metric("weights_bytes") == (32 * 8 + 32 + 8 * 32 + 8 + 8) * F32


@pytest.mark.parametrize("via", ["export", "fx"])
def test_arguments_by_keyword_and_defaults(here: Any, via: str) -> None:
    read = here("by_keyword", via=via, runs=2)
    assert read.not_timed == ""
    assert [node["op"] for node in read.nodes if node["kind"] == "op"][::2] == ["aten::mul", "aten::add"]
    # [4] and the sum of its first two: the slice is a view.
    assert answer(read).metric("activations_peak_bytes") == (4 + 2) * F32


def test_control_flow_that_export_refuses_is_read_by_fx(here: Any) -> None:
    read = here("gated", path=GATED, runs=2)
    assert read.via == "fx"
    refusal = read.facts["refused"]["export"]
    assert "data-dependent" in refusal
    assert "graph_gated.py:" in refusal
    assert "in choose" in refusal
    (how,) = read.facts["remarks"]
    assert how.startswith("shapes by running the model once: it does not run on tensors without data")
    assert [t["shape"] for t in by_name(read)["choose"]["tensors"]] == [[2, 8]]
    assert read.timing["latency"]
    note = note_of(read)
    assert note.state == "degraded"
    assert note.reason.startswith("torch.export refused: ")


def test_where_both_ways_refuse_both_say_why(here: Any) -> None:
    with pytest.raises(InputError, match=r"torch.export refused: .*; torch.fx refused: TraceError: .*in forward"):
        here("branches")


def test_nothing_of_a_model_on_meta_is_run(here: Any) -> None:
    read = here("on_meta", runs=2)
    assert read.not_timed == "the model is on the device meta: it has no data to run on"
    assert answer(read).metric("weights_bytes") == ((1 << 28) + (1 << 14)) * 2


def test_the_reference_engines_network(here: Any) -> None:
    read = here("engine", runs=2)
    result = answer(read)
    parts = set(result.tables["parts"]["part"])
    assert {
        "network.layers.*.attention.qkv",
        "network.layers.*.mlp.gate_up",
        "network.head",
    } <= parts
    # 2 layers: qkv 128*64, out 64*64, gate_up 256*64, down 64*128, 2 norms; embedding = head 97*64, norm; the table.
    layer = 128 * 64 + 64 * 64 + 256 * 64 + 64 * 128 + 2 * 64
    assert result.metric("weights_bytes") == (2 * layer + 97 * 64 + 64 + 32 * 16) * F32


def test_five_thousand_nodes_take_seconds(here: Any) -> None:
    began = time.monotonic()
    read = here("chain", via="fx", runs=1)
    result = answer(read)
    assert time.monotonic() - began < 15
    assert result.metric("chain_nodes_count") == 5002
    assert result.metric("activations_peak_bytes") == 2 * 256 * F32


# -- time ------------------------------------------------------------------------------------------------------------


def test_every_operator_is_timed_on_a_cpu(here: Any) -> None:
    read = here("mlp", runs=3)
    number = {name: str(at) for at, name in enumerate(by_name(read))}
    ops = {number[node["name"]] for node in read.nodes if node["kind"] == "op"}
    assert read.timing["with"] == "host_clock"
    assert set(read.timing["latency"]) == ops
    assert all(read.timing["low"][at] <= read.timing["latency"][at] for at in ops)
    assert read.runs_count == 3
    result = answer(read)
    assert max(result.tables["nodes"]["heat_share"]) == 1.0
    assert result.tables["graph"]["device"] == ["cpu"]


class Clock:
    """A GPU's stream that is held, marked by events, and does its work when the host has launched it."""

    def __init__(self) -> None:
        self.busy_until_ms = 0.0
        self.held: list[int] = []

    def sleep(self, cycles: int) -> None:
        self.held.append(cycles)
        self.busy_until_ms = max(self.busy_until_ms, self.host_ms()) + cycles / 1e6  # a cycle a nanosecond

    def wait(self) -> None:
        time.sleep(max(self.busy_until_ms - self.host_ms(), 0) / 1e3)

    def host_ms(self) -> float:
        return time.perf_counter_ns() / 1e6

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at_ms = clock, 0.0

    def record(self) -> None:
        self.at_ms = self.clock.busy_until_ms = max(self.clock.busy_until_ms, self.clock.host_ms())

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


def test_on_a_gpu_the_stream_is_held_until_a_node_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that take 3 ms each, on a made-up stream: of the host's time nothing must be in the nodes' latencies."""
    import torch

    from spikeprof.profiler.collectors.model_graph.child import reading, timing

    clock = Clock()
    made = graph_models.chain(3)
    graph, _ = reading.read((*made, {}), "fx")
    assert graph is not None
    add = torch.add

    def launched(*_: Any) -> Any:
        time.sleep(0.001)  # the host's part
        clock.busy_until_ms = max(clock.busy_until_ms, clock.host_ms()) + 3.0
        return add(made[1][0], 1.0)

    for node in graph.module.graph.nodes:
        if node.op == "call_function":
            node.target = launched
    for name, value in {
        "_sleep": clock.sleep,
        "Event": clock.event,
        "synchronize": clock.wait,
        "is_initialized": lambda: True,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 100,
        "max_memory_allocated": lambda: 900,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    found = timing._on_a_gpu(graph, 3)
    assert list(found["latency"].values()) == pytest.approx([3e6] * 3, rel=1e-3)
    assert all(1e6 < ns < 3e6 for ns in found["host"].values())
    assert found["floor"] == pytest.approx(0, abs=1e3)
    whole = timing._whole(graph, (*made, {}), 2)
    assert whole["graph_peak"] == whole["model_peak"] == 800
    assert whole["forward"] > 0


# -- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", r"failed: ValueError: no weights here \(graph_models.py:\d+, in raises\)"),
        ("exits", r"failed: it called sys.exit\(3\)"),
        ("is_killed", r"the process that reads it was ended by SIGKILL while calling .*:is_killed"),
        ("leaves", r"the process that reads it exited with 7 while calling .*:leaves"),
        ("nothing", r"graph_models.py has no nothing"),
        ("MODELS", r"has no MODELS"),
    ],
)
def test_a_factory_that_fails_becomes_a_sentence(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_factory(f"{MODELS}:{name}")


def test_what_no_factory_returns_is_refused(here: Any) -> None:
    with pytest.raises(InputError, match=r"returned int: it must return \(model, args\)"):
        here("number")


@pytest.mark.parametrize("text", ["", ":", "module", "module:", ":f", "m:f-g", "m:1f"])
def test_what_is_no_factory_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="names no factory"):
        read_factory(text)


def test_there_must_be_such_a_python() -> None:
    with pytest.raises(CommandNotFound, match="cannot start /nonexistent/python"):
        read_factory("m:f", ["/nonexistent/python"])


def test_another_process_reads_and_prints_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    read = read_factory(f"{MODELS}:mlp", runs=1)
    shown, errors = capfd.readouterr()
    assert shown == ""
    assert "printed by the factory" in errors
    assert read.facts["torch"] == torch.__version__
    assert read.runs_count == 1


def test_an_interrupt_ends_even_a_factory_that_hears_nothing() -> None:
    code = (
        f"from spikeprof.profiler.collectors.model_graph import collect; collect.read_factory({MODELS!r} + ':stubborn')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True, text=True)
    assert process.stderr is not None
    try:
        while "deaf" not in process.stderr.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(15) != 0
    finally:
        process.kill()
        process.stderr.close()
    with pytest.raises(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, 0)


def test_results_that_were_cut_off_are_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    path.write_text('{"stage": "a"}\n{"graph": {"via"')
    assert list(collect._lines(path)) == [{"stage": "a"}]
    assert list(collect._lines(tmp_path / "absent")) == []


def test_the_child_imports_nothing_of_ours() -> None:
    """It runs in the Python of the program, where spikeprof need not be installed."""
    for path in Path(child.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"), feature_version=(3, 9))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "torch"}, path.name
