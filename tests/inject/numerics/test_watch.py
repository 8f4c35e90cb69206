"""The watch: the right module, each tensor once, nothing changed for the program."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import threading
import traceback
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import spikeprof
from spikeprof.profiler.inject.numerics import looks, scanners
from spikeprof.profiler.watching import Watch


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Any) -> Any:
        return x * self.factor


def modules_of(watched: Watch, step: int = 0, role: str = "output") -> list[str]:
    return [row["module"] for row in watched.stats() if row["step"] == step and row["role"] == role]


def bad_modules(watched: Watch, step: int) -> list[str]:
    return [r["module"] for r in watched.stats() if r["step"] == step and r["nan_count"] + r["inf_count"]]


def test_the_first_bad_module_is_named_at_the_step(way: str) -> None:
    model = nn.Sequential(Scaled(2.0), Scaled(100.0), Scaled(1.0), Scaled(0.5))
    with spikeprof.watch(model) as watched:
        for size in (1.0, 300.0, 400.0):
            model(torch.full((3, 4), size, dtype=torch.float16))
    assert bad_modules(watched, 0) == bad_modules(watched, 1) == []
    assert bad_modules(watched, 2) == ["1", "2", "3"]
    rows = {row["module"]: row for row in watched.stats() if row["step"] == 1}
    assert rows["1"]["amax_value"] == 60000.0
    assert rows["1"]["elements_count"] == 12
    assert rows["0"]["class_name"] == "Scaled"


def test_an_output_that_parents_hand_on_is_scanned_once(way: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity(), Scaled(2.0)), nn.Identity(), nn.Dropout(0.5)).eval()
    with spikeprof.watch(model) as watched, torch.inference_mode():
        model(torch.ones(4))
    assert modules_of(watched) == ["0.1"]  # what an Identity hands on is its input


def test_a_module_that_writes_into_its_input_is_told_from_the_one_before(way: str) -> None:
    model = nn.Sequential(Scaled(-1.0), nn.ReLU(inplace=True))
    with spikeprof.watch(model) as watched, torch.inference_mode():
        for _ in range(2):
            model(torch.tensor([1.0, -2.0]))
    zeros = {row["module"]: row["zero_count"] for row in watched.stats() if row["step"] == 1}
    assert zeros == {"0": 0, "1": 1}


def test_what_was_written_again_before_its_scan_is_told(
    interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled(1.0)

        def forward(self, x: Any) -> Any:
            made = self.inner(x)
            made.add_(1.0)
            return made * 2

    make = lambda device, clock, note: scanners.TritonScanner(torch, device, interpreted)  # noqa: E731
    monkeypatch.setattr(looks, "scanner_for", make)
    model = Adds()
    with spikeprof.watch(model) as watched, torch.no_grad():
        model(torch.ones(3))
    assert [(r["module"], r["scanned"]) for r in watched.stats()] == [("inner", "changed"), ("", "later")]


@dataclass
class Output:
    logits: Any
    extra: Any = None


def test_nested_outputs_are_followed_and_others_named(way: str) -> None:
    class Nested(nn.Module):
        def forward(self, x: Any) -> Any:
            return {"a": (x + 1, [x + 2, None]), "b": Output(x + 3)}

    class Nothing(nn.Module):
        def forward(self, x: Any) -> Any:
            return None

    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.to_sparse(), x.to("meta"), torch.arange(3), torch.ones(2, dtype=torch.complex64)

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nested, self.nothing, self.odd = Nested(), Nothing(), Odd()

        def forward(self, x: Any) -> Any:
            self.nothing(x)
            self.odd(x)
            return self.nested(x)

    model = All()
    with spikeprof.watch(model) as watched:
        model(torch.zeros(2))
    assert [(r["module"], r["amax_value"]) for r in watched.stats()] == [
        ("nested", 1.0),
        ("nested", 2.0),
        ("nested", 3.0),
    ]
    assert sorted(watched.unchecked) == [
        ("nothing", "its output holds no tensor: NoneType"),
        ("odd", "dtype complex64"),
        ("odd", "dtype int64"),
        ("odd", "layout torch.sparse_coo"),
        ("odd", "on device meta"),
    ]


def test_an_output_whose_memory_the_program_gave_up_is_not_read(way: str) -> None:
    class Frees(nn.Module):
        def forward(self, tensor: Any) -> Any:
            made = tensor + 1
            made.untyped_storage().resize_(0)
            return made

    model = nn.ModuleDict({"frees": Frees(), "adds": nn.Linear(4, 4)})
    model.forward = lambda tensor: (model["frees"](tensor), model["adds"](tensor))[1]  # type: ignore[method-assign]
    with torch.no_grad(), spikeprof.watch(model) as watched:
        for _ in range(3):
            model(torch.ones(2, 4))
    assert {(row["step"], row["module"]) for row in watched.stats()} == {(step, "adds") for step in range(3)}
    assert watched.unchecked == [("frees", "a tensor without memory")]


def test_patterns_steps_and_roles(way: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model.forward = lambda x: model["b"](model["a"](x))  # type: ignore[method-assign]
    model["b"].weight = model["a"].weight  # tied
    with spikeprof.watch(model, every=3, modules=("a", "b"), roles=("output", "input", "weight")) as watched:
        for _ in range(7):
            model(torch.ones(1, 2))
    rows = watched.stats()
    assert sorted({row["step"] for row in rows}) == [0, 3, 6]
    assert modules_of(watched, 3) == ["a", "b"]
    assert modules_of(watched, 3, "input") == ["a"]  # b's is a's output
    assert modules_of(watched, 0, "weight") == ["a.weight", "a.bias", "b.bias"]
    assert modules_of(watched, 3, "weight") == []


def test_models_whose_leading_dimension_is_no_batch_are_told() -> None:
    for batch_first, told in ((False, [0]), (True, [])):
        model = nn.TransformerEncoderLayer(4, 1, 4, batch_first=batch_first)
        with spikeprof.watch(model) as watched:
            assert [e["root"] for e in watched._told if e["ev"] == "numerics_tokens_first"] == told


def test_nothing_of_the_watch_is_left_and_results_are_the_same(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(3, 4)
    plain = model(x)
    before = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    watched = spikeprof.watch(model, every=2)
    results = [model(x) for _ in range(3)]
    results[0].sum().backward()
    watched.close()
    assert all(torch.equal(plain, result) for result in results)
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()] == before
    assert len(seen) == 4


def test_copies_and_pickles_of_a_watched_model_are_plain_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with spikeprof.watch(model) as watched:
        model(torch.ones(1, 2))
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for each in copies:
            assert each(torch.ones(1, 2)).shape == (1, 2)
    assert len(watched.stats()) == 1
    assert "spikeprof" not in pickle.dumps(copies[1]).decode("latin1")


def test_an_exception_of_the_model_passes_and_the_next_step_is_whole(way: str) -> None:
    class Fails(nn.Module):
        def forward(self, x: Any) -> Any:
            if x[0] > 1:
                raise KeyError("of the program")
            return x * 2

    model = nn.Sequential(Scaled(1.0), Fails())
    with spikeprof.watch(model) as watched:
        model(torch.ones(2))
        with pytest.raises(KeyError, match="of the program") as caught:
            model(torch.full((2,), 5.0))
        model(torch.ones(2))
    assert not any("spikeprof" in frame.filename for frame in traceback.extract_tb(caught.value.__traceback__))
    assert [modules_of(watched, step) for step in range(3)] == [["0", "1"], ["0"], ["0", "1"]]


def test_a_fault_of_ours_ends_the_watch_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("of ours")

    monkeypatch.setattr(looks, "scanner_for", broken)
    model = nn.Sequential(Scaled(2.0))
    watched = spikeprof.watch(model)
    assert model(torch.ones(1)).item() == 2.0
    assert watched.remarks == ["numerics are not checked any more: RuntimeError: of ours"]
    assert not model._forward_hooks
    assert not model[0]._forward_hooks


def test_steps_of_two_threads_at_once_are_counted_not_mixed() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Any) -> Any:
            if x[0] == 7:
                inside.set()
                assert go_on.wait(10)
            return x + 1

    model = nn.Sequential(Waits())
    with spikeprof.watch(model) as watched:
        thread = threading.Thread(target=model, args=(torch.full((1,), 7.0),))
        thread.start()
        assert inside.wait(10)
        model(torch.ones(1))
        go_on.set()
        thread.join()
    assert [(r["step"], r["amax_value"]) for r in watched.stats()] == [(0, 8.0)]
    assert watched._numerics is not None
    assert watched._numerics.concurrent == 1


def test_of_a_compiled_model_the_output_is_checked_and_nothing_recompiles() -> None:
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    whole = nn.Sequential(Scaled(1.0), compiled, Scaled(2.0))
    with torch.no_grad(), spikeprof.watch(whole) as watched:
        for value in (1.0, 1.0, math.nan):
            whole(torch.full((2, 4), value))
    assert bad_modules(watched, 2) == ["0", "1", "2"]
    assert [module for module, why in watched.unchecked if "compiled" in why] == ["1._orig_mod"]
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not dynamo.utils.counters["graph_break"]
    assert not model._forward_hooks
    assert not model[0]._forward_hooks


def test_what_is_no_module_or_role_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        spikeprof.watch([])
    with pytest.raises(ValueError, match="moments"):
        spikeprof.watch(Scaled(1.0), roles=("moments",))


def test_gradients_are_seen_in_the_order_of_the_backward_pass(way: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Scaled(2.0))
    with spikeprof.watch(model, roles=("output", "gradient")) as watched:
        for factor in (1.0, math.inf):
            (model(torch.ones(2, 3)).sum() * factor).backward()
    rows = watched.stats()
    assert [(r["step"], r["module"]) for r in rows if r["role"] == "gradient"] == [
        (step, module) for step in (0, 1) for module in ("2", "1", "0")
    ]
    found = {(r["step"], r["module"]): (r["amax_value"], r["inf_count"]) for r in rows if r["role"] == "gradient"}
    assert found[0, "2"] == (1.0, 0)
    assert found[0, "1"] == (2.0, 0)
    assert found[1, "2"] == (None, 6)


def test_a_device_that_is_used_late_numbers_steps_as_the_others_do(way: str) -> None:
    model = nn.Sequential(Scaled(1.0))
    with spikeprof.watch(model) as watched:
        for device in ("meta", "meta", "cpu", "cpu"):  # nothing can be scanned on the first
            model(torch.ones(1, device=device))
    assert [row["step"] for row in watched.stats()] == [2, 3]


def test_a_tensor_that_no_module_gives_can_be_looked_at(way: str) -> None:
    pages = torch.tensor([0x00, 0xF1, 0x2F], dtype=torch.uint8)
    model = nn.Sequential(Scaled(1.0))
    with spikeprof.watch(model) as watched:
        model(torch.ones(1))
        for _ in range(2):
            watched.look("layers.0.keys", pages, dtype="int4")
        watched.look("odd", torch.ones(3), dtype="int4")
    found = [r for r in watched.stats() if r["role"] == "kv"]
    assert [(r["module"], r["dtype"], r["elements_count"], r["saturated_count"]) for r in found] == [
        ("layers.0.keys", "int4", 6, 4)
    ] * 2
    assert watched.unchecked == [("odd", "dtype int4")]


def looked_at(*args: Any, **scales: Any) -> list[tuple[str, float | None, str]]:
    model = nn.Sequential(Scaled(1.0))
    with spikeprof.watch(model) as watched:
        model(torch.ones(1))
        watched.look("pages", *args, **scales)
        assert not watched.remarks
    return [(r["role"], r["real_amax_value"], r["real_dtype"]) for r in watched.stats()[1:]]


def test_codes_with_a_scale_are_told_in_real_numbers(way: str) -> None:
    codes = torch.tensor([[-128, 3], [127, 0]], dtype=torch.int8)
    assert looked_at(codes) == [("kv", None, "")]
    assert looked_at(codes, scale=2) == [("kv", 256.0, "float16"), ("scale", None, "")]
    scale = torch.tensor([0.5, -4.0])
    assert looked_at(codes, scale=scale) == [("kv", 512.0, "float32"), ("scale", None, "")]
    assert looked_at(codes, scale=scale.half(), zero_point=2)[0] == ("kv", 520.0, "float16")
    unsigned = codes.view(torch.uint8)
    zeros = torch.tensor([200, -100], dtype=torch.int32)  # codes reach 200 and 55, 100 and 355 from them
    assert looked_at(unsigned, scale=scale, zero_point=zeros) == [("kv", 4 * 355.0, "float32"), ("scale", None, "")]
    assert looked_at(unsigned, scale=0.5, zero_point=zeros)[0] == ("kv", 0.5 * 355, "float16")
    assert looked_at(unsigned, dtype="int4", scale=scale, zero_point=torch.tensor(8.0))[0] == ("kv", 32.0, "float32")


def test_a_scale_that_changes_is_that_of_its_step(way: str) -> None:
    codes = torch.tensor([-100, 3], dtype=torch.int8)
    model = nn.Sequential(Scaled(1.0))
    with spikeprof.watch(model) as watched:
        for scale in (1.0, 0.5, 2.0):
            model(torch.ones(1))
            watched.look("pages", codes, scale=scale)
    assert [r["real_amax_value"] for r in watched.stats() if r["role"] == "kv"] == [100.0, 50.0, 200.0]


def test_scales_that_do_not_fit_are_noted_or_refused() -> None:
    model = nn.Sequential(Scaled(1.0))
    with spikeprof.watch(model) as watched:
        watched.look("pages", torch.ones(4, dtype=torch.uint8), scale=torch.ones(3), zero_point=torch.ones(2))
        for wrong in ({"scale": "1"}, {"zero_point": 1}, {"scale": 1, "zero_point": [0]}):
            with pytest.raises(TypeError):
                watched.look("pages", torch.ones(4, dtype=torch.uint8), **wrong)
    assert [(r["module"], r["real_amax_value"]) for r in watched.stats()] == [("pages", None)]
    assert watched.unchecked[0][1].startswith("its scale: The size of tensor a (2) must match")


class Quantised(nn.Module):
    """A product with INT8 or FP8 weights, their scales kept as libraries keep them."""

    def __init__(self, name: str, dtype: Any, registered: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[64, 32]]).to(dtype), requires_grad=False)
        scale = torch.tensor([0.25], dtype=torch.bfloat16)
        if registered:
            self.register_buffer(name, scale)
        else:
            vars(self)[name] = scale

    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize(
    ("name", "dtype", "real"),
    [("weight_scale", torch.int8, 16.0), ("scales", torch.float8_e4m3fn, 16.0), ("bias_scale", torch.int8, None)],
)
def test_scales_beside_quantised_weights_are_found(
    way: str, name: str, dtype: Any, real: float | None, registered: bool
) -> None:
    model = nn.Sequential(Quantised(name, dtype, registered))
    with spikeprof.watch(model, roles=("weight",)) as watched:
        model(torch.ones(1))
    rows = {row["module"]: row for row in watched.stats() if row["role"] == "weight"}
    assert rows["0.weight"]["real_amax_value"] == real
    assert rows["0.weight"]["real_dtype"] == ("bfloat16" if real else "")


@pytest.mark.parametrize("bits", [8, 4])
def test_pages_of_the_engine_stand_for_no_more_than_is_told(way: str, bits: int) -> None:
    from spikeprof.kernels.cache import dequantise, quantise

    torch.manual_seed(0)
    stored = quantise(torch.randn(5, 2, 64) * torch.tensor([1.0, 30.0])[:, None], bits)
    real = dequantise(stored, torch.float32).abs().max().item()
    format_of = {8: "", 4: "int4"}[bits]
    (pages, _) = looked_at(stored.values, dtype=format_of, scale=stored.scale, zero_point=stored.zero)
    assert pages[2] == "float16"
    assert pages[1] is not None
    assert real <= pages[1] < 1.05 * real


class GivesTuples(nn.Module):
    """Hands its input on in a tuple, changed in place."""

    def forward(self, x: Any) -> Any:
        return (x.add_(1),)


class InTuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.last = Scaled(2.0), GivesTuples(), Scaled(1.0)

    def forward(self, x: Any) -> Any:
        return self.last(self.pair(self.first(x))[0])


@pytest.mark.parametrize("every", [1, 2])
def test_a_module_may_hand_on_what_it_took_in_a_tuple(way: str, every: int) -> None:
    model = InTuples()
    with torch.no_grad(), spikeprof.watch(model, every=every) as watched:
        for _ in range(5):
            model(torch.ones(2, 4))
    assert watched.remarks == []
    for step in range(0, 5, every):
        assert modules_of(watched, step) == ["first", "pair", "last"]
        amax = {row["module"]: row["amax_value"] for row in watched.stats() if row["step"] == step}
        if step:  # that it writes into what it takes is learned in the first
            assert amax == {"first": 2.0, "pair": 3.0, "last": 3.0}


class Exponential(nn.Module):
    def forward(self, x: Any, scale: Any) -> Any:
        return x * 2, (x * scale).exp()


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Exponential()

    def forward(self, x: Any, scale: Any) -> Any:
        one, other = self.inner(x, scale)
        return one + other


@pytest.mark.parametrize("every", [1, 2])
def test_what_a_module_of_two_outputs_took_is_kept_whole(every: int) -> None:
    model = Adds()
    with torch.no_grad(), spikeprof.watch(model, every=every) as watched:
        for step in range(6):
            model(torch.ones(2, 4), torch.tensor(1000.0 if step == 4 else 1.0))
        found = watched.bisect()
    assert found is not None
    assert (found["step"], found["module"], found["operator"], found["exact"]) == (4, "inner", "aten::exp", True)
    assert [one["amax"] for one in found["taken"]] == [1.0, 1000.0]


def test_a_program_may_wrap_the_hooks_that_it_finds() -> None:
    """functools takes a plain ``partial`` apart: what is left would be pickled, and copied, by its insides."""
    model = nn.Sequential(Scaled(2.0))
    with spikeprof.watch(model, every=2) as watched:
        model(torch.ones(1))
        hooks = model[0]._forward_hooks
        for key in hooks:
            hooks[key] = functools.partial(hooks[key])
        copied = pickle.loads(pickle.dumps(model))
        copied(torch.ones(1))
        copy.deepcopy(model)(torch.ones(1))
    assert [row["module"] for row in watched.stats()] == ["0"]
