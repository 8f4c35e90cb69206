"""What modules give is seen without a hook in each, and nothing of that is left anywhere."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pickle
import subprocess
import sys
import threading
import traceback
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import spikeprof
from spikeprof.profiler.inject.numerics import direct
from spikeprof.profiler.watching import Watch

TORCHS_OWN = nn.Module._call_impl


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where nobody compiles: other tests do."""
    monkeypatch.setattr(direct, "_COMPILER", "a module that nobody has")
    monkeypatch.setattr(direct, "_turns", 0)


class Adds(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, x: Any, twice: bool = False) -> Any:
        return x + self.value * (2 if twice else 1)


def seen(watched: Watch) -> list[tuple[int, str, float]]:
    return [(row["step"], row["module"], row["amax_value"]) for row in watched.stats()]


def test_no_module_is_hooked_and_torch_gets_its_own_back() -> None:
    model = nn.Sequential(Adds(1.0), Adds(2.0))
    with spikeprof.watch(model) as watched:
        for _ in range(2):
            model(torch.ones(2))
        assert nn.Module._call_impl is not TORCHS_OWN
        assert not [
            m for m in model if m._forward_hooks or m._forward_pre_hooks or set(vars(m)) != set(vars(Adds(1.0)))
        ]
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
    assert nn.Module._call_impl is TORCHS_OWN
    assert seen(watched) == [(step, name, value) for step in (0, 1) for name, value in (("0", 2.0), ("1", 4.0))]


class Notes(nn.Module):
    """What a call of its own runs next."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.ran.append(nn.Module._call_impl.func)  # type: ignore[attr-defined]
        return x + 1


def test_of_some_steps_the_function_is_torchs_own_in_all_others() -> None:
    inner = Notes()
    model = nn.Sequential(inner, Adds(1.0))
    with spikeprof.watch(model, every=2) as watched:
        changed = nn.Module._call_impl
        assert changed.func is TORCHS_OWN  # type: ignore[attr-defined]
        for _ in range(3):
            model(torch.ones(2))
            assert nn.Module._call_impl is changed  # the class is as it was: Python forgets nothing of it
            assert changed.func is TORCHS_OWN  # type: ignore[attr-defined]
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model)
    assert [function is TORCHS_OWN for function in inner.ran] == [False, True, False]
    assert nn.Module._call_impl is TORCHS_OWN
    assert seen(watched) == [(step, name, value) for step in (0, 2) for name, value in (("0", 2.0), ("1", 3.0))]


def test_a_step_that_is_not_looked_at_ends_what_an_interrupted_one_has_left_on() -> None:
    class Interrupts(nn.Module):
        def forward(self, x: Any, does: bool = True) -> Any:
            if does:
                raise KeyboardInterrupt
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Notes(), Interrupts()

        def forward(self, x: Any, does: bool) -> Any:
            return self.b(self.a(x), does)

    model = Model()
    with spikeprof.watch(model, every=2) as watched:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2), True)
        for _ in range(3):
            model(torch.ones(2), False)
    assert [function is TORCHS_OWN for function in model.a.ran] == [False, True, False, True]
    assert [step for step, name, _ in seen(watched) if name == "a"] == [0, 2]


@pytest.mark.parametrize("every", [1, 2])
def test_the_function_answers_as_torchs_own_does(every: int) -> None:
    """As to torch's compiler, which asks for the code of a bound method, or a program that pickles one."""
    model = Adds(1.0)
    with spikeprof.watch(nn.Sequential(model), every=every):
        ours = nn.Module._call_impl
        assert ours is not TORCHS_OWN
        assert inspect.isfunction(ours)
        for ask in (inspect.signature, inspect.getsource, inspect.getsourcefile, inspect.getclosurevars):
            assert ask(ours) == ask(TORCHS_OWN)  # type: ignore[operator]
        assert (ours.__name__, ours.__qualname__, ours.__module__, ours.__globals__) == (
            TORCHS_OWN.__name__, TORCHS_OWN.__qualname__, TORCHS_OWN.__module__, TORCHS_OWN.__globals__,
        )  # fmt: skip
        assert pickle.loads(pickle.dumps(ours)) is copy.copy(ours) is copy.deepcopy(ours) is ours
        assert type(model._call_impl) is types.MethodType
        assert model._call_impl.__code__ is TORCHS_OWN.__code__
        assert pickle.loads(pickle.dumps(model._call_impl))(torch.zeros(1)).item() == 1.0
        assert ours(model, torch.zeros(1), twice=True).item() == 2.0  # type: ignore[arg-type]


