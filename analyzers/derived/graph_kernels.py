"""Which kernels of a recorded run are which nodes of the model's graph.

Both name modules and operators. All kernels of a module that has one node doing work are that node's. In a module with
several, a kernel belongs to the node of its operator; where several nodes have it, their order tells: as many places
in the program as nodes, or a sequence of kernels that repeats with as many. What then is still open stays unassigned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.derived.intervals import Bools, Ints
from spikeprof.analyzers.derived.kernel_origins import kernel_origins, operators, referred
from spikeprof.analyzers.derived.model_nodes import Nodes, storages
from spikeprof.profiler.trace import Trace

#: What operators of graphs launch their kernels as; a name that ends in * stands for all that begin so.
_LAUNCHES_AS = {
    "adaptive_avg_pool2d": ("_adaptive_avg_pool2d", "mean"),
    "batch_norm": ("cudnn_batch_norm", "native_batch_norm", "_native_batch_norm*", "_batch_norm*"),
    "bfloat16": ("copy_", "_to_copy"),
    "clone": ("copy_",),
    "contiguous": ("copy_", "clone"),
    "conv1d": ("convolution", "_convolution", "cudnn_convolution*"),
    "conv2d": ("convolution", "_convolution", "cudnn_convolution*"),
    "cross_entropy_loss": ("nll_loss*", "_log_softmax"),
    "dropout": ("native_dropout", "bernoulli_"),
    "einsum": ("bmm", "mm", "mul", "sum", "copy_"),
    "embedding": ("index_select", "index"),
    "flatten": ("copy_", "clone"),
    "float": ("copy_", "_to_copy"),
    "full": ("fill_",),
    "full_like": ("fill_",),
    "group_norm": ("native_group_norm",),
    "half": ("copy_", "_to_copy"),
    "index": ("index_select",),
    "index_put_": ("_index_put_impl_",),
    "layer_norm": ("native_layer_norm",),
    "linear": ("addmm", "mm", "_addmm_activation"),
    "log_softmax": ("_log_softmax",),
    "matmul": ("mm", "bmm", "mv", "dot"),
    "max_pool2d": ("max_pool2d_with_indices",),
    "ones": ("fill_",),
    "ones_like": ("fill_",),
    "pad": ("constant_pad_nd", "copy_", "fill_"),
    "repeat": ("copy_",),
    "repeat_interleave": ("index_select", "copy_"),
    "reshape": ("copy_", "clone"),
    "rms_norm": ("_fused_rms_norm", "pow", "mean", "rsqrt", "mul", "add", "copy_"),
    "scaled_dot_product_attention": ("_scaled_dot_product_*", "_flash_attention*", "_efficient_attention*", "_cudnn_*"),
    "softmax": ("_softmax",),
    "square": ("pow",),
    "stack": ("cat",),
    "sub": ("rsub",),
    "to": ("copy_", "_to_copy"),
    "type_as": ("copy_", "_to_copy"),
    "zeros": ("zero_", "fill_"),
    "zeros_like": ("zero_", "fill_"),
}
#: Kernels looked at to find out whether their sequence repeats.
_LONGEST_PERIOD_CHECK = 1_000_000
_MOST_LINES = 1 << 24  # of a file


@dataclass(frozen=True, slots=True)
class Joined:
    """``node`` of every kernel, -1 where none is known; ``why_none`` says why there is nothing to join."""

    node: Ints
    why_none: str = ""

    @property
    def known(self) -> Bools:
        """Which kernels have a node."""
        found: Bools = self.node >= 0
        return found


def joined(trace: Trace, nodes: Nodes) -> Joined:
    """The node of each kernel of the trace."""
    lacking = [t for t in ("kernels", "kernel_owners", "origins", "modules") if t not in trace]
    if lacking:
        why = "no kernels were recorded with the graph" if "kernels" in lacking else "no kernel's module is known"
        return Joined(np.empty(0, np.int64), why)
    module, op, place = _owners(trace)
    paths = [str(path) for path in trace.table("modules").column("path").to_pylist()]
    number = same_modules(paths, nodes.module)
    at_module = np.array([number.get(path, -1) for path in paths], np.int64)
    graph_module = np.where(module >= 0, at_module[module] if paths else -1, -1)
    found = np.full(len(module), -1, np.int64)
    workers = _workers(nodes)
    codes, labels = trace.codes("kernels", "name")
    order = np.lexsort((trace.column("kernels", "start_ns"), graph_module))
    order = order[graph_module[order] >= 0]
    for mine in np.split(order, np.flatnonzero(np.diff(graph_module[order])) + 1) if len(order) else ():
        some = workers.get(int(graph_module[mine[0]]), [])
        if len(some) == 1:
            found[mine] = some[0]
        elif some:
            _by_operator(found, mine, op, place, codes, nodes, some)
    return Joined(found, "" if (found >= 0).any() else _no_match(module, graph_module, len(labels)))


def _no_match(module: Ints, graph_module: Ints, kernels: int) -> str:
    if not kernels or not (module >= 0).any():
        return "no kernel's module is known"
    if not (graph_module >= 0).any():
        return "no module of the run is called like one of the graph"
    return "no kernel could be told to be of one node"


def _owners(trace: Trace) -> tuple[Ints, npt.NDArray[np.object_], Ints]:
    """Module (row of ``modules``), operator and place in the program of every kernel; -1 and empty where not known."""
    origin, _ = kernel_origins(trace)
    names = np.array([*map(_plain, operators(trace)), ""], object)
    module = np.append(referred(trace, "module_id", "modules"), -1)[origin]
    return module, names[origin], np.append(_places(trace), -1)[origin]


def _places(trace: Trace) -> Ints:
    """The place in the program of each origin, by file and line: launches with other shapes have the same."""
    stack = referred(trace, "stack_id", "stacks")
    if "stacks" not in trace:
        return stack
    rows = trace.table("stacks").select(["file", "line"]).to_pydict()
    files = {name: at for at, name in enumerate(dict.fromkeys(rows["file"]))}
    lines = [files[file] * _MOST_LINES + line % _MOST_LINES for file, line in zip(*rows.values(), strict=True)]
    return np.array([*lines, -1], np.int64)[stack]


def _plain(op: str) -> str:
    return op.removeprefix("aten::")


def same_modules(run: Iterable[str], graph: Iterable[str]) -> dict[str, int]:
    """Path in the run -> number of the module in the graph (in order of first appearance).

    Where the factory's model lies inside the program's, or around it, paths differ by a prefix: the one with which
    most paths agree.
    """
    number: dict[str, int] = {}
    for name in graph:
        number.setdefault(name, len(number))
    paths = dict.fromkeys(run)
    best = {path: number[path] for path in paths if path in number}
    deepest = max(number, key=lambda name: name.count("."), default="")
    longest = max(paths, key=lambda name: name.count("."), default="")
    inside = {path[: -len(deepest)] for path in paths if deepest and path.endswith("." + deepest)}
    around = {name[: -len(longest)] for name in number if longest and name.endswith("." + longest)}
    candidates = [{p: _cut(p, prefix) for p in paths} for prefix in sorted(inside)]
    candidates += [{p: prefix + p if p else prefix[:-1] for p in paths} for prefix in sorted(around)]
    for renamed in candidates:
        found = {path: number[name] for path, name in renamed.items() if name is not None and name in number}
        best = found if len(found) > len(best) else best
    return best


def _cut(path: str, prefix: str) -> str | None:
    """The path behind the prefix (``model.``); the model itself is called like the prefix without its dot."""
    return "" if path == prefix[:-1] else path.removeprefix(prefix) if path.startswith(prefix) else None


def _workers(nodes: Nodes) -> dict[int, list[int]]:
    """Nodes that may launch kernels, by the number of their module: not those that only look at memory of others."""
    number: dict[str, int] = {}
    for name in nodes.module:
        number.setdefault(name, len(number))
    gives, takes = storages(nodes)
    found: dict[int, list[int]] = {}
    for at, kind in enumerate(nodes.kind):
        is_view = bool(gives[at]) and gives[at] <= takes[at] and not _plain(nodes.op[at]).endswith("_")
        if kind == "op" and not is_view and nodes.op[at] != "getitem":
            found.setdefault(number[nodes.module[at]], []).append(at)
    return found


def _by_operator(
    found: Ints,
    mine: Ints,
    op: npt.NDArray[np.object_],
    place: Ints,
    codes: npt.NDArray[np.int32],
    nodes: Nodes,
    some: list[int],
) -> None:
    """Assign the kernels ``mine`` of one module, in order of time, to those of its nodes that have their operator."""
    names = op[mine].astype(str)
    for name in np.unique(names).tolist():
        of_op = mine[names == name]
        can = [at for at in some if _launches(_plain(nodes.op[at]), name)]
        if len(can) == 1:
            found[of_op] = can[0]
        elif can:
            found[of_op] = _in_order(place[of_op], codes[of_op], can)


def _launches(node_op: str, op: str) -> bool:
    names = (node_op, *_LAUNCHES_AS.get(node_op, ()))
    return bool(op) and any(op.startswith(n[:-1]) if n.endswith("*") else op == n for n in names)


def _in_order(place: Ints, codes: npt.NDArray[np.int32], can: list[int]) -> Ints:
    """The node of each kernel, in order of time, of several with the same operator; -1 where order does not tell.

    Lines of one file are in its order, whatever a cut recording begins with; those of several in order of time.
    """
    places, first, at = np.unique(place, return_index=True, return_inverse=True)
    if len(places) == len(can) and places[0] >= 0:
        one_file = places[0] // _MOST_LINES == places[-1] // _MOST_LINES
        rank = np.arange(len(places)) if one_file else np.argsort(np.argsort(first))
        return np.array(can, np.int64)[rank[at]]
    period = len(can)
    if len(places) == 1 and len(codes) % period == 0 and len(codes) <= _LONGEST_PERIOD_CHECK:
        turns = codes.reshape(-1, period)
        if (turns == turns[0]).all():
            return np.tile(np.array(can, np.int64), len(turns))
    return np.full(len(place), -1, np.int64)
