"""Batches copied to the GPU from pageable memory: the driver stages them, and the host waits for each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spikeprof.kernels.known_bad.workload import Workload, seeded


class Batches(NamedTuple):
    """The same batches in pageable and in page-locked memory, and weights [hidden, hidden] on the device."""

    pageable: list[Tensor]
    pinned: list[Tensor]
    weights: Tensor


def make(device: torch.device, small: bool) -> Batches:
    """Without a GPU no memory is page-locked: both twins then do the same."""
    count, tokens, hidden = (4, 8, 32) if small else (16, 4096, 2048)
    generator = seeded()
    weights = (torch.randn((hidden, hidden), generator=generator) / hidden**0.5).to(device)
    batches = [torch.randn((tokens, hidden), generator=generator) for _ in range(count)]
    pinned = [batch.pin_memory() if device.type == "cuda" else batch for batch in batches]
    return Batches(batches, pinned, weights)


def bad(batches: Batches) -> Tensor:
    """Copy, then compute, then copy."""
    return _means([batch.to(batches.weights.device) @ batches.weights for batch in batches.pageable])


def good(batches: Batches) -> Tensor:
    """Copy from page-locked memory on a stream of its own while the batch before is computed."""
    device = batches.weights.device
    if device.type != "cuda":
        return bad(batches)
    compute, copies, made = torch.cuda.current_stream(device), torch.cuda.Stream(device), []
    copies.wait_stream(compute)
    for batch in batches.pinned:
        with torch.cuda.stream(copies):
            there = batch.to(device, non_blocking=True)
        compute.wait_stream(copies)
        there.record_stream(compute)
        made.append(there @ batches.weights)
    return _means(made)


def _means(made: list[Tensor]) -> Tensor:
    return torch.stack([part.mean(0) for part in made])


WORKLOAD = Workload(
    "pageable_copies",
    "Batches are copied to the GPU from pageable memory, one after the other, between the kernels.",
    "Copies to the device marked pageable, far below the link's rate, with no kernel at the same time.",
    make,
    bad,
    good,
)
