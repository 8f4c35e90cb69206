from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from collectors.fake_nvml import FakeNvml

from spikeprof.profiler.collectors import nvml, sampling
from spikeprof.profiler.collectors.nvml import THROTTLE_BITS, NvmlCollector
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote
from spikeprof.profiler.units import unit_of

T0 = 1_700_000_000_000_000_000
METRICS_COUNT = 14 + len(THROTTLE_BITS)  # power, 2 clocks, 2 busy, memory, temperature, energy, 2 PCIe, 4 NVLink


def collected(
    fake: FakeNvml, until: Callable[[NvmlCollector], bool], t0_unix_ns: int = T0, **options: Any
) -> tuple[CollectorNote, dict[str, pa.Table], NvmlCollector]:
    collector = NvmlCollector(nvml=fake, **{"interval_ms": 1, **options})
    collector.start(t0_unix_ns)
    deadline = time.monotonic() + 30
    while not until(collector) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert until(collector), "the sampling thread did not get there in 30 s"
    note, tables = collector.stop()
    return note, tables, collector


def ticks(count: int) -> Callable[[NvmlCollector], bool]:
    return lambda c: bool(c._series) and all(len(s.times) >= count for s in c._series)


def test_each_metric_is_converted_to_the_unit_of_its_name() -> None:
    note, tables, _ = collected(FakeNvml(), ticks(2))
    rows = tables["samples"].to_pylist()
    last = {r["metric"]: r["value"] for r in rows if r["device"] == 1}
    on = {"throttle_sw_power_cap_share", "throttle_hw_thermal_share"}
    assert last == {
        "power_w": 700.5,
        "sm_clock_mhz": 1980,
        "mem_clock_mhz": 3201,
        "gpu_busy_share": 0.87,
        "mem_busy_share": 0.43,
        "mem_used_bytes": 2048,
        "temperature_celsius": 41,
        "energy_j": 12.345,
        **{f"throttle_{r}_share": float(f"throttle_{r}_share" in on) for r in THROTTLE_BITS},
        "pcie_read_bytes_per_s": 2_000_000,
        "pcie_written_bytes_per_s": 5_000,
        "nvlink_sent_total_bytes": 1_024_000_000,
        "nvlink_received_total_bytes": 2_048,
        "nvlink_sent_raw_total_bytes": 1_085_440_000,
        "nvlink_received_raw_total_bytes": 3_072,
    }
    assert all(unit_of(metric) for metric in last)
    assert (note.state, note.reason, note.records_count) == ("ok", "", len(rows))
    assert tables["samples"].schema == TABLES["samples"].arrow


def test_times_count_from_the_start_of_the_session_and_are_sorted() -> None:
    before = time.time_ns()
    _, tables, _ = collected(FakeNvml(), ticks(3), t0_unix_ns=before)
    t_ns = tables["samples"]["t_ns"].to_pylist()
    assert t_ns == sorted(t_ns)
    assert t_ns[0] >= 0
    assert t_ns[-1] <= time.time_ns() - before


def test_a_metric_that_is_not_supported_is_asked_once_and_named() -> None:
    fake = FakeNvml(gpus=1, unsupported=("nvmlDeviceGetTotalEnergyConsumption",))
    note, tables, _ = collected(fake, ticks(5))
    assert note.state == "degraded"
    assert note.reason == "GPU 0: no energy_j (Not Supported)"
    metrics = set(tables["samples"]["metric"].to_pylist())
    assert "energy_j" not in metrics
    assert len(metrics) == METRICS_COUNT - 1
    assert fake.calls.count("nvmlDeviceGetTotalEnergyConsumption") == 1


def test_gpus_without_nvlink_are_no_fault_but_told() -> None:
    note, tables, _ = collected(FakeNvml(gpus=2, unsupported=(138, 139, 140, 141)), ticks(1))
    assert (note.state, note.reason) == ("ok", "GPU 0, GPU 1: no NVLink (Not Supported)")
    assert not any(m.startswith("nvlink") for m in tables["samples"]["metric"].to_pylist())


def test_nvlink_without_raw_counters_lacks_only_these() -> None:
    note, tables, _ = collected(FakeNvml(gpus=1, unsupported=(140, 141)), ticks(1))
    lacking = "nvlink_sent_raw_total_bytes, nvlink_received_raw_total_bytes"
    assert (note.state, note.reason) == ("degraded", f"GPU 0: no {lacking} (Not Supported)")
    assert "nvlink_sent_total_bytes" in tables["samples"]["metric"].to_pylist()


