"""What the detector says: alerts, and how things stand. Numbers only: text for people is made in reports/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["raised", "escalated", "recovered"]
Severity = Literal["warn", "alert", "critical"]
Rule = Literal["penetration", "hot-missing-key", "illegal-keys"]
Basis = Literal["measured", "estimated"]  # estimated: by a sketch or a Bloom filter
State = Literal["learning", "quiet", "suspect", "alerting"]
Level = Literal["pattern", "prefix", "tenant", "all"]  # `user:{n}`, `user:{any}`, `{any}`, everything
Verdict = Literal["pass", "nil", "limit"]

#: Stands for all tenants, or all patterns.
EVERY = "*"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number behind an alert, and what it was held against.

    ``metric`` ends in its unit; ``limit`` is what the value had to pass, None where it only explains;
    ``baseline`` is the usual value, None where there is none; ``option`` names the option that sets the limit.
    """

    metric: str
    value: float
    limit: float | None = None
    baseline: float | None = None
    option: str = ""
    basis: Basis = "measured"


@dataclass(frozen=True, slots=True)
class Share:
    """How much of what an alert is about came from one tenant and pattern."""

    tenant: str
    pattern: str
    per_s: float


@dataclass(frozen=True, slots=True)
class Alert:
    """Something began, got worse, or is over.

    ``ts_s`` is event time (Unix seconds) as far as it had come when this was decided; ``since_s`` when the first
    look-ups that it is about were made, as far as seen. ``tenant`` and ``pattern`` are ``EVERY`` for illegal-keys;
    ``keys`` is a sample of the keys (whole keys up to ``sample_key_chars_count``; of hot-missing-key the key itself).
    ``alert_id`` is the same from raised to recovered, and of no other. ``top`` says where most of it comes from
    (illegal-keys).
    """

    kind: Kind
    severity: Severity
    rule: Rule
    tenant: str
    pattern: str
    ts_s: float
    evidence: tuple[Evidence, ...]
    keys: tuple[str, ...] = ()
    since_s: float = 0.0
    alert_id: str = ""
    top: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is usual for a pattern: what its rates are held against.

    ``qps`` and ``miss_rate`` are the lower of the short and the long view; None while there is none yet.
    """

    qps: float | None
    miss_rate: float | None
    short_qps: float | None = None
    short_miss_rate: float | None = None
    reference_qps: float | None = None
    reference_miss_rate: float | None = None
    learned_s: float = 0.0  # of event time, up to baseline_s


@dataclass(frozen=True, slots=True)
class PatternRow:
    """How one pattern of one tenant stands. Rates are over the last ``window_s``; None = not measured.

    ``distinct_count`` (estimated) and ``distinct_lookups_count`` are over the last 10 to 20 s, TTLs over the last
    windows kept. Shares (0-1) are of the misses in the window: ``unfilled`` keys that nothing speaks for,
    ``first_seen`` keys never seen before, ``repeated`` keys missed before and not
    filled since, ``nowhere`` keys that KnownKeys says exist nowhere (None without one, and where only counts came in).
    """

    tenant: str
    pattern: str
    qps: float
    miss_rate: float | None
    misses_per_s: float
    distinct_count: float | None
    distinct_lookups_count: int
    ttl_mean_s: float | None
    ttl_std_s: float | None
    unfilled_share: float | None
    first_seen_share: float | None
    repeated_share: float | None
    nowhere_share: float | None
    baseline: Baseline
    state: State
    since_s: float  # event time at which it entered the state
    lookups_count: int  # since the pattern was first seen
    misses_count: int
    level: Level = "pattern"  # wider rows count the look-ups of patterns again


@dataclass(frozen=True, slots=True)
class HotKey:
    """A key that is missed much, over the last ``hot_key_s``."""

    tenant: str
    pattern: str
    key: str
    lookups_count: int
    misses_count: int
    alerting: bool


@dataclass(frozen=True, slots=True)
class Measure:
    """A number, or why it was not measured and what would measure it."""

    value: float | None
    reason: str = ""
    measure_with: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """What came in, and what could not be used."""

    lookups_count: int = 0
    misses_count: int = 0
    late_count: int = 0  # behind the newest by more than lateness_s: left out
    early_count: int = 0  # ahead by more than max_ahead_s, and nothing else came near: left out
    held_count: int = 0  # ahead by more than max_ahead_s: waiting for others to agree
    bad_time_count: int = 0  # no finite time: left out
    clock_jumps_count: int = 0  # times that event time was set anew, forwards or backwards
    folded_away_count: int = 0  # look-ups whose pattern had no room of its own (`{any}`)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How things stand at event time ``ts_s`` (None before the first look-up). Rows: busiest first."""

    ts_s: float | None
    rows: tuple[PatternRow, ...]
    hot_keys: tuple[HotKey, ...]
    illegal_per_s: Measure
    known_keys_count: Measure  # estimated
    known_false_positive_share: Measure
    counts: Counts
    active: tuple[Alert, ...]  # raised or escalated, and not recovered


@dataclass(frozen=True, slots=True)
class GuardCounts:
    """What protection did, by verdict."""

    passed_count: int = 0
    nil_count: int = 0  # answered at once: exists nowhere
    limited_count: int = 0  # over a pattern's limit
