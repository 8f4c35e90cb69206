"""What kernels ask of caches and DRAM, per launch, and what pattern that is.

Counters are those that were sampled during the run and attributed to kernels by time (``spikeprof run --counters``);
every number has a lower and an upper bound, and says how it was matched: *exact* (its own samples) or *class* (solved
over identical launches). Sectors have 32 bytes. The L2 hit share is that of fetching: lookups less filled sectors,
over lookups. DRAM's peak is the data sheet's; copies reach 88 to 90 % of it on an H200. Only classes that take at
least ``min_time_share`` of the kernels' counted time are named by a rule, and only where the lower bound of what a rule
looks for reaches its limit.

FLOP/s in the roofline are inferred: the share of cycles in which the tensor pipes work, times the peak of dense fp16
products. They are too low for fp8 and too high at clocks below those of the data sheet.

streaming
---------
What it means: a kernel moves data through DRAM about as fast as it can, and uses it once. It is bound by bandwidth: no
change to its arithmetic will make it faster.

How it is found: DRAM bytes read and written, over the time, are at least ``streaming_peak_share`` of DRAM's peak (an
H200 reached 88 % on an element-wise kernel over 1 GiB), and L2 looks up fewer than ``streaming_reuse_ratio`` bytes per
byte moved (1.6 there, 6.4 in a large matrix product).

What to do: fuse it with the kernels before or after it, or shrink the data (fewer bytes per element).

l2-thrash
---------
What it means: what a kernel writes leaves L2 before the kernel after it reads it, although it is not much larger than
L2. The same bytes go out to DRAM and come back.

How it is found: DRAM bytes per launch are more than one L2 but at most ``thrash_l2_ratio`` of them, over the time at
least ``thrash_peak_share`` of DRAM's peak; written bytes are at least ``thrash_written_ratio`` of those read; and the
kernels right after it on its stream read from DRAM, on average, at least ``thrash_read_back_share`` of what it wrote.
That they read the same bytes is inferred: counters do not tell addresses.

What to do: work on pieces that fit in L2 one after the other, or fuse the kernels.

random-gather
-------------
What it means: a kernel reads scattered elements: DRAM fetches whole 64-byte pieces of which it uses a few bytes.

How it is found: DRAM moves at least ``overfetch_ratio`` times the bytes that SMs asked of L2 (1.7 in a gather of random
2-byte elements on an H200, 1.0 in element-wise kernels). Where asked bytes are not known because loads go past L1 (L2
looks up more than ``max_l2_per_asked_ratio`` sectors for each) or L1 was not counted: L2 fills at least
``overfilled_ratio`` sectors per sector looked up (1.25 in that gather; at most 1 where nothing is fetched in vain).

What to do: sort or block the indices, so that neighbours are read together; or gather whole rows of 64 bytes or more.

partial-sector
--------------
What it means: a kernel writes parts of sectors here and there: to write a whole one, the rest of it is read first.

How it is found: as random-gather, but DRAM bytes written are at least ``partial_written_ratio`` of those read. Written
bytes count beyond one full L2: so much may be left from kernels before.

What to do: let neighbouring threads write neighbouring bytes, whole 32-byte sectors at least.

write-back
----------
What it means: much of what kernels write reaches DRAM after they ended, in idle time: their own counts are too low.

How it is found: at least ``idle_written_share`` of all DRAM bytes written fall into idle time, they are at least
``idle_written_traffic_share`` of all DRAM traffic, and of the bytes read less than half that share falls there: other
work on the GPU would read, too.

What to do: compare written bytes over whole runs, not kernel by kernel.

bank-conflicts
--------------
What it means: threads of a warp hit the same bank of shared memory at once, so that accesses wait for one another.

How it is found: at least ``conflict_share`` of a class's shared-memory wavefronts are due to conflicts: a two-way
conflict in every second access is a third.

What to do: pad or swizzle the layout in shared memory.

low-l2-hit
----------
What it means: for most of the time kernels fetch nearly all that they ask for from DRAM.

How it is found: kernels that no pattern above names and whose L2 hit share is at most ``low_hit_share`` take at least
``low_hit_time_share`` of the counted time, and move at least ``low_hit_peak_share`` of DRAM's peak meanwhile. Reading
data once, as the weights of a decode step are, does that.

What to do: read less: smaller data types, larger batches per pass over the data, fused kernels.

gpu-shared
----------
What it means: while the program had no work on the GPU, counters went on: of other processes, or of one of the
program's that was not recorded. Counters know no process: kernels of the program have such counts in theirs, too.

How it is found: at least ``other_work_share`` of the instructions (where they were not counted: of the L2 sectors) fall
into idle time. An idle H200 counts no instructions, and 0.01 % of the sectors of a busy one.

What to do: repeat the recording with the GPU to itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from spikeprof.analyzers.base import Evidence, Figure, Finding, Info, Result, Rule, Saving
from spikeprof.analyzers.derived.counter_balance import Balance, balance_table, balances
from spikeprof.analyzers.derived.counter_tables import (
    class_table,
    launch_table,
    matrix,
    memory_roof,
    roofline,
    summary,
)
from spikeprof.analyzers.derived.counter_timeline import counter_timeline
from spikeprof.analyzers.derived.counters import Classes, Floats, followers, kernel_classes, peaks, single_launches
from spikeprof.analyzers.derived.memory_patterns import NO_PATTERN, PATTERNS, Limits, patterns
from spikeprof.analyzers.derived.memory_use import MemoryUse, memory_use
from spikeprof.profiler.trace import Trace

_MAX_ROWS = 2_000  # of a table that is drawn
_WORK_METRICS = ("instructions_count", "l2_sectors_count")
_ACTIONS = {
    "streaming": "Fuse it with the kernels around it, or shrink its data: it is bound by DRAM bandwidth.",
    "l2-thrash": "Work on pieces that fit in L2 one after the other, or fuse it with the kernel after it.",
    "random-gather": "Sort or block the indices, or gather whole rows of 64 bytes or more.",
    "partial-sector": "Let neighbouring threads write neighbouring bytes, whole 32-byte sectors at least.",
}


@dataclass(frozen=True)
class CacheMiss:
    """Options: sizes of the tables, and the limits of the rules."""

    top_count: int = 20
    bins_count: int = 250
    min_time_share: float = 0.05
    streaming_peak_share: float = 0.7
    streaming_reuse_ratio: float = 3.0
    thrash_peak_share: float = 0.5
    thrash_l2_ratio: float = 4.0
    thrash_written_ratio: float = 0.25
    thrash_read_back_share: float = 0.5
    overfetch_ratio: float = 1.3
    overfilled_ratio: float = 1.1
    max_l2_per_asked_ratio: float = 2.5
    partial_written_ratio: float = 0.5
    idle_written_share: float = 0.1
    idle_written_traffic_share: float = 0.02
    conflict_share: float = 0.25
    low_hit_share: float = 0.3
    low_hit_time_share: float = 0.5
    low_hit_peak_share: float = 0.3
    other_work_share: float = 0.05
    max_findings_count: int = 3  # of one rule

    info: ClassVar[Info] = Info(
        id="cache-miss",
        question="What do kernels ask of caches and DRAM, and where does the memory hold them back?",
        needs=("kernel_classes", "counters"),
        wants=("kernels", "devices", "counter_balance", "counter_samples", "cpu_cache"),
        rules=(
            Rule("streaming", "A kernel is bound by DRAM bandwidth", "info"),
            Rule("l2-thrash", "Data leaves L2 before the next kernel reads it", "warning"),
            Rule("random-gather", "Scattered reads fetch more than they use", "warning"),
            Rule("partial-sector", "Scattered writes move more than they write", "warning"),
            Rule("write-back", "Much is written to DRAM after the kernels ended", "info"),
            Rule("bank-conflicts", "Accesses to shared memory wait for one another", "warning"),
            Rule("low-l2-hit", "L2 serves little of what is asked most of the time", "info"),
            Rule("gpu-shared", "Other work ran on the GPU", "warning"),
        ),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. ``not_applicable`` when no kernel ran while counters were sampled."""
        classes, limits = kernel_classes(trace), peaks(trace)
        if not classes.names and "kernels" not in trace:
            why = "kernels were not recorded, so that counts have no kernel to belong to"
            return Result(self.info.id, "not_measured", reason=why, collect_with="spikeprof run --counters -- CMD")
        if not classes.counted.launches.any():
            return Result(self.info.id, "not_applicable", reason="no kernel ran while counters were sampled")
        use = memory_use(classes.counted, limits, self.max_l2_per_asked_ratio)
        found = balances(trace)
        used = [b for b in found if b.time_ns.get("kernels", 0) > 0]  # what runs on other GPUs is not this program's
        read_back = followers(trace, classes, use.dram_read.value)
        pattern = patterns(use, read_back, self._limits())
        largest = "dram_read_bytes" if "dram_read_bytes" in classes.counted.counts else "l2_sectors_count"
        rows, launches = single_launches(trace, largest, self.top_count)
        launch_use = memory_use(launches, limits, self.max_l2_per_asked_ratio)
        tables = {
            "classes": class_table(classes, use, pattern, self.top_count),
            "launches": launch_table(trace, rows, classes, launches, launch_use),
            "matrix": matrix(classes, use, self.top_count),
            "timeline": counter_timeline(trace, self.bins_count, _MAX_ROWS),
            "balance": balance_table(found),
            "roofline": roofline(classes, use, limits, self.top_count),
            "memory_roof": memory_roof(classes, use, self.top_count),
        }
        findings = (
            *self._patterns(classes, use, pattern, read_back),
            *self._conflicts(classes, use),
            *self._low_hit(classes, use, pattern),
            *self._write_back(used),
            *self._shared(used),
        )
        return Result(
            self.info.id,
            "findings" if findings else "ok",
            reason="counts per launch are means over the whole recording" if trace.is_part else "",
            collect_with="spikeprof run --counters=SET -- CMD",
            metrics=summary(trace, classes, use, used, limits),
            findings=findings,
            tables=tables,
            figures=_figures(tables),
        )

    def _limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in Limits.__slots__})

    # ---------------------------------------------------------------- rules about classes

    def _named(self, classes: Classes, mask: Any) -> Iterator[tuple[int, float]]:
        """(class, share of the counted time) of those in the mask that matter, the longest first, each name once."""
        time_ns = _counted_ns(classes)
        shares = time_ns / max(float(time_ns.sum()), 1.0)
        chosen = np.flatnonzero(mask & (shares >= self.min_time_share))
        seen: set[str] = set()
        for row in chosen[np.argsort(-shares[chosen], kind="stable")].tolist():
            if classes.names[row] not in seen and len(seen) < self.max_findings_count:
                seen.add(classes.names[row])
                yield row, float(shares[row])

    def _finding(
        self,
        rule: str,
        classes: Classes,
        row: int,
        share: float,
        evidence: tuple[Evidence, ...],
        action: str,
        **more: Any,
    ) -> Finding:
        scope = classes.scope(row)
        if len(set(classes.counted.device.tolist())) > 1:
            scope["device"] = int(classes.counted.device[row])
        severity = next(r.severity for r in self.info.rules if r.name == rule)
        time = Evidence("counted_time_share", share, self.min_time_share, "min_time_share")
        return Finding(rule, severity, scope, (*evidence, time), action, **more)

    def _patterns(self, classes: Classes, use: MemoryUse, pattern: Any, read_back: Floats) -> Iterator[Finding]:
        for number, rule in enumerate(PATTERNS):
            for row, share in self._named(classes, pattern == number):
                evidence: tuple[Evidence, ...]
                if rule in ("random-gather", "partial-sector"):
                    evidence, saving = self._vain(use, row), _saving(classes, use, row)
                else:
                    evidence, saving = self._busy(use, row, rule, float(read_back[row])), None
                yield self._finding(rule, classes, row, share, evidence, _ACTIONS[rule], saving=saving)

    def _vain(self, use: MemoryUse, row: int) -> tuple[Evidence, ...]:
        """What was fetched and not used."""
        if np.isfinite(use.overfetch.value[row]):
            ratio = use.overfetch.value[row]
            first = Evidence("dram_per_asked_ratio", float(ratio), self.overfetch_ratio, "overfetch_ratio")
        else:
            ratio = use.l2_filled.value[row]
            first = Evidence("l2_filled_ratio", float(ratio), self.overfilled_ratio, "overfilled_ratio")
        return (first, *_some(use, row, "dram_read_bytes", "dram_written_bytes", "dram_peak_share", "l2_hit_share"))

    def _busy(self, use: MemoryUse, row: int, rule: str, read_back: float) -> tuple[Evidence, ...]:
        """How busy DRAM was, and with what."""
        option = "streaming_peak_share" if rule == "streaming" else "thrash_peak_share"
        first = Evidence("dram_peak_share", float(use.peak_share.value[row]), getattr(self, option), option)
        if rule == "streaming":
            reuse = float(use.reuse.value[row])
            limit = Evidence("l2_per_dram_ratio", reuse, self.streaming_reuse_ratio, "streaming_reuse_ratio")
            return (first, limit, *_some(use, row, "dram_bytes_per_s", "dram_read_bytes", "dram_written_bytes"))
        moved = float(use.dram_moved.value[row] / use.l2_bytes[row])
        return (
            first,
            Evidence("dram_per_l2_size_ratio", moved, self.thrash_l2_ratio, "thrash_l2_ratio"),
            *_some(use, row, "dram_read_bytes", "dram_written_bytes"),
            Evidence("read_after_bytes", read_back, basis="inferred"),
        )

    def _conflicts(self, classes: Classes, use: MemoryUse) -> Iterator[Finding]:
        for row, share in self._named(classes, use.conflicts.low >= self.conflict_share):
            value = float(use.conflicts.value[row])
            evidence = (Evidence("bank_conflict_share", value, self.conflict_share, "conflict_share"),)
            action = "Pad or swizzle the layout in shared memory."
            saving = Saving(int(value * classes.counted.total_ns[row]), "local")
            yield self._finding("bank-conflicts", classes, row, share, evidence, action, saving=saving)

    def _low_hit(self, classes: Classes, use: MemoryUse, pattern: Any) -> Iterator[Finding]:
        time_ns = _counted_ns(classes)
        low = (use.l2_hit.value <= self.low_hit_share) & (pattern == NO_PATTERN) & (time_ns > 0)
        share = float(time_ns[low].sum() / max(float(time_ns.sum()), 1.0))
        with_peak = low & np.isfinite(use.peak_share.value)
        if share < self.low_hit_time_share or not with_peak.any():
            return
        busy = float(np.average(use.peak_share.value[with_peak], weights=time_ns[with_peak]))
        if busy < self.low_hit_peak_share:
            return
        hit = float(np.average(use.l2_hit.value[low], weights=time_ns[low]))
        evidence = (
            Evidence("low_hit_time_share", share, self.low_hit_time_share, "low_hit_time_share"),
            Evidence("l2_hit_share", hit, self.low_hit_share, "low_hit_share"),
            Evidence("dram_peak_share", busy, self.low_hit_peak_share, "low_hit_peak_share"),
            Evidence("kernel_classes_count", int(low.sum())),
        )
        yield Finding(
            "low-l2-hit", "info", {}, evidence, "Read less: smaller data types, larger batches, fused kernels."
        )

    # ---------------------------------------------------------------- rules about the rest

    def _write_back(self, found: list[Balance]) -> Iterator[Finding]:
        reads = {b.device: b for b in found if b.metric == "dram_read_bytes"}
        for one in found:
            late = one.share("idle") or 0.0
            if one.metric != "dram_written_bytes" or one.device not in reads or late < self.idle_written_share:
                continue
            read, written = reads[one.device], one.counts.get("idle", 0.0)
            of_traffic = written / (read.total + one.total)
            if (read.share("idle") or 0.0) < late / 2 and of_traffic >= self.idle_written_traffic_share:
                evidence = (
                    Evidence("idle_written_share", late, self.idle_written_share, "idle_written_share"),
                    Evidence("idle_written_bytes", written),
                    Evidence(
                        "traffic_share", of_traffic, self.idle_written_traffic_share, "idle_written_traffic_share"
                    ),
                    Evidence("idle_read_share", read.share("idle") or 0.0),
                )
                action = "Compare written bytes over whole runs, not kernel by kernel."
                yield Finding("write-back", "info", {"device": one.device}, evidence, action)

    def _shared(self, found: list[Balance]) -> Iterator[Finding]:
        for device in dict.fromkeys(b.device for b in found):
            mine = {b.metric: b for b in found if b.device == device and b.total > 0}
            one = next((mine[m] for m in _WORK_METRICS if m in mine), None)
            share = one.share("idle") if one else None
            if one is None or share is None or share < self.other_work_share:
                continue
            evidence = (
                Evidence("other_work_share", share, self.other_work_share, "other_work_share"),
                Evidence(f"idle_{one.metric}", one.counts["idle"]),
                Evidence("idle_ns", one.time_ns["idle"]),
            )
            action = "Repeat the recording with the GPU to itself."
            yield Finding("gpu-shared", "warning", {"device": device}, evidence, action)


