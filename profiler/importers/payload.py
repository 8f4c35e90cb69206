"""A file's bytes, out of any gzip around them, and what they are when they are not a trace."""

from __future__ import annotations

import zlib
from pathlib import Path

from spikeprof.profiler.errors import DamagedTrace, ForeignFile, InputError, TraceNotFound

Payload = bytes | bytearray

_GZIP = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
#: torch's export and the server that collects it may each compress once.
_MAX_LAYERS = 3

#: How a file begins -> what it is and what to do about it.
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"SQLite format 3\x00", "an SQLite database: Nsight Systems SQLite is not read yet"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself: run `git lfs pull` where it came from"),
    (b"PAR1", "a Parquet file: name the trace folder that holds it"),
    (b"PK\x03\x04", "a ZIP archive: unpack it and name the JSON file in it"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it first"),
    (b"BZh", "compressed with bzip2: unpack it first"),
    (b"\xfd7zXZ", "compressed with xz: unpack it first"),
)
_TAR_MAGIC = (257, b"ustar")


def read_payload(path: Path) -> Payload:
    """The file's bytes with up to three layers of gzip removed; what is not JSON is refused.

    Raises TraceNotFound (absent or empty), ForeignFile, DamagedTrace (broken gzip) or InputError.
    """
    try:
        data: Payload = path.read_bytes()
    except FileNotFoundError:
        raise TraceNotFound(f"there is no {path}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if not data:
        raise TraceNotFound(f"{path} is empty (0 bytes): the program that wrote it did not finish")
    for _ in range(_MAX_LAYERS):
        if not data.startswith(_GZIP):
            break
        data = _gunzip(data, path)
    _refuse_foreign(data, path)
    return data


def _gunzip(packed: Payload, path: Path) -> bytearray:
    """One layer of gzip removed, all members of it: writers that append make several."""
    data = bytearray()
    rest = memoryview(packed)
    while rest and bytes(rest[:2]) == _GZIP:
        stream = zlib.decompressobj(_GZIP_WINDOW)
        try:
            for first in range(0, len(rest), _CHUNK_BYTES):
                data += stream.decompress(rest[first : first + _CHUNK_BYTES])
                if stream.eof:
                    rest = rest[min(first + _CHUNK_BYTES, len(rest)) - len(stream.unused_data) :]
                    break
        except zlib.error as error:
            raise DamagedTrace(
                f"{path} is damaged: its gzip stream breaks after {len(data)} unpacked bytes ({error})"
            ) from error
        if not stream.eof:
            raise DamagedTrace(
                f"{path} is truncated at byte {len(packed)}: its gzip stream has no end "
                f"({len(data)} bytes could be unpacked)"
            )
    if bytes(rest).strip(b"\x00"):  # zeros are padding
        raise DamagedTrace(f"{path} is damaged: {len(rest)} bytes that are not gzip follow its gzip stream")
    return data


def _refuse_foreign(data: Payload, path: Path) -> None:
    head = bytes(data[:512])
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            raise ForeignFile(f"{path} is {what}")
    offset, magic = _TAR_MAGIC
    if head[offset : offset + len(magic)] == magic:
        raise ForeignFile(f"{path} is a tar archive: unpack it and name the JSON file in it")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] == b"<":
        raise ForeignFile(f"{path} is an HTML or XML page, not a trace: was a download page saved in its place?")
    if text[:1] not in (b"{", b"["):
        what = "blank" if not text else f"no JSON (it begins with {head[:16]!r})"
        raise ForeignFile(f"{path} is {what}: a trace folder or a torch.profiler JSON file is expected")
