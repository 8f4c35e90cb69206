"""A module run again, operator by operator: the right one named, nothing of the program's changed."""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from spikeprof.profiler.inject.numerics import bisect as bisecting
from spikeprof.profiler.inject.numerics import rerun
from spikeprof.profiler.inject.numerics.bisect import bisect
from spikeprof.profiler.inject.numerics.inputs import Input
from spikeprof.profiler.inject.numerics.mirror import Mirror, Refused

HERE = __file__


def again(module: nn.Module, *args: Any, autocast: Any = None, **kwargs: Any) -> dict[str, Any]:
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    return bisect(module, Input(args, kwargs, tensors, autocast, exact=True))


class Mlp(nn.Module):
    """exp of what a linear layer gives, and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), 0
        self.up.weight.data.copy_(torch.eye(2))
        self.down.weight.data.copy_(torch.eye(2))
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.seen.append(x)
        print("forward runs")
        return self.down(torch.exp(self.up(x)))  # LINE


LINE = 1 + next(at for at, text in enumerate(open(HERE, encoding="utf-8")) if text.endswith("# LINE\n"))  # noqa: PTH123, SIM115


def test_the_operator_its_line_its_inputs_and_what_came_out(capsys: pytest.CaptureFixture[str]) -> None:
    model = Mlp().half()
    # exp(12) = 162,755 is beyond 65,504, exp(2) and exp(1) are not.
    told = again(model, torch.tensor([[1.0, 2.0], [1.0, 12.0]], dtype=torch.float16))
    assert (told["operator"], told["file"], told["line"], told["function"]) == ("aten::exp", HERE, LINE, "forward")
    assert told["inputs"] == [{"shape": [2, 2], "dtype": "float16", "amax": 12.0, "nan": 0, "inf": 0}]
    assert told["output"] == {"shape": [2, 2], "dtype": "float16", "amax": 7.390625, "nan": 0, "inf": 1}
    assert (told["first_bad"], told["why_not"]) == (3, "")
    assert told["taken"] == told["inputs"]
    assert told["before"] >= 1  # the product
    # Nothing of it reached the program.
    assert (model.calls, model.seen) == (0, [])
    assert capsys.readouterr().out == ""


def test_an_input_that_does_not_overflow_is_said_to() -> None:
    assert again(Mlp(), torch.ones(1, 2))["why_not"].startswith("run again on the same input, it gave no bad value")


class Masked(nn.Module):
    def forward(self, scores: Any, mask: Any) -> Any:
        scores = scores.masked_fill(mask, -math.inf)
        return scores.softmax(-1) * 2


def test_a_row_that_is_masked_whole_blames_the_softmax_not_the_mask() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    told = again(Masked(), torch.ones(2, 2), mask)
    assert told["operator"] == "aten::_softmax"
    assert told["inputs"][0]["inf"] == 3
    assert (told["output"]["nan"], told["first_bad"]) == (2, 0)


def test_a_mask_that_does_no_harm_blames_nobody() -> None:
    assert "operator" not in again(Masked(), torch.ones(2, 2), torch.tensor([[True, False], [True, False]]))


class Added(nn.Module):
    def forward(self, scores: Any, mask: Any) -> Any:
        return (scores + mask).softmax(-1)


def test_a_mask_may_be_given() -> None:
    told = again(Added(), torch.ones(1, 2), torch.tensor([[-math.inf, -math.inf]]))
    assert told["operator"] == "aten::_softmax"


class Hidden(nn.Module):
    """0 / 0 that is masked out again, and an overflow that is not."""

    def forward(self, x: Any) -> Any:
        zero = x - x
        y = torch.nan_to_num(zero / zero)
        return y + x * 1e30


def test_what_was_masked_out_again_is_not_the_cause() -> None:
    assert again(Hidden(), torch.full((2,), 1e20))["operator"] == "aten::mul.Tensor"


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.view = self.total[:2]  # of the same memory

    def forward(self, x: Any) -> Any:
        self.total += x
        self.view.mul_(1e30).mul_(1e30)
        x.zero_()
        return self.total.clone()


def test_what_is_written_to_is_written_to_copies() -> None:
    module, x = InPlace(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    told = again(module, x)
    assert told["operator"] == "aten::mul_.Tensor"
    assert told["output"] == {"shape": [2], "dtype": "float32", "amax": None, "nan": 0, "inf": 2}
    assert module.total.tolist() == [0, 0, 0, 0]
    assert x.tolist() == [1, 2, 3, 4]
    assert again(module, x) == told


class Branching(nn.Module):
    def forward(self, x: Any) -> Any:
        y = x * 1e30
        return y * 2 if y.sum().item() > 0 else y


def test_a_value_that_the_host_needs_ends_it_but_what_came_before_counts() -> None:
    assert again(Branching(), torch.full((2,), 1e20))["operator"] == "aten::mul.Tensor"
    why = again(Branching(), torch.ones(2))["why_not"]
    assert why.startswith("the 2 operators before a value that is needed on the host (aten::_local_scalar_dense at ")
    assert why.endswith(" gave fine values")


class Kernel(nn.Module):
    """Takes the address of a tensor, as a kernel of the program's own does; catches whatever it can."""

    launched = 0

    def forward(self, x: Any) -> Any:
        y = x + 1
        try:
            y.data_ptr()
            Kernel.launched += 1
        except BaseException:
            pass
        return y * 2


