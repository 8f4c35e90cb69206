"""Decode as CUDA graphs: one per batch-size bucket, captured once over static tensors, replayed for each step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spikeprof.kernels.cache.protocol import KVCache, Plan
from spikeprof.kernels.engine.model import Decoder, decode
from spikeprof.kernels.paths import check

_WARM_UPS = 2  # kernels are compiled and libraries initialised outside the capture


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    plan: Plan
    tokens: Tensor
    positions: Tensor
    logits: Tensor


class DecodeGraphs:
    """The decode step captured for batches of 1, 2, 4, ... and ``max_batch``; a step takes the next larger one.

    Rows that a step does not fill write to the cache's scratch slot and see nothing. Raises ValueError on a CPU.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, max_batch: int) -> None:
        device = decoder.weights.device
        check(device.type == "cuda", f"cuda_graph is True, but the device is {device}: CUDA graphs need a GPU")
        self._pool = torch.cuda.graph_pool_handle()
        # From the largest down, so that the smaller ones fit into the memory that it took.
        self._captured = {batch: self._capture(decoder, cache, batch) for batch in reversed(buckets(max_batch))}

    def decode(self, plan: Plan, tokens: Tensor, positions: Tensor) -> Tensor:
        """As ``model.decode``; the logits are overwritten by the next replay of the same bucket."""
        batch = len(tokens)
        fitting = [size for size in self._captured if size >= batch]
        check(bool(fitting), f"the batch has {batch} sequences: graphs were captured for at most "
              f"{max(self._captured)}")  # fmt: skip
        captured = self._captured[min(fitting)]
        captured.plan.copy_from(plan)
        captured.tokens[:batch].copy_(tokens)
        captured.positions[:batch].copy_(positions)
        captured.graph.replay()
        return captured.logits[:batch]

    def _capture(self, decoder: Decoder, cache: KVCache, batch: int) -> _Captured:
        device = decoder.weights.device
        plan = cache.blank_plan(batch)
        tokens, positions = torch.zeros(2, batch, dtype=torch.int64, device=device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                decode(decoder, cache, plan, tokens, positions)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = decode(decoder, cache, plan, tokens, positions)
        return _Captured(graph, plan, tokens, positions, logits)


def buckets(max_batch: int) -> list[int]:
    """1, 2, 4, ... below ``max_batch``, and ``max_batch``."""
    check(max_batch > 0, f"max_batch is {max_batch}: it must be positive")
    sizes = [1]
    while sizes[-1] * 2 < max_batch:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == max_batch else [*sizes, max_batch]
