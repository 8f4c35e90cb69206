from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from assemble.spools import LAYOUT, T0, buffer, frame, record
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import SHARED, needs_shared

from spikeprof.profiler.assemble import layouts as lay
from spikeprof.profiler.assemble import records as rec
from spikeprof.profiler.assemble.records import Batch, batches, decode, frames

_BLOCK_BYTES = 512 * 8


def _walk(payload: bytes) -> tuple[list[bytes], int]:
    """The records of one buffer by the plainest means, and the bytes that belong to none."""
    found, at = [], 0
    while at + 4 <= len(payload):
        size = LAYOUT.size_of.get(struct.unpack_from("<I", payload, at)[0])
        if size is None or at + size > len(payload):
            break
        found.append(payload[at : at + size])
        at += size
    return found, len(payload) - at


def _expected(payloads: Sequence[bytes]) -> tuple[dict[int, list[bytes]], int, int]:
    by_kind: dict[int, list[bytes]] = {}
    lost = []
    for payload in payloads:
        found, rest = _walk(payload)
        lost.append(rest)
        for one in found:
            kind = struct.unpack_from("<I", one)[0]
            if kind in LAYOUT.dtype_of:
                by_kind.setdefault(kind, []).append(one)
    return by_kind, sum(lost), sum(rest > 0 for rest in lost)


def _got(batch: Batch) -> tuple[dict[int, list[bytes]], int, int]:
    by_kind = {kind: [row.tobytes() for row in rows] for kind, rows in batch.records.items()}
    return by_kind, batch.set_aside_bytes, batch.set_aside_count


def _assert_same(payloads: Sequence[bytes]) -> None:
    assert _got(decode([buffer(p) for p in payloads], LAYOUT)) == _expected(payloads)


_kinds = st.sampled_from(sorted(LAYOUT.size_of))


@st.composite
def _payload(draw: st.DrawFn) -> bytes:
    """Records of random kinds with random bodies; then perhaps garbage, perhaps cut at any byte."""
    kinds = draw(st.lists(_kinds, max_size=60))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    data = b"".join(
        struct.pack("<I", kind) + random.integers(0, 256, LAYOUT.size_of[kind] - 4, np.uint8).tobytes()
        for kind in kinds
    )
    data += draw(st.binary(max_size=40))
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))]
    return data


