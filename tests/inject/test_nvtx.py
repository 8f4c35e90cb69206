"""NVTX ranges of the program become ranges of the trace."""

from __future__ import annotations

import pytest
from inject.harness import Lab
from inject.test_marks import ranges

from spikeprof.profiler.inject import nvtx


def names(lab: Lab, program: str) -> list[tuple[str, str]]:
    return [(str(row["kind"]), str(row["name"])) for row in ranges(lab, program)]


def test_ranges_of_torch_nest_and_may_end_in_another_thread(lab: Lab) -> None:
    found = ranges(
        lab,
        """
        import threading, torch
        from torch.cuda.nvtx import range_push, range_pop, range_start, range_end, range as nvtx_range
        torch.cuda.launch(1)
        assert range_push("step") == 0
        with nvtx_range("layer {}", 3):
            torch.cuda.launch(1)
        handle = range_start("request")
        assert range_pop() == 0
        thread = threading.Thread(target=range_end, args=(handle,))
        thread.start(); thread.join()
        """,
    )
    assert {(row["kind"], row["name"]) for row in found} == {("nvtx", "step"), ("nvtx", "layer 3"), ("nvtx", "request")}
    by_name = {row["name"]: row for row in found}
    step, layer, request = (by_name[name] for name in ("step", "layer 3", "request"))
    assert step["start_ns"] <= layer["start_ns"] <= layer["end_ns"] <= step["end_ns"] <= request["end_ns"]


def test_ranges_of_the_package_as_context_decorator_and_pair(lab: Lab) -> None:
    program = """
        import torch, nvtx
        torch.cuda.launch(1)
        @nvtx.annotate()
        def named(): return 7
        assert named() == 7 and named.__name__ == "named"
        with nvtx.annotate("block", color="red"):
            pass
        nvtx.push_range("pair"); nvtx.pop_range()
        """
    assert sorted(names(lab, program)) == [("nvtx", "block"), ("nvtx", "named"), ("nvtx", "pair")]


def test_what_the_program_does_wrong_stays_its_own_and_unpaired_ends_do_no_harm(lab: Lab) -> None:
    program = """
        import torch
        from torch.cuda import nvtx
        torch.cuda.launch(1)
        nvtx.range_pop()
        nvtx.range_end(99)
        try:
            nvtx.range_push(7)
        except TypeError as error:
            assert str(error) == "a message is text"
        else:
            raise SystemExit("no error")
        nvtx.range_push("never ended")
        with nvtx.range("ended"):
            pass
        """
    assert names(lab, program) == [("nvtx", "ended")]


def test_a_function_that_raises_ends_its_range(lab: Lab) -> None:
    program = """
        import torch, nvtx
        torch.cuda.launch(1)
        @nvtx.annotate("fails")
        def fails(): raise KeyError("x")
        try:
            fails()
        except KeyError:
            pass
        """
    assert names(lab, program) == [("nvtx", "fails")]


def test_open_ranges_are_bounded_and_ends_still_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    class Mark:
        def __init__(self, _kind: str, name: str, _attributes: dict[str, object]) -> None:
            self.name = name

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            ended.append(self.name)

    monkeypatch.setattr("spikeprof.profiler.inject.marks.Mark", Mark)
    monkeypatch.setattr(nvtx, "_OPEN_MAX", 2)
    for name in "abc":
        nvtx._push(name)
    for _ in range(4):
        nvtx._pop()
    assert ended == ["b", "a"]


def test_wrappers_look_like_what_they_wrap() -> None:
    class Fake:
        @staticmethod
        def range_push(msg: str) -> int:
            """Push."""
            return len(msg)

    nvtx.watch_torch(Fake)  # type: ignore[arg-type]
    assert (Fake.range_push.__name__, Fake.range_push.__doc__) == ("range_push", "Push.")
    assert not hasattr(Fake, "range_pop")  # what a version of torch lacks is not made up
