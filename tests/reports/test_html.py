from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from reports import fabricated

from spikeprof.reports.html import render_html, write_html
from spikeprof.reports.html_tables import html_table
from spikeprof.reports.model import Report

MAX_BYTES = 8 * 1000 * 1000


class Page(HTMLParser):
    """Tags with attributes, and the text of scripts by their type."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append((self.tags[-1][1].get("type") or "", data))
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def shown(self) -> str:
        return " ".join(" ".join(self.text).split())

    @property
    def data(self) -> dict[str, object]:
        (text,) = [s for kind, s in self.scripts if kind == "application/json"]
        found: dict[str, object] = json.loads(text)
        return found


@pytest.fixture(scope="module")
def rich_page() -> str:
    return render_html(fabricated.rich())


@pytest.fixture(scope="module")
def hostile_page() -> str:
    return render_html(fabricated.hostile())


@pytest.mark.parametrize("name", fabricated.ALL)
def test_every_report_renders_and_is_small_enough(name: str) -> None:
    page = render_html(fabricated.ALL[name]())
    assert len(page.encode()) < MAX_BYTES
    assert page.startswith("<!doctype html>")
    assert page.count("<h1>") == 1


def test_hostile_names_make_no_elements(hostile_page: str, rich_page: str) -> None:
    page = Page(hostile_page)
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags
    assert "svg" not in tags
    assert tags.count("script") == [tag for tag, _ in Page(rich_page).tags].count("script") == 3
    assert set(tags) <= {tag for tag, _ in Page(rich_page).tags}
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    for name in fabricated.HOSTILE[:2]:
        assert name in page.shown  # the text itself is there, to be read
    assert "49" not in page.shown  # {{ 7*7 }} was not taken as a template


def test_embedded_data_holds_no_markup(hostile_page: str) -> None:
    page = Page(hostile_page)
    (text,) = [s for kind, s in page.scripts if kind == "application/json"]
    assert not re.search("[<>&\u2028\u2029]", text)
    figures = page.data["figures"]
    assert isinstance(figures, dict)
    assert "&lt;/script&gt;" in json.dumps(figures)  # escaped once more for plotly, which reads markup in labels


def test_the_page_asks_the_network_for_nothing(rich_page: str, hostile_page: str) -> None:
    for page in (Page(rich_page), Page(hostile_page)):
        for tag, attrs in page.tags:
            for name in ("src", "srcset", "href", "action", "data", "poster", "background"):
                value = attrs.get(name)
                assert value is None or value.startswith(("#", "data:")), (tag, name, value)
        styles = "".join(re.findall(r"<style>(.*?)</style>", rich_page, re.S))
        assert "url(" not in styles
        assert "@import" not in styles


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else(hostile_page: str) -> None:
    import base64
    import hashlib

    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', hostile_page)
    policy = policy.replace("&#39;", "'")
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "http" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", hostile_page, re.S)
    hashes = {base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
    assert len(hashes) == 2


def test_the_head_marks_the_page_as_ours(rich_page: str) -> None:
    assert '<meta name="generator" content="spikeprof ' in rich_page[:1000]


def test_what_a_reader_is_told(rich_page: str) -> None:
    shown = Page(rich_page).shown
    for text in (
        "infer-20251124",
        "$ python infer.py --prompt '<b>hello</b> & bye'",
        "5.52 ms without tracing → 5.61 ms with tracing (+1.6 %)",
        "The GPU waits for launches",
        "Saves at most 150 ms of the run",
        "vectorized_elementwise_kernel<4, silu_kernel(half)>",
        fabricated.SILU,  # the whole name is there, folded away
        "profiling is for administrators only on this driver",
        "python infer.py <i>--now</i>",
        "The program was stopped by a signal.",
        "580.159.04",
        "2.270153 s",
    ):
        assert text in shown, text


def test_many_notes_are_folded_behind_what_is_graver() -> None:
    """Four notes would push the charts out of sight; where nothing is graver they are what there is to see."""
    report = fabricated.rich()
    one = report.findings()[0]

    def page(*severities: str) -> str:
        findings = tuple(replace(one, severity=severity) for severity in severities)
        return render_html(replace(report, results=(replace(report.results[0], findings=findings),)))

    assert '<details class="folded">' not in page("warning", "info", "info", "info")
    assert '<details class="folded">' not in page(*["info"] * 4)
    folded = page("warning", *["info"] * 4)
    assert "<summary>4 notes</summary>" in folded
    shown, hidden = folded.split('<details class="folded">')
    assert (shown.count('<article class="card warning">'), hidden.count('<article class="card info">')) == (1, 4)
    assert '<article class="card info">' not in shown


def test_charts_over_time_share_their_range_and_their_left_edge(rich_page: str) -> None:
    figures = Page(rich_page).data["figures"]
    assert isinstance(figures, dict)
    assert list(figures) == ["kernel-time", "idle-over-time", "gauges"]
    assert {tuple(f["layout"]["xaxis"]["range"]) for f in figures.values()} == {(2.0, 2.3)}
    assert len({f["layout"]["margin"]["l"] for f in figures.values()}) == 1
    assert all(len(f["layout"]["shapes"]) == 1 for f in figures.values())  # the window left clean


def test_without_charts_the_page_carries_no_plotting_library() -> None:
    for report in (fabricated.empty(), fabricated.not_measured(), fabricated.broken()):
        page = render_html(Report(report.manifest, report.results, report.trace_name))
        assert len(page) < 100_000


def test_not_measured_is_said_with_the_way_to_measure_it() -> None:
    shown = Page(render_html(fabricated.not_measured())).shown
    assert "Not measured: the table 'kernels' was not collected (kernel-latency)." in shown
    assert "To measure it: spikeprof run" in shown
    assert "internal error: ZeroDivisionError" in Page(render_html(fabricated.broken())).shown


def test_an_analyzer_that_is_not_known_here_is_shown_too() -> None:
    from spikeprof.analyzers.base import Figure, Result

    other = Result(
        "page-faults",
        "ok",
        tables={"per_kernel": {"kernel": ["k"], "hit_share": [0.5]}, "raw": {"a_count": [1]}},
        figures=(Figure("hit-rates", "bars", "per_kernel", x="hit_share", y="kernel"),),
    )
    page = Page(render_html(fabricated.alone(other)))
    assert "Page faults" in page.shown
    assert "hit-rates" in page.data["figures"]  # type: ignore[operator]


def test_rendering_is_fast(rich_page: str) -> None:
    started = time.perf_counter()
    render_html(fabricated.rich())
    assert time.perf_counter() - started < 1.5


def test_backticks_become_code_and_stay_escaped() -> None:
    from spikeprof.reports.html import _with_code

    assert _with_code("run `a <b>` now") == "run <code>a &lt;b&gt;</code> now"
    assert _with_code("one ` only <i>") == "one ` only &lt;i&gt;"


def test_the_file_is_private_and_whole(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "report.html"
    write_html(fabricated.rich(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text("utf-8").rstrip().endswith("</html>")


def test_a_bar_of_use_is_full_only_when_all_was_used() -> None:
    def bars(name: str) -> list[float | None]:
        made = html_table("t", {name: [0.05, 0.02]})
        assert made is not None
        return [row[0].bar for row in made.cells]

    assert bars("busy_share") == [5.0, 2.0]
    assert bars("gpu_time_share") == [100.0, 40.0]


def test_what_is_no_number_is_not_shown_as_one() -> None:
    table = html_table("link-totals", {"device": [0, 1], "mean_bytes_per_s": [float("inf"), float("nan")]})
    assert table is not None
    assert [row[1].text for row in table.cells] == ["–", "–"]
