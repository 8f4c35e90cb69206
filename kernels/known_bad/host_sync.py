"""A host that waits for every token: greedy decoding that reads each token back with ``.item()``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spikeprof.kernels.known_bad.workload import Workload, seeded


class Recurrent(NamedTuple):
    """A recurrent language model of one layer: embedding and head [vocabulary, hidden], weights [hidden, hidden]."""

    embedding: Tensor
    head: Tensor
    weights: Tensor
    tokens: int


def make(device: torch.device, small: bool) -> Recurrent:
    """Random weights, scaled so that the state neither fades nor saturates."""
    vocabulary, hidden, tokens = (128, 32, 24) if small else (8192, 1024, 256)
    generator = seeded()
    embedding, head = (torch.randn((vocabulary, hidden), generator=generator) for _ in range(2))
    weights = torch.randn((hidden, hidden), generator=generator) / hidden**0.5
    return Recurrent(embedding.to(device), head.to(device), weights.to(device), tokens)


def bad(model: Recurrent) -> Tensor:
    """Read each token back before the next step is launched."""
    state = torch.zeros_like(model.embedding[0])
    token, made = 0, []
    for _ in range(model.tokens):
        state = torch.tanh(model.embedding[token] + state @ model.weights)
        token = int((model.head @ state).argmax().item())
        made.append(token)
    return torch.tensor(made)


def good(model: Recurrent) -> Tensor:
    """Keep tokens on the device; read all of them once."""
    state = torch.zeros_like(model.embedding[0])
    made = torch.zeros(model.tokens + 1, dtype=torch.int64, device=state.device)
    for step in range(model.tokens):
        embedded = model.embedding.index_select(0, made[step : step + 1])[0]
        state = torch.tanh(embedded + state @ model.weights)
        torch.argmax(model.head @ state, 0, keepdim=True, out=made[step + 1 : step + 2])
    return made[1:].cpu()


WORKLOAD = Workload(
    "host_sync",
    "Every token is read back with .item(), so the host waits for the GPU and the GPU then for the host.",
    "A copy of 8 bytes to the host and a synchronisation for each token, each followed by a gap on the GPU.",
    make,
    bad,
    good,
)
