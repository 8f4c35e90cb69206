"""What recording costs the program: eager decode step and CUDA-graph replay, on a GPU.

    python benchmarks/overhead.py [--seconds 60] [--json FILE]

All ways of recording take turns in one process, in random order; each block stands between two untraced ones,
and the ratio to their mean is what counts: the machine's own drift, often larger than the effect, cancels.
"Untraced" means that CUPTI has been detached (cuptiFinalize), not merely disabled.

The agent is the shipped one, started as in a target; ``floor`` is CUPTI alone with the same records, raw buffers
thrown away unread, and ``floor, kernels and copies only`` the least that records kernels at all.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from workload import Workload

ROOT = Path(__file__).resolve().parent.parent
EAGER_BLOCK, GRAPH_BLOCK = 8, 60  # steps timed at a time


def load_agent(spool: str, options: dict[str, object]) -> object:
    """The agent package as a target loads it, and its Agent, not yet recording."""
    folder = ROOT / "profiler" / "inject"
    os.environ["SPIKEPROF_SPOOL"], os.environ["SPIKEPROF_OPTIONS"] = spool, json.dumps(options)
    spec = importlib.util.spec_from_file_location(
        "_spikeprof", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["_spikeprof"] = package
    spec.loader.exec_module(package)
    from _spikeprof.agent import Agent

    return Agent()


class Bench:
    """One process's workload and the ways of recording it."""

    def __init__(self, spool: str) -> None:
        # Callbacks at graph capture cost a step nothing; without them CUPTI can be detached again and again.
        self.agent = load_agent(spool, {"graph_nodes": False})
        self.agent.set_condition("yielded", "benchmark")
        self.work = Workload()
        self.agent.activate()
        self.cupti = self.agent.cupti
        from _spikeprof import cupti
        from _spikeprof import spool as spool_module

        self.binding, self.buffer_bytes = cupti, spool_module.BUFFER_BYTES
        self.idle: list[int] = []
        self.memory: list[object] = []
        self.floor_callbacks = (cupti.REQUEST_TYPE(self._lend), cupti.COMPLETE_TYPE(self._discard))
        self.detach()

    # -- ways of recording: (begin, end) -------------------------------------------------------

    def spikeprof(self) -> None:
        """Everything that `spikeprof run` records by default."""
        self.agent.set_condition("yielded", None)

    def spikeprof_end(self) -> None:
        """Step aside, as for a guest."""
        self.agent.set_condition("yielded", "benchmark")

    def floor(self) -> None:
        """The same records, raw buffers thrown away unread."""
        self.cupti.register(*self.floor_callbacks)
        self.cupti.enable()

    def floor_kernels(self) -> None:
        """Kernels, copies and memsets only, thrown away."""
        self.cupti.register(*self.floor_callbacks)
        for kind in (
            self.binding.KIND_KERNEL,
            self.binding.KIND_MEMCPY,
            self.binding.KIND_MEMCPY_PEER,
            self.binding.KIND_MEMSET,
        ):
            self.cupti._call("cuptiActivityEnable", ctypes.c_int(kind))

    def disabled(self) -> None:
        """CUPTI loaded, recorded a step, then disabled: what --clean-steps and off windows see."""
        self.floor()
        self.work.step()
        torch.cuda.synchronize()
        self.cupti.disable()
        self.cupti.flush()

    def cupti_end(self) -> None:
        """Stop the above."""
        self.cupti.disable()
        self.cupti.flush()

    def torch_profiler(self) -> None:
        """torch.profiler, CUDA activities only."""
        self.session = profile(activities=[ProfilerActivity.CUDA])
        self.session.__enter__()

    def torch_profiler_end(self) -> None:
        """Its stop is not timed: it would cost a second or more."""
        self.session.__exit__(None, None, None)
        del self.session
        self.cupti.register(*self.floor_callbacks)

    def detach(self) -> None:
        """Take CUPTI out of the process."""
        code = self.cupti._lib.cuptiFinalize()
        if code:
            raise RuntimeError(f"cuptiFinalize: {code}")

    def _lend(self, buffer: int, size: int, records: int) -> None:
        if not self.idle:
            block = (ctypes.c_char * self.buffer_bytes)()
            self.memory.append(block)
            self.idle.append(ctypes.addressof(block))
        ctypes.c_void_p.from_address(buffer).value = self.idle.pop()
        ctypes.c_size_t.from_address(size).value = self.buffer_bytes
        ctypes.c_size_t.from_address(records).value = 0

    def _discard(self, _context: int, _stream: int, buffer: int, _size: int, _valid: int) -> None:
        self.idle.append(buffer)


