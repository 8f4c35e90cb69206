"""What the bench measures: a kernel with its inputs, its twins, its reference, the work that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Result(Protocol):
    """What a kernel hands back: ``Ran``, ``Attended`` and ``Probed`` are such."""

    @property
    def out(self) -> Tensor:
        """The output."""
        ...

    @property
    def path(self) -> str:
        """The path that was taken."""
        ...


BYTES, FLOPS = "bytes", "flops"


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape.

    ``make(device)`` draws the inputs; ``call(inputs)`` runs the kernel, ``twins`` what it is compared with, by name,
    the first one in the table. ``check(inputs, out)`` hands back the part of the output to compare and what it
    should be, in float64; ``None`` where there is nothing to compare. ``error_bound`` is for ‖out − ref‖ / ‖ref‖.
    ``bytes_moved`` and ``flops`` are those that the algorithm needs at least; ``bound_by`` says which of them is
    held against this device's peak. ``queued`` is off where how fast the host launches is the question.
    """

    kernel: str
    shape: str
    make: Callable[[torch.device], Any]
    call: Callable[[Any], Result]
    bytes_moved: int
    flops: int = 0
    bound_by: str = BYTES
    check: Callable[[Any, Tensor], tuple[Tensor, Tensor]] | None = None
    error_bound: float = 0.0
    twins: Mapping[str, Callable[[Any], object]] = field(default_factory=dict)
    queued: bool = True


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A case that cannot run here, and why; ``failed`` where it was tried."""

    kernel: str
    reason: str
    failed: bool = False


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """‖got − wanted‖ / ‖wanted‖ in float64; infinite where either of them is not finite.

    Where ``wanted`` is all zeros it is ‖got‖.
    """
    if not bool(got.isfinite().all() and wanted.isfinite().all()):
        return float("inf")
    norm = float(wanted.double().norm())
    return float((got.double() - wanted.double()).norm()) / (norm or 1.0)


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same for one device and seed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
