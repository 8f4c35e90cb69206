from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from collectors.fake_gpm import FakeGpm

from spikeprof.profiler.collectors import gpm
from spikeprof.profiler.collectors.gpm import GpmCollector
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote
from spikeprof.profiler.units import unit_of

T0 = 1_700_000_000_000_000_000
METRICS_COUNT = 15  # 11 shares, PCIe and all links both ways; two more for each link


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpm, "_REFRESH_MS", 1)
    monkeypatch.setattr(gpm, "SHORTEST_INTERVAL_MS", 2)


def collected(fake: FakeGpm, readings: int = 2, **options: Any) -> tuple[CollectorNote, dict[str, pa.Table]]:
    return until(fake, lambda c: all(len(s.times) >= readings for s in c._series), **options)


def until(
    fake: FakeGpm, done: Callable[[GpmCollector], bool], **options: Any
) -> tuple[CollectorNote, dict[str, pa.Table]]:
    collector = GpmCollector(nvml=fake, interval_ms=2, **options)
    collector.start(T0)
    deadline = time.monotonic() + 30
    while not done(collector) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert done(collector), "the sampling thread did not get there in 30 s"
    return collector.stop()


def test_percent_become_shares_and_mebibytes_bytes() -> None:
    fake = FakeGpm()
    note, tables = collected(fake)
    rows = tables["samples"].to_pylist()
    last = {r["metric"]: r["value"] for r in rows if r["device"] == 1}
    assert last["gpm_sm_active_share"] == 0.02
    assert last["gpm_occupancy_share"] == 0.03
    assert last["gpm_dram_share"] == 0.1
    assert last["gpm_pcie_written_bytes_per_s"] == 20 * 1048576
    assert last["gpm_pcie_read_bytes_per_s"] == 21 * 1048576
    assert last["gpm_nvlink_received_bytes_per_s"] == 60 * 1048576
    assert last["gpm_nvlink_sent_bytes_per_s"] == 61 * 1048576
    assert last["gpm_nvlink_1_sent_bytes_per_s"] == 65 * 1048576
    assert len(last) == METRICS_COUNT + 2 * 2
    assert all(unit_of(metric) for metric in last)
    assert (note.state, note.reason, note.records_count) == ("ok", "", len(rows))
    assert tables["samples"].schema == TABLES["samples"].arrow
    assert fake.samples == {}  # every buffer was freed
    assert fake.inits_count == fake.shutdowns_count == 1


@pytest.mark.parametrize(("link", "received"), [(0, 62), (17, 96), (18, 212), (35, 246)])
def test_links_are_numbered_as_in_nvml_h(link: int, received: int) -> None:
    assert [m.number for m in gpm.link_metrics(link)] == [received, received + 1]


def test_what_a_gpu_does_not_offer_is_asked_once_and_told() -> None:
    fake = FakeGpm(gpus=1, unsupported=(9, 60, 61))
    fake.links_count = 0
    note, tables = collected(fake, readings=4)
    assert (note.state, note.reason) == ("ok", "GPU 0: no gpm_tensor_imma_active_share, NVLink in GPM (Not Supported)")
    metrics = tables["samples"]["metric"].to_pylist()
    assert len(set(metrics)) == METRICS_COUNT - 3
    readings_count = len(metrics) // (METRICS_COUNT - 3)
    assert fake.calls.count("nvmlGpmMetricsGet") == METRICS_COUNT + readings_count


def test_a_gpu_before_hopper_does_not_take_the_others_with_it() -> None:
    note, tables = collected(FakeGpm(gpm=(1,)))
    assert note.state == "degraded"
    assert note.reason == "GPU 0: no GPM on NVIDIA H200 (it exists from Hopper, sm_90, on)"
    assert set(tables["samples"]["device"].to_pylist()) == {1}