def timed(step: Callable[[], None], count: int) -> float:
    """ms a step, GPU work included."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3


def measure(bench: Bench, seconds: float) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """way -> eager/graph -> (ms recorded, ms untraced beside it) per repeat."""
    ways = {
        "spikeprof": (bench.spikeprof, bench.spikeprof_end),
        "floor": (bench.floor, bench.cupti_end),
        "floor, kernels and copies only": (bench.floor_kernels, bench.cupti_end),
        "CUPTI disabled": (bench.disabled, bench.cupti_end),
        "torch.profiler": (bench.torch_profiler, bench.torch_profiler_end),
        "untraced again": (lambda: bench.cupti.register(*bench.floor_callbacks), lambda: None),
    }
    found: dict[str, dict[str, list[tuple[float, float]]]] = {way: {"eager": [], "graph": []} for way in ways}
    until = time.monotonic() + seconds
    order = list(ways)
    rounds = 0
    while time.monotonic() < until or rounds < 10:
        random.shuffle(order)
        rounds += 1
        for way in order:
            begin, end = ways[way]
            before = _pair(bench, warm=2)
            begin()
            during = _pair(bench, warm=2)
            end()
            bench.detach()
            after = _pair(bench, warm=2)
            for i, kind in enumerate(("eager", "graph")):
                found[way][kind].append((during[i], (before[i] + after[i]) / 2))
    return found


def _pair(bench: Bench, warm: int) -> tuple[float, float]:
    timed(bench.work.step, warm)
    eager = timed(bench.work.step, EAGER_BLOCK)
    timed(bench.work.replay, warm)
    return eager, timed(bench.work.replay, GRAPH_BLOCK)


def windows(
    bench: Bench, seconds: float, on: float = 0.1, off: float = 0.9
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Recording in windows, in stretches of one cycle that take turns with stretches of CUPTI disabled.

    Those in turn are held against stretches before, while CUPTI was detached: once windows have run, nothing is
    detached any more.
    """
    steps = {"eager": (bench.work.step, EAGER_BLOCK), "graph": (bench.work.replay, GRAPH_BLOCK)}
    detached = {
        kind: statistics.median(_stretch(step, chunk, on + off) for _ in range(4))
        for kind, (step, chunk) in steps.items()
    }
    in_windows: dict[str, list[tuple[float, float]]] = {"eager": [], "graph": []}
    disabled: dict[str, list[tuple[float, float]]] = {"eager": [], "graph": []}
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(in_windows["graph"]) < 5:
        for kind, (step, chunk) in steps.items():
            bench.agent.options.window = [on, off]
            bench.agent._began = time.monotonic()
            bench.spikeprof()
            during = _stretch(step, chunk, on + off)
            bench.agent.options.window = None
            bench.spikeprof_end()
            bench.agent.set_condition("off", None)
            beside = _stretch(step, chunk, on + off)
            in_windows[kind].append((during, beside))
            disabled[kind].append((beside, detached[kind]))
    return {"windows of 10 %, to disabled": in_windows, "disabled, to detached before": disabled}


def _stretch(step: Callable[[], None], chunk: int, seconds: float) -> float:
    """ms a step over about ``seconds``."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        timed(step, chunk)
        count += chunk
    return (time.perf_counter() - began) / count * 1e3


def summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Median ms and the median and quartiles of the ratios."""
    ratios = sorted(during / untraced for during, untraced in pairs)
    quarter = len(ratios) // 4
    return {
        "repeats": len(ratios),
        "ms": round(statistics.median(during for during, _ in pairs), 4),
        "untraced_ms": round(statistics.median(untraced for _, untraced in pairs), 4),
        "cost_percent": round(100 * (statistics.median(ratios) - 1), 2),
        "quartiles_percent": [round(100 * (ratios[i] - 1), 2) for i in (quarter, -1 - quarter)],
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--window-seconds", type=float, default=20)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    gc.disable()
    faulthandler.enable()
    with tempfile.TemporaryDirectory() as spool:
        bench = Bench(spool)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {bench.cupti.path}")
        head = f"{'quartiles':>18} {'ms':>9}   "
        print(f"{'':32}{'eager: cost':>12} {head}{'graph: cost':>12} {head} n")
        table = {}
        if arguments.seconds:
            for way, kinds in measure(bench, arguments.seconds).items():
                table[way] = show(way, kinds)
        if arguments.window_seconds:  # last: nothing is detached any more after it
            for way, kinds in windows(bench, arguments.window_seconds).items():
                table[way] = show(way, kinds)
        bench.agent.finish()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


def show(way: str, kinds: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, object]]:
    """Print one row; returns its figures."""
    row = {kind: summary(pairs) for kind, pairs in kinds.items()}
    cells = []
    for figures in row.values():
        low, high = figures["quartiles_percent"]
        cells.append(f"{figures['cost_percent']:>+10.2f} % {low:>+9.2f} {high:>+8.2f} {figures['ms']:>9.3f}")
    print(f"{way:32}{'   '.join(cells)}   {row['eager']['repeats']:>3}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
