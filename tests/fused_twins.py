"""What a program is predicted to save by fusing, and what its fused twins save.

Of recordings of ``gpu/fusion_programs.py``, those made now on a GPU and those in ``sample_traces``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from gpu.fusion_programs import REPEATS

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.derived.fusion_tables import kernels
from spikeprof.analyzers.fusion_coverage import FusionCoverage
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.trace import Trace

#: Programs by name, and their twins: one that does all in one kernel, or two, of which each saves one of two edges.
TWINS = {
    "silu_mul": ("fused",),
    "linear_silu": ("fused",),
    "rms_norm": ("fused",),
    "gemm_silu_mul": ("first", "second"),
}
#: Their fused product is another kernel than the product apart: it takes another time.
_OTHER_PRODUCT = ("linear_silu", "gemm_silu_mul")
_WARM_UP = 3


class Saved(NamedTuple):
    """Of one repeat of the program: bytes of DRAM and ns, as predicted (ns: at most) and as the twins save them."""

    predicted_bytes: float
    saved_bytes: float
    predicted_ns: float
    saved_ns: float


def asked(trace: Trace) -> Result:
    result = run_one(trace, FusionCoverage(min_time_share=0.0))
    assert result.status in ("ok", "findings"), result.reason
    return result


def moved(trace: Trace) -> tuple[float, float]:
    """(bytes of DRAM, ns) of one repeat."""
    of = kernels(trace)
    often = of.of.launches >= REPEATS
    assert of.moved.known[often].all()
    times = REPEATS + _WARM_UP
    return float(of.moved_bytes[often].sum()) / times, float(of.of.total_ns[often].sum()) / times


def saved(eager: Trace, twins: Sequence[Trace]) -> Saved:
    """Several twins save a part of the chain each; one saves all of it and leaves no chain."""
    result, before = asked(eager), moved(eager)
    assert "unfused-chain" in {f.rule for f in result.findings}
    table = result.tables["chains"]
    # A pause that fails to come joins two repeats.
    (chain,) = (i for i, runs in enumerate(table["runs_count"]) if runs >= REPEATS - 3)
    after = [moved(twin) for twin in twins]
    if len(twins) == 1:
        assert "unfused-chain" not in {f.rule for f in asked(twins[0]).findings}
    return Saved(
        table["saved_bytes"][chain],
        sum(before[0] - one[0] for one in after),
        table["saving_ns"][chain] / table["runs_count"][chain],
        sum(before[1] - one[1] for one in after),
    )


def check_saved(name: str, one: Saved) -> None:
    """Within 20 %; the time only where the twins differ by nothing but what they fuse."""
    assert one.predicted_bytes == pytest.approx(one.saved_bytes, rel=0.2), one
    if name not in _OTHER_PRODUCT:
        assert one.predicted_ns == pytest.approx(one.saved_ns, rel=0.2), one


def check_coverage(eager: Trace, compiled: Trace) -> None:
    """By time, of a program of pointwise operators: nothing is fused, and what is compiled nearly all."""
    shares = [asked(trace).metric("fused_time_share") for trace in (eager, compiled)]
    assert shares[0] == 0, shares
    assert shares[1] > 0.8, shares
