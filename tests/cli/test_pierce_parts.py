"""Parts behind the verbs: known keys, stretches of time, shared-out misses, baselines from Prometheus."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.cli.pierce_known import KnownSource
from spikeprof.cli.pierce_live import shared_out
from spikeprof.cli.pierce_options import Knowledge, address, detector_options
from spikeprof.cli.pierce_replay import stretches
from spikeprof.profiler.collectors.pierce.monitor import Span
from spikeprof.profiler.errors import InputError, UsageError
from spikeprof.profiler.lookups import lookups
from spikeprof.profiler.pierce_prometheus import read_baselines

# ---------------------------------------------------------------- known keys


def test_keys_of_a_file_and_its_next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("spikeprof.cli.pierce_known.time.monotonic", lambda: clock[0])
    path = tmp_path / "keys"
    path.write_bytes(b"user:1\r\n\nuser:2\n\xff\xfe")
    known = KnownSource(Knowledge(known=path, known_refresh_s=10))
    known.build()
    first = known.current
    assert first is not None
    assert [key in first for key in ("user:1", "user:2", "\\xff\\xfe", "", "user:3")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert not known.is_due()
    clock[0] += 10
    assert known.is_due()
    path.write_text("user:3\n")
    known.build()
    assert known.current is not first
    assert known.current is not None
    assert ("user:3" in known.current, "user:1" in known.current) == (True, False)
    path.unlink()
    with pytest.raises(InputError, match="cannot read known keys"):
        known.build()
    assert "user:3" in known.current  # the filter before stays in use


def test_keys_that_hit_are_learned_and_used_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("spikeprof.cli.pierce_known.time.monotonic", lambda: clock[0])
    known = KnownSource(Knowledge(known_learn_s=5))
    known.build()
    known.saw(lookups([1.0, 2.0], ["a", "b"], [True, False]))
    assert known.current is None
    clock[0] += 5
    known.saw(lookups([3.0], ["c"], [True]))
    assert known.current is not None
    assert [key in known.current for key in "abc"] == [True, False, True]
    known.saw(lookups([4.0], ["d"], [True]))
    assert "d" in known.current


def test_what_is_written_while_a_filter_is_built_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("spikeprof.cli.pierce_known.time.monotonic", lambda: clock[0])

    def scan() -> Iterator[str]:
        yield "a"
        known.wrote(["b"])
        if clock[0] == 100.0:
            known.wrote(None)

    known = KnownSource(Knowledge(known_refresh_s=10), scan=scan)
    known.build()
    assert known.current is not None
    assert [key in known.current for key in "abc"] == [True, True, False]
    assert not known.current.is_complete
    assert "whose keys cannot be told" in known.problem
    for now_s, complete in ((104.0, False), (105.0, True)):  # a script may go on for 5 s
        clock[0] = now_s
        known.build()
        assert known.current.is_complete == complete
    known.wrote(["c"])
    assert "c" in known.current


def test_a_scan_and_its_size() -> None:
    known = KnownSource(Knowledge(known_capacity=2), scan=lambda: iter(["a", "b", "c"]))
    known.build()
    assert "the filter of known keys is full" in known.problem
    assert KnownSource(Knowledge()).problem == ""
    assert not KnownSource(Knowledge()).is_asked


@pytest.mark.parametrize(
    "knowledge", [Knowledge(known_learn_s=-1), Knowledge(known_false_positives=1.0), Knowledge(known_refresh_s=3)]
)
def test_what_contradicts(knowledge: Knowledge) -> None:
    with pytest.raises(UsageError):
        KnownSource(knowledge)


# ---------------------------------------------------------------- the command line


def test_thresholds_keep_their_kind() -> None:
    options = detector_options(["min_qps=50", "min_misses_count=1_000"])
    assert (options.min_qps, options.min_misses_count) == (50.0, 1000)
    assert isinstance(options.min_qps, float)


@pytest.mark.parametrize(
    ("text", "found"), [("h:1", ("h", 1)), ("[::1]:6379", ("::1", 6379)), ("127.0.0.1:0", ("127.0.0.1", 0))]
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert address(text, "--listen") == found


@pytest.mark.parametrize("text", ["", "h", "h:", ":1", "h:65536", "h:-1", "h:٣"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="write HOST:PORT"):
        address(text, "--listen")


# ---------------------------------------------------------------- time


@given(st.lists(st.floats(-9e11, 9e11), min_size=1, max_size=200), st.sampled_from([0.25, 1.0, 64.0]))
def test_stretches_are_the_whole_in_order(times: list[float], step_s: float) -> None:
    batch = lookups(times, [str(i) for i in range(len(times))], [True] * len(times))
    parts = list(stretches(batch, step_s))
    assert np.concatenate([part.ts_s for part in parts]).tolist() == times
    assert [key for part in parts for key in part.keys.to_pylist()] == [str(i) for i in range(len(times))]
    assert all(len(part) for part in parts)
    # within one stretch the newest time so far does not pass a multiple of the step
    newest = np.maximum.accumulate(np.array(times))
    ends = np.cumsum([len(part) for part in parts])
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        assert np.floor(newest[begin] / step_s) == np.floor(newest[end - 1] / step_s)


def test_stretches_by_hand() -> None:
    batch = lookups([0.0, 0.9, 1.1, 0.5, 1.9, 7.0], list("abcdef"), [True] * 6, tenants=list("xyxyxy"))
    assert [part.keys.to_pylist() for part in stretches(batch, 1.0)] == [["a", "b"], ["c", "d", "e"], ["f"]]
    assert [part.tenants.to_pylist() for part in stretches(batch, 1.0)][1] == ["x", "y", "x"]


def test_misses_are_shared_out_evenly() -> None:
    """One miss in four look-ups: the fourth of each four."""
    none = lookups([], [], [])
    count = 8
    keys = pa.array([f"k{i}" for i in range(count)])
    span = Span(none, keys, np.arange(count, dtype=float), pa.array(["0"] * count), none, hits_count=6, misses_count=2)
    found = shared_out(span)
    assert found.hits.tolist() == [True, True, True, False] * 2
    assert found.keys.to_pylist() == keys.to_pylist()


# ---------------------------------------------------------------- Prometheus


@contextmanager
def prometheus(answer: Any, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every query with the same; the queries that it got."""
    queries: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)["query"][0]
            queries.append(query)
            body = answer(query) if callable(answer) else answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", queries
    finally:
        server.shutdown()
        server.server_close()


