"""Verbs that go on: real processes over a growing file, a real Redis, an engine's socket and counters."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli.command import SPIKEPROF, refusal
from cli.pierce_events import write_events
from cli.pierce_here import Here, runner
from paths import ROOT

QUICK = ("--set", "cold_start_s=5", "--set", "baseline_cell_s=1", "--set", "recover_s=1", "--baselines", "none")
needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server (apt install redis)")


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Here:
    return runner(capsys)


@contextlib.contextmanager
def detector(*arguments: str | Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    """The detector as a process; ended by Ctrl-C and waited for."""
    with subprocess.Popen(
        [SPIKEPROF, "pierce", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "80", **env},
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ended(process: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[int, str, str]:
    """Exit code and output after a signal, or after the process ended by itself."""
    if process.poll() is None:
        process.send_signal(number)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def said(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line of standard error that matches."""
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"never said: {pattern}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# ---------------------------------------------------------------- follow


def test_a_growing_file_is_followed_over_rotation_to_its_page(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "events.jsonl"
    write_events(whole, seconds=60, attack=(30, 40))
    lines = whole.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3000]))
    log, page = tmp_path / "alerts.jsonl", tmp_path / "page.html"
    with detector("follow", path, "--from-start", *QUICK, "--jsonl", log, "--html", page) as process:
        time.sleep(1.0)
        path.rename(tmp_path / "events.jsonl.1")
        path.write_text("".join(lines[3000:]))
        until_s = time.monotonic() + 20
        while "recovered" not in (log.read_text() if log.exists() else "") and time.monotonic() < until_s:
            time.sleep(0.1)
        code, out, err = ended(process, signal.SIGTERM)
    assert code == 0, err
    kinds = [json.loads(line)["attributes"]["cache_pierce.kind"] for line in log.read_text().splitlines()]
    assert kinds[0] == "raised"
    assert kinds[-1] == "recovered"
    assert "ALERT: Cache penetration: user:{n}: Look-ups " in out
    assert f"look-ups of events in {path}" in out
    assert "all over" in page.read_text()


def test_watching_goes_on_when_nobody_reads_it_any_more(tmp_path: Path) -> None:
    path, log = tmp_path / "events.jsonl", tmp_path / "alerts.jsonl"
    path.write_text("")
    with detector("follow", path, *QUICK, "--jsonl", log, "--metrics-port", "0") as process:
        said(process, "metrics at")
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        write_events(tmp_path / "whole.jsonl", seconds=60, attack=(30, 40))
        with path.open("a") as file:
            file.write((tmp_path / "whole.jsonl").read_text())
        until_s = time.monotonic() + 20
        while "recovered" not in (log.read_text() if log.exists() else "") and time.monotonic() < until_s:
            time.sleep(0.1)
        assert process.poll() is None
        process.terminate()
        assert process.wait(20) in (0, 141)  # 141: the last lines found no reader
    assert "recovered" in log.read_text()


def test_baselines_are_kept_so_that_a_restart_needs_no_cold_start(tmp_path: Path, here: Here) -> None:
    whole, path, kept = tmp_path / "whole.jsonl", tmp_path / "events.jsonl", tmp_path / "state" / "b.sqlite"
    write_events(whole, seconds=40, attack=(22, 32))
    lines = whole.read_text().splitlines(keepends=True)
    options = ("--set", "cold_start_s=15", "--baselines", kept, "--seconds", "0.7")
    path.write_text("".join(lines[: 140 * 20]))
    first = here("follow", path, "--from-start", *options)
    assert first.stdout.startswith("nothing fired in "), first.stderr
    path.write_text("".join(lines[140 * 20 :]))
    assert "ALERT: Cache penetration: user:{n}" in here("follow", path, "--from-start", *options).stdout
    kept.unlink()
    anew = here("follow", path, "--from-start", *options)
    assert anew.stdout.startswith("nothing fired in "), anew.stderr


def test_baselines_that_cannot_be_kept_are_told_and_stop_nothing(tmp_path: Path, here: Here) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, seconds=30, attack=(15, 25))
    run = here(
        *("follow", path, "--from-start", "--set", "cold_start_s=5", "--seconds", "0.7"),
        *("--baselines", "/proc/nowhere/b.sqlite"),
    )
    assert run.returncode == 0
    assert "ALERT: Cache penetration" in run.stdout
    assert "baselines are in memory alone: cannot write /proc/nowhere/b.sqlite: " in run.stderr
    mine = tmp_path / "mine.txt"
    mine.write_text("not a database at all")
    refused = here("follow", path, "--baselines", mine)
    assert refused.returncode == 3
    assert "is no SQLite database" in refusal(refused)


