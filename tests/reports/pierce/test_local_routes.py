from __future__ import annotations

import asyncio
import io
import json
import os
import stat
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from reports.pierce import made
from rich.console import Console

from spikeprof.analyzers.cache_pierce.model import Baseline, GuardCounts
from spikeprof.profiler.errors import OutputError, UsageError
from spikeprof.reports.pierce import texts
from spikeprof.reports.pierce.dispatcher import RouteCounts
from spikeprof.reports.pierce.jsonl import JsonlRoute
from spikeprof.reports.pierce.live import TerminalRoute
from spikeprof.reports.pierce.metrics import PierceMetrics
from spikeprof.reports.pierce.redact import Redactor
from spikeprof.reports.pierce.routes import RouteError

# ---------------------------------------------------------------- file


def test_a_file_of_log_records(tmp_path: Path) -> None:
    path = tmp_path / "alerts.jsonl"

    async def run() -> None:
        route = JsonlRoute(path)
        await route.send(made.alert())
        await route.send(made.alert(kind="recovered", ts_s=made.START_S + 130))
        path.rename(tmp_path / "alerts.jsonl.1")  # as log rotation does
        await route.send(made.illegal())
        await route.close()

    asyncio.run(run())
    first, second = map(json.loads, (tmp_path / "alerts.jsonl.1").read_text().splitlines())
    (third,) = map(json.loads, path.read_text().splitlines())
    assert set(first) == {"timestamp", "severity_text", "severity_number", "body", "attributes", "resource"}
    assert [r["severity_number"] for r in (first, second, third)] == [17, 9, 21]
    assert second["body"] == "RECOVERED: Cache penetration: user:{n}, after 67.0 s"
    assert third["attributes"]["cache_pierce.top"][0] == {"tenant": "shop", "pattern": "user:{n}", "per_s": 300.0}
    assert first["attributes"]["cache_pierce.keys"] == ["user:901", "user:777"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_tried_again() -> None:
    async def run() -> None:
        await JsonlRoute(Path("/dev/full")).send(made.alert())

    with pytest.raises(RouteError, match="the disk is full") as caught:
        asyncio.run(run())
    assert caught.value.again


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "alerts.jsonl"
    real = os.write

    def half(file: int, data: bytes) -> int:
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return real(file, data[: len(data) - 20])

    async def run() -> None:
        route = JsonlRoute(path)
        await route.send(made.alert())
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            with pytest.raises(RouteError, match="the disk is full"):
                await route.send(made.illegal())
        await route.send(made.illegal())

    asyncio.run(run())
    assert [json.loads(line)["severity_number"] for line in path.read_text().splitlines()] == [17, 21]


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot append alerts to"):
        JsonlRoute(tmp_path / "no" / "such.jsonl")


# ---------------------------------------------------------------- terminal


def screen(width: int = 80, terminal: bool = False, encoding: str = "utf-8") -> tuple[Console, io.TextIOWrapper]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=stream, width=width, force_terminal=terminal, color_system=None), stream


def written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


def test_lines_where_there_is_no_terminal() -> None:
    console, stream = screen()
    with TerminalRoute(console, "proxy") as route:
        route.update(made.snapshot())
        asyncio.run(route.send(made.alert()))
        asyncio.run(route.send(made.alert(kind="recovered", ts_s=made.START_S + 130)))
    assert written(stream).splitlines() == [
        "2026-11-30 17:01:05 UTC ALERT: Cache penetration: user:{n}: Miss rate 97.2 % (limit 9.0 %, usually 3.0 %); "
        "Look-ups 1,250/s (limit 775/s, usually 310/s)",
        "2026-11-30 17:02:10 UTC RECOVERED: Cache penetration: user:{n}, after 67.0 s",
    ]


def table_of(width: int, *rows: object, encoding: str = "utf-8") -> list[str]:
    console, stream = screen(width, terminal=True, encoding=encoding)
    route = TerminalRoute(console, "proxy 127.0.0.1:6380 to 127.0.0.1:6379", known_by="--known FILE")
    route.update(made.snapshot(*rows), ["12 broken lines"])  # type: ignore[arg-type]
    console.print(route._screen())
    return written(stream).splitlines()


def test_the_live_table_at_80_columns() -> None:
    quiet = made.row(pattern="cart:{hex}", tenant="shop", qps=12.25, miss_rate=0.04, state="quiet")
    young = made.row(pattern="new:{n}", qps=0.5, miss_rate=None, baseline=Baseline(None, None), state="learning")
    lines = table_of(80, quiet, young, made.row())
    assert lines[0] == "proxy 127.0.0.1:6380 to 127.0.0.1:6379"
    assert lines[1].split() == ["Pattern", "QPS", "usually", "Miss", "usually", "State"]
    assert lines[2].split() == ["user:{n}", "1,250", "310", "97.2", "%", "3.0", "%", "ALERT"]
    assert lines[3].split() == ["cart:{hex},", "tenant", "shop", "12.2", "310", "4.0", "%", "3.0", "%", "quiet"]
    assert lines[4].split() == ["new:{n}", "0.500", "–", "–", "–", "learning"]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "keys that exist nowhere: not measured: which keys exist is not known; --known FILE would tell" in text
    assert "left out: 4 too late" in text
    assert "12 broken lines" in text


