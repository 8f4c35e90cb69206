"""What ``spikeprof run`` says at the end; recording itself is tested in tests/inject."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli.traces import launch_bound

from spikeprof.cli import run
from spikeprof.profiler import session
from spikeprof.profiler.errors import UsageError
from spikeprof.profiler.session import Outcome, RunOptions


@pytest.mark.parametrize(("available", "shown"), [(10**9, True), (2 * 100 * 700, True), (2 * 100 * 700 - 2, False)])
def test_the_summary_is_left_out_where_it_could_take_the_memory_of_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    available: int,
    shown: bool,
) -> None:
    """100 kernels at 700 bytes may take half of what is free."""
    trace = launch_bound(tmp_path / "t")
    monkeypatch.setattr(run, "_available_bytes", lambda: available)
    run._tell(Outcome(exit_code=0, trace=trace, traced_count=1, kernels_count=100), summary=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("[launch-bound]" in err) == shown
    assert ("no summary: it takes about 0.0 GB, more than half" in err) != shown
    assert f"next: spikeprof report {trace} -o report.html" in err


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux says how much memory is free")
def test_free_memory_is_known_here() -> None:
    assert 10**7 < run._available_bytes() < 2**63 - 1


@pytest.mark.parametrize("text", ["1", "a,b", "1,2,3", "nan,1", "0.1,inf", ","])
def test_windows_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"--window .*: write seconds on and seconds off"):
        run._window(text)


@pytest.mark.parametrize("options", [{"max_seconds": float("nan")}, {"max_seconds": float("inf")}])
def test_seconds_that_no_clock_reaches(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="finite numbers of seconds"):
        RunOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "every"), [(True, 4), (False, 0)])
def test_options_of_the_numerics(monkeypatch: pytest.MonkeyPatch, asked: bool, every: int) -> None:
    given: list[RunOptions] = []

    def record(_command: object, _output: object, options: RunOptions, *_: object, **__: object) -> Outcome:
        given.append(options)
        return Outcome(exit_code=0, trace=None)

    monkeypatch.setattr(session, "record", record)
    run.run(
        ["true"], numerics=asked, numerics_every=4, numerics_modules="layers.*, head", numerics_roles="output,gradient"
    )
    assert given[0].numerics_every == every
    assert given[0].numerics_modules == ("layers.*", "head")
    assert given[0].numerics_roles == ("output", "gradient")
    assert ("numerics_every" in given[0].for_target()) == asked


def test_a_program_of_another_user_cannot_be_signalled_and_is_waited_for() -> None:
    script = """
import os, signal, subprocess, sys
from spikeprof.profiler import launch

def refuse(self, number):
    raise PermissionError(1, "Operation not permitted")

subprocess.Popen.send_signal = refuse
sys.exit(launch.run(["sh", "-c", "kill -TERM $PPID; sleep 0.2; exit 7"], os.environ))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (7, "")
