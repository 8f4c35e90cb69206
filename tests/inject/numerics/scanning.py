"""Scans of single tensors, and what they must find, worked out by numpy without any of the code under test."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch

from spikeprof.profiler.inject.numerics import records
from spikeprof.profiler.inject.numerics.formats import FLOAT, NIBBLES, SIGNED, Format
from spikeprof.profiler.inject.numerics.scanner import TritonScanner

#: name -> (bits of an element, bits of NaN and of infinity, of the largest number, of the smallest normal one)
FLOATS = {
    "float16": (16, 0x7E00, 0x7C00, 0x7BFF, 0x0400),
    "bfloat16": (16, 0x7FC0, 0x7F80, 0x7F7F, 0x0080),
    "float32": (32, 0x7FC00000, 0x7F800000, 0x7F7FFFFF, 0x00800000),
    "float64": (64, 0x7FF8 << 48, 0x7FF0 << 48, (0x7FF0 << 48) - 1, 0x0010 << 48),
    "float8_e4m3fn": (8, 0x7F, None, 0x7E, 0x08),
    "float8_e5m2": (8, 0x7E, 0x7C, 0x7B, 0x04),
}

CODES = ("int8", "uint8", "int4")

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def by_triton(kernels: ModuleType, tensor: Any, form: Format) -> list[int]:
    """The statistics by a scanner of its own, through its ring."""
    scanner = TritonScanner(torch, tensor.device, kernels)
    return scan_all(scanner, [(tensor, form)])[0]


def scan_all(scanner: TritonScanner, tensors: list[tuple[Any, Format]]) -> list[list[int]]:
    """Statistics of tensors that are scanned in one step, in their order."""
    scanner.begin()
    for order, (tensor, form) in enumerate(tensors):
        scanner.add(tensor, form, order << 32 | form.number << 24)
    if tensors[0][0].is_cuda:
        torch.cuda.synchronize()
    pieces: list[bytes] = []
    scanner.memory.drain(lambda piece: pieces.append(bytes(piece)), all_of_it=True)
    words = np.frombuffer(b"".join(pieces), np.int64).reshape(-1, records.RECORD_WORDS)
    assert len(words) == len(tensors)
    assert all(records.is_whole(tuple(row)) for row in words.tolist())
    words = words[np.argsort(words[:, records.TAG] >> 32)]
    elements = [tensor.numel() * (2 if form.kind == NIBBLES else 1) for tensor, form in tensors]
    assert words[:, records.ELEMENTS].tolist() == elements
    return [row[5:14].tolist() for row in words]


def by_numpy(raw: np.ndarray[Any, Any], form: Format) -> list[int]:
    """The same but for the rows, of the elements' bits, as unsigned integers in order."""
    if form.kind == FLOAT:
        width, _, infinity, _, normal = FLOATS[form.name]
        sizes = [int(bits) & ((1 << (width - 1)) - 1) for bits in raw.tolist()]
        top = infinity if infinity is not None else 0x7F
        bad = [size >= top for size in sizes]
        inf = [size == infinity for size in sizes]
    elif form.kind == NIBBLES:
        sizes = [half for byte in raw.tolist() for half in (byte & 15, byte >> 4)]
        bad, inf, normal = [False] * len(sizes), [False] * len(sizes), 1
    else:
        sizes = [abs(int(code)) for code in (raw.view(np.int8) if form.kind == SIGNED else raw).tolist()]
        bad, inf, normal = [False] * len(sizes), [False] * len(sizes), 1
    finite = [size for size, is_bad in zip(sizes, bad, strict=True) if not is_bad]
    ends = {"int8": {127, 128}, "uint8": {0, 255}, "int4": {0, 15}}.get(form.name) or {FLOATS[form.name][3]}
    return [
        max(finite, default=-1),
        min((size for size in finite if size), default=-1),
        sum(bad) - sum(inf),
        sum(inf),
        sum(0 < size < normal for size in sizes),
        sizes.count(0),
        sum(size in ends for size in finite),
        bad.index(True) if True in bad else -1,
    ]
