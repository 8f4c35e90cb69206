"""The sampler processes over a libcupti in C: what they write, and what they say where they cannot."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spikeprof.profiler.collecting import Collected, gpu_numbers
from spikeprof.profiler.collectors import pm_files, pm_sampling
from spikeprof.profiler.collectors.nvml import Gpu
from spikeprof.profiler.collectors.pm_sampler import EXIT_STUCK, Order
from spikeprof.profiler.collectors.pm_sampling import PmSamplingCollector
from spikeprof.profiler.collectors.pm_writer import computed, packed, resolved, sources
from spikeprof.profiler.counter_metrics import METRICS, SETS, metrics_of
from spikeprof.profiler.errors import UsageError
from spikeprof.profiler.trace import CollectorNote

pytestmark = pytest.mark.timeout(60)


def sampled(
    folder: Path,
    metrics: tuple[str, ...] = SETS["memory"],
    seconds: float = 0.3,
    interval_ns: int = 100_000,
    max_samples: int = 0,
    devices: tuple[int, ...] = (0,),
) -> tuple[CollectorNote, list[pm_files.SamplerFiles]]:
    collector = PmSamplingCollector(devices, metrics, interval_ns, folder, max_samples)
    collector.start(time.time_ns())
    time.sleep(seconds)
    note, tables = collector.stop()
    assert tables == {}
    return note, pm_files.read(folder)


def told_shares(note: CollectorNote) -> list[float]:
    return [int(percent) / 100 for percent in re.findall(r"sampled (\d+) % of the time", note.reason)]


def test_rows_carry_our_metrics_on_the_unix_clock(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    began = time.time_ns()
    note, (files,) = sampled(tmp_path)
    assert note.state == "ok", note
    (one,) = files.sets
    assert one.metrics == SETS["memory"]
    times, values = one.times(), one.values()
    assert note.records_count == len(times) > 1000
    assert (times[:, 1] - times[:, 0] == 100_000).all()
    assert began < times[0, 0] < times[-1, 1] < time.time_ns()
    column = dict(zip(one.metrics, values.T, strict=True))
    assert (column["dram_read_bytes"] == 300_000).all()
    assert (column["l2_sectors_count"] == 200_000).all()
    assert (column["l2_hit_sectors_count"] == 200_000).all()  # CUPTI's 50 % are all of them
    assert (column["sm_active_share"] == 0.5).all()
    assert files.finished
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.glob("pm-*")} == {"0o600"}


def test_a_sample_that_cupti_does_not_give_is_none(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of four in a row, one without values and one without times: neither is a sample of zeros, or one twice."""
    pm_gpu.setenv("FAKE_PM_FAIL", "some")
    _, (files,) = sampled(tmp_path, ("dram_read_bytes",))
    times, values = files.sets[0].times(), files.sets[0].values()[:, 0]
    first, refused = times[:, 0] > 0, np.isnan(values)
    assert (values[first & ~refused] == 300_000).all()
    assert len(set(times[first, 0].tolist())) == np.count_nonzero(first)
    assert 0.2 < refused.mean() < 0.3
    assert 0.2 < (~first).mean() < 0.3


