"""Whose time it is: a model of four layers by hand, and what real files say."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
import tiny
from contracts.test_analyzers import check_findings, check_metrics, check_tables
from hypothesis import given
from hypothesis import strategies as st
from module_shares import check_shares, launches_by_class, shares_by_class
from paths import ROOT, SHARED, needs_shared

from spikeprof.analyzers.base import Finding, Result
from spikeprof.analyzers.derived.module_tree import module_tree
from spikeprof.analyzers.ownership import Ownership
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.trace import CollectorNote, Trace

LAYERS = 4
SAMPLES = ROOT / "sample_traces"

#: Rows 0 the model, 1 its head, then per layer the layer, its attention and its mlp.
MODULES: list[dict[str, Any]] = [
    {"parent_id": -1, "path": "", "class_name": "Decoder"},
    {"parent_id": 0, "path": "head", "class_name": "Linear"},
]
for layer in range(LAYERS):
    up = 2 + 3 * layer
    MODULES += [
        {"parent_id": 0, "path": f"layers.{layer}", "class_name": "Layer"},
        {"parent_id": up, "path": f"layers.{layer}.attn", "class_name": "Attention"},
        {"parent_id": up, "path": f"layers.{layer}.mlp", "class_name": "MLP"},
    ]
STACKS = [
    {"file": "/m/model.py", "line": 10, "function": "forward", "frames": '["/m/model.py:10 forward", "a:1 main"]'},
    {"file": "/m/model.py", "line": 20, "function": "forward", "frames": "[]"},
    {"file": "/m/model.py", "line": 10, "function": "forward", "frames": '["/m/model.py:10 forward", "b:2 main"]'},
]
ATTENTION, MLP, HEAD, NOWHERE = 0, 1, 2, 3  # origins: attention of layer i is 4 * i, …


def model(ns: Any = None, **changes: Any) -> Trace:
    """Per layer an attention kernel of 300 ns and an MLP's of 500 ns, then the head's of 100 ns and one of no one's.

    ``ns(layer)`` is how long a layer's MLP takes.
    """
    origins, kernels, owners = [], [], []

    def add(name: str, length: int, match: str, **origin: Any) -> None:
        kernels.append({"name": name, "start_ns": 1000 * len(kernels), "end_ns": 1000 * len(kernels) + length})
        owners.append({"kernel_id": len(owners), "origin_id": len(origins) if origin else -1, "match": match})
        if origin:
            origins.append(origin)

    for i in range(LAYERS):
        up = 2 + 3 * i
        add("flash", 300, "exact", module_id=up + 1, stack_id=0, op="aten::sdpa", input_shapes=f"[[{i}]]")
        add("gemm", ns(i) if ns else 500, "position", module_id=up + 2, stack_id=2, op="aten::mm", input_shapes="[[1]]")
    add("gemm", 100, "graph", module_id=1, stack_id=1, op="aten::mm")
    add("other", 700, "none")
    tables = {"kernels": kernels, "origins": origins, "kernel_owners": owners, "modules": MODULES, "stacks": STACKS}
    return tiny.trace(**{**tables, **changes})


def asked(trace: Trace, **options: Any) -> Result:
    result = run_one(trace, Ownership(**options))
    assert result.status in ("ok", "findings"), result.reason
    check_metrics(result)
    check_tables(result)
    check_findings(Ownership(), result)
    return result


def table(result: Result, name: str, *columns: str) -> list[tuple[Any, ...]]:
    return list(zip(*(result.tables[name][column] for column in columns), strict=True))


def finding(result: Result, rule: str) -> Finding:
    (one,) = (f for f in result.findings if f.rule == rule)
    return one


# -- by hand: 4 × (300 + 500) + 100 + 700 = 4,000 ns -----------------------------------------------------------------


def test_modules_that_are_alike_are_one_row_of_a_tree() -> None:
    result = asked(model())
    assert table(result, "modules", "module", "depth", "modules_count", "launches_count") == [
        ("Decoder", 0, 1, 9),
        ("layers.*", 1, 4, 8),
        ("layers.*.mlp", 2, 4, 4),
        ("layers.*.attn", 2, 4, 4),
        ("head", 1, 1, 1),
    ]
    assert table(result, "modules", "name", "inclusive_ns", "exclusive_ns", "inclusive_share") == [
        ("Decoder", 3300, 0, 0.825),
        ("layers.*", 3200, 0, 0.8),
        ("mlp", 2000, 2000, 0.5),
        ("attn", 1200, 1200, 0.3),
        ("head", 100, 100, 0.025),
    ]


def test_how_much_is_known_and_from_where() -> None:
    result = asked(model())
    shares = {m.name: m.value for m in result.metrics}
    assert shares == {
        "kernel_time_ns": 4000,
        "owned_module_share": 0.825,
        "owned_op_share": 0.825,
        "owned_shapes_share": 0.8,  # the head's are not known
        "owned_line_share": 0.825,
        "exact_match_share": 0.3,
        "position_match_share": 0.5,
        "graph_match_share": 0.025,
        "signature_match_share": 0,
        "none_match_share": 0.175,
    }


def test_operators_inputs_lines_and_the_owners_of_kernels() -> None:
    result = asked(model())
    assert table(result, "operators", "op", "launches_count", "total_ns", "distinct_kernels_count", "module") == [
        ("aten::mm", 5, 2100, 1, "layers.*.mlp"),
        ("aten::sdpa", 4, 1200, 1, "layers.*.attn"),
    ]
    assert table(result, "inputs", "op", "input_shapes", "launches_count", "total_ns") == [
        ("aten::mm", "[[1]]", 4, 2000),
        *[("aten::sdpa", f"[[{i}]]", 1, 300) for i in range(4)],
    ]
    # Two stacks that differ further out are one line.
    assert table(result, "lines", "file", "line", "function", "launches_count", "total_ns") == [
        ("/m/model.py", 10, "forward", 8, 3200),
        ("/m/model.py", 20, "forward", 1, 100),
    ]
    assert table(result, "kernels", "kernel", "module", "op", "owner_share", "owners_count") == [
        ("gemm", "layers.*.mlp", "aten::mm", 2000 / 2100, 2),
        ("flash", "layers.*.attn", "aten::sdpa", 1.0, 1),
        ("other", "", "", 1.0, 0),
    ]


def test_the_tree_of_cells_adds_up_and_what_is_small_is_one_cell() -> None:
    result = asked(model())
    cells = table(result, "icicle", "cell_id", "parent_id", "kind", "label", "total_ns")
    assert cells == [
        (0, -1, "all", "", 4000),
        (1, 0, "module", "Decoder", 3300),
        (2, 1, "module", "layers.*", 3200),
        (3, 2, "module", "mlp", 2000),
        (4, 3, "op", "aten::mm", 2000),
        (5, 4, "kernel", "gemm", 2000),
        (6, 2, "module", "attn", 1200),
        (7, 6, "op", "aten::sdpa", 1200),
        (8, 7, "kernel", "flash", 1200),
        (9, 1, "module", "head", 100),
        (10, 9, "op", "aten::mm", 100),
        (11, 10, "kernel", "gemm", 100),
        (12, 0, "unknown", "", 700),
        (13, 12, "kernel", "other", 700),
    ]
    small = asked(model(), min_cell_share=0.2)
    assert table(small, "icicle", "parent_id", "kind", "label", "total_ns")[-3:] == [
        (7, "kernel", "flash", 1200),
        (1, "others", "1", 100),
        (0, "others", "1", 700),
    ]
    few = asked(model(), cells_count=3)
    assert [row[4] for row in table(few, "icicle", "cell_id", "parent_id", "kind", "label", "total_ns")][:3] == [
        4000,
        3300,
        3200,
    ]
    for result in (small, few):
        cells = table(result, "icicle", "cell_id", "parent_id", "total_ns")
        for number, _, total in cells:
            inside = [ns for _, parent, ns in cells if parent == number]
            assert not inside or sum(inside) == total


# -- findings --------------------------------------------------------------------------------------------------------


def test_low_ownership_says_what_would_raise_it() -> None:
    one = finding(asked(model()), "low-ownership")
    assert [(e.metric, e.value) for e in one.evidence] == [
        ("owned_module_share", 0.825),
        ("unowned_in_graphs_share", 0),
        ("unowned_launched_share", pytest.approx(0.175)),
    ]
    assert "--attribute-steps" in one.recommendation
    assert not [f for f in asked(model(), min_owned_share=0.825).findings if f.rule == "low-ownership"]
    trace = model()
    kernels = trace.table("kernels")
    graph = pa.array([0] * (len(kernels) - 1) + [3], pa.int32())
    at = kernels.schema.get_field_index("graph_id")
    replayed = Trace(trace.manifest, {**trace.tables, "kernels": kernels.set_column(at, "graph_id", graph)})
    assert "captured" in finding(asked(replayed), "low-ownership").recommendation


def test_work_that_was_seen_to_be_outside_of_modules_is_no_lack() -> None:
    """Where the head's 100 of 4,000 ns are of no module, 80 % are of one and 2.5 % outside."""
    trace = model()
    origins = trace.table("origins")
    modules = origins.column("module_id").to_pylist()
    at = origins.schema.get_field_index("module_id")
    cut = origins.set_column(at, "module_id", pa.array([*modules[:-1], -1], pa.int32()))
    outside = Trace(trace.manifest, {**trace.tables, "origins": cut})
    one = finding(asked(outside, min_owned_share=0.83), "low-ownership")
    assert [e.value for e in one.evidence] == [0.8, 0.025, 0, pytest.approx(0.175)]
    assert not [f for f in asked(outside, min_owned_share=0.82).findings if f.rule == "low-ownership"]
    none = origins.set_column(at, "module_id", pa.array([-1] * len(modules), pa.int32()))  # a program without modules
    found = asked(Trace(trace.manifest, {**trace.tables, "origins": none}), min_owned_share=0.82).findings
    assert not [f for f in found if f.rule == "low-ownership"]


