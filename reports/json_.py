"""``report.json``: a Report as JSON, versioned, to be read by programs (``docs/report-json.md``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from spikeprof.profiler.errors import ForeignFile, NewerSchema
from spikeprof.reports.model import REPORT_VERSION, Report
from spikeprof.reports.output import write_private


class _Head(msgspec.Struct):
    """The one key that readers of every version understand."""

    version: int


def encode(report: Report) -> bytes:
    """The report as one line of UTF-8 JSON with a newline. NaN and infinity become null."""
    return msgspec.json.encode(report, enc_hook=_plain) + b"\n"


def decode(data: bytes) -> Report:
    """The report that ``encode`` wrote. Raises ForeignFile, or NewerSchema for a later version's report."""
    try:
        version = msgspec.json.decode(data, type=_Head).version
        if version > REPORT_VERSION:
            raise NewerSchema(
                f"the report has version {version}, this spikeprof reads up to {REPORT_VERSION}: update spikeprof"
            )
        return msgspec.json.decode(data, type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ForeignFile(f"this is not a spikeprof report in JSON: {error}") from error


def write_json(report: Report, path: Path) -> None:
    """Write the report, whole or not at all, for its owner only. Raises OutputError."""
    write_private(path, encode(report))


def _plain(value: Any) -> Any:
    """NumPy scalars that an analyzer left in a table, as plain numbers."""
    item = getattr(value, "item", None)
    if item is None:
        raise NotImplementedError(f"a {type(value).__name__} cannot be put into a report")
    return item()