def test_the_slow_gauge_is_read_of_one_gpu_at_a_time_and_kept_when_thinned() -> None:
    fake = FakeNvml(gpus=4)
    _, _, collector = collected(fake, ticks(8))
    ticks_count = len(collector._series[0].times)
    probes_count = 4  # each with two calls, as a reading has
    assert fake.calls.count("nvmlDeviceGetPcieThroughput") == 2 * (probes_count + ticks_count)
    for series in collector._series:
        column = series.metrics.index("pcie_read_bytes_per_s")
        before = int((series.rows()[:, column] > 0).sum())
        assert before in (ticks_count // 4, ticks_count // 4 + 1)
        series.thin()
        assert int((series.rows()[:, column] > 0).sum()) == before


@pytest.mark.parametrize("supported", [0, 1])
def test_the_slow_gauge_is_left_to_gpm_where_there_is_gpm(supported: int) -> None:
    class WithGpm(FakeNvml):
        def nvmlGpmQueryDeviceSupport(self, handle: int) -> SimpleNamespace:
            return SimpleNamespace(isSupportedDevice=supported)

    note, tables, _ = collected(WithGpm(gpus=1), ticks(1))
    assert ("pcie_read_bytes_per_s" in tables["samples"]["metric"].to_pylist()) != supported
    assert note.state == "ok"


def test_an_old_pynvml_answers_throttle_reasons_under_the_old_name() -> None:
    class Old(FakeNvml):
        nvmlDeviceGetCurrentClocksEventReasons = None  # type: ignore[assignment]

        def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
            return 0x8

    _, tables, _ = collected(Old(gpus=1), ticks(1))
    on = [r["metric"] for r in tables["samples"].to_pylist() if r["metric"].startswith("throttle") and r["value"]]
    assert set(on) == {"throttle_hw_slowdown_share"}


def test_a_gpu_lost_on_the_way_leaves_the_earlier_samples() -> None:
    fake = FakeNvml(gpus=1, fail_after={"nvmlDeviceGetPowerUsage": 3})  # 1 probe + 2 samples
    note, tables, _ = collected(fake, ticks(6))
    power = [r for r in tables["samples"].to_pylist() if r["metric"] == "power_w"]
    assert [r["value"] for r in power] == [700.5, 700.5]
    assert note.state == "degraded"
    assert note.set_aside_reasons == {"reading failed": note.set_aside_count}
    assert note.set_aside_count >= 4


def test_memory_is_bounded_by_thinning_to_half_the_rate() -> None:
    limit = 10 * METRICS_COUNT
    note, tables, collector = collected(
        FakeNvml(gpus=1), lambda c: c.interval_ms >= 4, max_samples_count=limit, interval_ms=1
    )
    # Thinned twice: 11 ticks -> 6 kept (5 dropped), 11 again -> 6 kept (5 dropped).
    assert collector.interval_ms == 4
    assert note.dropped_count == 10 * METRICS_COUNT
    assert 6 * METRICS_COUNT <= tables["samples"].num_rows <= limit + METRICS_COUNT
    assert "thinned to one sample in 4 ms" in note.reason
    assert note.state == "degraded"


@pytest.mark.parametrize(
    ("fake", "why"),
    [
        (FakeNvml(init_error=RuntimeError("Driver Not Loaded")), "NVML does not start: Driver Not Loaded"),
        (FakeNvml(gpus=0), "NVML shows no GPU"),
        (FakeNvml(unsupported=("nvmlDeviceGetCount",)), "NVML cannot list the GPUs: Not Supported"),
    ],
)
def test_a_refusal_is_a_note_not_an_exception(fake: FakeNvml, why: str) -> None:
    collector = NvmlCollector(nvml=fake)
    collector.start(T0)
    note, tables = collector.stop()
    assert (note.state, note.reason) == ("refused", why)
    assert tables == {}
    assert fake.inits_count == fake.shutdowns_count


def test_a_missing_pynvml_is_said_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    collector = NvmlCollector()
    collector.start(T0)
    note, _ = collector.stop()
    assert note == CollectorNote("refused", "pynvml is not installed (pip install nvidia-ml-py)")


def test_stop_without_start_and_a_second_stop_are_off() -> None:
    assert NvmlCollector(nvml=FakeNvml()).stop() == (CollectorNote("off", "not started"), {})
    fake = FakeNvml(gpus=1)
    _, _, collector = collected(fake, ticks(1))
    assert collector.stop() == (CollectorNote("off", "stopped"), {})
    assert fake.shutdowns_count == 1


def test_a_driver_that_hangs_does_not_hang_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_JOIN_SECONDS", 0.05)

    asked, answer = threading.Event(), threading.Event()

    class Hanging(FakeNvml):
        hang = False

        def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
            if self.hang:
                asked.set()
                answer.wait(60)
            return 41

    fake = Hanging(gpus=1)
    collector = NvmlCollector(interval_ms=1, nvml=fake)
    collector.start(T0)
    while not ticks(2)(collector):
        time.sleep(0.001)
    fake.hang = True
    assert asked.wait(30)
    note, tables = collector.stop()  # returns although the driver has not answered
    assert note.reason == "the driver stopped answering"
    assert tables["samples"].num_rows >= 2 * METRICS_COUNT
    assert fake.shutdowns_count == 0
    answer.set()


def test_devices_and_driver() -> None:
    with nvml.opened(FakeNvml()) as module:
        assert nvml.driver_version(module) == "580.159.04"
        assert nvml.devices(module)[1] == nvml.Gpu(1, "GPU-1", "NVIDIA H200", 4096, "00000000:01:00.0", "sm_90")


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA driver here")
def test_a_real_gpu() -> None:
    collector = NvmlCollector(interval_ms=50)
    t0_unix_ns = time.time_ns()
    collector.start(t0_unix_ns)
    time.sleep(0.5)
    note, tables = collector.stop()
    assert note.state in ("ok", "degraded"), note.reason
    values: dict[str, list[float]] = {}
    for row in tables["samples"].to_pylist():
        values.setdefault(row["metric"], []).append(row["value"])
        assert 0 <= row["t_ns"] <= time.time_ns() - t0_unix_ns
    assert min(values["sm_clock_mhz"]) > 0
    assert 0 < values["mem_used_bytes"][0] <= collector.gpus[0].mem_bytes
    assert all(0 <= share <= 1 for share in values["gpu_busy_share"])
    assert collector.gpus[0].uuid.startswith("GPU-")
    assert collector.gpus[0].sm_arch.startswith("sm_")
    assert collector.driver_version
