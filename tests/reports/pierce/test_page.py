from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports.pierce import made
from reports.test_html import Page

from spikeprof.analyzers.cache_pierce.model import EVERY, Counts, GuardCounts, Measure
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.reports.pierce.answer import answer
from spikeprof.reports.pierce.dispatcher import RouteCounts
from spikeprof.reports.pierce.history import MAX_POINTS, MAX_SERIES, History
from spikeprof.reports.pierce.html import render_html, write_html
from spikeprof.reports.pierce.run import PierceRun

MAX_BYTES = 8_000_000


def history(seconds: int = 120, **changes: Any) -> History:
    """Look-ups of one pattern, attacked from second 60 to 90."""
    made_history = History()
    for second in range(seconds):
        attacked = 60 <= second < 90
        row = made.row(
            qps=1250.0 if attacked else 310.0,
            miss_rate=0.97 if attacked else 0.03,
            state="alerting" if attacked else "quiet",
            **changes,
        )
        made_history.add(made.snapshot(row, ts_s=made.START_S + second))
    return made_history


def run(**changes: Any) -> PierceRun:
    told = history()
    for notice in (
        made.alert(),
        made.alert(kind="escalated", severity="critical", ts_s=made.START_S + 75),
        made.alert(kind="recovered", severity="critical", ts_s=made.START_S + 100),
        made.illegal(),
    ):
        told.note(notice)
    values: dict[str, Any] = {
        "source": "events.jsonl",
        "history": told,
        "snapshot": made.snapshot(),
        "options": Options(min_qps=50.0),
        "read": {"lines": 20_000, "broken": 2},
        "routes": {"webhook slack at hooks.example.com": RouteCounts(4, 2, 1, 0)},
        "guard": GuardCounts(100, 7, 3),
        "problems": ["baselines are in memory alone: the disk is full"],
        "notes": ["which key missed is not known"],
        "known_by": "--known FILE",
    }
    return PierceRun(**{**values, **changes})


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render_html(run()))


def figure(page: Page, name: str) -> dict[str, Any]:
    figures: dict[str, Any] = page.data["figures"]  # type: ignore[assignment]
    return figures[name]  # type: ignore[no-any-return]


def test_the_page_says_what_fired_and_why(page: Page) -> None:
    text = page.shown
    assert "2 critical alerts, 1 still open" in text
    assert "Cache penetration penetration user:{n}; raised 2026-11-30 17:01:05 UTC, lasted 37.0 s" in text
    assert "Miss rate 97.2 % limit 9.0 %, usually 3.0 %" in text
    assert "of these user:{n}, tenant shop 300/s" in text
    assert "Do: Find who sends these keys." in text
    assert "Left out , a problem 6 4 too late and 2 broken lines." in text
    assert "Known keys , not measured not measured Which keys exist is not known; --known FILE would tell." in text
    assert "Problem , a problem limited baselines are in memory alone: the disk is full" in text
    assert "answered nil at once: exists nowhere 7" in text
    assert "webhook slack at hooks.example.com 4 2 1 0" in text
    assert "min_qps 50.0 20.0" in text
    assert "which key missed is not known" in text


def test_the_timeline(page: Page) -> None:
    rates = figure(page, "pierce-qps")
    line, usual = rates["data"]
    assert (line["name"], len(line["x"]), line["x"][0]) == ("user:{n}", 120, (made.START_S + 0.5) * 1000)
    assert line["y"][59:62] == [310.0, 1250.0, 1250.0]
    assert usual["line"]["dash"] == "dot"
    assert set(usual["y"]) == {310.0}
    # penetration from 65 to 100 s, illegal keys from 65 s to the end of what was seen: one stretch
    assert [(s["x0"], s["x1"]) for s in rates["layout"]["shapes"]] == [
        ((made.START_S + 65) * 1000, (made.START_S + 120) * 1000)
    ]
    assert figure(page, "pierce-miss")["data"][0]["y"][60] == 0.97
    bars = {trace["name"]: trace for trace in figure(page, "pierce-alerts")["data"]}
    assert bars["alert"]["x"] == [10_000.0]  # raised at 65 s, critical at 75 s
    assert sorted(bars["critical"]["x"]) == [25_000.0, 55_000.0]


def test_a_page_without_look_ups_says_so() -> None:
    empty = made.snapshot(ts_s=None, counts=Counts(), active=(), hot_keys=())
    text = Page(render_html(run(history=History(), snapshot=empty, routes={}, guard=None))).shown
    assert "nothing fired" in text
    assert "No look-up was read: there is nothing to judge." in text