def test_the_smallest_part_with_most_of_the_time_dominates() -> None:
    assert not [f for f in asked(model()).findings if f.rule == "dominant-module"]  # exactly half is not more than it
    one = finding(asked(model(lambda _: 900)), "dominant-module")
    assert one.scope == {"module": "layers.*.mlp"}
    assert one.evidence[0].value == 3600 / 5600
    # The list of layers and the whole model say nothing.
    assert not [f for f in asked(model(), dominant_share=0.6).findings if f.rule == "dominant-module"]


def test_one_of_several_like_modules_that_takes_longer() -> None:
    one = finding(asked(model(lambda i: 1000 if i == 2 else 500)), "uneven-modules")
    # The layer takes longer too: its MLP is why.
    assert one.scope == {"module": "layers.2.mlp", "like": "layers.*.mlp"}
    values = {e.metric: e.value for e in one.evidence}
    assert values["over_median_ratio"] == 2
    assert values["excess_share"] == 500 / 4500
    assert one.saving is not None
    assert one.saving.upper_bound_ns == 500
    assert not [f for f in asked(model(lambda i: 700 if i == 2 else 500)).findings if f.rule == "uneven-modules"]


def test_modules_of_two_processes_are_not_compared() -> None:
    slow = lambda i: 2000 if i > 1 else 500  # noqa: E731
    # Layers 2 and 3, and all in them, are of another process: within each the layers are even.
    modules = [{**row, "rank": int(i >= 8)} for i, row in enumerate(MODULES)]
    options = {"min_alike_count": 2, "uneven_ratio": 1.1}
    assert [f.rule for f in asked(model(slow), **options).findings].count("uneven-modules") == 1
    assert "uneven-modules" not in [f.rule for f in asked(model(slow, modules=modules), **options).findings]


