"""Where there is no GPU, the Triton kernels run in Triton's interpreter; that must be said before they are imported."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """The Triton kernels, as they run here."""
    pytest.importorskip("triton")
    from spikeprof.profiler.inject.numerics.scanners import load_kernels

    found = load_kernels(needs_gpu=torch.cuda.is_available())
    assert found is not None
    return found


@pytest.fixture(scope="session")
def interpreted(kernels: ModuleType) -> ModuleType:
    """The same for tensors of the CPU."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU the Triton kernels are compiled for it: they read no tensors of the CPU")
    return kernels


@pytest.fixture(scope="session")
def device() -> Any:
    """Where tensors of these tests are."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How tensors are scanned: at once by torch, or a little later by Triton."""
    from spikeprof.profiler.inject.numerics import looks, scanners

    if request.param == "triton":
        kernels: ModuleType = request.getfixturevalue("interpreted")
        make = lambda device, clock, note: scanners.TritonScanner(torch, device, kernels)  # noqa: E731
        monkeypatch.setattr(looks, "scanner_for", make)
    return str(request.param)
