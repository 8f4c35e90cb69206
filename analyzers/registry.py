"""The list of analyzers, in the order in which reports show them. One line each."""

from __future__ import annotations

from spikeprof.analyzers.base import Analyzer, Rule
from spikeprof.analyzers.cache_miss import CacheMiss
from spikeprof.analyzers.fusion_boundary import FusionBoundary
from spikeprof.analyzers.fusion_coverage import FusionCoverage
from spikeprof.analyzers.kernel_latency import KernelLatency
from spikeprof.analyzers.late_compilation import LateCompilation
from spikeprof.analyzers.launch_gaps import LaunchGaps
from spikeprof.analyzers.model_graph import ModelGraph
from spikeprof.analyzers.overflow import Overflow
from spikeprof.analyzers.ownership import Ownership
from spikeprof.analyzers.steps import Steps
from spikeprof.analyzers.topology import Topology
from spikeprof.analyzers.truth import Truth

#: Truth first: every report begins with what the recording can be trusted for.
ANALYZERS: tuple[Analyzer, ...] = (
    Truth(),
    Steps(),
    KernelLatency(),
    Ownership(),
    CacheMiss(),
    FusionBoundary(),
    FusionCoverage(),
    LaunchGaps(),
    LateCompilation(),
    Overflow(),
    ModelGraph(),
    Topology(),
)


def rules() -> dict[str, tuple[Analyzer, Rule]]:
    """Every rule by name, with the analyzer that can find it."""
    return {rule.name: (analyzer, rule) for analyzer in ANALYZERS for rule in analyzer.info.rules}
