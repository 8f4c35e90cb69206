"""Numbers and paths of modules: by who calls them, whatever happens to the objects."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.profiler.inject import modules
from spikeprof.profiler.inject.modules import Modules


class Part:
    """As much of an nn.Module as names are taken from."""

    def __init__(self, **parts: Any) -> None:
        self._modules: dict[str, Any] = parts

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"code of the program was run for {name}")


class List(Part):
    """A container, which is never called."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(**{str(n): part for n, part in enumerate(parts)})


class OptimizedModule(Part):
    """torch.compile's."""


def paths(known: Modules) -> dict[int, tuple[int, str, str]]:
    return {index: (parent, path, kind) for index, parent, path, kind in known.rows}


def row(known: Modules, *chain: Any) -> tuple[int, str, str]:
    """(parent, path, class) of the innermost."""
    index = known.index(list(chain))
    return paths(known)[index]


def test_paths_parents_and_classes() -> None:
    mlp = Part()
    block = Part(mlp=mlp)
    model = Part(embed=Part(), layers=List(Part(), block))
    known = Modules()
    assert known.index([]) == -1
    assert known.index([model, block, mlp]) == 2
    assert known.index([model]) == 0
    assert known.index([model, model._modules["embed"]]) == 3
    assert known.rows == [
        (0, -1, "", "Part"),
        (1, 0, "layers.1", "Part"),
        (2, 1, "layers.1.mlp", "Part"),
        (3, 0, "embed", "Part"),
    ]


def test_a_shared_module_has_a_path_under_each_that_calls_it() -> None:
    shared = Part()
    one, two = Part(norm=shared), Part(norm=shared)
    model = Part(one=one, two=two, again=shared)
    known = Modules()
    found = [known.index(chain) for chain in ([model, one, shared], [model, two, shared], [model, shared])]
    assert [paths(known)[index][1] for index in found] == ["one.norm", "two.norm", "again"]


def test_a_module_that_goes_through_its_own_call_or_calls_itself_is_one() -> None:
    inner = Part()
    model = Part(inner=inner)
    inner._modules["up"] = model
    known = Modules()
    assert known.index([model, model, inner, inner]) == known.index([model, inner]) == 1
    assert known.index([model, inner, model, inner, model]) == 0
    assert len(known.rows) == 2


def test_modules_made_for_one_call_share_a_number_by_class() -> None:
    model = Part()
    known = Modules()
    found = {known.index([model, List()]) for _ in range(10_000)}
    assert {paths(known)[index] for index in found} == {(0, "<List>", "List")}
    assert len(known._top) == 1


def test_roots_that_have_gone_leave_their_number_to_others_of_their_class() -> None:
    known = Modules()
    for _ in range(1000):
        known.index([Part()])
        gc.collect(0)
    assert len(known.rows) == 1
    kept = [Part() for _ in range(3)]
    assert len({known.index([root]) for root in kept}) == 3
    assert [path for _, path, _ in paths(known).values()] == ["", "", ""]


def test_a_part_called_from_outside_of_its_model_keeps_its_path_where_the_model_is_known() -> None:
    head = Part()
    model = Part(head=head)
    known = Modules()
    known.index([model])
    assert row(known, head) == (0, "head", "Part")


def test_a_replaced_part_takes_over_its_number_and_another_class_gets_its_own() -> None:
    model = Part(a=Part(), b=Part())
    known = Modules()
    first = known.index([model, model._modules["a"]])
    for _ in range(100):
        model._modules["a"] = Part()
        assert known.index([model, model._modules["a"]]) == first
    model._modules["a"] = List()
    other = known.index([model, model._modules["a"]])
    assert other != first
    assert paths(known)[other] == (0, "a", "List")


def test_parts_that_change_places_change_names() -> None:
    one, two = Part(), Part()
    model = Part(a=one, b=two)
    known = Modules()
    known.index([model, one])
    known.index([model, two])
    model._modules.update(a=two, b=one)
    gone = Part()
    model._modules["c"] = gone
    assert row(known, model, gone)[1] == "c"


def test_compiled_modules_have_the_paths_of_those_in_them() -> None:
    inner = Part()
    model = Part(inner=OptimizedModule(_orig_mod=inner))
    known = Modules()
    eager = known.index([model, inner])
    assert known.index([OptimizedModule(_orig_mod=model), model._modules["inner"]]) == eager
    assert paths(known)[eager] == (0, "inner", "Part")


def test_thousands_of_parts_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Part(experts=List(*(Part() for _ in range(5000))))
    known = Modules()
    monkeypatch.setattr(modules, "MODULES_MAX", 3000)
    found = [known.index([model, part]) for part in model._modules["experts"]._modules.values()]
    assert found[:2999] == list(range(1, 3000))
    assert set(found[2999:]) == {0}  # the model's
    assert known.beyond == 2001
    assert paths(known)[2999][1] == "experts.2998"


def test_names_with_dots() -> None:
    deep = Part()
    model = Part(**{"a.b": Part(c=deep)})
    known = Modules()
    assert row(known, model, deep)[1] == "a.b.c"


@st.composite
def models(draw: st.DrawFn) -> tuple[Part, list[list[Part]]]:
    """A model whose parts may stand in several places, and chains of calls through it."""
    parts = [Part()]
    for n in range(draw(st.integers(1, 12))):
        part = Part()
        for number, child in enumerate(draw(st.lists(st.sampled_from(parts), max_size=3))):
            part._modules[f"n{number}"] = child
        if not part._modules or draw(st.booleans()):
            part._modules[f"m{n}"] = parts[-1]
        parts.append(part)
    chains = []
    for _ in range(draw(st.integers(1, 8))):
        chain = [parts[-1]]
        while (below := _all_below(chain[-1])) and draw(st.booleans()):
            chain.append(draw(st.sampled_from(below)))
        chains.append(chain)
    return parts[-1], chains


def _all_below(part: Part) -> list[Part]:
    found: dict[int, Part] = {}
    waiting = list(part._modules.values())
    while waiting:
        child = waiting.pop()
        if id(child) not in found:
            found[id(child)] = child
            waiting += child._modules.values()
    return list(found.values())


@given(models())
def test_every_path_leads_to_its_module(drawn: tuple[Part, list[list[Part]]]) -> None:
    model, chains = drawn
    known = Modules()
    found = [known.index(chain) for chain in chains]
    assert found == [known.index(chain) for chain in chains]
    rows = paths(known)
    assert sorted(rows) == list(range(len(rows)))
    for chain, index in zip(chains, found, strict=True):
        at = model
        for name in filter(None, rows[index][1].split(".")):
            at = at._modules[name]
        assert at is chain[-1]
        parent = rows[index][0]
        assert parent == (known.index(chain[:-1]) if len(chain) > 1 else -1)


def test_a_walk_that_rests_keeps_no_module_alive() -> None:
    first = Part()
    model = Part(first=first, layers=List(Part(), Part()))
    known = Modules()
    assert row(known, model, first) == (0, "first", "Part")  # the walk has come no further
    alive = weakref.ref(model), weakref.ref(model._modules["layers"])
    del model, first
    assert [ref() for ref in alive] == [None, None]


def test_what_is_registered_and_is_no_module_is_passed_over() -> None:
    part = Part()
    known = Modules()
    assert row(known, Part(number=5, text="x", part=part), part) == (0, "part", "Part")
