from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from cli.command import Here, refusal, runner, spikeprof
from cli.traces import launch_bound, sound
from scanned import scan

from spikeprof.profiler import store
from spikeprof.profiler.schema import SCHEMA_VERSION

NOT_ROOT = pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    return runner(monkeypatch, capfd)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return launch_bound(tmp_path / "my trace")


def test_the_summary_and_the_next_command(trace: Path) -> None:
    run = spikeprof("analyze", trace)
    assert (run.returncode, run.stderr) == (0, "")
    assert "[launch-bound]" in run.stdout
    assert run.stdout.endswith(f"\nnext: spikeprof report '{trace}' -o report.html\n")


def test_json_is_all_that_standard_output_holds(trace: Path) -> None:
    run = spikeprof("analyze", trace, "--json")
    report = json.loads(run.stdout)
    assert report["trace_name"] == "my trace"
    assert report["results"][0]["analyzer"] == "truth"


def test_json_file_is_private_and_may_be_replaced(here: Here, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    for _ in range(2):
        run = here("analyze", trace, "-o", out)
        assert (run.returncode, run.stderr) == (0, "")
    assert "[launch-bound]" in run.stdout
    assert json.loads(out.read_text())["trace_name"] == "my trace"
    assert out.stat().st_mode & 0o777 == 0o600


def test_the_current_folder_has_a_name_too(trace: Path) -> None:
    assert json.loads(spikeprof("analyze", ".", "--json", cwd=trace).stdout)["trace_name"] == "my trace"


def test_fail_on_names_what_failed(trace: Path) -> None:
    run = spikeprof("analyze", trace, "--fail-on", "warning", "--json")
    assert run.returncode == 1
    assert "spikeprof: --fail-on warning: launch-bound\n" in run.stderr
    assert json.loads(run.stdout)["version"] == 1
    assert spikeprof("analyze", trace, "--fail-on", "critical").returncode == 0


def test_fail_on_names_rules(here: Here, trace: Path) -> None:
    run = here("analyze", trace, "--fail-on", "many-tiny-kernels, launch-bound")
    assert run.returncode == 1
    assert "spikeprof: --fail-on many-tiny-kernels, launch-bound: launch-bound\n" in run.stderr
    assert here("analyze", trace, "--fail-on", "sync-bound").returncode == 0
    refused = here("analyze", trace, "--fail-on", "overflow,never")
    assert refused.returncode == 2
    assert refusal(refused).startswith(
        "--fail-on overflow,never: 'never' is no rule; write warning, critical, or rules"
    )


def test_a_rule_that_could_not_be_looked_for_does_not_pass(here: Here, trace: Path) -> None:
    run = here("analyze", trace, "--fail-on", "overflow")
    assert run.returncode == 1
    assert "overflow: not measured (the table 'tensor_stats' was not collected): spikeprof run --numerics" in run.stderr


def test_a_rule_that_had_nothing_to_judge_does_not_pass(here: Here, tmp_path: Path) -> None:
    folder = store.create_folder(tmp_path / "numerics")
    nothing = tiny.trace(tensor_stats=[])
    picked = replace(nothing.manifest, options={"numerics_modules": "['layer.*']"})
    store.write_trace(folder, replace(nothing, manifest=picked))
    run = here("analyze", folder, "--fail-on", "overflow")
    why = "no watched tensor was scanned while recording: modules were picked by 'layer.*'"
    assert run.returncode == 1
    assert f"--fail-on overflow: overflow: not measured ({why})\n" in run.stderr
    assert here("analyze", folder, "--fail-on", "warning").returncode == 1
    assert here("analyze", folder).returncode == 0


@pytest.mark.parametrize(("inf_count", "code"), [(0, 0), (1, 1)])
def test_fail_on_overflow(here: Here, tmp_path: Path, inf_count: int, code: int) -> None:
    folder = store.create_folder(tmp_path / "numerics")
    store.write_trace(folder, tiny.trace(tensor_stats=[scan(0, 0, "a"), scan(1, 0, "a", inf_count=inf_count)]))
    run = here("analyze", folder, "--fail-on", "overflow")
    assert run.returncode == code
    assert ("spikeprof: --fail-on overflow: overflow\n" in run.stderr) is (code == 1)


def test_fail_on_passes_a_sound_trace(here: Here, tmp_path: Path) -> None:
    run = here("analyze", sound(tmp_path / "trace"), "--fail-on", "warning")
    assert (run.returncode, run.stderr) == (0, "")


def test_a_trace_in_which_nothing_could_be_looked_at_does_not_pass(here: Here, trace: Path) -> None:
    for table in trace.glob("*.parquet"):
        table.unlink()
    run = here("analyze", trace, "--fail-on", "critical")
    assert run.returncode == 1
    assert "nothing was measured that could pass" in run.stderr
    assert here("analyze", trace).returncode == 0


def test_a_corrupt_table_leaves_the_rest(trace: Path) -> None:
    (trace / "runtime_calls.parquet").write_bytes(b"PAR1 and then nothing")
    run = spikeprof("analyze", trace)
    assert (run.returncode, run.stderr) == (0, "")
    assert "runtime_calls.parquet is damaged" in " ".join(run.stdout.split())
    assert "Kernels by time" in run.stdout


def flip_a_bit(file: Path) -> None:
    """Damage that the footer does not show: it comes to light when the pages are read."""
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 0xFF
    file.write_bytes(data)


def test_damage_that_shows_on_reading_is_no_bug_of_ours_and_does_not_pass(trace: Path) -> None:
    flip_a_bit(trace / "kernels.parquet")
    run = spikeprof("analyze", trace)
    told = " ".join(run.stdout.split())
    assert (run.returncode, run.stderr) == (0, "")
    assert "? Origin not measured: kernels.parquet is damaged: " in told
    assert "? Records kernels not measured: kernels.parquet is damaged: " in told
    assert "! Damaged kernels: kernels.parquet is damaged: " in told
    assert "internal error" not in told
    run = spikeprof("analyze", trace, "--fail-on", "critical")
    assert run.returncode == 1
    assert "--fail-on critical: kernels.parquet is damaged: " in run.stderr


def manifest(trace: Path, **changes: object) -> None:
    path = trace / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_bad_inputs_end_with_3_and_one_sentence(here: Here, trace: Path, tmp_path: Path) -> None:
    missing = here("analyze", tmp_path / "nowhere")
    assert f"there is no {tmp_path / 'nowhere'}" in refusal(missing)
    (tmp_path / "empty").mkdir()
    foreign = here("analyze", tmp_path / "empty")
    assert "is not a trace" in refusal(foreign)
    (tmp_path / "text.json").write_text("hello\n")
    text = here("analyze", tmp_path / "text.json")
    assert "text.json" in refusal(text)
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [' + b'{"ph": "X"},' * 1000)[:-30])
    cut = here("analyze", tmp_path / "cut.json.gz")
    assert "cut.json.gz" in refusal(cut)
    manifest(trace, schema_version=SCHEMA_VERSION + 1)
    newer = here("analyze", trace)
    assert "update spikeprof" in refusal(newer)
    manifest(trace, format="other")
    other = here("analyze", trace)
    assert "'other', not a spikeprof trace" in refusal(other)
    (trace / "manifest.json").write_text('{"format": "spikeprof-tr')
    damaged = here("analyze", trace)
    assert "may still be whole" in refusal(damaged)
    runs = (missing, foreign, text, cut, newer, other, damaged)
    assert [r.returncode for r in runs] == [3] * len(runs)


def test_outputs_that_must_not_be_written_end_with_4(here: Here, trace: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.json"
    notes.write_text('{"version": 1, "mine": true}')
    foreign = here("analyze", trace, "-o", notes)
    assert refusal(foreign) == f"{notes} is not a spikeprof report and is left as it is: name another file with -o"
    assert notes.read_text() == '{"version": 1, "mine": true}'
    folder = here("analyze", trace, "-o", tmp_path)
    assert "is a folder" in refusal(folder)
    nowhere = here("analyze", trace, "-o", tmp_path / "nowhere/report.json")
    assert "there is no folder" in refusal(nowhere)
    assert [r.returncode for r in (foreign, folder, nowhere)] == [4, 4, 4]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_ends_with_4(trace: Path) -> None:
    run = spikeprof("analyze", trace, "-o", "/dev/full")
    assert refusal(run) == "cannot write /dev/full: the disk is full"
    assert run.returncode == 4


@NOT_ROOT
def test_a_read_only_folder_ends_with_4(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    run = spikeprof("analyze", trace, "-o", tmp_path / "locked/report.json")
    assert "is read-only for this user" in refusal(run)
    assert run.returncode == 4


def test_a_stretch_of_the_recording(trace: Path) -> None:
    """Kernel i begins i µs after the recording's start: ten of them begin between 0.00002 and 0.00003 s."""
    run = spikeprof("analyze", trace, "--json", "--between", "0.00002,0.00003")
    report = json.loads(run.stdout)
    metrics = {m["name"]: m["value"] for r in report["results"] for m in r["metrics"]}
    assert metrics["kernels_count"] == 10
    assert report["trace_name"] == "my trace, 2e-05 s to 3e-05 s"


@pytest.mark.parametrize("stretch", ["1", "2,1", "a,b", "-1,2", "nan,1", "0,inf", "5,6"])
def test_a_stretch_that_is_none(here: Here, trace: Path, stretch: str) -> None:
    run = here("analyze", trace, f"--between={stretch}")
    assert run.returncode == 2
    assert "--between" in refusal(run)
