"""Cases of attention and of the KV caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spikeprof.kernels.attention import decode_attention, naive_attention, reference_attention, tiled_attention
from spikeprof.kernels.bench.case import FLOPS, Case, Result, drawn
from spikeprof.kernels.cache import KVCache, Plan, bytes_per_token, make_cache
from spikeprof.kernels.paths import TORCH, Attended, Ran

_BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_CHECKED_ROWS = 32  # first and last queries of a group of heads, that are worked out in float64
_FILL_TOKENS = 256  # of each sequence in turn, so that the pages of one lie apart
_NAIVE_MOST = 4096  # tokens that naive attention is timed at
_KINDS = ("fp16", "int8-values", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of attention: ``heads`` share ``kv_heads`` keys and values of ``head_dim`` channels."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} x{self.head_dim} {_SHORT[self.dtype]}"


class Filled(NamedTuple):
    """A cache with sequences in it, the plan that covers them, queries [batch, heads, head_dim]."""

    cache: KVCache
    plan: Plan
    q: Tensor

    def attend(self) -> Attended:
        """One query of each sequence over all that it has."""
        return self.cache.attend(0, self.plan, self.q)


def cases(device: torch.device, small: bool) -> Iterator[Case]:
    """Prefill, then decode over contiguous and paged caches, then writing to the caches."""
    if small:
        sizes = Heads(4, 2, 32, torch.float32)
        yield _prefill(sizes, 72)
        yield _prefill(sizes, 72, window=20)
        steps = [(3, 61)]
    else:
        sizes = Heads(32, 8, 128, torch.float16)
        for tokens in (4096, 16384):
            yield _prefill(sizes, tokens)
        yield _prefill(Heads(32, 8, 128, torch.bfloat16), 8192)
        yield _prefill(sizes, 16384, window=1024)
        steps = [(32, 4091), (64, 8187)]
    for batch, tokens in steps:
        yield _decode(sizes, batch, tokens)
        for kind in _KINDS:
            yield _paged(sizes, kind, batch, tokens)
    for kind in ("fp16", "int8", "int4"):
        yield _append(sizes, kind, steps[0][0], 32 if small else 512)


def _prefill(sizes: Heads, tokens: int, window: int | None = None) -> Case:
    def run(function: Callable[..., Result]) -> Callable[[tuple[Tensor, ...]], Result]:
        return lambda qkv: function(*qkv, window=window)

    seen = tokens if window is None else min(window, tokens)
    scores_count = seen * (seen + 1) // 2 + (tokens - seen) * seen
    twins: dict[str, Callable[[tuple[Tensor, ...]], object]] = {"scaled_dot_product_attention": _sdpa}
    if window is not None:
        twins = {"the whole triangle": lambda qkv: tiled_attention(*qkv)}
    elif tokens <= _NAIVE_MOST:
        twins["naive"] = run(naive_attention)
    elements = tokens * sizes.head_dim * 2 * (sizes.heads + sizes.kv_heads)
    return Case(
        "prefill" if window is None else "prefill window",
        f"{tokens >> 10 or tokens}{'K' if tokens >> 10 else ''} {sizes}" + (f" w{window}" if window else ""),
        lambda device: _qkv(sizes, 1, tokens, device),
        run(tiled_attention),
        bytes_moved=elements * sizes.dtype.itemsize,
        flops=4 * sizes.heads * sizes.head_dim * scores_count,
        bound_by=FLOPS,
        check=lambda qkv, out: _prefill_check(qkv, out, window),
        error_bound=_BOUNDS[sizes.dtype],
        twins=twins,
    )


def _sdpa(qkv: tuple[Tensor, ...]) -> Tensor:
    q, k, v = qkv
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _qkv(sizes: Heads, batch: int, tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        drawn(batch, heads, tokens, sizes.head_dim, device=device, dtype=sizes.dtype, seed=seed)
        for seed, heads in enumerate((sizes.heads, sizes.kv_heads, sizes.kv_heads))
    )


def _prefill_check(qkv: tuple[Tensor, ...], out: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """The first and the last queries of the heads that share the last key-value head."""
    q, k, v = qkv
    group = q.shape[1] // k.shape[1]
    last, keys, values = q[:, -group:], k[:, -1:], v[:, -1:]
    rows = min(_CHECKED_ROWS, q.shape[2])
    head = reference_attention(last[:, :, :rows], keys[:, :, :rows], values[:, :, :rows], window=window).out
    tail = reference_attention(last[:, :, -rows:], keys, values, window=window).out
    got = torch.cat([out[:, -group:, :rows], out[:, -group:, -rows:]], 2)
    return got, torch.cat([head, tail], 2)


def _decode(sizes: Heads, batch: int, tokens: int) -> Case:
    kv_bytes = 2 * batch * tokens * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize

    def make(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q = drawn(batch, sizes.heads, sizes.head_dim, device=device, dtype=sizes.dtype, seed=7)
        _, k, v = _qkv(sizes, batch, tokens, device)
        return q, k, v, torch.full((batch,), tokens, dtype=torch.int32, device=device)

    return Case(
        "decode",
        f"{batch} x {tokens} {sizes}",
        make,
        lambda given: decode_attention(*given),
        bytes_moved=kv_bytes + 2 * batch * sizes.heads * sizes.head_dim * sizes.dtype.itemsize,
        check=lambda given, out: _decode_check(given[0], given[1][-1], given[2][-1], out),
        error_bound=_BOUNDS[sizes.dtype],
        twins={
            "scaled_dot_product_attention": lambda given: F.scaled_dot_product_attention(
                given[0][:, :, None], given[1], given[2], enable_gqa=True
            )
        },
    )


def _decode_check(q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """The last sequence of the batch; its keys and values are [kv_heads, tokens, head_dim]."""
    wanted = reference_attention(q[-1:, :, None], keys[None], values[None]).out
    return out[-1], wanted[0, :, 0]


def _paged(sizes: Heads, kind: str, batch: int, tokens: int) -> Case:
    """Quantised pages against plain ones, and those against a contiguous cache."""
    other = "contiguous" if kind == "fp16" else "fp16"
    token_bytes = bytes_per_token(
        kind, layers=1, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, itemsize=sizes.dtype.itemsize
    )
    return Case(
        f"paged decode {kind}",
        f"{batch} x {tokens} {sizes}",
        lambda device: tuple(fill(each, sizes, batch, tokens, device) for each in (kind, other)),
        lambda caches: caches[0].attend(),
        bytes_moved=batch * (tokens * token_bytes + 2 * sizes.heads * sizes.head_dim * sizes.dtype.itemsize),
        check=lambda caches, out: _paged_check(caches[0], batch - 1, out),
        error_bound=_BOUNDS[sizes.dtype],
        twins={"contiguous cache" if kind == "fp16" else "plain pages": lambda caches: caches[1].attend()},
    )


def _paged_check(filled: Filled, sequence: int, out: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = filled.cache.gather(0, sequence)
    return _decode_check(filled.q, keys, values, out)


def fill(kind: str, sizes: Heads, batch: int, tokens: int, device: torch.device) -> Filled:
    """A cache of one layer with ``batch`` sequences, numbered from 0, of ``tokens`` random tokens each."""
    room = batch * (tokens + _FILL_TOKENS)
    cache: KVCache = make_cache(
        kind, layers=1, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, capacity_tokens=room,
        max_sequences=batch, max_tokens=tokens, dtype=sizes.dtype, device=device,
    )  # fmt: skip
    for sequence in range(batch):
        cache.begin(sequence)
    for first in range(0, tokens, _FILL_TOKENS):
        count = min(_FILL_TOKENS, tokens - first)
        plan = cache.plan([(sequence, count) for sequence in range(batch)])
        keys, values = (_new_tokens(sizes, batch * count, device, seed=2 * first + side) for side in (0, 1))
        cache.append(0, plan, keys, values)
    q = drawn(batch, sizes.heads, sizes.head_dim, device=device, dtype=sizes.dtype, seed=7)
    return Filled(cache, plan, q)


def _new_tokens(sizes: Heads, tokens: int, device: torch.device, seed: int) -> Tensor:
    return drawn(tokens, sizes.kv_heads, sizes.head_dim, device=device, dtype=sizes.dtype, seed=seed)


def _append(sizes: Heads, kind: str, batch: int, count: int) -> Case:
    tokens = batch * count
    element_bytes = sizes.dtype.itemsize
    given_bytes = 2 * sizes.kv_heads * sizes.head_dim * element_bytes
    stored_bytes = bytes_per_token(
        kind, layers=1, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, itemsize=element_bytes
    )

    def make(device: torch.device) -> tuple[Filled, Tensor, Tensor]:
        filled = fill(kind, sizes, batch, count, device)
        for sequence in range(batch):
            filled.cache.truncate(sequence, 0)
        plan = filled.cache.plan([(sequence, count) for sequence in range(batch)])
        keys, values = (_new_tokens(sizes, tokens, device, seed) for seed in (1, 2))
        return filled._replace(plan=plan), keys, values

    def call(given: tuple[Filled, Tensor, Tensor], path: str = "auto") -> Ran:
        filled, keys, values = given
        return Ran(keys, filled.cache.append(0, filled.plan, keys, values, path=path))

    def check(given: tuple[Filled, Tensor, Tensor], _out: Tensor) -> tuple[Tensor, Tensor]:
        stored = given[0].cache.gather(0, batch - 1)[0].transpose(0, 1)
        return stored, given[1][-count:]

    return Case(
        f"kv append {kind}",
        f"{tokens} tokens {sizes}",
        make,
        call,
        bytes_moved=tokens * (given_bytes + stored_bytes + 8),
        check=check,
        error_bound={"fp16": 0.0, "int8": 0.01, "int4": 0.1}[kind],
        twins={"torch": lambda given: call(given, TORCH)},
    )