def test_the_live_table_on_a_terminal(tmp_path: Path) -> None:
    """A real terminal of 80 columns, by a pseudo-terminal."""
    path = tmp_path / "events.jsonl"
    write_events(path, seconds=30, attack=(15, 25))
    command = [str(SPIKEPROF), "pierce", "follow", str(path), "--from-start", *QUICK, "--seconds", "1.5"]
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover
        os.environ |= {"COLUMNS": "80", "LINES": "30", "TERM": "xterm"}
        os.execv(command[0], command)
    text = b""
    with contextlib.suppress(OSError):  # the terminal of a process that has ended
        while select.select([terminal], [], [], 20)[0] and (data := os.read(terminal, 65536)):
            text += data
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", text).decode()
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    assert any(line.startswith("cache_pierce_detector: events in ") for line in lines)
    assert any(line.split() == ["Pattern", "QPS", "usually", "Miss", "usually", "State"] for line in lines)
    assert any(line.startswith("user:{n} ") and line.endswith(("ALERT", "quiet")) for line in lines)
    assert "ALERT: Cache penetration: user:{n}" in plain
    assert "Keys, for example: user:" in plain


# ---------------------------------------------------------------- Redis


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield port
        finally:
            server.terminate()


def look_up(client: Any, keys: list[str]) -> list[bytes | None]:
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.get(key)
    return list(pipeline.execute())


def connected(port: int) -> Any:
    redis = pytest.importorskip("redis", reason="needs redis (extra pierce)")
    return redis.Redis(port=port, single_connection_client=True)


def fill(port: int, number: int) -> None:
    with connected(port) as client:
        client.mset({f"user:{i}": "x" for i in range(number)})


@needs_redis
def test_the_proxy_sees_an_attack_and_holds_it_back(redis_port: int, tmp_path: Path) -> None:
    """Known keys by SCAN; made-up ones are answered nil without asking Redis; metrics tell; the page is written."""
    fill(redis_port, 1000)
    page, log, draw = tmp_path / "page.html", tmp_path / "alerts.jsonl", random.Random(5)
    with detector(
        *(
            "proxy",
            "--listen",
            "127.0.0.1:0",
            "--upstream",
            f"127.0.0.1:{redis_port}",
            *QUICK,
            "--html",
            page,
            "--jsonl",
            log,
        ),
        *("--known-scan", "--known-refresh", "60", "--guard-nil", "--metrics-port", "0", "--fail-on", "critical"),
    ) as process:
        metrics = said(process, r"metrics at (http://\S+)")[1]
        port = int(said(process, r"clients connect to 127\.0\.0\.1:(\d+)")[1])
        with connected(port) as client:
            until_s = time.monotonic() + 20
            while not (log.exists() and log.stat().st_size) and time.monotonic() < until_s:
                made = f"made:{draw.randrange(10**9)}"
                client.set(made, "1")
                assert look_up(client, [made]) == [b"1"]
                assert None not in look_up(client, [f"user:{draw.randrange(1000)}" for _ in range(20)])
                assert set(look_up(client, [f"user:{draw.randrange(10**9, 10**10)}" for _ in range(60)])) == {None}
                time.sleep(0.1)
        time.sleep(0.7)
        with urllib.request.urlopen(metrics, timeout=5) as answer:
            scraped = answer.read().decode()
        code, out, err = ended(process)
    assert code == 1, err
    assert "CRITICAL: Keys that exist nowhere are asked for: Such look-ups " in out
    answered = re.search(r'cache_pierce_guard_total\{verdict="nil"\} (\d+)\.0', scraped)
    assert answered
    assert int(answered[1]) >= 100  # the first ones pass until the Redis has answered the client
    assert 'cache_pierce_notices_total{kind="raised",rule="illegal-keys",severity="critical"} 1.0' in scraped
    assert "answered nil at once: exists nowhere" in page.read_text()


