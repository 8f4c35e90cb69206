"""``spikeprof counters`` and ``run --counters``: what they say and leave behind, over a libcupti made for tests."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from cli.command import SPIKEPROF, refusal, spikeprof

from spikeprof.profiler import counter_metrics, probes, watch
from spikeprof.profiler.collectors import pm_sampling
from spikeprof.profiler.collectors.pm_files import SampledSet
from spikeprof.profiler.counter_metrics import SETS
from spikeprof.profiler.errors import OutputError
from spikeprof.profiler.importers import open_trace


def _started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SPIKEPROF, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


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


def test_samples_are_bounded(pm_gpu: pytest.MonkeyPatch) -> None:
    done = spikeprof("counters", "--seconds", "1", "--counters-samples", "1000", "--json")
    answer = json.loads(done.stdout)
    assert "(--counters-samples)" in answer["note"]["reason"]
    assert 1000 <= answer["note"]["records_count"] < 5000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_early_it_tells_what_it_has(pm_gpu: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    pm_gpu.setenv("TMPDIR", str(tmp_path))
    with _started("counters", "--seconds", "60", "-o", str(tmp_path / "t")) as child:
        deadline = time.monotonic() + 30
        while not any(path.stat().st_size for path in tmp_path.rglob("pm-0-0.bin")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # the session hears of it, too
        child.send_signal(number)
        told, errors = child.communicate(timeout=30)
    assert (child.returncode, errors) == (0, "")
    assert "DRAM read" in told
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert open_trace(tmp_path / "t").table("counter_samples").num_rows


@pytest.mark.parametrize("verb", ["counters", "run"])
def test_interrupted_before_sampling_began_it_leaves_nothing(
    pm_gpu: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    pm_gpu.setenv("FAKE_PM_FAIL", "hang")
    pm_gpu.setenv("TMPDIR", str(tmp_path))
    rest = ["--counters", "--", "sh", "-c", "touch ran"] if verb == "run" else []
    with _started(verb, "-o", str(tmp_path / "t"), *rest) as child:
        deadline = time.monotonic() + 30
        while not list(tmp_path.rglob("pm-0.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=15)
    assert (child.returncode, errors) == (130, "spikeprof: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_is_not_there_leaves_nothing(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = spikeprof("run", "-o", str(tmp_path / "t"), "--counters", "--", "no-such-command")
    assert done.returncode == 127
    assert list(tmp_path.iterdir()) == []


def test_readings_leave_out_what_is_no_number(tmp_path: Path) -> None:
    """Four samples of 10 µs and 100 bytes; of one metric a sample is NaN, of one all are, and one ends as it begins."""
    rows = np.array([[0, 0, 100, 5, np.nan]] * 5)
    rows.view(np.int64)[:, 0] = np.array([0, 1, 2, 3, 4]) * 10_000
    rows.view(np.int64)[:, 1] = np.array([1, 2, 3, 4, 4]) * 10_000
    rows[1, 3] = np.nan
    rows.tofile(tmp_path / "pm-0-0.bin")
    names = ("dram_read_bytes", "l2_sectors_count", "instructions_count")
    read, sectors = watch._readings(SampledSet(0, names, 10_000, tmp_path / "pm-0-0.bin"))
    assert (read.metric, read.total, read.sampled_ns, read.mean) == ("dram_read_bytes", 400, 40_000, 1e7)
    assert (sectors.metric, sectors.total, sectors.sampled_ns) == ("l2_sectors_count", 15, 30_000)


def test_without_a_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(OutputError, match="set TMPDIR"):
        watch.watch((0,), SETS["memory"], 1, 10_000, 0)


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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--counters=nothing"], "there is no set or metric 'nothing'; sets: memory, compute"),
        (["--counters="], "--counters='' names nothing; sets: memory"),
        (["--counters", "--counters-interval-us=0.1"], "must be from 1 to 10000"),
        (["--counters", "memory,dram_read_bytes"], "write --counters=memory,dram_read_bytes, or it is taken for the"),
    ],
)
def test_a_run_with_counters_that_cannot_be_starts_nothing(tmp_path: Path, options: list[str], expected: str) -> None:
    done = spikeprof("run", "-o", str(tmp_path / "t"), *options, "--", "sh", "-c", "touch ran")
    assert done.returncode == 2
    assert expected in refusal(done)
    assert not (tmp_path / "t").exists()


def test_doctor_says_which_sets_can_be_had(pm_gpu: pytest.MonkeyPatch) -> None:
    pm_gpu.setenv("FAKE_PM_LACKS", "nvl")
    pm_gpu.setattr(counter_metrics, "SETS", {name: SETS[name] for name in ("memory", "nvlink")})
    probe = probes.pm_sampling()
    assert probe.state == "degraded"
    assert probe.detail == "--counters=memory; nvlink without nvlink_received_bytes, nvlink_sent_bytes"
    pm_gpu.delenv("FAKE_PM_LACKS")
    assert probes.pm_sampling().detail == "--counters=memory,nvlink"
    pm_gpu.setattr(pm_sampling, "visible_gpus", lambda: (0, 1))
    second = probes.pm_sampling()
    assert second.state == "degraded"
    assert second.detail.startswith("not on every GPU: GPU 1: there is no GPU 1")
    pm_gpu.setenv("FAKE_PM_FAIL", "privileges")
    refused = probes.pm_sampling()
    assert refused.state == "degraded"
    assert "NVreg_RestrictProfilingToAdminUsers=0" in refused.detail