def test_a_kernel_of_its_own_gets_no_address() -> None:
    why = again(Kernel(), torch.ones(2))["why_not"]
    assert "a kernel that is no operator of torch's at " in why
    assert Kernel.launched == 0


def test_statistics_that_a_batch_norm_keeps_stay_as_they_are() -> None:
    norm = nn.BatchNorm1d(2).train()
    told = again(norm, torch.full((4, 2), 3e38))  # whose squares do not fit
    assert told["operator"] == "aten::native_batch_norm"
    assert (norm.running_mean.tolist(), norm.running_var.tolist()) == ([0, 0], [1, 1])
    assert norm.num_batches_tracked.item() == 0


def test_operators_that_write_and_give_nothing() -> None:
    class Foreach(nn.Module):
        def forward(self, x: Any) -> Any:
            made = torch._foreach_mul([x, x], 1e30)
            torch._foreach_mul_(made, 1e30)
            return made[1]

    told = again(Foreach(), torch.ones(3))
    assert (told["operator"], told["output"]["inf"]) == ("aten::_foreach_mul_.Scalar", 3)


def test_complex_numbers_are_pairs() -> None:
    class Turned(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.view_as_real(torch.view_as_complex(x) * 1e30)

    told = again(Turned(), torch.tensor([[1.0, 0.0], [1.0, 1e10]]))
    assert (told["operator"], told["output"]["dtype"], told["first_bad"]) == ("aten::mul.Tensor", "complex64", 1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules(kind: type[nn.Module]) -> None:
    module = kind(2, 2, batch_first=True)
    for each in module.parameters():
        each.data.fill_(3e38)
    x = 9 * torch.tensor([[[1.0, -1.0], [-1.0, 1.0], [2.0, -1.0]]])
    assert module(x)[0].isnan().any()
    assert again(module, x)["operator"].startswith("aten::")


def test_memory_that_is_exchanged_ends_it() -> None:
    class Exchanges(nn.Module):
        def forward(self, x: Any) -> Any:
            y = torch.empty(0)
            y.set_(x.untyped_storage(), 0, (2,), (1,))
            return y * 1e30

    assert " aten::set_ at " in again(Exchanges(), torch.full((2,), 1e20))["why_not"]


def test_an_operator_of_another_library_is_not_called() -> None:
    library = torch.library.Library("spikeprof_tests", "DEF")
    library.define("talk(Tensor x) -> Tensor")
    called = []

    def talk(x: Any) -> Any:
        called.append(1)
        return x.clone()

    library.impl("talk", talk, "CompositeExplicitAutograd")
    module = nn.Module()
    module.forward = torch.ops.spikeprof_tests.talk  # type: ignore[method-assign]
    assert "an operator of its own, spikeprof_tests::talk" in again(module, torch.ones(2))["why_not"]
    assert called == []


class Random(nn.Module):
    def forward(self, x: Any) -> Any:
        random.random()
        return torch.rand_like(x) + x * 1e30 * 1e30


def test_generators_of_random_numbers_are_put_back() -> None:
    numpy = pytest.importorskip("numpy")
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    told = again(Random().train(), torch.ones(2))
    assert told["operator"] == "aten::mul.Tensor"
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]


class Logging(nn.Module):
    def forward(self, x: Any) -> Any:
        logging.getLogger("model").warning("a message")
        return x


def test_logs_are_not_written_twice(caplog: pytest.LogCaptureFixture) -> None:
    handle = logging.Logger.handle
    again(Logging(), torch.ones(1))
    assert caplog.records == []
    assert logging.Logger.handle is handle
    Logging()(torch.ones(1))
    assert len(caplog.records) == 1


def test_weights_and_inputs_that_were_bad_already_are_said() -> None:
    module = Mlp()
    assert again(module, torch.tensor([[math.nan, 1.0]]))["why_not"] == "what it takes was bad already"
    module.down.weight.data[0, 0] = math.nan
    assert again(module, torch.ones(1, 2))["why_not"] == "a weight or buffer of it was bad already"


def test_a_module_of_torch_is_one_operator() -> None:
    linear = nn.Linear(2, 2).half()
    linear.weight.data.fill_(60000)
    told = again(linear, torch.ones(1, 2).half())
    # 60,000 + 60,000 and a little
    assert (told["operator"], told["file"], told["line"]) == ("aten::addmm", "", 0)
    assert max(each["amax"] for each in told["inputs"]) == 60000
    assert told["output"]["inf"] == 2


def test_autocast_is_that_of_the_step() -> None:
    linear, x = nn.Linear(1, 1, bias=False), torch.tensor([[300.0]])
    linear.weight.data.fill_(300)
    assert "operator" not in again(linear, x)
    told = again(linear, x, autocast=("cpu", torch.float16))
    assert told["output"]["dtype"] == "float16"  # 90,000 does not fit
    assert "mm" in told["operator"]


@pytest.mark.parametrize("fault", ["norm", "linear"])
def test_an_encoder_layer_of_torch(fault: str) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    torch.manual_seed(0)
    if fault == "norm":
        layer.norm1.weight.data.fill_(3e38)
    else:
        layer.linear2.weight.data.fill_(3e38)
    fast = torch.backends.mha.get_fastpath_enabled()
    told = again(layer, torch.randn(1, 3, 8))
    assert told["operator"] == ("aten::native_layer_norm" if fault == "norm" else "aten::addmm")
    assert torch.backends.mha.get_fastpath_enabled() is fast


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        module = Mlp().half()
        assert again(module, torch.full((1, 2), 12.0).half())["operator"] == "aten::exp"
    assert again(module, torch.full((1, 2), 12.0).half())["operator"] == "aten::exp"


def test_memory_that_was_never_written_is_not_blamed() -> None:
    class Empty(nn.Module):
        def forward(self, x: Any) -> Any:
            y = torch.empty(1 << 16)
            y[:2] = x
            return y[:2] * 1e30

    torch.full((1 << 16,), math.nan)  # whose memory may come again
    assert again(Empty(), torch.full((2,), 1e20))["operator"] == "aten::mul.Tensor"


def test_hooks_of_the_program_are_not_run_and_said() -> None:
    module = Mlp()
    calls: list[Any] = []
    module.down.register_forward_hook(lambda *_: calls.append(1))
    assert again(module, torch.ones(1, 2))["why_not"] == "it cannot be run again: hooks of the program's own run in it"
    assert calls == []


def test_a_compiled_module_is_refused() -> None:
    module = Mlp()
    module.up._compiled_call_impl = lambda *_: None
    assert again(module, torch.ones(1, 2))["why_not"] == "it cannot be run again: compiled by torch.compile"


def test_time_and_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bisecting, "SECONDS_MAX", 0.0)
    assert "the end of its time" in again(Mlp(), torch.ones(1, 2))["why_not"]
    monkeypatch.setattr(bisecting, "SECONDS_MAX", 5.0)
    monkeypatch.setattr(rerun, "BYTES_MAX", 15)
    assert "that it holds" in again(Mlp(), torch.ones(1, 2))["why_not"]


