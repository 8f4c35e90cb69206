"""What recording costs the program: eager decode step and CUDA-graph replay, on a GPU.

    python benchmarks/overhead.py [--processes 6] [--repeats 3] [--window 0.1,0.9] [--window-seconds 12]

Ways of recording take turns within a process, in random order; each block stands between two blocks of the reference,
``off``: the agent as shipped, started as in a target, with recording switched off (as in ``--clean-steps``). The ratio
to their mean is what counts: the machine's own drift, often larger than the effect, cancels. What being loaded and
switched off costs is measured between processes that take turns, since calls can be recorded only where they were
switched on before CUDA was in use, and CUPTI cannot be taken out under a CUDA graph made with it. So the cost against
an untraced program is (recording ÷ off) × (off ÷ untraced). The processes are forks of one that has imported torch.

``floor`` is CUPTI alone with the same records, raw buffers thrown away unread, and ``floor, kernels and copies only``
the least that records kernels at all. torch.profiler is measured in untraced processes, against blocks before it.
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

#: way -> eager/graph -> (ms recorded, ms of the reference beside it) per repeat
Pairs = dict[str, dict[str, list[tuple[float, float]]]]


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
    """One process's workload and the ways of recording it. Begins switched off, or, without a spool, untraced."""

    def __init__(self, spool: str | None) -> None:
        if spool:
            # Nothing of the agent may stand between CUPTI and the callbacks that throw buffers away.
            self.agent = load_agent(spool, {"graph_nodes": False, "attribute_steps": 0})
            self.agent.activate()
        self.work = Workload()
        if not spool:
            return
        self.cupti = self.agent.cupti
        from _spikeprof import cupti
        from _spikeprof import spool as spool_module

        self.binding, self.buffer_bytes = cupti, spool_module.BUFFER_BYTES
        self.idle: list[int] = []
        self.memory: list[object] = []
        self.counted: dict[int, int] = {}
        self.counting = False
        self.floor_callbacks = (cupti.REQUEST_TYPE(self._lend), cupti.COMPLETE_TYPE(self._discard))
        self.off()

    # -- ways of recording: (begin, end) -------------------------------------------------------

    def spikeprof(self) -> None:
        """Everything that `spikeprof run` records by default."""
        self.agent.set_condition("clean", None)

    def off(self) -> None:
        """As between them: loaded, and switched off."""
        self.agent.set_condition("clean", "benchmark")

    def window_off(self) -> None:
        """The off part of a duty window: calls are recorded, GPU work is not."""
        self.agent.set_condition("off", "benchmark")
        self.agent.set_condition("clean", None)

    def window_off_end(self) -> None:
        """Leave it."""
        self.off()
        self.agent.set_condition("off", None)

    def floor(self) -> None:
        """The same records, raw buffers thrown away unread."""
        self.cupti.register(*self.floor_callbacks)
        self.cupti.enable_calls()
        self.cupti.enable_work()

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

    def floor_end(self) -> None:
        """Stop the above, and give CUPTI back to the agent."""
        self.cupti.disable_work()
        self.cupti.disable_calls()
        self.cupti.flush()
        self.cupti.register(self.agent._callbacks.request, self.agent._callbacks.complete)

    def torch_profiler(self) -> None:
        """torch.profiler, CUDA activities only."""
        self.session = profile(activities=[ProfilerActivity.CUDA])
        self.session.__enter__()

    def torch_profiler_end(self) -> None:
        """Its stop is not timed: it would cost a second or more."""
        self.session.__exit__(None, None, None)
        del self.session

    def records_of_a_step(self) -> dict[str, int]:
        """How many kernels and calls CUPTI records of an eager step in the way called ``floor``."""
        self.counting = True
        self.floor()
        self.work.step()
        torch.cuda.synchronize()
        self.cupti.flush(forced=True)
        self.floor_end()
        self.counting = False
        calls = self.counted.get(self.binding.KIND_RUNTIME, 0) + self.counted.get(self.binding.KIND_DRIVER, 0)
        return {"kernels": self.counted.get(self.binding.KIND_KERNEL, 0), "calls": calls}

    def _lend(self, buffer: int, size: int, records: int) -> None:
        if not self.idle:
            block = (ctypes.c_char * self.buffer_bytes)()
            self.memory.append(block)
            self.idle.append(ctypes.addressof(block))
        ctypes.c_void_p.from_address(buffer).value = self.idle.pop()
        ctypes.c_size_t.from_address(size).value = self.buffer_bytes
        ctypes.c_size_t.from_address(records).value = 0

    def _discard(self, _context: int, _stream: int, buffer: int, _size: int, valid: int) -> None:
        if self.counting:
            record, following = ctypes.c_void_p(), self.cupti._lib.cuptiActivityGetNextRecord
            while not following(ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)):
                kind = ctypes.c_uint32.from_address(record.value).value
                self.counted[kind] = self.counted.get(kind, 0) + 1
        self.idle.append(buffer)