def test_layers_that_launch_more_are_not_compared() -> None:
    trace = model(lambda i: 1000 if i == 2 else 500)
    kernels, owners = (trace.table(name).to_pylist() for name in ("kernels", "kernel_owners"))
    more = {**kernels[-1], "kernel_id": len(kernels), "start_ns": 10**6, "end_ns": 10**6 + 1}
    owners.append({"kernel_id": len(kernels), "origin_id": 5, "match": "exact"})  # another one in layer 2's MLP
    changed = model(lambda i: 1000 if i == 2 else 500, kernels=[*kernels, more], kernel_owners=owners)
    assert not [f for f in asked(changed).findings if f.rule == "uneven-modules"]


# -- what is not measured --------------------------------------------------------------------------------------------


def test_without_owners_it_says_why() -> None:
    trace = tiny.trace(kernels=[{"end_ns": 5}])
    result = run_one(trace, Ownership())
    assert (result.status, result.reason) == ("not_measured", "launches were not attributed in this recording")
    note = CollectorNote("refused", "torch.profiler of the program was on")
    trace = tiny.trace(kernels=[{"end_ns": 5}], collectors={"ownership": note})
    result = run_one(trace, Ownership())
    assert (result.status, result.reason) == ("not_measured", "torch.profiler of the program was on")
    assert result.collect_with