def test_a_hostile_key_cannot_command_the_terminal() -> None:
    lines = table_of(80, made.row(pattern="\x1b]0;own\x07[bold]" + "x" * 300))
    assert "\x1b" not in "".join(lines)
    assert any("[bold]" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_terminal_that_knows_ascii_alone() -> None:
    assert "".join(table_of(80, made.row(miss_rate=None), encoding="ascii")).isascii()


def test_many_patterns_are_counted() -> None:
    rows = [made.row(pattern=f"p{i}:{{n}}", qps=float(i), state="quiet") for i in range(30)]
    lines = table_of(80, *rows)
    assert lines[2].startswith("p29:{n}")
    assert "… and 15 quieter patterns" in lines


def test_notices_above_the_live_table() -> None:
    console, stream = screen(terminal=True)
    with TerminalRoute(console, "proxy") as route:
        route.update(made.snapshot())
        route.show(made.illegal())
    text = " ".join(written(stream).split())
    assert "CRITICAL: Keys that exist nowhere are asked for: Such look-ups 412/s" in text
    assert "Most from: user:{n}, tenant shop 300/s; {uuid} 112/s" in text


# ---------------------------------------------------------------- metrics


def scrape(metrics: PierceMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    port = metrics.serve(0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    finally:
        metrics.close()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_scraped() -> None:
    metrics = PierceMetrics()
    metrics.count(made.alert())
    rows = (made.row(), made.row(pattern="new:{n}", miss_rate=None, state="learning", baseline=Baseline(None, None)))
    routes = {"jsonl": RouteCounts(sent_count=3, failures_count=2, lost_count=1)}
    metrics.update(made.snapshot(*rows), routes, GuardCounts(10, 4, 2), {"lines": 7, "broken": 1})
    found = scrape(metrics)
    user = (("pattern", "user:{n}"), ("tenant", ""))
    new = (("pattern", "new:{n}"), ("tenant", ""))
    assert found["cache_pierce_qps", user] == 1250
    assert found["cache_pierce_miss_ratio", user] == 0.972
    assert ("cache_pierce_miss_ratio", new) not in found  # not measured is not 0
    assert found["cache_pierce_baseline_qps", user] == 310
    assert found["cache_pierce_state", user] == 3
    assert found["cache_pierce_alerts_active", (("severity", "alert"),)] == 1
    assert ("cache_pierce_illegal_keys_per_second", ()) not in found
    kinds = (("kind", "raised"), ("rule", "penetration"), ("severity", "alert"))
    assert found["cache_pierce_notices_total", kinds] == 1
    assert found["cache_pierce_deliveries_total", (("outcome", "lost"), ("route", "jsonl"))] == 1
    assert found["cache_pierce_guard_total", (("verdict", "nil"),)] == 4
    assert found["cache_pierce_source_total", (("what", "broken"),)] == 1
    assert found["cache_pierce_lookups_total", ()] == 20_000


def test_labels_are_bounded_and_never_twice_there() -> None:
    rows = [made.row(pattern="x" * 100 + f"{i:05d}" + "y" * 100, qps=float(i)) for i in range(500)]
    metrics = PierceMetrics()
    metrics.update(made.snapshot(*rows), {})
    patterns = [labels for name, labels in scrape(metrics) if name == "cache_pierce_qps"]
    assert len(patterns) == 50
    assert max(len(dict(labels)["pattern"]) for labels in patterns) <= 140


def test_a_port_that_is_taken() -> None:
    first, second = PierceMetrics(), PierceMetrics()
    port = first.serve(0)
    try:
        with pytest.raises(UsageError, match="cannot serve metrics on"):
            second.serve(port)
    finally:
        first.close()


# ---------------------------------------------------------------- redact


def test_no_key_is_left_after_redacting() -> None:
    redactor = Redactor(b"secret")
    whole = made.alert(pattern="session-of-jane", keys=("session-of-jane", "user:901"))
    alert = redactor.alert(whole)
    assert alert.keys == (redactor.key("session-of-jane"), redactor.key("user:901"))
    assert alert.pattern == redactor.key("session-of-jane")
    assert redactor.alert(made.alert()).pattern == "user:{n}"
    assert redactor.alert(made.illegal()).pattern == "*"
    assert redactor.pattern("{jane}.followers") == redactor.key("{jane}.followers")
    snapshot = redactor.snapshot(made.snapshot(made.row(pattern="session-of-jane"), active=(whole,)))
    assert "jane" not in repr(snapshot)
    assert "user:901" not in repr(snapshot)
    assert "jane" not in texts.message(alert)


def test_hashes_are_the_same_for_the_same_secret_alone() -> None:
    assert Redactor(b"a").key("k") == Redactor(b"a").key("k") == "key#" + Redactor(b"a").key("k")[4:]
    assert Redactor(b"a").key("k") != Redactor(b"b").key("k")
    assert Redactor().key("k") != Redactor().key("k")
