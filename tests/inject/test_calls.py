"""The hook in nn.Module.__call__: told of each outermost call, unseen by the program, and gone when nobody needs it."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from spikeprof.profiler.inject.calls import Calls

torch = pytest.importorskip("torch")

ORIGINAL = torch.nn.Module.__dict__["__call__"]


class Heard:
    """A listener."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.open = 0

    def step_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.open += 1
        self.steps.append(type(module).__name__)

    def step_ends(self) -> None:
        self.open -= 1


class Inner(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        if x.shape[0] == 3:
            raise ValueError("three")
        return self.linear(x)


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class Own(Model):
    """A class with a call of its own."""

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) + 1


def by_hand(model: Any, x: Any) -> Any:
    linear = model.inner.linear
    return torch.nn.functional.linear(x, linear.weight, linear.bias)


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.compiler_came()
    assert torch.nn.Module.__dict__["__call__"] is ORIGINAL
    assert all("__call__" not in vars(each) for each in (Model, Inner, torch.nn.Linear))


@pytest.fixture
def heard(calls: Calls) -> Heard:
    heard = Heard()
    assert calls.want(heard)
    return heard


def test_outermost_calls_are_told_and_results_are_the_programs(calls: Calls, heard: Heard) -> None:
    model, x = Model(), torch.ones(2, 4)
    assert torch.equal(model(x), by_hand(model, x))
    assert torch.equal(model(x=x), by_hand(model, x))
    own = Own()
    assert torch.equal(own(x), by_hand(own, x) + 1)
    model.inner(x)
    assert heard.steps == ["Model", "Model", "Own", "Inner"]
    assert heard.open == 0
    calls.release(heard)
    assert torch.nn.Module.__dict__["__call__"] is ORIGINAL
    model(x)
    assert len(heard.steps) == 4


def test_the_call_of_a_module_that_holds_nothing_is_no_step(calls: Calls, heard: Heard) -> None:
    """As that of what samples tokens, between two calls of the model."""
    model, sampler = Model(), torch.nn.Identity()
    for _ in range(2):
        sampler(model(torch.zeros(1, 4)))
    assert heard.steps == ["Model", "Model"]
    torch.nn.Linear(4, 4)(torch.zeros(1, 4))
    assert heard.steps == ["Model", "Model", "Linear"]


def failure(model: Any, call: Any) -> str:
    try:
        call(model, torch.ones(3, 4))
    except ValueError:
        return traceback.format_exc()
    raise AssertionError("it should have failed")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="what is raised again keeps our frame before Python 3.11")
@pytest.mark.parametrize("narrow", [False, True])
def test_tracebacks_are_the_programs_own(calls: Calls, narrow: bool) -> None:
    model, call = Model(), lambda model, x: model(x)
    plain = failure(model, call)
    heard = Heard()
    calls.want(heard)
    if narrow:
        model(torch.ones(1, 4))
        calls.narrow(heard)
    assert failure(model, call) == plain
    assert heard.open == 0
    assert heard.steps == ["Model"] * (1 + narrow)


def test_what_a_call_that_failed_holds_goes_with_its_exception(calls: Calls, heard: Heard) -> None:
    model, x = Model(), torch.ones(3, 4)
    alive = weakref.ref(x)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            model(x)
        del x
        assert alive() is None
    finally:
        gc.enable()
    assert heard.steps == ["Model"]


def test_what_a_call_looks_like_from_outside(calls: Calls, heard: Heard) -> None:
    import inspect

    hook = torch.nn.Module.__call__
    assert hook is not ORIGINAL
    assert (hook.__name__, hook.__qualname__, hook.__module__) == (
        ORIGINAL.__name__,
        ORIGINAL.__qualname__,
        ORIGINAL.__module__,
    )
    assert inspect.signature(hook) == inspect.signature(ORIGINAL)
    with pytest.raises(TypeError):
        torch.nn.Module.__call__()
    with pytest.raises(AttributeError):
        torch.nn.Module.__call__(3)


