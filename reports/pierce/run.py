"""One run of the detector, as the page and the JSON answer tell about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spikeprof.analyzers.cache_pierce.model import GuardCounts, Snapshot
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.reports.pierce.dispatcher import RouteCounts
from spikeprof.reports.pierce.history import History


@dataclass(frozen=True, slots=True)
class PierceRun:
    """What was watched and what came of it.

    ``read`` counts what came from the source by what it is (``lines``, ``broken``); ``problems`` are the things that
    limit the answer, ``notes`` what else is worth knowing; ``guard`` is None where nothing could be held back;
    ``known_by`` is what would tell which keys exist.
    """

    source: str
    history: History
    snapshot: Snapshot
    options: Options
    read: Mapping[str, int] = field(default_factory=dict)
    routes: Mapping[str, RouteCounts] = field(default_factory=dict)
    guard: GuardCounts | None = None
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()
    redacted: bool = False
    known_by: str = ""
