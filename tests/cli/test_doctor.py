from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli.command import refusal, spikeprof

NO_GPU = not Path("/dev/nvidiactl").exists()


def test_json_and_exit_code_agree() -> None:
    run = spikeprof("doctor", "--json", "--", sys.executable)
    answer = json.loads(run.stdout)
    assert run.returncode == (0 if answer["can_record"] else 1)
    blocking = [p["name"] for p in answer["probes"] if p["needed"] and p["state"] == "no"]
    assert answer["can_record"] == (not blocking)
    assert {"NVIDIA driver", "counters", "trace folder", "target Python"} <= {p["name"] for p in answer["probes"]}


@pytest.mark.skipif(not NO_GPU, reason="this machine has an NVIDIA driver")
def test_without_a_gpu_one_sentence_says_what_still_works() -> None:
    run = spikeprof("doctor")
    assert run.returncode == 1
    closing = " ".join(run.stdout.split("\n\n")[-1].split())
    assert closing.startswith("GPU work cannot be recorded here (NVIDIA driver")
    assert closing.endswith("`spikeprof analyze` and `spikeprof report` read traces from other machines all the same.")
    assert "`spikeprof run --numerics` finds Inf and NaN in models that run on the CPU" in closing
    assert closing.count(". ") == 0


def test_lines_fit_80_columns_except_for_long_words() -> None:
    run = spikeprof("doctor", "--", sys.executable)
    for line in run.stdout.splitlines():
        assert len(line) <= 80 or len(line[30:].split()) == 1, line


def test_flags_that_prevent_tracing_are_found() -> None:
    run = spikeprof("doctor", "--json", "--", sys.executable, "-I", "infer.py")
    target = next(p for p in json.loads(run.stdout)["probes"] if p["name"] == "target Python")
    assert run.returncode == 1
    assert target["state"] == "no"


def test_bad_commands_are_refused_in_one_sentence() -> None:
    missing = spikeprof("doctor", "--", "no-such-python")
    assert (refusal(missing), missing.returncode) == ("no-such-python: command not found", 127)
    foreign = spikeprof("doctor", "--", "ls")
    assert "neither a Python interpreter nor a Python script" in refusal(foreign)
    assert foreign.returncode == 2