def test_known_models_alone_are_watched_through_their_classes(calls: Calls, heard: Heard) -> None:
    model, x = Model(), torch.ones(2, 4)
    model(x)
    calls.narrow(heard)
    assert torch.nn.Module.__dict__["__call__"] is ORIGINAL
    assert "__call__" in vars(Model)
    assert torch.equal(model(x), by_hand(model, x))
    Inner()(x)
    torch.nn.ReLU()(x)
    assert heard.steps == ["Model", "Model"]
    other = Heard()
    calls.want(other)  # which needs all
    Inner()(x)
    model(x)
    assert heard.steps[2:] == other.steps == ["Inner", "Model"]
    calls.release(other)
    assert torch.nn.Module.__dict__["__call__"] is ORIGINAL
    copy.deepcopy(model)(x)
    pickle.loads(pickle.dumps(model))(x)
    assert len(heard.steps) == 6


def test_classes_that_are_pickled_by_what_is_in_them_are_left_alone(calls: Calls, heard: Heard) -> None:
    class Local(Model):
        pass

    Local()(torch.ones(2, 4))
    assert heard.steps == ["Local"]
    calls.narrow(heard)
    assert "__call__" not in vars(Local)


def test_a_hook_that_another_was_put_over_stays_and_does_nothing(calls: Calls, heard: Heard) -> None:
    model, x = Model(), torch.ones(2, 4)
    ours = torch.nn.Module.__dict__["__call__"]
    seen = []

    def theirs(self: Any, *args: Any) -> Any:
        seen.append(type(self).__name__)
        return ours(self, *args)

    torch.nn.Module.__call__ = theirs
    try:
        calls.release(heard)
        assert torch.nn.Module.__dict__["__call__"] is theirs
        model(x)
        assert seen == ["Model", "Inner", "Linear"]
        assert heard.steps == []
        torch.nn.Module.__call__ = ours  # as they found it
        assert torch.equal(model(x), by_hand(model, x))
    finally:
        torch.nn.Module.__call__ = ORIGINAL


def test_each_thread_has_its_own_steps(calls: Calls, heard: Heard) -> None:
    model, x = Model(), torch.ones(2, 4)
    inside = threading.Barrier(3)

    class Waits(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            inside.wait(10)
            return self.model(x)

    waits = Waits()
    threads = [threading.Thread(target=waits, args=(x,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard.steps == ["Waits"] * 3
    assert heard.open == 0


def test_a_step_that_is_no_module_call_holds_those_in_it(calls: Calls, heard: Heard) -> None:
    here = threading.get_ident()
    assert calls.enter(here)
    assert not calls.enter(here)
    Model()(torch.ones(2, 4))
    assert heard.steps == []
    calls.leave(here)
    Model()(torch.ones(2, 4))
    assert heard.steps == ["Model"]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracers_and_exporters_see_the_model_alone(calls: Calls, heard: Heard, narrow: bool) -> None:
    """torch.fx, which puts a hook of its own there; torch.jit; torch.export: same graphs, and no steps."""
    x = torch.ones(2, 4)

    def graphs() -> list[str]:
        return [
            torch.fx.symbolic_trace(Flat()).code,
            re.sub(r"___torch_mangle_\d+\.", "", str(torch.jit.trace(Flat(), (x,)).inlined_graph)),
            str(torch.export.export(Flat(), (x,)).graph),
        ]

    calls.release(heard)
    plain = graphs()
    calls.want(heard)
    if narrow:
        Flat()(x)
        calls.narrow(heard)
        heard.steps.clear()
    assert graphs() == plain
    # Flat is called once by torch.jit.trace to check the trace, and by nobody else as a program would.
    assert set(heard.steps) <= {"Flat"}
    hook = vars(Flat)["__call__"] if narrow else torch.nn.Module.__dict__["__call__"]
    assert hook is not ORIGINAL
    heard.steps.clear()
    Flat()(x)
    assert heard.steps == ["Flat"]


class Flat(torch.nn.Module):  # type: ignore[misc]
    """A model that a tracer can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.two(self.one(x)))


def test_with_a_compiler_there_is_none(calls: Calls, heard: Heard) -> None:
    Model()(torch.ones(2, 4))
    calls.narrow(heard)
    calls.compiler_came()
    assert "__call__" not in vars(Model)
    assert not calls.want(Heard())


def test_a_listener_that_a_signal_handler_interrupts(calls: Calls) -> None:
    class Interrupted(Heard):
        def step_begins(self, *_: Any) -> None:
            raise KeyboardInterrupt

    calls.want(Interrupted())
    for _ in range(2):  # the thread is not taken to be in a step for ever
        with pytest.raises(KeyboardInterrupt):
            Model()(torch.ones(2, 4))
