from __future__ import annotations

import time
from pathlib import Path

import pytest
from collectors import fake_cuda

from spikeprof.profiler.collectors import copy_probe
from spikeprof.profiler.collectors.copy_probe import Copies, measure, with_copies
from spikeprof.profiler.collectors.nvml import Gpu
from spikeprof.profiler.collectors.nvml_links import GpuLinks, Machine, Pair, Pcie
from spikeprof.profiler.collectors.topology import topology_table

A, B = fake_cuda.UUIDS[:2]
MIB = 1 << 20
NOTHING_HELD = "memory 0 host 0 contexts 0 streams 0 events 0\n"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fake libcuda, compiled once."""
    return str(fake_cuda.built(tmp_path_factory.mktemp("cuda")))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "held"
    monkeypatch.setenv("FAKE_CUDA_LOG", str(path))
    return path


def test_every_ordered_pair_and_both_ways_to_the_host_are_the_median_of_the_repeats(library: str, log: Path) -> None:
    copies = measure(library, size_bytes=MIB)
    assert copies.reasons == {}
    # The warm-up takes ten times as long and one repeat three times: a mean or a maximum would give another number.
    expected = {
        ("host", A): 50e9,
        (A, "host"): 40e9,
        ("host", B): 51e9,
        (B, "host"): 41e9,
        (A, B): 400e9,
        (B, A): 390e9,
    }
    assert copies.bytes_per_s == pytest.approx(expected, rel=1e-4)  # times are float32 milliseconds
    assert log.read_text() == NOTHING_HELD


def test_without_peer_access_the_staged_copy_is_timed(library: str, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_NO_PEERS", "1")
    assert measure(library, size_bytes=MIB).bytes_per_s[A, B] == pytest.approx(20e9, rel=1e-4)


@pytest.mark.parametrize(
    ("fails", "measured", "why"),
    [
        ("cuMemAlloc_v2", 0, "cuMemAlloc: out of memory (2)"),
        ("cuDevicePrimaryCtxRetain", 0, "cuDevicePrimaryCtxRetain: out of memory (2)"),
        ("cuMemHostAlloc", 2, "cuMemHostAlloc: out of memory (2)"),
        ("cuMemcpyPeerAsync", 4, "cuMemcpyPeerAsync: out of memory (2)"),
        ("cuCtxEnablePeerAccess", 4, "cuCtxEnablePeerAccess: out of memory (2)"),
        ("cuEventElapsedTime", 0, "cuEventElapsedTime: out of memory (2)"),
    ],
)
def test_what_the_driver_refuses_has_its_reason_and_everything_is_given_back(
    library: str, log: Path, monkeypatch: pytest.MonkeyPatch, fails: str, measured: int, why: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", fails)
    copies = measure(library, size_bytes=MIB)
    assert len(copies.bytes_per_s) == measured
    assert len(copies.reasons) == 6 - measured
    assert set(copies.reasons.values()) == {why}
    assert log.read_text() == NOTHING_HELD


def test_at_most_a_quarter_of_the_free_memory_is_taken(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_FREE", str(8 * MIB))
    assert measure(library, size_bytes=2 * MIB).reasons == {}
    refused = measure(library, size_bytes=2 * MIB + 1)
    assert refused.bytes_per_s == {}
    assert set(refused.reasons.values()) == {"memory is short: 8 MiB free on the GPU"}


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("FAKE_CUDA_GPUS", "0", "cuInit: no CUDA-capable device is detected (100)"),
        ("FAKE_CUDA_FAIL", "cuDeviceGetCount", "cuDeviceGetCount: out of memory (2)"),
    ],
)
def test_one_reason_serves_all_when_nothing_can_be_copied(
    library: str, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert measure(library) == Copies(reason=why)


def test_without_libcuda_the_reason_is_the_loader_s() -> None:
    copies = measure("libcuda-not-here.so")
    assert (copies.bytes_per_s, copies.reasons) == ({}, {})
    assert copies.reason.startswith("libcuda-not-here.so: cannot open shared object file")


def test_a_crash_leaves_what_was_measured(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_CRASH", "cuMemcpyPeerAsync")
    copies = measure(library, size_bytes=MIB)
    assert set(copies.bytes_per_s) == {("host", A), (A, "host"), ("host", B), (B, "host")}
    assert copies.reason == "the copy process was ended by SIGABRT"


def test_a_hang_ends_at_the_time_limit_and_leaves_what_was_measured(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_HANG", "cuMemcpyPeerAsync")
    began = time.monotonic()
    copies = measure(library, size_bytes=MIB, timeout_seconds=2)
    assert time.monotonic() - began < 20
    assert len(copies.bytes_per_s) == 4
    assert copies.reason == "the copies did not end within 2 s"


def test_a_process_that_cannot_be_started_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_probe.sys, "executable", "/no/such/python")
    assert measure().reason == "the copy process cannot be started: No such file or directory"


def test_results_find_their_rows_by_uuid_whatever_the_order_of_cuda() -> None:
    gpus = tuple(
        Gpu(index, uuid, "H200", 1, f"00000000:0{index + 1}:00.0", "sm_90") for index, uuid in ((0, B), (1, A))
    )
    links = tuple(GpuLinks(g, (), 0, 0, None, Pcie(5, 5, 16, 16), -1) for g in gpus)
    pair = Pair("ok", "", "PIX")
    table = topology_table(Machine(links, {(0, 1): pair, (1, 0): pair}))
    copies = Copies({(A, B): 390e9, ("host", A): 50e9}, {(B, A): "why"}, "the copies did not end")
    rows = with_copies(table, gpus, copies).to_pylist()
    assert {(r["src_device"], r["dst_device"]): (r["measured_bytes_per_s"], r["measured_reason"]) for r in rows} == {
        (1, 0): (390e9, ""),
        (0, 1): (None, "why"),
        (-1, 1): (50e9, ""),
        (1, -1): (None, "the copies did not end"),
        (-1, 0): (None, "the copies did not end"),
        (0, -1): (None, "the copies did not end"),
    }