def _counted_ns(classes: Classes) -> Floats:
    """The time of each class whose counters are known, 0 of others."""
    known = np.array([match != "none" for match in classes.counted.match], bool)
    return np.where(known, classes.counted.total_ns, 0).astype(np.float64)


def _saving(classes: Classes, use: MemoryUse, row: int) -> Saving | None:
    """The time of what was moved in vain, if DRAM set the pace."""
    ratio = use.overfetch.value[row]
    return Saving(int(classes.counted.total_ns[row] * (1 - 1 / ratio)), "local") if ratio > 1 else None


def _some(use: MemoryUse, row: int, *names: str) -> Iterator[Evidence]:
    """The named numbers of a class that are known."""
    values = {
        "dram_read_bytes": use.dram_read,
        "dram_written_bytes": use.dram_written,
        "dram_bytes_per_s": use.dram_rate,
        "dram_peak_share": use.peak_share,
        "l2_hit_share": use.l2_hit,
    }
    for name in names:
        value = float(values[name].value[row])
        if np.isfinite(value):
            yield Evidence(name, value)


def _figures(tables: dict[str, dict[str, list[Any]]]) -> tuple[Figure, ...]:
    over_time = [name for name in tables["timeline"] if name not in ("bin_start_ns", "device")]
    figures = [
        Figure("cache-matrix", "matrix", "matrix", x="metric", y="class_id", value="scaled_share", series="kernel")
    ]
    if over_time:
        y = over_time[0]
        figures.append(Figure("counter-timeline", "panels", "timeline", x="bin_start_ns", y=y, series="device"))
    if tables["roofline"]["kernel"]:
        figures.append(
            Figure("roofline", "roofline", "roofline", x="tensor_flop_per_byte", y="tensor_flop_per_s", series="kind")
        )
    else:
        x, limit = "dram_bytes_per_s", "dram_peak_bytes_per_s"
        figures.append(Figure("memory-roof", "limits", "memory_roof", x=x, y="class_id", value=limit, series="way"))
    return tuple(figures)