def same(value: Any) -> Any:
    return value


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("closes", ["after", "between"])
def test_a_program_may_save_the_function_and_put_it_back(every: int, closes: str) -> None:
    """As profilers and debuggers do: what a class gives is set as its attribute."""
    model = nn.Sequential(Adds(1.0), Adds(2.0))
    watched = spikeprof.watch(model, every=every)
    try:
        saved = nn.Module._call_impl

        def patched(*args: Any, **kwargs: Any) -> Any:
            return same(saved(*args, **kwargs))

        nn.Module._call_impl = patched  # type: ignore[method-assign]
        assert model(torch.zeros(1)).item() == 3.0
        if closes == "between":
            watched.close()
        nn.Module._call_impl = saved  # type: ignore[method-assign]
        assert model(torch.zeros(1)).item() == 3.0
        watched.close()
        assert model(torch.zeros(1)).item() == 3.0
        assert closes == "between" or nn.Module._call_impl in (TORCHS_OWN, saved)
        assert saved.func is TORCHS_OWN  # type: ignore[attr-defined]
    finally:
        nn.Module._call_impl = TORCHS_OWN  # type: ignore[method-assign]


@pytest.mark.parametrize("every", [1, 2])
def test_a_class_made_meanwhile_may_use_the_function_as_its_own(every: int) -> None:
    with spikeprof.watch(nn.Sequential(Adds(1.0)), every=every):

        class Direct(Adds):
            __call__ = nn.Module._call_impl
            plain = nn.Module._call_impl

        model = Direct(1.0)
        assert model(torch.zeros(1)).item() == model.plain(torch.zeros(1)).item() == 1.0
        assert nn.Module._call_impl.__get__(model)(torch.zeros(1)).item() == 1.0
    assert model(torch.zeros(1), twice=True).item() == 2.0


def test_of_some_steps_hooks_tell_where_the_program_has_put_its_own_function() -> None:
    model = nn.Sequential(Adds(1.0))
    with spikeprof.watch(model, every=2) as watched:
        try:
            for at in range(3):
                model(torch.zeros(1))
                if at == 0:
                    nn.Module._call_impl = TORCHS_OWN  # type: ignore[method-assign]
        finally:
            nn.Module._call_impl = TORCHS_OWN  # type: ignore[method-assign]
    assert seen(watched) == [(0, "0", 1.0), (2, "0", 1.0)]
    with spikeprof.watch(model) as watched:
        nn.Module._call_impl = TORCHS_OWN  # type: ignore[method-assign]
        model(torch.zeros(1))
    assert ("", direct._REPLACED) in watched.unchecked


def test_no_watch_goes_on_top_of_a_function_of_the_programs() -> None:
    def patched(*args: Any, **kwargs: Any) -> Any:
        return TORCHS_OWN(*args, **kwargs)

    model = nn.Sequential(Adds(1.0))
    nn.Module._call_impl = patched  # type: ignore[method-assign]
    try:
        with spikeprof.watch(model) as watched:
            assert nn.Module._call_impl is patched
            model(torch.zeros(1))
        assert seen(watched) == [(0, "0", 1.0)]
    finally:
        nn.Module._call_impl = TORCHS_OWN  # type: ignore[method-assign]


