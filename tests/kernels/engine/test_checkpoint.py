from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spikeprof.kernels.engine.checkpoint import (
    INDEX,
    Checkpoint,
    CheckpointError,
    Shard,
    write_shard,
    write_sharded,
)


def raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file put together by hand, as damaged as it is asked for."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: object = None, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    # An odd header: the data are not aligned for fp32.
    header = b'{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"__metadata__":{"format":"pt"}} '
    path = raw(tmp_path / "x.safetensors", header + b" " * (1 - len(header) % 2), struct.pack("<2f", 1.5, -2))
    into = torch.empty(2, 1, dtype=torch.float16)
    Checkpoint(path).read("a", into)
    assert into.tolist() == [[1.5], [-2.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_is_written_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.randn(3, 5).to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "one": torch.ones(1).to(dtype),
    }
    write_shard(tmp_path / "model.safetensors", tensors)
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in tensors.items():
        into = torch.zeros_like(tensor)
        checkpoint.read(name, into)
        assert torch.equal(into, tensor)


def test_shards_by_their_index(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((2, 2), float(number)) for number in range(5)}
    write_sharded(tmp_path, tensors, 2)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in tensors.items():
        into = torch.zeros(2, 2)
        checkpoint.read(name, into)
        assert torch.equal(into, tensor)
    with pytest.raises(CheckpointError, match=r"tensor t9 is missing"):
        checkpoint.read("t9", torch.empty(1))


def write_garbage(path: Path) -> Path:
    path.write_bytes(b"abc")
    return path


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (write_garbage, "has 3 bytes: too short for a header"),
        (lambda p: raw(p, {}, length=999), "truncated header: it is said to have 999 bytes, the file has 10"),
        (lambda p: raw(p, {}, length=1 << 63), "truncated header"),
        (lambda p: raw(p, b"{"), "damaged header: Expecting"),
        (lambda p: raw(p, b"\xff\xfe"), "damaged header"),
        (lambda p: raw(p, []), "damaged header: it must be a JSON object"),
        (lambda p: raw(p, b'{"a":{},"a":{}}'), "damaged header: 'a' is there twice"),
        (lambda p: raw(p, {"a": 3}), "tensor a: its entry must be a JSON object"),
        (lambda p: raw(p, {"a": entry(0, 4, dtype="F31")}, b"0000"), "tensor a has dtype 'F31'"),
        (lambda p: raw(p, {"a": entry(0, 4, dtype=["F32"])}, b"0000"), r"tensor a has dtype \['F32'\]"),
        (lambda p: raw(p, {"a": entry(0, 4, shape=[-1])}, b"0000"), r"tensor a has shape \[-1\]: it must be a list"),
        (lambda p: raw(p, {"a": entry(0, 4, shape=[True])}, b"0000"), r"tensor a has shape \[True\]"),
        (
            lambda p: raw(p, {"a": entry(4, 0, shape=[1])}, b"0000"),
            r"tensor a has data_offsets \[4, 0\]: begin and end",
        ),
        (lambda p: raw(p, {"a": entry(0, 4, shape=[2])}, b"0000"), r"tensor a has 4 bytes; F32 \[2\] needs 8"),
        (lambda p: raw(p, {"a": entry(0, 8)}, b"0000"), "tensor a ends at byte 8 of the data, but the file has only 4"),
        (
            lambda p: raw(p, {"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
            "tensor b overlaps a: it begins at byte 4, a ends at 8",
        ),
        (
            lambda p: raw(p, {"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)),
            "there is a hole of 4 bytes before tensor b",
        ),
        (lambda p: raw(p, {"a": entry(0, 4)}, bytes(12)), "8 bytes after a belong to no tensor"),
    ],
)
def test_damaged_files(tmp_path: Path, make: Callable[[Path], Path], problem: str) -> None:
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: {problem}"):
        Shard(make(tmp_path / "x.safetensors"))


def test_a_file_cut_off_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a": torch.ones(8), "b": torch.ones(8)}, 2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: tensor b ends at byte 32 .* only 31"):
        Checkpoint(tmp_path)


def test_other_dtypes_and_shapes_are_told_by_tensor(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", {"ids": torch.ones(2, dtype=torch.int32), "a": torch.ones(2, 3)})
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor ids is I32: F64, F32, F16, BF16 can be loaded"):
        checkpoint.read("ids", torch.empty(2))
    with pytest.raises(CheckpointError, match=r"tensor a has shape \[2, 3\], \[3, 2\] is wanted"):
        checkpoint.read("a", torch.empty(3, 2))


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("{", "has no readable weight_map"),
        ("{}", "has no readable weight_map: KeyError"),
        ("[]", "has no readable weight_map: TypeError"),
        ('{"weight_map": []}', "weight_map must be a JSON object"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "tensor a is in '../x.safetensors': it must be a file beside"),
        (json.dumps({"weight_map": {"a": 300 * "x"}}), "tensor a is in 'x+': it must be a file beside the index"),
        (r'{"weight_map": {"a": "\ud800"}}', "shard is missing"),
        ('{"weight_map": {"a": 3}}', "tensor a is in 3: it must be a file beside"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "shard is missing; .* has tensor a there"),
        ('{"weight_map": {"b": "x.safetensors"}}', "tensor b is missing; .* has it there"),
    ],
)
def test_damaged_indexes(tmp_path: Path, index: str, problem: str) -> None:
    write_shard(tmp_path / "x.safetensors", {"a": torch.ones(1)})
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=problem):
        Checkpoint(tmp_path)


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors.index.json nor model.safetensors"):
        Checkpoint(tmp_path)


def test_damage_of_any_kind_is_told_or_harms_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_shard(path, {"a": torch.ones(3, 4), "b": torch.ones(5).half(), "c": torch.zeros(0, 3)})
    whole = path.read_bytes()
    pieces = [b'"', b"{", b"}", b"[", b"-", b"9" * 30, b"null", rb"\ud800", b"NaN", b"1e9", b"\0", b"\xff"]
    for seed in range(400):
        source = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 3)):
            at = source.randrange(len(damaged))
            if source.random() < 0.3:
                del damaged[at + 1 :]
            elif source.random() < 0.5:
                damaged[at] = source.randrange(256)
            else:
                damaged[at:at] = source.choice(pieces)
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            found = Checkpoint(path)
            for name, shape in {"a": (3, 4), "b": (5,), "c": (0, 3)}.items():
                found.read(name, torch.empty(shape))
