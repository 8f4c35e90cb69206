"""The detector's answer about the L2 of a recorded trace, as lines and as plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.analyzers.cache_pierce.traces import WHOLE_GPU, TraceVerdict
from spikeprof.reports import format as fmt
from spikeprof.reports.kernel_names import printable, short_name
from spikeprof.reports.pierce import texts

_NAME_CHARS = 60
_KERNELS_NAMED = 3
#: Where the look-ups of a rate or share are sectors of the L2.
_TITLES = {"lookups_per_s": "L2 sectors looked up", "miss_share": "L2 miss rate"}


def lines(verdict: TraceVerdict, name: str) -> list[str]:
    """What fired, in order of time; what was looked at; what could not be."""
    if verdict.status == "not_measured":
        return [f"{fmt.not_measured(verdict.reason)}; `{verdict.collect_with}` would measure it", *_class_only(verdict)]
    made = [_line(alert) for alert in verdict.alerts]
    number = len({alert.alert_id for alert in verdict.alerts})
    fired = fmt.plural(number, "alert") if number else "nothing fired"
    made.append(f"{fired} about the L2 in {printable(name)}: {fmt.plural(len(verdict.rows), 'series')} over time")
    if verdict.s_per_option_s < 1:
        made.append(
            f"the trace is short: times of the thresholds are scaled, 1 s of them is "
            f"{texts.seconds(verdict.s_per_option_s)} of the trace"
        )
    return made + _class_only(verdict)


def _line(alert: Alert) -> str:
    moment = fmt.moment(alert.ts_s * 1e9)
    place = "the whole GPU" if alert.pattern == WHOLE_GPU else f"kernel {short_name(alert.pattern, _NAME_CHARS)}"
    where = f"{place}, {printable(alert.tenant)}"
    if alert.kind == "recovered":
        return f"{moment} RECOVERED: {where}, after {texts.seconds(max(alert.ts_s - alert.since_s, 0.0))}"
    numbers = "; ".join(
        f"{_TITLES.get(item.metric) or texts.metric_title(item.metric)} {texts.number(item.metric, item.value)}"
        + (f" ({against})" if (against := texts.comparison(item)) else "")
        for item in alert.evidence[:2]
    )
    return f"{moment} {alert.severity.upper()}: L2 misses jump over their baseline: {where}: {numbers}"


def _class_only(verdict: TraceVerdict) -> list[str]:
    if not verdict.class_only:
        return []
    names = [short_name(kernel, _NAME_CHARS) for kernel in verdict.class_only[:_KERNELS_NAMED]]
    more = len(verdict.class_only) - len(names)
    shown = ", ".join(names) + (f" and {more:,} more" if more > 0 else "")
    return [f"not measured over time: {shown}: their counts are the mean of all launches of their class"]


def answer(verdict: TraceVerdict, name: str) -> dict[str, Any]:
    """The same as plain data; times in seconds since the session's start."""
    return {"version": 1, "trace": name, **dataclasses.asdict(verdict)}
