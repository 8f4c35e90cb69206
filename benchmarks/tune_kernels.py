"""How the block sizes of the reference kernels were chosen: each candidate's time beside the present choice, on a GPU.

    python benchmarks/tune_kernels.py [GROUP…] [--runs 15] [--json FILE]

with GROUP among prefill, decode, gemm, copy, pointwise, int8_linear, rotary, linear_silu.

Candidates of one kernel and shape take turns; L2 is cold for what streams and warm for products. A candidate that does
not compile or does not fit into the GPU's resources is said to fail. ``torch`` is the yardstick where there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spikeprof.kernels.attention import decode as decode_module
from spikeprof.kernels.attention import decode_triton, paged_attention, tiled_attention, tiled_triton
from spikeprof.kernels.bench.timing import COLD, WARM, measure
from spikeprof.kernels.cache import make_cache
from spikeprof.kernels.engine import linear_triton
from spikeprof.kernels.engine.linear import linear, quantised
from spikeprof.kernels.fused import (
    gelu_dropout,
    gelu_dropout_triton,
    linear_silu,
    linear_silu_triton,
    rotary,
    rotary_table,
    rotary_triton,
    silu_mul,
    silu_mul_triton,
)  # fmt: skip
from spikeprof.kernels.probes import copy_triton, gemm_triton

HALF = {"device": "cuda", "dtype": torch.float16}


class Knob(NamedTuple):
    """An attribute of a module, and what to try for it."""

    module: Any
    name: str
    candidates: dict[str, object]


class Trial(NamedTuple):
    """One kernel at one shape: ``call`` is timed for each candidate of the knob, ``twins`` beside it."""

    what: str
    call: Callable[[], object]
    knob: Knob
    l2: str
    twins: dict[str, Callable[[], object]]
    bytes_moved: int = 0
    flops: int = 0


def prefill() -> Iterator[Trial]:
    """Tiles of prefill attention."""
    tile = tiled_triton._Tile
    tried = [(128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 2), (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 4, 2),
             (64, 64, 4, 3), (128, 32, 4, 4), (256, 64, 8, 3)]  # fmt: skip
    knob = Knob(tiled_triton, "_tile", {str(t): lambda *_, t=t: tile(*t) for t in tried})
    for head_dim, length in ((64, 4096), (128, 4096), (128, 16384)):
        q, k, v = (torch.randn(1, 16, length, head_dim, **HALF) for _ in range(3))
        yield Trial(
            f"prefill causal, 16 heads of {head_dim}, {length} tokens",
            lambda q=q, k=k, v=v: tiled_attention(q, k, v),
            knob,
            WARM,
            {"torch": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True)},
            flops=2 * 16 * length * length * head_dim,
        )


def decode() -> Iterator[Trial]:
    """Tiles, and programs, of paged decode."""
    tile = decode_triton._Tile
    tried = [(64, 4, 3), (64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 4, 3), (32, 4, 4), (32, 2, 4), (64, 2, 3),
             (64, 2, 2), (32, 4, 3), (32, 2, 3), (128, 8, 3), (32, 2, 1), (32, 2, 2), (32, 1, 1), (32, 1, 3),
             (64, 4, 1), (64, 2, 1), (16, 1, 1), (16, 1, 3), (64, 8, 1), (128, 8, 1)]  # fmt: skip
    tiles = Knob(decode_triton, "_tile", {str(t): lambda *_, t=t: tile(*t) for t in tried})
    programs = Knob(decode_module, "PROGRAMS_WANTED", {str(n): n for n in (132, 264, 396, 528, 792, 1056)})
    for kind in ("fp16", "int8", "int4"):
        for batch, length in ((32, 4096), (64, 8192)):
            q, pages, size_bytes = filled(kind, batch, length)
            for knob in (tiles, programs):
                yield Trial(
                    f"decode {kind}, batch {batch}, {length} tokens, {knob.name}",
                    lambda q=q, pages=pages: paged_attention(q, pages),
                    knob,
                    COLD,
                    {},
                    bytes_moved=size_bytes,
                )


def filled(kind: str, batch: int, length: int) -> tuple[Tensor, Any, int]:
    """32 query and 8 key-value heads of 128 over a cache full of random tokens, and the bytes of it."""
    cache = make_cache(
        kind, layers=1, kv_heads=8, head_dim=128, capacity_tokens=batch * length, page_size=16, max_sequences=batch,
        max_tokens=length, dtype=torch.float16, device=HALF["device"],
    )  # fmt: skip
    for sequence in range(batch):
        cache.begin(sequence)
        plan = cache.plan([(sequence, length - 1)])
        cache.append(0, plan, *(torch.randn(length - 1, 8, 128, **HALF) for _ in range(2)))
    plan = cache.plan([(sequence, 1) for sequence in range(batch)])
    cache.append(0, plan, *(torch.randn(batch, 8, 128, **HALF) for _ in range(2)))
    return torch.randn(batch, 32, 128, **HALF), cache.pages(0, plan), batch * length * cache.usage().bytes_per_token


def gemm() -> Iterator[Trial]:
    """Tiles of the matrix product."""
    tiles = gemm_triton.Tiles
    tried = [(128, 256, 64, 8, 8, 3), (128, 256, 64, 8, 8, 4), (128, 128, 64, 8, 8, 4), (128, 128, 64, 8, 4, 4),
             (256, 128, 64, 8, 8, 3), (128, 256, 64, 16, 8, 3), (128, 256, 64, 4, 8, 3),
             (128, 128, 128, 8, 8, 3)]  # fmt: skip
    knob = Knob(gemm_triton, "TILES", {str(t): {2: tiles(*t), 4: gemm_triton.TILES[4]} for t in tried})
    for size in (4096, 8192):
        a, b, out = (torch.randn(size, size, **HALF) for _ in range(3))
        yield Trial(
            f"product of {size}",
            lambda a=a, b=b, out=out: gemm_triton.multiply(a, b, out),
            knob,
            WARM,
            {"torch": lambda a=a, b=b, out=out: torch.matmul(a, b, out=out)},
            flops=2 * size**3,
        )


def copy() -> Iterator[Trial]:
    """Words a program of the copy takes."""
    source, out = (torch.empty(1 << 28, dtype=torch.int32, device="cuda") for _ in range(2))
    for knob in (
        Knob(copy_triton, "WORDS", {str(n): n for n in (1024, 2048, 4096, 8192)}),
        Knob(copy_triton, "WARPS", {str(n): n for n in (2, 4, 8, 16)}),
    ):
        yield Trial(
            f"copy of 1 GiB, {knob.name}", lambda: copy_triton.copy_words(source, out), knob, COLD,
            {"torch": lambda: out.copy_(source)}, bytes_moved=2 * source.nbytes,
        )  # fmt: skip


def pointwise() -> Iterator[Trial]:
    """Elements a program of the pointwise kernels takes."""
    x, y = (torch.randn(1 << 27, **HALF) for _ in range(2))
    out = torch.empty_like(x)
    for module, call, arrays in (
        (gelu_dropout_triton, lambda: gelu_dropout(x, 0.1, seed=1), 2),
        (silu_mul_triton, lambda: silu_mul(x.view(1, -1), y.view(1, -1)), 3),
    ):
        for name, values in (("ELEMENTS", (1024, 2048, 4096, 8192)), ("WARPS", (2, 4, 8))):
            yield Trial(
                f"{module.__name__.split('.')[-1]}, {name}",
                call,
                Knob(module, name, {str(n): n for n in values}),
                COLD,
                {"torch copy": lambda: out.copy_(x)},
                bytes_moved=arrays * x.nbytes,
            )


def int8_linear() -> Iterator[Trial]:
    """Blocks of the product with INT8 weights."""
    for rows, outs, ins in ((1, 4096, 4096), (16, 14336, 4096), (16, 4096, 14336), (64, 11008, 4096)):
        x, weight = torch.randn(rows, ins, **HALF), torch.randn(outs, ins, **HALF)
        small = quantised(weight)
        for name, values in (
            ("BLOCK_OUT", (16, 32, 64, 128)),
            ("BLOCK_IN", (128, 256, 512)),
            ("NUM_STAGES", (2, 3, 4, 5)),
        ):
            yield Trial(
                f"int8 {rows} x {ins} x {outs}, {name}",
                lambda x=x, small=small: linear(x, small),
                Knob(linear_triton, name, {str(n): n for n in values}),
                COLD,
                {"torch fp16": lambda x=x, weight=weight: F.linear(x, weight)},
                bytes_moved=outs * ins,
            )


def rotary_() -> Iterator[Trial]:
    """Elements a program of the rotary embedding takes."""
    q, k = (torch.randn(16384, heads, 128, **HALF) for heads in (32, 8))
    positions, table = torch.arange(16384, device="cuda"), rotary_table(16384, 128, device="cuda")
    out, moved = torch.empty_like(q), 2 * (q.nbytes + k.nbytes)
    for warps in (2, 4, 8):
        yield Trial(
            f"rotary, {warps} warps, ELEMENTS",
            lambda warps=warps: with_warps(warps, lambda: rotary(q, k, positions, table)),
            Knob(rotary_triton, "ELEMENTS", {str(n): n for n in (512, 1024, 2048, 4096)}),
            COLD,
            {"torch copy of q": lambda: out.copy_(q)},
            bytes_moved=moved,
        )


def with_warps(warps: int, call: Callable[[], object]) -> object:
    """The call with so many warps a program."""
    rotary_triton.WARPS = warps
    return call()


def linear_silu_() -> Iterator[Trial]:
    """Tiles of the product with SiLU in its epilogue."""
    tile = linear_silu_triton._Tile
    x, weight, bias = torch.randn(4096, 4096, **HALF), torch.randn(11008, 4096, **HALF) / 64, torch.randn(11008, **HALF)
    tried = [(128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3),
             (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 256, 32, 8, 4)]  # fmt: skip
    yield Trial(
        "4096 x 4096 x 11008 with SiLU",
        lambda: linear_silu(x, weight, bias),
        Knob(linear_silu_triton, "_tile", {str(t): lambda *_, t=t: tile(*t) for t in tried}),
        WARM,
        {"torch": lambda: F.silu(F.linear(x, weight, bias))},
        flops=2 * 4096 * 4096 * 11008,
    )


def tried(trial: Trial, runs: int) -> dict[str, float]:
    """Median ns by candidate; ``now`` is the present choice. NaN: it failed."""
    module, name, candidates = trial.knob
    present = getattr(module, name)

    def with_value(value: object) -> Callable[[], object]:
        def call() -> object:
            setattr(module, name, value)
            return trial.call()

        return call

    calls = {"now": with_value(present)} | {label: with_value(value) for label, value in candidates.items()}
    failed = {}
    for label, call in list(calls.items()):
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            failed[label] = float("nan")
            del calls[label]
            print(f"    {label}: {type(error).__name__}", flush=True)
    try:
        times = measure(calls | trial.twins, torch.device("cuda"), trial.l2, runs=runs)
    finally:
        setattr(module, name, present)
    return {label: each.median_ns for label, each in times.items()} | failed


def main() -> int:
    """Try and print."""
    groups = {
        g.__name__.rstrip("_"): g for g in (prefill, decode, gemm, copy, pointwise, int8_linear, rotary_, linear_silu_)
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", default=list(groups))
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    table = {}
    for group in arguments.groups:
        for trial in groups[group]():
            print(trial.what, flush=True)
            found = table[trial.what] = tried(trial, arguments.runs)
            for label, median_ns in sorted(found.items(), key=lambda item: item[1]):
                rates = [f"{amount / median_ns / 1e3:.2f} T{unit}/s" for amount, unit in
                         ((trial.bytes_moved, "B"), (trial.flops, "FLOP")) if amount]  # fmt: skip
                print(f"  {label:28} {median_ns / 1e3:10.1f} us  {'  '.join(rates)}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
