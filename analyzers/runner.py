"""Ask every analyzer; one that fails does not stop the others."""

from __future__ import annotations

from collections.abc import Iterable

from spikeprof.analyzers.base import Analyzer, Result
from spikeprof.profiler.errors import SpikeprofError
from spikeprof.profiler.trace import Trace

#: The command that collects each table, said where a table is missing.
COLLECT_WITH: dict[str, str] = {
    "kernels": "spikeprof run -- CMD",
    "memory_ops": "spikeprof run -- CMD",
    "runtime_calls": "spikeprof run -- CMD",
    "steps": "spikeprof run --clean-steps 20 -- CMD",
    "samples": "spikeprof run -- CMD (on a machine with NVML)",
    "counters": "spikeprof run --counters -- CMD",
    "kernel_classes": "spikeprof run --counters -- CMD",
    "model_nodes": "spikeprof run --graph MODULE:FACTORY -- CMD",
    "tensor_stats": "spikeprof run --numerics -- CMD",
    "topology": "spikeprof run -- CMD (on a machine with NVML)",
}


def run_analyzers(trace: Trace, analyzers: Iterable[Analyzer]) -> list[Result]:
    """One result per analyzer, in order. Never raises for a fault inside an analyzer."""
    return [run_one(trace, analyzer) for analyzer in analyzers]


def run_one(trace: Trace, analyzer: Analyzer) -> Result:
    """One analyzer on the tables it declared. Missing needs become ``not_measured``, a fault ``error``."""
    info = analyzer.info
    missing = [name for name in info.needs if name not in trace]
    if missing:
        why = "; ".join(trace.damaged.get(name, f"the table {name!r} was not collected") for name in missing)
        flags = dict.fromkeys(COLLECT_WITH[name] for name in missing if name in COLLECT_WITH)
        return Result(info.id, "not_measured", reason=why, collect_with=" and ".join(flags))
    try:
        return analyzer.analyze(trace.restricted((*info.needs, *info.wants)))
    except SpikeprofError as error:
        return Result(info.id, "error", reason=str(error))
    except Exception as error:
        return Result(info.id, "error", reason=f"{type(error).__name__}: {error}")
