"""Inputs in CUDA graphs: the kernel that keeps them, and what is known of them in Python; in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import spikeprof
from spikeprof.profiler.inject.numerics import graph_inputs, graph_store, looks, scanners
from spikeprof.profiler.inject.numerics.graph_store import Call, Store, span
from spikeprof.profiler.inject.numerics.places import Place
from spikeprof.profiler.watching import Watch

PLACE = Place(0, "a", "A", "output")


@pytest.fixture
def keeper(kernels: ModuleType) -> ModuleType:
    """The kernel, as it runs here."""
    import importlib

    return importlib.import_module(f"{graph_inputs.__package__}.keep_triton")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, keeper: ModuleType) -> None:
    """Few programs: each takes the interpreter a while."""
    monkeypatch.setattr(keeper, "PROGRAMS", 2)


class Lab:
    """A store, and the state of a scanner whose steps are told by hand."""

    def __init__(self, device: Any, keeper: ModuleType) -> None:
        self.state = torch.tensor([0, 0, 0, 0], dtype=torch.int64, device=device)
        self.store = Store(torch, device, keeper, self.state)
        self.device, self.keeper = device, keeper

    def step(self, number: int, bad: int | None = None) -> None:
        self.state[0] = number
        if bad is not None:
            self.state[self.keeper.BAD_WORD] = (number + 1) << 32 | self.keeper.LAST_ORDER - bad

    def call(self, *tensors: Any) -> Call:
        call = Call("a", 0)
        call.tensors = [(each, each._version) for each in tensors]
        call.stands = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        call.nbytes = sum(-(-span(each) // 16) * 16 for each in tensors)
        call.args = tuple(call.stands)
        return call

    def untouched(self) -> bool:
        return not self.store.kept.any() and not self.store.buffer.any()


@pytest.fixture
def lab(device: Any, keeper: ModuleType, few: None) -> Lab:
    return Lab(device, keeper)


def numbers(device: Any, count: int = 600) -> Any:
    return torch.arange(count, dtype=torch.float16, device=device)


def test_while_all_is_fine_nothing_is_copied(lab: Lab) -> None:
    call = lab.call(numbers(lab.device))
    lab.step(3)
    lab.store.add(0, [(0, PLACE, call, None)], 0)
    assert lab.untouched()
    lab.step(4, bad=0)
    lab.step(5)  # that was a step ago
    lab.store._launch(0, 0, 1, 0)
    assert lab.untouched()
    assert lab.store.found() is None


def test_the_inputs_of_the_first_bad_scan_are_kept_and_later_ones_are_not(lab: Lab) -> None:
    x, y = numbers(lab.device), numbers(lab.device) + 1
    calls = [lab.call(x), lab.call(y)]
    lab.step(3, bad=11)
    lab.store.add(10, [(10, PLACE, calls[0], None), (11, PLACE, calls[1], None)], 0)
    found = lab.store.found()
    assert found is not None
    assert (found.step, found.order, found.place) == (3, 11, PLACE)
    y.zero_()
    assert found.own is not None
    assert torch.equal(found.own.args[0], numbers(lab.device) + 1)
    assert found.around is None
    lab.step(4, bad=10)
    lab.store._launch(0, 10, 2, 0)
    again = lab.store.found()
    assert again is not None
    assert (again.step, again.order) == (3, 11)


def test_a_bad_scan_of_another_launch_is_not_its_own(lab: Lab) -> None:
    call = lab.call(numbers(lab.device))
    lab.step(3, bad=9)
    lab.store.add(10, [(10, PLACE, call, None)], 0)
    lab.step(4, bad=11)
    lab.store._launch(0, 10, 1, 0)
    assert lab.untouched()


def test_scans_without_a_module_have_rows_of_nothing(lab: Lab) -> None:
    call = lab.call(numbers(lab.device))
    lab.step(0, bad=1)
    lab.store.add(0, [(0, PLACE, call, None), (2, PLACE, call, None)], 0)  # 1 was handed on by another
    assert lab.store.found() is None
    assert not lab.store.buffer.any()


@pytest.mark.parametrize("offset", [0, 1, 3, 4])
def test_tensors_of_all_alignments_dtypes_and_strides(lab: Lab, offset: int) -> None:
    own = [
        torch.arange(100, dtype=torch.int8, device=lab.device)[offset:],
        numbers(lab.device)[offset:],
        torch.arange(20.0, device=lab.device).reshape(4, 5)[:, :3],
        torch.arange(20.0, device=lab.device).reshape(4, 5).T,
        torch.tensor(2.5, device=lab.device).expand(3, 4),
        torch.empty(0, 2, device=lab.device),
    ]
    around = [torch.arange(7, dtype=torch.int64, device=lab.device)]
    lab.step(0, bad=0)
    lab.store.add(0, [(0, PLACE, lab.call(*own), lab.call(*around))], 0)
    found = lab.store.found()
    assert found is not None
    assert found.own is not None
    assert found.around is not None
    for given, kept in zip([*own, *around], [*found.own.args, *found.around.args], strict=True):
        assert torch.equal(given, kept)
        assert (given.stride(), given.dtype) == (kept.stride(), kept.dtype)


def test_what_was_written_to_meanwhile_is_not_kept(lab: Lab) -> None:
    x = numbers(lab.device)
    call = lab.call(x)
    x.add_(1)
    lab.step(0, bad=0)
    lab.store.add(0, [(0, PLACE, call, None)], 0)
    found = lab.store.found()
    assert found is not None
    assert found.own is None
    assert found.why == "what it takes was written to before it could be kept"


def test_both_are_kept_only_if_they_fit(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_store, "BYTES_MAX", 1200)
    lab.step(0, bad=0)
    lab.store.add(0, [(0, PLACE, lab.call(numbers(lab.device)), lab.call(numbers(lab.device)))], 0)  # 1,200 bytes each
    found = lab.store.found()
    assert found is not None
    assert found.own is not None
    assert found.around is None


def test_a_full_table_keeps_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_store, "ROWS_MAX", 1)
    lab.step(0, bad=1)
    call = lab.call(numbers(lab.device))
    lab.store.add(0, [(0, PLACE, call, None), (1, PLACE, call, None)], 0)
    assert lab.untouched()


# ---------------------------------------------------------------- a model in a capture


class Gate(nn.Module):
    def forward(self, x: Any, *, by: Any) -> Any:
        return x * by


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gates = nn.Linear(2, 2, bias=False), nn.ModuleList([Gate(), Gate()])
        nn.init.eye_(self.first.weight)
        self.norm = nn.LayerNorm(2, elementwise_affine=False)

    def forward(self, x: Any, by: Any, more: Any) -> Any:
        x = self.first(x)
        for gate in self.gates:
            x = gate(x, by=by)
        return self.norm(x + more)


Captured = Callable[..., Watch]


@pytest.fixture
def captured(
    monkeypatch: pytest.MonkeyPatch, kernels: ModuleType, keeper: ModuleType, few: None, device: Any
) -> Captured:
    """Runs a model once before a capture and, with other values, in one; launches run at once here."""
    make = lambda device, clock, note: scanners.TritonScanner(torch, device, kernels)  # noqa: E731
    monkeypatch.setattr(looks, "scanner_for", make)

    def run(model: nn.Module, before: tuple[Any, ...], within: tuple[Any, ...], **options: Any) -> Watch:
        watched = spikeprof.watch(model.to(device).half(), **options)
        numerics: Any = watched._numerics
        values = [tuple(torch.as_tensor(each, device=device).half() for each in both) for both in (before, within)]
        model(*values[0])
        ((number, scanner),) = numerics.looks.quick.items()
        numerics.graph_inputs.stores[number] = Store(torch, scanner.memory.device, keeper, scanner.memory.state)
        numerics.capture_began()
        model(*values[1])
        numerics.capture_ends()
        for each in values[1]:
            each.zero_()
        return watched

    return run


ONE = torch.ones(1, 2)


def test_a_module_in_a_graph_is_run_again_on_what_it_took(captured: Captured) -> None:
    model = Model()
    with captured(model, (ONE, 1.0, 0.0), (ONE * 30, 60.0, 0.0)) as watched:
        told = watched.bisect()
    assert told is not None
    # 30 * 60 * 60 = 108,000: the second gate, of 1,800 and 60
    assert (told["module"], told["step"], told["operator"], told["exact"]) == ("gates.1", 1, "aten::mul.Tensor", True)
    assert sorted(each["amax"] for each in told["inputs"]) == [60.0, 1800.0]
    assert sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules()) == 0
    assert watched.remarks == []


def test_what_lies_between_modules_in_a_graph_is_found_in_the_one_around(captured: Captured) -> None:
    model = Model()
    with captured(model, (ONE, 1.0, 0.0), (ONE * 30, 40.0, 6e4)) as watched:
        told = watched.bisect()
    assert told is not None
    # 30 * 40 * 40 = 48,000, and 60,000
    assert (told["module"], told["rerun"], told["operator"]) == ("norm", "", "aten::add.Tensor")
    assert told["inputs"][0]["amax"] == 48000.0
    assert told["exact"] is True


def test_a_healthy_graph_keeps_nothing(captured: Captured) -> None:
    with captured(Model(), (ONE, 1.0, 0.0), (ONE, 2.0, 0.0)) as watched:
        numerics: Any = watched._numerics
        (own,) = numerics.graph_inputs.stores.values()
        assert not own.kept.any()
        assert not own.buffer.any()
        assert numerics.graph_inputs._calls == {}
        assert watched.bisect() is None


def test_what_a_module_in_a_graph_takes_may_be_too_large(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_store, "BYTES_MAX", 0)
    model = Model()
    with captured(model, (ONE, 1.0, 0.0), (ONE * 30, 60.0, 0.0)) as watched:
        told = watched.bisect()
    assert told is not None
    assert "its inputs take more than 0 MiB" in told["why_not"]


def test_inputs_are_let_go_when_their_scans_were_launched(captured: Captured) -> None:
    with captured(Model(), (ONE, 1.0, 0.0), (ONE, 2.0, 0.0)) as watched:
        numerics: Any = watched._numerics
        (own,) = numerics.graph_inputs.stores.values()
        assert [call for call in own._called if call.tensors] == []
        assert numerics.looks.launched is None


def test_a_model_that_went_is_said_to_have_gone(captured: Captured) -> None:
    with captured(Model(), (ONE, 1.0, 0.0), (ONE * 30, 60.0, 0.0)) as watched:
        told = watched.bisect()
    assert told is not None
    assert told["why_not"] == "the model was gone by the end"
