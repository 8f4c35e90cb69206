"""The same decision about the L2 of a GPU: look-ups and misses per kernel over the time of a recorded trace.

Counts come from ``counters`` where launches have values of their own, and from ``counter_samples`` for each GPU as a
whole. Launches whose counts are those of their class only are not followed over time: they are the same all the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.cache_pierce.detector import Detector
from spikeprof.analyzers.cache_pierce.model import Alert, PatternRow
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.profiler.trace import Trace
from spikeprof.profiler.units import NS_PER_S

Floats = npt.NDArray[np.float64]

LOOKUPS, HITS = "l2_sectors_count", "l2_hit_sectors_count"
WHOLE_GPU = "*"  # the name under which all that ran on a GPU is followed

_COLLECT_WITH = "spikeprof run --counters=l2_sectors_count,l2_hit_sectors_count"
_LENGTH_S = 600.0  # a trace shorter than this is stretched to it: two spans of the baseline
_STEP_S = 5.0


@dataclass(frozen=True, slots=True)
class TraceVerdict:
    """What was found in a trace.

    ``status`` ``not_measured`` says why in ``reason`` and how it is measured in ``collect_with``. Tenants are
    ``GPU 0``, …, patterns kernels' names, or ``WHOLE_GPU``; times of alerts are seconds since the session's start, and
    all rates per second of the trace. ``s_per_option_s``: so many seconds of the trace are one second of the options (1
    for a trace of ten minutes and more). ``class_only``: kernels with L2 counts that are not followed over time.
    """

    status: Literal["ok", "findings", "not_measured"]
    reason: str = ""
    collect_with: str = ""
    alerts: tuple[Alert, ...] = ()
    rows: tuple[PatternRow, ...] = ()
    s_per_option_s: float = 1.0
    class_only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Counted:
    """n intervals: seconds since the session's start, names, sectors looked up and missed."""

    starts_s: Floats
    ends_s: Floats
    tenants: list[str]
    patterns: list[str]
    lookups: Floats
    misses: Floats


def pierce_trace(trace: Trace, options: Options | None = None) -> TraceVerdict:
    """Look for L2 penetration in a trace. Wants ``counter_samples``, or ``counters`` with ``kernels``."""
    parts = [part for part in (_of_gpus(trace), _of_launches(trace)) if part is not None and len(part.starts_s)]
    if not parts:
        what = "no L2 counters were recorded over time: tables counter_samples, counters"
        return TraceVerdict("not_measured", what, _COLLECT_WITH, class_only=_class_only(trace))
    starts_s = np.concatenate([part.starts_s for part in parts])
    ends_s = np.concatenate([part.ends_s for part in parts])
    length_s = float(ends_s.max() - starts_s.min())
    stretch = max(_LENGTH_S / length_s, 1.0) if length_s > 0 else 1.0
    detector = Detector(_for_sectors(options or Options()))
    tenants = [name for part in parts for name in part.tenants]
    patterns = [name for part in parts for name in part.patterns]
    lookups = np.concatenate([part.lookups for part in parts])
    misses = np.concatenate([part.misses for part in parts])
    alerts: list[Alert] = []
    order = np.argsort(ends_s, kind="stable")
    steps = np.floor(ends_s[order] * stretch / _STEP_S)
    for chosen in np.split(order, np.flatnonzero(np.diff(steps)) + 1):
        alerts += detector.feed_counts(
            starts_s[chosen] * stretch,
            ends_s[chosen] * stretch,
            [tenants[i] for i in chosen.tolist()],
            [patterns[i] for i in chosen.tolist()],
            lookups[chosen],
            misses[chosen],
        )
    alerts += detector.finish()
    own = [alert for alert in alerts if alert.pattern in set(patterns)]
    rows = [_in_trace_time(row, stretch) for row in detector.snapshot().rows if row.pattern in set(patterns)]
    return TraceVerdict(
        "findings" if own else "ok",
        alerts=tuple(_alert_in_trace_time(alert, stretch) for alert in own),
        rows=tuple(row for row in rows if row.tenant != WHOLE_GPU),
        s_per_option_s=1 / stretch,
        class_only=_class_only(trace),
    )


def _for_sectors(options: Options) -> Options:
    """Options for counts in sectors, that come in order of time and never late."""
    all_kernels = options.max_series_count  # names of kernels have no common first part
    return replace(options, lateness_s=options.cell_s, max_patterns_per_prefix_count=all_kernels)