@needs_redis
def test_an_alert_stays_while_what_it_is_about_is_held_back(redis_port: int, tmp_path: Path) -> None:
    """Refused look-ups go on counting, so that the limit is not lifted by its own effect."""
    fill(redis_port, 1000)
    log, draw = tmp_path / "alerts.jsonl", random.Random(5)

    def kinds() -> list[str]:
        text = log.read_text() if log.exists() else ""
        return [json.loads(line)["attributes"]["cache_pierce.kind"] for line in text.splitlines()]

    limited = ("--guard-limit", "5", "--set", "cold_start_s=3", "--set", "baseline_cell_s=0.5", "--jsonl", log)
    upstream = f"127.0.0.1:{redis_port}"
    with detector("proxy", "--listen", "127.0.0.1:0", "--upstream", upstream, *QUICK, *limited) as process:
        port = int(said(process, r"clients connect to 127\.0\.0\.1:(\d+)")[1])

        def traffic(seconds: float, attack: int, until: str = "") -> int:
            """Look-ups for so long; how many of them were refused."""
            end_s, refused = time.monotonic() + seconds, 0
            while time.monotonic() < end_s and not (until and until in kinds()):
                pipeline = client.pipeline(transaction=False)
                for number in range(3 + attack):
                    pipeline.get(f"user:{draw.randrange(1000) if number < 3 else draw.randrange(10**9, 10**10)}")
                refused += sum(isinstance(answer, Exception) for answer in pipeline.execute(raise_on_error=False))
                time.sleep(0.1)
            return refused

        with connected(port) as client:
            traffic(4.0, 0)
            traffic(15.0, 40, until="raised")
            assert traffic(4.0, 40) > 500  # four times recover_s
            assert "recovered" not in kinds()
            traffic(10.0, 0, until="recovered")
        code, _, err = ended(process)
    assert code == 0, err
    assert kinds()[0] == "raised"
    assert kinds().count("raised") == kinds().count("recovered")


@needs_redis
def test_monitor_sees_an_attack_and_says_what_it_cannot_know(redis_port: int, tmp_path: Path) -> None:
    fill(redis_port, 1000)
    draw, log = random.Random(6), tmp_path / "alerts.jsonl"
    soon = ("--set", "cold_start_s=2", "--set", "lateness_s=0.5", "--redact", "--jsonl", log)
    with detector("monitor", "--redis", f"127.0.0.1:{redis_port}", *QUICK, *soon) as process:
        said(process, "which key missed")
        began_s = time.monotonic()
        with connected(redis_port) as client:
            while not (log.exists() and log.stat().st_size) and time.monotonic() - began_s < 25:
                is_attacked = time.monotonic() - began_s > 4
                keys = [f"user:{draw.randrange(1000)}" for _ in range(10)]
                keys += [f"user:{draw.randrange(10**9, 10**10)}" for _ in range(60 if is_attacked else 0)]
                look_up(client, keys)
                time.sleep(0.19)
        code, out, err = ended(process)
    assert code == 0, err
    assert "ALERT: Cache penetration: user:{n}, tenant 0: Look-ups " in out
    assert "key#" in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("monitor", "--redis", "127.0.0.1:9"), 3, "cannot be watched"),
        (("monitor", "--redis", "nonsense"), 2, "--redis nonsense: write HOST:PORT"),
        (("proxy",), 2, "--upstream"),
        (("proxy", "--upstream", "127.0.0.1:9", "--listen", "203.0.113.1:1"), 2, "cannot listen on 203.0.113.1:1"),
        (("proxy", "--upstream", "127.0.0.1:9", "--upstream-ca", "/x"), 2, "need --upstream-tls"),
        (("proxy", "--upstream", "127.0.0.1:9", "--upstream-tls", "--upstream-ca", "/x"), 2, "no certificates"),
        (("proxy", "--upstream", "127.0.0.1:9", "--guard-nil"), 2, "needs to know which keys exist"),
        (("proxy", "--upstream", "127.0.0.1:9", "--guard-nil", "--known-scan"), 2, "--known-refresh S"),
        (("proxy", "--upstream", "127.0.0.1:9", "--known-scan"), 3, "the keys of the Redis at 127.0.0.1:9 cannot be"),
        (("proxy", "--upstream", "127.0.0.1:9", "--known-scan", "--hash-fields"), 2, "not fields of hashes"),
        (("engine",), 2, "name one source"),
        (("engine", "--zmq", "a", "--metrics", "b"), 2, "name one source"),
        (("engine", "--zmq", "nonsense"), 2, "no endpoint to connect to"),
        (("engine", "--metrics", "http://127.0.0.1:9/metrics"), 3, "no metrics from http://127.0.0.1:9/metrics"),
        (("engine", "--events", "/no/such/file"), 3, "cannot read /no/such/file"),
        (("follow", "/"), 3, "cannot be followed"),
        (("trace", "/no/such/trace"), 3, "/no/such/trace"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], code: int, message: str, tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = here(*arguments)
    assert run.returncode == code, run.stderr
    assert message in run.stderr
    assert len([line for line in run.stderr.splitlines() if "note:" not in line]) == 1, run.stderr


