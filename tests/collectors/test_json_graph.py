from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spikeprof.analyzers.model_graph import ModelGraph
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.collectors.model_graph.json_graph import read_json
from spikeprof.profiler.collectors.model_graph.tables import tables
from spikeprof.profiler.errors import ForeignFile, InputError
from spikeprof.profiler.trace import Manifest, Trace


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_graph_with_a_view(tmp_path: Path) -> None:
    nodes: list[dict[str, Any]] = [
        {"name": "x", "op": "input", "shape": [2, 8], "dtype": "float16"},
        {"name": "a", "op": "aten::mm", "inputs": ["x"], "shape": [2, 16], "dtype": "torch.float32"},
        {"name": "v", "op": "aten::view", "inputs": ["a"], "shape": [32], "dtype": "float32", "view_of": "a"},
        {"name": "b", "op": "aten::add", "inputs": ["v", "v"], "shape": [32], "dtype": "float32"},
        {"name": "odd", "op": "aten::nonzero", "inputs": ["b"], "shape": ["n", 1], "dtype": "int64"},
        {"name": "o", "op": "output", "inputs": ["b"]},
    ]
    read = read_json(written(tmp_path, {"nodes": nodes}))
    assert [node["kind"] for node in read.nodes] == ["input", "op", "op", "op", "op", "output"]
    result = run_one(Trace(Manifest("spikeprof", 0, 0), tables(read)), ModelGraph())
    assert result.metric("activations_peak_bytes") == 2 * 32 * 4
    assert result.metric("inputs_bytes") == 2 * 8 * 2
    assert result.metric("edges_count") == 6
    assert result.metric("tensors_of_unknown_size_count") == 1


def test_a_cycle_in_a_file_is_a_finding(tmp_path: Path) -> None:
    nodes = [{"name": "a", "inputs": ["c"]}, {"name": "b", "inputs": ["a"]}, {"name": "c", "inputs": ["b"]}]
    read = read_json(written(tmp_path, {"nodes": nodes}))
    result = run_one(Trace(Manifest("spikeprof", 0, 0), tables(read)), ModelGraph())
    assert [f.scope["cycle"] for f in result.findings] == ["a → b → c → a"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([], "is no graph"),
        ({"nodes": []}, "is no graph"),
        ({"nodes": [1]}, "node 0 has no name"),
        ({"nodes": [{"name": ""}]}, "node 0 has no name"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, r"two nodes are called 'a' \(numbers 0 and 1\)"),
        ({"nodes": [{"name": "a", "inputs": ["b", "c"]}]}, "'a' takes 'b', 'c': there is no such node"),
        ({"nodes": [{"name": "a", "inputs": list("bcdefg")}]}, "'b', 'c', 'd' and 3 more: there is no such node"),
        ({"nodes": [{"name": "a", "inputs": "a"}]}, "the inputs of 'a' must be a list of names"),
        ({"nodes": [{"name": "a", "op": 1}]}, "op of 'a' must be text"),
        ({"nodes": [{"name": "a", "shape": [-1]}]}, "the shape of 'a' must be a list of sizes"),
        ({"nodes": [{"name": "a", "shape": [True]}]}, "the shape of 'a' must be a list of sizes"),
        ({"nodes": [{"name": "a", "shape": [1 << 40, 1 << 40]}]}, "the shape of 'a' is too large to be true"),
        ({"nodes": [{"name": "a", "view_of": "b"}]}, "'a' is a view of 'b': there is no such node"),
        ({"nodes": [{"name": "a", "view_of": "b"}, {"name": "b", "view_of": "a"}]}, "'a' is a view of itself"),
    ],
)
def test_what_is_no_graph_is_refused_with_its_place(tmp_path: Path, content: object, said: str) -> None:
    with pytest.raises(ForeignFile, match=said):
        read_json(written(tmp_path, content))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.json cannot be read: No such file"):
        read_json(tmp_path / "absent.json")


def test_five_thousand_nodes(tmp_path: Path) -> None:
    nodes = [
        {"name": f"n{i}", "inputs": [f"n{i - 1}"] if i else [], "shape": [64], "dtype": "int8"} for i in range(5000)
    ]
    read = read_json(written(tmp_path, {"nodes": nodes}))
    result = run_one(Trace(Manifest("spikeprof", 0, 0), tables(read)), ModelGraph())
    assert result.metric("chain_nodes_count") == 5000
    assert result.metric("activations_peak_bytes") == 128


def test_views_of_views_lie_in_the_first_ones_memory(tmp_path: Path) -> None:
    nodes = [{"name": f"n{i}", "shape": [64], "dtype": "int8", "view_of": f"n{i + 1}"} for i in range(5000)]
    nodes.append({"name": "n5000", "shape": [128], "dtype": "int8"})
    read = read_json(written(tmp_path, {"nodes": nodes}))
    assert {node["tensors"][0]["storage"] for node in read.nodes} == {5000}
    assert {node["tensors"][0]["storage_bytes"] for node in read.nodes} == {128}


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"nodes": [{"name": "\ud800<x>"}, {"name": "b", "inputs": ["\ud800<x>"], "op": "o"}]}))
    read = read_json(path)
    assert [(node["name"], node["inputs"]) for node in read.nodes] == [("?<x>", []), ("b", [0])]
    path.write_text(json.dumps({"nodes": [{"name": "\ud800"}, {"name": "\udbff"}]}))
    with pytest.raises(ForeignFile, match=r"two nodes are called '\?'"):
        read_json(path)