def _of_gpus(trace: Trace) -> _Counted | None:
    """What each GPU looked up in each sampling interval."""
    if "counter_samples" not in trace:
        return None
    codes, labels = trace.codes("counter_samples", "metric")
    if LOOKUPS not in labels or HITS not in labels:
        return None
    device, start, end, value = (
        trace.column("counter_samples", name) for name in ("device", "start_ns", "end_ns", "value")
    )
    looked, hit = (np.flatnonzero(codes == labels.index(name)) for name in (LOOKUPS, HITS))
    # both metrics of one interval: matched by GPU and start
    hits_of = dict(zip(zip(device[hit].tolist(), start[hit].tolist(), strict=True), value[hit].tolist(), strict=True))
    hits = np.array(
        [hits_of.get(pair, np.nan) for pair in zip(device[looked].tolist(), start[looked].tolist(), strict=True)]
    )
    names = [f"GPU {number}" for number in device[looked].tolist()]
    return _counted(start[looked], end[looked], names, [WHOLE_GPU] * len(looked), value[looked], hits)


def _of_launches(trace: Trace) -> _Counted | None:
    """What each launch with counts of its own looked up."""
    if "counters" not in trace or "kernels" not in trace:
        return None
    codes, labels = trace.codes("counters", "metric")
    if LOOKUPS not in labels or HITS not in labels:
        return None
    kernel, value = trace.column("counters", "kernel_id"), trace.column("counters", "value")
    known = trace.column("kernels", "kernel_id")
    found = np.full((2, len(known)), np.nan)
    for row, name in enumerate((LOOKUPS, HITS)):
        chosen = np.flatnonzero((codes == labels.index(name)) & (kernel >= 0) & np.isin(kernel, known))
        found[row, np.searchsorted(known, kernel[chosen])] = value[chosen]
    rows = np.flatnonzero(np.isfinite(found[0]))
    name_codes, names = trace.codes("kernels", "name")
    start, end, device = (trace.column("kernels", name)[rows] for name in ("start_ns", "end_ns", "device"))
    tenants = [f"GPU {number}" for number in device.tolist()]
    return _counted(start, end, tenants, [names[code] for code in name_codes[rows].tolist()], *found[:, rows])


def _counted(
    start_ns: npt.NDArray[np.int64],
    end_ns: npt.NDArray[np.int64],
    tenants: list[str],
    patterns: list[str],
    lookups: Floats,
    hits: Floats,
) -> _Counted:
    """Intervals with both counts. Hits can lie a little outside of what was looked up: they are clipped."""
    some = np.flatnonzero(np.isfinite(lookups) & np.isfinite(hits) & (lookups > 0))
    misses = np.clip(lookups[some] - hits[some], 0.0, lookups[some])
    return _Counted(
        start_ns[some] / NS_PER_S,
        end_ns[some] / NS_PER_S,
        [tenants[i] for i in some.tolist()],
        [patterns[i] for i in some.tolist()],
        lookups[some],
        misses,
    )


def _class_only(trace: Trace) -> tuple[str, ...]:
    """Names of kernels of which L2 counts are known as the mean of their class only."""
    if "counters" not in trace or "kernel_classes" not in trace:
        return ()
    codes, labels = trace.codes("counters", "metric")
    if LOOKUPS not in labels:
        return ()
    is_it = codes == labels.index(LOOKUPS)
    kernel, class_id = trace.column("counters", "kernel_id"), trace.column("counters", "class_id")
    single = set(class_id[is_it & (kernel >= 0)].tolist())
    name_codes, names = trace.codes("kernel_classes", "name")
    of_class = {int(number) for number in class_id[is_it & (kernel < 0)] if 0 <= number < len(name_codes)}
    return tuple(sorted({names[name_codes[number]] for number in of_class - single}))


def _in_trace_time(row: PatternRow, stretch: float) -> PatternRow:
    baseline = row.baseline

    def faster(value: float | None) -> float | None:
        return None if value is None else value * stretch

    usual = replace(
        baseline,
        qps=faster(baseline.qps),
        short_qps=faster(baseline.short_qps),
        reference_qps=faster(baseline.reference_qps),
        learned_s=baseline.learned_s / stretch,
    )
    return replace(
        row,
        qps=row.qps * stretch,
        misses_per_s=row.misses_per_s * stretch,
        baseline=usual,
        since_s=row.since_s / stretch,
    )


def _alert_in_trace_time(alert: Alert, stretch: float) -> Alert:
    evidence = tuple(
        replace(
            one,
            value=one.value * stretch,
            limit=None if one.limit is None else one.limit * stretch,
            baseline=None if one.baseline is None else one.baseline * stretch,
        )
        if one.metric.endswith("_per_s")
        else replace(one, value=one.value / stretch)
        if one.metric.endswith("_s")
        else one
        for one in alert.evidence
    )
    return replace(alert, ts_s=alert.ts_s / stretch, since_s=alert.since_s / stretch, evidence=evidence)
