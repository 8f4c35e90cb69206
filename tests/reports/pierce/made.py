"""Notices and snapshots written by hand, and receivers on this machine that keep what they are sent."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spikeprof.analyzers.cache_pierce.model import (
    EVERY,
    Alert,
    Baseline,
    Counts,
    Evidence,
    HotKey,
    Measure,
    PatternRow,
    Share,
    Snapshot,
)

#: 2026-11-30 17:00:00 UTC
START_S = 1796058000.0

EVIDENCE = (
    Evidence("miss_share", 0.972, limit=0.09, baseline=0.03, option="miss_rate_ratio"),
    Evidence("lookups_per_s", 1250.0, limit=775.0, baseline=310.0, option="qps_ratio"),
    Evidence("distinct_share", 0.92, basis="estimated"),
)


def alert(**changes: Any) -> Alert:
    """A raised alert of penetration on ``user:{n}``."""
    values: dict[str, Any] = {
        "kind": "raised",
        "severity": "alert",
        "rule": "penetration",
        "tenant": "",
        "pattern": "user:{n}",
        "ts_s": START_S + 65,
        "evidence": EVIDENCE,
        "keys": ("user:901", "user:777"),
        "since_s": START_S + 63,
        "alert_id": "a1",
    }
    return Alert(**{**values, **changes})


def illegal() -> Alert:
    """A critical alert over the whole cluster."""
    return alert(
        severity="critical",
        rule="illegal-keys",
        tenant=EVERY,
        pattern=EVERY,
        evidence=(Evidence("illegal_per_s", 412.0, limit=100.0, option="illegal_per_s", basis="estimated"),),
        top=(Share("shop", "user:{n}", 300.0), Share("", "{uuid}", 112.0)),
        alert_id="a2",
    )


def row(**changes: Any) -> PatternRow:
    values: dict[str, Any] = {
        "tenant": "",
        "pattern": "user:{n}",
        "qps": 1250.0,
        "miss_rate": 0.972,
        "misses_per_s": 1215.0,
        "distinct_count": 4210.0,
        "distinct_lookups_count": 4300,
        "ttl_mean_s": 300.0,
        "ttl_std_s": 20.0,
        "unfilled_share": 0.99,
        "first_seen_share": 0.98,
        "repeated_share": 0.01,
        "nowhere_share": None,
        "baseline": Baseline(310.0, 0.03, learned_s=300.0),
        "state": "alerting",
        "since_s": START_S + 65,
        "lookups_count": 20_000,
        "misses_count": 3_000,
    }
    return PatternRow(**{**values, **changes})


def snapshot(*rows: PatternRow, ts_s: float | None = START_S + 66, **changes: Any) -> Snapshot:
    values: dict[str, Any] = {
        "ts_s": ts_s,
        "rows": rows or (row(),),
        "hot_keys": (HotKey("", "user:{n}", "user:901", 120, 119, True),),
        "illegal_per_s": Measure(None, "no keys are known", "--known FILE"),
        "known_keys_count": Measure(None, "no keys are known", "--known FILE"),
        "known_false_positive_share": Measure(None, "no keys are known", "--known FILE"),
        "counts": Counts(lookups_count=20_000, misses_count=3_000, late_count=4),
        "active": (alert(),),
    }
    return Snapshot(**{**values, **changes})


@dataclass
class HttpSink:
    """Answers what it is told to, in order, the last answer for ever: (status, body, headers)."""

    answers: list[tuple[int, bytes, dict[str, str]]] = field(default_factory=lambda: [(200, b"ok", {})])
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    url: str = ""
    hold: threading.Event = field(default_factory=threading.Event)  # set = answer at once

    def __post_init__(self) -> None:
        self.hold.set()


@contextmanager
def http_sink(sink: HttpSink, tls: ssl.SSLContext | None = None) -> Iterator[HttpSink]:
    """Serve a sink on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            sink.paths.append(self.path)
            sink.raw.append(data)
            sink.headers.append(dict(self.headers))
            sink.bodies.append(json.loads(data))
            sink.hold.wait(20)
            status, body, headers = sink.answers.pop(0) if len(sink.answers) > 1 else sink.answers[0]
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    sink.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}/hook/T0PSECRETPATH"
    try:
        yield sink
    finally:
        sink.hold.set()
        server.shutdown()
        server.server_close()


def certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """(certificate, key) for ``name`` and 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
