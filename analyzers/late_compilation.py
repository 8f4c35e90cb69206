"""Which launches waited for their kernel to be made: by Triton, by ``torch.compile``, by the driver.

A compiler at work is Python and C++ on the launching thread: to the GPU it is a pause like any other. What gives it
away is its end: CUPTI tells when the driver loads a function, which it does once for each, right before the first
launch. So a **stall** is the time from the end of a thread's last recorded call to a launch, of at least
``min_stall_ns``, with the loading of a function at its end, at most ``near_ns`` before the launch. That the time went
into compiling is inferred.

A stall is **late** where it ends in the steady part (see ``steps``); where no steps are known, where a kernel of the
same name had run before: it was made again, for other arguments.

late-compile
------------
What it means: steps wait for a compiler while the program is at work, each for many times what a step takes. The next
one may come with the next size of an input.

How it is found: at least one stall is late.

What to do: run every shape once before serving. Where kernels of one name were made more than once, have it done for
all arguments at once: Triton compiles again for integers that are 1 or a multiple of 16, and for pointers that are
aligned or not (``do_not_specialize``), ``torch.compile`` for sizes that it takes as fixed (``dynamic=True``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from spikeprof.analyzers.base import Evidence, Figure, Finding, Info, Metric, Result, Rule, Saving
from spikeprof.analyzers.derived import (
    Bools,
    GpuWork,
    Ints,
    first_of_groups,
    gpu_work,
    group_codes,
    ints,
    link,
    measured_spans,
    overlap_with,
)
from spikeprof.analyzers.derived.step_series import series_of
from spikeprof.analyzers.derived.steps import find_steps
from spikeprof.profiler.trace import Trace

_LOADING = ("lazy_function_loading", "driver_compiler")
_ONCE = "Run every shape once before serving, and keep the compiler's cache on disk."
_FOR_ALL = (
    "Have it compiled once for all arguments (Triton: do_not_specialize; torch.compile: dynamic=True), or run every "
    "shape once before serving."
)


class _Stalls(NamedTuple):
    """One element for each, ascending by begin."""

    begin: Ints
    end: Ints  # the launch call's begin
    rank: Ints
    name: Ints  # code of the kernel's name
    again: Bools  # whether a kernel of that name had begun before, in that process
    late: Bools

    def only(self, chosen: Bools | Ints) -> _Stalls:
        """Those."""
        columns = self.begin[chosen], self.end[chosen], self.rank[chosen], self.name[chosen]
        return _Stalls(*columns, self.again[chosen], self.late[chosen])

    @property
    def length(self) -> Ints:
        """In ns."""
        return self.end - self.begin


@dataclass(frozen=True)
class LateCompilation:
    """Options: limits in ns, and the size of the table."""

    min_stall_ns: int = 20_000_000  # a cache on disk answers within some ms, a compiler takes 100 ms and more
    near_ns: int = 10_000_000
    start_up_ratio: float = 1.5  # see ``steps``
    longest_count: int = 20

    info: ClassVar[Info] = Info(
        id="late-compilation",
        question="Which launches waited for their kernel to be compiled?",
        needs=("kernels", "runtime_calls", "overheads"),
        wants=("windows", "ranges", "memory_ops"),
        rules=(Rule("late-compile", "Kernels are compiled while the program is at work", "warning"),),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. ``not_measured`` where no loading was told of: nothing else tells of a compiler."""
        codes, labels = trace.codes("overheads", "kind")
        loads = np.flatnonzero(np.isin(codes, [i for i, label in enumerate(labels) if label in _LOADING]))
        if not len(loads):
            reason = "no loading of functions was told of: all were loaded at once, or the driver does not tell"
            return Result(self.info.id, "not_measured", reason=reason)
        stalls, names = self._stalls(trace, loads)
        late = stalls.only(stalls.late)
        metrics = (
            Metric("loads_count", len(loads)),
            Metric("stalls_count", len(stalls.begin)),
            Metric("stalls_ns", int(stalls.length.sum())),
            Metric("late_stalls_count", len(late.begin)),
            Metric("late_stalls_ns", int(late.length.sum())),
        )
        findings = self._late(late, names)
        top = stalls.only(np.sort(np.argsort(-stalls.length, kind="stable")[: self.longest_count]))
        table = {
            "start_ns": top.begin.tolist(),
            "stall_ns": top.length.tolist(),
            "kernel": [names[code] for code in top.name.tolist()],
            "rank": top.rank.tolist(),
            "made_again": top.again.tolist(),
            "late": top.late.tolist(),
        }
        return Result(
            self.info.id,
            "findings" if findings else "ok",
            metrics=metrics,
            findings=findings,
            tables={"compile-stalls": table},
            figures=(Figure("compile-stalls", "table", "compile-stalls", x="start_ns", y="stall_ns"),),
        )

    def _late(self, late: _Stalls, names: list[str]) -> tuple[Finding, ...]:
        """All of them together, under the kernel that was waited for longest."""
        if not len(late.begin):
            return ()
        spent = np.bincount(late.name, late.length, minlength=len(names))
        worst = int(spent.argmax())
        evidence = (
            Evidence("late_stalls_count", len(late.begin), 0, "none expected"),
            Evidence("late_stalls_ns", int(late.length.sum()), basis="inferred"),
            Evidence("longest_stall_ns", int(late.length.max()), self.min_stall_ns, "min_stall_ns"),
            Evidence("kernel_stalls_ns", int(spent[worst]), basis="inferred"),
            Evidence("made_again_count", int(late.again.sum())),
            Evidence("kernels_count", len(np.unique(late.name))),
        )
        action = _FOR_ALL if late.again[late.name == worst].any() else _ONCE
        bound = Saving(int(late.length.sum()), "total")
        return (Finding("late-compile", "warning", {"kernel": names[worst]}, evidence, action, bound),)

    def _stalls(self, trace: Trace, loads: Ints) -> tuple[_Stalls, list[str]]:
        begin, call = self._waits(trace, loads)
        work = gpu_work(trace)
        piece = _first_piece(link(trace, work), work, trace.table("runtime_calls").num_rows)[call]
        is_kernel = piece >= 0
        begin, call, piece = begin[is_kernel], call[is_kernel], piece[is_kernel]
        rank, end = (trace.column("runtime_calls", name)[call] for name in ("rank", "start_ns"))
        recorded = np.zeros(len(call), bool)
        for each in np.unique(rank).tolist():  # calls that were not recorded look like none
            mine = rank == each
            spans = measured_spans(trace, [each])
            recorded[mine] = overlap_with(begin[mine], end[mine], spans) == (end - begin)[mine]
        codes, names = trace.codes("kernels", "name")
        row = work.row[piece]
        name, again = ints(codes[row]), _ran_before(trace, ints(row))
        steady_ns = self._steady_begin(trace) if len(call) else None
        late = again if steady_ns is None else end >= steady_ns
        stalls = _Stalls(begin, ints(end), ints(rank), name, again, late).only(np.flatnonzero(recorded))
        return stalls.only(np.argsort(stalls.begin, kind="stable")), [str(one) for one in names]

    def _waits(self, trace: Trace, loads: Ints) -> tuple[Ints, Ints]:
        """(end of the call before, row of the launching call) of each stall."""
        columns = {n: trace.column("runtime_calls", n) for n in ("rank", "thread_id", "start_ns", "end_ns")}
        loading = {n: trace.column("overheads", n)[loads] for n in columns}
        if not len(columns["rank"]):
            return ints([]), ints([])
        thread, _ = group_codes(*(np.concatenate([columns[n], loading[n]]) for n in ("rank", "thread_id")))
        own, of_load = thread[: len(columns["rank"])], thread[len(columns["rank"]) :]
        first = min(int(columns["start_ns"].min()), int(loading["start_ns"].min()))
        span = max(int(columns["end_ns"].max()), int(loading["end_ns"].max())) - first + 1
        order = np.lexsort((columns["start_ns"], own))
        # Threads behind one another: the latest end so far is that of the thread's own calls.
        started = own[order] * span + columns["start_ns"][order] - first
        ended = np.maximum.accumulate(own[order] * span + columns["end_ns"][order] - first)
        load = of_load * span + loading["start_ns"] - first
        following = np.searchsorted(started, load)
        inside = (following > 0) & (following < len(order))
        following, load, load_end = following[inside], load[inside], loading["end_ns"][inside]
        before, call = ended[following - 1], order[following]
        stall = started[following] - before
        good = (before <= load) & (own[order[following - 1]] == own[call]) & (before // span == own[call])
        good &= (load // span == own[call]) & (stall >= self.min_stall_ns)
        good &= columns["start_ns"][call] - load_end <= self.near_ns
        call, at = np.unique(call[good], return_index=True)
        return ints(columns["start_ns"][call] - stall[good][at]), ints(call)

    def _steady_begin(self, trace: Trace) -> int | None:
        """When the steady part begins, as ``steps`` says; None where no steps are known."""
        found = [steps for steps in find_steps(trace) if steps.source]
        if not found:
            return None
        return series_of(found, {}, busy_known=False, start_up_ratio=self.start_up_ratio).steady_begin_ns


def _first_piece(calls: Ints, work: GpuWork, calls_count: int) -> Ints:
    """By call the kernel that it launched, the first of several; -1 for none."""
    found = np.full(calls_count, -1, np.int64)
    rows = np.flatnonzero((calls >= 0) & ~work.is_copy)[::-1]
    found[calls[rows]] = rows
    return found


def _ran_before(trace: Trace, row: Ints) -> Bools:
    """Whether another kernel of the same name had begun before these, in their process."""
    start, (codes, _) = trace.column("kernels", "start_ns"), trace.codes("kernels", "name")
    group, count = group_codes(trace.column("kernels", "rank"), codes)
    first = first_of_groups(group, count)  # kernels are sorted by start
    return np.asarray(start[row] > start[first][group[row]])
