from __future__ import annotations

import math
from typing import Any

import graphs
import pytest
from graphs import kernels, node

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.derived.graph_heat import grid, part_of, parts
from spikeprof.analyzers.derived.graph_kernels import same_modules
from spikeprof.analyzers.derived.graph_layout import rows
from spikeprof.analyzers.model_graph import ModelGraph
from spikeprof.analyzers.runner import run_one


def answer(nodes: list[dict[str, Any]], facts: dict[str, Any] | None = None, **more: Any) -> Result:
    result = run_one(graphs.trace(nodes, facts, **more), ModelGraph())
    assert result.status != "error", result.reason
    return result


def column(result: Result, table: str, name: str) -> list[Any]:
    return list(result.tables[table][name])


# -- order -----------------------------------------------------------------------------------------------------------


def test_a_cycle_is_named_along_its_edges() -> None:
    result = answer([node("x"), node("a", "x", "c"), node("b", "a"), node("c", "b"), node("after", "c")])
    (finding,) = result.findings
    assert finding.severity == "critical"
    assert finding.scope["cycle"] == "a → b → c → a"
    assert column(result, "cycle", "node") == ["a", "b", "c"]
    assert result.metric("activations_peak_bytes") is None
    assert {m.reason for m in result.metrics if m.name == "activations_peak_bytes"} == {"the graph has a cycle"}


def test_a_node_that_waits_for_itself_is_a_cycle() -> None:
    (finding,) = answer([node("a", "a")]).findings
    assert finding.scope["cycle"] == "a → a"


def test_a_long_cycle_is_cut_in_the_finding_and_whole_in_the_table() -> None:
    names = [f"n{i}" for i in range(40)]
    result = answer([node(name, names[i - 1]) for i, name in enumerate(names)])
    assert result.findings[0].scope["cycle"] == "n0 → n1 → n2 → n3 → n4 → n5 → n6 → … → n39 → n0"
    assert column(result, "cycle", "node") == names


def test_thousands_of_nodes_in_one_chain_need_no_recursion() -> None:
    names = [f"n{i}" for i in range(20_000)]
    result = answer([node(name, *names[i - 1 : i]) for i, name in enumerate(names)])
    assert result.metric("chain_nodes_count") == 20_000


# -- memory ----------------------------------------------------------------------------------------------------------


def test_lifetimes_and_peak_by_hand() -> None:
    # bytes: a 200, b 400, view of b, c 100; held while each runs:
    # a: 200; b: 600; v: 400 (a ended with b); c: 400 + 100; output: 100
    nodes = [
        node("w", shape=[1000], kind="parameter"),
        node("x", shape=[50], kind="input"),
        node("a", "x", "w", shape=[100]),
        node("b", "a", shape=[200]),
        node("v", "b", shape=[100, 2], storage="b", bytes=400),
        node("c", "v", shape=[50]),
        node("output", "c", kind="output"),
    ]
    result = answer(nodes)
    assert column(result, "live", "live_bytes") == [200, 600, 400, 500, 100]
    assert column(result, "live", "position") == [2, 3, 4, 5, 6]
    assert result.metric("activations_peak_bytes") == 600
    assert result.metric("weights_bytes") == 2000
    assert result.metric("inputs_bytes") == 100
    assert column(result, "peak_tensors", "node") == ["b", "a"]
    assert column(result, "peak_tensors", "last_used_by") == ["c", "b"]
    assert column(result, "peak_tensors", "peak_share") == pytest.approx([2 / 3, 1 / 3])


def test_what_an_output_takes_is_held_to_the_end() -> None:
    nodes = [node("a", shape=[8]), node("b", shape=[8]), node("c", "b", shape=[8]), node("o", "a", "c", kind="output")]
    assert column(answer(nodes), "live", "live_bytes") == [16, 32, 48, 32]


def test_without_an_output_what_nobody_takes_is_one() -> None:
    nodes = [node("a", shape=[8]), node("b", "a", shape=[8]), node("c", "a", shape=[8])]
    assert column(answer(nodes), "live", "live_bytes") == [16, 32, 48]


def test_in_place_on_a_weight_takes_no_memory() -> None:
    nodes = [node("cache", shape=[8], kind="parameter"), node("copy_", "cache", shape=[8], storage="cache")]
    assert answer(nodes).metric("activations_peak_bytes") == 0


