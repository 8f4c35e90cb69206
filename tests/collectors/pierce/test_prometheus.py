from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from spikeprof.profiler.collectors.pierce.prometheus import PrefixCounters, Rates, rates_as_lookups, scrape
from spikeprof.profiler.errors import InputError, UsageError

pytest.importorskip("prometheus_client")

VLLM = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {0}
vllm:prefix_cache_queries_total{{engine="1",model_name="m"}} {1}
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{{engine="0",model_name="m"}} 1.7e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {2}
vllm:prefix_cache_hits_total{{engine="1",model_name="m"}} {3}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="0.1",model_name="m"}} 4.0
# a line of something else that is broken: {{{{
"""
SGLANG = """\
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{model_name="m"}} {0}
# TYPE sglang:cached_tokens_total counter
{1}
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{{model_name="m"}} 0.5
"""


def test_differences_of_vllm_are_summed_over_engines() -> None:
    counters = PrefixCounters()
    assert counters.update(VLLM.format(1000, 10, 800, 0), 100.0) == []
    assert counters.update(VLLM.format(1100, 30, 850, 5), 102.0) == [
        Rates(102.0, 2.0, "vllm", "m", queries_count=120, hits_count=55, reset=False)
    ]
    assert counters.update(VLLM.format("1.1e3", 30, 850, 5), 103.0) == [Rates(103.0, 1.0, "vllm", "m", 0, 0, False)]


def test_a_restarted_engine_counts_from_zero() -> None:
    counters = PrefixCounters()
    counters.update(VLLM.format(1000, 10, 800, 0), 100.0)
    assert counters.update(VLLM.format(40, 12, 10, 1), 110.0) == [Rates(110.0, 10.0, "vllm", "m", 42, 11, True)]
    assert counters.update(VLLM.format(50, 12, 11, 1), 110.0) == []  # time stood still


def test_sglang_shows_hits_only_once_there_are_some() -> None:
    counters = PrefixCounters()
    assert counters.update(SGLANG.format(500, ""), 1.0) == []
    device = 'sglang:cached_tokens_total{model_name="m",cache_source="device"} 30'
    host = 'sglang:cached_tokens_total{model_name="m",cache_source="host"} 7'
    assert counters.update(SGLANG.format(600, f"{device}\n{host}"), 2.0) == [
        Rates(2.0, 1.0, "sglang", "m", 100, 37, False)
    ]


def test_a_model_that_is_new_begins_with_its_next_scrape() -> None:
    counters = PrefixCounters()
    counters.update(SGLANG.format(500, ""), 1.0)
    more = 'sglang:prompt_tokens_total{model_name="new"} 9000\n'
    assert [row.model for row in counters.update(SGLANG.format(600, "") + more, 2.0)] == ["m"]
    assert [row.model for row in counters.update(SGLANG.format(600, "") + more, 3.0)] == ["m", "new"]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("", "no counters of a prefix cache"),
        ("up 1\n", "no counters of a prefix cache"),
        ("<html>", "no counters of a prefix cache"),
        ('sglang:cache_hit_rate{model_name="m"} 0.5\n', "shows only sglang:cache_hit_rate"),
        ("vllm:prefix_cache_queries_total{ 7\n", "a line of the page is no metric"),
    ],
)
def test_pages_without_the_counters_say_what_would_help(page: str, said: str) -> None:
    counters = PrefixCounters()
    counters.update(VLLM.format(100, 0, 0, 0), 1.0)
    with pytest.raises(InputError, match=said):
        counters.update(page, 2.0)
    assert counters.update(VLLM.format(160, 0, 0, 0), 3.0)[0].queries_count == 60  # goes on from the one before


def test_rates_as_look_ups() -> None:
    batch = rates_as_lookups(Rates(100.0, 2.0, "vllm", "m", 16 * 8, 16 * 2, False))
    assert batch.hits.tolist() == [False, False, False, True, False, False, False, True]
    assert batch.ts_s.tolist() == [98.125, 98.375, 98.625, 98.875, 99.125, 99.375, 99.625, 99.875]
    assert (set(batch.keys.to_pylist()), set(batch.tenants.to_pylist())) == ({"vllm/prefix-cache"}, {"m"})
    assert len(rates_as_lookups(Rates(100.0, 2.0, "vllm", "m", 0, 0, False))) == 0
    assert rates_as_lookups(Rates(100.0, 2.0, "vllm", "m", 32, 64, False)).hits.all()


@pytest.fixture
def server() -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.startswith("/metrics")
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(VLLM.format(1, 2, 3, 4).encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Page) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_scraping(server: str) -> None:
    assert scrape(f"{server}/metrics") == VLLM.format(1, 2, 3, 4)
    with pytest.raises(InputError, match=r"no metrics from http://127.0.0.1:\d+/other within 5 s \(Not Found\)"):
        scrape(f"{server}/other?token=hush-hush")
    with pytest.raises(InputError, match="Connection refused"):
        scrape("http://127.0.0.1:1/metrics")
    with pytest.raises(UsageError, match="'file:///etc/passwd' is no URL of a metrics page"):
        scrape("file:///etc/passwd")
