"""How much of the GPU's work is done in fused kernels, and which chains of kernels could be one.

A kernel is **fused** when one launch does the work of two nodes of the graph or more: by the operators that Inductor
lists in its name, by the name that somebody gave it (``gelu_dropout_kernel``), or by the family of a library's kernel
(attention, products with an epilogue, norm and addition in one); the families and where each is known from stand in
``analyzers/derived/kernel_families.toml``. A name that only says what a kernel could do proves nothing. Where a name
says nothing, the operator that launched the kernel does, if it was recorded; else the kernel is unknown and counts as
neither.

Coverage is stated twice: over the kernels that fusing is about, which is the headline, and over all kernels. The first
leaves out what no fusion removes: plain products and convolutions, sorts, communication, and kernels of unknown work.
Its base are fused kernels, pointwise work, copies, gathers, norms and reductions. Each is given by time, by launches
and by bytes of DRAM: as counted, else modelled from operators and shapes.

Chains, and what fusing them saves: ``analyzers/derived/fusion_chains.py``. That a kernel of a chain reads what the one
before it wrote is inferred from bytes, not seen; that nobody else reads it is looked up in the static graph of the
model where the trace has one. What fusing saves of the gaps between launches is not counted.

unfused-chain
-------------
What it means: kernels that follow one another write to memory what the next one only reads again. One kernel in their
place would keep it in registers.

How it is found: fusing would save at least ``min_saved_share`` of the chain's DRAM traffic, which is at least
``min_traffic_bytes`` a run without that of the product in front (less says nothing: it runs in L2), and known to
``max_spread_share`` of itself or better, and the chain takes at least ``min_time_share`` of the kernels' time. What by
the model's graph other kernels read, too, must be written in any case: only reading it again counts as saved. Where
there is no such graph this was not checked, and the finding is a note only. The time it may save is the saved bytes at
the rate that those kernels reach now, which leaves at least what the remaining traffic takes at DRAM's peak.

What to do: compile the module (``torch.compile``), use an operator or kernel that does it in one, or put pointwise work
into the epilogue of the product before it. Whether registers and shared memory allow it, ``fusion-fits`` says.

short-chain
-----------
What it means: kernels that follow one another are so short that each takes little more than a kernel takes to begin and
to end. What they move is of no matter, and may lie in L2 all the time: one kernel in their place would take about as
long as one of them.

How it is found: a chain of which DRAM traffic does not tell has at least ``min_short_count`` kernels, the product in
front not counted, none takes more than ``max_short_ns``, and the chain takes at least ``min_short_time_share`` of the
kernels' time. The time it may save is theirs, less that of the longest; behind a product, all of theirs. Whether each
reads what the one before it wrote is not known.

What to do: compile the module or use a fused operator, as for ``unfused-chain``. A CUDA graph shortens the gaps between
such kernels, not the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from spikeprof.analyzers.base import Basis, Evidence, Finding, Info, Result, Rule, Saving
from spikeprof.analyzers.derived.counters import peaks
from spikeprof.analyzers.derived.fusion_chains import HEADS, Chain, bound_ns, chains, find_runs, light_ns, settled
from spikeprof.analyzers.derived.fusion_consumers import readers
from spikeprof.analyzers.derived.fusion_tables import (
    Kernels,
    Saves,
    chain_table,
    kernel_table,
    kernels,
    member_table,
    metrics,
    read_by,
    verdict_table,
)
from spikeprof.profiler.trace import Trace

_SHOWN_COUNT = 10
_COUNTERS = "spikeprof run --counters -- CMD"
_EPILOGUE = "Put the pointwise work into the epilogue of the product before it, or compile the module."
_ONE_KERNEL = "Do it in one kernel: compile the module, or use a fused operator."
_CHECK = " First make sure that each reads what the one before it wrote, and nothing else does."


@dataclass(frozen=True)
class FusionCoverage:
    """Options: sizes of the tables, what makes a chain, and the limits of the rule."""

    top_count: int = 40  # kernels
    top_chains_count: int = 20
    max_gap_ns: int = 100_000  # between kernels of a chain
    min_read_share: float = 0.75  # of a result, for a kernel to be taken for its reader
    min_known_share: float = 0.5  # of the time, for coverage by bytes to be stated
    min_saved_share: float = 0.35
    max_spread_share: float = 0.5
    min_traffic_bytes: int = 1_048_576
    min_time_share: float = 0.02
    min_short_count: int = 3
    max_short_ns: int = 5_000
    min_short_time_share: float = 0.05
    max_findings_count: int = 3  # of one rule

    info: ClassVar[Info] = Info(
        id="fusion-coverage",
        question="How much of the work is done in fused kernels, and what would fusing more save?",
        needs=("kernels",),
        wants=(
            "devices",
            "memory_ops",
            "ranges",
            "runtime_calls",
            "samples",
            "kernel_classes",
            "counters",
            "origins",
            "kernel_owners",
            "modules",
            "model_nodes",
            "model_tensors",
            "model_edges",
        ),
        rules=(
            Rule("unfused-chain", "Kernels write to memory what only the next one reads", "warning"),
            Rule("short-chain", "Short kernels follow one another that could be one", "info"),
        ),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. ``not_applicable`` where no kernel ran."""
        if not trace.table("kernels").num_rows:
            return Result(self.info.id, "not_applicable", reason="no kernel ran")
        of = kernels(trace)
        runs = find_runs(trace, of.of, of.work, self.max_gap_ns)
        found = chains(trace, of.of, of.work, of.moved, runs, self.top_chains_count)
        found = [
            settled(one, of.moved, answers, self.min_read_share)
            for one, answers in zip(found, readers(trace, found), strict=True)
        ]
        saves = self._saves(trace, of, found)
        known_bytes = any(one.saved_bytes is not None for one in found) or bool(of.moved.known.any())
        findings = tuple(self._findings(of, found, saves))
        length_ns = trace.column("kernels", "end_ns") - trace.column("kernels", "start_ns")
        return Result(
            self.info.id,
            "findings" if findings else "ok",
            collect_with="" if known_bytes else _COUNTERS,
            metrics=metrics(of, runs.kinds_count, int(length_ns[runs.row].sum()), self.min_known_share),
            findings=findings,
            tables={
                "verdicts": verdict_table(of),
                "kernels": kernel_table(of, self.top_count),
                "chains": chain_table(of, found, saves),
                "members": member_table(of, found, saves, self.min_read_share),
            },
        )

    def _saves(self, trace: Trace, of: Kernels, found: Sequence[Chain]) -> list[Saves]:
        """For each chain, the most that fusing it saves of one run's time."""
        rates = {device: peak.dram_bytes_per_s for device, peak in peaks(trace).items()}
        saves = []
        for one in found:
            lengths, light = light_ns(one, of.work), one.light_bytes
            if light is not None and light >= self.min_traffic_bytes:
                rate = rates.get(int(of.of.device[one.members[0]]), float("nan"))
                saves.append(Saves(True, bound_ns(one, of.work, of.moved, rate), "traffic"))
            elif len(lengths) >= self.min_short_count and max(lengths) <= self.max_short_ns:
                stays = max(lengths) if len(lengths) == len(one.members) else 0.0
                saves.append(Saves(False, sum(lengths) - stays, "time"))
            else:
                saves.append(Saves(False, None, ""))
        return saves

    def _findings(self, of: Kernels, found: Sequence[Chain], saves: Sequence[Saves]) -> Iterator[Finding]:
        asked = list(zip(found, saves, strict=True))
        heavy = [(one, save) for one, save in asked if save.told and self._is_heavy(of, one)]
        yield from (self._unfused(of, *each) for each in heavy[: self.max_findings_count])
        short = [
            (one, save)
            for one, save in asked
            if save.why == "time" and _time_share(of, one) >= self.min_short_time_share
        ]
        yield from (self._short(of, *each) for each in short[: self.max_findings_count])

    def _is_heavy(self, of: Kernels, one: Chain) -> bool:
        share, traffic = one.saved_share or 0.0, one.traffic_bytes or 0.0
        known = one.spread_bytes <= self.max_spread_share * traffic
        return known and share >= self.min_saved_share and _time_share(of, one) >= self.min_time_share

    def _unfused(self, of: Kernels, one: Chain, save: Saves) -> Finding:
        traffic, saves = one.traffic_bytes or 0.0, one.saved_bytes or 0.0
        checked = read_by(one) != "not_checked"
        basis: Basis = "modelled" if checked else "inferred"
        evidence = (
            Evidence("saved_share", saves / traffic, self.min_saved_share, "min_saved_share", basis),
            Evidence("traffic_bytes", traffic, basis="measured" if one.source == "counted" else "modelled"),
            Evidence("fused_traffic_bytes", traffic - saves, basis=basis),
            Evidence("gpu_time_share", _time_share(of, one), self.min_time_share, "min_time_share"),
            Evidence("members_count", len(one.members)),
            Evidence("runs_count", one.runs_count),
        )
        return Finding(
            "unfused-chain",
            "warning" if checked else "info",
            _scope(of, one),
            evidence,
            _action(of, one) + ("" if checked else _CHECK),
            _saving(one, save),
        )

    def _short(self, of: Kernels, one: Chain, save: Saves) -> Finding:
        lengths = light_ns(one, of.work)
        evidence = (
            Evidence("members_count", len(lengths), self.min_short_count, "min_short_count"),
            Evidence("longest_ns", max(lengths), self.max_short_ns, "max_short_ns"),
            Evidence("gpu_time_share", _time_share(of, one), self.min_short_time_share, "min_short_time_share"),
            Evidence("runs_count", one.runs_count),
        )
        action = _action(of, one) + _CHECK
        return Finding("short-chain", "info", _scope(of, one), evidence, action, _saving(one, save))


def _time_share(of: Kernels, one: Chain) -> float:
    return one.total_ns / max(int(of.of.total_ns.sum()), 1)


def _saving(one: Chain, save: Saves) -> Saving:
    return Saving(int((save.bound_ns or 0.0) * one.runs_count), "local")


def _scope(of: Kernels, one: Chain) -> dict[str, str | int]:
    """What the chain's kernels do, the middle of a long one left out, and the first kernel by name."""
    names = [of.work[member].does for member in one.members]
    if len(names) > _SHOWN_COUNT:
        names = [*names[: _SHOWN_COUNT // 2], "…", *names[-(_SHOWN_COUNT // 2) :]]
    return {"chain": " → ".join(names), "kernel": of.of.names[one.members[0]]}


def _action(of: Kernels, one: Chain) -> str:
    return _EPILOGUE if of.work[one.members[0]].kind in HEADS else _ONE_KERNEL
