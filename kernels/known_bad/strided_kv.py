"""A KV cache whose innermost dimension is the heads: a head's keys and values lie far apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spikeprof.kernels.known_bad.workload import Workload, seeded


class Cache(NamedTuple):
    """Queries [heads, head_dim]; keys and values [heads, tokens, head_dim], contiguous or seen through a stride."""

    q: Tensor
    strided: tuple[Tensor, Tensor]
    contiguous: tuple[Tensor, Tensor]


def make(device: torch.device, small: bool) -> Cache:
    """The same keys and values as [tokens, head_dim, heads] and as [heads, tokens, head_dim]."""
    heads, tokens, head_dim = (4, 40, 16) if small else (32, 16384, 128)
    generator = seeded()
    q, keys, values = (
        torch.randn(shape, generator=generator).to(device)
        for shape in ((heads, head_dim), (heads, tokens, head_dim), (heads, tokens, head_dim))
    )
    strided = tuple(x.permute(1, 2, 0).contiguous().permute(2, 0, 1) for x in (keys, values))
    return Cache(q, (strided[0], strided[1]), (keys, values))


def bad(cache: Cache) -> Tensor:
    """Attention of one token, a head at a time, over keys and values that lie ``heads`` elements apart."""
    return _attend(cache.q, *cache.strided)


def good(cache: Cache) -> Tensor:
    """The same over keys and values of a head that lie together."""
    return _attend(cache.q, *cache.contiguous)


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[heads, head_dim]. Pointwise products: a matrix product would first copy what is strided."""
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        scores = (keys[head] * q[head]).sum(1) * q.shape[1] ** -0.5
        out[head] = (values[head] * scores.softmax(0)[:, None]).sum(0)
    return out


WORKLOAD = Workload(
    "strided_kv",
    "The KV cache is [tokens, head_dim, heads]: reading one head uses one element of each sector.",
    "Kernels that fetch many times the bytes that they use: all sectors of the cache for each head.",
    make,
    bad,
    good,
)
