"""Raw activity buffers to structured arrays, without a Python step per record.

Records of different sizes stand behind each other; each begins with its kind, and only the kind tells the
size. So the start of one record depends on all before it. To walk that chain in bulk, the buffer is cut
into blocks of words, and for every word it is worked out, for all blocks at once, where a record beginning
there would leave its block. One short loop over the blocks then finds each block's true entry, and a second
sweep, again for all blocks at once, marks the records from there.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from spikeprof.profiler.assemble.layouts import Layout
from spikeprof.profiler.inject import FRAME_FORMAT, FRAME_HEADER_BYTES, FRAME_MAGIC

_BLOCK_WORDS = 512
_WORD_BYTES = 8
_STOP = 1 << 20  # where a word leads that cannot begin a record
_KINDS_MAX = 256

#: Spool bytes decoded at a time: bounds memory to a few times this.
BATCH_BYTES = 32 << 20


#: No buffer is larger: a header that says so is damaged.
PAYLOAD_BYTES_MAX = 64 << 20
_SEARCH_BYTES = 1 << 20


class Frame(NamedTuple):
    """One buffer as it lies in the spool."""

    end: int  # offset behind the frame; of a frame that is cut short: its own begin
    payload: npt.NDArray[np.uint8]
    unix_ns: int  # when CUPTI handed the buffer over


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of a stretch of spool, by activity kind, and what could not be read."""

    records: Mapping[int, npt.NDArray[np.void]]
    set_aside_bytes: int = 0
    set_aside_count: int = 0  # buffers that were not read to their end, and stretches of foreign bytes
    spool_bytes: int = 0  # how much of the file this was
    handed_over_ns: int = 0  # unix time at which the last of these buffers was handed over


def frames(path: Path, offset: int = 0) -> Iterator[Frame]:
    """Each frame of a spool file from ``offset`` on, which must be the begin of one.

    The last frame may be cut short by a killed process: it is given as far as it goes, with the offset
    of its own begin, so that a live reader can come back to it. Foreign bytes are passed over.
    """
    with path.open("rb") as file:
        while True:
            file.seek(offset)
            header = file.read(FRAME_HEADER_BYTES)
            if len(header) < FRAME_HEADER_BYTES:
                return
            magic, size, unix_ns, _ = struct.unpack_from(FRAME_FORMAT, header)
            if magic != FRAME_MAGIC or size > PAYLOAD_BYTES_MAX:
                found = _next_magic(file, offset + 1)
                if found is None:
                    return
                offset = found
                continue
            there = min(size, os.fstat(file.fileno()).st_size - offset - FRAME_HEADER_BYTES)
            payload = np.fromfile(file, np.uint8, max(there, 0))
            whole = len(payload) == size
            end = offset + FRAME_HEADER_BYTES + size if whole else offset
            yield Frame(end, payload, unix_ns)
            if not whole:
                return
            offset = end


def _next_magic(file: BinaryIO, offset: int) -> int | None:
    """Where the next frame seems to begin, None when there is none."""
    magic = struct.pack("<Q", FRAME_MAGIC)
    while True:
        file.seek(offset)
        chunk = file.read(_SEARCH_BYTES)
        at = chunk.find(magic)
        if at >= 0:
            return offset + at
        if len(chunk) < _SEARCH_BYTES:
            return None
        offset += len(chunk) - len(magic) + 1


def batches(path: Path, layout: Layout) -> Iterator[Batch]:
    """The whole spool file, decoded in batches of about BATCH_BYTES; what is between the frames comes last."""
    pending: list[Frame] = []
    size = covered = 0
    for frame in frames(path):
        pending.append(frame)
        size += FRAME_HEADER_BYTES + len(frame.payload)
        if size >= BATCH_BYTES:
            yield _decoded(pending, layout, size)
            covered += size
            pending, size = [], 0
    if pending:
        yield _decoded(pending, layout, size)
        covered += size
    foreign = path.stat().st_size - covered
    if foreign > 0:
        yield Batch({}, set_aside_bytes=foreign, set_aside_count=1, spool_bytes=foreign)


def _decoded(pending: Sequence[Frame], layout: Layout, size: int) -> Batch:
    batch = decode([frame.payload for frame in pending], layout)
    return replace(batch, spool_bytes=size, handed_over_ns=max(frame.unix_ns for frame in pending))


