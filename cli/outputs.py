"""Output files: never over a file that is not ours. How they are written is ``reports/output.py``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from spikeprof.profiler.errors import OutputError

#: What every HTML report carries in its head (``reports/templates``).
HTML_MARK = b'<meta name="generator" content="spikeprof'
_HEAD_BYTES = 64 * 1024

#: Keys of every JSON report.
_JSON_KEYS = {"version", "manifest", "results", "trace_name"}


def is_html_report(path: Path) -> bool:
    """Whether the file is an HTML report of ours."""
    with path.open("rb") as file:
        return HTML_MARK in file.read(_HEAD_BYTES)


def is_json_report(path: Path) -> bool:
    """Whether the file is a JSON report of ours."""
    import msgspec

    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return False
    return found.keys() >= _JSON_KEYS


def is_coverage(path: Path) -> bool:
    """Whether the file is a coverage file of ours."""
    from spikeprof.reports.coverage import MARK

    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK


def check(path: Path, is_ours: Callable[[Path], bool]) -> None:
    """Refuse, before any work is done, an output that cannot or must not be written. Raises OutputError.

    An earlier report may be replaced. Any other file that holds something stays.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder: name a file with -o")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"cannot write {path}: the folder {path.parent} is read-only for this user")
    if not path.is_file():
        return
    try:
        replaceable = path.stat().st_size == 0 or is_ours(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    if not replaceable:
        raise OutputError(f"{path} is not a spikeprof report and is left as it is: name another file with -o")
