"""A notice as a record of the OpenTelemetry log data model, for files, log collectors and generic webhooks.

Field names are those of https://opentelemetry.io/docs/specs/otel/logs/data-model/ in the spelling of the Python SDK.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.reports.pierce import texts
from spikeprof.reports.pierce.routes import notice_id

#: Severity numbers of the data model: INFO 9, WARN 13, ERROR 17, FATAL 21.
_SEVERITY_NUMBERS = {"warn": 13, "alert": 17, "critical": 21}
_RECOVERED = ("INFO", 9)


def record(alert: Alert) -> dict[str, Any]:
    """The record: time of the event in UTC, severity, the text for people, everything else under ``attributes``."""
    severity = _RECOVERED if alert.kind == "recovered" else (alert.severity.upper(), _SEVERITY_NUMBERS[alert.severity])
    attributes: dict[str, Any] = {
        "cache_pierce.notice_id": notice_id(alert),
        "cache_pierce.alert_id": alert.alert_id,
        "cache_pierce.kind": alert.kind,
        "cache_pierce.severity": alert.severity,
        "cache_pierce.rule": alert.rule,
        "cache_pierce.tenant": alert.tenant,
        "cache_pierce.pattern": alert.pattern,
        "cache_pierce.since": timestamp(alert.since_s) if alert.since_s else None,
        "cache_pierce.keys": list(alert.keys),
        "cache_pierce.top": [
            {"tenant": share.tenant, "pattern": share.pattern, "per_s": share.per_s} for share in alert.top
        ],
    }
    for item in alert.evidence:
        name = f"cache_pierce.evidence.{item.metric}"
        attributes[name] = item.value
        attributes |= {f"{name}.limit": item.limit} if item.limit is not None else {}
        attributes |= {f"{name}.baseline": item.baseline} if item.baseline is not None else {}
    return {
        "timestamp": timestamp(alert.ts_s),
        "severity_text": severity[0],
        "severity_number": severity[1],
        "body": texts.summary(alert),
        "attributes": attributes,
        "resource": {"service.name": "cache_pierce_detector"},
    }


def timestamp(ts_s: float) -> str:
    """Unix seconds as ISO 8601 in UTC with microseconds; a time that no calendar has is written as the number."""
    try:
        return datetime.fromtimestamp(ts_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return repr(ts_s)
