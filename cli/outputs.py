"""Output files: never over somebody else's file, whole or not at all, readable by their owner only."""

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


def write(path: Path, data: bytes) -> None:
    """Write the file beside its place and rename it. Raises OutputError."""
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: nothing to rename onto
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:  # noqa: PTH123
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
