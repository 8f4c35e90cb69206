"""How long each node takes: CUDA events around it, or the host's clock on a CPU. No CUPTI, no profiler.

On a GPU the stream is held busy before each node until the host has launched it: a pair of events then spans the
node's own work and nothing of the host's. What the host needs for the same call is measured in runs of its own.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import fx

from .factory import Made
from .reading import Graph, is_guard

WARM_UP_RUNS = 3
_EMPTY_PAIRS = 64
_CALIBRATION_CYCLES = 1_000_000
_LONGEST_HOLD_S = 0.02
_SPARE_S = 30e-6

Times = dict[Any, list[float]]  # ns by node, one per run


class _Timed(fx.Interpreter):
    """Runs a graph; ``around(node, call)`` makes the call of each operator."""

    def __init__(self, module: Any, around: Callable[[Any, Callable[[], Any]], Any]) -> None:
        super().__init__(module)
        self.around, self.node = around, None

    def run_node(self, n: Any) -> Any:
        if is_guard(n):
            return None
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        base: Any = super()
        return self.around(self.node, lambda: base.call_function(target, args, kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        base: Any = super()
        return self.around(self.node, lambda: base.call_method(target, args, kwargs))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        base: Any = super()
        return self.around(self.node, lambda: base.call_module(target, args, kwargs))


def devices(made: Made) -> list[Any]:
    """The devices of the model's weights and of its arguments, those of weights first."""
    model, args, kwargs = made
    leaves = [*model.parameters(), *model.buffers(), *torch.utils._pytree.tree_flatten((args, kwargs))[0]]
    return list({t.device: None for t in leaves if isinstance(t, torch.Tensor)})


def why_not(found: list[Any]) -> str:
    """Why nodes on these devices cannot be timed; empty when they can."""
    kinds = {device.type for device in found}
    if "meta" in kinds:
        return "the model is on the device meta: it has no data to run on"
    if kinds - {"cpu", "cuda"}:
        return f"nodes are timed on CUDA devices and CPUs, not on {', '.join(sorted(kinds - {'cpu', 'cuda'}))}"
    if len({device for device in found if device.type == "cuda"}) > 1:
        return "the model spans several GPUs: its nodes are timed on one"
    return ""


def time_nodes(graph: Graph, made: Made, runs: int) -> dict[str, Any]:
    """Medians in ns: ``latency``, ``low`` and ``host`` by number of the node, and of the whole model."""
    device = next((d for d in devices(made) if d.type == "cuda"), None)
    model, args, kwargs = made
    with torch.no_grad():
        for _ in range(WARM_UP_RUNS):
            _run(graph, lambda _, call: call())
        if device is None:
            found = _on_the_host(graph, runs)
            forward = [_host_ns(lambda: model(*args, **kwargs)) for _ in range(runs)]
            return {**found, "with": "host_clock", "forward": median(forward)}
        with torch.cuda.device(device):
            return {**_on_a_gpu(graph, runs), **_whole(graph, made, runs), "with": "cuda_events"}


def _run(graph: Graph, around: Callable[[Any, Callable[[], Any]], Any]) -> Any:
    return _Timed(graph.module, around).run(*graph.flat, enable_io_processing=False)


def _host_ns(call: Callable[[], Any]) -> float:
    began = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - began


def _host_times(graph: Graph, runs: int) -> Times:
    """Time of each call on the host; on a GPU that is what launching costs."""
    times: Times = {}

    def around(node: Any, call: Callable[[], Any]) -> Any:
        began = time.perf_counter_ns()
        value = call()
        times.setdefault(node, []).append(time.perf_counter_ns() - began)
        return value

    for _ in range(runs):
        _run(graph, around)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return times


def _on_the_host(graph: Graph, runs: int) -> dict[str, Any]:
    times = _host_times(graph, runs)
    floor = median(_host_ns(lambda: None) for _ in range(_EMPTY_PAIRS))
    return {"latency": _by_number(graph, times, median), "low": _by_number(graph, times, min), "floor": floor}


def _on_a_gpu(graph: Graph, runs: int) -> dict[str, Any]:
    host = _host_times(graph, runs)
    per_second = _cycles_per_second()
    hold = {node: _cycles(median(times) / 1e9, per_second) for node, times in host.items()}
    times: Times = {}
    for _ in range(runs):
        pairs: list[tuple[Any, Any, Any]] = []

        def around(node: Any, call: Callable[[], Any], pairs: list[tuple[Any, Any, Any]] = pairs) -> Any:
            first, last = _event(), _event()
            torch.cuda._sleep(hold[node])
            first.record()
            value = call()
            last.record()
            pairs.append((node, first, last))
            return value

        _run(graph, around)
        torch.cuda.synchronize()
        for node, first, last in pairs:
            times.setdefault(node, []).append(first.elapsed_time(last) * 1e6)  # ms
    return {
        "latency": _by_number(graph, times, median),
        "low": _by_number(graph, times, min),
        "host": _by_number(graph, host, median),
        "floor": median(_empty_pair(per_second) for _ in range(_EMPTY_PAIRS)),
    }


def _whole(graph: Graph, made: Made, runs: int) -> dict[str, Any]:
    """The model as it is, and the most memory that one run takes beyond what was there before it."""
    model, args, kwargs = made
    forward = []
    for _ in range(runs):
        torch.cuda.synchronize()
        first, last = _event(), _event()
        first.record()
        model(*args, **kwargs)
        last.record()
        torch.cuda.synchronize()
        forward.append(first.elapsed_time(last) * 1e6)
    return {
        "forward": median(forward),
        "model_peak": _peak_bytes(lambda: model(*args, **kwargs)),
        "graph_peak": _peak_bytes(lambda: _run(graph, lambda _, call: call())),
    }


def _peak_bytes(call: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _empty_pair(per_second: float) -> float:
    first, last = _event(), _event()
    torch.cuda._sleep(_cycles(0, per_second))
    first.record()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last) * 1e6)


def _cycles_per_second() -> float:
    first, last = _event(), _event()
    torch.cuda._sleep(_CALIBRATION_CYCLES)  # the first one loads its kernel
    first.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    last.record()
    torch.cuda.synchronize()
    seconds = float(first.elapsed_time(last)) / 1e3
    return _CALIBRATION_CYCLES / max(seconds, 1e-6)


def _cycles(host_s: float, per_second: float) -> int:
    """How long to hold the stream so that a call of this length is launched before it may run."""
    return int(min(2 * host_s + _SPARE_S, _LONGEST_HOLD_S) * per_second)


def _by_number(graph: Graph, times: Times, of: Callable[[list[float]], float]) -> dict[int, float]:
    return {number: of(times[node]) for number, node in enumerate(graph.nodes) if node in times}
