"""Recordings that are made samples of: nothing of the machine's folders is left, nothing else is changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from paths import ROOT

from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.store import create_folder, write_trace

STACKS = [
    {
        "file": "/home/me/project/a.py",
        "line": 3,
        "frames": json.dumps(["/venv/lib/x.py:1 f", "/home/me/project/a.py:3 g"]),
    },
    {"file": "<string>", "line": 1, "frames": "[]"},
]


def made(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    source = create_folder(folder / "source")
    write_trace(source, tiny.trace(kernels=[{"end_ns": 7}], samples=[{}], stacks=STACKS))
    command = [sys.executable, ROOT / "scripts" / "make_sample.py", source, folder / "made", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_folders_are_cut_off_and_tables_left_out(tmp_path: Path) -> None:
    done = made(tmp_path, "--cut", "/home/me/project/", "--cut", "/venv", "--without", "samples", "--without", "ops")
    assert done.returncode == 0, done.stderr
    source, trace = open_trace(tmp_path / "source"), open_trace(tmp_path / "made")
    assert trace.column("stacks", "file").tolist() == ["a.py", "<string>"]
    assert trace.table("stacks").column("frames").to_pylist() == ['["lib/x.py:1 f", "a.py:3 g"]', "[]"]
    assert set(trace.tables) == {"kernels", "stacks"}
    assert trace.table("kernels").equals(source.table("kernels"))
    assert trace.manifest.notes[-1] == "A sample: left out to keep it small: samples."


def test_what_is_left_of_the_machines_folders_is_refused(tmp_path: Path) -> None:
    done = made(tmp_path, "--cut", "/home/me/pro", "--cut", "/venv")  # part of a folder's name is no folder
    assert (done.returncode, "/home/me/project/a.py" in done.stderr) == (1, True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("sample_traces/**/stacks.parquet")), ids=lambda path: path.parent.name
)
def test_samples_name_no_folders_of_a_machine(path: Path) -> None:
    stacks = open_trace(path.parent).table("stacks")
    frames = [name for text in stacks.column("frames").to_pylist() for name in json.loads(text)]
    assert not [name for name in [*stacks.column("file").to_pylist(), *frames] if name.startswith("/")]
