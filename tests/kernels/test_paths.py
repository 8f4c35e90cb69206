from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor

from spikeprof.kernels.paths import chosen

GPU = cast("Tensor", SimpleNamespace(is_cuda=True, device="cuda:0"))
CPU = cast("Tensor", SimpleNamespace(is_cuda=False, device="cpu"))


@pytest.mark.parametrize(
    ("interpret", "path", "tensor", "want"),
    [
        ("0", "auto", GPU, "triton"),
        ("0", "triton", GPU, "triton"),
        ("0", "auto", CPU, "torch"),
        ("1", "auto", GPU, "torch"),  # what an interpreter makes is no GPU's work, and must not be called so
        ("1", "interpreter", CPU, "interpreter"),
        ("1", "auto", CPU, "torch"),
        ("1", "torch", GPU, "torch"),
    ],
)
def test_the_path_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, interpret: str, path: str, tensor: Tensor, want: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert chosen(path, tensor) == want


@pytest.mark.parametrize(
    ("interpret", "path", "tensor", "problem"),
    [
        ("0", "gpu", CPU, "path is 'gpu': it can be auto, triton, interpreter, torch"),
        ("0", "triton", CPU, "path is 'triton', but the tensors are on cpu: it needs a GPU; take 'torch'"),
        ("1", "triton", GPU, "path is 'triton', but TRITON_INTERPRET=1 is set: unset it, or take 'torch'"),
        ("0", "interpreter", CPU, "path is 'interpreter': set TRITON_INTERPRET=1 before"),
        ("1", "interpreter", GPU, "path is 'interpreter', but the tensors are on cuda:0: it runs on the CPU"),
    ],
)
def test_a_path_that_cannot_be_taken(
    monkeypatch: pytest.MonkeyPatch, interpret: str, path: str, tensor: Tensor, problem: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(ValueError, match=problem):
        chosen(path, tensor)
