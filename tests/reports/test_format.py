from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.analyzers.base import Evidence, Finding, Metric, Saving
from spikeprof.reports import finding_text
from spikeprof.reports import format as fmt


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (840, "840 ns"),
        (999.6, "1.00 µs"),
        (5_520_000, "5.52 ms"),
        (12_345_678, "12.3 ms"),
        (999_600, "1.00 ms"),
        (999_400, "999 µs"),
        (99_940_000_000, "99.9 s"),
        (99_960_000_000, "1 min 40 s"),
        (187_000_000_000, "3 min 07 s"),
        (3_599_600_000_000, "1 h 00 min"),
        (7_500_000_000_000, "2 h 05 min"),
        (-5_500_000, "-5.50 ms"),
        (0.25, "0.250 ns"),
    ],
)
def test_durations(ns: float, text: str) -> None:
    assert fmt.duration(ns) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.974, "97.4 %"),
        (0.0094, "0.94 %"),
        (0.00003, "< 0.01 %"),
        (0.9998, "99.98 %"),
        (0.99996, "> 99.99 %"),
        (-0.2, "-20.0 %"),
        (12.5, "1,250.0 %"),
    ],
)
def test_shares_never_round_onto_nothing_or_all(value: float, text: str) -> None:
    assert fmt.share(value) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("size_bytes", 1_610_612_736, "1.50 GiB"),
        ("size_bytes", 512, "512 B"),
        ("peak_bytes_per_s", 4.8e12, "4.80 TB/s"),
        ("launches_count", 77_056, "77,056"),
        ("power_w", 312.4, "312 W"),
        ("sm_clock_mhz", 1980.0, "1,980 MHz"),
        ("temperature_celsius", 64.2, "64 °C"),
        ("energy_j", 1234.0, "1.23 kJ"),
        ("p99_over_p50_ratio", 4.25, "4.25×"),
        ("headroom_bits", 2.0, "2.00 bits"),
        ("headroom_bits", 0.0012, "0.00 bits"),
        ("amax_value", 65_504.0, "65,504"),
        ("amax_value", 12.41, "12.4"),
        ("amax_value", 3.3895e38, "3.39e38"),
        ("smallest_value", 2.0**-24, "5.96e-8"),
        ("pid", 47_110, "47110"),
        ("start_ns", 2_260_152_750, "2.260153 s"),
        ("libcupti_version", "130001", "13.0.1"),
        ("libcupti_version", "26", "API 26"),
        ("traced", True, "yes"),
        ("plain", 3.0, "3"),
        ("plain", 3.14159, "3.14"),
        ("anything_ns", None, "–"),
        ("anything_ns", math.nan, "–"),
        ("anything_ns", math.inf, "–"),
    ],
)
def test_quantities_by_the_unit_in_the_name(name: str, value: object, text: str) -> None:
    assert fmt.quantity(name, value) == text


def test_a_metric_without_value_says_why() -> None:
    assert fmt.metric_value(Metric("step_ns", None, "no step was timed")) == "not measured: no step was timed"
    assert fmt.metric_value(Metric("step_ns", 5_520_000)) == "5.52 ms"


def test_titles() -> None:
    assert fmt.title("idle_share") == "GPU idle"
    assert fmt.title("sm_clock_mhz") == "SM clock"
    assert fmt.title("tensor_active_share") == "Tensor active"
    assert fmt.within("Idle time") == "idle time"
    assert fmt.within("GPU idle") == "GPU idle"


def test_evidence_names_one_thing_once_and_says_limits_and_basis() -> None:
    items = (
        Evidence("idle_launch_share", 0.15, 0.1, "min_class_share"),
        Evidence("idle_launch_ns", 42_500_000),
        Evidence("peak_bytes_per_s", 3e12, 4.8e12, "data sheet", basis="modelled"),
        Evidence("dropped_count", 3, 0, "none expected"),
    )
    assert finding_text.evidence(items) == (
        "Launch idle 15.0 % (limit 10 %), 42.5 ms; Peak 3.00 TB/s (limit 4.80 TB/s, data sheet; modelled); "
        "Records dropped 3 (none expected)"
    )
    twice = (Evidence("idle_host_share", 0.3, basis="inferred"), Evidence("idle_host_ns", 90, basis="inferred"))
    assert finding_text.evidence(twice) == "Host idle 30.0 % (inferred), 90 ns"
    assert finding_text.evidence(items, most=1) == "Launch idle 15.0 % (limit 10 %)"


def test_a_sentence_begins_in_capitals_and_ends() -> None:
    assert fmt.sentence("no counters: GPU 0 is shared") == "No counters: GPU 0 is shared."


def test_scope_puts_launch_shapes_together() -> None:
    where: dict[str, str | int] = {"kernel": "void f<int>(int)", "grid_x": 132, "grid_y": 2, "grid_z": 1, "device": 1}
    assert finding_text.scope(where) == "kernel f<int>, grid 132×2×1, GPU 1"


def test_savings_and_verdicts() -> None:
    assert finding_text.saving(Saving(890_000_000, "total")) == "at most 890 ms of the run"
    assert finding_text.saving(Saving(1_500, "local")) == "at most 1.50 µs of this part"
    found = [Finding("r", s, {}, (), "") for s in ("warning", "critical", "warning")]  # type: ignore[arg-type]
    assert finding_text.verdict_counts(found) == "1 critical and 2 warnings"
    assert finding_text.verdict_counts([]) == ""


def test_commands_are_quoted_as_a_shell_needs_it() -> None:
    assert fmt.command_line(("python", "a b.py", "x\ny")) == "python 'a b.py' 'x\\x0ay'"


def test_dates() -> None:
    assert fmt.date(1_764_000_000_000_000_000) == "2025-11-24 16:00 UTC"
    assert fmt.date(0) == ""
    assert fmt.date(2**62 * 1000) == ""


@given(st.text())
def test_ascii_only_is_ascii(text: str) -> None:
    assert fmt.ascii_only(text).isascii()


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e25, max_value=1e25))
def test_durations_stay_within_half_a_percent_of_the_value(ns: float) -> None:
    text = fmt.duration(ns)
    if "min" in text:
        return
    number, unit = text.split(" ")
    back = float(number.replace(",", "")) * {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert back == pytest.approx(ns, rel=0.0051, abs=1e-300)
