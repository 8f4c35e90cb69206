from __future__ import annotations

import json
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.analyzers.overflow import Overflow
from spikeprof.profiler import numerics_alerts as alerts
from spikeprof.profiler.inject.numerics import records
from spikeprof.profiler.inject.numerics.formats import FORMATS
from spikeprof.profiler.numerics_alerts import Alerting, AlertReader, NumericsAlert

MODULES = ("layers.0", "layers.1", "layers.2")


def bits(dtype: str, value: float) -> int:
    """The magnitude of a value that the format holds, by search."""
    form = FORMATS[dtype]
    low, high = 0, form.largest
    while low < high:
        middle = (low + high) // 2
        if (form.value(middle) or 0.0) < value:
            low = middle + 1
        else:
            high = middle
    return low


def scan(step: int, order: int, point: int, dtype: str = "float16", amax: float = 1.0, **counts: int) -> bytes:
    """One record as the scans write it, of 1,000 elements."""
    tag = order << 32 | FORMATS[dtype].number << 24 | point
    named = {"amax": bits(dtype, amax), "smallest": 1, "first_bad": -1, **counts}
    statistics = [named.get(name, 0) for name in records.STATISTICS]
    return records.pack(step * 100 + order, step, tag, 0, 1000, statistics, 0)


class Spool:
    """What a target writes: points into its event file, records in frames."""

    def __init__(self, folder: Path, pid: int = 7) -> None:
        self.stem = folder / f"{pid}-1000"
        points = [[number, 0, path, "Linear", "output", 0, -1] for number, path in enumerate(MODULES)]
        points.append([3, 0, "pages", "", "kv", 0, -1])
        self.event(ev="hello", t=1)
        self.event(ev="numerics_points", t=2, points=points)

    def event(self, **fields: Any) -> None:
        with self.stem.with_suffix(".jsonl").open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def frame(self, scans: Sequence[bytes], device: int = 0, cut: int = 0) -> bytes:
        payload = b"".join(scans)
        data = records.FRAME_HEADER.pack(records.FRAME_MAGIC, len(payload), 5_000, device) + payload
        with self.stem.with_suffix(records.SUFFIX).open("ab") as file:
            file.write(data[: len(data) - cut])
        return data[len(data) - cut :]


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path)


def told(found: Sequence[NumericsAlert]) -> list[tuple[str, str, int, float]]:
    return [(alert.rule, alert.module, alert.step, alert.value) for alert in found]


def test_the_first_bad_module_of_a_step_is_told_once(spool: Spool, tmp_path: Path) -> None:
    reader = AlertReader(tmp_path)
    assert reader.poll() == []
    spool.frame([scan(3, 0, 0), scan(3, 2, 2, nan=1000), scan(3, 1, 1, inf=4)])
    (alert,) = reader.poll()
    expected = NumericsAlert(
        "overflow", "critical", "layers.1", "Linear", "output", "float16", 3, 7, 0, 4.0, 0.0, 1000, 5_000
    )
    assert alert == expected
    spool.frame([scan(4, 1, 1, inf=9), scan(4, 2, 2, nan=1000)])
    assert reader.poll() == []
    spool.frame([scan(5, 0, 1), scan(5, 1, 0, nan=1), scan(5, 2, 1, inf=9)])  # another one is the first now
    assert told(reader.poll()) == [("overflow", "layers.0", 5, 1.0)]


def test_what_comes_in_from_the_step_before_is_not_told_again(spool: Spool, tmp_path: Path) -> None:
    reader = AlertReader(tmp_path)
    spool.frame([scan(3, 0, 0), scan(3, 1, 1, inf=4), scan(4, 0, 0, nan=9), scan(5, 0, 2, nan=9)])
    assert told(reader.poll()) == [("overflow", "layers.1", 3, 4.0)]
    spool.frame([scan(3, 0, 0, nan=2)], device=1)
    assert told(reader.poll()) == [("overflow", "layers.0", 3, 2.0)]


