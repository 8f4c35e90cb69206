"""Baselines read from Prometheus: what an earlier detector exported at ``/metrics``, to be spared the cold start."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from spikeprof.profiler.errors import InputError, UsageError

TIMEOUT_S = 10.0
_MAX_BYTES = 64 << 20
_LOOK_BACK = "1d"  # how old the last sample may be, and what the slow reference is the median of
_LEARNED_S = 300.0  # what is exported is the baseline of that much time

#: Columns of a row, and the query that gives each per tenant and pattern.
_QUERIES = {
    "qps": "last_over_time(cache_pierce_baseline_qps{selector}[{back}])",
    "miss_rate": "last_over_time(cache_pierce_baseline_miss_ratio{selector}[{back}])",
    "reference_qps": "quantile_over_time(0.5, cache_pierce_baseline_qps{selector}[{back}])",
    "reference_miss_rate": "quantile_over_time(0.5, cache_pierce_baseline_miss_ratio{selector}[{back}])",
}


class _Sample(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct):
    result: list[_Sample] = []


class _Answer(msgspec.Struct):
    status: str
    data: _Data = msgspec.field(default_factory=_Data)
    error: str = ""


def read_baselines(url: str, selector: str, now_s: float) -> list[dict[str, Any]]:
    """Rows of tenant, pattern, qps, miss_rate, reference_qps, reference_miss_rate, learned_s, updated_s.

    ``selector`` are label matchers without braces, as ``job="pierce"``. Raises UsageError for what is no URL,
    InputError where Prometheus cannot be asked or answers with something else.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--baselines-prometheus {url}: write a URL such as http://127.0.0.1:9090")
    columns = {name: _ask(url, query, selector) for name, query in _QUERIES.items()}
    return [
        {"tenant": tenant, "pattern": pattern, "learned_s": _LEARNED_S, "updated_s": now_s}
        | {name: values[tenant, pattern] for name, values in columns.items()}
        for tenant, pattern in columns["qps"]
        if all((tenant, pattern) in values for values in columns.values())
    ]


def _ask(url: str, query: str, selector: str) -> dict[tuple[str, str], float]:
    import httpx

    text = query.replace("{selector}", f"{{{selector}}}").replace("{back}", _LOOK_BACK)
    where = url.split("://", 1)[1].rsplit("@", 1)[-1]
    try:
        with httpx.stream(
            "GET", f"{url.rstrip('/')}/api/v1/query", params={"query": text}, timeout=TIMEOUT_S
        ) as answer:
            body = b""
            for piece in answer.iter_bytes():
                body += piece
                if len(body) > _MAX_BYTES:
                    raise InputError(f"Prometheus at {where} answers with more than {_MAX_BYTES >> 20} MiB: narrow it "
                                     "with --baselines-selector")  # fmt: skip
        found = msgspec.json.decode(body, type=_Answer)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"cannot ask Prometheus at {where}: {type(error).__name__}; leave --baselines-prometheus out "
                         "to learn baselines anew") from None  # fmt: skip
    except msgspec.MsgspecError:
        raise InputError(f"{where} does not answer as Prometheus does (HTTP {answer.status_code})") from None
    if found.status != "success":
        raise InputError(f"Prometheus at {where} refuses the query: {found.error[:200]}")
    samples = ((s.metric.get("tenant", ""), s.metric.get("pattern", ""), float(s.value[1])) for s in found.data.result)
    return {(tenant, pattern): value for tenant, pattern, value in samples if math.isfinite(value)}