def test_it_stands_still_where_decoding_does_not_keep_up(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pm_gpu.setenv("FAKE_PM_DECODE_US", "30")
    note, (files,) = sampled(tmp_path, seconds=1.5, interval_ns=10_000)
    times = files.sets[0].times()
    assert (times[:, 1] - times[:, 0] == 10_000).all()
    gaps = times[1:, 0] - times[:-1, 1]
    assert (gaps >= 0).all()
    # Stretches without a gap in them, over the whole time: what was taken while sampling stood still is no sample.
    stretches = np.split(np.arange(len(times)), np.flatnonzero(gaps > 0) + 1)
    assert len(stretches) >= 8
    assert min(map(len, stretches[:-1])) > 1000
    assert times[-1, 1] - times[0, 0] > 1_200_000_000
    covered = (times[:, 1] - times[:, 0]).sum() / (times[-1, 1] - times[0, 0])
    assert 0.1 < covered < 0.6
    # Told for the time until it was stopped: up to one more gap.
    assert told_shares(note) == [pytest.approx(covered, abs=0.06)]
    assert files.paused_ns > 300_000_000
    assert files.overflows_count == 0


def test_it_goes_on_without_gaps_where_decoding_keeps_up(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pm_gpu.setenv("FAKE_PM_DECODE_US", "20")
    _, (files,) = sampled(tmp_path, seconds=1.5, interval_ns=100_000)
    times = files.sets[0].times()
    gaps = times[1:, 0] - times[:-1, 1]
    assert (gaps > 0).sum() <= 2  # the first stretch, which tells how long decoding takes
    assert (times[:, 1] - times[:, 0]).sum() > 0.8 * (times[-1, 1] - times[0, 0])


def test_samples_that_ran_over_are_told_and_sampling_goes_on(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pm_gpu.setenv("FAKE_PM_ROOM", "700")
    pm_gpu.setenv("FAKE_PM_DECODE_US", "30")
    note, (files,) = sampled(tmp_path, seconds=1.0, interval_ns=10_000)
    assert files.overflows_count > 1
    assert note.state == "degraded"
    assert "ran over" in note.reason
    assert len(files.sets[0].times()) > 1000


def test_a_unit_that_the_gpu_lacks_costs_only_its_own_metrics(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pm_gpu.setenv("FAKE_PM_LACKS", "nvl")
    note, (files,) = sampled(tmp_path, (*SETS["memory"], *SETS["nvlink"]))
    assert set(files.missing) == {"nvlink_sent_bytes", "nvlink_received_bytes"}
    assert {m for s in files.sets for m in s.metrics} == {*SETS["memory"], "pcie_read_bytes", "pcie_written_bytes"}
    assert sum(len(s.times()) for s in files.sets) > 500
    assert note.state == "degraded"
    assert "no nvlink_sent_bytes (this GPU delivers no nvltx counters)" in note.reason


def test_what_one_pass_cannot_take_takes_turns(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pm_gpu.setenv("FAKE_PM_APART", "dram__bytes_read.sum")
    note, (files,) = sampled(tmp_path, ("l2_sectors_count", "dram_read_bytes"), seconds=3.6)
    assert [s.metrics for s in files.sets] == [("l2_sectors_count",), ("dram_read_bytes",)]
    first, second = (s.times() for s in files.sets)
    assert len(first) > 100
    assert len(second) > 100
    assert second[0, 0] > first[:, 1].max()
    assert note.state == "ok"
    # Of the same time, of which the first one's turn took 3 s.
    shares = told_shares(note)
    assert shares[0] > 0.5 > shares[1] > 0
    assert sum(shares) <= 1


def test_a_turn_that_never_came_is_told(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pm_gpu.setenv("FAKE_PM_APART", "dram__bytes_read.sum")
    note, _ = sampled(tmp_path, ("l2_sectors_count", "dram_read_bytes"), seconds=0.3)
    assert note.state == "degraded"
    assert "GPU 0: no dram_read_bytes (it ended before their turn: one pass cannot take all)" in note.reason
    assert len(told_shares(note)) == 1


def test_the_budget_ends_sampling_and_says_so(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note, (files,) = sampled(tmp_path, max_samples=1000, seconds=0.5)
    assert 1000 <= len(files.sets[0].times()) < 3300
    assert "--counters-samples" in note.reason
    assert note.state == "degraded"


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({"FAKE_PM_FAIL": "privileges"}, "NVreg_RestrictProfilingToAdminUsers=0"),
        ({"FAKE_PM_FAIL": "busy"}, "another tool holds the GPU's counters"),
        ({"FAKE_PM_FAIL": "crash"}, "the sampler crashed (SIGABRT)"),
        ({"FAKE_CUDA_INIT": "100"}, "the driver sees no GPU (100)"),
    ],
)
def test_refusals(pm_gpu: pytest.MonkeyPatch, tmp_path: Path, wish: dict[str, str], expected: str) -> None:
    for name, value in wish.items():
        pm_gpu.setenv(name, value)
    note, _ = sampled(tmp_path, seconds=0)
    assert note.state == "refused"
    assert expected in note.reason
    assert note.records_count == 0


def test_no_such_gpu_beside_one_that_is_there(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note, _ = sampled(tmp_path, devices=(0, 1))
    assert note.state == "degraded"
    assert "GPU 1: there is no GPU 1" in note.reason
    assert note.records_count > 0


def test_a_metric_that_the_chip_does_not_know_costs_no_other(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note, (files,) = sampled(tmp_path, ("dram_read_bytes", "shared_conflicts_count"))
    assert [s.metrics for s in files.sets] == [("dram_read_bytes",)]
    assert note.state == "degraded"
    assert "no shared_conflicts_count (GH100 has no metric 'l1tex__data_bank_conflicts" in note.reason


def test_an_unknown_metric_of_cuptis_is_named_with_its_neighbours(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note, _ = sampled(tmp_path, ("dram__bytes_reed.sum",), seconds=0)
    assert note.state == "refused"
    assert "GH100 has no metric 'dram__bytes_reed.sum'; near it: dram__bytes_read" in note.reason


def test_cuptis_own_names_are_taken_as_they_are(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, (files,) = sampled(tmp_path, ("pcie__read_bytes.sum",))
    assert files.sets[0].metrics == ("pcie__read_bytes.sum",)
    assert (files.sets[0].values() == 1).all()


def test_without_a_driver(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pm_gpu.delenv("LD_LIBRARY_PATH")
    note, _ = sampled(tmp_path, seconds=0)
    assert note.state == "refused"
    assert "no NVIDIA driver" in note.reason


def test_the_samplers_end_with_the_session(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Killed, the session cannot tell them: the end of their standard input does."""
    collector = PmSamplingCollector((0,), SETS["memory"], 100_000, tmp_path, 0)
    collector.start(0)
    child = collector._children[0]
    assert child.stdin is not None
    os.close(child.stdin.fileno())
    assert child.wait(10) == 0
    assert pm_files.read(tmp_path)[0].finished


def test_a_sampler_that_is_killed_did_not_sample_the_rest(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    collector = PmSamplingCollector((0,), SETS["memory"], 100_000, tmp_path, 0)
    collector.start(0)
    time.sleep(0.3)
    collector._children[0].kill()
    time.sleep(0.9)
    note, _ = collector.stop()
    assert note.state == "degraded"
    assert "the sampler crashed (SIGKILL)" in note.reason
    (share,) = told_shares(note)
    assert 0 < share < 0.5


def test_a_sampler_that_does_not_get_ready_is_not_waited_for(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pm_gpu.setenv("FAKE_PM_FAIL", "hang")
    pm_gpu.setattr(pm_sampling, "_READY_SECONDS", 0.5)
    began = time.monotonic()
    note, _ = sampled(tmp_path, seconds=0)
    assert time.monotonic() - began < 10  # and not 20 for its end
    assert note.state == "refused"
    assert note.reason == "GPU 0: the sampler was not ready after 0.5 s; GPU 0: the sampler did not end and was killed"


def test_a_sampler_that_is_stuck_outlives_its_session_for_a_while_only(
    pm_gpu: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pm_gpu.setenv("FAKE_PM_FAIL", "hang")
    order = {"device": 0, "metrics": ["dram_read_bytes"], "interval_ns": 10_000, "folder": str(tmp_path)}
    program = (
        "from spikeprof.profiler.collectors import pm_sampler\n"
        f"pm_sampler.STUCK_SECONDS = 0.2\npm_sampler.main({json.dumps(json.dumps({**order, 'max_samples': 0}))})"
    )
    done = subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, timeout=30, check=False)
    assert done.returncode == EXIT_STUCK


def test_what_lies_in_the_working_folder_is_not_imported(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('the program has a queue of its own')")
    pm_gpu.chdir(tmp_path)
    (tmp_path / "spool").mkdir()
    note, _ = sampled(tmp_path / "spool", seconds=0.2)
    assert note.state == "ok", note.reason


def test_a_sampler_that_fails_before_it_can_write_is_quoted(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pm-0.jsonl").mkdir()
    note, _ = sampled(tmp_path, seconds=0.2)
    assert note.state == "refused"
    assert "the sampler ended by itself (IsADirectoryError" in note.reason


@pytest.mark.parametrize("also_events", [False, True])
def test_a_full_disk(pm_gpu: pytest.MonkeyPatch, tmp_path: Path, also_events: bool) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full, which is a full disk")
    (tmp_path / "pm-0-0.bin").symlink_to("/dev/full")
    if also_events:
        (tmp_path / "pm-0.jsonl").symlink_to("/dev/full")
    note, _ = sampled(tmp_path, seconds=0.3)
    assert note.state == "refused"
    assert "the disk is full" in note.reason
    # It ended at once, and did not sample on for nothing.
    events = "" if also_events else (tmp_path / "pm-0.jsonl").read_text()
    assert events.count("paused") < 5


def test_file_descriptors_beyond_a_thousand(pm_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[1] < 2048:
        pytest.skip(f"at most {limits[1]} files can be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        note, _ = sampled(tmp_path, seconds=0.2)
    finally:
        for number in files:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert note.state == "ok", note.reason


def test_off_when_never_started(tmp_path: Path) -> None:
    collector = PmSamplingCollector((0,), SETS["memory"], 100_000, tmp_path, 0)
    assert collector.stop()[0].state == "off"


# -- names and arithmetic ----------------------------------------------------------------------------------


def test_metrics_of() -> None:
    assert metrics_of("memory") == SETS["memory"]
    assert metrics_of("dram_read_bytes, lts__t_bytes.sum") == ("dram_read_bytes", "lts__t_bytes.sum")
    both = metrics_of("memory,compute")
    assert len(both) == len(set(both)) == len({*SETS["memory"], *SETS["compute"]})
    with pytest.raises(UsageError, match="did you mean memory"):
        metrics_of("memry")
    with pytest.raises(UsageError, match="names nothing"):
        metrics_of(" , ")


@pytest.mark.parametrize("interval_ns", [999, 10_000_001])
def test_an_interval_out_of_range(interval_ns: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--counters-interval-us"):
        PmSamplingCollector((0,), SETS["memory"], interval_ns, tmp_path, 0)


def test_every_set_is_of_known_metrics() -> None:
    assert all(name in METRICS for names in SETS.values() for name in names)


def test_computed_multiplies_a_rate_by_what_it_is_of() -> None:
    metrics = resolved(["l2_hit_sectors_count", "sm_active_share"])
    names = sources(metrics)
    raw = np.array([[25.0, 400.0, 80.0], [-10.0, 100.0, 0.0]])
    assert names == [
        "lts__average_t_sector_hit_rate_realtime.pct",
        "lts__t_sectors.sum",
        "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    ]
    # Twice 25 % of 400 sectors (see the metric); a rate below 0 is kept: sums stay right.
    assert computed(metrics, names, raw) == pytest.approx(np.array([[200.0, 0.8], [-20.0, 0.0]]))


def test_packed_keeps_the_order_and_opens_few_lists() -> None:
    metrics = resolved(["dram_read_bytes", "l2_sectors_count", "l1_sectors_count", "dram_written_bytes"])
    lists = packed(metrics, lambda names: len({name.split("__")[0] for name in names} - {"dram"}) or 1)
    assert [[m.name for m in found] for found in lists] == [
        ["dram_read_bytes", "l2_sectors_count", "dram_written_bytes"],
        ["l1_sectors_count"],
    ]


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "pm-0-0.bin"
    rows = np.zeros((3, 4))
    path.write_bytes(rows.tobytes()[:-8])
    one = pm_files.SampledSet(0, ("a", "b"), 10_000, path)
    assert one.values().shape == (2, 2)
    assert pm_files.SampledSet(0, ("a",), 10_000, tmp_path / "none").times().shape == (0, 2)


def test_the_share_sampled_is_that_of_samples_that_can_be(tmp_path: Path) -> None:
    """Eight of ten samples; one is zeros, one ends years later."""
    rows = np.zeros((10, 3))
    rows.view(np.int64)[:, 0] = 1000 + np.arange(10) * 10
    rows.view(np.int64)[:, 1] = 1010 + np.arange(10) * 10
    rows[4] = 0
    rows.view(np.int64)[7, 1] = 2**62
    rows.tofile(tmp_path / "pm-0-0.bin")
    files = pm_files.SamplerFiles(0, [pm_files.SampledSet(0, ("a",), 10, tmp_path / "pm-0-0.bin")])
    assert told_shares(pm_sampling.note_of([files])) == [0.8]
    assert told_shares(pm_sampling.note_of([files], span=(900, 1100))) == [0.4]


def test_damaged_events_are_passed_over(tmp_path: Path) -> None:
    good = '{"ev": "set", "number": 0, "metrics": ["a"], "interval_ns": 5}'
    (tmp_path / "pm-0.jsonl").write_text(f'{good}\nno json\n{{"ev": "set"}}\n[1]\n{{"ev": "overflow"}}\n{{"ev"')
    (tmp_path / "pm-x.jsonl").write_text(good)
    (files,) = pm_files.read(tmp_path)
    assert [s.metrics for s in files.sets] == [("a",)]
    assert (files.overflows_count, files.finished) == (1, False)


@given(st.binary(max_size=300))
@example(b'{"ev": "paused", "ns": Infinity}')
@example(b"[" * 100_000)
def test_foreign_bytes_among_the_events_cost_no_other(foreign: bytes) -> None:
    good = b'{"ev": "set", "number": 0, "metrics": ["a"], "interval_ns": 5}'
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pm-0.jsonl").write_bytes(good + b"\n" + foreign + b"\n" + good)
        (files,) = pm_files.read(Path(folder))
        assert [files.sets[0].metrics, files.sets[-1].metrics] == [("a",), ("a",)]


def test_files_of_no_gpu_are_passed_over(tmp_path: Path) -> None:
    for name in ("pm-x.jsonl", "pm-².jsonl", "pm-99999999999999999999.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "pm-1.jsonl").mkdir()
    assert pm_files.read(tmp_path) == []


def _gpus(*names: str) -> list[Gpu]:
    return [Gpu(i, f"GPU-{i}f5e", name, 0, "", "") for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (0, 1, 2)),
        ("", (0, 1, 2)),
        ("2,0", (2, 0)),
        (" 1 ,1,", (1,)),
        ("GPU-2f", (2,)),
        ("GPU-1f5e,0", (1, 0)),
        ("MIG-0a1b", (0, 1, 2)),
        ("-1", (0, 1, 2)),
        ("7", (0, 1, 2)),
        ("\x00é²", (0, 1, 2)),
    ],
)
def test_the_gpus_that_the_program_can_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: tuple[int, ...]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_VISIBLE_DEVICES": visible})
    assert pm_sampling.visible_gpus(_gpus("H200", "H200", "H200")) == expected
    assert pm_sampling.visible_gpus([]) == (0,)


def test_numbers_that_cuda_gave_by_speed_mean_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert pm_sampling.visible_gpus(_gpus("T4", "H200")) == (0, 1)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert pm_sampling.visible_gpus(_gpus("T4", "H200")) == (1,)


def test_which_gpu_a_number_means_is_known_to_who_puts_it_together_later(tmp_path: Path) -> None:
    folder = tmp_path / pm_files.FOLDER
    folder.mkdir()
    assert gpu_numbers(tmp_path, Collected()) == {}
    pm_files.write_gpus(folder, {"GPU-0f5e": 3})
    assert gpu_numbers(tmp_path, Collected()) == {"GPU-0f5e": 3}
    assert gpu_numbers(tmp_path, Collected(ordinals={"GPU-1": 1})) == {"GPU-1": 1}
    for damaged in (b"", b"[]", b'{"GPU-0": "x"}', b"\xff\xfe"):
        (folder / "gpus.json").write_bytes(damaged)
        assert pm_files.read_gpus(folder) == {}


def test_an_order_is_what_the_session_writes() -> None:
    assert Order(0, ("a",), 10, "f", 0).max_samples == 0
