"""What programs do with a model beside calling it, watched: nothing of it changes, and what is not seen is told."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spikeprof
from spikeprof.profiler.inject.numerics import bisect, direct, roots
from spikeprof.profiler.watching import Watch

SOURCE = Path(__file__).resolve().parents[3] / "src"


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where nobody compiles: other tests do."""
    monkeypatch.setattr(direct, "_COMPILER", "a module that nobody has")
    monkeypatch.setattr(direct, "_turns", 0)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Any) -> Any:
        return x * self.weight


def model_of(*factors: float) -> Any:
    return nn.Sequential(*(Times(factor) for factor in factors))


def seen(watched: Watch, role: str = "output") -> list[tuple[int, str, float]]:
    return [(row["step"], row["module"], row["amax_value"]) for row in watched.stats() if row["role"] == role]


def reasons(watched: Watch) -> dict[str, str]:
    return {path: why.partition(":")[0] for path, why in watched.unchecked}


# -- others who look at what torch does -----------------------------------------------------------


def operators(run: Callable[[], object]) -> list[str]:
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Counts(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(str(func))
            return func(*args, **(kwargs or {}))

    with Counts():
        run()
    return found


def functions(run: Callable[[], object]) -> list[str]:
    from torch.overrides import TorchFunctionMode

    found = []

    class Counts(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Counts():
        run()
    return found


def nodes(run: Callable[[], Any]) -> list[str]:
    from torch.fx.experimental.proxy_tensor import make_fx

    return [str(node.target) for node in make_fx(lambda x: run())(torch.ones(1)).graph.nodes]


def traced(run: Callable[[], Any]) -> list[str]:
    class Runs(nn.Module):
        def forward(self, x: Any) -> Any:
            return run()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit as a whole
        graph = torch.jit.trace(Runs(), torch.ones(1), check_trace=False).inlined_graph
    return [str(node.kind()) for node in graph.nodes()]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("observed", [operators, functions, nodes, traced])
def test_modes_and_tracers_of_the_program_see_nothing_of_ours(
    observed: Callable[[Callable[[], Any]], list[str]], every: int
) -> None:
    model = model_of(2.0, 3.0).requires_grad_(False)  # else none of it could be a constant of a trace
    roles = ("output", "input", "weight")
    plain = observed(lambda: model(torch.ones(2)))
    assert plain
    with spikeprof.watch(model, every=every, roles=roles) as watched:
        assert observed(lambda: model(torch.ones(2))) == plain
    assert not watched.remarks
    if observed is traced:
        assert reasons(watched)[""] == "calls that torch.jit.trace recorded"
    else:
        assert seen(watched) == [(0, "0", 2.0), (0, "1", 6.0)]


def test_fused_operators_are_taken_as_without_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True).eval()
    calls = []
    fused = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(1) or fused(*args))
    with spikeprof.watch(model) as watched, torch.inference_mode():
        model(torch.ones(1, 2, 4))
    assert calls == [1]
    assert reasons(watched)["linear1"] == "no call of it was seen"
    assert [name for _, name, _ in seen(watched)] == [""]


