"""Prometheus metrics at ``/metrics``: patterns as they stand, and counts of look-ups, alerts, notices and protection.

Names begin with ``cache_pierce_``. Only the busiest patterns get labels of their own, so that made-up keys cannot fill
the memory of whoever scrapes.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spikeprof.analyzers.cache_pierce.model import Alert, GuardCounts, Snapshot
from spikeprof.profiler.errors import UsageError
from spikeprof.reports.kernel_names import clip, printable
from spikeprof.reports.pierce.dispatcher import RouteCounts
from spikeprof.reports.pierce.live import shown_rows

if TYPE_CHECKING:
    from prometheus_client.core import Metric

MAX_PATTERNS = 50
_LABEL_CHARS = 120
_STATES = ("learning", "quiet", "suspect", "alerting")

_PATTERN_METRICS: tuple[tuple[str, str, Callable[[Any], float | None]], ...] = (
    ("qps", "Look-ups per second over the window", lambda row: row.qps),
    ("miss_ratio", "Share of look-ups that miss, 0 to 1", lambda row: row.miss_rate),
    ("baseline_qps", "Usual look-ups per second", lambda row: row.baseline.qps),
    ("baseline_miss_ratio", "Usual share of look-ups that miss, 0 to 1", lambda row: row.baseline.miss_rate),
    ("distinct_keys", "Different keys of the last 10 to 20 s, estimated", lambda row: row.distinct_count),
    ("ttl_stddev_seconds", "Spread of the time that entries have to live", lambda row: row.ttl_std_s),
    ("state", "0 learning, 1 quiet, 2 suspect, 3 alerting", lambda row: float(_STATES.index(row.state))),
)


class PierceMetrics:
    """What is served; ``update`` and ``count`` may be called from another thread than the one that serves.

    It is a collector of prometheus_client: numbers that were not measured are left out, not 0.
    """

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._routes: Mapping[str, RouteCounts] = {}
        self._guard: GuardCounts | None = None
        self._source: Mapping[str, int] = {}
        self._alerts: Counter[tuple[str, str, str]] = Counter()
        self._server: Any = None

    def count(self, alert: Alert) -> None:
        """One more notice of the detector."""
        self._alerts[alert.kind, alert.severity, alert.rule] += 1

    def update(
        self,
        snapshot: Snapshot,
        routes: Mapping[str, RouteCounts],
        guard: GuardCounts | None = None,
        source: Mapping[str, int] | None = None,
    ) -> None:
        """How things stand; ``source`` are counts of what was read, by what it is (``lines``, ``broken``)."""
        self._snapshot, self._routes, self._guard, self._source = snapshot, routes, guard, source or {}

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Answer scrapes on ``host:port`` from a thread; the port (of 0: the one that was free). Raises UsageError."""
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise UsageError(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            threading.Thread(target=self._server.shutdown, daemon=True).start()
            self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """Every metric, for prometheus_client."""
        if self._snapshot is not None:
            yield from _of_snapshot(self._snapshot)
        yield _counter("notices", "Notices of the detector", ("kind", "severity", "rule"), self._alerts.items())
        yield from _of_routes(self._routes)
        read = {(what,): number for what, number in self._source.items()}
        yield _counter("source", "What was read, by what it is", ("what",), read.items())
        if self._guard is not None:
            guard = self._guard
            verdicts = {("pass",): guard.passed_count, ("nil",): guard.nil_count, ("limit",): guard.limited_count}
            yield _counter("guard", "Look-ups by what protection did", ("verdict",), verdicts.items())


def _of_snapshot(snapshot: Snapshot) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    rows = shown_rows(snapshot, MAX_PATTERNS)
    for name, text, value_of in _PATTERN_METRICS:
        family = GaugeMetricFamily(f"cache_pierce_{name}", text, labels=("tenant", "pattern"))
        for row in rows:
            value = value_of(row)
            if value is not None:
                family.add_metric((_label(row.tenant), _label(row.pattern)), value)
        yield family
    illegal = GaugeMetricFamily("cache_pierce_illegal_keys_per_second", "Look-ups of keys that exist nowhere")
    if snapshot.illegal_per_s.value is not None:
        illegal.add_metric((), snapshot.illegal_per_s.value)
    yield illegal
    active = GaugeMetricFamily("cache_pierce_alerts_active", "Open alerts", labels=("severity",))
    for severity in ("warn", "alert", "critical"):
        active.add_metric((severity,), sum(alert.severity == severity for alert in snapshot.active))
    yield active
    counts = snapshot.counts
    yield _counter("lookups", "Look-ups that were taken in", (), [((), counts.lookups_count)])
    yield _counter("misses", "Look-ups that missed", (), [((), counts.misses_count)])
    left_out = {("late",): counts.late_count, ("early",): counts.early_count, ("bad_time",): counts.bad_time_count}
    yield _counter("left_out", "Look-ups that could not be used", ("reason",), left_out.items())


def _of_routes(routes: Mapping[str, RouteCounts]) -> Iterator[Metric]:
    outcomes = ("sent", "failures", "unclear", "lost")
    values = {
        (_label(name), outcome): getattr(counts, f"{outcome}_count")
        for name, counts in routes.items()
        for outcome in outcomes
    }
    yield _counter(
        "deliveries", "Notices by route and outcome; failures are attempts", ("route", "outcome"), values.items()
    )


def _counter(name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(f"cache_pierce_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def _label(text: str) -> str:
    """A label; a long one is shortened, and still like no other: series that are twice there break the scrape."""
    shown = printable(text)
    if len(shown) <= _LABEL_CHARS:
        return shown
    return f"{clip(shown, _LABEL_CHARS)}#{hashlib.sha256(shown.encode()).hexdigest()[:8]}"
