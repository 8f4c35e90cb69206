"""Tensor-parallel layers on two GPUs, an all-reduce after each, then a KV cache handed from one GPU to the other.

    torchrun --nproc-per-node 2 examples/two_gpus.py
    spikeprof run --counters=nvlink --counters-interval-us 100 -- torchrun --nproc-per-node 2 examples/two_gpus.py

Every rank holds half the columns of the up projection and half the rows of the down projection; what they make of the
same tokens is added up by NCCL. Rank 0 then copies its cache to rank 1's GPU, as a server does that prefills on one
GPU and decodes on another. Standard output gets one line from rank 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

HIDDEN, FFN, LAYERS = 4096, 14336, 4


def forward(x: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """``x`` [tokens, hidden] through this rank's share of the layers, added up over the ranks after each."""
    for up, down in layers:
        part = F.silu(x @ up) @ down
        dist.all_reduce(part)
        x = x + part
    return x


def hand_over(cache_mib: int, times: int) -> float:
    """Copy a cache of that size from GPU 0 to GPU 1; bytes per second."""
    source = torch.ones(cache_mib << 20, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(cache_mib << 20, dtype=torch.uint8, device="cuda:1")
    target.copy_(source)
    torch.cuda.synchronize(1)
    began = time.perf_counter()
    for _ in range(times):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    return times * source.nbytes / (time.perf_counter() - began)


def main() -> int:
    """One rank's work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a batch")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cache-mib", type=int, default=1024, help="size of the cache that is handed over")
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if ranks != 2 or gpus < 2:
        print(
            f"two_gpus.py needs two GPUs and two ranks (here: {gpus} and {ranks}); run it by torchrun", file=sys.stderr
        )
        return 2
    torch.cuda.set_device(rank)
    torch.set_grad_enabled(False)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    generator = torch.Generator("cuda").manual_seed(rank)
    shapes = ((HIDDEN, FFN // 2), (FFN // 2, HIDDEN))
    layers = [
        tuple(torch.randn(*shape, generator=generator, device="cuda", dtype=torch.half) / 64 for shape in shapes)
        for _ in range(LAYERS)
    ]
    x = torch.randn(arguments.tokens, HIDDEN, device="cuda", dtype=torch.half)
    dist.broadcast(x, 0)
    forward(x, layers)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(arguments.steps):
        forward(x, layers)
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - began) / max(arguments.steps, 1) * 1e3
    dist.barrier()
    if not rank:
        rate = hand_over(arguments.cache_mib, 8)
        sums = LAYERS * arguments.tokens * HIDDEN * 2 / 2**20
        print(f"{step_ms:.2f} ms a step with {sums:.0f} MiB added up; cache handed over at {rate / 1e9:.0f} GB/s")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