# ---------------------------------------------------------------- engines


def stored(ts_s: float, blocks: list[int]) -> list[Any]:
    """A batch that says that these blocks were computed, each a prompt of its own."""
    return [ts_s, [["BlockStored", [block], None, [1] * 16, 16, None, "GPU"] for block in blocks]]


def test_recorded_events_of_an_engine(tmp_path: Path, here: Here) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(stored(1e9 + n / 4, [n * 10 + k for k in range(5)])) + "\n" for n in range(400)))
    run = here("engine", "--events", path)
    assert run.returncode == 0, run.stderr
    assert "in 2,000 look-ups of prefix cache, events in" in run.stdout
    assert "Events tell of hits only where" in run.stderr
    assert "which keys exist is not known\n" in run.stdout  # and no option that would tell


def test_events_of_an_engine_over_its_socket(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq", reason="needs pyzmq (extra pierce)")
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    try:
        with detector("engine", "--zmq", f"tcp://127.0.0.1:{port}", *QUICK, "--metrics-port", "0") as process:
            metrics = said(process, r"metrics at (http://\S+)")[1]
            seen, number = "", 0
            until_s = time.monotonic() + 15
            while "cache_pierce_lookups_total" not in seen and time.monotonic() < until_s:
                batch = msgspec.msgpack.encode(stored(time.time(), [number]))
                publisher.send_multipart([b"", number.to_bytes(8, "big"), batch])
                number += 1
                time.sleep(0.1)
                with urllib.request.urlopen(metrics, timeout=5) as answer:
                    seen = answer.read().decode()
            code, out, err = ended(process)
    finally:
        context.destroy(linger=0)
    assert "cache_pierce_lookups_total" in seen
    assert code == 0, err
    assert "prefix cache, events from tcp://" in out


def test_scraped_counters_of_an_engine(here: Here) -> None:
    """20 s of an engine's counters in 2 s: its prompts cease to hit."""
    scrapes = [0]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            scrapes[0] += 1
            queries, hits = 8000 * scrapes[0], 7600 * scrapes[0]
            text = (
                "# TYPE vllm:prefix_cache_queries counter\n"
                f'vllm:prefix_cache_queries_total{{model_name="m"}} {queries}\n'
                "# TYPE vllm:prefix_cache_hits counter\n"
                f'vllm:prefix_cache_hits_total{{model_name="m"}} {hits}\n'
            ).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        run = here("engine", "--metrics", url, "--every", "0.1", "--seconds", "1", "--baselines", "none")
    finally:
        server.shutdown()
        server.server_close()
    assert run.returncode == 0, run.stderr
    assert scrapes[0] >= 5
    assert re.search(r"nothing fired in [1-9],\d00 look-ups of prefix cache, counters at http://127", run.stdout)
    assert "Counters have no keys" in run.stderr


# ---------------------------------------------------------------- traces


def test_the_l2_of_a_recorded_trace(here: Here) -> None:
    text = here("trace", ROOT / "sample_traces" / "h200_eager_decode", "--fail-on", "critical")
    assert "about the L2 in h200_eager_decode" in text.stdout
    assert text.returncode == int("CRITICAL" in text.stdout)


def test_nothing_heavy_is_imported_for_help() -> None:
    script = (
        "import sys\nfrom spikeprof.cli.app import run_command_line\nrun_command_line(['pierce', 'proxy', '--help'])\n"
        "print(sorted({'numpy', 'pyarrow', 'httpx', 'redis', 'zmq', 'rich', 'prometheus_client'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.splitlines()[-1] == "[]"


@needs_redis
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_is_bounded_and_pandas_left_out(redis_port: int) -> None:
    """The limit of 200 MB after 10 million random keys, here after what 6 s bring."""
    upstream = f"127.0.0.1:{redis_port}"
    with detector("proxy", "--listen", "127.0.0.1:0", "--upstream", upstream, "--baselines", "none") as process:
        port = said(process, r"clients connect to 127\.0\.0\.1:(\d+)")[1]
        load = ("-n", "900000", "-t", "get", "-r", "1000000000", "-P", "16", "-q")
        subprocess.run(["redis-benchmark", "-p", port, *load], stdout=subprocess.DEVNULL, check=True, timeout=60)
        time.sleep(0.6)
        status = Path(f"/proc/{process.pid}/status").read_text()
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        code, _, err = ended(process)
    assert code == 0, err
    assert "pandas" not in maps
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak
    assert int(peak[1]) < 190_000