def test_a_step_may_come_in_several_frames(spool: Spool, tmp_path: Path) -> None:
    reader = AlertReader(tmp_path)
    spool.frame([scan(3, 0, 0, inf=1)])
    assert told(reader.poll()) == [("overflow", "layers.0", 3, 1.0)]
    spool.frame([scan(3, 1, 1, nan=1000)])
    assert reader.poll() == []


@pytest.mark.parametrize(
    ("dtype", "amax", "saturated", "rule", "value", "limit"),
    [
        ("float16", 32_752.0, 0, None, 0.0, 0.0),
        ("float16", 32_768.0, 0, "near-overflow", 32_768.0, 65_504.0),
        ("float16", 65_504.0, 1, "near-overflow", 65_504.0, 65_504.0),
        ("bfloat16", 65_504.0, 0, None, 0.0, 0.0),
        ("float32", 2.0**127, 0, "near-overflow", 2.0**127, FORMATS["float32"].limit),
        ("float8_e4m3fn", 448.0, 9, None, 0.0, 0.0),
        ("float8_e4m3fn", 448.0, 10, "near-overflow", 0.01, 0.01),
        ("int8", 127.0, 10, "int8-saturation", 0.01, 0.01),
        ("int4", 15.0, 249, None, 0.0, 0.0),
        ("int4", 15.0, 250, "int8-saturation", 0.25, 0.25),
    ],
)
def test_what_comes_near_the_end_of_its_format(
    spool: Spool, tmp_path: Path, dtype: str, amax: float, saturated: int, rule: str | None, value: float, limit: float
) -> None:
    spool.frame([scan(0, 0, 1, dtype, amax, saturated=saturated)] * 3)
    found = AlertReader(tmp_path).poll()
    assert [(alert.rule, alert.value, alert.limit) for alert in found] == ([(rule, value, limit)] if rule else [])


def test_pages_may_use_the_ends_more(spool: Spool, tmp_path: Path) -> None:
    reader = AlertReader(tmp_path)
    spool.frame([scan(0, 0, 3, "uint8", 255.0, saturated=49), scan(0, 1, 3, "int4", 15.0, saturated=249)])
    assert reader.poll() == []
    spool.frame([scan(1, 0, 3, "uint8", 255.0, saturated=50)])
    assert [(alert.module, alert.role, alert.limit) for alert in reader.poll()] == [("pages", "kv", 0.05)]


def test_limits_are_the_analyzer_s() -> None:
    defaults = Overflow()
    assert defaults.max_saturated_share == alerts.SATURATED_SHARE
    assert defaults.max_int4_saturated_share == alerts.SATURATED_SHARE_4_BITS
    assert defaults.max_kv_saturated_share == alerts.SATURATED_SHARE_KV
    assert defaults.min_headroom_bits == 1.0  # within a doubling
    assert defaults.fp16_warn_value > defaults.fp16_limit_value / 2  # so that the doubling tells of it, too


def test_what_is_half_written_is_read_when_it_is_whole(spool: Spool, tmp_path: Path) -> None:
    reader = AlertReader(tmp_path)
    rest = spool.frame([scan(0, 0, 0), scan(0, 1, 1, nan=3)], cut=50)
    assert reader.poll() == []
    with spool.stem.with_suffix(records.SUFFIX).open("ab") as file:
        file.write(rest)
    spool.frame([scan(1, 1, 2, nan=1)])
    assert told(reader.poll()) == [("overflow", "layers.1", 0, 3.0), ("overflow", "layers.2", 1, 1.0)]


def test_records_and_lines_that_are_not_whole_are_passed_over(spool: Spool, tmp_path: Path) -> None:
    torn = bytearray(scan(0, 1, 1, nan=3))
    torn[40] ^= 1
    spool.event(ev="numerics_points", points=[["x"]])
    spool.frame([bytes(torn), scan(0, 2, 9, nan=1)])
    assert told(AlertReader(tmp_path).poll()) == [("overflow", "", 0, 1.0)]  # of a point that has no name
    spool.stem.with_suffix(records.SUFFIX).write_bytes(b"no frame" * 20)
    assert AlertReader(tmp_path).poll() == []


