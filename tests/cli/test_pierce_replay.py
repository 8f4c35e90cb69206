"""``spikeprof pierce replay`` as a user runs it: a real process, files, sinks."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from cli.command import SPIKEPROF, refusal, spikeprof
from cli.pierce_events import write_events
from cli.pierce_here import Here, runner
from reports.pierce import made
from reports.pierce.test_smtp import Sink, mail_sink

RAISED = "2026-11-30 17:02:20 UTC ALERT: Cache penetration: user:{n}: Look-ups "
SECRET = "T0PSECRETPATH"


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("events") / "events.jsonl"
    write_events(path, broken=3)
    return path


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Here:
    return runner(capsys)


def test_an_attack_is_told_with_its_end(events: Path) -> None:
    run = spikeprof("pierce", "replay", events)
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    assert lines[0].startswith(("2026-11-30 17:02:20 UTC ALERT", "2026-11-30 17:02:21 UTC ALERT"))
    assert "usually 80.0/s" in lines[0]
    assert " RECOVERED: Cache penetration: user:{n}, after " in lines[1]
    assert lines[2] == "1 alert in 37,000 look-ups of events.jsonl"
    assert lines[3] == "left out: 3 broken lines"
    assert lines[4].startswith("keys that exist nowhere: not measured: which keys exist is not known; --known FILE")


def test_absurd_times_to_live_are_unknown(tmp_path: Path, here: Here) -> None:
    path, page = tmp_path / "events.jsonl", tmp_path / "page.html"
    write_events(path, seconds=3, attack=(0, 0))
    absurd = ("1e308", "-1e308", "-1", "1e155", "1e999", "NaN", "Infinity", "-0.0", "9" * 400)
    lines = [f'{{"ts": 1796058002.5, "key": "user:1", "hit": true, "ttl": {ttl}}}' for ttl in absurd]
    path.write_text(path.read_text() + "\n".join(lines) + "\n")
    run = here("replay", path, "--html", page)
    assert run.returncode == 0, run.stderr
    assert "nothing fired in 42" in run.stdout
    text = page.read_text()
    assert "e+" not in text.split("<body", 1)[-1].split("<script", 1)[0]


def test_the_other_command_is_the_same(tmp_path: Path) -> None:
    detector = SPIKEPROF.with_name("cache_pierce_detector")
    command = [detector, "replay", tmp_path / "none.jsonl"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stderr.startswith("spikeprof: cannot read ")) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--fail-on", "warn"), 1),
        (("--fail-on", "alert"), 1),
        (("--fail-on", "critical"), 0),
        (("--fail-on", "warn", "--set", "qps_ratio=10"), 0),
    ],
)
def test_exit_codes(events: Path, arguments: tuple[str, ...], code: int, here: Here) -> None:
    run = here("replay", events, *arguments)
    assert run.returncode == code
    assert ("--fail-on" in run.stderr) is (code == 1)


def test_json_from_standard_input_with_a_page(events: Path, tmp_path: Path) -> None:
    with events.open("rb") as stream:
        run = subprocess.run(
            [SPIKEPROF, "pierce", "replay", "-", "--json", "--html", tmp_path / "page.html"],
            stdin=stream,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    found = json.loads(run.stdout)
    assert found["read"] == {"lines": 37_000, "broken": 3}
    assert [n["attributes"]["cache_pierce.kind"] for n in found["notices"]] == ["raised", "recovered"]
    assert found["counts"]["lookups_count"] == 37_000
    text = (tmp_path / "page.html").read_text()
    assert "1 alert, all over" in text
    figures = json.loads(text.split('id="data">')[1].split("</script>")[0])["figures"]
    assert len(figures["pierce-qps"]["data"][0]["x"]) >= 199  # a point per second of the events


def test_redacted_output_holds_no_key(events: Path, tmp_path: Path, here: Here) -> None:
    page, log = tmp_path / "page.html", tmp_path / "alerts.jsonl"
    run = here("replay", events, "--json", "--redact", "--html", page, "--jsonl", log)
    assert run.returncode == 0, run.stderr
    sample = json.loads(log.read_text().splitlines()[0])["attributes"]["cache_pierce.keys"]
    assert len(sample) == 5
    assert all(key.startswith("key#") for key in sample)
    for text in (run.stdout, page.read_text(), log.read_text()):
        assert "user:{n}" in text
        assert not [word for word in text.replace('"', " ").split() if word[:6] == "user:1" or word[:6] == "user:9"]


def test_keys_that_exist_nowhere(events: Path, tmp_path: Path, here: Here) -> None:
    known = tmp_path / "known.txt"
    known.write_text("\n".join([f"user:{i}" for i in range(2000)] + [f"cart:{i}:items" for i in range(500)]))
    run = here("replay", events, "--known", known, "--fail-on", "critical")
    assert run.returncode == 1
    assert "CRITICAL: Keys that exist nowhere are asked for: Such look-ups " in run.stdout
    full = here("replay", events, "--known", known, "--known-capacity", "1000")
    assert full.stderr.count("the filter of known keys is full") == 1


def test_all_four_kinds_of_route_deliver(events: Path, tmp_path: Path) -> None:
    """File, webhooks, mail, terminal; each notice once; no secret in any output."""
    log, mails = tmp_path / "alerts.jsonl", Sink()
    flaky = made.HttpSink([(503, b"", {}), (200, b"ok", {})])
    robot = made.HttpSink([(200, b'{"errcode":0}', {})])
    with made.http_sink(flaky), made.http_sink(robot), mail_sink(mails) as port:
        run = spikeprof(
            *("pierce", "replay", events, "--jsonl", log, "--webhook-url-env", "HOOK"),
            *("--webhook-url-env", "ROBOT:dingtalk", "--webhook-secret-env", "KEY"),
            *("--smtp", f"127.0.0.1:{port}", "--smtp-security", "none"),
            *("--smtp-from", "pierce@example.com", "--smtp-to", "ops@example.com"),
            env={"HOOK": flaky.url, "ROBOT": robot.url, "KEY": SECRET},
        )
    assert run.returncode == 0, run.stderr
    assert [line.split(" UTC ")[1].split(":")[0] for line in run.stdout.splitlines()[:2]] == ["ALERT", "RECOVERED"]
    assert [json.loads(line)["severity_number"] for line in log.read_text().splitlines()] == [17, 9]
    assert [body["severity_text"] for body in flaky.bodies] == ["ALERT", "ALERT", "INFO"]
    assert len({h["Idempotency-Key"] for h in flaky.headers}) == 2
    assert [body["text"]["content"].split(":")[0] for body in robot.bodies] == ["ALERT", "RECOVERED"]
    assert [message["Subject"].split(":")[0] for _, message in mails.mails] == ["ALERT", "RECOVERED"]
    assert "HTTP 503" in run.stderr
    assert "delivers again after 1 failed attempt(s)" in run.stderr
    assert SECRET not in run.stdout + run.stderr + log.read_text()


def test_a_receiver_that_is_down_is_waited_for_no_longer_than_told(events: Path) -> None:
    began_s = time.monotonic()
    run = spikeprof(
        "pierce",
        "replay",
        events,
        "--webhook-url-env",
        "HOOK",
        "--flush",
        "1",
        env={"HOOK": f"http://127.0.0.1:9/{SECRET}"},
    )
    assert time.monotonic() - began_s < 15
    assert run.returncode == 0
    assert "webhook json at 127.0.0.1:9: a notice was not delivered: cannot reach it: Connection refused" in run.stderr
    assert "2 notice(s) not delivered within 1 s" in run.stderr
    assert SECRET not in run.stderr


def test_at_the_speed_of_the_events(tmp_path: Path, here: Here) -> None:
    path = tmp_path / "short.jsonl"
    write_events(path, seconds=4, attack=(9, 9))
    began_s = time.monotonic()
    assert here("replay", path, "--speed", "4").returncode == 0
    assert 0.9 < time.monotonic() - began_s < 8


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--set", "no_such=1"), 2, "there is no threshold 'no_such'; there are miss_rate_ratio"),
        (("--set", "min_qps=many"), 2, "write a number, as in --set min_qps=20.0"),
        (("--set", "min_misses_count=1.5"), 2, "write a whole number"),
        (("--set", "min_qps=-1"), 2, "must be above 0"),
        (("--set", "min_qps=inf"), 2, "finite"),
        (("--speed", "fast"), 2, "--speed fast: write max"),
        (("--speed", "0"), 2, "--speed 0: write max"),
        (("--webhook-url-env", "NOT_SET"), 2, "the environment variable NOT_SET is not set"),
        (("--webhook-url-env", "PATH:teams"), 2, "there is no kind 'teams'; there are json, slack"),
        (("--webhook-url-env", "PATH"), 2, "is no http:// or https:// URL"),
        (("--webhook-secret-env", "PATH"), 2, "needs a webhook"),
        (("--smtp", "mail.example.com"), 2, "write HOST:PORT"),
        (("--smtp", "mail.example.com:25"), 2, "--smtp needs --smtp-from and --smtp-to"),
        (("--smtp-to", "a@example.com"), 2, "mail needs a server"),
        (("--known", "/no/such/file"), 3, "cannot read known keys from /no/such/file"),
        (("--known-refresh", "5"), 2, "--known-refresh needs something to build from"),
        (("--html", "/no/such/folder/page.html"), 4, "there is no folder /no/such/folder"),
        (("--jsonl", "/no/such/folder/a.jsonl"), 4, "cannot append alerts to /no/such/folder/a.jsonl"),
    ],
)
def test_refusals(events: Path, arguments: tuple[str, ...], code: int, message: str, here: Here) -> None:
    run = here("replay", events, *arguments)
    assert run.returncode == code
    assert message in refusal(run)


def test_files_that_are_not_there_or_hold_nothing(tmp_path: Path, here: Here) -> None:
    missing = here("replay", tmp_path / "none.jsonl")
    assert missing.returncode == 3
    assert "cannot read" in refusal(missing)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    run = here("replay", empty, "--html", tmp_path / "page.html", "--fail-on", "warn")
    assert (run.returncode, run.stdout) == (0, "nothing fired in 0 look-ups of empty.jsonl\n")
    garbage = tmp_path / "garbage.jsonl"
    garbage.write_bytes(bytes(range(256)) * 50)
    run = here("replay", garbage)
    assert run.returncode == 0
    assert "broken lines" in run.stdout


def test_a_page_does_not_replace_what_is_no_page(events: Path, tmp_path: Path, here: Here) -> None:
    kept = tmp_path / "mine.html"
    kept.write_text("mine")
    assert here("replay", events, "--html", kept).returncode == 4
    assert kept.read_text() == "mine"


def test_help_without_a_source(here: Here) -> None:
    run = here()
    assert run.returncode == 2
    assert all(f"\n  {verb} " in run.stderr for verb in ("proxy", "monitor", "follow", "replay", "engine"))
    assert here("replay", "--help").returncode == 0


@pytest.mark.skipif(shutil.which("head") is None, reason="needs head")
def test_a_reader_that_goes_away(events: Path) -> None:
    command = f"{SPIKEPROF} pierce replay {events} --json | head -c 10"
    run = subprocess.run(command, shell=True, capture_output=True, text=True, check=True, timeout=60)
    assert (len(run.stdout), run.stderr) == (10, "")