def test_the_end_of_a_step_switches_off_no_step_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = nn.Sequential(Adds(1.0)), nn.Sequential(Adds(2.0), Adds(3.0))
    with spikeprof.watch(one, every=2) as watched:
        numerics: Any = watched._numerics
        numerics.attach(other)
        one(torch.zeros(1))
        one(torch.zeros(1))
        turn, turned = numerics.direct.turn, []

        def slow(on: bool) -> None:
            if not on and not turned:
                turned.append(on)
                thread = threading.Thread(target=other, args=(torch.zeros(1),))
                thread.start()
                thread.join()  # where the step had ended by now, the other would begin
            turn(on)

        monkeypatch.setattr(numerics.direct, "turn", slow)
        one(torch.zeros(1))
        assert numerics.concurrent == 1
        other(torch.zeros(1))
        other(torch.zeros(1))
    assert [name for _, name, value in seen(watched) if value in (2.0, 5.0)] == ["0", "1"]


def test_a_watched_model_in_another_gives_no_rows_in_steps_that_are_not_looked_at() -> None:
    inner = nn.Sequential(Adds(1.0))
    outer = nn.Sequential(inner, Adds(2.0))
    with spikeprof.watch(inner, every=2) as watched:
        numerics = watched._numerics
        assert numerics is not None
        numerics.attach(outer)
        for _ in range(2):  # the first of each is looked at
            inner(torch.zeros(1))
            outer(torch.zeros(1))
        outer(torch.zeros(1))
    assert [(step, name) for step, name, _ in seen(watched)] == [(0, "0"), (1, "0.0"), (1, "1"), (4, "0.0"), (4, "1")]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("always_call", [False, True])
def test_a_hook_that_comes_in_a_step_that_raises_is_called_and_the_exception_passes(
    every: int, always_call: bool
) -> None:
    """torch goes through a module's hooks as they are when an exception passes."""
    called = []

    class Registers(nn.Module):
        def forward(self, x: Any) -> Any:
            model.register_forward_hook(lambda *_: called.append(1), always_call=always_call)
            raise ValueError("of the program")

    model = nn.Sequential(Adds(1.0), Registers())
    with spikeprof.watch(model, every=every):
        for _ in range(3):
            with pytest.raises(ValueError, match="of the program"):
                model(torch.zeros(1))
    assert len(called) == (always_call and (0 if every == 1 else 1) + 2 + 3)  # torch's short way calls no hooks


@pytest.mark.parametrize("every", [1, 2])
def test_a_model_under_a_function_of_the_programs_that_calls_itself_is_in_one_step(every: int) -> None:
    def patched(*args: Any, **kwargs: Any) -> Any:
        return TORCHS_OWN(*args, **kwargs)

    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Adds(1.0)

        def forward(self, x: Any, depth: int = 2) -> Any:
            return self(self.inner(x), depth - 1) if depth else x

    nn.Module._call_impl = patched  # type: ignore[method-assign]
    try:
        with spikeprof.watch(model := Recursive(), every=every) as watched:
            for _ in range(2):
                model(torch.zeros(1))
    finally:
        nn.Module._call_impl = TORCHS_OWN  # type: ignore[method-assign]
    assert [row[:2] for row in seen(watched) if row[1]] == [
        (step, "inner") for step in range(0, 2, every) for _ in "12"
    ]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("roles", [("output",), ("input", "output", "gradient", "weight")])
def test_what_torch_jit_traces_in_a_step_holds_nothing_of_ours(every: int, roles: tuple[str, ...]) -> None:
    class Traces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Adds(1.0))

        def forward(self, x: Any) -> Any:
            return torch.jit.trace(self.inner, x)(x)

    with spikeprof.watch(model := Traces(), every=every, roles=roles) as watched, torch.no_grad():
        assert model(torch.zeros(1)).item() == 1.0
    assert ("", "calls that torch.jit.trace recorded") in watched.unchecked