def decode(payloads: Sequence[npt.NDArray[np.uint8]], layout: Layout) -> Batch:
    """Buffers to one structured array per kind that the layout knows the fields of."""
    words, first_blocks, used_words = _laid_out(payloads)
    sizes = np.zeros(_KINDS_MAX, np.uint8)
    for kind, size in layout.size_of.items():
        sizes[kind] = size // _WORD_BYTES
    low = words.view(np.uint32)[::2]
    # A kind beyond the table cannot begin a record; index 0 has size 0.
    kinds = np.where(low < _KINDS_MAX, low, 0).astype(np.uint8)
    starts, lost_words = _record_starts(np.take(sizes, kinds), first_blocks, used_words)
    found = kinds[starts]
    records = {}
    for kind, dtype in layout.dtype_of.items():
        at = starts[found == kind]
        if len(at):
            # Rows of an overlapping view: each record is copied as one piece.
            rows = sliding_window_view(words, dtype.itemsize // _WORD_BYTES)[at]
            records[kind] = rows.view(dtype).reshape(-1)
    lost = lost_words * _WORD_BYTES + [len(p) % _WORD_BYTES for p in payloads]
    return Batch(records, int(lost.sum()), int(np.count_nonzero(lost)))


def _laid_out(
    payloads: Sequence[npt.NDArray[np.uint8]],
) -> tuple[npt.NDArray[np.uint64], list[int], list[int]]:
    """All buffers as 64-bit words, each beginning at a block boundary: (words, first block, words used)."""
    lengths = [len(p) // _WORD_BYTES for p in payloads]
    blocks = [-(-n // _BLOCK_WORDS) for n in lengths]
    # One block of zeros behind the last lets a gather run past a record that is cut short.
    words = np.zeros((sum(blocks) + 1) * _BLOCK_WORDS, np.uint64)
    first, at = [], 0
    for payload, length, count in zip(payloads, lengths, blocks, strict=True):
        words[at * _BLOCK_WORDS :][:length] = payload[: length * _WORD_BYTES].view(np.uint64)
        first.append(at)
        at += count
    return words, first, lengths


def _record_starts(
    size: npt.NDArray[np.uint8], first_blocks: Sequence[int], used_words: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Word offsets of all records, and how many words of each buffer belong to none.

    ``size[w]`` is the size in words of a record beginning at word w, 0 where none can begin.
    """
    block_count = len(size) // _BLOCK_WORDS
    # Row j holds word j of every block: each step of the sweeps works on contiguous rows.
    size_of = np.ascontiguousarray(size.reshape(block_count, _BLOCK_WORDS).T)
    leads_to = size_of + np.arange(_BLOCK_WORDS, dtype=np.int32)[:, None]
    leads_to[size_of == 0] = _STOP
    lanes = np.arange(block_count)
    leaves_at = leads_to.copy()
    for j in range(_BLOCK_WORDS - 2, -1, -1):
        target = leads_to[j]
        inside = target < _BLOCK_WORDS
        leaves_at[j] = np.where(inside, leaves_at[np.where(inside, target, 0), lanes], target)
    entry = _entries(leaves_at, first_blocks, used_words)
    marks = np.zeros((block_count, _BLOCK_WORDS), bool)
    block = np.flatnonzero(entry >= 0)
    at = entry[block]
    while len(block):
        step = size_of[at, block]
        ok = step > 0
        marks[block[ok], at[ok]] = True
        at = at + step
        ok &= at < _BLOCK_WORDS
        block, at = block[ok], at[ok]
    starts = np.flatnonzero(marks)
    return _whole_records(starts, size, first_blocks, used_words)


def _entries(
    leaves_at: npt.NDArray[np.int32], first_blocks: Sequence[int], used_words: Sequence[int]
) -> npt.NDArray[np.int64]:
    """The word at which the chain enters each block, −1 where it does not."""
    entry = np.full(leaves_at.shape[1], -1, np.int64)
    for first, used in zip(first_blocks, used_words, strict=True):
        at = 0
        for block in range(first, first + -(-used // _BLOCK_WORDS)):
            entry[block] = at
            out = int(leaves_at[at, block])
            if out >= _STOP:
                break
            at = out - _BLOCK_WORDS
    return entry


def _whole_records(
    starts: npt.NDArray[np.int64],
    size: npt.NDArray[np.uint8],
    first_blocks: Sequence[int],
    used_words: Sequence[int],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Drop records that run past the end of their buffer; count the words of each buffer that none covers."""
    begins = np.asarray(first_blocks, np.int64) * _BLOCK_WORDS
    used = np.asarray(used_words, np.int64)
    # Buffers without a word share their begin with the next one; the last of them is the one with words.
    buffer = np.searchsorted(begins, starts, side="right") - 1
    ends = begins + used
    if len(starts):
        whole = starts + size[starts] <= ends[buffer]
        starts, buffer = starts[whole], buffer[whole]
    covered = np.bincount(buffer, weights=size[starts], minlength=len(used)).astype(np.int64)
    return starts, used - covered
