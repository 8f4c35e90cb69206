"""Rows of a batch that spoil others: by hand, by models that mix rows by mistake, and by models that may do so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from scanned import asked, bad, evidence, found, scan

from spikeprof.analyzers.derived.numerics_leak import leaks, rows_text
from spikeprof.analyzers.derived.numerics_scans import scans_of
from spikeprof.analyzers.overflow import Overflow

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `kernels`)")
nn = torch.nn


def rows(step: int, order: int, module: str, mask: int = 0, **more: Any) -> dict[str, Any]:
    """A scan of [4, tokens, hidden] in which the rows of ``mask`` are bad."""
    made = (bad if mask else scan)(step, order, module)
    return {**made, "class_name": "Block", "dimensions_count": 3, "rows_count": 4, "bad_rows": mask, **more}


def told(*scans: dict[str, Any], analyzer: Overflow | None = None) -> list[tuple[Any, ...]]:
    """(module, step, rows that turned bad, rows that were bad) of the findings."""
    return [
        (one.scope["module"], one.scope["step"], one.scope["victim_rows"], one.scope["poisoning_rows"])
        for one in found(asked(*scans, analyzer=analyzer), "leak")
    ]


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_rows_that_turn_bad_by_another_are_named_with_it() -> None:
    result = asked(
        rows(0, 0, "embed"), rows(0, 1, "a"), rows(1, 0, "embed"), rows(1, 1, "a", 0b0100), rows(1, 2, "b", 0b0100),
        rows(1, 3, "mean", 0b1111, amax_value=math.nan), rows(1, 4, "head", 0b1111, amax_value=math.nan),
    )  # fmt: skip
    (one,) = found(result, "leak")
    assert dict(one.scope) == {
        "module": "mean", "dtype": "float16", "step": 1, "victim_rows": "0 to 1, 3", "poisoning_rows": "2",
    }  # fmt: skip
    assert one.severity == "critical"
    seen = evidence(one)
    assert (seen["victim_rows_count"], seen["poisoning_rows_count"], seen["batch_rows_count"]) == (3, 1, 4)
    assert seen["headroom_before_bits"] == pytest.approx(math.log2(65504))
    assert result.tables["leaks"]["victim_rows"] == ["0 to 1, 3"]


def test_rows_that_go_bad_together_are_nobodys_victims() -> None:
    assert told(rows(0, 0, "a"), rows(0, 1, "b", 0b0011), rows(0, 2, "c", 0b0011)) == []
    assert told(rows(0, 0, "a", 0b1111), rows(0, 1, "b", 0b1111)) == []


def test_another_row_in_a_branch_beside_is_no_victim() -> None:
    assert told(rows(0, 0, "q", 0b0001), rows(0, 1, "k", 0b0010)) == []  # row 0 is fine in k


def test_close_to_the_limit_rows_may_overflow_by_themselves() -> None:
    (one,) = found(asked(rows(0, 0, "a", 1, amax_value=30000.0), rows(0, 1, "b", 3)), "leak")
    assert (one.severity, evidence(one)["headroom_before_bits"]) == ("warning", pytest.approx(1.1266, abs=1e-3))
    assert "by themselves" in one.recommendation
    (one,) = found(asked(rows(0, 0, "a", 1, dtype="float8_e5m2"), rows(0, 1, "b", 3)), "leak")
    assert (one.severity, "headroom_before_bits" in evidence(one)) == ("warning", False)


def test_a_module_that_keeps_rows_apart_and_took_them_fine_mixed_nothing() -> None:
    linear = {"class_name": "Linear"}
    taken = rows(0, 1, "proj", 1, role="input", **linear)
    assert told(rows(0, 0, "a", 1), taken, rows(0, 2, "proj", 3, **linear)) == []
    assert told(rows(0, 0, "a", 1), taken, rows(0, 2, "proj", 3)) == [("proj", 0, "1", "0")]
    (one,) = found(asked(rows(0, 0, "a", 1), rows(0, 1, "proj", 3, **linear)), "leak")
    assert one.severity == "warning"  # mixed before it, perhaps
    assert "output,input" in one.recommendation


def test_what_comes_back_from_a_cache_is_followed_over_steps() -> None:
    first = [rows(0, 0, "embed"), rows(0, 1, "attention", 0b0001)]
    assert told(*first, rows(1, 0, "embed"), rows(1, 1, "attention", 0b1001)) == [("attention", 1, "3", "0")]
    assert told(*first, rows(1, 0, "embed"), rows(1, 1, "attention", 0b1000)) == []  # the request moved
    assert told(*first, rows(1, 0, "embed"), rows(2, 1, "attention", 0b1001)) == []  # a step that was fine between
    other = {"rows_count": 5}
    assert told(*first, rows(1, 0, "embed", **other), rows(1, 1, "attention", 0b1001, **other)) == []
    assert told(*first, rows(1, 1, "attention", 0b1001, rank=1)) == []


def test_victims_stay_victims_and_are_told_once() -> None:
    later = [rows(step, order, f"m{order}", 1 if order == 0 else 3) for step in range(1, 5) for order in range(2)]
    result = asked(rows(0, 0, "m0", 1), rows(0, 1, "m1", 3), *later)
    (one,) = found(result, "leak")
    assert (one.scope["step"], evidence(one)["leak_steps_count"]) == (0, 1)


def test_only_rows_of_the_batch_count() -> None:
    leak = [rows(0, 0, "a", 1), rows(0, 1, "b", 3)]
    assert told(*leak) == [("b", 0, "1", "0")]
    for more in (
        {"dimensions_count": 2},
        {"rows_count": 1},
        {"role": "gradient"},
        {"role": "kv"},
        {"scanned": "changed"},
    ):
        assert told(*({**one, **more} for one in leak)) == [], more
    heads = [{**one, "rows_count": 8} for one in leak]
    batch = [rows(0, order, f"m{order}") for order in range(2, 5)]
    assert told(*heads, *batch) == []  # most tensors of the step have 4 rows


def test_the_limit_of_dimensions_is_an_option() -> None:
    flat = [{**one, "dimensions_count": 2} for one in (rows(0, 0, "a", 1), rows(0, 1, "b", 3))]
    assert told(*flat, analyzer=Overflow(min_leak_dimensions_count=2)) == [("b", 0, "1", "0")]
    assert told(rows(0, 0, "a", 1), rows(0, 1, "b", 3), analyzer=Overflow(min_leak_dimensions_count=99)) == []


def test_rows_in_words() -> None:
    assert rows_text(0b1, 4) == "0"
    assert rows_text(0b1011_0111, 8) == "0 to 2, 4 to 5, 7"
    assert rows_text((1 << 64) - 1, 64) == "0 to 63"
    assert rows_text(0b10101_0101_0101, 64) == "0, 2, 4, 6 and 3 more"
    assert rows_text(0b101, 640) == "some of 0 to 9, 20 to 29"
    assert rows_text(1 << 63 | 1, 65) == "some of 0 to 1, 64"  # 1 * 64 // 65 = 0
    assert rows_text(1 << 63, 1000) == "some of 985 to 999"  # 984 * 64 // 1000 = 62


# -- against a plain account -------------------------------------------------------------------------------------------


def plainly(steps: list[list[int]]) -> list[tuple[int, int, int, int]]:
    """(step, order, victims, sources) of the masks of each step, one after the other."""
    told, before = [], 0
    for step, masks in enumerate(steps):
        seen, first = 0, True
        for order, mask in enumerate(masks):
            if not mask:
                continue
            sources = (before if first else seen) & mask
            victims = mask & ~seen & ~before
            if sources and victims and not (first and mask.bit_count() <= before.bit_count()):
                told.append((step, order, victims, sources))
            seen, first = seen | mask, False
        before = seen
    return told


masks = st.one_of(st.just(0), st.integers(0, 15), st.sampled_from([1 << 63, 1 << 63 | 1, (1 << 64) - 1]))


@given(steps=st.lists(st.lists(masks, min_size=1, max_size=6), min_size=1, max_size=6))
def test_leaks_are_those_of_a_plain_account(steps: list[list[int]]) -> None:
    table = [
        rows(step, order, f"m{order}", mask, rows_count=64)
        for step, own in enumerate(steps)
        for order, mask in enumerate(own)
    ]
    scans = scans_of(tiny.trace(tensor_stats=table), 65504.0)
    got = [(int(scans.step[one.scan]), int(scans.order[one.scan]), one.victims, one.sources) for one in leaks(scans, 3)]
    assert got == plainly(steps)


# -- models that mix rows by mistake -----------------------------------------------------------------------------------

BATCH, TOKENS, HIDDEN = 4, 3, 8


class Layer(nn.Module):
    """Embeds, does something, and ends with a product."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Linear(HIDDEN, HIDDEN), inner, nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any, *more: Any) -> Any:
        return self.head(self.inner(self.embed(x), *more))


