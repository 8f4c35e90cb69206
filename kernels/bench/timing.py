"""How long a call takes: medians of many runs, twins in turn, with L2 cold and warm.

On a GPU a run is the time between two CUDA events around the call. Before each one the GPU is kept busy, for twice as
long as the host was seen to need for the slowest of the calls, so that the launches are queued when the first event
passes: what is measured is the GPU's work, and not how fast the host launches it. Where that is the question, as for
empty kernels, ``queued=False`` leaves it out. A call that waits for the GPU itself is timed with its host's part.

*cold*: between runs a buffer of twice L2's size is written, which evicts what was there, and then read, which writes
back what was dirty: else the write-back would be the measured call's. *warm*: the same call runs right before, without
being measured. On the CPU, whose caches nobody empties here, all runs are warm.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

COLD, WARM = "cold", "warm"
RUNS = 50
WARM_UPS = 3
_LEAST_BUSY_NS, _MOST_BUSY_NS = 100_000, 100_000_000
_CYCLES_A_NS = 2.0  # no GPU's clock is faster: what it is kept busy for is not shorter than meant

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of each run."""

    runs_ns: tuple[float, ...]

    @property
    def median_ns(self) -> float:
        """The median."""
        return statistics.median(self.runs_ns)

    @property
    def p90_ns(self) -> float:
        """The smallest time that nine tenths of the runs did not exceed."""
        return sorted(self.runs_ns)[math.ceil(0.9 * len(self.runs_ns)) - 1]


def measure(
    calls: Mapping[str, Call],
    device: torch.device,
    l2: str = WARM,
    *,
    runs: int = RUNS,
    warm_ups: int = WARM_UPS,
    queued: bool = True,
) -> dict[str, Times]:
    """Times of each call by its name; the calls take turns, so that what changes meanwhile touches all of them.

    Raises ValueError for ``l2="cold"`` on the CPU.
    """
    if device.type != "cuda" and l2 != WARM:
        raise ValueError(f"l2 is {l2!r} on {device}: caches of a CPU are not emptied here, it can be 'warm'")
    for call in calls.values():
        for _ in range(warm_ups):
            call()
    run = _run_on_cpu if device.type != "cuda" else _GpuRun(device, l2, _busy_cycles(calls, device) if queued else 0)
    taken: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            taken[name].append(run(call))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return {name: Times(tuple(read() for read in reads)) for name, reads in taken.items()}


def l2_states(device: torch.device) -> tuple[str, ...]:
    """The states of L2 that can be measured on this device."""
    return (COLD, WARM) if device.type == "cuda" else (WARM,)


def _run_on_cpu(call: Call) -> Callable[[], float]:
    began = time.perf_counter_ns()
    call()
    taken = float(time.perf_counter_ns() - began)
    return lambda: taken


def _busy_cycles(calls: Mapping[str, Call], device: torch.device) -> int:
    """GPU clocks that are longer than the host needs for any of the calls, each warmed up."""
    slowest_ns = 0
    for call in calls.values():
        torch.cuda.synchronize(device)
        began = time.perf_counter_ns()
        call()
        slowest_ns = max(slowest_ns, time.perf_counter_ns() - began)
    return int(_CYCLES_A_NS * min(max(2 * slowest_ns, _LEAST_BUSY_NS), _MOST_BUSY_NS))


class _GpuRun:
    """Runs behind a GPU that is kept busy, with an L2 that holds what the same call left there, or nothing of it."""

    def __init__(self, device: torch.device, l2: str, busy_cycles: int) -> None:
        self._busy_cycles = busy_cycles
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._evictor = torch.empty(2 * l2_bytes // 4, dtype=torch.float32, device=device) if l2 == COLD else None

    def __call__(self, call: Call) -> Callable[[], float]:
        if self._evictor is None:
            call()
        else:
            self._evictor.zero_()
            self._evictor.sum()
        if self._busy_cycles:  # behind the call that warms: a stream takes 1,024 launches before the host must wait
            torch.cuda._sleep(self._busy_cycles)
        return _between_events(call)


def _between_events(call: Call) -> Callable[[], float]:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    return lambda: 1e6 * float(began.elapsed_time(ended))
