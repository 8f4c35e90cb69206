"""Graphs from JSON files: ``{"nodes": [{"name", "op", "inputs", "shape", "dtype", "module", "view_of"}, ...]}``.

Only ``name`` must be there. ``inputs`` and ``view_of`` are names of nodes, before or after: a cycle is for the analyzer
to find. The operators ``input``, ``placeholder``, ``parameter``, ``get_attr`` and ``output`` say what kind a node is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from spikeprof.profiler.collectors.model_graph.collect import Read
from spikeprof.profiler.errors import ForeignFile, InputError

_KINDS = {
    "input": "input",
    "placeholder": "input",
    "parameter": "parameter",
    "get_attr": "parameter",
    "output": "output",
}
_ELEMENT_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "half"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "float"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64", "double", "long"), 8),
    "complex128": 16,
}
_LARGEST = 2**53  # elements
_SHOWN = 3


def read_json(path: Path) -> Read:
    """Read a graph. Raises InputError when the file cannot be read, ForeignFile when it is no graph, with the node."""
    nodes = _nodes(path)
    number: dict[str, int] = {}
    for at, node in enumerate(nodes):
        name = node.get("name") if isinstance(node, dict) else None
        if not isinstance(name, str) or not name:
            raise ForeignFile(f"{path}: node {at} has no name")
        if name in number:
            raise ForeignFile(f"{path}: two nodes are called {name!r} (numbers {number[name]} and {at})")
        number[name] = at
    made = [_node(path, node, number) for node in nodes]
    _share_memory(path, nodes, made, number)
    return Read(path.name, "json", made, not_timed="a graph from a file cannot be run")


def _nodes(path: Path) -> list[Any]:
    try:
        content = _content(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ForeignFile(f"{path} is not JSON: {error}") from error
    nodes = content.get("nodes") if isinstance(content, dict) else None
    if not isinstance(nodes, list) or not nodes:
        raise ForeignFile(f'{path} is no graph: it must be {{"nodes": [{{"name": …, "inputs": [...]}}, ...]}}')
    return nodes


def _content(data: bytes) -> Any:
    """The file's value. Text that is not Unicode becomes question marks: no table, page or terminal takes it."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json.loads(json.dumps(json.loads(data), ensure_ascii=False).encode("utf-8", "replace"))


def _node(path: Path, node: dict[str, Any], number: dict[str, int]) -> dict[str, Any]:
    name = node["name"]
    inputs = node.get("inputs", [])
    if not isinstance(inputs, list) or not all(isinstance(one, str) for one in inputs):
        raise ForeignFile(f"{path}: the inputs of {name!r} must be a list of names")
    if unknown := [one for one in inputs if one not in number]:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise ForeignFile(
            f"{path}: {name!r} takes {', '.join(map(repr, unknown[:_SHOWN]))}{more}: there is no such node"
        )
    texts = {key: node.get(key, "") for key in ("op", "dtype", "module")}
    if wrong := [key for key, value in texts.items() if not isinstance(value, str)]:
        raise ForeignFile(f"{path}: {wrong[0]} of {name!r} must be text")
    kind = _KINDS.get(texts["op"], "op")
    return {
        "name": name,
        "kind": kind,
        "op": texts["op"] if kind == "op" else "",
        "module": texts["module"],
        "class_name": "",
        "inputs": [number[one] for one in inputs],
        "device": "",
        "tensors": _tensor(path, name, node.get("shape"), texts["dtype"].removeprefix("torch.")),
    }


def _tensor(path: Path, name: str, shape: Any, dtype: str) -> list[dict[str, Any]]:
    """The node's tensor, contiguous; none where the shape is not told."""
    if shape is None:
        return []
    if not isinstance(shape, list) or not all(type(n) is str or (type(n) is int and n >= 0) for n in shape):
        raise ForeignFile(f"{path}: the shape of {name!r} must be a list of sizes from 0 on, or of names of sizes")
    known = all(type(n) is int for n in shape)
    elements, strides = 1, []
    for n in reversed(shape) if known else ():
        strides.append(elements)
        elements *= n
    if elements > _LARGEST or any(s > _LARGEST for s in strides):
        raise ForeignFile(f"{path}: the shape of {name!r} is too large to be true")
    size = _ELEMENT_BYTES.get(dtype, 0)
    return [
        {
            "shape": shape,
            "dtype": dtype,
            "element_bytes": size,
            "strides": strides[::-1] if known else None,
            "offset": 0 if known else None,
            "storage_bytes": elements * size if known and size else None,
        }
    ]


def _share_memory(path: Path, nodes: list[Any], made: list[dict[str, Any]], number: dict[str, int]) -> None:
    """Give every tensor the number of its memory: its own node's, or that of the node it is a view of."""
    owner: dict[int, int] = {}
    for at in range(len(nodes)):
        passed: dict[int, None] = {}
        one = at
        while one not in owner and (source := nodes[one].get("view_of")) is not None:
            if not isinstance(source, str) or source not in number:
                raise ForeignFile(f"{path}: {nodes[one]['name']!r} is a view of {source!r}: there is no such node")
            passed[one] = None
            one = number[source]
            if one in passed:
                raise ForeignFile(f"{path}: {nodes[one]['name']!r} is a view of itself")
        first = owner.setdefault(one, one)
        owner |= dict.fromkeys(passed, first)
        whole = made[first]["tensors"]
        for tensor in made[at]["tensors"]:
            tensor["storage"] = first
            if at != first:
                tensor["storage_bytes"] = whole[0]["storage_bytes"] if whole else None
                tensor["strides"] = tensor["offset"] = None  # of a view, not told
