"""How well launches fill the GPU, and which neighbours would fit into one kernel.

Occupancy is theoretical: how many blocks an SM of the GPU's architecture can hold, by registers, shared memory and its
slots for warps and blocks, as the CUDA occupancy calculator has it. From the grid follow waves: rounds of blocks that
fit at once. Both assume what a recording does not tell: that blocks take equally long, that launches use few named
barriers, and that they are not launched in clusters, which need room on neighbouring SMs and may let fewer blocks run.

Where hardware counters were sampled, the share of SMs at work stands beside what the grid lets expect, and
U = (warps × IPC / W_max) × (1 - R_used / R_total)² is given: the use of an SM by warps that issue, less what a block's
registers leave no room for. Warps are those on an SM that has a block, from occupancy and grid; IPC are warp
instructions per cycle of such an SM, from counters and the sampled clock; W_max are the SM's slots for warps (64 on
Hopper); R_used are the registers of one block, R_total those of the SM. U is above 1 where several instructions are
issued per cycle. Counters of warps are not sampled, so that U is modelled in part. Where IPC is known no better than
within ``max_bounds_ratio``, U is not given.

What fusing two neighbours would need is an upper bound: registers of both threads together, the larger of the blocks,
shared memory of both. Whether the second reads what the first writes is not known here. Only what takes at least
``min_time_share`` (two neighbours: ``min_pair_time_share``) of the kernels' time is named by a rule, and no kernel
that by its name moves data between GPUs (NCCL, all-reduce and the like): these take few SMs on purpose.

small-grid
----------
What it means: a kernel has too few blocks for the SMs: most of them have nothing to do while it runs.

How it is found: if every block went to an SM of its own, at most ``few_sms_share`` of the SMs would have one.

What to do: give it more blocks: split the reduced dimension (split-K, flash decoding), take smaller tiles, batch more
work into a launch; or let other streams run beside it.

low-occupancy
-------------
What it means: registers, shared memory or the size of its blocks let SMs hold only few of a kernel's warps, though its
grid has enough. Few warps hide little latency. Kernels that copy asynchronously and keep tensor cores busy do well with
one block per SM: for them this is no fault.

How it is found: occupancy is at most ``low_occupancy_share``, and the grid fills at least one wave.

What to do: lower what the named resource is used for: registers (``__launch_bounds__``, ``maxnreg``, smaller tiles per
thread), shared memory (fewer stages), or choose blocks whose size divides the SM's.

tail-wave
---------
What it means: the last wave of blocks fills only a part of the GPU, and all wait for it.

How it is found: with more than one wave, at least ``large_tail_share`` of the room for blocks stands empty over all
waves, if blocks take equally long.

What to do: choose tiles or a split so that blocks fill whole waves, or a persistent kernel with one block per slot.

idle-blocks
-----------
What it means: SMs work for much less of a kernel's time than its grid lets expect: blocks end early, are of uneven
length, or the launch itself takes most of the time.

How it is found: the upper bound of the measured share of SMs at work is at most ``low_activity_share`` of the share
that the grid lets expect.

What to do: launch only blocks that have work, share it out evenly among them, or fuse the kernel with a neighbour if it
is short.

fusion-fits
-----------
What it means: two kernels follow one another often, and one in place of both would stay within registers and shared
memory.

How it is found: on one stream the second comes right after the first, at most ``max_gap_ns`` later, at least
``min_pairs_count`` times; registers of both together stay within ``max_registers_share`` of what a thread and an SM
have, shared memory of both within ``max_shared_bytes`` per block (48 KB: what a block has without opting in to more).

What to do: fuse them if the second needs, block by block, what the first writes.

fusion-too-large
----------------
What it means: two kernels follow one another often, but one in place of both would be short of the named resource:
registers would spill, or an SM would hold too few blocks.

How it is found: as fusion-fits, but registers pass ``max_registers_share`` of a thread's or of the SM's, or already the
larger of both shared memories passes ``max_shared_bytes``.

What to do: keep them apart. Where one of the two is beyond a limit by itself, as most matrix products are, the other
may still go into its prologue or epilogue, if it is light.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from spikeprof.analyzers.base import Evidence, Finding, Info, Metric, Result, Rule, Saving
from spikeprof.analyzers.derived.boundary_tables import Study, class_table, metrics, pair_table
from spikeprof.analyzers.derived.counters import Estimate, Floats
from spikeprof.analyzers.derived.intervals import Bools
from spikeprof.analyzers.derived.launch_shapes import activity, held_warps, launches
from spikeprof.analyzers.derived.neighbours import VERDICTS, fused, neighbours
from spikeprof.analyzers.derived.occupancy import REASONS
from spikeprof.profiler.trace import Trace

_COUNTERS = "spikeprof run --counters -- CMD"
_FEWER = {
    "registers": "Use fewer registers per thread (launch bounds, smaller tiles).",
    "shared_memory": "Use less shared memory per block (fewer stages, smaller tiles).",
    "warps": "Choose a block size that divides the threads of an SM.",
    "blocks": "Use larger blocks: an SM has no slots for more of these.",
}
_BOTH = "Use fewer registers and less shared memory: less of one alone changes nothing."
_TOO_LARGE = "Keep the two apart, or fuse them with smaller tiles."
_ALONE = "Keep the two apart: one is too large by itself, and has room in its prologue or epilogue at most."


@dataclass(frozen=True)
class FusionBoundary:
    """Options: sizes of the tables, and the limits of the rules."""

    top_count: int = 20
    min_time_share: float = 0.03
    min_pair_time_share: float = 0.05
    few_sms_share: float = 0.5
    low_occupancy_share: float = 0.25
    large_tail_share: float = 0.25
    low_activity_share: float = 0.5
    max_registers_share: float = 0.85
    max_shared_bytes: int = 49_152
    min_pairs_count: int = 20
    max_gap_ns: int = 100_000
    max_bounds_ratio: float = 2.0
    max_findings_count: int = 3  # of one rule

    info: ClassVar[Info] = Info(
        id="fusion-boundary",
        question="How well do launches fill the GPU, and which neighbours would fit into one kernel?",
        needs=("kernels",),
        wants=("devices", "memory_ops", "windows", "kernel_classes", "counters", "samples"),
        rules=(
            Rule("small-grid", "A kernel leaves most SMs without work", "info"),
            Rule("low-occupancy", "SMs hold few warps of a kernel", "info"),
            Rule("tail-wave", "The last wave of blocks leaves much of the GPU empty", "warning"),
            Rule("idle-blocks", "SMs work less than the grid lets expect", "info"),
            Rule("fusion-fits", "Neighbouring kernels would fit into one", "info"),
            Rule("fusion-too-large", "Neighbouring kernels would not fit into one", "info"),
        ),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. ``not_measured`` where no launch's occupancy is known."""
        of = launches(trace)
        if not len(of.names):
            return Result(self.info.id, "not_applicable", reason="no kernel ran while recording")
        occupied = of.occupancy()
        if not occupied.known.any():
            why = REASONS[int(np.bincount(occupied.unknown, of.total_ns + 1, minlength=len(REASONS)).argmax())]
            return Result(self.info.id, "not_measured", reason=why, collect_with="spikeprof run -- CMD")
        pairs = neighbours(trace, of, self.max_gap_ns)
        study = Study(
            of,
            occupied,
            of.waves(occupied),
            activity(trace, of, self.max_bounds_ratio),
            pairs,
            fused(pairs, of, occupied, self.max_registers_share, self.max_shared_bytes),
        )
        moves = study.communicates
        often = (pairs.met_count >= self.min_pairs_count) & ~moves[pairs.first] & ~moves[pairs.second]
        findings = (
            *self._grids(study),
            *self._occupancies(study),
            *self._tails(study),
            *self._idle_blocks(study),
            *self._pairs(study, often, "fits"),
            *self._pairs(study, often, "too_large"),
        )
        found = metrics(study, often, held_warps(trace, of, study.held_share))
        return Result(
            self.info.id,
            "findings" if findings else "ok",
            reason=_limits(study),
            collect_with=_COUNTERS if _lacks_counters(found) else "",
            metrics=found,
            findings=findings,
            tables={
                "classes": class_table(study, self.top_count),
                "pairs": pair_table(study, often, self.top_count),
            },
        )

    # ---------------------------------------------------------------- rules about one kernel

    def _named(self, study: Study, which: Bools) -> Iterator[tuple[int, float]]:
        """(class, share of the kernels' time) of those that take enough of it, one per kernel, longest first."""
        shares = study.time_shares
        which = which & ~study.communicates
        seen: set[str] = set()
        for row in np.argsort(-shares, kind="stable").tolist():
            name = study.of.names[row]
            if which[row] and shares[row] >= self.min_time_share and name not in seen:
                seen.add(name)
                yield row, float(shares[row])
                if len(seen) == self.max_findings_count:
                    return

    def _finding(
        self, study: Study, rule: str, row: int, share: float, evidence: tuple[Evidence, ...], action: str, **more: Any
    ) -> Finding:
        severity = next(r.severity for r in self.info.rules if r.name == rule)
        time = Evidence("gpu_time_share", share, self.min_time_share, "min_time_share")
        return Finding(rule, severity, study.of.scope(row), (*evidence, time), action, **more)

    def _grids(self, study: Study) -> Iterator[Finding]:
        active = study.waves.active_sms_share
        for row, share in self._named(study, (study.waves.waves <= 1) & (active <= self.few_sms_share)):
            evidence = (
                Evidence(
                    "expected_sm_active_share", float(active[row]), self.few_sms_share, "few_sms_share", "modelled"
                ),
                *_measured("sm_active_share", study.activity.sm_active, row),
                Evidence("grid_blocks_count", int(study.of.grid_blocks[row])),
                Evidence("sm_count", int(study.of.sm_count[row])),
            )
            action = "Give it more blocks (split-K, smaller tiles, more work per launch), or run others beside it."
            yield self._finding(
                study, "small-grid", row, share, evidence, action, saving=_part(study, row, 1 - active[row])
            )

    def _occupancies(self, study: Study) -> Iterator[Finding]:
        share_of = study.occupied.share
        for row, share in self._named(study, (study.waves.waves >= 1) & (share_of <= self.low_occupancy_share)):
            limiters = study.occupied.limiters(row)
            evidence = (
                Evidence(
                    "occupancy_share",
                    float(share_of[row]),
                    self.low_occupancy_share,
                    "low_occupancy_share",
                    "modelled",
                ),
                Evidence("active_warps_count", int(study.occupied.warps[row]), basis="modelled"),
                Evidence("registers_count", int(study.of.shapes.registers[row])),
                Evidence("shared_bytes", int(study.of.shapes.shared_bytes[row])),
                *_measured("instructions_per_cycle_ratio", study.activity.per_cycle, row),
            )
            action = _BOTH if {"registers", "shared_memory"} <= set(limiters) else _FEWER[limiters[-1]]
            found = self._finding(study, "low-occupancy", row, share, evidence, action)
            yield _with_scope(found, limiter="+".join(limiters))

    def _tails(self, study: Study) -> Iterator[Finding]:
        tail = study.waves.tail_share
        for row, share in self._named(study, (study.waves.waves > 1) & (tail >= self.large_tail_share)):
            evidence = (
                Evidence("tail_share", float(tail[row]), self.large_tail_share, "large_tail_share", "modelled"),
                Evidence("waves_ratio", float(study.waves.waves[row]), basis="modelled"),
                Evidence("grid_blocks_count", int(study.of.grid_blocks[row])),
                Evidence("active_blocks_count", int(study.occupied.blocks[row]), basis="modelled"),
            )
            action = "Choose tiles or a split that fill whole waves, or a persistent kernel."
            yield self._finding(study, "tail-wave", row, share, evidence, action, saving=_part(study, row, tail[row]))

    def _idle_blocks(self, study: Study) -> Iterator[Finding]:
        expected = study.waves.active_sms_share
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = study.activity.sm_active.high / expected
        for row, share in self._named(study, ratio <= self.low_activity_share):
            measured = float(study.activity.sm_active.value[row])
            evidence = (
                Evidence("sm_active_share", measured),
                Evidence("expected_sm_active_share", float(expected[row]), basis="modelled"),
                Evidence(
                    "activity_of_expected_share", float(ratio[row]), self.low_activity_share, "low_activity_share"
                ),
                Evidence("mean_ns", float(study.of.total_ns[row] / study.of.launches[row])),
            )
            action = "Launch only blocks that have work, and share it out evenly; fuse the kernel if it is short."
            yield self._finding(study, "idle-blocks", row, share, evidence, action)

    # ---------------------------------------------------------------- rules about neighbours

    def _pairs(self, study: Study, often: Bools, verdict: str) -> Iterator[Finding]:
        pairs, made = study.pairs, study.fused
        shares = study.pair_shares
        which = often & (made.verdict == VERDICTS.index(verdict)) & (shares >= self.min_pair_time_share)
        order = [row for row in np.argsort(-shares, kind="stable").tolist() if which[row]]
        for row in order[: self.max_findings_count]:
            scope = study.of.scope(int(pairs.first[row])) | {"next_kernel": study.of.names[pairs.second[row]]}
            evidence = (
                *self._needs(study, row),
                Evidence("pair_time_share", float(shares[row]), self.min_pair_time_share, "min_pair_time_share"),
                Evidence("met_count", int(pairs.met_count[row]), self.min_pairs_count, "min_pairs_count"),
                Evidence("gap_ns", float(pairs.gap_ns[row])),
            )
            if verdict == "fits":
                action = "Fuse the two if the second needs, block by block, what the first writes."
                yield Finding("fusion-fits", "info", scope, evidence, action)
            else:
                scope |= {"resource": "+".join(made.lacks(row))}
                action = _ALONE if made.one_alone[row] else _TOO_LARGE
                yield Finding("fusion-too-large", "info", scope, evidence, action)

    def _needs(self, study: Study, row: int) -> Iterator[Evidence]:
        """What a fused kernel would need against the limits, what it lacks first."""
        made = study.fused
        lacks = made.lacks(row)
        needs = {
            "thread_registers": Evidence(
                "thread_registers_share",
                float(made.occupied.thread_registers_share[row]),
                self.max_registers_share,
                "max_registers_share",
                "modelled",
            ),
            "block_registers": Evidence(
                "block_registers_share",
                float(made.occupied.registers_share[row]),
                self.max_registers_share,
                "max_registers_share",
                "modelled",
            ),
            "shared_memory": Evidence(
                "shared_max_bytes" if "shared_memory" in lacks else "shared_sum_bytes",
                int((made.shared_max_bytes if "shared_memory" in lacks else made.shared_sum_bytes)[row]),
                self.max_shared_bytes,
                "max_shared_bytes",
                "modelled",
            ),
        }
        yield from (needs[name] for name in sorted(needs, key=lambda name: name not in lacks))


def _measured(name: str, of: Estimate, row: int) -> Iterator[Evidence]:
    """A counted number of a class, where it is known."""
    if np.isfinite(of.value[row]):
        yield Evidence(name, float(of.value[row]))


def _part(study: Study, row: int, share: Floats) -> Saving:
    """A part of the time of a class."""
    return Saving(int(study.of.total_ns[row] * float(share)), "local")


def _with_scope(finding: Finding, **more: str) -> Finding:
    return Finding(
        finding.rule,
        finding.severity,
        {**finding.scope, **more},
        finding.evidence,
        finding.recommendation,
        finding.saving,
    )


def _lacks_counters(found: tuple[Metric, ...]) -> bool:
    return any(metric.value is None and metric.name == "sm_active_share" for metric in found)


def _limits(study: Study) -> str:
    """What bounds the answer, empty where nothing does."""
    if study.occupied.may_cluster.any():
        return "the sizes of clusters are not recorded: of launches in clusters, fewer blocks may run at once"
    return ""