def test_a_fault_while_it_runs_is_a_reason() -> None:
    class Raises(nn.Module):
        def forward(self, x: Any) -> Any:
            raise ZeroDivisionError("no\nmore")

    why = "what cannot be run without data, after its begin: ZeroDivisionError: no"
    assert again(Raises(), torch.ones(1))["why_not"] == f"the 0 operators before {why} gave fine values"


def test_a_transformer_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().half()
    model.model.layers[1].mlp.up_proj.weight.data.fill_(60000)
    kept: list[Any] = []
    layer = model.model.layers[1]
    handle = layer.register_forward_pre_hook(lambda _, args, kwargs: kept.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(6)[None], use_cache=True)
    handle.remove()
    told = again(layer, *kept[0][0], **kept[0][1])
    assert told["operator"] in ("aten::mm", "aten::addmm", "aten::mul.Tensor")
    assert told["output"]["shape"] in ([6, 32], [1, 6, 32])


def test_what_functions_remember_is_copied_as_modules_are() -> None:
    """As attention that writes into a cache: a function around tensors and lists, handed on by the caller."""
    pages, lengths = torch.zeros(4), [0]

    def attend(x: Any) -> Any:
        lengths[0] += 1
        pages[:2] = x
        return attend.scale * pages * 1e30  # type: ignore[attr-defined]

    attend.scale = 1.0  # type: ignore[attr-defined]

    class Attention(nn.Module):
        def forward(self, x: Any, by: Any) -> Any:
            return by(x)

    told = again(Attention(), torch.full((2,), 1e20), by=attend)
    assert (told["operator"], told["function"]) == ("aten::mul.Tensor", "attend")
    assert (pages.tolist(), lengths) == ([0, 0, 0, 0], [0])


