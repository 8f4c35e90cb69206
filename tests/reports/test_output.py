from __future__ import annotations

import os
from pathlib import Path

import pytest

from spikeprof.profiler.errors import OutputError
from spikeprof.reports.output import write_private


def test_files_are_for_their_owner_only_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"):
        write_private(tmp_path / "no" / "r.json", b"x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk() -> None:
    with pytest.raises(OutputError, match="the disk is full"):
        write_private(Path("/dev/full"), b"x" * 100_000)


def test_a_fault_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="the disk is full"):
        write_private(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