@pytest.mark.parametrize(
    ("fake", "why"),
    [
        (FakeGpm(gpm=()), "GPU 0, GPU 1: no GPM on NVIDIA H200 (it exists from Hopper, sm_90, on)"),
        (FakeGpm(gpus=1, unsupported=("nvmlGpmQueryDeviceSupport",)), "GPU 0: no GPM (Not Supported)"),
        (FakeGpm(gpus=1, unsupported=("nvmlGpmSampleGet",)), "GPU 0: no GPM (Not Supported)"),
        (
            FakeGpm(gpus=1, instances=(3, 5)),
            "GPU 0: no GPM (MIG shows 2 instances, and which of them the program uses is not known)",
        ),
        (FakeGpm(gpus=0), "NVML shows no GPU"),
        (FakeGpm(init_error=RuntimeError("Driver Not Loaded")), "NVML does not start: Driver Not Loaded"),
    ],
)
def test_a_refusal_is_a_note_not_an_exception(fake: FakeGpm, why: str) -> None:
    collector = GpmCollector(nvml=fake)
    collector.start(T0)
    assert collector.stop() == (CollectorNote("refused", why), {})
    assert fake.samples == {}
    assert fake.inits_count == fake.shutdowns_count


def test_of_a_split_gpu_its_only_instance_is_sampled() -> None:
    fake = FakeGpm(gpus=1, instances=(5, 5))  # two compute instances of one GPU instance
    note, tables = collected(fake)
    assert (note.state, note.reason) == ("ok", "GPU 0: counted in its MIG instance 5 alone")
    assert "nvmlGpmSampleGet" not in fake.calls
    assert tables["samples"].num_rows


def test_samples_closer_than_the_refresh_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpm, "_REFRESH_MS", 10_000)
    fake = FakeGpm(gpus=1)
    collector = GpmCollector(nvml=fake, interval_ms=2)
    collector.start(T0)
    time.sleep(0.05)
    note, tables = collector.stop()
    assert fake.calls.count("nvmlGpmSampleGet") == 1
    assert note.state == "degraded"
    assert note.reason == "GPU 0: no GPM, since the run was shorter than the 10000 ms between two samples"
    assert tables["samples"].num_rows == 0


def test_a_short_interval_is_raised() -> None:
    assert GpmCollector(interval_ms=1).interval_ms == 2
    assert GpmCollector(interval_ms=500).interval_ms == 500


def test_a_gpu_lost_on_the_way_leaves_the_earlier_samples() -> None:
    fake = FakeGpm(gpus=1, fail_after={"nvmlGpmSampleGet": 3})  # the first of all, and two readings
    note, tables = until(fake, lambda c: c._series[0].failed_count > METRICS_COUNT)
    values = [r["value"] for r in tables["samples"].to_pylist() if r["metric"] == "gpm_dram_share"]
    assert values == [0.1, 0.1]
    assert note.state == "degraded"
    assert note.set_aside_reasons == {"reading failed": note.set_aside_count}


def test_metrics_that_fail_as_a_whole_are_counted() -> None:
    answered = METRICS_COUNT + 4 + 2  # each asked alone, and two readings
    fake = FakeGpm(gpus=1, fail_after={"nvmlGpmMetricsGet": answered})
    note, tables = until(fake, lambda c: c._series[0].failed_count >= METRICS_COUNT + 4)
    values = [r["value"] for r in tables["samples"].to_pylist() if r["metric"] == "gpm_dram_share"]
    assert values == [0.1, 0.1]
    assert note.state == "degraded"
    assert note.set_aside_count % (METRICS_COUNT + 4) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA driver here")
def test_a_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    collector = GpmCollector()
    collector.start(time.time_ns())
    time.sleep(1)
    note, tables = collector.stop()
    if note.state == "refused":
        pytest.skip(note.reason)
    values: dict[str, list[float]] = {}
    for row in tables["samples"].to_pylist():
        values.setdefault(row["metric"], []).append(row["value"])
    print(note)
    assert 5 <= len(values["gpm_dram_share"]) / len(collector.gpus) <= 9
    for metric, found in values.items():
        assert min(found) >= 0, metric
        assert not metric.endswith("_share") or max(found) <= 1.01, metric
