"""Modules and lines from the frames of a thread; operators and their shapes; which steps are alike."""

from __future__ import annotations

import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spikeprof.profiler.inject import frames, kinds, operators
from spikeprof.profiler.inject.events import Clock
from spikeprof.profiler.inject.frames import Frames, Place
from spikeprof.profiler.inject.operators import Operators

torch = pytest.importorskip("torch")

HERE = __file__


class Leaf(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: Any) -> Any:
        return self.look(x)


class Block(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, look: Any) -> None:
        super().__init__()
        self.leaf = Leaf(look)

    def __call__(self, x: Any) -> Any:
        return super().__call__(x)

    def forward(self, x: Any) -> Any:
        return self.leaf(x)


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, look: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(look) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return [layer(x) for layer in self.layers]


@pytest.fixture
def known() -> Frames:
    made = Frames()
    made.know_torch(torch)
    return made


def names(found: Frames, place: Place) -> list[str]:
    """Functions of the stack, innermost first, that stand in this file."""
    stacks = dict(found.rows)
    return [function for file, _, function in stacks[place.stack] if file == HERE]


def test_modules_and_lines_of_each_call(known: Frames) -> None:
    places = Model(lambda x: known.place(sys._getframe()))(1)
    rows = {index: path for index, _, path, _ in known.modules.rows}
    assert [rows[place.module] for place in places] == ["layers.0.leaf", "layers.1.leaf", "layers.2.leaf"]
    assert len({place.stack for place in places}) == 1
    inner = names(known, places[0])[:3]
    assert inner == ["test_modules_and_lines_of_each_call.<locals>.<lambda>", "Leaf.forward", "Block.forward"]
    files = {Path(file).name for file, _, _ in dict(known.rows)[0]}
    assert "module.py" not in files  # torch's own two frames for each module are left out
    line = next(line for file, line, function in dict(known.rows)[0] if function == "Leaf.forward")
    assert Path(HERE).read_text().splitlines()[line - 1].strip() == "return self.look(x)"


def test_outside_of_modules_and_without_stack(known: Frames) -> None:
    place = known.place(sys._getframe())
    assert (place.module, place.stack) == (-1, 0)
    assert names(known, place)[0] == "test_outside_of_modules_and_without_stack"
    assert known.place(sys._getframe()).stack == 1  # another line
    assert known.place(None).module == -1
    bare = known.place(sys._getframe(), with_stack=False)
    assert (bare.module, bare.stack) == (-1, -1)