class Chain(nn.Module):
    """Products one after the other, some masked out again right away."""

    def __init__(self, factors: list[tuple[float, bool]]) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Any) -> Any:
        for factor, masked in self.factors:
            x = x * factor
            if masked:
                x = x.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)
        return x


@given(
    st.lists(st.tuples(st.sampled_from([0.25, 1.0, 3.0, 40.0, 300.0]), st.booleans()), min_size=1, max_size=8),
    st.floats(1.0, 100.0),
)
@settings(max_examples=60, deadline=None)
def test_the_first_product_that_stays_too_large_is_named(factors: list[tuple[float, bool]], first: float) -> None:
    """Against the same in float64: the last product that went beyond FP16 from a value within, and was not masked."""
    x = float(torch.tensor(first, dtype=torch.float16))
    number, cause = 0, None
    for factor, masked in factors:
        y = float(torch.tensor(x * factor, dtype=torch.float64).half())
        if math.isinf(y) and not math.isinf(x):
            cause = number
        number += 1
        if masked:
            y, cause = (1.0, None) if math.isinf(y) else (y, cause)
            number += 1
        x = y
    told = again(Chain(factors), torch.tensor([first]).half())
    if cause is None:
        assert "operator" not in told
    else:
        assert (told["operator"], told["before"], told["first_bad"]) == ("aten::mul.Tensor", cause, 0)


# ---------------------------------------------------------------- mirrors


class Cache:
    def __init__(self, keys: Any) -> None:
        self.keys, self.count, self.self = keys, 0, self


class Slotted:
    __slots__ = ("__private", "keys")

    def __init__(self, keys: Any) -> None:
        self.keys, self.__private = keys, [keys]

    @property
    def private(self) -> Any:
        return self.__private


def test_a_mirror_keeps_what_was_one_thing_one_thing() -> None:
    x = torch.ones(2)
    cache = Cache(x)
    made = Mirror(lambda tensor: tensor.clone()).of({"a": [x, (x, 3)], "cache": cache, "other": cache})
    assert made["a"][0] is made["a"][1][0] is made["cache"].keys is not x
    assert made["cache"] is made["other"] is made["cache"].self is not cache
    made["cache"].count = 7
    assert cache.count == 0


def test_slots_are_attributes() -> None:
    class Module(nn.Module):
        __slots__ = ("by",)

        def forward(self, x: Any) -> Any:
            return x * self.by * self.by

    module = Module()
    object.__setattr__(module, "by", 1e30)
    assert again(module, torch.ones(1))["before"] == 1
    made = Mirror(lambda tensor: tensor + 1).of(Slotted(torch.zeros(1)))
    assert made.keys.tolist() == made.private[0].tolist() == [1]


def test_what_python_cannot_see_into_is_shared() -> None:
    class Closes:
        closed = 0

        def __del__(self) -> None:
            Closes.closed += 1

    kept = [Closes(), random.Random(1), slice(1, 2)]
    made = Mirror(lambda tensor: tensor).of(kept)
    assert all(one is other for one, other in zip(kept, made, strict=True))
    del made
    assert Closes.closed == 0


@pytest.mark.parametrize(
    "value", [nn.Linear(1, 1), nn.Buffer(torch.ones(1)).as_subclass(type("Own", (torch.Tensor,), {}))]
)
def test_modules_and_tensors_of_other_classes_are_refused_among_inputs(value: Any) -> None:
    with pytest.raises(Refused):
        Mirror(lambda tensor: tensor).of([value])