@settings(max_examples=150, deadline=None)
@given(st.lists(_payload(), max_size=5))
def test_any_sequence_of_records_is_read_as_a_plain_walk_reads_it(payloads: list[bytes]) -> None:
    _assert_same(payloads)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=600).map(lambda data: data[: len(data) // 4 * 4]), st.integers(0, 20))
def test_an_unknown_kind_ends_its_buffer_only(garbage: bytes, before: int) -> None:
    kernel = record(lay.KERNEL, correlation=5)
    _assert_same([kernel * before + struct.pack("<I", 77) + garbage, kernel * 3, b"", kernel])


@pytest.mark.parametrize("shift", [0, 8, 40, 88, 96, 216, 4088, 4096])
def test_records_across_the_edges_of_blocks(shift: int) -> None:
    """Buffers whose records end just before, at and just behind every edge that the walk is cut at."""
    pad = b"".join(record(lay.RUNTIME) for _ in range(shift // 40))
    kernels = b"".join(record(lay.KERNEL, correlation=i) for i in range(60))
    for data in (pad + kernels, kernels + pad, pad + kernels[:-8], (pad + kernels)[: 3 * _BLOCK_BYTES]):
        _assert_same([data, data])


def test_a_buffer_that_is_full_to_the_last_word_of_a_block() -> None:
    size = LAYOUT.size_of[lay.EXTERNAL_CORRELATION]
    full = record(lay.EXTERNAL_CORRELATION) * (_BLOCK_BYTES // size)
    rest = _BLOCK_BYTES - len(full)
    assert rest == 16
    data = full + record(lay.KERNEL, correlation=9)
    _assert_same([data, record(lay.KERNEL, correlation=10)])
    _assert_same([data[:_BLOCK_BYTES], record(lay.KERNEL, correlation=10)])


def test_no_buffers_and_empty_buffers() -> None:
    assert _got(decode([], LAYOUT)) == ({}, 0, 0)
    assert _got(decode([buffer(b""), buffer(b"")], LAYOUT)) == ({}, 0, 0)
    kernel = record(lay.KERNEL, correlation=3)
    _assert_same([b"", kernel, b"", b"", kernel, b""])


def test_zeros_are_no_records() -> None:
    """Kind 0 is invalid: a buffer's unused rest, written by mistake, must not loop or count."""
    data = record(lay.KERNEL, correlation=3) + bytes(800)
    batch = decode([buffer(data)], LAYOUT)
    assert len(batch.records[lay.KERNEL]) == 1
    assert (batch.set_aside_bytes, batch.set_aside_count) == (800, 1)


def test_one_huge_buffer() -> None:
    count = 60_000
    size = LAYOUT.size_of[lay.KERNEL] + LAYOUT.size_of[lay.RUNTIME]
    both = np.frombuffer(record(lay.KERNEL) + record(lay.RUNTIME), np.uint8)
    data = np.tile(both, count).reshape(count, size)
    numbers = np.arange(count, dtype=np.uint32)
    kernel_field = LAYOUT.dtype_of[lay.KERNEL].fields["correlation"][1]
    data[:, kernel_field : kernel_field + 4] = numbers.view(np.uint8).reshape(count, 4)
    batch = decode([data.reshape(-1)], LAYOUT)
    assert batch.records[lay.KERNEL]["correlation"].tolist() == numbers.tolist()
    assert len(batch.records[lay.RUNTIME]) == count
    assert batch.set_aside_bytes == 0


def test_kernels_keep_every_field() -> None:
    values = {
        "registers": 168,
        "start": 11,
        "end": 12,
        "device": 1,
        "context": 2,
        "stream": 7,
        "grid_x": 2**31 - 1,
        "grid_y": 66,
        "grid_z": 3,
        "block_x": 384,
        "block_y": 4,
        "block_z": 5,
        "shared_static": 48,
        "shared_dynamic": 188_636,
        "local": 16,
        "correlation": 2**32 - 1,
        "name": 2**47,
        "graph_node": 2**63 + 5,
        "graph": 9,
    }
    row = decode([buffer(record(lay.KERNEL, **values))], LAYOUT).records[lay.KERNEL][0]
    assert {name: int(row[name]) for name in values} == values


@needs_shared
def test_a_recorded_buffer_of_an_h200() -> None:
    """What README says was run: 5 large and 300 small multiplications, 3 matrix products, 3 gathers."""
    path = SHARED / "recordings" / "h200_cross_process" / "activity_kernel10.bin"
    if not path.exists():
        pytest.skip(f"{path.name} is not there")
    batch = decode([np.fromfile(path, np.uint8)], LAYOUT)
    assert (batch.set_aside_bytes, list(batch.records)) == (0, [lay.KERNEL])
    kernels = batch.records[lay.KERNEL]
    assert len(kernels) == 311
    # In the order of the workload, by (name, grid): both kinds of multiplication run one kernel.
    names = kernels["name"].tolist()
    large, small, product, gather = names[0], names[5], names[305], names[308]
    assert large == small
    assert len({large, product, gather}) == 3
    assert names == [large] * 305 + [product] * 3 + [gather] * 3
    # One block multiplies 1024 elements: 2^28 and 2^22 of them. One gathers 512: 2^24.
    assert kernels["grid_x"].tolist() == [2**18] * 5 + [2**12] * 300 + [2] * 3 + [2**15] * 3
    durations = (kernels["end"] - kernels["start"]).astype(np.int64)
    for which, low, high in ((slice(0, 5), 240_000, 260_000), (slice(5, 305), 3_600, 5_500)):
        assert low < durations[which].min() <= durations[which].max() < high
    # 2 · 8192³ floating-point operations cannot take less than at the H200's dense fp16 peak, 989.5 TFLOP/s.
    assert durations[305:308].min() > 2 * 8192**3 / 989.5e12 * 1e9
    # 512 MiB read and 512 MiB written cannot take less than at its 4.8 TB/s.
    assert durations[:5].min() > 2 * 2**29 / 4.8e12 * 1e9
    starts = kernels["start"].astype(np.int64)
    assert (np.diff(starts) > 0).all()
    assert (starts[1:] >= kernels["end"].astype(np.int64)[:-1]).all()  # one stream
    # Two milliseconds of sleep lie between the four parts, less what the part before still had to do.
    pauses = np.flatnonzero(np.diff(starts) > 1_500_000).tolist()
    assert {4, 304, 307} <= set(pauses)
    assert len(set(kernels["correlation"].tolist())) == 311


# -- frames -----------------------------------------------------------------------------------------------


def _file(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


def _payloads(path: Path, offset: int = 0) -> list[bytes]:
    return [f.payload.tobytes() for f in frames(path, offset)]


def test_frames_in_order(tmp_path: Path) -> None:
    path = _file(tmp_path / "a.act", frame(b"one-----"), frame(b""), frame(b"three---", unix_ns=T0 + 3))
    found = list(frames(path))
    assert [f.payload.tobytes() for f in found] == [b"one-----", b"", b"three---"]
    assert [f.end for f in found] == [72, 136, 208]
    assert found[2].unix_ns == T0 + 3
    assert _payloads(path, 72) == [b"", b"three---"]


@pytest.mark.parametrize("missing", [1, 7, 8, 9, 63, 64, 71])
def test_a_frame_that_is_cut_short_is_given_as_far_as_it_goes(tmp_path: Path, missing: int) -> None:
    whole, last = frame(b"one-----"), frame(b"two-----")
    path = _file(tmp_path / "a.act", whole, last[:-missing])
    found = list(frames(path))
    assert found[0].payload.tobytes() == b"one-----"
    if missing <= 8:  # the header is whole
        assert [f.end for f in found] == [72, 72]
        assert found[1].payload.tobytes() == b"two-----"[:-missing]
    else:
        assert [f.end for f in found] == [72]


def test_a_reader_can_come_back_to_a_growing_file(tmp_path: Path) -> None:
    one, two = frame(b"one-----"), frame(b"two-----")
    path = _file(tmp_path / "a.act", one, two[:-3])
    end = 0
    for found in frames(path):
        end = found.end
    path.write_bytes(one + two)
    assert _payloads(path, end) == [b"two-----"]


@pytest.mark.parametrize("garbage", [b"x", b"garbage " * 20, bytes(5000), frame(b"")[8:]])
def test_foreign_bytes_are_passed_over(tmp_path: Path, garbage: bytes) -> None:
    path = _file(tmp_path / "a.act", garbage, frame(b"one-----"), garbage, frame(b"two-----"), garbage)
    assert _payloads(path) == [b"one-----", b"two-----"]


def test_foreign_bytes_longer_than_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rec, "_SEARCH_BYTES", 16)
    for length in range(1, 40):
        path = _file(tmp_path / "a.act", b"-" * length, frame(b"one-----"))
        assert _payloads(path) == [b"one-----"], length


def test_a_header_that_promises_more_than_any_buffer_holds_is_foreign(tmp_path: Path) -> None:
    damaged = bytearray(frame(b"one-----"))
    damaged[8:16] = struct.pack("<Q", 2**60)
    path = _file(tmp_path / "a.act", bytes(damaged), frame(b"two-----"))
    assert _payloads(path) == [b"two-----"]


@pytest.mark.parametrize("data", [b"", b"x", b"not a spool at all", bytes(10_000)])
def test_files_without_frames(tmp_path: Path, data: bytes) -> None:
    path = _file(tmp_path / "a.act", data)
    assert _payloads(path) == []
    found = list(batches(path, LAYOUT))
    assert [(b.set_aside_bytes, b.set_aside_count) for b in found] == ([(len(data), 1)] if data else [])


# -- batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_bytes", [1, 300, 1000, 1 << 20])
def test_batches_cover_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int) -> None:
    monkeypatch.setattr(rec, "BATCH_BYTES", batch_bytes)
    parts = [frame(record(lay.KERNEL, correlation=i) * (i % 3), unix_ns=T0 + i) for i in range(20)]
    path = _file(tmp_path / "a.act", *parts)
    found = list(batches(path, LAYOUT))
    numbers = [int(n) for b in found if lay.KERNEL in b.records for n in b.records[lay.KERNEL]["correlation"]]
    assert numbers == [i for i in range(20) for _ in range(i % 3)]
    assert sum(b.spool_bytes for b in found) == path.stat().st_size
    assert [b.handed_over_ns for b in found] == sorted(b.handed_over_ns for b in found)
    assert found[-1].handed_over_ns == T0 + 19
    assert not any(b.set_aside_bytes for b in found)


def test_what_lies_between_frames_is_counted(tmp_path: Path) -> None:
    kernel = record(lay.KERNEL)
    path = _file(tmp_path / "a.act", b"garbage", frame(kernel), b"more", frame(kernel)[:-10])
    found = list(batches(path, LAYOUT))
    assert [len(b.records.get(lay.KERNEL, ())) for b in found] == [1, 0]
    # The second kernel lacks ten bytes of 216.
    assert [(b.set_aside_bytes, b.set_aside_count) for b in found] == [(206, 1), (11, 1)]
    assert sum(b.spool_bytes for b in found) == path.stat().st_size
