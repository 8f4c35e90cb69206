"""The page of a run: what fired and why, patterns over time, how far to trust it. One file, works offline.

Layout, style and script are those of every report (``reports/html.py``); everything is escaped there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spikeprof.analyzers.cache_pierce.model import Snapshot
from spikeprof.reports import format as fmt
from spikeprof.reports.html import render_page
from spikeprof.reports.html_parts import Section
from spikeprof.reports.kernel_names import printable
from spikeprof.reports.output import write_private
from spikeprof.reports.pierce import charts, tables, texts
from spikeprof.reports.pierce.history import Incident
from spikeprof.reports.pierce.live import shown_rows
from spikeprof.reports.pierce.run import PierceRun
from spikeprof.reports.truth_line import TruthItem

MAX_CARDS = 24

#: The three severities of the detector beside those of the report's style.
_STYLE = """
.card.warn { border-left-color: var(--warn); } .warn .badge { background: var(--warn-soft); color: var(--warn); }
.card.alert { border-left-color: var(--crit); } .alert .badge { background: var(--crit-soft); color: var(--crit); }
.critical .badge { background: var(--crit); color: var(--card); }
.cards { align-items: start; }
#notices td.text { min-width: 26rem; }
"""


def write_html(run: PierceRun, path: Path) -> None:
    """Write the page, whole or not at all, for its owner only. Raises OutputError."""
    write_private(path, render_html(run).encode())


def render_html(run: PierceRun) -> str:
    """The page as text. Raises OutputError when plotly's script cannot be found."""
    incidents = run.history.incidents()
    context = {
        "page_title": f"{printable(run.source)} · cache_pierce_detector",
        "heading": printable(run.source),
        "subtitle": _subtitle(run),
        "command": "",
        "truth": _trust(run),
        "verdict": _verdict(incidents),
        "findings": [_card(incident) for incident in incidents[:MAX_CARDS]],
        "folded": [],
        "no_findings": _nothing(run),
        "facts": _facts(run),
        "notes": [printable(note) for note in run.notes],
        "about_tables": [tables.thresholds(run.options)],
    }
    body = [section for section in _sections(run, incidents) if not section.empty]
    return render_page(context, body, charts.whole(run.history), _STYLE)


def _subtitle(run: PierceRun) -> list[str]:
    span = run.history.span_s
    counts = run.snapshot.counts
    parts = ["cache_pierce_detector", fmt.plural(counts.lookups_count, "look-up")]
    if span:
        parts.append(f"{texts.clock(span[0])} to {texts.clock(span[1])} ({texts.seconds(span[1] - span[0])})")
    if run.redacted:
        parts.append("keys are shown as hashes")
    return parts


def _verdict(incidents: list[Incident]) -> str:
    if not incidents:
        return "nothing fired"
    parts = [
        fmt.plural(number, one, many)
        for severity, one, many in (
            ("critical", "critical alert", "critical alerts"),
            ("alert", "alert", "alerts"),
            ("warn", "warning", "warnings"),
        )
        if (number := sum(incident.worst.severity == severity for incident in incidents))
    ]
    still = sum(incident.end_s is None for incident in incidents)
    return f"{fmt.joined(parts)}, " + (f"{fmt.count(still)} still open" if still else "all over")


def _nothing(run: PierceRun) -> str:
    if not run.snapshot.counts.lookups_count:
        return "No look-up was read: there is nothing to judge."
    return (
        f"No rule fired in {fmt.plural(run.snapshot.counts.lookups_count, 'look-up')}. "
        "What could not be judged is said above."
    )


def _card(incident: Incident) -> dict[str, Any]:
    notice = incident.worst
    lasted = "still open" if incident.lasted_s is None else f"lasted {texts.seconds(incident.lasted_s)}"
    when = f"raised {texts.clock(incident.start_s)}, {lasted}"
    return {
        "severity": notice.severity,
        "title": texts.rule_title(notice.rule),
        "rule": printable(notice.rule),
        "scope": f"{texts.where(notice)}; {when}",
        "scope_full": printable(notice.pattern),
        "evidence": [
            {
                "name": texts.metric_title(item.metric),
                "value": texts.number(item.metric, item.value),
                "limit": texts.comparison(item),
                "source": f"option {item.option}" if item.option else "",
                "basis": "",
            }
            for item in notice.evidence
        ]
        + [
            {
                "name": f"of these {texts.place(share.tenant, share.pattern)}",
                "value": f"{texts.rate(share.per_s)}/s",
                "limit": "",
                "source": "",
                "basis": "",
            }
            for share in notice.top
        ],
        "action": texts.advice(notice.rule),
        "saving": "",
    }


