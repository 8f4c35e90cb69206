"""What notices say to people: one wording for mail, chat, terminal and page. Names in it are printable, not escaped."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from spikeprof.analyzers.cache_pierce.model import EVERY, Alert, Counts, Evidence, Measure
from spikeprof.analyzers.cache_pierce.patterns import ANY
from spikeprof.reports import format as fmt
from spikeprof.reports.kernel_names import clip, printable

if TYPE_CHECKING:
    from spikeprof.reports.pierce.run import PierceRun

#: Per rule: title, what it means, what to do.
_RULES = {
    "penetration": (
        "Cache penetration",
        "Look-ups of this pattern miss far more often than usual, and there are far more of them: they ask for keys "
        "that are in no cache, and each goes through to the store.",
        "Find who sends these keys. Reject keys that cannot exist before the cache, keep the answer “there is none” "
        "for a short time, or limit the pattern.",
    ),
    "hot-missing-key": (
        "A missing key is asked for again and again",
        "Nearly every look-up of this one key misses, and nothing fills it.",
        "Keep the answer “there is none” for this key for a short time, or find why nobody writes it.",
    ),
    "illegal-keys": (
        "Keys that exist nowhere are asked for",
        "The filter of known keys says that these keys are neither in the cache nor in the store: somebody makes them "
        "up.",
        "Block or limit who sends them; answer for keys that the filter does not know without asking the store.",
    ),
}
#: Metrics whose name alone would not read well.
_TITLES = {
    "lookups_per_s": "Look-ups",
    "miss_share": "Miss rate",
    "unfilled_share": "Misses that nothing fills",
    "unfilled_per_s": "Misses that nothing fills",
    "first_seen_share": "Misses of keys never seen before",
    "repeated_share": "Misses of keys that missed before",
    "nowhere_share": "Misses of keys that exist nowhere",
    "distinct_share": "Different keys among look-ups",
    "illegal_per_s": "Such look-ups",
    "young_hits_per_s": "Hits of keys filled lately",
    "lookups_count": "Look-ups",
    "lasted_s": "Lasted",
}
STATES = {"learning": "learning", "quiet": "quiet", "suspect": "suspect", "alerting": "ALERT"}

_PATTERN_CHARS = 80
_KEY_CHARS = 120
_KEYS_SHOWN = 5


def rule_title(rule: str) -> str:
    """What a rule is called."""
    return _RULES[rule][0] if rule in _RULES else printable(rule)


def meaning(rule: str) -> str:
    """What it means that a rule fired, in a sentence."""
    return _RULES[rule][1] if rule in _RULES else ""


def advice(rule: str) -> str:
    """What to do about it."""
    return _RULES[rule][2] if rule in _RULES else ""


def clock(ts_s: float | None) -> str:
    """Unix seconds as ``2026-11-30 17:04:05 UTC``; seconds alone for times that no calendar has."""
    if ts_s is None:
        return fmt.ABSENT
    try:
        return datetime.fromtimestamp(ts_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{ts_s:g} s"


def seconds(value_s: float) -> str:
    """A length of time."""
    return fmt.duration(value_s * 1e9)


def metric_title(metric: str) -> str:
    """What a metric of the evidence is called."""
    return _TITLES.get(metric) or fmt.title(metric.removesuffix("_per_s").removesuffix("_s"))


def number(metric: str, value: float | None) -> str:
    """A value in the unit that its metric's name ends in."""
    if value is None or not fmt.is_number(value):
        return fmt.ABSENT
    if metric.endswith(("_share", "miss_rate")):
        return fmt.share(value)
    if metric.endswith(("_per_s", "qps")):
        return f"{rate(value)}/s"
    if metric.endswith("_s"):
        return seconds(value)
    return fmt.quantity(metric, value)


def rate(value: float | None) -> str:
    """Events per second without the unit: 0.52, 12.4, 1,234."""
    return fmt.ABSENT if value is None or not fmt.is_number(value) else fmt.digits(value)


def where(alert: Alert) -> str:
    """``user:{n}``, with the tenant where there are several; of a rule about one key the key, too."""
    here = place(alert.tenant, alert.pattern)
    if alert.rule != "hot-missing-key" or not alert.keys:
        return here
    return f"{clip(printable(alert.keys[0]), _PATTERN_CHARS)} ({here})"