def test_sizes_that_are_not_known_are_said() -> None:
    nodes = [node("a", shape=[8]), node("b", "a", shape=[8], bytes=None), node("c", "b", shape=[4])]
    result = answer(nodes)
    assert result.metric("tensors_of_unknown_size_count") == 1
    assert result.metric("activations_peak_bytes") == 16
    nothing = answer([node("a"), node("b", "a")])
    assert {m.reason for m in nothing.metrics if m.name == "activations_peak_bytes"} == {
        "the sizes of tensors are not known"
    }


def test_measured_memory_stands_beside_the_model() -> None:
    nodes = [node("a", shape=[100]), node("b", "a", shape=[100])]
    result = answer(nodes, {"graph_peak_bytes": 440, "model_peak_bytes": 500})
    assert result.metric("measured_graph_peak_bytes") == 440
    assert result.metric("peak_difference_share") == pytest.approx(0.1)


def test_one_tensor_that_makes_up_the_peak() -> None:
    nodes = [node("x", shape=[1 << 18]), node("logits", "x", shape=[1 << 20], module="head"), node("o", "logits")]
    (finding,) = answer(nodes).findings
    assert finding.rule == "peak-of-one-tensor"
    assert finding.scope == {"node": "logits", "module": "head", "shape": "1048576"}
    assert finding.evidence[0].value == 0.8  # 2 MiB of 2.5


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "size", "offset", "expected"),
    [
        ([8, 50257], [50257, 1], 2, 0, (100514, 100514, 2)),
        ([8, 50264], [50264, 1], 2, 0, (100528, 100528, 16)),
        ([8, 64], [64, 1], 2, 0, (128, 128, 128)),
        ([8, 64], [192, 1], 2, 64, (128, 384, 128)),  # the middle third of rows of 192
        ([8, 64], [65, 1], 2, 1, (128, 130, 2)),
        ([2, 3, 64], [6400, 64, 1], 2, 0, (128, 128, 128)),
        ([64, 8], [1, 64], 4, 0, (256, 256, 256)),  # transposed: its columns lie side by side
        ([8, 64], [0, 1], 2, 0, (128, 128, 256)),  # expanded
        ([1, 50257], [50257, 1], 2, 0, (100514, 100514, 256)),  # one row: nothing follows
        ([1, 50257], [50257, 1], 2, 3, (100514, 100514, 2)),
    ],
)
def test_rows_by_hand(shape, strides, size, offset, expected) -> None:
    found = rows(shape, strides, size, offset)
    assert found is not None
    assert (found.row_bytes, found.pitch_bytes, found.alignment_bytes) == expected
    assert found.is_side_by_side


def test_what_has_no_rows() -> None:
    assert rows([], [], 2, 0) is None
    assert rows([1, 1], [1, 1], 2, 0) is None
    assert rows([0, 4], [4, 1], 2, 0) is None
    strided = rows([8, 64], [128, 2], 2, 0)
    assert strided is not None
    assert not strided.is_side_by_side
    assert strided.row_bytes == 2


def test_unaligned_rows_of_large_tensors_with_what_to_pad_to() -> None:
    nodes = [
        node("x", shape=[64], kind="input"),
        node("logits", "x", shape=[64, 50257], module="head"),
        node("copy", "logits", shape=[64, 50257]),
        node("small", "x", shape=[4, 33]),
        node("slice", "x", shape=[64, 16384], strides=[16384, 1], offset=1),
    ]
    found = [f for f in answer(nodes).findings if f.rule == "unaligned-rows"]
    assert [f.scope["node"] for f in found] == ["logits", "slice"]
    assert [(e.metric, e.value) for e in found[0].evidence] == [
        ("row_alignment_bytes", 2),
        ("row_pitch_bytes", 100514),
        ("tensor_bytes", 64 * 50257 * 2),
        ("like_it_count", 2),
    ]
    assert found[0].recommendation == "Pad its rows from 50257 to 50264 elements."
    assert found[1].recommendation == "Begin the slice at a multiple of 8 elements."


def test_the_alignment_of_what_a_node_takes_and_gives() -> None:
    nodes = [
        node("w", shape=[33, 24], kind="parameter"),
        node("x", shape=[8, 33], kind="input"),
        node("mm", "x", "w", shape=[8, 24]),
        node("nothing"),
    ]
    table = answer(nodes).tables["nodes"]
    assert table["row_alignment_bytes"] == [16, None]  # 48 bytes from row to row
    assert table["input_alignment_bytes"] == [2, None]  # the worse of 66 and 48


