"""The largest errors allowed against float64, and how they are taken: what is not finite never passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

Agree = Callable[..., None]


@pytest.fixture
def agree() -> Agree:
    """agree(got, reference, allowed=None, lse_allowed=1e-4): the output's relative error, and each log-sum-exp's."""

    def agree(got, reference, allowed: float | None = None, lse_allowed: float = 1e-4) -> None:
        assert got.out.shape == reference.out.shape
        assert got.lse.shape == reference.lse.shape
        assert got.lse.dtype == torch.float32
        assert bool(got.out.isfinite().all())
        assert bool(reference.out.isfinite().all())
        allowed = allowed or ALLOWED[got.out.dtype]
        error = torch.linalg.norm(got.out.double() - reference.out.double())
        assert error <= allowed * torch.linalg.norm(reference.out.double())
        unseen = reference.lse == -torch.inf
        assert torch.equal(got.lse == -torch.inf, unseen)
        assert bool((got.out[unseen] == 0).all())
        assert torch.allclose(got.lse[~unseen].double(), reference.lse[~unseen].double(), rtol=0, atol=lse_allowed)

    return agree
