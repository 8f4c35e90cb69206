"""From the nodes of a graph to plain descriptions of them: operators, modules, tensors, memory that they share."""
# mypy: allow-subclassing-any

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .factory import one_line
from .reading import Graph, is_guard

_KINDS = {"placeholder": "input", "get_attr": "parameter", "output": "output"}
#: Operators of Python that torch calls otherwise.
_SPELLED = {"truediv": "div", "floordiv": "floor_divide", "iadd": "add_", "imul": "mul_", "isub": "sub_"}
_COPY_OF_A_CALL = re.compile(r"@\d+")  # torch.export's mark of a module that is called again


class Memory:
    """Numbers the memory that tensors lie in: one that a node shares with its inputs keeps its number.

    Only what is alive can be told apart by its address: constants always are, others while they are inputs.
    """

    def __init__(self) -> None:
        self.count = 0
        self.constants: dict[int, int] = {}
        self.of_node: dict[Any, dict[int, int]] = {}

    def number(self, node: Any, key: int, found: dict[int, int]) -> int:
        """The number of the memory at ``key`` that ``node`` gives; ``found`` are those of its other outputs."""
        for known in (found, *(self.of_node.get(source, {}) for source in node.all_input_nodes)):
            if key in known:
                return known[key]
        if node.op in ("get_attr", "placeholder") and key in self.constants:
            return self.constants[key]
        self.count += 1
        if node.op in ("get_attr", "placeholder"):
            self.constants[key] = self.count - 1
        return self.count - 1


class Described:
    """Descriptions of nodes by node, filled in as their values become known."""

    def __init__(self) -> None:
        self.tensors: dict[Any, list[dict[str, Any]]] = {}
        self.memory = Memory()

    def note(self, node: Any, value: Any) -> None:
        """Describe the tensors in ``value``, which ``node`` gives."""
        found: dict[int, int] = {}
        described = []
        for tensor in _tensors(value):
            facts = _facts(tensor)
            key = facts.pop("key")
            if key is None:
                self.memory.count += 1
                facts["storage"] = self.memory.count - 1
            else:
                facts["storage"] = found[key] = self.memory.number(node, key, found)
            described.append(facts)
        self.tensors[node] = described
        self.memory.of_node[node] = found


class _Recorder(fx.Interpreter):
    """Runs a graph and describes what each node gives. ``fake``: a FakeTensorMode that constants are put into."""

    def __init__(self, module: Any, described: Described, fake: Any) -> None:
        super().__init__(module)
        self.described, self.fake = described, fake

    def run_node(self, n: Any) -> Any:
        if is_guard(n):
            return None
        value = super().run_node(n)
        if self.fake is not None and n.op == "get_attr" and isinstance(value, torch.Tensor):
            value = self.fake.from_tensor(value)
        if n.op != "output":
            self.described.note(n, value)
        return value


def describe(graph: Graph) -> tuple[Described, list[str]]:
    """What every node gives, and remarks: how shapes were found, or why they could not be."""
    described = Described()
    if not graph.needs_shapes:
        for node in graph.nodes:
            if node.op != "output":
                described.note(node, _value(graph.module, node))
        return described, []
    try:
        return _faked(graph), ["shapes by running the graph on tensors without data"]
    except Exception as error:
        why = type(error).__name__
    try:
        with torch.no_grad():
            _Recorder(graph.module, described, None).run(*graph.flat, enable_io_processing=False)
    except Exception as error:
        return Described(), [f"shapes are not known: {one_line(error)}"]
    return described, [f"shapes by running the model once: it does not run on tensors without data ({why})"]


def _faked(graph: Graph) -> Described:
    from torch._subclasses.fake_tensor import FakeTensorMode

    described = Described()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    flat = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in graph.flat]
    with torch.no_grad(), mode:
        _Recorder(graph.module, described, mode).run(*flat, enable_io_processing=False)
    return described


