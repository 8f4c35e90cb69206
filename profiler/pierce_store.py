"""What the cache-penetration detector has learned, kept over restarts: baselines per tenant and pattern, in SQLite.

A row is a mapping with ``tenant`` and ``pattern``; everything else in it belongs to the detector and is kept as JSON.
Keeping baselines is a convenience: a full disk, a locked or a damaged file never stops the detector, whose own memory
holds all of them. The store says once what is wrong, and tries again with the next save.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from spikeprof.profiler.errors import ForeignFile, NewerSchema

VERSION = 1
BUSY_S = 2.0  # how long another process may hold the file before a save is put off
MAX_ROWS_COUNT = 20_000  # over all sources; the longest untouched go first
KEPT_S = 30 * 86_400.0  # what was not seen for so long says nothing any more

_APPLICATION_ID = 0x53504342  # "SPCB" in the file's header: it is ours
_HEADER_BYTES = 16
_MAGIC = b"SQLite format 3\0"
_TABLE = """
CREATE TABLE IF NOT EXISTS baselines (
    source TEXT NOT NULL, tenant TEXT NOT NULL, pattern TEXT NOT NULL,
    updated_s REAL NOT NULL, state TEXT NOT NULL,
    PRIMARY KEY (source, tenant, pattern)
) WITHOUT ROWID
"""
_SAVE = """
INSERT INTO baselines VALUES (?, ?, ?, ?, ?)
ON CONFLICT (source, tenant, pattern) DO UPDATE SET updated_s = excluded.updated_s, state = excluded.state
"""
_FORGET = """
DELETE FROM baselines WHERE updated_s < ? OR (source, tenant, pattern) IN
    (SELECT source, tenant, pattern FROM baselines ORDER BY updated_s DESC LIMIT -1 OFFSET ?)
"""

#: What must not stop a detector. A file that is not ours is another matter: the user named the wrong one.
_FAILURES = (sqlite3.Error, OSError, msgspec.MsgspecError)

Row = Mapping[str, Any]


def default_path() -> Path:
    """``$XDG_STATE_HOME/spikeprof/pierce.sqlite``, below ``~/.local/state`` where that is not set."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return folder / "spikeprof" / "pierce.sqlite"


class BaselineStore:
    """The baselines of one ``source`` (what is watched: two services do not share a baseline) in the file ``path``.

    ``problem`` is empty, or why baselines are in memory alone at the moment.
    """

    def __init__(self, path: Path, source: str) -> None:
        self._path = path
        self._source = source
        self.problem = ""

    def load(self, now_s: float) -> list[dict[str, Any]]:
        """The rows not older than ``KEPT_S``; none, and ``problem`` set, where the file cannot be read.

        Raises ForeignFile for a file that is not ours, and NewerSchema for one of a newer version: neither is touched.
        """
        if not self._path.exists():
            return []
        query = "SELECT state FROM baselines WHERE source = ? AND updated_s >= ? ORDER BY tenant, pattern"
        try:
            with self._connection() as database:
                states = database.execute(query, (self._source, now_s - KEPT_S)).fetchall()
            rows = [msgspec.json.decode(state, type=dict[str, Any]) for (state,) in states]
        except _FAILURES as error:
            self.problem = f"cannot read {self._path}: {_reason(error)}"
            return []
        self.problem = ""
        return rows

    def save(self, rows: Sequence[Row], now_s: float) -> bool:
        """Write all rows at once or none; whether it worked (else ``problem`` says why). ``now_s``: Unix seconds."""
        encode = msgspec.json.encode
        made = [(self._source, str(r["tenant"]), str(r["pattern"]), now_s, encode(dict(r)).decode()) for r in rows]
        try:
            with self._connection() as database, database:
                database.executemany(_SAVE, made)
                database.execute(_FORGET, (now_s - KEPT_S, MAX_ROWS_COUNT))
        except _FAILURES as error:
            self.problem = f"cannot write {self._path}: {_reason(error)}"
            return False
        self.problem = ""
        return True

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection for one task, from whichever thread: none is kept, so that a file moved away is noticed."""
        self._prepare()
        with closing(sqlite3.connect(self._path, timeout=BUSY_S)) as database:
            (application,) = database.execute("PRAGMA application_id").fetchone()
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if application != _APPLICATION_ID and tables:
                raise ForeignFile(f"{self._path} is a database of another program: name another file with --baselines")
            if version > VERSION:
                raise NewerSchema(
                    f"{self._path} has version {version} of the baselines, this spikeprof knows up to {VERSION}: "
                    "update spikeprof, or name another file with --baselines"
                )
            if not tables:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                database.execute(f"PRAGMA user_version = {VERSION}")
                database.execute(_TABLE)
                database.commit()
            database.execute("PRAGMA synchronous = NORMAL")
            yield database

    def _prepare(self) -> None:
        """Make the file for its owner only, before SQLite would make it for everybody; it copies that to its log."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            with self._path.open("rb") as file:
                head = file.read(_HEADER_BYTES)
            if head and head != _MAGIC:
                raise ForeignFile(
                    f"{self._path} is no SQLite database: name another file with --baselines, or remove it"
                ) from None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    if "locked" in text:
        return f"another process has held it for {BUSY_S:g} s"
    return "the disk is full" if "full" in text else text