# -- heat ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("", ("(model)", -1)),
        ("head", ("head", -1)),
        ("layers.7.mlp.up", ("layers.*.mlp.up", 7)),
        ("model.layers.11", ("model.layers.*", 11)),
        ("layers.3.experts.5.up", ("layers.*.experts.*.up", 3)),
        ("0", ("*", 0)),
        ("layers.²", ("layers.²", -1)),
    ],
)
def test_parts_and_layers(module: str, expected: tuple[str, int]) -> None:
    assert part_of(module) == expected


def test_heat_is_the_share_of_the_hottest() -> None:
    nodes = [
        node("a", latency=100.0, module="layers.0.mlp"),
        node("b", "a", latency=400.0, module="layers.1.mlp"),
        node("c", "b", latency=50.0, module="layers.1.mlp"),
        node("d", "c", latency=200.0, module="head"),
    ]
    result = answer(nodes, {"forward_ns": 900.0, "floor_ns": 5.0, "timed_with": "host_clock"})
    assert column(result, "nodes", "node") == ["b", "d", "a", "c"]
    assert column(result, "nodes", "heat_share") == [1.0, 0.5, 0.25, 0.125]
    assert result.metric("nodes_latency_ns") == 750
    assert column(result, "parts", "part") == ["layers.*.mlp", "head"]
    assert column(result, "parts", "layers_count") == [2, 1]
    cells = zip(*(column(result, "heat", name) for name in ("part", "layer", "total_ns")), strict=True)
    assert list(cells) == [
        ("layers.*.mlp", 0, 100.0),
        ("layers.*.mlp", 1, 450.0),
        ("head", -1, 200.0),
    ]


def test_a_grid_keeps_the_hottest_parts_and_joins_layers() -> None:
    import numpy as np

    modules = [f"layers.{layer}.{part}" for layer in range(6) for part in ("a", "b", "c")]
    found = grid(parts(modules, np.array([1.0, 10.0, 2.0] * 6)), most_parts=2, most_layers=3)
    assert found == {
        ("layers.*.b", 0): 20.0, ("layers.*.b", 2): 20.0, ("layers.*.b", 4): 20.0,
        ("layers.*.c", 0): 4.0, ("layers.*.c", 2): 4.0, ("layers.*.c", 4): 4.0,
        ("other", 0): 2.0, ("other", 2): 2.0, ("other", 4): 2.0,
    }  # fmt: skip


def test_not_timed_says_why() -> None:
    result = answer([node("a"), node("b", "a")], {"timed_reason": "the model is on the device meta"})
    reasons = {m.name: m.reason for m in result.metrics if m.value is None}
    assert reasons["nodes_latency_ns"] == reasons["forward_ns"] == "the model is on the device meta"
    assert column(result, "nodes", "node") == ["a", "b"]
    assert "heat_share" not in result.tables["nodes"]


# -- kernels ---------------------------------------------------------------------------------------------------------

LAYER = [
    node("x", kind="input", shape=[8]),
    node("linear", "x", op="aten::linear", module="layers.0.up", shape=[8]),
    node("view", "linear", op="aten::view", module="layers.0", shape=[8], storage="linear"),
    node("silu", "view", op="aten::silu", module="layers.0", shape=[8]),
    node("mul", "silu", op="aten::mul", module="layers.0", shape=[8]),
    node("mul_1", "mul", op="aten::mul", module="layers.0", shape=[8]),
]


def assigned(result: Result) -> dict[str, tuple[str, int, float]]:
    table = result.tables["nodes"]
    return {
        name: (kernel, count, ns)
        for name, kernel, count, ns in zip(
            table["node"], table["kernel"], table["launches_count"], table["gpu_time_ns"], strict=True
        )
    }


def test_kernels_are_joined_by_module_operator_and_place() -> None:
    step = (
        ("gemm", "layers.0.up", "aten::addmm"),
        ("splitk", "layers.0.up", "aten::addmm"),
        ("silu_kernel", "layers.0", "aten::silu"),
        ("mul_kernel", "layers.0", "aten::mul@1"),
        ("mul_kernel", "layers.0", "aten::mul@2"),
        ("foreign", "optimizer", "aten::add"),
    )
    result = answer(LAYER, **kernels(*step, *step))
    assert assigned(result) == {
        "linear": ("gemm", 4, 4000.0),
        "silu": ("silu_kernel", 2, 2000.0),
        "mul": ("mul_kernel", 2, 2000.0),
        "mul_1": ("mul_kernel", 2, 2000.0),
    }
    assert column(result, "nodes", "distinct_kernels_count") == [2, 1, 1, 1]
    assert result.metric("joined_time_share") == pytest.approx(10 / 12)
    assert max(column(result, "nodes", "heat_share")) == 1.0


