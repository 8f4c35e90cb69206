"""Run a case: check its output against float64, then time it and its twins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from spikeprof.kernels.bench.case import FLOPS, Case, NotMeasured, relative_error
from spikeprof.kernels.bench.peaks import Peaks
from spikeprof.kernels.bench.timing import Call, Times, l2_states, measure

_KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class Timed:
    """Times with one state of L2: of the kernel and of each twin, what it reached, and which part of the peak."""

    l2: str
    kernel: Times
    twins: Mapping[str, Times]
    rate_per_s: float  # bytes or floating-point operations, as the case is bound by; 0 where it moves none
    peak_share: float

    def times_faster(self, twin: str) -> float:
        """The twin's median over the kernel's."""
        return self.twins[twin].median_ns / self.kernel.median_ns


@dataclass(frozen=True, slots=True)
class Measured:
    """One case: the path that ran, the error against float64 (None: nothing to compare), times."""

    case: Case
    path: str
    error: float | None
    timed: tuple[Timed, ...]

    @property
    def correct(self) -> bool:
        """Whether the error is within the case's bound; a result that is not finite never is."""
        return self.error is None or self.error <= self.case.error_bound


def try_case(case: Case | NotMeasured, device: torch.device, peaks: Peaks, runs: int) -> Measured | NotMeasured:
    """As :func:`run_case`; a case that fails says so, and the others still run."""
    if isinstance(case, NotMeasured):
        return case
    try:
        return run_case(case, device, peaks, runs)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        return NotMeasured(case.kernel, f"{case.shape}: {type(error).__name__}: {first_line}", failed=True)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def run_case(case: Case, device: torch.device, peaks: Peaks, runs: int) -> Measured:
    """Check, then time, ``runs`` times in each state of L2."""
    inputs = case.make(device)
    result = case.call(inputs)
    path = result.path
    error = None if case.check is None else relative_error(*case.check(inputs, result.out))
    del result
    calls: dict[str, Call] = {_KERNEL: partial(case.call, inputs)}
    calls |= {name: partial(twin, inputs) for name, twin in case.twins.items()}
    timed = tuple(
        _timed(case, l2, measure(calls, device, l2, runs=runs, queued=case.queued), peaks) for l2 in l2_states(device)
    )
    return Measured(case, path, error, timed)


def _timed(case: Case, l2: str, times: dict[str, Times], peaks: Peaks) -> Timed:
    by_flops = case.bound_by == FLOPS
    peak = peaks.product_flops_per_s if by_flops else peaks.copy_bytes_per_s
    kernel = times.pop(_KERNEL)
    rate = 1e9 * (case.flops if by_flops else case.bytes_moved) / kernel.median_ns
    return Timed(l2, kernel, times, rate, rate / peak)
