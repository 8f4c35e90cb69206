"""Writing a report: whole or not at all, and readable by its owner only."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from spikeprof.profiler.errors import OutputError


def write_private(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it onto it, with permissions 0600. Raises OutputError.

    Reports tell about a customer's model and command lines, so others on the machine may not read them. What is
    not a regular file (``/dev/stdout``, a named pipe) is written to directly.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:  # noqa: PTH123
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise OutputError(f"cannot write {path}: {reason}") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
