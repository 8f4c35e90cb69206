from __future__ import annotations

import graphs
import numpy as np
from graphs import node
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeprof.analyzers.derived.graph_layout import rows
from spikeprof.analyzers.derived.graph_memory import memory
from spikeprof.analyzers.derived.graph_order import depth, topological
from spikeprof.analyzers.derived.model_nodes import model_nodes

edges = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30)


@given(edges)
@settings(max_examples=150, deadline=None)
def test_an_order_keeps_every_edge_and_a_cycle_is_one(pairs: list[tuple[int, int]]) -> None:
    source, target = (np.array([pair[i] for pair in pairs], np.int64) for i in (0, 1))
    order, cycle = topological(12, source, target)
    place = {n: at for at, n in enumerate(order.tolist())}
    assert len(place) == len(order)
    for one, other in pairs:
        if other in place:
            assert place[one] < place[other]
    if cycle:
        assert len(order) < 12
        assert cycle[0] == min(cycle)
        assert len({*cycle}) == len(cycle)
        for one, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            assert (one, other) in pairs
    else:
        assert sorted(order.tolist()) == list(range(12))
        assert depth(order, source, target) == _longest(pairs)


def _longest(pairs: list[tuple[int, int]]) -> int:
    """By trying: how long a chain each node ends, until nothing changes any more."""
    length = [1] * 12
    for _ in range(12):
        for one, other in pairs:
            length[other] = max(length[other], length[one] + 1)
    return max(length)


@given(st.permutations(range(8)), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20))
@settings(deadline=None)
def test_a_list_in_a_possible_order_keeps_it(names: list[int], pairs: list[tuple[int, int]]) -> None:
    forward = [(a, b) for a, b in pairs if a < b]
    source, target = (np.array([pair[i] for pair in forward], np.int64) for i in (0, 1))
    assert topological(8, source, target)[0].tolist() == list(range(8))


@st.composite
def graph(draw: st.DrawFn) -> list[dict[str, object]]:
    """Nodes that take earlier ones; some are views of one that they take, some weights, some outputs."""
    made: list[dict[str, object]] = []
    for at in range(draw(st.integers(1, 12))):
        inputs = draw(st.lists(st.sampled_from([str(n["name"]) for n in made]), max_size=3)) if made else []
        kind = draw(st.sampled_from(["op", "op", "op", "op", "parameter", "input", "output"]))
        inputs = [] if kind in ("parameter", "input") else inputs
        one = node(f"n{at}", *inputs, shape=None if kind == "output" else [draw(st.integers(1, 50))], kind=kind)
        base = draw(st.sampled_from(inputs)) if inputs and draw(st.booleans()) else None
        owner = next((n for n in made if n["name"] == base), None)
        if owner is not None and kind == "op" and owner["shape"]:
            one |= {"storage": owner.get("storage", owner["name"]), "bytes": _size(made, owner)}
        made.append(one)
    return made


def _size(made: list[dict[str, object]], one: dict[str, object]) -> int:
    first = next(n for n in made if n["name"] == one.get("storage", one["name"]))
    return 2 * first["shape"][0]  # type: ignore[index]


@given(graph())
@settings(max_examples=150, deadline=None)
def test_the_peak_is_what_running_the_nodes_one_by_one_holds(made: list[dict[str, object]]) -> None:
    nodes = model_nodes(graphs.trace(made))
    held = memory(nodes, np.arange(len(made)))
    assert held.live_bytes.tolist() == _run(made)


def _run(made: list[dict[str, object]]) -> list[int]:
    """Hold memory as an interpreter would: until no later node takes a tensor in it, outputs for good."""
    owner = {n["name"]: n.get("storage", n["name"]) for n in made}
    kind = {n["name"]: n["kind"] for n in made}
    outputs = {owner[i] for n in made if n["kind"] == "output" for i in n["inputs"]}  # type: ignore[union-attr, attr-defined]
    if "output" not in kind.values():
        taken = {i for n in made for i in n["inputs"]}  # type: ignore[attr-defined]
        outputs = {owner[n["name"]] for n in made if n["name"] not in taken}
    found, memories = [], {}
    for at, one in enumerate(made):
        if one["shape"] and kind[owner[one["name"]]] == "op":
            memories[owner[one["name"]]] = _size(made, one)
        found.append(sum(memories.values()))
        later = {owner[i] for n in made[at + 1 :] for i in n["inputs"]}  # type: ignore[attr-defined]
        memories = {name: size for name, size in memories.items() if name in later | outputs}
    return found


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 20),
)
@settings(max_examples=150, deadline=None)
def test_every_row_begins_where_its_alignment_says(shape: list[int], steps: list[int], size: int, offset: int) -> None:
    strides = [*steps[: len(shape) - 1], 1]
    found = rows(shape, strides, size, offset)
    if found is None:
        assert all(n == 1 for n in shape)
        return
    begins = [offset * size]
    inner = max((d for d in range(len(shape)) if shape[d] != 1 and strides[d] == 1), default=None)
    for d, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        if d != inner:
            begins = [b + i * stride * size for b in begins for i in range(n)]
    assert all(b % found.alignment_bytes == 0 for b in begins)
    largest = found.alignment_bytes * 2
    assert largest > 256 or any(b % largest for b in begins)
