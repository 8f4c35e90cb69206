"""Trace folders for tests of the command line."""

from __future__ import annotations

from pathlib import Path

import tiny

from spikeprof.profiler import store


def launch_bound(path: Path) -> Path:
    """A trace of 100 kernels of 300 ns, each launched by a call of its own 700 ns after the last one ended."""
    kernels = [{"start_ns": i * 1000, "end_ns": i * 1000 + 300, "correlation_id": i + 1} for i in range(1, 101)]
    calls = [
        {"start_ns": i * 1000 - 500, "end_ns": i * 1000 - 200, "correlation_id": i + 1, "name": "cudaLaunchKernel"}
        for i in range(1, 101)
    ]
    folder = store.create_folder(path)
    store.write_trace(folder, tiny.trace(kernels=kernels, runtime_calls=calls, memory_ops=[]))
    return folder


def sound(path: Path) -> Path:
    """A trace of ten long kernels back to back: nothing to complain about beyond information."""
    kernels = [
        {"start_ns": i * 50_000, "end_ns": (i + 1) * 50_000, "correlation_id": i + 1, "name": f"k{i}"}
        for i in range(10)
    ]
    calls = [
        {"start_ns": i * 100, "end_ns": i * 100 + 90, "correlation_id": i + 1, "name": "cudaLaunchKernel"}
        for i in range(10)
    ]
    folder = store.create_folder(path)
    store.write_trace(folder, tiny.trace(kernels=kernels, runtime_calls=calls, memory_ops=[]))
    return folder
