"""From a module that gives a bad value to the operator in it: the program's steps and ours, on the CPU."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from inject.harness import Lab
from inject.numerics.test_run import ACTIVATE
from torch import nn

import spikeprof
from spikeprof.analyzers.overflow import Overflow
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.inject.numerics import culprits, eager_inputs


class Gate(nn.Module):
    """A product of two things that it takes, one of them by keyword."""

    def forward(self, x: Any, *, by: Any = None) -> Any:
        return x if by is None else torch.mul(x, by)


class Model(nn.Module):
    """A gate, and a sum between it and a norm that no module makes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = Gate(), nn.LayerNorm(2, elementwise_affine=False)

    def forward(self, x: Any, by: Any, more: Any = 0.0) -> Any:
        y = self.gate(x, by=by)
        return self.norm(y + more)


def ones(size: float = 1.0) -> Any:
    return torch.tensor([[size, -size]], dtype=torch.float16)


def hooks_in(model: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


def steps(model: nn.Module, watched: Any, *sizes: float) -> None:
    """Steps in which the gate multiplies by these; what was scanned is looked at after each."""
    for size in sizes:
        model(ones(300.0), torch.tensor(size, dtype=torch.float16))
        watched.collect()


def test_a_fault_that_comes_back_is_kept_with_what_comes_by_keyword(way: str) -> None:
    model = Model()
    with spikeprof.watch(model) as watched:
        steps(model, watched, 1.0, 300.0, 1.0, 1.0, 300.0, 300.0, 1.0, 1.0)
        told = watched.bisect()
    assert told is not None
    assert (told["module"], told["step"], told["role"]) == ("gate", 1, "output")
    assert (told["operator"], told["function"], told["rerun"], told["exact"]) == (
        "aten::mul.Tensor", "forward", "gate", False,
    )  # fmt: skip
    # 300 * 300 = 90,000
    assert sorted(each["amax"] for each in told["inputs"]) == [300.0, 300.0]
    assert told["output"]["inf"] == 2
    assert Path(told["file"]).name == "test_first_bad.py"
    assert watched.remarks == []
    assert watched.bisect() is told, "it is run once"


def test_on_the_cpu_once_is_enough() -> None:
    class Square(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * x

    model = nn.Sequential(Square(), nn.Tanh())
    with spikeprof.watch(model) as watched:
        for size in (2.0, 300.0, 2.0):
            model(ones(size))
        told = watched.bisect()
    assert told is not None
    assert (told["operator"], told["module"], told["exact"]) == ("aten::mul.Tensor", "0", True)
    assert told["taken"] == [{"shape": [1, 2], "dtype": "float16", "amax": 300.0, "nan": 0, "inf": 0}]


def test_what_lies_between_two_modules_is_found_in_the_one_around_them(way: str) -> None:
    model = Model()
    with spikeprof.watch(model) as watched:
        for more in (0.0, 6e4, 0.0, 0.0, 6e4, 6e4, 0.0, 0.0):
            model(ones(300.0), torch.tensor(100.0, dtype=torch.float16), more)
            watched.collect()
        told = watched.bisect()
    assert told is not None
    # 30,000 + 60,000 does not fit; the norm is the first module to see it.
    assert (told["module"], told["rerun"]) == ("norm", "")
    assert (told["operator"], told["inputs"][0]["amax"]) == ("aten::add.Tensor", 30000.0)


def test_a_fault_that_does_not_come_back_is_said_to(way: str) -> None:
    model = Model()
    with spikeprof.watch(model) as watched:
        steps(model, watched, 1.0, 300.0, 1.0, 1.0, 1.0)
        told = watched.bisect()
    assert told is not None
    assert "operator" not in told
    assert "after it was noticed it gave no bad value from inputs that were fine" in told["why_not"]


def test_a_module_that_goes_on_taking_what_is_bad_is_said_to(way: str) -> None:
    """As where bad values stay in a cache: from the second time on it is their victim."""
    model = nn.Sequential(nn.Softplus())
    with torch.no_grad(), spikeprof.watch(model) as watched:
        for _ in range(4):
            model(ones(math.inf))
            watched.collect()
        told = watched.bisect()
    assert told is not None
    assert told["why_not"].endswith("steps after it was noticed, what it took was bad already"), told


def test_no_step_after_it() -> None:
    model = Model()
    with spikeprof.watch(model) as watched:
        steps(model, watched, 1.0, 300.0)
        told = watched.bisect()
    assert told is not None
    assert told["why_not"].endswith("no step that runs in Python came after it was noticed")


def test_nothing_bad_is_nothing_to_tell(way: str) -> None:
    model = Model()
    with spikeprof.watch(model) as watched:
        steps(model, watched, 1.0, 2.0)
        assert watched.bisect() is None


def test_hooks_are_there_only_while_they_are_needed(way: str) -> None:
    model = Model()
    with spikeprof.watch(model) as watched:
        steps(model, watched, 1.0)
        before = hooks_in(model)
        outputs = [model(ones(300.0), torch.tensor(s, dtype=torch.float16)) for s in (1.0, 2.0)]
        steps(model, watched, 300.0, 1.0, 1.0)
        assert hooks_in(model) > before
        steps(model, watched, 300.0, 300.0, 1.0, 1.0)
        assert hooks_in(model) == before
        again = [model(ones(300.0), torch.tensor(s, dtype=torch.float16)) for s in (1.0, 2.0)]
    assert all(torch.equal(one, other) for one, other in zip(outputs, again, strict=True))
    assert hooks_in(model) == 0


def test_inputs_that_are_too_large_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_inputs, "BYTES_MAX", 1)
    model = Model()
    with spikeprof.watch(model) as watched:
        steps(model, watched, 1.0, 300.0, 300.0, 300.0)
        told = watched.bisect()
    assert told is not None
    assert told["why_not"] == "its inputs take more than 0 MiB"
    assert hooks_in(model) == 0


def test_it_gives_up_after_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_inputs, "TRIES_MAX", 3)
    model = Model()
    with spikeprof.watch(model) as watched:
        steps(model, watched, 1.0)
        before = hooks_in(model)
        steps(model, watched, 300.0, *[1.0] * 6)
        assert hooks_in(model) == before


