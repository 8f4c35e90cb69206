"""Reads and writes safetensors: eight bytes of header length, JSON, raw little-endian data.

The file is mapped, and each tensor goes straight from the mapping to its device: never more than one is on the way.
All that can be wrong with a file raises CheckpointError, which names the file and, where it is about one, the tensor.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_FLOATS = ("F64", "F32", "F16", "BF16")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_NAME_BYTES = 255  # of a file on Linux
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint is missing something, or is damaged."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: its dtype's name there, shape, and the bytes [begin, end) of the data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Shard:
    """One safetensors file, checked whole and mapped. ``entries`` says what is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if size < _LENGTH.size:
                    raise CheckpointError(f"{path}: has {size} bytes: too short for a header")
                # A private mapping: torch warns of memory that it may not write, and nothing is written.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        length = _LENGTH.unpack_from(self._map)[0]
        self._data = _LENGTH.size + length
        if length > _MAX_HEADER_BYTES or self._data > size:
            raise CheckpointError(f"{path}: truncated header: it is said to have {length} bytes, the file has {size}")
        self.entries = _entries(path, self._map[_LENGTH.size : self._data])
        _check_offsets(path, self.entries, size - self._data)

    def read(self, name: str, into: Tensor) -> None:
        """Copy a tensor into ``into``, of any float dtype, on any device; the shapes must be equal."""
        entry = self.entries[name]
        if entry.dtype not in _FLOATS:
            raise CheckpointError(f"{self.path}: tensor {name} is {entry.dtype}: {', '.join(_FLOATS)} can be loaded")
        if entry.shape != tuple(into.shape):
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {list(entry.shape)}, {list(into.shape)} is wanted"
            )
        if entry.end == entry.begin:
            return
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.end - entry.begin,
                               offset=self._data + entry.begin)  # fmt: skip
        # As bytes first: the data need not be aligned for its dtype in the file; a fresh tensor is.
        into.copy_(raw.to(into.device, copy=True).view(DTYPES[entry.dtype]).view(entry.shape))


class Checkpoint:
    """A safetensors file, or a folder with one or with shards and their index.

    Every shard is opened and checked at once, so that a damaged one is told before minutes of loading.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shards: dict[str, Shard] = {}
        index = path / INDEX
        if path.is_file():
            self._add_all(path)
        elif index.is_file():
            self._add_indexed(index)
        elif (path / SINGLE).is_file():
            self._add_all(path / SINGLE)
        else:
            raise CheckpointError(f"{path}: has neither {INDEX} nor {SINGLE}")

    @property
    def names(self) -> frozenset[str]:
        """The tensors that there are."""
        return frozenset(self._shards)

    def read(self, name: str, into: Tensor) -> None:
        """Copy the tensor ``name`` into ``into``. Raises CheckpointError where it is missing, or of other shape."""
        if name not in self._shards:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        self._shards[name].read(name, into)

    def _add_all(self, path: Path) -> None:
        shard = Shard(path)
        self._shards.update(dict.fromkeys(shard.entries, shard))

    def _add_indexed(self, index: Path) -> None:
        shards: dict[str, Shard] = {}
        for name, file_name in _weight_map(index).items():
            if not (index.parent / file_name).is_file():
                raise CheckpointError(f"{index.parent / file_name}: shard is missing; {INDEX} has tensor {name} there")
            if file_name not in shards:
                shards[file_name] = Shard(index.parent / file_name)
            if name not in shards[file_name].entries:
                raise CheckpointError(f"{index.parent / file_name}: tensor {name} is missing; {INDEX} has it there")
            self._shards[name] = shards[file_name]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: has no readable weight_map: {error!r}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{index}: weight_map must be a JSON object")
    for name, file_name in found.items():
        is_name = isinstance(file_name, str) and file_name == Path(file_name).name
        if not is_name or len(file_name.encode(errors="replace")) > _MAX_NAME_BYTES:
            raise CheckpointError(f"{index}: tensor {name} is in {file_name!r}: it must be a file beside the index")
    return found


def _entries(path: Path, header: bytes) -> dict[str, Entry]:
    try:
        found = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged header: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: damaged header: it must be a JSON object")
    return {name: _entry(path, name, value) for name, value in found.items() if name != "__metadata__"}


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} is there twice")
    return found


def _entry(path: Path, name: str, value: object) -> Entry:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: tensor {name}: its entry must be a JSON object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name} has dtype {dtype!r}: {', '.join(DTYPES)} are known")
    if not _are_sizes(shape):
        raise CheckpointError(f"{path}: tensor {name} has shape {shape!r}: it must be a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: tensor {name} has data_offsets {offsets!r}: begin and end are wanted")
    want = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != want:
        raise CheckpointError(
            f"{path}: tensor {name} has {offsets[1] - offsets[0]} bytes; {dtype} {shape} needs {want}"
        )
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_offsets(path: Path, entries: Mapping[str, Entry], data_bytes: int) -> None:
    """Tensors must lie one after the other and fill the data section, as the format has it."""
    at, last = 0, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > data_bytes:
            raise CheckpointError(
                f"{path}: tensor {name} ends at byte {entry.end} of the data, but the file has only {data_bytes}: "
                "it is truncated, or the offset is wrong"
            )
        if entry.begin < at:
            raise CheckpointError(f"{path}: tensor {name} overlaps {last}: it begins at byte {entry.begin}, "
                                  f"{last} ends at {at}")  # fmt: skip
        if entry.begin > at:
            raise CheckpointError(f"{path}: there is a hole of {entry.begin - at} bytes before tensor {name}")
        at, last = entry.end, name
    if at != data_bytes:
        raise CheckpointError(f"{path}: {data_bytes - at} bytes after {last} belong to no tensor")


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file; the data section begins at a multiple of 8 bytes."""
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for tensor in tensors.values():
            if tensor.numel():
                file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def write_sharded(folder: Path, tensors: Mapping[str, Tensor], shards_count: int) -> None:
    """Write the tensors to ``shards_count`` files in turn, and the index beside them."""
    names = list(tensors)
    weight_map = {}
    for number in range(shards_count):
        file_name = f"model-{number + 1:05d}-of-{shards_count:05d}.safetensors"
        own = names[number::shards_count]
        write_shard(folder / file_name, {name: tensors[name] for name in own})
        weight_map.update(dict.fromkeys(own, file_name))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