def test_lines_tell_nodes_apart_whatever_a_recording_begins_with_and_whatever_the_shapes_are() -> None:
    prefill = (("mul_large", "layers.0", "aten::mul@7#512"), ("mul_large", "layers.0", "aten::mul@9#512"))
    decode = (("mul_small", "layers.0", "aten::mul@7#1"), ("mul_small", "layers.0", "aten::mul@9#1"))
    found = assigned(answer(LAYER, **kernels(prefill[1], *decode, *decode)))
    assert found == {"mul": ("mul_small", 2, 2000.0), "mul_1": ("mul_small", 3, 3000.0)}


def test_lines_of_several_files_are_in_order_of_time() -> None:
    step = (("first", "layers.0", "aten::mul@9"), ("second", "layers.0", "aten::mul@-2"))
    found = assigned(answer(LAYER, **kernels(*step, *step)))
    assert found == {"mul": ("first", 2, 2000.0), "mul_1": ("second", 2, 2000.0)}


def test_one_place_for_several_nodes_is_told_apart_by_the_sequence() -> None:
    step = (("first", "layers.0", "aten::mul"), ("second", "layers.0", "aten::mul"))
    found = assigned(answer(LAYER, **kernels(*step, *step, *step)))
    assert found == {"mul": ("first", 3, 3000.0), "mul_1": ("second", 3, 3000.0)}


def test_what_order_does_not_tell_stays_open() -> None:
    odd = (("first", "layers.0", "aten::mul"), ("second", "layers.0", "aten::mul"), ("first", "layers.0", "aten::mul"))
    result = answer(LAYER, **kernels(*odd))
    assert result.metric("joined_time_share") is None
    (reason,) = [m.reason for m in result.metrics if m.name == "joined_time_share"]
    assert reason == "no kernel could be told to be of one node"


@pytest.mark.parametrize(
    ("run", "graph", "expected"),
    [
        (["", "a.b"], ["", "a.b"], {"": 0, "a.b": 1}),
        (["", "model", "model.a.b"], ["", "a.b"], {"model": 0, "model.a.b": 1}),  # the factory's lies inside
        (["", "a.b"], ["", "model", "model.a.b"], {"": 1, "a.b": 2}),  # and around
        (["x.y"], ["a.b"], {}),
        ([], ["a"], {}),
        (["a"], [], {}),
    ],
)
def test_modules_with_another_prefix_are_the_same(run: list[str], graph: list[str], expected: dict[str, int]) -> None:
    assert same_modules(run, graph) == expected


def test_without_owners_there_is_nothing_to_join() -> None:
    result = answer(LAYER, kernels=[{}])
    (reason,) = [m.reason for m in result.metrics if m.name == "joined_time_share"]
    assert reason == "no kernel's module is known"


def test_owners_of_a_part_of_a_recording() -> None:
    whole = graphs.trace(LAYER, **kernels(*[("silu_kernel", "layers.0", "aten::silu")] * 4))
    part = whole.narrowed(2000, 6001)
    result = run_one(part, ModelGraph())
    assert result.status == "ok", result.reason
    assert assigned(result) == {"silu": ("silu_kernel", 3, 3000.0)}


# -- tables from elsewhere -------------------------------------------------------------------------------------------


def test_rows_that_name_no_node_and_texts_that_are_no_sizes_are_left_out() -> None:
    tables = graphs.tables([node("a", shape=[8]), node("b", "a", shape=[8])])
    tables["model_edges"].append({"src_node_id": 77, "dst_node_id": 1})
    tables["model_tensors"].append({"node_id": 99, "shape": "[1]"})
    tables["model_tensors"][1] |= {"shape": "[" * 5000, "strides": '["a"]'}
    import tiny

    result = run_one(tiny.trace(**tables), ModelGraph())
    assert result.status == "ok", result.reason
    assert result.metric("edges_count") == 1
    assert math.isclose(result.metric("activations_peak_bytes") or 0, 32)