@pytest.mark.parametrize("every", [1, 2])
def test_a_model_that_lives_to_the_end_of_the_program_says_nothing_there(every: int) -> None:
    program = f"""
import torch, spikeprof
torch.kept = torch.nn.Sequential(torch.nn.Linear(2, 2))
watched = spikeprof.watch(torch.kept, every={every})
torch.kept(torch.zeros(1, 2))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("every", [1, 2])
def test_copies_made_in_the_middle_of_a_step_are_modules_of_their_own(every: int) -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Adds(1.0)
            self.made: list[Any] = []

        def forward(self, x: Any) -> Any:
            shallow = copy.copy(self.inner)
            shallow._parameters = {"value": nn.Parameter(torch.tensor(10.0))}
            deep, pickled = copy.deepcopy(self.inner), pickle.loads(pickle.dumps(self.inner))
            assert list(self.inner.state_dict()) == ["value"]
            self.made = [shallow, deep, pickled]
            return self.inner(x) + shallow(x) + deep(x) + pickled(x)

    model = Copies()
    with spikeprof.watch(model, every=every) as watched, torch.no_grad():
        assert model(torch.zeros(1)).item() == 1 + 10 + 1 + 1
    assert seen(watched) == [(0, "inner", 1.0), (0, "", 13.0)]
    assert [m(torch.zeros(1)).item() for m in model.made] == [10.0, 1.0, 1.0]


@pytest.mark.parametrize("every", [1, 2])
def test_an_output_that_a_hook_of_the_program_replaces_is_seen_as_the_caller_gets_it(every: int) -> None:
    model = nn.Sequential(Adds(1.0), Adds(0.0))
    model[0].register_forward_hook(lambda module, args, output: output * 100)
    with spikeprof.watch(model, every=every) as watched:
        model[1].register_forward_hook(lambda module, args, output: output + 5)
        model(torch.ones(2))
    assert seen(watched) == [(0, "0", 200.0), (0, "1", 205.0)]


def test_a_forward_that_the_program_sets_and_keywords_are_seen() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Adds(1.0), Adds(1.0)

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x, twice=True))

    model = Calls()
    with spikeprof.watch(model) as watched:
        model(torch.zeros(1))
        model.a.forward = lambda x, twice: x + 50  # type: ignore[method-assign]
        model(torch.zeros(1))
    assert seen(watched) == [(0, "a", 2.0), (0, "b", 3.0), (1, "a", 50.0), (1, "b", 51.0)]


@pytest.mark.parametrize("every", [1, 2])
def test_exceptions_pass_with_a_traceback_of_the_programs_own(every: int) -> None:
    class Fails(nn.Module):
        def forward(self, x: Any) -> Any:
            raise KeyError("of the program")

    model = nn.Sequential(nn.Sequential(Adds(1.0), Fails()))
    with spikeprof.watch(model, every=every), pytest.raises(KeyError, match="of the program") as caught:
        model(torch.ones(2))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert not [frame for frame in frames if "spikeprof" in frame.filename]
    assert [frame.name for frame in frames].count("_call_impl") >= 3


@pytest.mark.parametrize("every", [1, 2])
def test_what_a_step_that_failed_has_made_goes_with_its_exception(every: int) -> None:
    """As of a step that ran out of memory: what the program tries next needs that, and no collector of garbage."""
    made: list[weakref.ref[Any]] = []

    class Fails(nn.Module):
        def forward(self, x: Any) -> Any:
            big = x + 1
            made.append(weakref.ref(big))
            raise MemoryError("of the program")

    model = nn.Sequential(nn.Sequential(Adds(1.0), Fails()))
    gc.disable()
    try:
        with spikeprof.watch(model, every=every):
            for _ in range(2):
                with contextlib.suppress(MemoryError):
                    model(torch.ones(2))
                assert [ref() for ref in made] == [None] * len(made)
    finally:
        gc.enable()
    assert len(made) == 2


def test_a_second_watch_uses_hooks_and_both_see_all() -> None:
    one, other = nn.Sequential(Adds(1.0)), nn.Sequential(Adds(2.0))
    first = spikeprof.watch(one)
    second = spikeprof.watch(other)
    for model in (one, other):
        model(torch.zeros(1))
    first.close()  # in the order in which they were put in
    for model in (one, other):
        model(torch.zeros(1))
    second.close()
    assert nn.Module._call_impl is TORCHS_OWN
    assert seen(first) == [(0, "0", 1.0)]
    assert seen(second) == [(0, "0", 2.0), (1, "0", 2.0)]


@pytest.mark.parametrize("every", [1, 2])
def test_what_others_wrap_since_stays_and_ours_does_nothing_any_more(every: int) -> None:
    model = nn.Sequential(Adds(1.0))
    watched = spikeprof.watch(model, every=every)
    ours = nn.Module._call_impl
    try:

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs)

        nn.Module._call_impl = wrapped  # type: ignore[method-assign]
        watched.close()
        assert nn.Module._call_impl is wrapped
        assert model(torch.zeros(1)).item() == 1.0
        assert seen(watched) == []
        again = spikeprof.watch(model)  # by hooks: who wraps what is not known
        model(torch.zeros(1))
        again.close()
        assert seen(again) == [(0, "0", 1.0)]
    finally:
        nn.Module._call_impl = TORCHS_OWN  # type: ignore[method-assign]


@pytest.mark.parametrize("every", [1, 2])
def test_the_function_goes_when_a_compiler_comes_and_what_it_remembers_is_mended(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(Adds(1.0))
    with spikeprof.watch(model, every=every) as watched:
        model(torch.zeros(1))
        remembers = types.ModuleType("utils")
        remembers.unpatched_nn_module_call_impl = nn.Module._call_impl  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch._dynamo.utils", remembers)
        monkeypatch.setitem(sys.modules, direct._COMPILER, types.ModuleType("compiler"))
        model(torch.zeros(1))
        assert nn.Module._call_impl is TORCHS_OWN
        assert remembers.unpatched_nn_module_call_impl is TORCHS_OWN
        model(torch.zeros(1))
    assert [one for one in seen(watched) if one[1]] == [(step, "0", 1.0) for step in range(0, 3, every)]


def test_a_process_that_watches_a_thousand_times_keeps_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_turns", direct._TURNS_MAX)
    model = nn.Sequential(Adds(1.0))
    with spikeprof.watch(model) as watched:
        assert nn.Module._call_impl is TORCHS_OWN
        model(torch.zeros(1))
    assert seen(watched) == [(0, "0", 1.0)]


def test_a_module_that_is_gone_lends_its_name_to_no_other() -> None:
    model = nn.Sequential(Adds(1.0), Adds(2.0))
    with spikeprof.watch(model) as watched:
        model(torch.zeros(1))
        numbers = {id(model[1])}
        tables = [watched._numerics.direct.places, *watched._numerics.direct._tables]  # type: ignore[union-attr]
        assert all(numbers <= set(table) for table in tables)
        del model[1]
        gc.collect()
        assert not any(numbers & set(table) for table in tables)


@pytest.mark.parametrize("every", [1, 2])
def test_another_threads_calls_are_not_of_the_step(every: int) -> None:
    class Starts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Adds(1.0)

        def forward(self, x: Any) -> Any:
            other = threading.Thread(target=self.inner, args=(torch.full((1,), 70.0),))
            other.start()
            other.join()
            return self.inner(x)

    with spikeprof.watch(model := Starts(), every=every) as watched:
        model(torch.zeros(1))
    assert seen(watched) == [(0, "inner", 1.0)]


def test_a_model_in_another_goes_by_its_name_there_and_by_its_own_alone() -> None:
    inner = nn.Sequential(Adds(1.0))
    outer = nn.Sequential(inner, Adds(2.0))
    watched = spikeprof.watch(inner)
    numerics = watched._numerics
    assert numerics is not None
    numerics.attach(outer)
    for model in (inner, outer, inner):
        model(torch.zeros(1))
    watched.close()
    assert [(step, name) for step, name, _ in seen(watched)] == [(0, "0"), (1, "0.0"), (1, "1"), (2, "0")]
