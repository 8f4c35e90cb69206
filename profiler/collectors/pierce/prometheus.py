"""Prefix-cache counters that vLLM and SGLang expose for Prometheus: how much was looked up and found between scrapes.

Both engines count tokens. vLLM: ``vllm:prefix_cache_queries_total`` and ``vllm:prefix_cache_hits_total``
(https://docs.vllm.ai/en/latest/design/metrics/). SGLang, started with ``--enable-metrics``:
``sglang:prompt_tokens_total`` and, of those, ``sglang:cached_tokens_total``
(https://docs.sglang.io/docs/references/production_metrics). Counters have no keys: which prefixes missed is not known.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from spikeprof.profiler.errors import InputError, UsageError
from spikeprof.profiler.lookups import Lookups, lookups

#: (queries, hits) without the suffix ``_total``, and whose they are; the first pair that is there counts.
_PAIRS = (
    ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm"),
    ("vllm:gpu_prefix_cache_queries", "vllm:gpu_prefix_cache_hits", "vllm"),
    ("sglang:prompt_tokens", "sglang:cached_tokens", "sglang"),
)
_PAGE_BYTES_MAX = 16 << 20

_Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Rates:
    """What an engine looked up between two scrapes, for one model.

    ``queries_count`` and ``hits_count`` in tokens; ``reset``: the counters had begun anew, so that what they counted
    before that is missing here.
    """

    ts_s: float
    span_s: float
    engine: str
    model: str
    queries_count: float
    hits_count: float
    reset: bool


class PrefixCounters:
    """Scrapes in the order of their time; out come the differences."""

    def __init__(self) -> None:
        self._before: dict[_Series, float] = {}
        self._before_s: float | None = None

    def update(self, text: str, ts_s: float) -> list[Rates]:
        """What happened since the scrape before, a row per model; none after the first one.

        A model that is new counts from the next scrape on. A counter that fell has begun anew, and counts from 0.
        Raises InputError where the page holds no counters of a prefix cache, or is none.
        """
        values = _values(text)
        queries, hits, engine = _pair(values)
        before, before_s = self._before, self._before_s
        self._before, self._before_s = values, ts_s
        if before_s is None or ts_s <= before_s:
            return []
        known = {_model(labels) for name, labels in before if name == queries}
        sums: dict[str, list[float]] = {}
        resets: set[str] = set()
        for series, value in values.items():
            name, labels = series
            model = _model(labels)
            if name not in {queries, hits} or model not in known:
                continue
            fell = value < before.get(series, 0.0)
            if fell:
                resets.add(model)
            row = sums.setdefault(model, [0.0, 0.0])
            row[int(name == hits)] += value if fell else value - before.get(series, 0.0)
        return [
            Rates(ts_s, ts_s - before_s, engine, model, asked, found, model in resets)
            for model, (asked, found) in sorted(sums.items())
        ]


def rates_as_lookups(rates: Rates, tokens_per_lookup: int = 16) -> Lookups:
    """Look-ups as the detector reads them: one per block of so many tokens, spread evenly over the span.

    The key is ``vllm/prefix-cache``, the same for all: counters know no keys. Hits beyond the queries (scraped while a
    request was being counted) are left out.
    """
    count = round(rates.queries_count / tokens_per_lookup)
    hits_count = min(count, round(rates.hits_count / tokens_per_lookup))
    at = np.arange(count)
    # Hits at even distances: the n-th look-up is one where the share reached so far grows by a whole.
    hits = (at + 1) * hits_count // max(count, 1) > at * hits_count // max(count, 1)
    ts_s = np.asarray(rates.ts_s - rates.span_s + (at + 0.5) * (rates.span_s / max(count, 1)), np.float64)
    keys = pa.array([f"{rates.engine}/prefix-cache"] * count, pa.string())
    return lookups(ts_s, keys, hits, tenants=[rates.model] * count)


def scrape(url: str, timeout_s: float = 5.0) -> str:
    """The text of a metrics page. Raises UsageError for what is no http URL, InputError where there is no answer."""
    if urlsplit(url).scheme not in {"http", "https"}:
        raise UsageError(f"{url!r} is no URL of a metrics page; give one like http://127.0.0.1:8000/metrics")
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as page:
            data: bytes = page.read(_PAGE_BYTES_MAX + 1)
    except (OSError, urllib.error.URLError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise InputError(
            f"no metrics from {_without_secrets(url)} within {timeout_s:g} s ({reason}); counters from before it still "
            "count, the next scrape goes on from them; see whether the engine runs and exposes metrics"
        ) from error
    if len(data) > _PAGE_BYTES_MAX:
        raise InputError(f"the page at {_without_secrets(url)} is larger than {_PAGE_BYTES_MAX} bytes; is it metrics?")
    return data.decode("utf-8", "replace")


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"


def _parser() -> Any:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise UsageError(
            "scraped counters need prometheus_client, which is not installed; other sources do not. "
            "Install it: pip install 'spikeprof[pierce]'"
        ) from error
    return text_string_to_metric_families


def _values(text: str) -> dict[_Series, float]:
    """Counters of engines by name (without ``_total``) and labels."""
    wanted = {name for queries, hits, _ in _PAIRS for name in (queries, hits)} | {"sglang:cache_hit_rate"}
    # Pages hold many histograms: only what is wanted is parsed.
    lines = [
        line for line in text.splitlines() if line.partition("{")[0].split(" ")[0].removesuffix("_total") in wanted
    ]
    values: dict[_Series, float] = {}
    try:
        for family in _parser()("\n".join(lines) + "\n"):
            for sample in family.samples:
                values[sample.name.removesuffix("_total"), tuple(sorted(sample.labels.items()))] = sample.value
    except ValueError as error:
        raise InputError(
            f"a line of the page is no metric ({error}); the scrape is left out, the next one goes on from the one "
            "before; see whether the URL is that of the engine's metrics"
        ) from error
    return values


def _model(labels: tuple[tuple[str, str], ...]) -> str:
    return dict(labels).get("model_name", "")


def _pair(values: dict[_Series, float]) -> tuple[str, str, str]:
    names = {name for name, _ in values}
    for queries, hits, engine in _PAIRS:
        if queries in names and (hits in names or engine == "sglang"):  # SGLang shows no hits before the first one
            return queries, hits, engine
    if "sglang:cache_hit_rate" in names:
        raise InputError(
            "this SGLang shows only sglang:cache_hit_rate, a gauge without a number of look-ups; a newer one counts "
            "sglang:prompt_tokens_total and sglang:cached_tokens_total; its KV-cache events work with this one, too"
        )
    raise InputError(
        "the page has no counters of a prefix cache (vllm:prefix_cache_queries_total, sglang:prompt_tokens_total); "
        "switch on prefix caching and metrics in the engine (SGLang: --enable-metrics), or read its KV-cache events"
    )
