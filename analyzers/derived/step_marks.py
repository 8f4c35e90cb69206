"""Steps as the program marked them: which of them launched each kernel, and what kind of step it is.

Marked are the ranges of kind ``step`` and torch.profiler's ``ProfilerStep#``. A kernel belongs to the step in which its
launching call began, on the thread that marked it; of nested steps to the outermost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from spikeprof.analyzers.derived.groups import group_codes
from spikeprof.analyzers.derived.intervals import Ints, Lanes
from spikeprof.analyzers.derived.step_kinds import DECODE, PREFILL, UNKNOWN
from spikeprof.analyzers.derived.work import GpuWork, link
from spikeprof.profiler.trace import Trace


@dataclass(frozen=True, slots=True)
class Marked:
    """The marked steps, and for each kernel of the table the one that launched it (-1 = none)."""

    kind: list[str]
    of_kernel: Ints


def marked_steps(trace: Trace, rows: Ints) -> Marked | None:
    """The marked steps; None where there are none, or no launching call is known.

    ``rows``: the rows of ``kernels`` to ask for. Needs ``kernels``; wants ``ranges`` and ``runtime_calls``.
    """
    if "ranges" not in trace or "runtime_calls" not in trace:
        return None
    codes, labels = trace.codes("ranges", "kind")
    texts = trace.table("ranges").column("name").to_pylist()
    step = np.array([label == "step" for label in labels], bool)[codes] if labels else np.zeros(0, bool)
    step |= np.array([text.startswith("ProfilerStep#") for text in texts], bool)
    chosen = np.flatnonzero(step)
    if not len(chosen):
        return None
    start, end, rank, thread = (
        trace.column("ranges", name)[chosen] for name in ("start_ns", "end_ns", "rank", "thread_id")
    )
    work = GpuWork(
        trace.column("kernels", "rank")[rows],
        trace.column("kernels", "device")[rows],
        trace.column("kernels", "start_ns")[rows],
        trace.column("kernels", "end_ns")[rows],
        np.zeros(len(rows), bool),
        rows,
    )
    call = link(trace, work)
    known = np.flatnonzero(call >= 0)
    if not len(known):
        return None
    at = trace.column("runtime_calls", "start_ns")[call[known]]
    lane, of_call, count = _lanes(
        rank,
        thread,
        trace.column("runtime_calls", "rank")[call[known]],
        trace.column("runtime_calls", "thread_id")[call[known]],
    )
    lanes = Lanes.of(count, start, end, at)
    start, end, at = start + lanes.shift(lane), end + lanes.shift(lane), at + lanes.shift(of_call)
    order = np.lexsort((-end, start))
    start, end, chosen = start[order], end[order], chosen[order]
    outermost = start >= np.append(-(2**62), np.maximum.accumulate(end)[:-1])
    start, end, chosen = start[outermost], end[outermost], chosen[outermost]
    place = np.searchsorted(start, at, side="right") - 1
    inside = (place >= 0) & (at < end[np.maximum(place, 0)])
    of_kernel = np.full(trace.table("kernels").num_rows, -1, np.int64)
    of_kernel[rows[known[inside]]] = place[inside]
    attributes = trace.table("ranges").column("attributes").take(chosen).to_pylist()
    return Marked([_kind(texts[i], a) for i, a in zip(chosen.tolist(), attributes, strict=True)], of_kernel)


def _lanes(rank: Ints, thread: Ints, call_rank: Ints, call_thread: Ints) -> tuple[Ints, Ints, int]:
    """One lane per thread that marks steps: of each step, of each call; and how many.

    Calls of a thread that marks none (autograd's) are in the lane of the only one of their process that does, if any.
    """
    both, count = group_codes(np.concatenate([rank, call_rank]), np.concatenate([thread, call_thread]))
    lane, of_call = both[: len(rank)], both[len(rank) :]
    marking = np.unique(lane)
    first = np.array([int(np.argmax(lane == one)) for one in marking])
    alone = {int(r): int(one) for r, one in zip(rank[first], marking, strict=True) if (rank[first] == r).sum() == 1}
    foreign = ~np.isin(of_call, marking)
    for r, one in alone.items():
        of_call = np.where(foreign & (call_rank == r), one, of_call)
    return lane, of_call, count


def _kind(name: str, attributes: str) -> str:
    """What the program called the step; else decode for one token per sequence, prefill for more."""
    if name.startswith("ProfilerStep#"):
        return UNKNOWN
    if name not in ("", "step"):
        return name
    try:
        values = json.loads(attributes) if attributes else {}
        batch, tokens = (float(values[key]) for key in ("llm.batch_size", "llm.token_usage.total"))
    except (ValueError, TypeError, KeyError):
        return UNKNOWN
    return UNKNOWN if not 0 < batch <= tokens else DECODE if tokens == batch else PREFILL