class Does(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(*given)


class Attention(nn.Module):
    """Tokens of a row attend to one another; keys are also the values."""

    def forward(self, x: Any) -> Any:
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ x


class Cached(nn.Module):
    """The mean of all tokens that a row has put into its slot of a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = [torch.zeros(HIDDEN, dtype=torch.float16) for _ in range(BATCH)]

    def forward(self, x: Any, slots: list[int]) -> Any:
        for row, slot in enumerate(slots):
            self.sums[slot] = self.sums[slot] + x[row].sum(0)
        return torch.stack([self.sums[slot] for slot in slots])[:, None].expand_as(x).clone()


def int8_of_the_batch(x: Any) -> Any:
    scale = x.abs().max() / 127
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


def poisoned(row: int, tokens: int = TOKENS) -> Any:
    """[batch, tokens, hidden] of which one element of one row is Inf."""
    x = torch.linspace(-1, 1, BATCH * tokens * HIDDEN).reshape(BATCH, tokens, HIDDEN).half()
    x[row, 0, 1] = math.inf
    return x


def healthy(tokens: int = TOKENS) -> Any:
    return poisoned(0, tokens).nan_to_num(posinf=1.0)


def leaked(inner: Any, *inputs: tuple[Any, ...], roles: tuple[str, ...] = ("output",), **options: Any) -> list[Any]:
    """The findings ``leak`` of a model around ``inner``, a step for each of the inputs."""
    import spikeprof

    torch.manual_seed(0)
    model = Layer(inner).half()
    with torch.no_grad(), spikeprof.watch(model, roles=roles) as watched:
        for given in inputs:
            model(*given)
    table = [
        {**row, **{name: math.nan if row[name] is None else row[name] for name in ("amax_value", "smallest_value")}}
        for row in watched.stats()
    ]
    return found(asked(*table, analyzer=Overflow(**options)), "leak")


MISTAKES = {
    "a mean over the batch": lambda x: x - x.mean(0, keepdim=True),
    "a softmax over the batch": lambda x: torch.softmax(x, 0),
    "an INT8 scale of the whole batch": int8_of_the_batch,
    "rows flattened into tokens": lambda x: Attention()(x.reshape(1, -1, HIDDEN)).reshape(x.shape),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("tokens", [TOKENS, 1])
def test_rows_mixed_by_mistake_are_found(mistake: str, tokens: int) -> None:
    (one,) = leaked(Does(MISTAKES[mistake]), (healthy(tokens),), (poisoned(2, tokens),))
    assert (one.scope["module"], one.scope["step"], one.severity) == ("inner", 1, "critical")
    assert (one.scope["victim_rows"], one.scope["poisoning_rows"]) == ("0 to 1, 3", "2")


def test_a_mean_over_the_batch_between_modules_counts_for_the_next_one() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.ReLU(), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Any) -> Any:
            x = self.before(x)
            return self.after(x - x.mean(0, keepdim=True))

    (one,) = leaked(Between(), (poisoned(1),))
    assert (one.scope["module"], one.scope["victim_rows"]) == ("inner.after", "0, 2 to 3")
    (one,) = leaked(Between(), (poisoned(1),), roles=("output", "input"))
    assert (one.scope["module"], one.scope["role"]) == ("inner.after", "input")


def test_a_slot_of_a_cache_shared_by_mistake_is_found_in_the_step() -> None:
    (one,) = leaked(Cached(), (poisoned(0), [0, 1, 2, 0]))
    assert (one.scope["module"], one.scope["victim_rows"], one.scope["poisoning_rows"]) == ("inner", "3", "0")


def test_a_slot_of_a_cache_shared_by_mistake_later_is_found_then() -> None:
    own = [0, 1, 2, 3]
    (one,) = leaked(Cached(), (poisoned(0), own), (healthy(), own), (healthy(), [0, 1, 0, 3]), (healthy(), own))
    assert (one.scope["module"], one.scope["step"], one.scope["victim_rows"]) == ("inner", 2, "2")
    assert one.scope["poisoning_rows"] == "0"


# -- models that do no wrong -------------------------------------------------------------------------------------------


def test_tokens_of_one_request_may_mix() -> None:
    assert leaked(Attention(), (healthy(),), (poisoned(2),)) == []
    assert leaked(Attention(), (poisoned(2)[2],)) == []  # flat: rows are tokens
    assert len(leaked(Attention(), (poisoned(2)[2],), min_leak_dimensions_count=2)) == 1  # unless it is said otherwise


@pytest.mark.parametrize("inner", [nn.LayerNorm(HIDDEN), nn.GELU(), nn.Softmax(-1), nn.Linear(HIDDEN, HIDDEN)])
def test_modules_that_keep_rows_apart_leak_nothing(inner: Any) -> None:
    assert leaked(inner, (poisoned(1),)) == []


def test_a_bad_weight_spoils_all_rows_and_is_a_warning_at_most() -> None:
    import spikeprof

    model = nn.Sequential(nn.Embedding(10, HIDDEN), nn.Linear(HIDDEN, 10, bias=False)).half()
    model[1].weight = model[0].weight  # tied, as language models have them
    with torch.no_grad():
        model[0].weight[7] = math.inf
    for roles in (("output",), ("output", "input")):
        with torch.no_grad(), spikeprof.watch(model, roles=roles) as watched:
            model(torch.tensor([[1, 2], [7, 3], [4, 5]]))
        table = [{**row, "real_amax_value": math.nan} for row in watched.stats()]
        (one,) = found(asked(*table), "leak")
        assert (one.scope["module"], one.severity) == ("1", "warning")


def test_a_row_that_overflows_by_itself_after_another_is_a_warning_at_most() -> None:
    x = healthy() * 100
    x[0] *= 6000  # in the embedding
    x[3] *= 8  # in the square
    (one,) = leaked(Does(torch.square), (x,))
    assert (one.severity, one.scope["module"]) == ("warning", "inner")


def test_a_cache_that_keeps_rows_apart_leaks_nothing() -> None:
    own = [0, 1, 2, 3]
    assert leaked(Cached(), (poisoned(0), own), (healthy(), own), (healthy(), own)) == []
