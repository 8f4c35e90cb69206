"""A program of phases, two seconds each, that tells when each began and ended and what bytes it moved."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

SECONDS = 2.0
GIB = 1 << 30


def gemm() -> Callable[[], int]:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    out = torch.empty_like(a)

    def step() -> int:
        torch.mm(a, a, out=out)
        return 0

    return step


def stream() -> Callable[[], int]:
    a = torch.zeros(GIB, device="cuda", dtype=torch.float32)  # 4 GiB

    def step() -> int:
        a.add_(1.0)
        return 2 * a.nbytes  # read and written

    return step


def _copy(src: torch.Tensor, dst: torch.Tensor) -> Callable[[], int]:
    def step() -> int:
        dst.copy_(src, non_blocking=True)
        return src.nbytes

    return step


def to_device() -> Callable[[], int]:
    return _copy(torch.zeros(GIB, dtype=torch.uint8).pin_memory(), torch.zeros(GIB, dtype=torch.uint8, device="cuda"))


def to_host() -> Callable[[], int]:
    return _copy(torch.zeros(GIB, dtype=torch.uint8, device="cuda"), torch.zeros(GIB, dtype=torch.uint8).pin_memory())


def peer() -> Callable[[], int]:
    return _copy(*(torch.zeros(GIB, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in (0, 1)))


def idle() -> Callable[[], int]:
    def step() -> int:
        time.sleep(0.05)
        return 0

    return step


def main(names: list[str]) -> None:
    told = {}
    for name in names:
        step = {"gemm": gemm, "stream": stream, "to_device": to_device, "to_host": to_host, "peer": peer, "idle": idle}[
            name
        ]()
        torch.cuda.synchronize()
        begin, size_bytes = time.time_ns(), 0
        while time.time_ns() - begin < SECONDS * 1e9:
            for _ in range(4):
                size_bytes += step()
            torch.cuda.synchronize()
        told[name] = (begin, time.time_ns(), size_bytes)
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