def _value(module: Any, node: Any) -> Any:
    """What an exported node gives, as far as it was noted at the export."""
    if "val" in node.meta or node.op != "get_attr":
        return node.meta.get("val")
    value = module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


def _facts(tensor: Any) -> dict[str, Any]:
    """Shape, layout and memory; what a tensor of an odd kind does not tell is left unknown."""
    facts: dict[str, Any] = {
        "shape": [_size(n) for n in tensor.shape],
        "dtype": str(tensor.dtype).rpartition(".")[2],
        "element_bytes": tensor.dtype.itemsize,
        "device": str(tensor.device),
        "strides": None,
        "offset": None,
        "storage_bytes": None,
        "key": None,
    }
    try:
        if tensor.layout != torch.strided:
            return facts
        storage = tensor.untyped_storage()
        facts["strides"] = [_size(n) for n in tensor.stride()]
        offset, n_bytes = _size(tensor.storage_offset()), _size(storage.nbytes())
        facts["offset"] = offset if isinstance(offset, int) else None
        facts["storage_bytes"] = n_bytes if isinstance(n_bytes, int) else None
        facts["key"] = storage._cdata
    except Exception:
        return facts
    return facts


def memory_bytes(tensors: list[Any]) -> int | None:
    """Memory of these tensors, what several share once; None where one does not tell."""
    found: dict[int, int] = {}
    for facts in map(_facts, tensors):
        if facts["key"] is None or facts["storage_bytes"] is None:
            return None
        found[facts["key"]] = facts["storage_bytes"]
    return sum(found.values())


def _size(number: Any) -> int | str:
    """A size as a number, or as text where it depends on data."""
    if isinstance(number, int):
        return number
    known = number.node.maybe_as_int() if hasattr(number, "node") else None
    return str(number) if known is None else int(known)


def rows(graph: Graph, described: Described) -> list[dict[str, Any]]:
    """One plain description per node, in order; ``inputs`` are numbers of nodes."""
    number = {node: at for at, node in enumerate(graph.nodes)}
    found: list[dict[str, Any]] = []
    for node in graph.nodes:
        inputs: list[int] = []

        def note(source: Any, inputs: list[int] = inputs) -> Any:
            inputs.append(number[source])
            return source

        fx.node.map_arg((node.args, node.kwargs), note)
        module, class_name = _module(graph.module, node)
        tensors = described.tensors.get(node, [])
        found.append(
            {
                "name": node.name,
                "kind": _KINDS.get(node.op, "op"),
                "op": operator(node, graph.module),
                "module": module,
                "class_name": class_name,
                "inputs": inputs,
                "device": tensors[0]["device"] if tensors else "",
                "tensors": tensors,
            }
        )
    return found


def operator(node: Any, module: Any) -> str:
    """``aten::mm``; the class of a leaf module of torch.fx; empty for what is no operator."""
    if node.op == "call_module":
        return type(module.get_submodule(node.target)).__name__
    if node.op == "call_method":
        return _aten(str(node.target))
    if node.op != "call_function":
        return ""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name)
    name = getattr(node.target, "__name__", None) or str(node.target)
    home = getattr(node.target, "__module__", None) or ""
    return _aten(name) if home.split(".")[0] in ("torch", "_operator", "operator", "") else f"{home}.{name}"


def _aten(name: str) -> str:
    name = _SPELLED.get(name, name)
    return f"aten::{name}" if name.isidentifier() and hasattr(torch.ops.aten, name) else name


def _module(root: Any, node: Any) -> tuple[str, str]:
    """(qualified name, class) of the module that the node belongs to; empty for the model itself, or unknown."""
    if node.op == "call_module":
        return str(node.target), type(root.get_submodule(node.target)).__name__
    if node.op == "get_attr":
        return str(node.target).rpartition(".")[0], ""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1]
    name = kind if isinstance(kind, str) else kind.__name__
    return _COPY_OF_A_CALL.sub("", str(path)), name.rpartition(".")[2]
