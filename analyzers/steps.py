"""How long the program's steps take, and what the GPU does in them.

Steps are those that the program marked (``spikeprof.step``, torch.profiler's ``ProfilerStep``), else those found in
what its kernels repeat; the share of kernels that they account for says how far to trust that. A step lasts from the
start of its first kernel to the end of its last one; the wait is from the end of the step before. Prefill and decode
are told apart where kernel names or grids say it. The steady part begins where the steps of the kind that took most
time are no longer, three in a row or right at the beginning, slower than ``start_up_ratio`` times the usual (the median
of their second half).

step-tail
---------
What it means: some steps take far longer than most of their kind: users see them as stutter between tokens.

How it is found: of the steps of one kind in the steady part, at least ``min_steps_count``, p99 is above ``tail_ratio``
times p50. Slow are those longer than that many times the median of the steps around them; what they have more of than
the others, GPU work or idle time, stands beside it.

What to do: where it is idle time, look for what the host did before those steps (a compiler: see
``late-compile``; garbage collection, logging, other threads); where it is GPU work, see which kernels were longer or
more.

step-drift
----------
What it means: steps grow longer during the run, as with a context that is read again at each step.

How it is found: in the longest run of steps of one kind in the steady part, at least ``min_steps_count``, the median of
the last fifth is above that of the first fifth by ``min_drift_share`` or more, and the rank correlation (Spearman) of
duration and order is at least ``min_drift_correlation_ratio``.

What to do: compare kernels of an early and a late stretch (``--between``); what grows with the context is attention,
copies of the KV cache, and bookkeeping on the host.

start-up
--------
What it means: a good part of the recording is start-up: its numbers do not say how the program runs.

How it is found: the time recorded before the steady part begins is at least ``min_start_up_share`` of what was recorded
from the first to the last work. Not asked of a part of a recording.

What to do: judge the steady part alone, with the command that the finding names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from spikeprof.analyzers.base import Evidence, Figure, Finding, Info, Metric, Result, Rule, Saving
from spikeprof.analyzers.derived import Bools, Ints, Spans, device_times, gpu_work, intersect, ints, total
from spikeprof.analyzers.derived.step_series import (
    StepSeries,
    around,
    durations,
    longest_run,
    percentile,
    series_of,
    trend,
)
from spikeprof.analyzers.derived.steps import DeviceSteps, find_steps
from spikeprof.profiler.trace import Trace
from spikeprof.profiler.units import NS_PER_S

Columns = dict[str, list[Any]]
_MARK = "spikeprof run -- CMD, with spikeprof.step(...) around each step of the program"


@dataclass(frozen=True)
class Steps:
    """Options: limits as ratios and shares, and sizes of the tables."""

    min_steps_count: int = 30
    tail_ratio: float = 1.5
    min_drift_share: float = 0.10
    min_drift_correlation_ratio: float = 0.5
    start_up_ratio: float = 1.5
    min_start_up_share: float = 0.10
    slowest_count: int = 8
    points_count: int = 300  # of one kind in the figure
    kinds_count: int = 6  # of which the figure shows as many

    info: ClassVar[Info] = Info(
        id="steps",
        question="How long do steps take, and what does the GPU do in them?",
        needs=("kernels",),
        wants=("memory_ops", "windows", "ranges", "runtime_calls"),
        rules=(
            Rule("step-tail", "Some steps take far longer than the others", "warning"),
            Rule("step-drift", "Steps grow longer during the run", "info"),
            Rule("start-up", "A good part of the recording is start-up", "warning"),
        ),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. ``not_measured`` where no steps are marked or found, with the reason."""
        found = find_steps(trace)
        if not found:
            return Result(self.info.id, "not_applicable", reason="no kernel ran while recording")
        with_steps = [steps for steps in found if steps.source]
        if not with_steps:
            reason = f"the program marks no steps, and none were found: {_reasons(found)}"
            return Result(self.info.id, "not_measured", reason=reason, collect_with=_MARK)
        devices = {time.device: time for time in device_times(trace, gpu_work(trace))}
        of = series_of(with_steps, {d: time.busy for d, time in devices.items()}, "memory_ops" in trace,
                       self.start_up_ratio)  # fmt: skip
        kinds = self._kinds(of)
        findings = [*self._tails(of, kinds), *self._drifts(of, kinds)]
        active = {d: time.active for d, time in devices.items()}
        steady_ns, last_ns, share = _start_up(of, active)
        if not trace.is_part:
            findings += self._start_up(steady_ns, last_ns, share, of)
        missing = [steps for steps in found if not steps.source]
        return Result(
            self.info.id,
            "findings" if findings else "ok",
            reason=f"no steps on {_where(missing)}: {_reasons(missing)}" if missing else "",
            metrics=tuple(self._metrics(of, found, steady_ns, share)),
            findings=tuple(findings),
            tables={
                "kinds": kinds,
                "durations": durations(of, kinds["kind"][: self.kinds_count], self.points_count),
                "slowest": self._slowest(of),
                "processes": _by_process(found),
            },
            figures=(
                Figure("step-durations", "panels", "durations", x="start_ns", y="duration_ns", series="kind"),
                Figure("step-kinds", "table", "kinds", x="kind", y="p50_ns"),
            ),
        )

    def _metrics(self, of: StepSeries, found: list[DeviceSteps], steady_ns: int, share: float | None) -> list[Metric]:
        kernels = sum(int(steps.kernels_total) for steps in found)
        explained = sum((steps.confidence or 0.0) * steps.kernels_total for steps in found)
        length = int(of.duration.sum())
        why = "" if of.busy is not None else "copies were not recorded, so busy time is not known"
        why = why or ("" if length else "all steps last 0 ns")
        busy = float(of.busy.sum()) / length if of.busy is not None and length else None
        wait = of.wait[of.wait >= 0]
        return [
            Metric("steps_count", len(of.begin)),
            Metric("explained_share", explained / kernels),
            Metric("steps_busy_share", busy, why),
            Metric("wait_ns", percentile(wait, 50), "" if len(wait) else "no step directly follows another one"),
            Metric("steady_begin_ns", steady_ns),
            Metric("start_up_share", share, "" if share is not None else "no work lies in a recorded window"),
        ]

    def _kinds(self, of: StepSeries) -> Columns:
        """One row per kind of step, over all processes and devices; those that took most time first."""
        table: Columns = {name: [] for name in ("kind", "steps_count", "p50_ns", "p90_ns", "p99_ns", "max_ns")}
        more = ("jitter_ns", "busy_share", "step_idle_ns", "wait_ns", "step_kernels_count")
        table |= {name: [] for name in more}
        spent = np.bincount(of.kind, of.duration, minlength=len(of.kinds))
        for kind in np.argsort(-spent, kind="stable").tolist():
            mine = of.kind == kind
            length, wait = of.duration[mine], of.wait[mine]
            idle = None if of.busy is None else length - of.busy[mine]
            row = (
                of.kinds[kind],
                int(mine.sum()),
                *(percentile(length, p) for p in (50, 90, 99)),
                int(length.max()),
                of.jitter(kind),
                None if of.busy is None or not length.sum() else float(of.busy[mine].sum() / length.sum()),
                None if idle is None else percentile(ints(idle), 50),
                percentile(wait[wait >= 0], 50),
                percentile(of.kernels[mine], 50),
            )
            for name, value in zip(table, row, strict=True):
                table[name].append(value)
        return table

    def _tails(self, of: StepSeries, kinds: Columns) -> list[Finding]:
        found = []
        for name in kinds["kind"]:
            mine = of.of_kind(name) & of.steady
            length = of.duration[mine]
            if len(length) < self.min_steps_count:
                continue
            p50, p99 = percentile(length, 50) or 0, percentile(length, 99) or 0
            if not p50 or p99 <= self.tail_ratio * p50:
                continue
            slow = length > self.tail_ratio * around(length)
            if not slow.any():
                continue  # it drifts
            excess = int(np.maximum(length[slow] - p50, 0).sum())
            evidence = [
                Evidence("p99_over_p50_ratio", p99 / p50, self.tail_ratio, "tail_ratio"),
                Evidence("slow_steps_count", int(slow.sum())),
                *_more_in(of, mine, slow),
                Evidence("p50_ns", p50),
                Evidence("p99_ns", p99),
                Evidence("steady_steps_count", len(length), self.min_steps_count, "min_steps_count"),
            ]
            action = _tail_action({e.metric: e.value for e in evidence})
            found.append(Finding("step-tail", "warning", {"step": name}, tuple(evidence), action, _local(excess)))
        return found

    def _drifts(self, of: StepSeries, kinds: Columns) -> list[Finding]:
        found = []
        for name in kinds["kind"]:
            run = longest_run(of, name)
            if len(run) < self.min_steps_count:
                continue
            first, last, correlation = trend(of.duration[run])
            if not first or last / first - 1 < self.min_drift_share or correlation < self.min_drift_correlation_ratio:
                continue
            evidence = [
                Evidence("drift_share", last / first - 1, self.min_drift_share, "min_drift_share"),
                Evidence("first_steps_ns", first),
                Evidence("last_steps_ns", last),
                Evidence("drift_correlation_ratio", correlation, self.min_drift_correlation_ratio,
                         "min_drift_correlation_ratio"),
                Evidence("steady_steps_count", len(run), self.min_steps_count, "min_steps_count"),
            ]  # fmt: skip
            if of.busy is not None:
                busy = trend(of.busy[run])
                evidence.insert(3, Evidence("busy_grown_ns", busy[1] - busy[0]))
            begin, end = of.begin[run[0]], of.end[run[-1]]
            late = _seconds(end - (end - begin) // 5, end)
            action = f"Compare kernels of the last fifth (--between {late} shows it) with those of the first."
            found.append(Finding("step-drift", "info", {"step": name}, tuple(evidence), action))
        return found

    def _start_up(self, steady_ns: int, last_ns: int, share: float | None, of: StepSeries) -> list[Finding]:
        if share is None or share < self.min_start_up_share or int(of.steady.sum()) < self.min_steps_count:
            return []
        evidence = (
            Evidence("start_up_share", share, self.min_start_up_share, "min_start_up_share"),
            Evidence("steady_begin_ns", steady_ns),
            Evidence("steady_steps_count", int(of.steady.sum()), self.min_steps_count, "min_steps_count"),
        )
        action = f"Run spikeprof analyze TRACE --between {_seconds(steady_ns, last_ns)} to judge the steady part alone."
        return [Finding("start-up", "warning", {}, evidence, action)]

    def _slowest(self, of: StepSeries) -> Columns:
        """The steps of the steady part that lasted longest over the usual of their kind."""
        rows = np.flatnonzero(of.steady)
        usual = np.array([percentile(of.duration[of.steady & (of.kind == k)], 50) or 0 for k in range(len(of.kinds))])
        rows = rows[np.argsort(-(of.duration - usual[of.kind])[rows], kind="stable")][: self.slowest_count]
        busy = [None] * len(rows) if of.busy is None else of.busy[rows].tolist()
        return {
            "kind": [of.kinds[k] for k in of.kind[rows].tolist()],
            "rank": of.rank[rows].tolist(),
            "device": of.device[rows].tolist(),
            "start_ns": of.begin[rows].tolist(),
            "duration_ns": of.duration[rows].tolist(),
            "over_usual_ns": (of.duration - usual[of.kind])[rows].tolist(),
            "busy_ns": busy,
            "step_idle_ns": [
                None if b is None else d - b for b, d in zip(busy, of.duration[rows].tolist(), strict=True)
            ],
            "step_kernels_count": of.kernels[rows].tolist(),
        }


def _local(excess_ns: int) -> Saving:
    return Saving(excess_ns, "local")


def _more_in(of: StepSeries, mine: Bools, slow: Bools) -> list[Evidence]:
    """What slow steps have more of than the others of their kind, on average."""

    def more(values: Ints) -> float:
        return float(values[mine][slow].mean() - values[mine][~slow].mean())

    kernels = Evidence("more_kernels_count", more(of.kernels))
    if of.busy is None:
        return [kernels]
    return [Evidence("more_idle_ns", more(of.duration - of.busy)), Evidence("more_busy_ns", more(of.busy)), kernels]


def _tail_action(evidence: dict[str, float]) -> str:
    idle, busy = evidence.get("more_idle_ns"), evidence.get("more_busy_ns")
    if idle is None or busy is None:
        return "See in the timeline what runs in the slowest steps, and what does not."
    if idle >= busy:
        return (
            "Look for what the host does in the slowest steps: a compiler, garbage collection, logging, other threads."
        )
    return "See in the heatmap of kernels which of them take longer in the slowest steps."


def _start_up(of: StepSeries, active: dict[int, Spans]) -> tuple[int, int, float | None]:
    """When the steady part begins and ends (ns), and the share of the active time that lies before it."""
    begin = of.steady_begin_ns
    last = max(int(of.end.max()), *(int(spans.ends[-1]) for spans in active.values() if len(spans.ends)), 0)
    whole = sum(total(spans) for spans in active.values())
    before = Spans(ints([-(2**62)]), ints([begin]))
    return begin, last, sum(total(intersect(spans, before)) for spans in active.values()) / whole if whole else None


def _seconds(begin_ns: int, end_ns: int) -> str:
    """``8.558217,9.114626``: to the microsecond, with both ends inside."""
    return f"{begin_ns // 1000 * 1000 / NS_PER_S:.6f},{-(-end_ns // 1000) * 1000 / NS_PER_S:.6f}"


def _reasons(found: list[DeviceSteps]) -> str:
    return "; ".join(dict.fromkeys(steps.reason for steps in found))


def _where(found: list[DeviceSteps]) -> str:
    return "; ".join(f"GPU {steps.device} (process {steps.rank})" for steps in found)


def _by_process(found: list[DeviceSteps]) -> Columns:
    """One row per process and device: where its steps are from, and how far to trust them."""
    return {
        "rank": [steps.rank for steps in found],
        "device": [steps.device for steps in found],
        "steps_from": [steps.source or "none" for steps in found],
        "steps_count": [len(steps.begin_ns) for steps in found],
        "explained_share": [steps.confidence for steps in found],
        "why_not": [steps.reason for steps in found],
    }