def test_stacks_are_cut_and_bounded(known: Frames, monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(n: int) -> Place:
        return deep(n - 1) if n else known.place(sys._getframe())

    deep(200)
    deep(100)
    assert [len(lines) for _, lines in known.rows] == [frames.STACK_FRAMES_MAX]
    monkeypatch.setattr(frames, "STACKS_MAX", 3)
    assert [deep(n).stack for n in (1, 2, 3, 1)] == [1, 2, -1, 1]
    assert known.beyond == 1


def test_code_that_is_made_for_ever_is_forgotten(known: Frames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_CODES_MAX", 100)
    for n in range(1000):
        made: dict[str, Any] = {"look": lambda: known.place(sys._getframe())}
        exec(compile(f"def f{n}(): return look()\nplace = f{n}()", "made.py", "exec"), made)
        assert made["place"].stack >= 0
    assert len(known._codes) <= 100
    assert len(known._stacks) <= 100
    assert {function for _, lines in known.rows for file, _, function in lines if file == "made.py"} >= {"f0", "f999"}


def test_what_a_forward_lets_go_of_is_gone(known: Frames) -> None:
    """Reading variables of a frame must not keep a tensor that the frame has deleted."""

    class Frees(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> bool:
            y = x + 1
            known.place(sys._getframe())
            gone = weakref.ref(y)
            del y
            return gone() is None

    class Outer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.frees = Frees()

        def forward(self, x: Any) -> bool:
            return bool(self.frees(x))

    model, x = Outer(), torch.ones(2)
    assert model(x)
    watched = weakref.ref(x)
    del x
    assert watched() is None


def test_threads_have_their_own_frames(known: Frames) -> None:
    found: list[Place] = []
    model = Model(lambda x: known.place(sys._getframe()))
    threads = [threading.Thread(target=lambda: found.extend(model(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert len({place.module for place in found}) == 3
    assert len(known.modules.rows) == 7


def test_a_launch_of_a_compiled_model_tells_its_arguments(known: Frames, tmp_path: Path) -> None:
    """As torch.compile's launcher of a kernel stands there."""
    made: dict[str, Any] = {}
    file = tmp_path / "torch" / "_inductor" / "runtime" / "static_triton_launcher.py"
    exec(compile("def run(self, grid, look, *args):\n    return look()", str(file), "exec"), made)
    kernel = SimpleNamespace(name="triton_poi_fused_add_0")
    place = made["run"](kernel, 1, lambda: known.place(sys._getframe()), torch.zeros(3), 3)
    assert place.triton == ("triton_poi_fused_add_0", [[3], []], ["float32", ""])


def test_a_triton_launch_tells_its_arguments(known: Frames, tmp_path: Path) -> None:
    """As ``JITFunction.run`` of Triton stands there: the frame of its file with ``self`` and ``bound_args``."""
    source = "def run(self, look, **kwargs):\n    bound_args = dict(p=self.p, n=3)\n    return look()"
    made: dict[str, Any] = {}
    exec(compile(source, str(tmp_path / "triton" / "runtime" / "jit.py"), "exec"), made)
    kernel = SimpleNamespace(__name__="add_one", p=torch.zeros(5, 7, dtype=torch.float16))
    place = made["run"](kernel, lambda: known.place(sys._getframe()))
    assert place.triton == ("add_one", [[5, 7], []], ["float16", ""])


# -- operators ---------------------------------------------------------------------------------------


def test_operators_that_launch_are_told_with_their_shapes_and_in_our_time() -> None:
    found = Operators()
    x, y = torch.ones(3, 4), torch.ones(4, 5)
    assert found.begin()
    assert not found.begin()  # there is one
    here = threading.get_ident()
    torch.ones(9)  # launches nothing
    before = Clock.unix_ns()

    class Launches(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, a: Any, b: Any) -> Any:
            found.launched(here, Clock.unix_ns())
            return a @ b

    Launches.apply(x, y)
    after = Clock.unix_ns()
    assert found.threads == [here]
    found.end()
    assert found.threads == []
    rows = found.take()
    assert found.take() == []
    named = {row[0]: row for row in rows}
    assert "Launches" in named
    assert "aten::ones" not in named
    _, start, end, thread, _, dtypes = named["Launches"]
    assert before - 5000 < start < end < after + 5000
    assert thread == here & 0xFFFFFFFF
    assert dtypes == []
    assert not torch._C._autograd._profiler_enabled()


def test_operators_of_one_launch_from_outermost_to_innermost() -> None:
    """A launch in the middle of what aten::matmul calls: all that hold it are told, and nothing else."""
    found = Operators()
    x = torch.ones(200, 300, 400)
    found.begin()
    torch.ones(3)
    begin = Clock.unix_ns()
    torch.matmul(x, torch.ones(400, 500))
    end = Clock.unix_ns()
    found.launched(threading.get_ident(), (begin + 3 * end) // 4)
    found.end()
    rows = sorted(found.take(), key=lambda row: row[1])
    assert [row[0] for row in rows][:2] == ["aten::matmul", "aten::mm"]
    assert rows[0][4] == [[200, 300, 400], [400, 500]]
    assert rows[1][4] == [[60000, 400], [400, 500]]
    assert rows[0][1] <= rows[1][1] <= rows[1][2] <= rows[0][2]


def test_a_session_is_begun_anew_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Operators()
    monkeypatch.setattr(operators, "RENEW_SECONDS", 3600)
    assert found.begin()
    assert not found.stale
    first = found._running[threading.get_ident()]
    found.renew()
    assert found._running[threading.get_ident()] is first
    monkeypatch.setattr(operators, "RENEW_SECONDS", -1)
    assert found.stale
    for _ in range(3):
        torch.ones(3)
        found.renew()
        assert found._ended == []  # nothing was launched: nothing is kept
    assert found._running[threading.get_ident()] is not first
    begin = Clock.unix_ns()
    torch.relu(torch.ones(100_000))
    for at in range(begin, Clock.unix_ns(), 1000):  # at every moment, so that no pause of this process lies in between
        found.launched(threading.get_ident(), at)
    found.renew()
    found.end()
    assert {row[0] for row in found.take()} & {"aten::relu", "aten::ones"}


def test_where_another_profiler_runs_there_is_none_of_ours() -> None:
    found = Operators()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not found.begin()
    assert found.begin()
    found.end()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as guest:
        torch.ones(3)
    assert any(event.name == "aten::ones" for event in guest.events())


def test_a_torch_without_that_profiler() -> None:
    found = Operators()
    found._api = SimpleNamespace(enabled=partial(int, "none"))  # type: ignore[assignment]
    assert not found.begin()
    assert "ValueError" in found.refused
    assert not found.begin()
    assert found.take() == []


def test_operators_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "OPERATORS_MAX", 3)
    found = Operators()
    found.begin()
    for _ in range(5):
        begin = Clock.unix_ns()
        torch.relu(torch.ones(100_000))
        found.launched(threading.get_ident(), (begin + Clock.unix_ns()) // 2)
    found.end()
    assert len(found.take()) == 3
    assert found.beyond >= 1
    assert found.full
    assert not found.begin()


# -- kinds -------------------------------------------------------------------------------------------


def test_prefill_and_decode_are_two_kinds_and_a_token_more_is_none() -> None:
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def key(module: Any, *shape: int, **more: Any) -> Any:
        return kinds.of_call(module, (3, torch.empty(*shape)), more).key

    assert key(model, 1, 128, 4) == key(model, 1, 200, 4)
    assert key(model, 1, 128, 4) != key(model, 1, 1, 4)
    assert key(model, 1, 128, 4) != key(other, 1, 128, 4)
    assert kinds.of_call(model, (), {"n": 3, "ids": torch.empty(2, 9)}).text == "Linear 2x9"
    assert kinds.of_call(model, (), {}).text == "Linear"
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert kinds.of_call(model, (nested,), {}).text.startswith("Linear")


def test_a_shape_is_asked_for_unseen() -> None:
    seen = []

    class Watches(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x = torch.ones(2, 3)
    with Watches():
        assert kinds.shape_of(torch, x) == (2, 3)
    assert seen == []


def test_marked_steps_are_alike_by_name_and_sizes() -> None:
    def key(name: str, **attributes: Any) -> Any:
        return kinds.of_mark(name, attributes).key

    assert key("decode", **{"llm.batch_size": 5}) == key("decode", **{"llm.batch_size": 7, "layer": 3})
    assert key("decode", **{"llm.batch_size": 5}) != key("decode", **{"llm.batch_size": 8})
    assert key("decode") != key("prefill")
    assert key("decode", **{"llm.batch_size": "?"}) == key("decode")


class Alarm(Exception):
    """What a signal handler of the program's raises."""


def _alarm(*_: object) -> Any:
    raise Alarm


def test_a_handler_that_raises_is_heard_and_leaves_no_session_behind() -> None:
    found = Operators()
    assert found.begin()
    api = found._api
    found.end()
    for at, method in (("enable", "begin"), ("mark", "begin"), ("disable", "end")):
        if method == "end":
            assert found.begin()
        replaced = {name: getattr(api, name) for name in ("enabled", "enable", "mark", "disable")} | {at: _alarm}
        found._api = SimpleNamespace(**replaced)  # type: ignore[assignment]
        with pytest.raises(Alarm):
            getattr(found, method)()
        found._api = api
        assert found.refused == ""
        found.end()
        assert found.threads == []
        assert not torch._C._autograd._profiler_enabled()


def test_a_handler_that_raises_while_a_shape_is_read_is_heard() -> None:
    class Shaped(torch.Tensor):  # type: ignore[misc]
        shape = property(_alarm)

    value = torch.ones(2).as_subclass(Shaped)
    assert kinds.shape_of(torch, value) == ()  # the class's own fault is nobody's business
    Shaped.__module__ = "torch.testing"
    with pytest.raises(Alarm):
        kinds.shape_of(torch, value)
