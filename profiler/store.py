"""The trace folder on disk: ``manifest.json`` plus one Parquet file per table.

Files are written to a temporary name and renamed, so that a table is there whole or not at all, and
readable by their owner only: kernel names and command lines tell about a customer's model.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from spikeprof.profiler.errors import DamagedTrace, ForeignFile, InputError, NewerSchema, OutputError, TraceNotFound
from spikeprof.profiler.schema import SCHEMA_VERSION, TABLES
from spikeprof.profiler.trace import Manifest, Trace

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "spikeprof-trace"
ROW_GROUP_ROWS = 256 * 1024

#: Columns of ever-growing or clustered integers: differences are far smaller than the values.
_DELTA_SUFFIXES = ("_ns", "_id")


class _Header(msgspec.Struct):
    """The head of manifest.json, readable whatever the schema version."""

    format: str
    schema_version: int


class _File(_Header):
    manifest: Manifest


def is_trace(path: Path) -> bool:
    """Whether the path is a folder that says it is a trace."""
    return (path / MANIFEST_NAME).is_file()


def create_folder(path: Path) -> Path:
    """Make a new trace folder, for its owner only. Raises OutputError when it exists or cannot be made."""
    if not _is_text(path):
        raise OutputError(f"the name {os.fsencode(path)!r} is no text in UTF-8: name another folder with -o")
    if os.path.lexists(path):
        raise OutputError(f"{path} exists already and is left as it is: name another folder with -o, or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except OSError as error:
        raise OutputError(f"cannot create the trace folder {path}: {error.strerror}") from error
    return path


def _is_text(path: Path) -> bool:
    """Whether Arrow can open files there: it takes no names that are not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def write_table(folder: Path, name: str, table: pa.Table) -> int:
    """Write one table, whole or not at all; returns the bytes on disk. Raises OutputError."""
    with open_table(folder, name) as writer:
        writer.write_table(table.select(TABLES[name].arrow.names).cast(TABLES[name].arrow), ROW_GROUP_ROWS)
    return (folder / f"{name}.parquet").stat().st_size


@contextmanager
def open_table(folder: Path, name: str) -> Iterator[pq.ParquetWriter]:
    """A Parquet writer for one table, to append row groups with bounded memory; renamed into place at the end."""
    schema = TABLES[name].arrow
    delta = [f.name for f in schema if pa.types.is_integer(f.type) and f.name.endswith(_DELTA_SUFFIXES)]
    with (
        _replacing(folder / f"{name}.parquet") as temporary,
        pq.ParquetWriter(
            temporary,
            schema,
            compression="zstd",
            compression_level=3,
            use_dictionary=[f.name for f in schema if f.name not in delta],
            column_encoding=dict.fromkeys(delta, "DELTA_BINARY_PACKED"),
            write_statistics=True,
            write_page_checksum=True,
        ) as writer,
    ):
        yield writer


def remove_table(folder: Path, name: str) -> None:
    """Take a table away, if it is there. Raises OutputError."""
    path = folder / f"{name}.parquet"
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot remove {path}: {error.strerror}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest last: a folder without one is not a trace yet. Raises OutputError."""
    data = msgspec.json.encode(_File(FORMAT_NAME, SCHEMA_VERSION, manifest))
    with _replacing(folder / MANIFEST_NAME) as temporary:
        temporary.write_bytes(msgspec.json.format(data, indent=1) + b"\n")


def write_trace(folder: Path, trace: Trace) -> None:
    """Write a whole trace into a folder that exists. Raises OutputError."""
    for name in trace.tables:
        write_table(folder, name, trace.table(name))
    write_manifest(folder, trace.manifest)


def read_trace(folder: Path) -> Trace:
    """Open a trace; tables are read when first used.

    A table whose file is damaged is left out and named in ``Trace.damaged``: the rest stays readable.
    Raises TraceNotFound, ForeignFile, NewerSchema or DamagedTrace.
    """
    manifest = _read_manifest(folder)
    tables: dict[str, Any] = {}
    damaged: dict[str, str] = {}
    for name in TABLES:
        path = folder / f"{name}.parquet"
        if not path.exists():
            continue
        problem = _damage(path, name)
        if problem:
            damaged[name] = problem
        else:
            tables[name] = partial(_read_table, path, name)
    return Trace(manifest, MappingProxyType(tables), MappingProxyType(damaged))


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    if not _is_text(folder):
        raise InputError(
            f"the name {os.fsencode(folder)!r} is no text in UTF-8: rename it, or change into it and name ."
        )
    if not folder.exists():
        raise TraceNotFound(f"there is no {folder}: `spikeprof run -- CMD` makes a trace")
    if not path.is_file():
        raise TraceNotFound(f"{folder} is not a trace: it has no {MANIFEST_NAME}")
    try:
        data = path.read_bytes()
        header = msgspec.json.decode(data, type=_Header)
    except msgspec.MsgspecError as error:
        raise DamagedTrace(
            f"{path} cannot be read ({error}); the Parquet files beside it may still be whole"
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if header.format != FORMAT_NAME:
        raise ForeignFile(f"{path} says it is {header.format!r}, not a spikeprof trace")
    if header.schema_version > SCHEMA_VERSION:
        raise NewerSchema(
            f"{folder} has schema {header.schema_version}, this spikeprof reads up to {SCHEMA_VERSION}: "
            "update spikeprof (the trace is left as it is)"
        )
    try:
        return msgspec.json.decode(data, type=_File).manifest
    except msgspec.MsgspecError as error:
        raise DamagedTrace(f"{path} is not a whole manifest: {error}") from error


def _damage(path: Path, name: str) -> str:
    """Why the file cannot serve as the table, or empty. Reads the footer only."""
    try:
        found = pq.read_schema(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: a name that is no text
        return f"{path.name} is damaged: {_first_sentence(error)}"
    absent = [c.name for c in TABLES[name].columns if c.name not in found.names]
    return f"{path.name} lacks the columns {', '.join(absent)}" if absent else ""


def _read_table(path: Path, name: str) -> pa.Table:
    schema = TABLES[name].arrow
    dictionaries = [f.name for f in schema if pa.types.is_dictionary(f.type)]
    try:
        # One file, one schema: pq.ParquetFile spares the dataset machinery, and its import.
        file = pq.ParquetFile(path, read_dictionary=dictionaries, page_checksum_verification=True)
        table = file.read(columns=schema.names)
        return table.select(schema.names).cast(schema).unify_dictionaries()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DamagedTrace(f"{path.name} is damaged: {_first_sentence(error)}; the other tables can be read") from error


def read_columns(folder: Path, name: str, columns: Sequence[str]) -> pa.Table:
    """Some columns of a table of a trace that is still being made; no rows where the table was not collected."""
    path = folder / f"{name}.parquet"
    if not path.exists():
        return TABLES[name].empty().select(list(columns))
    return pq.ParquetFile(path).read(columns=list(columns)).select(list(columns))


def _first_sentence(error: Exception) -> str:
    return str(error).splitlines()[0].split(". ")[0].rstrip(".")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, renamed onto it when the block succeeds, removed when not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield temporary
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise OutputError(f"cannot write {path}: {reason}; what was written before it stays readable") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
