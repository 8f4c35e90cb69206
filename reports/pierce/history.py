"""What the page draws: how patterns stood over time, thinned out as it grows; and incidents, made of notices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spikeprof.analyzers.cache_pierce.model import Alert, PatternRow, Snapshot
from spikeprof.analyzers.cache_pierce.patterns import ANY
from spikeprof.reports.pierce.live import shown_rows

MAX_POINTS = 1500  # per pattern
MAX_SERIES = 100
_ROWS_PER_SNAPSHOT = 20
_SEVERITIES = ("warn", "alert", "critical")
Place = tuple[str, str]  # tenant, pattern


@dataclass(slots=True)
class Point:
    """One pattern in one step of time: the highest of what was seen in it."""

    qps: float
    miss_rate: float | None
    usual_qps: float | None
    usual_miss_rate: float | None

    def merge(self, other: Point) -> None:
        """Take in a neighbour."""
        self.qps = max(self.qps, other.qps)
        self.miss_rate = _highest(self.miss_rate, other.miss_rate)
        self.usual_qps = _highest(self.usual_qps, other.usual_qps)
        self.usual_miss_rate = _highest(self.usual_miss_rate, other.usual_miss_rate)


@dataclass(frozen=True, slots=True)
class Incident:
    """All notices of one alert, in order: raised, perhaps escalated, perhaps recovered."""

    notices: tuple[Alert, ...]

    @property
    def worst(self) -> Alert:
        """The notice of the highest severity: its numbers are those to show."""
        return max((n for n in self.notices if n.kind != "recovered"), key=_severity, default=self.notices[-1])

    @property
    def start_s(self) -> float:
        """When it was raised, in event time."""
        return self.notices[0].ts_s

    @property
    def lasted_s(self) -> float | None:
        """From the first look-ups that it is about to its recovery; None while it is open."""
        return None if self.end_s is None else self.end_s - (self.notices[0].since_s or self.start_s)

    @property
    def end_s(self) -> float | None:
        """When it was over; None while it is open."""
        last = self.notices[-1]
        return last.ts_s if last.kind == "recovered" else None


class History:
    """Feed it every snapshot and every notice. Memory is bounded: at most 100 series of at most 1,500 points.

    ``step_s`` is the resolution: 1 s of event time at first, doubled whenever the run outgrows the points.
    """

    def __init__(self) -> None:
        self.step_s = 1.0
        self.notices: list[Alert] = []
        self.notices_left_out_count = 0
        self.series: dict[Place, dict[int, Point]] = {}
        self._first = self._last = 0

    def add(self, snapshot: Snapshot) -> None:
        """Take in how things stand now."""
        if snapshot.ts_s is None:
            return
        cell = int(snapshot.ts_s // self.step_s)
        if not self.series:
            self._first = self._last = cell
        self._first, self._last = min(self._first, cell), max(self._last, cell)
        while self._last - self._first >= MAX_POINTS:
            self._halve()
            cell = int(snapshot.ts_s // self.step_s)
        for row in shown_rows(snapshot, _ROWS_PER_SNAPSHOT):
            self._put(row, cell)

    def note(self, alert: Alert, most: int = 5000) -> None:
        """Take in one notice; of more than ``most`` the later ones are only counted."""
        if len(self.notices) < most:
            self.notices.append(alert)
        else:
            self.notices_left_out_count += 1

    @property
    def span_s(self) -> tuple[float, float] | None:
        """Event time from the first to the last snapshot."""
        return (self._first * self.step_s, (self._last + 1) * self.step_s) if self.series else None

    def incidents(self) -> list[Incident]:
        """Notices by alert, the worst alerts first, then in order of time."""
        found: dict[object, list[Alert]] = {}
        for notice in self.notices:
            found.setdefault(notice.alert_id or (notice.rule, notice.tenant, notice.pattern), []).append(notice)
        made = [Incident(tuple(notices)) for notices in found.values()]
        return sorted(made, key=lambda i: (-_severity(i.worst), i.start_s))

    def places(self, most: int) -> list[Place]:
        """The patterns to draw: those with an incident first, then those with the highest peak."""
        alerted = {(n.tenant, n.pattern) for n in self.notices}
        telling = [place for place in self.series if place in alerted or not self._was_wide_for_a_while(place)]
        return sorted(telling, key=lambda place: (place not in alerted, -self._peak(place)))[:most]

    def _was_wide_for_a_while(self, place: Place) -> bool:
        """Whether it is a wider row that had something to tell only until patterns got rows of their own."""
        return place[1].endswith(ANY) and max(self.series[place]) < self._last - 1

    def _peak(self, place: Place) -> float:
        return max(point.qps for point in self.series[place].values())

    def _put(self, row: PatternRow, cell: int) -> None:
        points = self.series.setdefault((row.tenant, row.pattern), {})
        point = Point(row.qps, row.miss_rate, row.baseline.qps, row.baseline.miss_rate)
        if cell in points:
            points[cell].merge(point)
        else:
            points[cell] = point
        if len(self.series) > MAX_SERIES:
            kept = sorted(self.series, key=lambda place: -self._peak(place))[: MAX_SERIES * 3 // 4]
            self.series = {place: self.series[place] for place in kept}

    def _halve(self) -> None:
        self.step_s *= 2
        self._first, self._last = self._first // 2, self._last // 2
        self.series = {place: _merged(points) for place, points in self.series.items()}


def _merged(points: dict[int, Point]) -> dict[int, Point]:
    made: dict[int, Point] = {}
    for cell, point in points.items():
        if cell // 2 in made:
            made[cell // 2].merge(point)
        else:
            made[cell // 2] = point
    return made


def _highest(*values: float | None) -> float | None:
    return max(_numbers(values), default=None)


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _severity(alert: Alert) -> int:
    return _SEVERITIES.index(alert.severity)