def test_operators_alone_are_told_and_modules_said_to_be_missing() -> None:
    trace = model()
    part = Trace(trace.manifest, {n: t for n, t in trace.tables.items() if n not in ("modules", "stacks")})
    result = asked(part)
    assert result.metric("owned_op_share") == 0.825
    assert result.metric("owned_module_share") is None
    assert not result.findings
    assert result.tables["modules"]["module"] == []
    assert table(result, "icicle", "kind", "label", "total_ns")[:3] == [
        ("all", "", 4000),
        ("op", "aten::mm", 2100),
        ("kernel", "gemm", 2100),
    ]


def test_a_part_of_a_recording_has_the_owners_of_its_own_kernels() -> None:
    result = asked(model().narrowed(2000, 4000))
    assert table(result, "kernels", "kernel", "module", "total_ns") == [
        ("gemm", "layers.*.mlp", 500),
        ("flash", "layers.*.attn", 300),
    ]


def test_rows_that_name_what_is_not_there_count_as_not_known() -> None:
    owners = [{"kernel_id": i, "origin_id": 99 - i} for i in range(5)]
    result = asked(model(kernel_owners=owners))
    assert result.metric("owned_op_share") == 0
    assert result.metric("none_match_share") == 1
    wild = [{"module_id": 77, "stack_id": -5, "op": None}] * 10
    result = asked(model(origins=wild))
    assert result.metric("owned_module_share") == result.metric("owned_line_share") == 0


# -- the tree --------------------------------------------------------------------------------------------------------


def labels(*rows: tuple[int, str, str], ranks: tuple[int, ...] = ()) -> list[str]:
    """What modules of (parent, path, class) are called, each by its group."""
    modules = [
        {"parent_id": up, "path": path, "class_name": name, "rank": ranks[i] if ranks else 0}
        for i, (up, path, name) in enumerate(rows)
    ]
    tree = module_tree(tiny.trace(modules=modules))
    return [tree.groups[group].label for group in tree.group_of.tolist()]


def test_numbers_fold_where_names_and_classes_are_alike() -> None:
    rows = [(-1, "", "Net"), (0, "blocks.0", "Dense"), (0, "blocks.1", "MoE"), (0, "blocks.2", "MoE"), (0, "fc1", "L")]
    more = [(2, "blocks.1.experts.0", "E"), (2, "blocks.1.experts.7", "E"), (3, "blocks.2.experts.0", "E")]
    assert labels(*rows, *more) == [
        "Net",
        "blocks.0",  # of its class there is one
        "blocks.*",
        "blocks.*",
        "fc1",
        *["blocks.*.experts.*"] * 3,
    ]


def test_two_models_are_told_apart_and_processes_are_not() -> None:
    one = [(-1, "", "Net"), (0, "a", "L"), (-1, "", "Net"), (2, "a", "L"), (-1, "", "Softmax"), (-1, "", "Softmax")]
    assert labels(*one) == ["Net", "Net: a", "Net #2", "Net #2: a", "Softmax", "Softmax"]
    assert labels(*one[:4], ranks=(0, 0, 1, 1)) == ["Net", "a", "Net", "a"]


def test_torch_profilers_numbers_fold_and_leaves_keep_their_order() -> None:
    rows = [(-1, "", "Net")]
    for i in range(2):
        rows.append((0, f"Block_{i}", "Block"))
        rows += [(1 + 4 * i, f"Block_{i}.Linear_{3 * i + k}", "Linear") for k in range(3)]
    assert labels(*rows)[1:5] == ["Block_*", "Block_*.Linear_*", "Block_*.Linear_* #2", "Block_*.Linear_* #3"]
    assert labels(*rows)[5:] == labels(*rows)[1:5]


def test_modules_without_a_path_or_a_class_have_empty_ones() -> None:
    rows: list[dict[str, Any]] = [
        {"rank": 0, "parent_id": -1, "path": None, "class_name": None},
        {"rank": 0, "parent_id": 0, "path": "up", "class_name": "Linear"},
    ]
    tree = module_tree(tiny.trace(modules=rows))
    assert tree.paths == ["", "up"]
    assert tree.parent_of.tolist() == [-1, 0]


def test_a_shared_module_keeps_its_own_path() -> None:
    assert labels((-1, "", "Net"), (0, "layers.0", "A"), (0, "layers.1", "A"), (1, "embed", "E")) == [
        "Net",
        "layers.*",
        "layers.*",
        "embed",
    ]