def _trust(run: PierceRun) -> list[TruthItem]:
    snapshot, counts = run.snapshot, run.snapshot.counts
    usable = counts.lookups_count
    items = [
        TruthItem(
            "Look-ups",
            f"{fmt.plural(counts.misses_count, 'miss', 'misses')}, {fmt.share(counts.misses_count / usable)} of them."
            if usable
            else "Nothing was read that could be judged.",
            "value" if usable else "not_measured",
            fmt.count(usable),
        )
    ]
    left_out = texts.left_out(counts)
    broken = run.read.get("broken", 0)
    parts = [part for part in (left_out, f"{fmt.count(broken)} broken lines" if broken else "") if part]
    number = counts.late_count + counts.early_count + counts.bad_time_count + broken
    items.append(
        TruthItem(
            "Left out",
            f"{fmt.joined(parts)}." if parts else "Everything that came in was used.",
            "problem" if number else "value",
            fmt.count(number),
        )
    )
    items.append(_known_item(snapshot, run.known_by))
    items.append(_baseline_item(run))
    items += [TruthItem("Problem", printable(problem), "problem", "limited") for problem in run.problems]
    return items


def _known_item(snapshot: Snapshot, known_by: str) -> TruthItem:
    known, wrong = snapshot.known_keys_count, snapshot.known_false_positive_share
    if known.value is None:
        text = texts.known(known, "known_keys_count", known_by).partition(": ")[2]
        return TruthItem("Known keys", fmt.sentence(text), "not_measured", "not measured")
    text = (
        f"Takes {texts.known(wrong, 'false_positive_share', known_by)} of made-up keys for known ones (Bloom filter)."
    )
    return TruthItem("Known keys", text, "value", f"about {fmt.count(round(known.value))}")


def _baseline_item(run: PierceRun) -> TruthItem:
    rows = shown_rows(run.snapshot, len(run.snapshot.rows))
    learning = sum(row.state == "learning" for row in rows)
    if not rows or learning == len(rows):
        how = f"Each pattern is learned for {texts.seconds(run.options.cold_start_s)} before it can fire."
        return TruthItem("Baselines", how, "not_measured", "none yet")
    text = f"{fmt.plural(learning, 'pattern')} still being learned could not fire." if learning else ""
    return TruthItem("Baselines", text or "Every pattern shown could fire.", "value", fmt.count(len(rows) - learning))


def _sections(run: PierceRun, incidents: list[Incident]) -> list[Section]:
    timeline = Section("timeline", "Timeline", "Timeline", charts=charts.timeline(run.history))
    if timeline.charts:
        timeline.lead = "Drag to zoom, double-click to zoom back: all charts here move together."
    if run.history.notices_left_out_count:
        left = fmt.plural(run.history.notices_left_out_count, "later notice")
        timeline.notices.append(f"{left} not shown: the page holds the first {fmt.count(len(run.history.notices))}.")
    patterns = Section("patterns", "Patterns", "Patterns", count=tables.shown_patterns(run.snapshot))
    patterns.add(tables.patterns(run.snapshot), tables.hot_keys(run.snapshot))
    notices = Section("notices", "Notices", "Notices", count=_more_cards(incidents))
    notices.add(tables.notices(run.history.notices))
    delivery = Section("delivery", "Delivery", "Delivery and protection")
    delivery.add(tables.routes(run.routes), tables.guard(run.guard))
    return [timeline, patterns, notices, delivery]


def _more_cards(incidents: list[Incident]) -> str:
    return (
        f"all {fmt.count(len(incidents))} alerts; the worst {MAX_CARDS} are above" if len(incidents) > MAX_CARDS else ""
    )


def _facts(run: PierceRun) -> list[tuple[str, str]]:
    facts = [("Source", printable(run.source))]
    facts += [(fmt.title(what), fmt.count(number)) for what, number in run.read.items()]
    counts = run.snapshot.counts
    facts.append(("Misses", fmt.count(counts.misses_count)))
    if counts.clock_jumps_count:
        facts.append(("Times that the clock jumped", fmt.count(counts.clock_jumps_count)))
    if counts.folded_away_count:
        facts.append(("Look-ups without a pattern of their own", fmt.count(counts.folded_away_count)))
    facts.append(("Keys", "shown as hashes" if run.redacted else "shown as they are"))
    return facts