def test_inputs_are_copies_of_the_time() -> None:
    """The program writes into its tensors afterwards, as a decoder does."""
    model, x, by = Model(), ones(300.0), torch.tensor(1.0, dtype=torch.float16)
    with spikeprof.watch(model) as watched:
        for size in (1.0, 300.0, 1.0, 300.0, 300.0):
            by.fill_(size)
            model(x, by)
        x.zero_()
        by.zero_()
        told = watched.bisect()
    assert told is not None
    assert told["operator"] == "aten::mul.Tensor"
    assert x.tolist() == [[0, 0]]


def test_a_model_that_went_is_not_kept_alive_unless_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh()).half()
        with torch.no_grad():
            model[0].weight.fill_(60000.0)
        watched = spikeprof.watch(model)
        for _ in range(3):
            model(ones(1.0).abs() * 4)
        return watched, weakref.ref(model[0].weight)

    watched, weight = run()
    gc.collect()
    assert weight() is not None  # eight bytes
    told = watched.bisect()
    assert told is not None
    assert told["operator"] == "aten::mm"
    gc.collect()
    monkeypatch.setattr(culprits, "HELD_BYTES_MAX", 7)
    watched, weight = run()
    gc.collect()
    assert weight() is None
    assert watched.bisect()["why_not"] == "the model was gone by the end"


def test_bad_weights_and_gradients_have_no_operator() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    with spikeprof.watch(model, roles=("weight", "output")) as watched:
        model(torch.ones(1, 2))
        told = watched.bisect()
    assert told is not None
    assert told["role"] == "weight"
    assert told["why_not"] == "only of what modules give and take in their forward operators are run again"


def test_a_signal_handler_of_the_program_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a handler raises while inputs are copied goes to the program; the watch goes on."""
    model = Model()

    def clone(*_: Any) -> Any:
        monkeypatch.undo()
        raise KeyError("of a signal handler")

    with spikeprof.watch(model) as watched:
        steps(model, watched, 1.0, 300.0)
        monkeypatch.setattr(eager_inputs, "autocast_now", clone)
        with pytest.raises(KeyError, match="of a signal handler"):
            steps(model, watched, 1.0, 300.0)
        steps(model, watched, 1.0, 300.0)
        assert watched.bisect()["operator"] == "aten::mul.Tensor"


# ---------------------------------------------------------------- whole runs


@pytest.fixture
def real(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab with torch itself."""
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lab


