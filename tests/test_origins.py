"""Which frame stands for a stack, what is an operator, and places numbered."""

from __future__ import annotations

import numpy as np
import pytest

from spikeprof.profiler.origins import Origins, by_triton, is_operator, line_of, numbered, stack_row
from spikeprof.profiler.schema import TABLES

SITE = "/v/lib/python3.12/site-packages"
LIBRARIES = (
    f"{SITE}/torch/nn/modules/linear.py",
    f"{SITE}/triton/runtime/jit.py",
    "/opt/pytorch/torch/nn/functional.py",
    "/src/torch/_ops.py",
    "/usr/lib/python3.12/threading.py",
    "/usr/lib64/python3.11/asyncio/base_events.py",
    "<frozen runpy>",
    "<built-in>",
    "<eval_with_key>.0",
    "/tmp/torchinductor_u/ab/cab.py",
    "torch/nn/modules/module.py",  # as torch.profiler writes them
    "threading.py",
    "triton/runtime/jit.py",
)
OWN = (
    "/home/u/infer.py",
    "/home/u/torch/infer.py",
    f"{SITE}/vllm/model_executor/layers/linear.py",
    f"{SITE}/transformers/models/llama/modeling_llama.py",
    f"{SITE}/flash_attn_triton/ops.py",
    f"{SITE}/torchtune/modules/attention.py",
    "/usr/lib/python3/dist-packages/model.py",
    "model.py",
    "/ml/examples/spikeprof/examples/infer.py",
)


@pytest.mark.parametrize("file", LIBRARIES)
def test_frames_of_libraries_are_passed_over(file: str) -> None:
    frames = [(file, 1, "call"), ("/home/u/model.py", 7, "Net.forward"), ("/home/u/run.py", 9, "main")]
    assert line_of(frames) == frames[1]


@pytest.mark.parametrize("file", OWN)
def test_frames_of_programs_and_of_their_models_are_not(file: str) -> None:
    assert line_of([(file, 7, "forward"), ("/home/u/run.py", 9, "main")])[0] == file


def test_where_all_frames_are_libraries_the_innermost_stands() -> None:
    frames = [(LIBRARIES[0], 125, "forward"), (LIBRARIES[4], 3, "run")]
    assert line_of(frames) == frames[0]
    assert line_of([]) == ("", 0, "")


def test_a_row_of_stacks() -> None:
    row = stack_row(3, [(LIBRARIES[0], 125, "forward"), ("/h/mödel.py", 7, "Net.forward")])
    assert row == {
        "rank": 3,
        "file": "/h/mödel.py",
        "line": 7,
        "function": "Net.forward",
        "frames": f'["{LIBRARIES[0]}:125 forward", "/h/mödel.py:7 Net.forward"]',
    }


def test_only_the_innermost_frames_tell_that_triton_launched() -> None:
    jit, own = (LIBRARIES[1], 1, "run"), ("/home/u/model.py", 7, "forward")
    assert by_triton([jit, own])
    assert by_triton([("<built-in>", 0, "launch"), jit, own])
    assert by_triton([(f"{SITE}/torch/_inductor/runtime/triton_heuristics.py", 1, "run"), own])
    assert not by_triton([own, own, own, jit])
    assert not by_triton([])


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("aten::mm", True),
        ("vllm::unified_attention", True),
        ("FlashAttnFunc", True),
        ("triton::silu", True),
        ("## Call CompiledFxGraph abc ##", False),
        ("Torch-Compiled Region: 0/0", False),
        ("CompiledFunction", False),
        ("ProfilerStep#7", False),
        ("Optimizer.step#SGD.step", False),
    ],
)
def test_stretches_around_operators_are_not_operators(name: str, is_one: bool) -> None:
    assert is_operator(name) == is_one


def test_combinations_are_numbered_in_order_of_appearance() -> None:
    found = numbered(np.array([5, 5, -1, 5]), np.array([2**40, 7, 7, 2**40]))
    assert found.code.tolist() == [0, 1, 2, 0]
    assert found.first.tolist() == [0, 1, 2]
    assert numbered(np.array([], np.int64)).first.tolist() == []


def test_a_place_of_which_nothing_is_known_is_no_origin() -> None:
    origins = Origins()
    mm, given = origins.op("aten::mm"), origins.input("[[1]]", '["Half"]')
    columns = [[0, 0, 0, 0], [-1, -1, 4, -1], [-1, -1, 5, -1], [-1, mm, -1, mm], [given, given, 0, 0]]
    assert origins.number([np.array(column) for column in columns]).tolist() == [-1, 0, 1, 2]
    table = origins.table()
    assert table.schema == TABLES["origins"].arrow
    assert table.select(["module_id", "stack_id", "op", "input_shapes", "input_dtypes"]).to_pylist() == [
        {"module_id": -1, "stack_id": -1, "op": "aten::mm", "input_shapes": "[[1]]", "input_dtypes": '["Half"]'},
        {"module_id": 4, "stack_id": 5, "op": None, "input_shapes": "", "input_dtypes": ""},
        {"module_id": -1, "stack_id": -1, "op": "aten::mm", "input_shapes": "", "input_dtypes": ""},
    ]
    assert len(Origins().table()) == 0
