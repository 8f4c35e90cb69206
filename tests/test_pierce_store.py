from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeprof.profiler import pierce_store
from spikeprof.profiler.errors import ForeignFile, NewerSchema
from spikeprof.profiler.pierce_store import BaselineStore

NOW_S = 1_796_058_000.0


def row(pattern: str = "user:{n}", tenant: str = "", qps: float = 310.0) -> dict[str, Any]:
    return {"tenant": tenant, "pattern": pattern, "qps": qps, "miss_rate": 0.03}


def test_rows_come_back_as_they_were_and_only_to_their_source(tmp_path: Path) -> None:
    path = tmp_path / "state" / "pierce.sqlite"
    proxy, replay = BaselineStore(path, "proxy :6379"), BaselineStore(path, "engine")
    assert proxy.load(NOW_S) == []
    assert not path.exists()  # reading makes nothing
    assert proxy.save([row(), row("cart:{hex}", "shop")], NOW_S)
    assert replay.save([row(qps=1.0)], NOW_S)
    assert proxy.save([row(qps=320.0)], NOW_S + 30)
    assert proxy.load(NOW_S + 60) == [row(qps=320.0), row("cart:{hex}", "shop")]
    assert replay.load(NOW_S + 60) == [row(qps=1.0)]
    assert (proxy.problem, replay.problem) == ("", "")


def test_the_file_and_its_log_are_for_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "pierce.sqlite"
    BaselineStore(path, "a").save([row()], NOW_S)
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        database.execute("DELETE FROM baselines")
        files = sorted(tmp_path.joinpath("state").iterdir())
        assert len(files) == 3
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_what_is_old_or_too_much_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pierce_store, "MAX_ROWS_COUNT", 3)
    store = BaselineStore(tmp_path / "p.sqlite", "a")
    store.save([row("old:{n}")], NOW_S - pierce_store.KEPT_S - 1)
    assert store.load(NOW_S) == []
    store.save([row("first:{n}")], NOW_S)
    store.save([row(f"p{i}:{{n}}") for i in range(3)], NOW_S + 1)
    assert [r["pattern"] for r in store.load(NOW_S + 2)] == ["p0:{n}", "p1:{n}", "p2:{n}"]
    with sqlite3.connect(tmp_path / "p.sqlite") as database:
        assert database.execute("SELECT count(*) FROM baselines").fetchone() == (3,)


def test_a_locked_database_degrades_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is held by a real process, which is then ended."""
    monkeypatch.setattr(pierce_store, "BUSY_S", 0.1)
    path = tmp_path / "p.sqlite"
    store = BaselineStore(path, "a")
    assert store.save([row()], NOW_S)
    hold = (
        "import sqlite3, sys, time\n"
        "database = sqlite3.connect(sys.argv[1])\n"
        "database.execute('BEGIN EXCLUSIVE')\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        holder.stdout.readline()
        before = time.monotonic()
        assert not store.save([row(qps=1.0)], NOW_S + 1)
        assert time.monotonic() - before < 2
        assert store.problem == f"cannot write {path}: another process has held it for 0.1 s"
        holder.kill()
    assert store.save([row(qps=2.0)], NOW_S + 2)
    assert store.problem == ""
    assert store.load(NOW_S + 3) == [row(qps=2.0)]


def test_a_full_disk_degrades(tmp_path: Path) -> None:
    """SQLite's own limit of pages stands for the disk: it raises the same error."""
    path = tmp_path / "p.sqlite"
    script = (
        "import resource,signal,sys,pathlib\n"
        "from spikeprof.profiler.pierce_store import BaselineStore\n"
        "store = BaselineStore(pathlib.Path(sys.argv[1]), 'a')\n"
        "assert store.save([{'tenant':'','pattern':'p','qps':1.0}], 1.0), store.problem\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "rows = [{'tenant':'','pattern':f'p{i}','qps':1.0} for i in range(5000)]\n"
        "print(store.save(rows, 2.0), store.problem)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "print([r['pattern'] for r in store.load(3.0)], store.problem)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    first, second = run.stdout.splitlines()
    assert first.startswith(f"False cannot write {path}: ")
    assert second == "['p'] "  # the save was taken back as a whole


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_folder_that_cannot_be_made_degrades() -> None:
    store = BaselineStore(Path("/proc/nowhere/p.sqlite"), "a")
    assert store.load(NOW_S) == []
    assert not store.save([row()], NOW_S)
    assert store.problem.startswith("cannot write /proc/nowhere/p.sqlite: ")


def test_a_damaged_file_degrades_and_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    store = BaselineStore(path, "a")
    store.save([row(f"p{i}") for i in range(500)], NOW_S)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    broken = path.read_bytes()[:4096] + b"\xff" * 8192
    path.write_bytes(broken)
    assert store.load(NOW_S) == []
    assert store.problem.startswith(f"cannot read {path}: ")


def test_files_of_others_are_refused_and_untouched(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("mine, and longer than a header")
    with pytest.raises(ForeignFile, match="no SQLite database"):
        BaselineStore(text, "a").load(NOW_S)
    assert text.read_text() == "mine, and longer than a header"
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE baselines (x)")
    with pytest.raises(ForeignFile, match="another program"):
        BaselineStore(other, "a").save([row()], NOW_S)
    newer = tmp_path / "newer.sqlite"
    BaselineStore(newer, "a").save([row()], NOW_S)
    with sqlite3.connect(newer) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(NewerSchema, match="version 9"):
        BaselineStore(newer, "a").load(NOW_S)


@settings(max_examples=25)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_a_key(tmp_path_factory: pytest.TempPathFactory, tenant: str, pattern: str) -> None:
    store = BaselineStore(tmp_path_factory.mktemp("b") / "p.sqlite", "a")
    assert store.save([row(pattern, tenant)], NOW_S)
    assert store.load(NOW_S) == [row(pattern, tenant)]
