from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.command import SPIKEPROF, refusal, spikeprof
from cli.traces import launch_bound

import spikeprof as package

HEAVY = {"pandas", "pyarrow", "plotly", "numpy", "rich", "jinja2", "msgspec", "cupti", "pynvml", "torch"}


def loaded_after(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter holds after running ``code``."""
    script = f"{code}\nimport sys\nprint('\\n', *sorted({HEAVY} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import spikeprof; spikeprof.__version__") == set()
    assert "pyarrow" in loaded_after("import spikeprof; spikeprof.Trace")  # the check can fail


def test_help_loads_nothing_heavy() -> None:
    assert loaded_after("from spikeprof.cli.app import run_command_line as run\nassert run(['--help']) == 0") == set()
    assert (
        loaded_after("from spikeprof.cli.app import run_command_line as run\nassert run(['report', '-h']) == 0")
        == set()
    )


def test_version_and_help() -> None:
    assert spikeprof("--version").stdout == f"spikeprof {package.__version__}\n"
    run = spikeprof("--help")
    assert run.returncode == 0
    for verb in ("analyze", "report", "doctor", "topology", "explain"):
        assert f"\n  {verb} " in run.stdout
    assert "..." not in run.stdout.partition("Commands:")[2]  # no sentence is cut off


def test_python_m_is_the_same_command() -> None:
    run = subprocess.run([sys.executable, "-m", "spikeprof", "--version"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, f"spikeprof {package.__version__}\n")


def test_no_verb_prints_the_help_and_is_a_usage_error() -> None:
    run = spikeprof()
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("Usage: spikeprof")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["analyse"], "No such command 'analyse'"),
        (["analyze"], "Missing argument 'PATH'"),
        (["run", "--clean-steps", "many"], "Invalid value for '--clean-steps'"),
        (["report", "x", "--colour"], "No such option: --colour"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(arguments: list[str], part: str) -> None:
    run = spikeprof(*arguments)
    line = refusal(run)
    assert part in line
    assert "--help`)" in line
    assert run.returncode == 2


def test_a_bug_is_one_line_and_a_traceback_only_on_request() -> None:
    script = (
        "import spikeprof.analyzers.registry as r, spikeprof.cli.app as app\n"
        "def rules(): raise KeyError('boom')\n"
        "r.rules = rules\napp.main(['explain'])"
    )
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 5
    assert refusal(run) == "internal error: KeyError: 'boom' (please report it; SPIKEPROF_DEBUG=1 shows where)"
    env = {**os.environ, "SPIKEPROF_DEBUG": "1"}
    assert "Traceback" in subprocess.run(command, capture_output=True, text=True, check=False, env=env).stderr


def test_an_interrupt_ends_with_130() -> None:
    script = (
        "import spikeprof.analyzers.registry as r, spikeprof.cli.app as app\n"
        "def rules(): raise KeyboardInterrupt\n"
        "r.rules = rules\napp.main(['explain'])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 130
    assert run.stderr.split() == ["spikeprof:", "interrupted"]


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path, options: list[str]) -> None:
    trace = launch_bound(tmp_path / "trace")
    with subprocess.Popen(
        [SPIKEPROF, "analyze", trace, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == ""
    assert run.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_standard_output(tmp_path: Path) -> None:
    trace = launch_bound(tmp_path / "trace")
    with Path("/dev/full").open("w") as full:
        run = subprocess.run([SPIKEPROF, "analyze", trace], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert run.stderr == "spikeprof: the output cannot be written: the disk is full\n"
    assert run.returncode == 4
