"""A run as plain data: what ``--json`` prints."""

from __future__ import annotations

import dataclasses
from typing import Any

from spikeprof.reports.pierce.records import record
from spikeprof.reports.pierce.run import PierceRun

VERSION = 1


def answer(run: PierceRun) -> dict[str, Any]:
    """Notices as log records, patterns and counts as the detector has them; what was not measured, with the reason."""
    snapshot = run.snapshot
    return {
        "version": VERSION,
        "source": run.source,
        "notices": [record(alert) for alert in run.history.notices],
        "notices_left_out_count": run.history.notices_left_out_count,
        "read": dict(run.read),
        "counts": dataclasses.asdict(snapshot.counts),
        "patterns": [dataclasses.asdict(row) for row in snapshot.rows],
        "hot_keys": [dataclasses.asdict(hot) for hot in snapshot.hot_keys],
        "illegal_per_s": dataclasses.asdict(snapshot.illegal_per_s),
        "known_keys_count": dataclasses.asdict(snapshot.known_keys_count),
        "known_false_positive_share": dataclasses.asdict(snapshot.known_false_positive_share),
        "routes": {name: dataclasses.asdict(counts) for name, counts in run.routes.items()},
        "guard": dataclasses.asdict(run.guard) if run.guard else None,
        "options": dataclasses.asdict(run.options),
        "problems": list(run.problems),
    }