def vector(query: str) -> bytes:
    values = {"qps": "310", "miss": "0.03"}
    value = next(v for name, v in values.items() if name in query)
    sample = {"metric": {"tenant": "shop", "pattern": "user:{n}"}, "value": [1.0, value]}
    young = {"metric": {"tenant": "", "pattern": "new:{n}"}, "value": [1.0, "NaN"]}
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": [sample, young]}}).encode()


def test_baselines_from_prometheus() -> None:
    with prometheus(vector) as (url, queries):
        rows = read_baselines(url + "/", 'job="pierce"', 1e9)
    assert rows == [
        {
            "tenant": "shop",
            "pattern": "user:{n}",
            "learned_s": 300.0,
            "updated_s": 1e9,
            "qps": 310.0,
            "miss_rate": 0.03,
            "reference_qps": 310.0,
            "reference_miss_rate": 0.03,
        }
    ]
    assert queries[0] == 'last_over_time(cache_pierce_baseline_qps{job="pierce"}[1d])'


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"status":"error","error":"bad selector"}', "refuses the query: bad selector"),
        (b"<html>", "does not answer as Prometheus does"),
        (b'{"status":"success","data":{"result":[{"metric":{},"value":["x"]}]}}', "does not answer as Prometheus does"),
    ],
)
def test_answers_of_something_else(answer: bytes, message: str) -> None:
    with prometheus(answer) as (url, _), pytest.raises(InputError, match=message):
        read_baselines(url, "", 1e9)


def test_no_prometheus_there() -> None:
    with pytest.raises(InputError, match=r"cannot ask Prometheus at 127\.0\.0\.1:9"):
        read_baselines("http://user:T0PSECRET@127.0.0.1:9", "", 1e9)
    with pytest.raises(UsageError, match="write a URL"):
        read_baselines("127.0.0.1:9090", "", 1e9)