PROGRAM = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.calls = nn.Linear(4, 4, bias=False), 0
        torch.nn.init.eye_(self.up.weight)

    def forward(self, x):
        self.calls += 1
        print("call", self.calls)
        return torch.exp(self.up(x))

def main():
    model = nn.Sequential(Block(), nn.Softmax(-1)).half()
    for step in range(6):
        model(torch.full((2, 4), 12.0 if step == 3 else 1.0).half())

with torch.no_grad():
    main()
sys.exit(5)
"""


def test_a_run_names_the_operator_and_leaves_the_program_as_it_is(real: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    run = real.record(ACTIVATE + PROGRAM, numerics_every=1)
    assert run.code == 5
    assert capfd.readouterr().out.splitlines() == [f"call {number}" for number in range(1, 7)]
    (row,) = run.trace.table("bad_operators").to_pylist()
    assert (row["module"], row["step"], row["op"], row["kept"]) == ("0", 3, "aten::exp", "first")
    assert (row["function"], row["why_not"], row["class_name"]) == ("forward", "", "Block")
    assert json.loads(row["inputs"]) == [{"shape": [2, 4], "dtype": "float16", "amax": 12.0, "nan": 0, "inf": 0}]
    result = run_one(run.trace, Overflow())
    (origin,) = [finding for finding in result.findings if finding.rule == "nan-origin"]
    assert origin.scope["operator"] == "aten::exp"
    assert str(origin.scope["line"]).endswith(f":{row['line']}")


def test_a_healthy_run_has_an_empty_table_and_loads_nothing_for_it(
    real: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    run = real.record(
        ACTIVATE
        + """
model = nn.Linear(2, 2)
for _ in range(3):
    model(torch.ones(1, 2))
ours = ("torch._dynamo", "numerics.watch", "numerics.bisect", "numerics.tape")
print([any(name.endswith(one) for name in sys.modules) for one in ours])
""",
        numerics_every=1,
    )
    assert run.code == 0
    assert capfd.readouterr().out == "[False, True, False, False]\n"
    assert run.trace.table("bad_operators").num_rows == 0


def test_a_compiled_model_has_no_operators_to_run() -> None:
    model = torch.compile(Gate(), backend="eager")
    with spikeprof.watch(model) as watched:
        for _ in range(3):
            model(ones(300.0), by=ones(300.0))
            watched.collect()
        told = watched.bisect()
    torch._dynamo.reset()
    assert told is not None
    assert told["module"] == ""
    assert "torch.compile" in told["why_not"]


def test_a_fault_while_inputs_are_kept_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        torch.testing.assert_close(1, 2)

    model = Model()
    with spikeprof.watch(model) as watched:
        monkeypatch.setattr(eager_inputs.EagerInputs, "_arm", fails)
        steps(model, watched, 1.0, 300.0, 1.0, 300.0)
        assert watched.remarks == []
        assert len(watched.stats()) == 4 * 2  # what the norm gives, the model hands on
    assert hooks_in(model) == 0


def test_the_re_run_is_no_step_of_the_program(real: Lab) -> None:
    """Only ever-new models: they are still looked for when the program ends."""
    run = real.record(
        ACTIVATE
        + """
class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        return self.inner(x) * x

model = nn.Sequential(Square(), nn.Tanh()).half()
for size in (1.0, 300.0, 1.0):
    model(torch.full((2, 2), size).half())
""",
        numerics_every=1,
    )
    assert run.code == 0
    (row,) = run.trace.table("bad_operators").to_pylist()
    assert (row["op"], row["step"], row["why_not"]) == ("aten::mul.Tensor", 1, "")
    stats = run.trace.table("tensor_stats").to_pylist()
    assert {each["module"] for each in stats} == {"0", "1"}
    assert len(stats) == 6
    assert run.trace.manifest.collectors["numerics"].state == "ok"
    assert run.trace.manifest.collectors["numerics"].reason == ""