def test_processes_share_what_was_told(tmp_path: Path) -> None:
    for pid in (7, 8):
        Spool(tmp_path, pid).frame([scan(0, 1, 1, nan=3)])
    assert [alert.pid for alert in AlertReader(tmp_path).poll()] == [7]


def test_the_thread_writes_a_private_file_and_reads_the_rest_at_the_end(spool: Spool, tmp_path: Path) -> None:
    file, seen = tmp_path / alerts.ALERTS_FILE, []
    alerting = Alerting(tmp_path, file, seen.append)
    alerting.start()
    spool.frame([scan(0, 1, 1, nan=3)])
    until = time.monotonic() + 10
    while not seen and time.monotonic() < until:
        time.sleep(0.05)
    assert told(seen) == [("overflow", "layers.1", 0, 3.0)]  # before the end
    spool.frame([scan(1, 1, 2, nan=1)])
    alerting.stop()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["module"] for line in lines] == ["layers.1", "layers.2"]
    assert lines[0]["rule"] == "overflow"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_no_alert_no_file_and_no_start_no_end(tmp_path: Path) -> None:
    alerting = Alerting(tmp_path, tmp_path / "alerts.jsonl", print)
    alerting.stop()
    alerting = Alerting(tmp_path / "nothing there", tmp_path / "alerts.jsonl", print)
    alerting.start()
    alerting.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_listener_that_fails_ends_the_alerts_and_nothing_else(spool: Spool, tmp_path: Path) -> None:
    alerting = Alerting(tmp_path, tmp_path / "alerts.jsonl", lambda alert: 1 / 0)
    spool.frame([scan(0, 1, 1, nan=3)])
    alerting.start()
    alerting.stop()
    assert (tmp_path / "alerts.jsonl").read_text().count("\n") == 1


def test_a_flood_of_bad_steps_is_read_quickly(spool: Spool, tmp_path: Path) -> None:
    for step in range(200):
        spool.frame([scan(step, order, order % 3, nan=1) for order in range(100)])
    began = time.process_time()
    assert len(AlertReader(tmp_path).poll()) == 1
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"rule": "overflow", "module": "layers.5.mlp", "value": 16.0},
            "alert: overflow in layers.5.mlp (float16, step 1,024): 16 of 4,096 elements Inf or NaN",
        ),
        (
            {"rule": "near-overflow", "module": "", "value": 33_554.0, "limit": 65_504.0, "role": "input"},
            "alert: near-overflow in (model) (input, float16, step 1,024): amax 33,554 of at most 65,504",
        ),
        (
            {"rule": "int8-saturation", "module": "a\x1b[31m", "value": 0.124, "limit": 0.01, "dtype": "int8"},
            "alert: int8-saturation in a\\x1b[31m (int8, step 1,024): 12.4 % of the elements at the ends of the format "
            "(limit 1.0 %)",
        ),
    ],
)
def test_what_an_alert_says(fields: dict[str, Any], text: str) -> None:
    from spikeprof.reports.numerics import alert_text

    common = {"role": "output", "dtype": "float16", "step": 1024, "elements_count": 4096, "limit": 0.0}
    assert alert_text({**common, **fields}) == text


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(1, 700), max_size=8))
def test_however_the_file_grows_the_same_is_told(
    tmp_path_factory: pytest.TempPathFactory, bad: list[int], cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder)
    for step, count in enumerate(bad):
        spool.frame([scan(step, 1 + order, order, nan=count if order == step % 3 else 0) for order in range(3)])
    file = spool.stem.with_suffix(records.SUFFIX)
    data = file.read_bytes()
    at_once = AlertReader(folder).poll()
    firsts = {step % 3: step for step in reversed(range(len(bad))) if bad[step]}  # of each module
    assert [alert.step for alert in at_once] == sorted(firsts.values())
    reader, found, ends = AlertReader(folder), [], [*sorted(cuts), len(data)]
    for end in ends:
        file.write_bytes(data[:end])
        found += reader.poll()
    assert found == at_once