def test_known_keys_are_told_with_their_error() -> None:
    known = made.snapshot(
        known_keys_count=Measure(1999.7), known_false_positive_share=Measure(0.001), illegal_per_s=Measure(0.0)
    )
    text = Page(render_html(run(snapshot=known))).shown
    assert "about 2,000 Takes 0.10 % of made-up keys for known ones (Bloom filter)." in text


def test_hostile_names_make_no_elements(page: Page) -> None:
    evil = "</script><img src=x onerror=alert(1)>`code`\u2028{n}"
    told = history(pattern=evil, tenant=evil)
    told.note(made.alert(pattern=evil, tenant=evil, keys=(evil, evil * 40)))
    hostile = made.snapshot(made.row(pattern=evil, tenant=evil))
    text = render_html(run(source=evil, history=told, snapshot=hostile, notes=[evil], problems=[evil]))
    found = Page(text)
    tags = [tag for tag, _ in found.tags]
    assert "img" not in tags
    assert tags.count("script") == 3
    assert set(tags) <= {tag for tag, _ in page.tags} | {"details", "summary"}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert "default-src &#39;none&#39;" in text


def test_the_page_is_for_its_owner_alone_and_not_too_large(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_html(run(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size < MAX_BYTES


def test_a_long_run_is_thinned_out_and_keeps_its_peaks() -> None:
    told = History()
    for second in range(5000):
        told.add(made.snapshot(made.row(qps=9999.0 if second == 3001 else 100.0), ts_s=made.START_S + second))
    assert told.step_s == 4.0  # 5000 s in at most 1500 points
    points = told.series["", "user:{n}"]
    assert 1250 <= len(points) <= MAX_POINTS
    peaks = [cell for cell, point in points.items() if point.qps == 9999.0]
    assert peaks == [int((made.START_S + 3001) // 4)]


@given(st.lists(st.floats(allow_nan=False, min_value=-1e15, max_value=1e15), min_size=1, max_size=60))
def test_any_times_are_bounded(times: list[float]) -> None:
    told = History()
    for ts_s in times:
        told.add(made.snapshot(ts_s=ts_s))
    points = told.series["", "user:{n}"]
    assert 1 <= len(points) <= MAX_POINTS
    start, end = told.span_s or (0.0, 0.0)
    assert start <= min(times) <= max(times) <= end


def test_many_patterns_are_bounded_and_those_that_alerted_are_drawn() -> None:
    told = History()
    told.note(made.alert(pattern="quiet:{n}"))
    for number in range(300):
        rows = (made.row(pattern=f"p{number}:{{n}}", qps=1000.0 + number), made.row(pattern="quiet:{n}", qps=1e6))
        told.add(made.snapshot(*rows, ts_s=made.START_S + number))
    assert len(told.series) <= MAX_SERIES
    assert told.places(3)[0] == ("", "quiet:{n}")


def test_wider_rows_that_add_nothing_are_not_shown() -> None:
    leaf = made.row(lookups_count=1000)
    wide = made.row(pattern="user:{any}", level="prefix", lookups_count=1050, state="quiet")
    wider = made.row(pattern="{any}", level="tenant", lookups_count=2000, state="quiet")
    everything = made.row(tenant=EVERY, pattern=EVERY, level="all", lookups_count=2000, state="quiet")
    text = Page(render_html(run(snapshot=made.snapshot(leaf, wide, wider, everything)))).shown
    assert "user:{any}" not in text
    assert "all without a tenant" in text  # half of its look-ups have no row of their own
    assert "all look-ups" in text


def test_a_hot_key_is_named() -> None:
    told = history()
    told.note(made.alert(rule="hot-missing-key", severity="warn", keys=("user:901",)))
    text = Page(render_html(run(history=told))).shown
    assert "A missing key is asked for again and again hot-missing-key user:901 (user:{n}); raised" in text


def test_the_answer_as_data() -> None:
    found = answer(run())
    assert [n["attributes"]["cache_pierce.kind"] for n in found["notices"]] == [
        "raised",
        "escalated",
        "recovered",
        "raised",
    ]
    assert found["illegal_per_s"] == {"value": None, "reason": "no keys are known", "measure_with": "--known FILE"}
    assert found["patterns"][0]["baseline"]["qps"] == 310.0
    assert found["guard"]["nil_count"] == 7
