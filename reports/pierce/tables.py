"""Tables of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from spikeprof.analyzers.cache_pierce.model import Alert, GuardCounts, PatternRow, Snapshot
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.reports import format as fmt
from spikeprof.reports.html_tables import MIN_ROWS_TO_FILTER, Cell, Heading, HtmlTable
from spikeprof.reports.kernel_names import clip, printable
from spikeprof.reports.pierce import texts
from spikeprof.reports.pierce.dispatcher import RouteCounts
from spikeprof.reports.pierce.live import shown_rows

MAX_PATTERNS = 100
MAX_NOTICES = 500
_NAME_CHARS = 60
_STATES = {**texts.STATES, "alerting": "alerting"}


def patterns(snapshot: Snapshot) -> HtmlTable | None:
    """The patterns as they stood at the end: those that alert first, then the busiest."""
    rows = shown_rows(snapshot, MAX_PATTERNS)
    heads = [
        Heading("Pattern", "name"),
        Heading("Look-ups/s", "num", "over the last window"),
        Heading("Usual", "num", "baseline of look-ups/s"),
        Heading("Miss rate", "share"),
        Heading("Usual", "num", "baseline of the miss rate"),
        Heading("Different keys", "num", "of the last 10 to 20 s, estimated"),
        Heading("TTL", "num", "mean and spread of what entries have to live"),
        Heading("Look-ups", "num"),
        Heading("Misses", "num"),
        Heading("State", "short"),
    ]
    return _table("Patterns at the end", heads, [_pattern_cells(row) for row in rows])


def shown_patterns(snapshot: Snapshot) -> str:
    """How many of the patterns the table shows; empty where all."""
    total = len(snapshot.rows)
    return f"the {MAX_PATTERNS} busiest of {fmt.count(total)}" if total > MAX_PATTERNS else ""


def _pattern_cells(row: PatternRow) -> list[Cell]:
    ttl = fmt.ABSENT
    if row.ttl_mean_s is not None:
        ttl = texts.seconds(row.ttl_mean_s)
        ttl += f" ± {texts.seconds(row.ttl_std_s)}" if row.ttl_std_s is not None else ""
    return [
        _name(texts.place(row.tenant, row.pattern)),
        _number(row.qps, texts.rate(row.qps)),
        _number(row.baseline.qps, texts.rate(row.baseline.qps)),
        _share(row.miss_rate),
        _number(row.baseline.miss_rate, texts.number("miss_rate", row.baseline.miss_rate)),
        _number(row.distinct_count, fmt.count(round(row.distinct_count)) if row.distinct_count is not None else ""),
        _number(row.ttl_mean_s, ttl),
        _number(row.lookups_count, fmt.count(row.lookups_count)),
        _number(row.misses_count, fmt.count(row.misses_count)),
        Cell(_STATES[row.state], "short"),
    ]


def hot_keys(snapshot: Snapshot) -> HtmlTable | None:
    """The keys that were missed most."""
    heads = [
        Heading("Key", "name"),
        Heading("Pattern", "name"),
        Heading("Look-ups", "num"),
        Heading("Misses", "num"),
        Heading("Miss rate", "share"),
        Heading("Alerting", "short"),
    ]
    rows = [
        [
            _name(clip(printable(hot.key), 300)),
            _name(texts.place(hot.tenant, hot.pattern)),
            _number(hot.lookups_count, fmt.count(hot.lookups_count)),
            _number(hot.misses_count, fmt.count(hot.misses_count)),
            _share(hot.misses_count / hot.lookups_count if hot.lookups_count else None),
            Cell("yes" if hot.alerting else "no", "short"),
        ]
        for hot in snapshot.hot_keys[:MAX_PATTERNS]
    ]
    return _table("Keys that are missed much", heads, rows)


def notices(alerts: Sequence[Alert]) -> HtmlTable | None:
    """Every notice in order, with its numbers and a sample of the keys."""
    heads = [
        Heading("Time", "short"),
        Heading("Notice", "short"),
        Heading("Severity", "short"),
        Heading("Rule", "short"),
        Heading("Pattern", "name"),
        Heading("Numbers", "text"),
        Heading("Keys, for example", "name"),
    ]
    rows = [
        [
            Cell(texts.clock(alert.ts_s), "short", sort=alert.ts_s),
            Cell(alert.kind, "short"),
            Cell(alert.severity, "short"),
            Cell(alert.rule, "short"),
            _name(texts.place(alert.tenant, alert.pattern)),
            Cell(_numbers(alert), "text"),
            _keys(alert),
        ]
        for alert in alerts[:MAX_NOTICES]
    ]
    more = f" (the first {fmt.count(MAX_NOTICES)} of {fmt.count(len(alerts))})" if len(alerts) > MAX_NOTICES else ""
    return _table("Notices" + more, heads, rows)


def _numbers(alert: Alert) -> str:
    parts = [texts.evidence(item) for item in alert.evidence]
    parts += [f"{texts.place(share.tenant, share.pattern)}: {texts.rate(share.per_s)}/s" for share in alert.top]
    # Backticks would turn a part of a name into code.
    return "; ".join(parts).replace("`", "'") or fmt.ABSENT


def _keys(alert: Alert) -> Cell:
    """The first key, and all of the sample on demand."""
    found = texts.keys(alert)
    if not found:
        return Cell(fmt.ABSENT, "name")
    full = "\n".join(found)
    return Cell(clip(found[0], _NAME_CHARS), "name", full=full if len(found) > 1 or len(full) > _NAME_CHARS else "")


def routes(counts: Mapping[str, RouteCounts]) -> HtmlTable | None:
    """What became of notices, by route."""
    heads = [Heading("Route", "name"), *(Heading(h, "num") for h in ("Sent", "Failed attempts", "Unclear", "Lost"))]
    rows = [
        [
            _name(printable(name)),
            *(
                _number(value, fmt.count(value))
                for value in (c.sent_count, c.failures_count, c.unclear_count, c.lost_count)
            ),
        ]
        for name, c in counts.items()
    ]
    return _table("Notices by route", heads, rows)


def guard(counts: GuardCounts | None) -> HtmlTable | None:
    """What protection did; nothing where there was none."""
    if counts is None:
        return None
    named = (
        ("passed on", counts.passed_count),
        ("answered nil at once: exists nowhere", counts.nil_count),
        ("held back: over the limit of its pattern", counts.limited_count),
    )
    heads = [Heading("Look-ups", "text"), Heading("Number", "num")]
    return _table("Protection", heads, [[Cell(what, "text"), _number(n, fmt.count(n))] for what, n in named])


def thresholds(options: Options) -> HtmlTable | None:
    """Every option with its value, those that are not the default marked."""
    usual = Options()
    heads = [Heading("Option", "name"), Heading("Value", "num"), Heading("Default", "num")]
    rows = [
        [
            _name(field.name),
            _number(getattr(options, field.name), f"{getattr(options, field.name):,}"),
            Cell("" if value == getattr(options, field.name) else f"{value:,}", "num"),
        ]
        for field in fields(options)
        for value in [getattr(usual, field.name)]
    ]
    return _table("Thresholds; their names end in their units", heads, rows)


def _table(caption: str, heads: list[Heading], rows: list[list[Cell]]) -> HtmlTable | None:
    return HtmlTable(caption, heads, rows, len(rows) >= MIN_ROWS_TO_FILTER) if rows else None


def _name(text: str) -> Cell:
    short = clip(text, _NAME_CHARS)
    return Cell(short, "name", title=text if short != text else "", full=text if short != text else "")


def _number(value: float | None, text: str) -> Cell:
    if value is None or not fmt.is_number(value):
        return Cell(fmt.ABSENT, "num", title=fmt.not_measured())
    return Cell(text, "num", sort=float(value))


def _share(value: float | None) -> Cell:
    if value is None:
        return Cell(fmt.ABSENT, "share", title=fmt.not_measured())
    return Cell(fmt.share(value), "share", sort=value, bar=round(100 * value, 2))
