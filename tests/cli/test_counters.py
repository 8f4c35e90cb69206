"""``spikeprof counters`` and ``run --counters``: what they say and leave behind, over a libcupti made for tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.command import spikeprof

from spikeprof.profiler import counter_metrics, probes
from spikeprof.profiler.counter_metrics import SETS
from spikeprof.profiler.importers import open_trace


def test_readings_of_what_runs(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = spikeprof("counters", "--device", "0", "--seconds", "0.3", "-o", str(tmp_path / "t"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (read,) = [line for line in lines if line.startswith("DRAM read")]
    assert read.split()[-4:] == ["3.00", "GB/s", "3.00", "GB/s"]
    assert "L2 hit rate 100 %" in lines
    assert max(map(len, lines)) <= 80
    trace = open_trace(tmp_path / "t")
    assert trace.table("counter_samples").num_rows > 8 * 10_000
    assert trace.column("counter_samples", "start_ns").min() > -1_000_000_000
    assert trace.manifest.collectors["pm_sampling"].state == "ok"


def test_readings_as_json(pm_gpu: pytest.MonkeyPatch) -> None:
    done = spikeprof("counters", "--seconds", "0.2", "--counters", "dram_read_bytes,sm_active_share", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    read, active = answer["readings"]
    assert (read["device"], read["metric"]) == (0, "dram_read_bytes")
    # The fake reads 3 bytes a nanosecond.
    assert read["total"] == 3 * read["sampled_ns"]
    assert read["mean"] == read["highest"] == pytest.approx(3e9)
    assert (active["total"], active["mean"], active["highest"]) == (None, 0.5, 0.5)
    assert answer["trace"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--seconds", "0"), 2, "--seconds 0"),
        (("--seconds", "nan"), 2, "must be above 0"),
        (("--counters", "memroy"), 2, "did you mean memory?"),
        (("--counters-interval-us", "0.5"), 2, "must be from 1 to 10000"),
        (("--device", "3", "--seconds", "0.1"), 3, "there is no GPU 3"),
        (("--counters", "dram__bytes_reed.sum", "--seconds", "0.1"), 3, "near it: dram__bytes_read"),
    ],
)
def test_refusals_leave_nothing_behind(
    pm_gpu: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    done = spikeprof("counters", *arguments, "-o", str(tmp_path / "t"))
    assert done.returncode == code
    assert text in done.stderr
    assert not (tmp_path / "t").exists()


def test_run_takes_the_memory_set_where_no_set_is_named(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    # The program's own --counters is not ours.
    done = spikeprof("run", "-o", str(folder), "--counters", "--", "sh", "-c", "sleep 0.2; echo $0 $@", "--counters")
    assert done.returncode == 0
    assert done.stdout == "--counters\n"
    trace = open_trace(folder)
    assert set(trace.table("counter_samples").column("metric").unique().to_pylist()) >= {"dram_read_bytes"}
    assert not (folder / "spool").exists()


def test_a_run_whose_counters_are_refused_says_so_and_goes_on(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pm_gpu.setenv("FAKE_PM_FAIL", "privileges")
    done = spikeprof("run", "-o", str(tmp_path / "t"), "--counters=compute", "--", "sh", "-c", "exit 7")
    assert done.returncode == 7
    assert "no counters were sampled: GPU 0: this user may not read GPU counters" in done.stderr


@pytest.mark.parametrize("option", ["--counters=nothing", "--counters-interval-us=0.1"])
def test_a_run_with_counters_that_cannot_be_starts_nothing(tmp_path: Path, option: str) -> None:
    done = spikeprof("run", "-o", str(tmp_path / "t"), "--counters", option, "--", "sh", "-c", "touch ran")
    assert done.returncode == 2
    assert not (tmp_path / "t").exists()


def test_doctor_says_which_sets_can_be_had(pm_gpu: pytest.MonkeyPatch) -> None:
    pm_gpu.setenv("FAKE_PM_LACKS", "nvl")
    pm_gpu.setattr(counter_metrics, "SETS", {name: SETS[name] for name in ("memory", "nvlink")})
    probe = probes.pm_sampling()
    assert probe.state == "degraded"
    assert probe.detail == "--counters=memory; nvlink without nvlink_received_bytes, nvlink_sent_bytes"
    pm_gpu.delenv("FAKE_PM_LACKS")
    assert probes.pm_sampling().detail == "--counters=memory,nvlink"
    pm_gpu.setenv("FAKE_PM_FAIL", "privileges")
    refused = probes.pm_sampling()
    assert refused.state == "degraded"
    assert "NVreg_RestrictProfilingToAdminUsers=0" in refused.detail