def place(tenant: str, pattern: str) -> str:
    """A pattern of a tenant; wider rows of the detector in words."""
    if tenant == pattern == EVERY:
        return "all look-ups"
    name = "all patterns" if pattern == ANY else clip(printable(pattern), _PATTERN_CHARS) or "(empty key)"
    if tenant:
        return f"{name}, tenant {clip(printable(tenant), 40)}"
    return "all without a tenant" if pattern == ANY else name


def comparison(item: Evidence) -> str:
    """``limit 9.0 %, usually 3.0 %``: what a number was held against; empty where it only explains."""
    parts = []
    if item.limit is not None:
        parts.append(f"limit {number(item.metric, item.limit)}")
    if item.baseline is not None:
        parts.append(f"usually {number(item.metric, item.baseline)}")
    if item.basis == "estimated":
        parts.append("estimated")
    return ", ".join(parts)


def evidence(item: Evidence) -> str:
    """``Miss rate 97.2 % (limit 9.0 %, usually 3.0 %)``."""
    against = comparison(item)
    return f"{metric_title(item.metric)} {number(item.metric, item.value)}" + (f" ({against})" if against else "")


def summary(alert: Alert) -> str:
    """One line: how bad, what, where, and the two numbers that decided."""
    head = rule_title(alert.rule) + (f": {where(alert)}" if alert.pattern != EVERY else "")
    if alert.kind == "recovered":
        lasted = f", after {seconds(alert.ts_s - alert.since_s)}" if 0 < alert.since_s <= alert.ts_s else ""
        return f"RECOVERED: {head}{lasted}"
    numbers = "; ".join(evidence(item) for item in alert.evidence[:2])
    kind = ", got worse" if alert.kind == "escalated" else ""
    return f"{alert.severity.upper()}{kind}: {head}" + (f": {numbers}" if numbers else "")


def details(alert: Alert) -> list[str]:
    """The other lines: when, all numbers, sources, keys."""
    lines = [f"At {clock(alert.ts_s)}" + (f", since {clock(alert.since_s)}" if alert.since_s else "")]
    lines += [evidence(item) for item in alert.evidence]
    if alert.top:
        parts = [f"{place(share.tenant, share.pattern)} {rate(share.per_s)}/s" for share in alert.top]
        lines.append("Most from: " + "; ".join(parts))
    if alert.keys:
        lines.append("Keys, for example: " + "  ".join(keys(alert)))
    return lines


def keys(alert: Alert) -> list[str]:
    """The sample of keys, fit to be shown."""
    return [clip(printable(key), _KEY_CHARS) for key in alert.keys[:_KEYS_SHOWN]]


def message(alert: Alert) -> str:
    """The whole notice as plain text, for mail and chat."""
    lines = [summary(alert), "", *details(alert)]
    if alert.kind != "recovered":
        lines += ["", meaning(alert.rule), f"What to do: {advice(alert.rule)}"]
    return "\n".join(lines)


def known(measure: Measure, metric: str, known_by: str) -> str:
    """A number that rests on known keys, or why there is none; ``known_by``: what would measure it."""
    if measure.value is not None:
        return number(metric, measure.value)
    return fmt.not_measured("which keys exist is not known" + (f"; {known_by} would tell" if known_by else ""))


def left_out(counts: Counts) -> str:
    """Look-ups that could not be used, by reason; empty where all could."""
    parts = [
        (counts.late_count, "too late"),
        (counts.early_count, "too far ahead"),
        (counts.bad_time_count, "without a time"),
        (counts.held_count, "held back until their time is believed"),
    ]
    return fmt.joined([f"{fmt.count(number)} {what}" for number, what in parts if number])


def closing(run: PierceRun) -> list[str]:
    """The last lines of a run at the terminal: what was read, what fired, what could not be judged."""
    counts, notices = run.snapshot.counts, run.history.notices
    number = len({notice.alert_id for notice in notices}) if notices else 0
    fired = fmt.plural(number, "alert") if number else "nothing fired"
    lines = [f"{fired} in {fmt.plural(counts.lookups_count, 'look-up')} of {run.source}"]
    broken = run.read.get("broken", 0)
    parts = [part for part in (left_out(counts), f"{fmt.count(broken)} broken lines" if broken else "") if part]
    if parts:
        lines.append(f"left out: {fmt.joined(parts)}")
    if run.snapshot.illegal_per_s.value is None and counts.lookups_count:
        lines.append(f"keys that exist nowhere: {known(run.snapshot.illegal_per_s, 'illegal_per_s', run.known_by)}")
    return lines
