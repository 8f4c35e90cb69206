"""What waits for a common launch: each tensor's own numbers, few launches, few bytes held."""

from __future__ import annotations

import contextlib
import signal
import weakref
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import spikeprof
from spikeprof.profiler.inject.numerics import batches, looks, scan_torch, scanner, waiting
from spikeprof.profiler.inject.numerics.formats import FORMATS
from spikeprof.profiler.inject.numerics.places import Spot
from spikeprof.profiler.inject.numerics.scanner import TritonScanner
from spikeprof.profiler.watching import Watch


class Gives(nn.Module):
    """A module that gives what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gives: Callable[[], Any] = lambda: None

    def forward(self) -> Any:
        return self.gives()


class Model(nn.Module):
    """Modules that run one after the other; the model itself gives nothing new."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Gives() for _ in range(count))
        self.between: dict[int, Callable[[Any], None]] = {}  # what happens after a module

    def forward(self) -> Any:
        for number, part in enumerate(self.parts):
            made = part()
            if number in self.between:
                self.between[number](made)
        return made

    def tell(self, *gives: Callable[[], Any]) -> None:
        for part, give in zip(self.parts, gives, strict=True):
            part.gives = give  # type: ignore[assignment]


@pytest.fixture
def made(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[TritonScanner]:
    """Scanners of Triton kernels, as they come to be; they scan a little later."""
    found: list[TritonScanner] = []

    def make(device: Any, clock: Any, note: Any) -> TritonScanner:
        found.append(TritonScanner(torch, device, interpreted))
        return found[-1]

    monkeypatch.setattr(looks, "scanner_for", make)
    return found


def numbers(watched: Watch, step: int) -> dict[str, list[Any]]:
    """By path of the module: dtype, elements, amax, zeros, saturated, first bad, when it was scanned."""
    names = ("dtype", "elements_count", "amax_value", "zero_count", "inf_count", "first_bad_index", "scanned")
    return {r["module"]: [r[name] for name in names] for r in watched.stats() if r["step"] == step}


def expected(tensor: Any) -> list[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    amax, _, _, inf, _, zero, _, first, *_ = scan_torch.scan(tensor, FORMATS[name])
    return [name, tensor.numel(), FORMATS[name].value(amax), zero, inf, first]


def test_large_and_small_outputs_go_in_one_launch_and_steps_need_none(made: list[TritonScanner]) -> None:
    model = Model(4)
    sizes = [5, 4 * 4096, 4 * 4096 + 1, 100_003]  # the last two are shared by programs
    tensors = [torch.arange(size).remainder(97).half() for size in sizes]
    tensors[3][77_777] = torch.inf
    model.tell(*((lambda tensor=tensor: tensor) for tensor in tensors))
    with torch.inference_mode(), spikeprof.watch(model) as watched:
        for _ in range(3):
            model()
        assert made[0].launches == 3
        model.tell(*[lambda: None] * 4)  # a step without anything to scan is a step
        model()
        model.tell(*((lambda tensor=tensor: tensor) for tensor in tensors))
        model()
        assert made[0].launches == 4
    wanted = {f"parts.{at}": [*expected(tensor), "later"] for at, tensor in enumerate(tensors)}
    assert [numbers(watched, step) for step in range(5)] == [wanted, wanted, wanted, {}, wanted]


def test_programs_are_shared_out_by_size() -> None:
    narrow, nothing = scanner.NARROW_PARTS, [0, 1]
    assert scanner.shares_of([narrow, 1, 1], 100) == nothing * 4
    assert scanner.shares_of([narrow + 1, narrow], 100) == [1, 3, *nothing * 3]  # two parts each, but for one
    # 40,000 parts over 399 programs, 101 each: 397 of them have something to do.
    assert scanner.shares_of([40_000], 100) == [1, 397, *nothing * 3]
    # 4,000 parts over 296 programs: 14 each.
    assert scanner.shares_of([1000] * 4, 100) == [4, 72, *nothing * 3]
    # As in a prefill, 15,000 over 294: 52 each.
    assert scanner.shares_of([9000, 2000, 1000, 1000, 1000, 1000], 100) == [1, 174, 1, 39, 4, 20, *nothing]
    assert scanner.shares_of([1000] * 5000, 100) == [5000, 1, *nothing * 3]


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=60), st.sampled_from([30, 132]))
def test_programs_have_equal_parts_of_all_that_they_share(parts: list[int], sms: int) -> None:
    parts.sort(reverse=True)
    shares = scanner.shares_of(parts, sms)
    counts, sizes = shares[::2], shares[1::2]
    wide = [count for count in parts if count > scanner.NARROW_PARTS]
    assert len(counts) == scanner.SHARES
    assert sum(counts) == len(wide)
    own = [size for count, size in zip(counts, sizes, strict=True) for _ in range(count)]
    programs = sms * (scanner.SHARING_ONE if len(wide) == 1 else scanner.SHARING)
    each = max(-(-sum(wide) // max(programs - len(wide), 1)), 2)
    assert all(-(-count // size) <= each for count, size in zip(wide, own, strict=True))
    if len({-(-count // each) for count in wide}) <= scanner.SHARES:
        assert sum(own) <= programs


def test_tensors_of_many_sizes_in_one_launch(made: list[TritonScanner], kernels: ModuleType) -> None:
    part = kernels.part_items(FORMATS["float16"], False)
    model = Model(9)
    sizes = [part * 9, 7, part * 30, part * 21 + 5, part * 5, part * 13 - 1, part * 4, part * 5 + 1, part * 6]
    tensors = [torch.arange(size).remainder(89).half() + at for at, size in enumerate(sizes)]
    for tensor in tensors:
        tensor[-1] = torch.inf
    model.tell(*((lambda tensor=tensor: tensor) for tensor in tensors))
    with torch.inference_mode(), spikeprof.watch(model) as watched:
        for _ in range(2):
            model()
    wanted = {f"parts.{at}": [*expected(tensor), "later"] for at, tensor in enumerate(tensors)}
    assert [numbers(watched, step) for step in range(2)] == [wanted, wanted]


def test_what_is_held_is_bounded_and_goes_with_the_launch(
    made: list[TritonScanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner, "HELD_BYTES", 40_000)
    model, alive, most = Model(12), [], []

    def give() -> Any:
        tensor = torch.ones(8000, dtype=torch.float16)  # 16,000 bytes: the third one is the last that waits
        alive.append(weakref.ref(tensor))
        most.append(sum(ref() is not None for ref in alive))
        return tensor

    model.tell(*[give] * 12)
    with torch.inference_mode(), spikeprof.watch(model) as watched:
        for _ in range(2):
            model()
        assert made[0].launches == 2 * 4
    assert max(most) == 3  # two that wait, and the new one
    assert all(len(numbers(watched, step)) == 12 for step in (0, 1))


@pytest.mark.parametrize(("free", "idle", "held"), [(20 << 30, 0, 320 << 20), (1 << 30, 3 << 30, 256 << 20), (0, 0, 0)])
def test_less_waits_where_little_memory_is_free(free: int, idle: int, held: int) -> None:
    """Of 80 GiB; idle is what torch has set aside and not given out."""

    class Cuda:
        mem_get_info = staticmethod(lambda device: (free, 80 << 30))
        memory_reserved = staticmethod(lambda device: (5 << 30) + idle)
        memory_allocated = staticmethod(lambda device: 5 << 30)

    assert scanner.held_bytes_of(Cuda, "cuda:0") == held


def test_an_allocator_that_tells_nothing_of_itself_is_no_reason_to_scan_otherwise() -> None:
    """As ``torch.cuda.memory.CUDAPluggableAllocator``."""

    def refuse(device: Any) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    class Cuda:
        mem_get_info = staticmethod(lambda device: (20 << 30, 80 << 30))
        memory_reserved = FunctionType(refuse.__code__, {**globals(), "__name__": "torch.cuda.memory"})

    assert scanner.held_bytes_of(Cuda, "cuda:0") == 320 << 20


def test_no_more_tensors_wait_than_a_launch_takes(made: list[TritonScanner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "TENSORS_MAX", 3)
    model = Model(8)
    model.tell(*[lambda: torch.ones(4)] * 8)
    with spikeprof.watch(model) as watched:
        for _ in range(2):
            model()
    assert made[0].launches == 2 * 3
    assert len(watched.stats()) == 16


def test_an_output_that_was_launched_and_is_handed_on_later_is_not_scanned_again(
    made: list[TritonScanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "TENSORS_MAX", 2)
    model = Model(5)
    first = torch.full((4,), 3.0)
    model.tell(lambda: first, lambda: torch.ones(2), lambda: torch.ones(3), lambda: first, lambda: torch.zeros(1))
    with torch.inference_mode(), spikeprof.watch(model) as watched:
        for _ in range(4):
            model()
    assert [sorted(numbers(watched, step)) for step in range(4)] == [["parts.0", "parts.1", "parts.2", "parts.4"]] * 4


def test_each_tensor_of_a_tuple_is_scanned_once_whatever_its_neighbours_do(made: list[TritonScanner]) -> None:
    def ones(count: int) -> Any:
        return torch.ones(count, dtype=torch.float16)

    turns: list[Callable[[], Any]] = [
        lambda: (ones(8), None, ones(4)),
        lambda: (ones(8), None, ones(4)),
        lambda: (ones(8), None, ones(5)),  # one of them is not as the last time
        lambda: (ones(9), ones(5)),
        lambda: (None, ones(9), ones(5), None),
        lambda: (ones(9), None),
        lambda: (ones(9), [ones(5)]),
        lambda: (None, None),
        lambda: (ones(9), ones(5), ones(2)),
        lambda: (ones(9), ones(5), ones(2)),
    ]
    model = Model(1)
    with torch.inference_mode(), spikeprof.watch(model) as watched:
        for turn in turns:
            model.tell(turn)
            model()
    rows = [(row["step"], row["elements_count"]) for row in watched.stats() if row["module"] == "parts.0"]
    sizes = [[8, 4], [8, 4], [8, 5], [9, 5], [9, 5], [9], [9, 5], [], [9, 5, 2], [9, 5, 2]]
    assert rows == [(step, size) for step, given in enumerate(sizes) for size in given]
    assert watched.remarks == []


def test_batches_stay_as_they_were_where_ids_are_used_again(
    made: list[TritonScanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last output of a batch lives a little longer than the batch, and has gone when the next one comes."""
    planned: list[int] = []
    own = batches.Batches._made
    monkeypatch.setattr(scanner, "HELD_BYTES", 128)
    monkeypatch.setattr(batches.Batches, "_made", lambda *args: (planned.append(1), own(*args))[1])
    model = Model(12)
    model.tell(*[lambda: torch.ones(32, dtype=torch.float16)] * 12)
    with torch.inference_mode(), spikeprof.watch(model):
        for _ in range(3):
            model()
        assert len(planned) == 1 + 6  # the first of all goes another way
        for _ in range(5):
            model()
    assert len(planned) == 1 + 6


class Around(nn.Module):
    """A module that hands on what another one gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self) -> Any:
        return self.inner()


class Adds(nn.Module):
    """A module that writes into what it takes."""

    def forward(self, tensor: Any) -> Any:
        return tensor.add_(1.0)


class Chain(nn.Module):
    """Modules of which one hands on what an earlier batch gave, twice, and one writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Gives(), Gives()
        self.around, self.adds = Around(Around(Gives())), Adds()
        self.first.gives = lambda: torch.ones(3)
        self.last.gives = lambda: torch.ones(5)
        self.around.inner.inner.gives = lambda: torch.ones(8)  # type: ignore[union-attr, assignment]

    def forward(self) -> Any:
        self.first()
        self.adds(self.around())
        return self.last()


@pytest.mark.parametrize("inference", [True, False], ids=["inference", "versions"])
def test_batches_stay_as_they_were_where_tensors_of_earlier_ones_come_again(
    made: list[TritonScanner], inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    own = batches.Batches._made
    monkeypatch.setattr(waiting, "TENSORS_MAX", 2)
    monkeypatch.setattr(batches.Batches, "_made", lambda *args: (planned.append(1), own(*args))[1])
    model = Chain()
    with torch.inference_mode(inference), torch.no_grad(), spikeprof.watch(model) as watched:
        for _ in range(3):
            model()
        known = len(planned)
        for _ in range(4):
            model()
    assert len(planned) == known
    names = ["first", "around.inner.inner", "adds", "last"]
    amax = {name: row[2] for name, row in numbers(watched, 6).items()}
    assert amax == dict(zip(names, [1.0, 1.0, 2.0, 1.0], strict=True))


@pytest.mark.parametrize("guards", [True, False], ids=["the compiler's check", "one after the other"])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_a_batch_that_is_not_as_the_last_time_is_looked_at_anew(
    made: list[TritonScanner], steps_before: int, guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guards:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    model, base = Model(3), torch.arange(64.0).half()
    same, other = torch.full((8,), 4.0).half(), torch.full((8,), 5.0).half()
    usual = (lambda: base[:8], lambda: same, lambda: same)
    turns: list[tuple[tuple[Callable[[], Any], ...], list[int]]] = [  # what is given, and which of it is scanned
        ((lambda: base[8:16], lambda: same, lambda: same), [0, 1]),  # another address
        ((lambda: base[1:9], lambda: same, lambda: same), [0, 1]),  # not aligned
        ((lambda: base[:16:2], lambda: same, lambda: same), [0, 1]),  # strided
        ((lambda: base[:8].view(2, 4), lambda: same, lambda: same), [0, 1]),  # another shape, as many elements
        ((base[:8].bfloat16, lambda: same, lambda: same), [0, 1]),  # another dtype, as many bytes
        ((lambda: base[:8], lambda: same, lambda: other), [0, 1, 2]),  # not the same any more
        ((lambda: same, lambda: same, lambda: same), [0]),  # more are
        ((lambda: base[:8], lambda: torch.ones(2, dtype=torch.complex64), lambda: same), [0, 2]),  # as many bytes
        ((lambda: base[:8], lambda: torch.eye(2).half().to_sparse(), lambda: same), [0, 2]),
    ]
    with torch.inference_mode(), spikeprof.watch(model) as watched:
        step = 0
        for gives, scanned in turns:
            for _ in range(steps_before):
                model.tell(*usual)
                model()
                step += 1
            model.tell(*gives)
            model()
            wanted = {f"parts.{at}": [*expected(gives[at]()), "later"] for at in scanned}
            assert numbers(watched, step) == wanted
            rows = {r["module"]: r["rows_count"] for r in watched.stats() if r["step"] == step}
            assert rows["parts.0"] == (2 if gives[0]().dim() == 2 else 0)
            step += 1


ODD = {  # of as many bytes as usual
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(4), torch.ones(4)]),
    "layout torch._mkldnn": lambda: torch.ones(8).to_mkldnn(),
    "layout torch.sparse_csr": lambda: torch.tensor([[1.0, 2.0]]).to_sparse_csr(),  # as many bytes of values
    "a tensor without memory": lambda: torch._to_functional_tensor(torch.ones(8)),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR)")
@pytest.mark.parametrize("guards", [True, False], ids=["the compiler's check", "one after the other"])
@pytest.mark.parametrize("why", ODD)
@pytest.mark.parametrize("at", [0, 1])
def test_outputs_without_strides_or_memory_end_nothing(
    made: list[TritonScanner], why: str, at: int, guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's check would end the process, were it asked about some of them."""
    if not guards:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    model = Model(3)
    usual = [lambda: torch.ones(8)] * 3
    if "csr" in why:
        usual = [lambda: torch.ones(2)] * 3
    with torch.no_grad(), spikeprof.watch(model) as watched:
        for step in range(6):
            model.tell(*(ODD[why] if (step, each) == (3, at) else usual[each] for each in range(3)))
            model()
    others = [f"parts.{each}" for each in range(3) if each != at]
    told = [list(numbers(watched, step)) for step in range(6)]
    assert told == [others if step == 3 else ["parts.0", "parts.1", "parts.2"] for step in range(6)]
    assert watched.unchecked == [(f"parts.{at}", why)]
    assert watched.remarks == []


@pytest.mark.parametrize("steps_before", [0, 3])
def test_memory_that_is_given_up_while_its_tensor_waits_is_not_read(
    made: list[TritonScanner], steps_before: int
) -> None:
    model = Model(4)
    model.tell(*[lambda: torch.ones(8)] * 3, lambda: torch.empty(0))  # the last one needs none
    with torch.no_grad(), spikeprof.watch(model) as watched:
        for step in range(steps_before + 2):
            model.between = {1: lambda made: made.untyped_storage().resize_(0)} if step == steps_before else {}
            model()
    told = [list(numbers(watched, step)) for step in range(steps_before + 2)]
    whole = ["parts.0", "parts.1", "parts.2", "parts.3"]
    assert told == [whole] * steps_before + [["parts.0", "parts.2", "parts.3"], whole]
    assert watched.unchecked == [("parts.1", "a tensor without memory")]


def test_a_program_s_exception_is_its_own_whatever_the_batch_asks(
    made: list[TritonScanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def alarm(*_: object) -> None:
        raise RuntimeError("enough")

    before = signal.signal(signal.SIGUSR1, alarm)
    model = Model(2)
    model.tell(*[lambda: torch.ones(8)] * 2)
    try:
        with torch.no_grad(), spikeprof.watch(model):
            for _ in range(3):
                model()
            monkeypatch.setattr(batches.Batches, "_are_the_same", lambda *_: signal.raise_signal(signal.SIGUSR1))
            with pytest.raises(RuntimeError, match="enough"):
                model()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_was_written_while_it_waited_is_told_at_each_turn(made: list[TritonScanner]) -> None:
    model = Model(3)
    model.tell(*[lambda: torch.zeros(4)] * 3)
    with torch.no_grad(), spikeprof.watch(model) as watched:
        for step in range(6):
            model.between = {1: lambda made: made.add_(1.0)} if step in (2, 5) else {}
            model()
    told = [[row[-1] for row in numbers(watched, step).values()] for step in range(6)]
    assert told == [["later", "changed" if step in (2, 5) else "later", "later"] for step in range(6)]
    assert [numbers(watched, step)["parts.1"][2] for step in (1, 2, 3)] == [0.0, 1.0, 0.0]


def test_batches_that_are_kept_are_few(made: list[TritonScanner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_KEPT_MAX", 20)
    model = Model(3)
    with torch.inference_mode(), spikeprof.watch(model) as watched:
        for size in range(1, 30):
            model.tell(*[lambda size=size: torch.ones(size)] * 3)
            model()
        assert watched._numerics is not None
        kept = watched._numerics.looks._batches._plans
        assert sum(len(plan.spots) for plan in kept.values()) <= 20
    assert {r["elements_count"] for r in watched.stats()} == set(range(1, 30))


def test_tensors_of_a_transform_end_nothing(made: list[TritonScanner]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with torch.no_grad(), spikeprof.watch(model) as watched:
        model(torch.ones(2, 3))
        mapped = torch.func.vmap(model)(torch.ones(2, 3))
        model(torch.ones(2, 3))
    assert mapped.shape == (2, 3)
    assert sorted(watched.unchecked) == [("0", "a tensor without memory"), ("1", "a tensor without memory")]
    assert watched.remarks == []
    assert [sorted(numbers(watched, step)) for step in (0, 2)] == [["0", "1"], ["0", "1"]]


DTYPES = ["float16", "bfloat16", "float32", "int8", "float8_e5m2"]


@given(
    steps=st.lists(
        st.lists(
            st.tuples(st.sampled_from(DTYPES), st.sampled_from([1, 3, 24, 300]), st.integers(0, 5), st.integers(0, 3)),
            min_size=4,
            max_size=4,
        ),
        min_size=1,
        max_size=3,
    ),
    order=st.lists(st.integers(0, 2), min_size=2, max_size=6),
    inference=st.booleans(),
    tensors_max=st.sampled_from([1, 2, 3, 1024]),
)
@settings(max_examples=10, deadline=None)
def test_any_outputs_in_any_order_have_their_own_numbers(
    kernels: ModuleType,
    device: Any,
    steps: list[list[tuple[str, int, int, int]]],
    order: list[int],
    inference: bool,
    tensors_max: int,
) -> None:
    """Of each step every tensor that the modules give is scanned once, under the first that gave it."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(looks, "scanner_for", lambda device, clock, note: TritonScanner(torch, device, kernels))
        patch.setattr(waiting, "TENSORS_MAX", tensors_max)
        model, wanted = Model(4), []
        with torch.inference_mode(inference), spikeprof.watch(model) as watched:
            for turn, number in enumerate(order):
                given: list[Any] = []
                for at, (name, size, value, kind) in enumerate(steps[number % len(steps)]):
                    made = torch.full((2 * size + 2,), value + at + turn, device=device).to(getattr(torch, name))
                    view = (made[:size], made[1 : size + 1], made[: 2 * size : 2], given[-1] if given else made)[kind]
                    given.append(view)
                model.tell(*((lambda tensor=tensor: tensor) for tensor in given))
                model()
                firsts = [at for at, one in enumerate(given) if not any(one is before for before in given[:at])]
                wanted.append({f"parts.{at}": [*expected(given[at].cpu()), "later"] for at in firsts})
        assert [numbers(watched, step) for step in range(len(order))] == wanted
        assert watched.remarks == []


def test_the_stream_of_what_waits_is_kept() -> None:
    """A launch may leave tensors of another device, which wait for the next one."""
    stage = waiting.Waiting()
    stage.turn_to(1, lambda _: 7, 1000)
    stage.append(Spot(None, 0, 0), torch.ones(2), 0)
    stage.turn_away()
    assert stage.is_of(1)
    stage.clear()
    stage.turn_away()
    assert not stage.is_of(1)


class Interrupted(list[Any]):
    """A list in whose ``append`` a signal handler raises, the second time."""

    calls = 0

    def append(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise TimeoutError
        super().append(value)


@pytest.mark.parametrize("name", ["tensors", "spots"])
@pytest.mark.parametrize("slow", [True, False], ids=["a first output", "an output as before"])
def test_what_a_signal_handler_interrupts_is_no_other_module_s(name: str, slow: bool) -> None:
    stage = waiting.Waiting()
    setattr(stage, name, Interrupted())
    stage.turn_to(-1, lambda _: 0, 1000)
    spots, tensors = [Spot(None, 0, at) for at in range(3)], [torch.full((2,), float(at)) for at in range(3)]
    waits = waiting.quick(stage, lambda: None)
    for spot, tensor in zip(spots, tensors, strict=True):
        spot.nbytes = tensor.nbytes
        with contextlib.suppress(TimeoutError):
            if slow:
                stage.append(spot, tensor, 0)
            else:
                assert waits(spot, (), tensor)
    assert [spot.point for spot in stage.spots] == [0, 2]
    assert [float(tensor[0]) for tensor in stage.tensors] == [0.0, 2.0]
    assert len(stage.versions) == 2
