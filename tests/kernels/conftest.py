"""Where there is no GPU, Triton kernels run in Triton's interpreter; that must be said before they are imported."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["torch", "triton"])
def device_path(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(device, path): plain torch, and Triton on the GPU or, without one, in its interpreter."""
    has_gpu = torch.cuda.is_available()
    if request.param == "torch":
        return ("cuda" if has_gpu else "cpu"), "torch"
    pytest.importorskip("triton")
    return ("cuda", "triton") if has_gpu else ("cpu", "interpreter")
