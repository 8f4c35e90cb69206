"""The detector on traffic that is made by hand: what fires, when, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from spikeprof.analyzers.cache_pierce.detector import Detector
from spikeprof.analyzers.cache_pierce.known import KnownKeys
from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.profiler.lookups import Lookups, lookups

T0_S = 1_000_000.0
#: Learns in 20 s instead of 60: nothing else differs.
QUICK = Options(cold_start_s=20.0)
PER_S = 100


def usual(second: int, prefix: str = "user:", per_s: int = PER_S) -> tuple[np.ndarray, list[str], np.ndarray]:
    """A hundred look-ups evenly over a second, every twentieth of a new key that misses: 5 %."""
    at = np.arange(per_s)
    is_new = at % 20 == 0
    ids = np.where(is_new, 10**6 + second * per_s + at, at % 40)
    return T0_S + second + at / per_s, [f"{prefix}{i}" for i in ids.tolist()], ~is_new


def attack(second: int, per_s: int, prefix: str = "user:") -> tuple[np.ndarray, list[str], np.ndarray]:
    """Keys that are all different, and miss."""
    at = np.arange(per_s)
    return T0_S + second + at / per_s, [f"{prefix}{10**9 + second * 10**6 + i}" for i in at.tolist()], at < 0


def join(*parts: tuple[np.ndarray, list[str], np.ndarray]) -> Lookups:
    times, keys, hits = zip(*parts, strict=True)
    return lookups(np.concatenate(times), [key for some in keys for key in some], np.concatenate(hits))


def run(detector: Detector, seconds: range, more: Callable[[int], Lookups | None] = lambda second: None) -> list[Alert]:
    """Feed second by second: usual traffic, and what ``more`` adds."""
    alerts: list[Alert] = []
    for second in seconds:
        alerts += detector.feed(join(usual(second)))
        added = more(second)
        if added is not None:
            alerts += detector.feed(added)
    return alerts


def evidence(alert: Alert, metric: str) -> float:
    return next(one.value for one in alert.evidence if one.metric == metric)


def said(alerts: list[Alert]) -> list[tuple[str, str, str]]:
    return [(alert.kind, alert.rule, alert.pattern) for alert in alerts]


def attacked(per_s: int, first: int = 60, last: int = 70) -> Callable[[int], Lookups | None]:
    return lambda second: join(attack(second, per_s)) if first <= second < last else None


def test_an_attack_is_raised_once_and_recovers_once() -> None:
    detector = Detector(QUICK)
    alerts = run(detector, range(100), attacked(300))
    assert said(alerts) == [("raised", "penetration", "user:{n}"), ("recovered", "penetration", "user:{n}")]
    raised, recovered = alerts
    assert raised.ts_s - T0_S <= 62
    assert raised.alert_id == recovered.alert_id
    assert raised.severity == "alert"
    # the last window with the attack in it ends at 70.75; 0.25 s of it are 75 more look-ups: too few. So at 70.5 …
    assert 79 <= recovered.ts_s - T0_S <= 82
    assert len(raised.keys) == QUICK.sample_keys_count
    assert all(key.startswith("user:1") and len(key) > 10 for key in raised.keys)


def test_the_numbers_behind_an_alert() -> None:
    detector = Detector(QUICK)
    raised = run(detector, range(63), attacked(300))[0]
    limits = {one.metric: (one.limit, one.baseline) for one in raised.evidence}
    assert limits["lookups_per_s"] == (pytest.approx(250), pytest.approx(100))
    assert limits["miss_share"] == (pytest.approx(0.15), pytest.approx(0.05))
    assert evidence(raised, "unfilled_share") == 1
    assert evidence(raised, "first_seen_share") == 1
    row = next(row for row in detector.snapshot().rows if row.pattern == "user:{n}")
    assert (row.qps, row.misses_per_s, row.state) == (400, 305, "alerting")
    assert row.baseline.qps == pytest.approx(100)


@pytest.mark.parametrize("per_s", [130, 20])
def test_below_either_limit_nothing_fires(per_s: int) -> None:
    # 230 look-ups per second are less than 2.5 times 100, although most of what is added misses
    assert run(Detector(QUICK), range(90), attacked(per_s)) == []


def test_many_more_look_ups_that_hit_are_no_attack() -> None:
    def sale(second: int) -> Lookups | None:
        times, keys, _ = attack(second, 500)
        return lookups(times, ["user:7"] * len(keys), np.ones(len(keys), bool)) if second >= 60 else None

    assert run(Detector(QUICK), range(80), sale) == []


def test_keys_that_hit_before_are_no_attack_for_as_long_as_a_refill_takes() -> None:
    def flush(second: int) -> Lookups | None:
        times = T0_S + second + np.arange(300) / 300
        missing = np.zeros(300, bool)
        return lookups(times, [f"user:{i % 40}" for i in range(300)], missing) if second >= 60 else None

    alerts = [alert for alert in run(Detector(QUICK), range(120), flush) if alert.rule == "penetration"]
    # usual look-ups still hit the same keys here, so that their misses never last
    assert alerts == []


def test_keys_missing_for_longer_than_a_refill_are() -> None:
    def gone(second: int) -> Lookups | None:
        times = T0_S + second + np.arange(300) / 300
        return lookups(times, [f"user:{10**5 + i % 40}" for i in range(300)], np.full(300, second < 32))

    detector = Detector(Options(cold_start_s=20.0, qps_ratio=0.5))
    alerts = [alert for alert in run(detector, range(80), gone) if alert.rule == "penetration"]
    assert 32 + 30 <= alerts[0].ts_s - T0_S <= 32 + 33


def test_quiet_patterns_never_fire() -> None:
    detector = Detector(QUICK)

    def quiet(second: int) -> Lookups:
        per_s = 18 if second >= 60 else 1
        return join(attack(second, per_s, "admin:"))

    assert [alert for alert in run(detector, range(90), quiet) if "admin" in alert.pattern] == []


def test_an_attack_during_the_cold_start_says_nothing() -> None:
    assert run(Detector(), range(40), attacked(2000, 10, 30)) == []


def test_a_baseline_is_not_dragged_along_by_a_long_attack() -> None:
    detector = Detector(QUICK)
    alerts = run(detector, range(500), attacked(300, 60, 480))
    assert said(alerts) == [("raised", "penetration", "user:{n}"), ("recovered", "penetration", "user:{n}")]
    row = next(row for row in detector.snapshot().rows if row.pattern == "user:{n}")
    assert row.baseline.qps == pytest.approx(100, rel=0.02)


def test_four_times_as_bad_escalates_once() -> None:
    def worse(second: int) -> Lookups | None:
        return join(attack(second, 300 if second < 75 else 1500)) if 60 <= second < 90 else None

    alerts = run(Detector(QUICK), range(110), worse)
    assert [alert.kind for alert in alerts] == ["raised", "escalated", "recovered"]
    assert alerts[1].severity == alerts[2].severity == "critical"
    assert 75 <= alerts[1].ts_s - T0_S <= 77


def test_random_words_are_seen_in_the_first_part_of_their_keys() -> None:
    letters = np.random.default_rng(3)

    def words(second: int) -> Lookups | None:
        if not 60 <= second < 70:
            return None
        keys = ["user:" + "".join(map(chr, row)) for row in letters.integers(97, 123, (400, 10)).tolist()]
        return lookups(T0_S + second + np.arange(400) / 400, keys, np.zeros(400, bool))

    alerts = run(Detector(QUICK), range(90), words)
    assert said(alerts) == [("raised", "penetration", "user:{any}"), ("recovered", "penetration", "user:{any}")]
    assert alerts[0].ts_s - T0_S <= 62


@pytest.mark.parametrize("block_s", [0.1, 7.0, 1000.0])
def test_the_size_of_blocks_changes_nothing(block_s: float) -> None:
    whole = join(*(usual(second) for second in range(100)), *(attack(second, 300) for second in range(60, 70)))
    order = np.argsort(whole.ts_s, kind="stable")
    times, keys, hits = whole.ts_s[order], np.array(whole.keys.to_pylist(), object)[order], whole.hits[order]
    detector, alerts = Detector(QUICK), []
    cuts = np.searchsorted(times, np.arange(T0_S, T0_S + 100 + block_s, block_s))
    for first, last in pairwise(cuts.tolist()):
        alerts += detector.feed(lookups(times[first:last], keys[first:last].tolist(), hits[first:last]))
    alerts += detector.finish()
    # at 60.5 there were 50 + 200 look-ups in a second: not above 250; those at 60.75, 61 and 61.25 are three in a row
    assert [(alert.kind, alert.ts_s - T0_S) for alert in alerts] == [("raised", 61.25), ("recovered", 80.5)]


def test_look_ups_out_of_order_within_the_lateness_count() -> None:
    detector = Detector(QUICK)
    alerts: list[Alert] = []
    for second in range(90):
        alerts += detector.feed(join(usual(second)))
        late = second - 4  # another source, four seconds behind
        if 60 <= late < 70:
            alerts += detector.feed(join(attack(late, 300)))
    assert [alert.kind for alert in alerts] == ["raised", "recovered"]
    assert alerts[0].ts_s - T0_S <= 66
    assert detector.snapshot().counts.late_count == 0


def test_time_set_back_keeps_baselines_and_alerts() -> None:
    detector = Detector(QUICK)
    alerts = run(detector, range(66), attacked(300, 60, 66))
    for second in range(40):
        times, keys, hits = usual(second)
        alerts += detector.feed(lookups(times - 5000, keys, hits))
    assert [alert.kind for alert in alerts] == ["raised", "recovered"]
    snapshot = detector.snapshot()
    assert snapshot.counts.clock_jumps_count == 1
    assert next(row for row in snapshot.rows if row.pattern == "user:{n}").baseline.qps == pytest.approx(100)


def test_silence_recovers_by_the_clock() -> None:
    detector = Detector(QUICK)
    alerts = run(detector, range(66), attacked(300, 60, 66))
    assert [alert.kind for alert in alerts] == ["raised"]
    assert [alert.kind for alert in detector.advance(T0_S + 100)] == ["recovered"]
    assert detector.snapshot().active == ()


def test_a_restart_with_baselines_finds_what_comes_at_once() -> None:
    first = Detector(QUICK)
    run(first, range(60))
    second = Detector(Options(), baselines=first.baseline_rows())
    alerts = run(second, range(60, 100), attacked(300, 63, 75))
    assert said(alerts)[:1] == [("raised", "penetration", "user:{n}")]
    assert alerts[0].ts_s - T0_S <= 65


def test_one_hot_missing_key() -> None:
    def missing(second: int) -> Lookups | None:
        times = T0_S + second + np.arange(5) / 5
        return lookups(times, ["user:777"] * 5, np.zeros(5, bool)) if 30 <= second < 80 else None

    detector = Detector(QUICK)
    alerts = run(detector, range(120), missing)
    assert said(alerts) == [("raised", "hot-missing-key", "user:{n}"), ("recovered", "hot-missing-key", "user:{n}")]
    assert alerts[0].keys == ("user:777",)
    assert alerts[0].severity == "warn"
    assert 60 <= alerts[0].ts_s - T0_S <= 63
    assert evidence(alerts[0], "miss_share") == 1
    assert evidence(alerts[0], "lookups_count") == pytest.approx(150, abs=5)
    assert 89 <= alerts[1].ts_s - T0_S <= 92


@pytest.mark.parametrize("missing_share", [0.9, 0.97])
def test_a_hot_key_is_missing_above_95_per_cent(missing_share: float) -> None:
    def sometimes(second: int) -> Lookups | None:
        at = second * 20 + np.arange(20)
        return lookups(T0_S + second + np.arange(20) / 20, ["user:777"] * 20, (at * 37) % 100 >= missing_share * 100)

    alerts = run(Detector(Options(cold_start_s=20.0, refill_s=1000.0)), range(100), sometimes)
    assert ("raised", "hot-missing-key", "user:{n}") in said(alerts) or missing_share < 0.95
    assert missing_share > 0.95 or alerts == []


def test_a_missing_key_looked_up_seldom_is_not_hot() -> None:
    def seldom(second: int) -> Lookups:
        return lookups([T0_S + second + 0.5], ["user:777"], [False])

    assert run(Detector(QUICK), range(100), seldom) == []


def test_illegal_keys_over_several_patterns_and_tenants() -> None:
    known = KnownKeys([f"user:{i}" for i in range(40)], 10_000)
    detector = Detector(QUICK, known=known)

    def illegal(second: int) -> Lookups | None:
        if not 60 <= second < 65:
            return None
        times = T0_S + second + np.arange(120) / 120
        keys = [f"p{chr(97 + i % 4)}:{second * 1000 + i}" for i in range(120)]
        return lookups(times, keys, np.zeros(120, bool), tenants=[f"t{i % 3}" for i in range(120)])

    alerts = run(detector, range(90), illegal)
    assert said(alerts) == [("raised", "illegal-keys", "*"), ("recovered", "illegal-keys", "*")]
    assert alerts[0].severity == "critical"
    assert alerts[0].ts_s - T0_S <= 62
    # 5 of the usual look-ups exist nowhere either
    assert evidence(alerts[0], "illegal_per_s") == pytest.approx(125, abs=30)


def test_just_below_a_hundred_illegal_keys_per_second_nothing_fires() -> None:
    detector = Detector(QUICK, known=KnownKeys([f"user:{i}" for i in range(40)], 10_000))
    assert run(detector, range(80), lambda second: join(attack(second, 94, "x:")) if second > 60 else None) == []
    assert detector.snapshot().illegal_per_s.value == 99


def test_without_known_keys_illegal_ones_are_not_measured() -> None:
    detector = Detector(QUICK)
    run(detector, range(3))
    illegal = detector.snapshot().illegal_per_s
    assert illegal.value is None
    assert "known keys" in illegal.reason
    assert illegal.measure_with
    detector.known = KnownKeys(["user:1"])
    assert detector.snapshot().illegal_per_s.value == 0


def test_keys_that_hit_are_learned_as_known() -> None:
    known = KnownKeys([], 1000)
    detector = Detector(QUICK, known=known)
    detector.feed(lookups([T0_S, T0_S], ["a:1", "a:2"], [True, False]))
    assert "a:1" in known
    assert "a:2" not in known


def test_a_snapshot_before_anything() -> None:
    snapshot = Detector().snapshot()
    assert (snapshot.ts_s, snapshot.rows, snapshot.active) == (None, (), ())


def test_ttls_and_distinct_keys_by_hand() -> None:
    detector = Detector(QUICK)
    times = T0_S + np.arange(40) / 40
    ttls_s = np.where(np.arange(40) % 2 == 0, 10.0, 30.0)
    ttls_s[:4] = np.nan
    detector.feed(lookups(times, [f"user:{i % 10}" for i in range(40)], np.ones(40, bool), ttls_s))
    detector.feed(lookups([T0_S + 1.01], ["user:1"], [True]))
    row = next(row for row in detector.snapshot().rows if row.pattern == "user:{n}")
    assert (row.ttl_mean_s, row.ttl_std_s) == (20, 10)
    assert row.distinct_count == pytest.approx(10, abs=3.5)  # keys may share a register: two of them in one run of 25
    assert (row.qps, row.miss_rate, row.lookups_count) == (40, 0, 41)
    assert (row.state, row.nowhere_share, row.unfilled_share) == ("learning", None, None)


def counts(second: int, lookups_per_s: float, misses_per_s: float) -> Iterator[object]:
    yield from (np.array([T0_S + second]), np.array([T0_S + second + 5.0]), ["gpu"], ["kv"])
    yield from (np.array([5 * lookups_per_s]), np.array([5 * misses_per_s]))


def test_counts_without_keys() -> None:
    detector, alerts = Detector(QUICK), []
    for second in range(0, 100, 5):
        rates = (100, 10) if second not in (60, 65) else (400, 300)
        alerts += detector.feed_counts(*counts(second, *rates))  # type: ignore[arg-type]
    assert said(alerts) == [("raised", "penetration", "kv"), ("recovered", "penetration", "kv")]
    row = next(row for row in detector.snapshot().rows if row.pattern == "kv")
    assert (row.qps, row.miss_rate) == (100, pytest.approx(0.1))
    assert (row.distinct_count, row.unfilled_share) == (None, None)
    detector.feed_counts(*counts(10, 100, 10))  # type: ignore[arg-type]
    assert detector.snapshot().counts.late_count == 500


def test_rows_are_bounded_and_nothing_goes_uncounted() -> None:
    detector = Detector(Options(max_series_count=32, max_tenants_count=4, cold_start_s=20.0))
    letters = np.random.default_rng(1).integers(97, 123, (20_000, 4)).tolist()
    keys = ["".join(map(chr, row)) + ":x" for row in letters]
    tenants = [f"t{i % 9}" for i in range(20_000)]
    detector.feed(lookups(T0_S + np.arange(20_000) / 500, keys, np.zeros(20_000, bool), tenants=tenants))
    detector.finish()
    snapshot = detector.snapshot()
    assert len(snapshot.rows) <= 32
    assert {row.tenant for row in snapshot.rows} <= {"*", "t0", "t1", "t2", "{any}"}
    assert snapshot.counts.lookups_count == 20_000
    assert sum(row.lookups_count for row in snapshot.rows if row.pattern == "{any}") == 20_000


def test_idle_rows_make_room() -> None:
    options = Options(max_series_count=8, cold_start_s=20.0)
    detector = Detector(options)
    for at in range(20):
        keys = [f"{chr(97 + at)}:{i}" for i in range(60)]
        detector.feed(lookups(T0_S + 400 * at + np.arange(60) / 60, keys, np.ones(60, bool)))
    names = {row.pattern for row in detector.snapshot().rows}
    assert "t:{n}" in names
    assert len(names) <= 8


def test_rows_in_use_do_not_make_room() -> None:
    detector = Detector(Options(max_series_count=8, cold_start_s=20.0))
    for at in range(5):  # fills the rows: everything, one tenant, three patterns with their first parts
        keys = [f"{chr(97 + at)}:{i}" for i in range(60)]
        detector.feed(lookups(T0_S + at + np.arange(60) / 60, keys, np.ones(60, bool)))
    # long after: one of them again, together with new ones that ask for room
    keys = [f"{name}:{i}" for i in range(60) for name in "axyz"]
    detector.feed(lookups(T0_S + 1000 + np.arange(240) / 240, keys, np.ones(240, bool)))
    detector.finish()
    rows = {row.pattern: row for row in detector.snapshot().rows}
    assert rows["a:{n}"].lookups_count == 120
    assert sum(row.lookups_count for row in rows.values() if row.level == "pattern") <= 300 + 240
    assert rows["*"].lookups_count == 540


def test_counts_and_look_ups_in_one_detector() -> None:
    detector = Detector(QUICK)
    for second in range(0, 40, 5):
        detector.feed_counts(*counts(second, 100, 10))  # type: ignore[arg-type]
        detector.feed(join(usual(second)))  # a little behind the counts
    snapshot = detector.snapshot()
    assert snapshot.counts.late_count == 0
    assert {row.pattern: row.lookups_count for row in snapshot.rows if row.level == "pattern"} == {
        "kv": 4000,
        "user:{n}": 800,
    }
