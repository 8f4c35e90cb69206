"""NVML, GPM and perf events on a real machine, against what a program itself knows to have done."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from spikeprof.profiler import hardware
from spikeprof.profiler.collectors.gpm import GpmCollector
from spikeprof.profiler.collectors.nvml import NvmlCollector
from spikeprof.profiler.collectors.perf_events import PerfEventsCollector
from spikeprof.profiler.trace import CollectorNote

PROGRAM = str(Path(__file__).resolve().parent / "gauge_phases.py")
SETTLE_NS = 300_000_000  # at both ends of a phase: readings that reach over it


class Run:
    """A program of phases with both collectors beside it: ``told`` maps a phase to begin, end and bytes."""

    def __init__(self, *phases: str) -> None:
        collectors = (NvmlCollector(), GpmCollector())
        for collector in collectors:
            collector.start(0)  # so that times are Unix nanoseconds
        done = subprocess.run(
            [sys.executable, PROGRAM, *phases], capture_output=True, text=True, timeout=200, check=False
        )
        self.notes: list[CollectorNote] = []
        tables = []
        for collector in collectors:
            note, found = collector.stop()
            self.notes.append(note)
            tables += list(found.values())
        assert done.returncode == 0, done.stderr
        if self.notes[1].state == "refused":
            pytest.skip(self.notes[1].reason)
        self.told = json.loads(done.stdout)
        self.gpus = collectors[0].gpus
        self.samples = pa.concat_tables(tables)
        print([note.reason for note in self.notes])

    def values(self, metric: str, phase: str = "", device: int = 0) -> np.ndarray:
        t_ns, metrics = self.samples["t_ns"].to_numpy(), np.array(self.samples["metric"].to_pylist())
        mine = (metrics == metric) & (self.samples["device"].to_numpy() == device)
        if phase:
            begin, end, _ = self.told[phase]
            mine &= (t_ns > begin + SETTLE_NS) & (t_ns < end - SETTLE_NS)
        found = self.samples["value"].to_numpy()[mine]
        assert len(found), f"no reading of {metric} in {phase}"
        return found

    def rate(self, phase: str) -> float:
        begin, end, size_bytes = self.told[phase]
        return size_bytes / (end - begin) * 1e9


@pytest.fixture(scope="module")
def run() -> Run:
    return Run("gemm", "stream", "to_device", "to_host", "idle")


def test_gpm_tells_tensor_work_from_memory_work(run: Run) -> None:
    assert run.values("gpm_sm_active_share", "gemm").mean() > 0.8
    assert run.values("gpm_tensor_active_share", "gemm").mean() > 0.3
    assert run.values("gpm_tensor_hmma_active_share", "gemm").mean() > 0.3
    assert run.values("gpm_tensor_active_share", "stream").mean() < 0.01
    assert run.values("gpm_sm_active_share", "idle").mean() < 0.05


def test_gpm_dram_share_is_that_of_the_bytes_moved(run: Run) -> None:
    gpu = hardware.lookup(run.gpus[0].name)
    if gpu is None or gpu.dram_bytes_per_s is None:
        pytest.skip(f"the bandwidth of {run.gpus[0].name} is not known")
    told = run.rate("stream") / gpu.dram_bytes_per_s.value
    averaged = run.values("gpm_dram_share", "stream").mean()
    print(f"moved {told:.3f} of the peak, GPM {averaged:.3f}")
    assert averaged == pytest.approx(told, rel=0.1)


@pytest.mark.parametrize(("phase", "metric"), [("to_device", "pcie_read"), ("to_host", "pcie_written")])
def test_pcie_rates_are_those_of_the_copies(run: Run, phase: str, metric: str) -> None:
    told = run.rate(phase)
    averaged = run.values(f"gpm_{metric}_bytes_per_s", phase).mean()
    print(f"{phase}: copied {told / 1e9:.2f} GB/s, GPM {averaged / 1e9:.2f}")
    # The link's own headers come on top: up to 24 bytes for every 128 or 256 of payload.
    assert 0.98 * told < averaged < 1.25 * told


def test_energy_is_what_the_power_adds_up_to(run: Run) -> None:
    energy = np.ptp(run.values("energy_j", "gemm"))
    begin, end, _ = run.told["gemm"]
    seconds = (end - begin - 2 * SETTLE_NS) / 1e9
    assert energy / seconds == pytest.approx(run.values("power_w", "gemm").mean(), rel=0.25)


def test_nvlink_counters_are_those_of_a_peer_copy() -> None:
    if len(list(Path("/dev").glob("nvidia[0-9]*"))) < 2:
        pytest.skip("one GPU: no NVLink peer")
    run = Run("peer", "idle")
    if any("no NVLink" in note.reason for note in run.notes):
        pytest.skip(run.notes[0].reason)
    size_bytes = run.told["peer"][2]
    sent = np.ptp(run.values("nvlink_sent_total_bytes", device=0))
    received = np.ptp(run.values("nvlink_received_total_bytes", device=1))
    print(f"copied {size_bytes}, sent {sent:.0f}, received {received:.0f}")
    assert sent == pytest.approx(size_bytes, rel=1e-3)
    assert received == pytest.approx(size_bytes, rel=1e-3)
    averaged = run.values("gpm_nvlink_sent_bytes_per_s", "peer").mean()
    assert averaged == pytest.approx(run.rate("peer"), rel=0.15)
    links = [m for m in set(run.samples["metric"].to_pylist()) if m.startswith("gpm_nvlink_") and m[11].isdigit()]
    by_link = sum(run.values(m, "peer").mean() for m in links if m.endswith("_sent_bytes_per_s"))
    assert by_link == pytest.approx(averaged, rel=0.05)


def test_cpu_caches_of_a_program_that_walks_through_memory() -> None:
    collector = PerfEventsCollector()
    collector.start(time.time_ns())
    walk = "import numpy as np; a = np.ones(1 << 26); [a.sum() for _ in range(10)]"  # 512 MiB, ten times
    subprocess.run([sys.executable, "-c", walk], check=True)
    note, tables = collector.stop()
    if note.state == "refused":
        pytest.skip(note.reason)
    totals: dict[str, float] = {}
    for row in tables["cpu_cache"].to_pylist():
        totals[row["metric"]] = totals.get(row["metric"], 0.0) + row["value_count"]
    lines_count = 10 * (1 << 29) / 64
    print(note.reason, totals)
    assert totals["l1d_read_count"] > 0.9 * lines_count
    assert totals["l1d_read_miss_count"] < totals["l1d_read_count"]