def timed(step: Callable[[], None], count: int) -> float:
    """ms a step, GPU work included."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3


def recording(bench: Bench, repeats: int) -> Pairs:
    """The ways of recording in turn against ``off``, and ``off`` itself."""
    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "spikeprof": (bench.spikeprof, bench.off),
        "floor": (bench.floor, bench.floor_end),
        "floor, kernels and copies only": (bench.floor_kernels, bench.floor_end),
        "off part of a window": (bench.window_off, bench.window_off_end),
        "off again": (lambda: None, lambda: None),
    }
    return _in_turn(bench, ways, repeats)


def untraced(bench: Bench, repeats: int) -> Pairs:
    """Untraced blocks, and torch.profiler against them."""
    blocks = [_pair(bench, warm=2) for _ in range(2 * repeats)]
    found = _in_turn(bench, {"torch.profiler, to untraced": (bench.torch_profiler, bench.torch_profiler_end)}, 1)
    return found | {"untraced": {kind: [(b[i], b[i]) for b in blocks] for i, kind in enumerate(("eager", "graph"))}}


def _in_turn(bench: Bench, ways: dict[str, tuple[Callable[[], None], Callable[[], None]]], repeats: int) -> Pairs:
    found: Pairs = {way: {"eager": [], "graph": []} for way in ways}
    order = list(ways)
    before = _pair(bench, warm=2)
    for _ in range(repeats):
        random.shuffle(order)
        for way in order:
            begin, end = ways[way]
            begin()
            during = _pair(bench, warm=2)
            end()
            after = _pair(bench, warm=2)
            for i, kind in enumerate(("eager", "graph")):
                found[way][kind].append((during[i], (before[i] + after[i]) / 2))
            before = after
    return found


def _pair(bench: Bench, warm: int) -> tuple[float, float]:
    timed(bench.work.step, warm)
    eager = timed(bench.work.step, EAGER_BLOCK)
    timed(bench.work.replay, warm)
    return eager, timed(bench.work.replay, GRAPH_BLOCK)


def windows(bench: Bench, seconds: float, on: float, off: float) -> Pairs:
    """Recording in windows, in stretches of one cycle that take turns with stretches of recording switched off."""
    steps = {"eager": (bench.work.step, EAGER_BLOCK), "graph": (bench.work.replay, GRAPH_BLOCK)}
    found: dict[str, list[tuple[float, float]]] = {"eager": [], "graph": []}
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(found["graph"]) < 5:
        for kind, (step, chunk) in steps.items():
            bench.agent.options.window = [on, off]
            bench.agent._began = time.monotonic()
            bench.spikeprof()
            during = _stretch(step, chunk, on + off)
            bench.agent.options.window = None
            bench.off()
            bench.agent.set_condition("off", None)
            found[kind].append((during, _stretch(step, chunk, on + off)))
    return {f"windows of {on:g} s in {on + off:g} s": found}


def _stretch(step: Callable[[], None], chunk: int, seconds: float) -> float:
    """ms a step over about ``seconds``."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        timed(step, chunk)
        count += chunk
    return (time.perf_counter() - began) / count * 1e3


def in_a_fork(what: Callable[[Bench], object], *, traced: bool = True) -> object:
    """The JSON of ``what(bench)`` from a process of its own, None when it failed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        with tempfile.TemporaryDirectory() as spool, os.fdopen(writer, "w", encoding="utf-8") as out:
            bench = Bench(spool if traced else None)
            json.dump(what(bench), out)
            out.flush()
            if traced:
                bench.agent.finish()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else None


def _median_of_first(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(first for first, _ in pairs)


def summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Median ms and the median and quartiles of the ratios."""
    ratios = sorted(during / reference for during, reference in pairs)
    quarter = len(ratios) // 4
    return {
        "repeats": len(ratios),
        "ms": round(statistics.median(during for during, _ in pairs), 4),
        "reference_ms": round(statistics.median(reference for _, reference in pairs), 4),
        "cost_percent": round(100 * (statistics.median(ratios) - 1), 2),
        "quartiles_percent": [round(100 * (ratios[i] - 1), 2) for i in (quarter, -1 - quarter)],
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=6, help="with us, and as many without; 0: windows only")
    parser.add_argument("--repeats", type=int, default=3, help="in each process")
    parser.add_argument("--window", default="0.1,0.9", metavar="ON,OFF", help="seconds, as of `spikeprof run`")
    parser.add_argument("--window-seconds", type=float, default=12, help="for how long to measure windows; 0 = not")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    gc.disable()
    faulthandler.enable()
    print(f"torch {torch.__version__}; recorded of an eager step: {in_a_fork(Bench.records_of_a_step)}", flush=True)
    found: Pairs = {}
    off: dict[str, list[tuple[float, float]]] = {"eager": [], "graph": []}
    for _ in range(arguments.processes):
        with_us = in_a_fork(lambda bench: recording(bench, arguments.repeats)) or {}
        without = in_a_fork(lambda bench: untraced(bench, arguments.repeats), traced=False) or {}
        alone = without.pop("untraced", None)
        for way, kinds in (with_us | without).items():
            for kind, pairs in kinds.items():
                found.setdefault(way, {}).setdefault(kind, []).extend(pairs)
        if alone and with_us:
            for kind, ratios in off.items():
                ratios.append(tuple(_median_of_first(p[kind]) for p in (with_us["off again"], alone)))
    if arguments.processes:
        found["off, to untraced"] = off
    if arguments.window_seconds:
        on, without = map(float, arguments.window.split(","))
        found.update(in_a_fork(lambda bench: windows(bench, arguments.window_seconds, on, without)) or {})
    head = f"{'quartiles':>18} {'ms':>9}   "
    print(f"{'':32}{'eager: cost':>12} {head}{'graph: cost':>12} {head} n")
    table = {way: show(way, kinds) for way, kinds in found.items()}
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