@pytest.mark.parametrize("every", [1, 2])
def test_torch_jit_scripts_a_model_that_is_watched(every: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = torch.jit._recursive.create_script_module
    with spikeprof.watch(model, every=every) as watched, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model(torch.ones(1, 2))
        hooks = [list(module._forward_hooks) for module in model.modules()]
        scripted = torch.jit.script(model)
        torch.jit.script(copy.deepcopy(model))
        assert [list(module._forward_hooks) for module in model.modules()] == hooks
        assert torch.equal(scripted(torch.ones(1, 2)), model(torch.ones(1, 2)))
        with spikeprof.watch(scripted) as other:
            scripted(torch.ones(1, 2))
    assert torch.jit._recursive.create_script_module is before
    assert not other.remarks
    assert reasons(other)[""].endswith(" takes no hooks")
    assert len(seen(watched)) == (4 if every == 1 else 2)


COMPILES = """
import sys
sys.path.insert(0, {source!r})
import torch, spikeprof
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
watched = spikeprof.watch(model)
x = torch.ones(1, 2)
expected = model(x) if {called} else None
{compile}
import torch._dynamo as dynamo
with torch.no_grad():
    for _ in range(2):
        assert expected is None or torch.equal(compiled(x), expected)
assert dynamo.utils.counters["stats"]["unique_graphs"] <= 1, dynamo.utils.counters
model2 = nn.Sequential(nn.Linear(2, 2))
watched.close()
assert any("compiler" in why for _, why in watched.unchecked), watched.unchecked
assert not hasattr(nn.Module._call_impl, "__wrapped__")
"""


@pytest.mark.parametrize(
    ("called", "compiles"),
    [
        (True, "compiled = torch.compile(model, backend='eager', fullgraph=True)"),
        (False, "model.compile(backend='eager', fullgraph=True); compiled = model; compiled(x)"),
    ],
)
def test_torch_compile_meets_nothing_of_ours(called: bool, compiles: str) -> None:
    program = COMPILES.format(source=str(SOURCE), called=called, compile=compiles)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


COMPILES_WITHIN = """
import sys
sys.path.insert(0, {source!r})
import torch, spikeprof
from torch import nn
from spikeprof.profiler.inject.numerics import given
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.step = 0
    def forward(self, x):
        self.step += 1
        if self.step == 3:
            self.inner = torch.compile(self.two, backend="eager", fullgraph=True)
        result = (self.two if self.step < 3 else self.inner)(self.one(x))
        self.hooks = [*self.one._forward_hooks.values(), *self.two._forward_hooks.values()]
        return result
model = Model()
plain = Model()
plain.load_state_dict(model.state_dict())
with torch.no_grad(), spikeprof.watch(model, every=2) as watched:
    for step in range(7):
        assert step > 1 or "torch._dynamo" not in sys.modules
        assert torch.equal(model(torch.ones(1, 2)), plain(torch.ones(1, 2)))
        if step in (2, 4, 6):
            assert [hook.func is given.careful for hook in model.hooks] == [True, True], model.hooks
import torch._dynamo as dynamo
assert not dynamo.utils.counters["graph_break"], dynamo.utils.counters
assert not watched.remarks, watched.remarks
assert {{row["step"] for row in watched.stats() if row["module"] == "one"}} == {{0, 2, 4, 6}}
"""


def test_a_compiler_that_is_loaded_in_a_watched_step_comes_upon_careful_hooks() -> None:
    subprocess.run([sys.executable, "-c", COMPILES_WITHIN.format(source=str(SOURCE))], check=True, timeout=120)


# -- tensors that cannot be scanned end no watch --------------------------------------------------


def test_what_torch_cannot_scan_is_told_and_the_rest_goes_on() -> None:
    class Nested(nn.Module):
        def forward(self, x: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a prototype
                return torch.nested.nested_tensor([x, x[:1]])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nested, self.last = Nested(), Times(3.0)

        def forward(self, x: Any) -> Any:
            if not torch._C._functorch.maybe_current_level():
                self.nested(x)
            return self.last(x)

    model = Both()
    with spikeprof.watch(model) as watched:
        model(torch.ones(2))
        torch.func.vmap(model)(torch.ones(3, 2))
        torch.func.vmap(model.last)(torch.ones(3, 2))
        model(torch.ones(2))
    assert not watched.remarks
    assert reasons(watched)["nested"] == "a nested tensor"
    assert reasons(watched)["last"] == "torch cannot scan it"
    assert [step for step, name, _ in seen(watched) if name == "last"] == [0, 2]


def test_parameters_without_a_size_yet_are_told() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with spikeprof.watch(model, roles=("output", "weight")) as watched:
        model(torch.ones(2, 2))
    assert not watched.remarks
    assert reasons(watched)["0.weight"] == "a tensor of class UninitializedParameter"
    assert len(seen(watched)) == 1


def test_nothing_is_asked_of_tensors_of_the_programs_own_classes() -> None:
    asked = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            raise NotImplementedError

    class Gives(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.as_subclass(Own)

    model = Gives()
    for roles in (("output",), ("output", "input", "gradient")):
        with spikeprof.watch(model, roles=roles) as watched:
            model(torch.ones(2))
        assert not watched.remarks
        assert reasons(watched) == {"": "a tensor of class Own"}
    assert asked == []


class Handler:
    """Of a signal; raises what the program uses to get out of a step that takes too long."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind, self.raised = kind, 0

    def __call__(self, *_: Any) -> None:
        self.raised += 1
        raise self.kind("too late")


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", [TimeoutError, RuntimeError])
def test_no_exception_of_a_signal_handler_is_lost(kind: type[Exception], every: int) -> None:
    model = model_of(*[1.0] * 20)
    handler, caught = Handler(kind), 0
    gc.collect()
    gc.disable()  # in what Python calls when objects go, of other tests, it would be lost, as anywhere
    before, timer = signal.signal(signal.SIGALRM, handler), signal.setitimer(signal.ITIMER_REAL, 0)
    watched = spikeprof.watch(model, every=every, roles=("output", "input"))
    try:
        for number in range(40):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.003 + number * 1e-4)
                until = time.monotonic() + 2
                while time.monotonic() < until:
                    model(torch.ones(1))
            except kind:
                caught += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        watched.close()
        gc.enable()
    assert caught == handler.raised == 40
    assert torch.is_grad_enabled()
    assert not watched.remarks
    assert watched._numerics is not None


# -- what is run again -----------------------------------------------------------------------------


class Effects(nn.Module):
    """Gives Inf, after something that is to happen once for each call of the program's."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.file = (folder / "open").open("a")
        self.numbers = iter(range(100))
        self.set, self.deque, self.array = set[int](), deque[int](), torch.zeros(3).numpy()
        self.generator = torch.Generator()

    def forward(self, x: Any) -> Any:
        return torch.exp(self.effect(x) * 1000)

    effect: Callable[[Any, Any], Any] = lambda self, x: x


def prints(self: Any, x: Any) -> Any:
    print("text")
    sys.stdout.buffer.write(b"bytes")
    os.write(1, b"file")
    assert sys.__stdout__ is not None
    sys.__stdout__.write("its own")
    return x


def collects(self: Any, x: Any) -> Any:
    self.set.add(len(self.set))
    self.deque.append(1)
    self.array += 1
    return x + torch.rand(1, generator=self.generator)


def writes(self: Any, x: Any) -> Any:
    (self.folder / "new").open("a").write("x")
    return x


def writes_on(self: Any, x: Any) -> Any:
    self.file.write("x")
    self.file.flush()
    return x


def counts(self: Any, x: Any) -> Any:
    return x + next(self.numbers)


def starts(self: Any, x: Any) -> Any:
    thread = threading.Thread(target=(self.folder / "thread").touch)
    thread.start()
    thread.join()
    return x


def leaves(self: Any, x: Any) -> Any:
    return x if type(x) is torch.Tensor else sys.exit(3)


def waits(self: Any, x: Any) -> Any:
    while type(x) is not torch.Tensor:
        time.sleep(0.01)
    return x


@pytest.mark.parametrize(
    ("effect", "why_not"),
    [
        (prints, ""), (collects, ""), (writes, "a file that it writes"), (writes_on, "a file that it uses"),
        (counts, "an iterator that it uses"), (starts, "a thread that it starts"), (leaves, "SystemExit: 3"),
        (waits, "the end of its time"),
    ],
)  # fmt: skip
def test_what_is_run_again_does_nothing_outside_of_it(
    effect: Any, why_not: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bisect, "SECONDS_MAX", 0.3 if effect is waits else 5.0)
    monkeypatch.setattr(Effects, "effect", effect)
    model = Effects(tmp_path)
    hook = sys.stdout, os.write, signal.getsignal(signal.SIGALRM), threading.Thread.start
    left, _ = signal.getitimer(signal.ITIMER_REAL)

    def state() -> object:
        generator = model.generator.get_state().tolist()
        files = {each.name: each.stat().st_size for each in tmp_path.iterdir() if each.name != "thread"}
        return [model.set, model.deque, model.array.tolist(), str(model.numbers.__reduce__()), generator, files]

    with spikeprof.watch(model) as watched, torch.no_grad():
        model(torch.ones(2))
        before, _ = str(state()), capfd.readouterr()
        (tmp_path / "thread").unlink(missing_ok=True)
        told = watched.bisect()
    assert told is not None
    assert why_not in told["why_not"]
    assert (told.get("operator") == "aten::exp") == (why_not == "")
    assert str(state()) == before
    assert not (tmp_path / "thread").exists()
    assert capfd.readouterr() == ("", "")
    assert (sys.stdout, os.write, signal.getsignal(signal.SIGALRM), threading.Thread.start) == hook
    assert left - 20 <= signal.getitimer(signal.ITIMER_REAL)[0] <= left
    model.file.close()


# -- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_a_model_that_calls_itself_is_in_one_step(every: int) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = Times(2.0), Times(3.0)

        def forward(self, x: Any, depth: int = 1) -> Any:
            x = self.down(x)
            return self.up(self(x, depth - 1) if depth else x)

    model = Recursive()
    with spikeprof.watch(model, every=every) as watched:
        for _ in range(2):
            model(torch.ones(1))
    names = [("down", 2.0), ("down", 4.0), ("up", 12.0), ("up", 36.0)]
    assert seen(watched) == [(step, *each) for step in range(0, 2, every) for each in names]


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Times(1.0)

    def forward(self, x: Any) -> Any:
        if self.inner(x) > 9:
            raise KeyboardInterrupt  # of which torch tells no hook
        return x


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_that_was_interrupted_hides_no_other_model_or_thread(every: int) -> None:
    model, other = Ends(), model_of(2.0)
    watched = spikeprof.watch(model, every=every)
    assert watched._numerics is not None
    watched._numerics.attach(other)
    with pytest.raises(KeyboardInterrupt):
        model(torch.full((1,), 50.0))
    other(torch.ones(1))
    with pytest.raises(KeyboardInterrupt):
        model(torch.full((1,), 50.0))
    if every == 1:
        thread = threading.Thread(target=other, args=(torch.full((1,), 2.0),))
        thread.start()
        thread.join()
    watched.close()
    assert watched._numerics.concurrent == 0
    assert [each for each in seen(watched) if each[1] == "0"] == [(1, "0", 2.0), (3, "0", 4.0)][: 3 - every]


@pytest.mark.parametrize("every", [1, 2])
def test_models_that_are_made_for_each_request_take_no_more_names(every: int) -> None:
    lasting = model_of(1.0)
    watched = spikeprof.watch(lasting, every=every, roles=("output", "input", "weight"))
    numerics = watched._numerics
    assert numerics is not None
    sizes = []
    for factor in (1.0, 2.0, 3.0, 4.0):
        model = model_of(factor, factor)
        numerics.attach(model)
        model(torch.ones(1))
        lasting(torch.ones(1))
        del model
        gc.collect()
        direct = numerics.direct
        sizes.append([len(each) for each in (
            numerics._roots, numerics._models, numerics.looks.places, direct._alive, direct._joined, direct.roots,
        )])  # fmt: skip
    assert sizes[1:] == [sizes[1]] * 3
    watched.close()
    assert [amax for _, name, amax in seen(watched) if name == "1"] == [1.0, 4.0, 9.0, 16.0]


def test_a_child_is_not_kept_waiting_by_a_thread_that_it_has_not() -> None:
    model = model_of(2.0)
    with spikeprof.watch(model) as watched, torch.no_grad():
        numerics = watched._numerics
        assert numerics is not None
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with numerics.lock:
                held.set()
                go_on.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(10)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            os._exit(0 if model(torch.ones(1)).item() == 2.0 else 1)
        _, status = os.waitpid(child, 0)
        go_on.set()
        thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_watch_that_another_thread_closes_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(1.0, 2.0)
    watched = spikeprof.watch(model, every=2, roles=("output", "input"))
    closes, switch = threading.Thread(target=watched.close), roots._switch

    def switched(hooks: Any, on: bool) -> None:
        hooks = list(hooks)
        if on and not closes.ident:  # it has some of them in, and is to put in the others
            closes.start()
            closes.join(0.1)
        switch(hooks, on)

    monkeypatch.setattr(roots, "_switch", switched)
    model(torch.ones(1))
    closes.join()
    assert not [each for each in model.modules() if each._forward_hooks or each._forward_pre_hooks]


# -- what nobody saw ------------------------------------------------------------------------------


class OwnCall(Times):
    def __call__(self, x: Any) -> Any:
        return self.forward(x)


@pytest.mark.parametrize("every", [1, 2])
def test_modules_whose_calls_were_not_seen_are_told(every: int) -> None:
    model = nn.Sequential(OwnCall(1.0), Times(2.0), nn.Identity(), nn.ModuleList([Times(4.0)]))
    model.forward = lambda x: model[1](model[0](x))
    with spikeprof.watch(model, every=every) as watched:
        for _ in range(3):
            model(torch.ones(1))
        model[1] = Times(3.0)
        model(torch.ones(1))
    never, late = "no call of it was seen", "it came into the model after that was called first"
    assert {path: why for path, why in reasons(watched).items() if path} == {"0": never, "3.0": never, "1": late}
    with spikeprof.watch(OwnCall(1.0), every=every) as watched:
        pass
    assert reasons(watched) == {"": never}


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    before = nn.Module._call_impl
    yield
    assert nn.Module._call_impl is before
