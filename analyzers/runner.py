"""Ask every analyzer; one that fails does not stop the others."""

from __future__ import annotations

from collections.abc import Iterable

from spikeprof.analyzers.base import Analyzer, Result
from spikeprof.analyzers.derived.recording import why_refused
from spikeprof.profiler.errors import SpikeprofError
from spikeprof.profiler.trace import Trace

#: The command that collects each table, said where a table is missing.
COLLECT_WITH: dict[str, str] = {
    "kernels": "spikeprof run -- CMD",
    "memory_ops": "spikeprof run -- CMD",
    "runtime_calls": "spikeprof run -- CMD",
    "overheads": "spikeprof run -- CMD",
    "steps": "spikeprof run --clean-steps 20 -- CMD",
    "samples": "spikeprof run -- CMD (on a machine with NVML)",
    "counters": "spikeprof run --counters -- CMD",
    "kernel_classes": "spikeprof run --counters -- CMD",
    "model_nodes": "spikeprof run --graph MODULE:FACTORY -- CMD",
    "tensor_stats": "spikeprof run --numerics -- CMD",
    "topology": "spikeprof run -- CMD (on a machine with NVML)",
}

#: Where a collector was refused: the command above was given, and would be refused again.
DOCTOR = "spikeprof doctor"
#: Tables that a doctor cannot help with: it is the program that gave nothing to collect.
_OF_THE_PROGRAM = ("model_nodes", "tensor_stats")


def run_analyzers(trace: Trace, analyzers: Iterable[Analyzer]) -> list[Result]:
    """One result per analyzer, in order. Never raises for a fault inside an analyzer."""
    return [run_one(trace, analyzer) for analyzer in analyzers]


def run_one(trace: Trace, analyzer: Analyzer) -> Result:
    """One analyzer on the tables it declared. Missing needs become ``not_measured``, a fault ``error``."""
    info = analyzer.info
    missing = [name for name in info.needs if name not in trace]
    if missing:
        return _not_measured(trace, info.id, missing)
    try:
        return analyzer.analyze(trace.restricted((*info.needs, *info.wants)))
    except SpikeprofError as error:
        return Result(info.id, "error", reason=str(error))
    except Exception as error:
        return Result(info.id, "error", reason=f"{type(error).__name__}: {error}")


def _not_measured(trace: Trace, analyzer: str, missing: list[str]) -> Result:
    """Why these tables are not there: they are damaged, their collector was refused, or nobody asked for them."""
    why: list[str] = []
    flags: list[str] = []
    for name in missing:
        refused = "" if name in trace.damaged else why_refused(trace, name)
        why.append(trace.damaged.get(name, refused or f"the table {name!r} was not collected"))
        doctor = "" if name in _OF_THE_PROGRAM else DOCTOR
        flags.append(doctor if refused else COLLECT_WITH.get(name, ""))
    return Result(
        analyzer,
        "not_measured",
        reason="; ".join(dict.fromkeys(why)),
        collect_with=" and ".join(dict.fromkeys(filter(None, flags))),
    )
