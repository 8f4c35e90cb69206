"""What this device reaches: rates of a streaming copy and of a matrix product, measured in the same run."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from spikeprof.kernels.bench.case import drawn
from spikeprof.kernels.bench.timing import COLD, WARM, Call, measure
from spikeprof.kernels.probes import launch_empty, matmul, stream_copy

_LAUNCHES = 20


@dataclass(frozen=True, slots=True)
class Peaks:
    """Best medians of this device, and what reached them.

    ``copy_bytes_per_s`` counts reads and writes. ``product_flops_per_s`` is of ``product_dtype``. ``launch_ns``: from
    one launch of an empty kernel to the next.
    """

    device: str
    l2_bytes: int
    copy_bytes_per_s: float
    copy_by: str
    product_flops_per_s: float
    product_by: str
    product_dtype: str
    launch_ns: float


def measure_peaks(device: torch.device, quick: bool, runs: int) -> Peaks:
    """Copy 1 GiB and multiply 8192 x 8192 fp16 matrices (on the CPU, or quick, much less); take the faster path."""
    gpu = device.type == "cuda"
    copy_by, copy_rate = _copy_rate(1 << (17 if quick else 28 if gpu else 22), device, runs)
    dtype = torch.float16 if gpu else torch.float32
    product_by, product_rate = _product_rate(256 if quick else 8192 if gpu else 1024, dtype, device, runs)
    launches = measure({"empty": lambda: launch_empty(_LAUNCHES, device=device)}, device, WARM, runs=runs, queued=False)
    return Peaks(
        device=device_name(device),
        l2_bytes=torch.cuda.get_device_properties(device).L2_cache_size if gpu else 0,
        copy_bytes_per_s=copy_rate,
        copy_by=copy_by,
        product_flops_per_s=product_rate,
        product_by=product_by,
        product_dtype=str(dtype).removeprefix("torch."),
        launch_ns=launches["empty"].median_ns / _LAUNCHES,
    )


def device_name(device: torch.device) -> str:
    """What the GPU's driver, or the kernel, calls this device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"


def _copy_rate(elements: int, device: torch.device, runs: int) -> tuple[str, float]:
    source = drawn(elements, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {
        "torch": lambda: target.copy_(source),
        "kernel": lambda: stream_copy(source, target),
    }
    return _fastest(calls, 2 * 4 * elements, device, runs)


def _product_rate(size: int, dtype: torch.dtype, device: torch.device, runs: int) -> tuple[str, float]:
    a, b = (drawn(size, size, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    calls: dict[str, Call] = {"torch": lambda: torch.matmul(a, b), "kernel": lambda: matmul(a, b)}
    return _fastest(calls, 2 * size**3, device, runs)


def _fastest(calls: dict[str, Call], work: int, device: torch.device, runs: int) -> tuple[str, float]:
    """Which call does the work fastest, and how much of it in a second."""
    l2 = COLD if device.type == "cuda" else WARM
    medians_ns = {name: times.median_ns for name, times in measure(calls, device, l2, runs=runs).items()}
    best = min(medians_ns, key=lambda name: medians_ns[name])
    return best, 1e9 * work / medians_ns[best]
