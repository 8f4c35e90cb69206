"""One rank that holds all others up: uneven shares of the work before an all-reduce."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spikeprof.kernels.known_bad.workload import Workload, seeded

SLOW_SHARE = 0.75  # of the rows, for the last rank


class Job(NamedTuple):
    """Steps over ``rows`` rows of ``hidden`` channels, by so many ranks on this kind of device."""

    device: str
    ranks: int
    steps: int
    rows: int
    hidden: int


def make(device: torch.device, small: bool) -> Job:
    """On GPUs a rank for each, over NCCL; on the CPU two, over Gloo. Raises ValueError where there is one GPU only."""
    ranks = torch.cuda.device_count() if device.type == "cuda" else 2
    if ranks < 2:
        raise ValueError(f"device is {str(device)!r}: straggler needs 2 GPUs, there is {ranks}; take 'cpu'")
    steps, rows, hidden = (3, 256, 64) if small else (30, 16384, 4096)
    if device.type != "cuda":
        rows, hidden = min(rows, 2048), min(hidden, 512)
    return Job(device.type, ranks, steps, rows, hidden)


def bad(job: Job) -> Tensor:
    """The last rank has three quarters of the rows."""
    return _run(job, SLOW_SHARE)


def good(job: Job) -> Tensor:
    """Every rank has as many rows."""
    return _run(job, 1 / job.ranks)


def shares(rows: int, ranks: int, last_share: float) -> list[int]:
    """Rows of each rank: the last one has ``last_share`` of them, the others equal parts of the rest."""
    last = round(rows * last_share)
    each, rest = divmod(rows - last, ranks - 1)
    return [each + (rank < rest) for rank in range(ranks - 1)] + [last]


def _run(job: Job, last_share: float) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (job, last_share, folder), nprocs=job.ranks)
        return torch.load(Path(folder) / "sum.pt", weights_only=True)


def _rank(rank: int, job: Job, last_share: float, folder: str) -> None:
    """One rank: sum over its rows of relu(x w), added up over all ranks after each step."""
    # Ranks of one machine meet over the loopback device, whatever its host name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting", rank=rank, world_size=job.ranks,
    )  # fmt: skip
    generator = seeded()
    weights = (torch.randn((job.hidden, job.hidden), generator=generator) / job.hidden**0.5).to(device)
    parts = shares(job.rows, job.ranks, last_share)
    rows = torch.randn((job.rows, job.hidden), generator=generator).split(parts)[rank].to(device)
    total = torch.zeros(job.hidden, device=device)
    for _ in range(job.steps):
        part = torch.relu(rows @ weights).sum(0)
        dist.all_reduce(part)
        total += part
    if rank == 0:
        torch.save(total.cpu(), Path(folder) / "sum.pt")
    dist.destroy_process_group()


WORKLOAD = Workload(
    "straggler",
    "The last rank has three quarters of the rows; all others wait for it in every all-reduce.",
    "Long all-reduce kernels on all ranks but one, whose compute kernels take longer instead.",
    make,
    bad,
    good,
)