@given(st.lists(st.tuples(st.integers(-3, 12), st.sampled_from(["", "a", "a.0", "a.1", "b.2.c"])), max_size=12))
def test_any_table_of_modules_makes_a_tree(rows: list[tuple[int, str]]) -> None:
    modules = [{"parent_id": up, "path": path, "class_name": "M"} for up, path in rows]
    tree = module_tree(tiny.trace(modules=modules))
    assert len({group.label for group in tree.groups}) == len(tree.groups)
    for number, group in enumerate(tree.groups):
        assert -1 <= group.parent < number
        assert group.depth == (tree.groups[group.parent].depth + 1 if group.parent >= 0 else 0)
    own = tree.depth_of * 0 + 1
    roots = [i for i, up in enumerate(tree.parent_of.tolist()) if up < 0]
    assert sum(tree.with_ancestors(own)[roots].tolist()) == len(rows)
    assert tree.by_group(own).sum() == len(rows)


# -- real files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "min_shapes_share"), [("eager", 0.85), ("graph", 0.95)])
def test_nearly_all_time_of_a_recorded_run_is_owned(mode: str, min_shapes_share: float) -> None:
    """From its first kernel to its last, weights that are drawn and warm-up included.

    In 200 eager steps the inputs of attention grow: those of steps that nobody looked at are not known.
    """
    result = asked(open_trace(SAMPLES / f"h200_engine_{mode}"))
    found = {name: result.metric(f"owned_{name}_share") or 0.0 for name in ("module", "op", "shapes", "line")}
    assert found["module"] >= 0.99
    assert found["op"] >= 0.95
    assert found["shapes"] >= min_shapes_share
    assert found["line"] >= 0.90


def test_the_recording_of_the_engine_with_graphs() -> None:
    result = asked(open_trace(SAMPLES / "h200_engine_graph"))
    matches = dict(zip(result.tables["matches"]["match"], result.tables["matches"]["gpu_time_share"], strict=True))
    assert matches["graph"] > 0.95
    rows = {row[0]: row[1:] for row in table(result, "modules", "module", "modules_count", "launches_count")}
    # 127 replays of 16 layers, and three forwards outside of graphs.
    assert rows["layers.*.attention.qkv"] == (16, 16 * 130)


def test_modules_are_those_of_torch_profiler_for_the_same_program() -> None:
    """Two processes, one recorded here and one by torch.profiler; on a GPU: tests/gpu/test_ownership.py."""
    ours, theirs = (open_trace(SAMPLES / name) for name in ("h200_owned", "h200_owned_torch.json.gz"))
    check_shares(shares_by_class(ours), shares_by_class(theirs))
    assert asked(ours).metric("owned_module_share") == pytest.approx(0.994, abs=0.001)  # rest: making of the weights
    # Of a block: two norms, four products, an activation; attention and two additions of its own. One more is the head.
    launches = {"LayerNorm": 2 * 8 * 40, "Linear": (4 * 8 + 1) * 40, "Mlp": 8 * 40, "Block": 3 * 8 * 40}
    assert launches_by_class(ours) == launches_by_class(theirs) == launches


def test_the_import_of_torch_profilers_file_is_what_the_file_says() -> None:
    """By its own numbers alone: the last module to begin that was not over when the kernel was launched."""
    path = SAMPLES / "h200_owned_torch.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    modules = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e["cat"] == "python_function")
    launched = {e["args"]["correlation"]: e["ts"] for e in events if e["cat"].startswith("cuda_")}
    starts, total = [begin for begin, _, _ in modules], Counter[str]()
    for event in (e for e in events if e["cat"] == "kernel"):
        at = launched[event["args"]["correlation"]]
        name = next(name for _, end, name in modules[bisect_right(starts, at) - 1 :: -1] if at < end)
        total[name.removeprefix("nn.Module: ").rpartition("_")[0]] += event["dur"]
    shares = {name: ns / total.total() for name, ns in total.items()}
    assert shares_by_class(open_trace(path)) == pytest.approx(shares, rel=1e-9)


@needs_shared
def test_a_real_model_of_36_blocks() -> None:
    trace = open_trace(SHARED / "traces/AMD-AGI+TraceLens/tests/traces/b200/eager_trace.json.gz")
    result = asked(trace)
    rows = {row[0]: row[1:] for row in table(result, "modules", "module", "modules_count", "launches_count")}
    assert rows["TransformerBlock_*"] == (36, 756)
    assert rows["TransformerBlock_*.MLPBlock_*.FusedMoE_*"] == (36, 360)
    assert (result.metric("owned_module_share") or 0) > 0.99
    whole = sum(table(result, "matches", "total_ns")[0] + table(result, "matches", "total_ns")[-1])
    assert whole == result.metric("kernel_time_ns")
