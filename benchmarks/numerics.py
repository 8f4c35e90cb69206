"""What scanning every module's output costs (needs a GPU): decode, eager and as a CUDA graph, prefill; the scan alone.

    python benchmarks/numerics.py --preset 7b --batch 1

Runs with and without the watch alternate; medians of the step's time. The scan's rate is of bytes read, beside a copy's
bytes read and written. Limits: watched every step 3 % of a graph's step, every 16th step 0.5 %, 80 % of the copy rate.

Floors tell what of the cost is whose. Of eager steps, in the same rounds: what torch takes for a hook that does nothing
on each of the same modules ("hooks"), and for one that holds what the module gives until one launch has seen it, the
least that a watch can do ("holding"). Of a prefill also the bytes that are scanned, at the rate at which a copy reads
and writes in the same run, beside the time that the scans take on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import spikeprof
from spikeprof.kernels.engine import Engine
from spikeprof.kernels.engine.model import decode
from spikeprof.profiler.inject.events import Clock
from spikeprof.profiler.inject.numerics.formats import FORMATS
from spikeprof.profiler.inject.numerics.scanner import held_bytes_of
from spikeprof.profiler.inject.numerics.scanners import scanner_for
from spikeprof.profiler.watching import Watch

CONTEXT = 512
EVERY = 16
ROUNDS, STEPS = 7, 20
EAGER_ROUNDS, EAGER_STEPS, SAMPLED_ROUNDS = 40, 4, 20
SCAN_BYTES = 1 << 30
PARTS = ("scans", "graph", "eager", "prefill")

Step = Callable[[], object]


class Drained:
    """A watch whose ring is emptied every 100 ms, as the agent's thread does."""

    def __init__(self, model: Any, every: int) -> None:
        self.watch: Watch = spikeprof.watch(model, every=every)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            self.watch.collect()

    def close(self) -> None:
        """End both."""
        self._over.set()
        self._thread.join()
        self.watch.close()


def step_ms(step: Step, steps: int = STEPS) -> float:
    """Milliseconds of a step, the GPU's or the host's, whichever is slower."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


def costs(rounds: list[tuple[float, ...]], *names: str) -> dict[str, float]:
    """Of rounds without and with something, in turn: medians, and those of what each costs, as a share and in ms."""
    plain, *others = zip(*rounds, strict=True)
    found = {"plain_ms": statistics.median(plain)}
    for name, own in zip(names, others, strict=True):
        found[f"{name}_ms"] = statistics.median(after - before for before, after in zip(plain, own, strict=True))
        found[f"{name}_ratio"] = statistics.median(after / before - 1 for before, after in zip(plain, own, strict=True))
    return found


def captured(step: Step) -> Step:
    """The step as the replay of a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def decode_step(engine: Engine, batch: int) -> Step:
    """One decode step over a context of ``CONTEXT`` tokens; which tokens does not matter to its time."""
    decoder, cache = engine.runner.decoder, engine.runner.cache
    plan = cache.blank_plan(batch)
    plan.lengths.fill_(CONTEXT)
    tokens, positions = torch.zeros(2, batch, dtype=torch.int64, device=decoder.weights.device)
    positions.fill_(CONTEXT - 1)
    return lambda: decode(decoder, cache, plan, tokens, positions)


def nothing(*_: object) -> None:
    """A hook."""


def holder(model: Any, device: Any) -> Callable[..., None]:
    """A hook that holds what modules give, and lets it go with a launch: at the step's end, or as the watch does."""
    held: list[Any] = []
    size, limit, flag = 0, held_bytes_of(torch.cuda, device), torch.zeros((), device=device)

    def hold(module: Any, _: object, output: Any) -> None:
        nonlocal size
        held.append(output)
        size += output[0].nbytes if type(output) is tuple else output.nbytes
        if module is model or size >= limit:
            flag.zero_()
            held.clear()
            size = 0

    return hold


def eager(model: Any, step: Step) -> dict[str, float]:
    """The step without anything, with the watch, and with hooks for the floors.

    Everything in turn in each round, forwards and backwards by turns: a host that grows slower slows all alike.
    """
    hold = holder(model, torch.cuda.current_device())
    ways: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "plain": contextlib.nullcontext,
        "watch": lambda: contextlib.closing(Drained(model, 1)),
        "hooks": lambda: hooked(model, nothing),
        "holding": lambda: hooked(model, hold),
    }
    rounds = []
    for turn in range(EAGER_ROUNDS):
        times = {}
        for name in ways if turn % 2 else reversed(ways):
            with ways[name]():
                times[name] = warm_step_ms(step, EAGER_STEPS)
        rounds.append(tuple(times[name] for name in ways))
    return costs(rounds, *list(ways)[1:])


def sampled(model: Any, step: Step) -> dict[str, float]:
    """Of a watch of every 16th step: what that one costs, spread over all, as are hooks that hold in such a step alone.

    Of three times sixteen steps the first one of each is watched, held, or left alone, which tells how far to trust the
    others. Each step is timed by itself and set against the others of its sixteen: hosts are not as even for longer.
    What the others pay, for telling that a step begins and ends, is timed with a module that does nothing.
    """
    hold = holder(model, torch.cuda.current_device())
    ways: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "watch": contextlib.nullcontext,
        "holding": lambda: hooked(model, hold),
        "alone": contextlib.nullcontext,
    }
    rounds: dict[str, list[list[float]]] = {name: [] for name in ways}
    with contextlib.closing(Drained(model, len(ways) * EVERY)):
        for _ in range(2 * len(ways) * EVERY):  # the first two that are watched are learned from
            step()
        for name, way in SAMPLED_ROUNDS * list(ways.items()):
            with way():
                first = step_ms(step, 1)
            rounds[name].append([first, *(step_ms(step, 1) for _ in range(EVERY - 1))])
    told = {"telling_us": telling_us()}
    plain = statistics.median(statistics.median(one[2:]) for each in rounds.values() for one in each)
    for name, each in rounds.items():
        # Hooks are taken out when the next step begins.
        extra = [(one[0] + one[1] - 2 * statistics.median(one[2:])) / EVERY for one in each]
        told |= {f"{name}_ms": statistics.median(extra), f"{name}_ratio": statistics.median(extra) / plain}
    return told


def telling_us(calls: int = 4096) -> float:
    """Microseconds that a step takes longer for telling that it begins and ends, where it is not looked at."""
    module = torch.nn.Identity()
    plain, watched = [], []
    for _ in range(ROUNDS):
        plain.append(host_us(module, calls))
        with spikeprof.watch(module, every=16 * calls):
            module(None)
            watched.append(host_us(module, calls))
    return statistics.median(watched) - statistics.median(plain)


def host_us(call: Callable[[None], object], calls: int) -> float:
    """Of one call."""
    began = time.perf_counter()
    for _ in range(calls):
        call(None)
    return (time.perf_counter() - began) / calls * 1e6


@contextlib.contextmanager
def hooked(model: Any, hook: Callable[..., None]) -> Iterator[None]:
    """With this hook in each module."""
    handles = [module.register_forward_hook(hook) for module in model.modules()]
    yield
    for handle in handles:
        handle.remove()


def warm_step_ms(step: Step, steps: int) -> float:
    """The same after some steps more."""
    for _ in range(3):
        step()
    return step_ms(step, steps)


def scans(model: Any, step: Step) -> dict[str, float]:
    """What a step is made of: modules that are called, tensors that are scanned, launches, bytes."""
    called: list[object] = []
    with hooked(model, lambda module, *_: called.append(module)):
        step()
    with spikeprof.watch(model) as watch:
        step()
        torch.cuda.synchronize()
        before, known = launches(watch), {row["step"] for row in watch.stats()}
        step()
        torch.cuda.synchronize()
        rows = [row for row in watch.stats() if row["step"] not in known]
        count = launches(watch) - before
    sizes = [row["elements_count"] * getattr(torch, row["dtype"]).itemsize for row in rows]
    return {"calls": len(called), "scans": len(rows), "launches": count, "bytes": sum(sizes)}


def launches(watch: Watch) -> int:
    """Of a watch so far."""
    numerics = watch._numerics
    assert numerics is not None
    return sum(getattr(scanner, "launches", 0) for scanner in numerics.looks.scanners.values())


def gpu_ms(model: Any, step: Step, steps: int = 3) -> dict[str, float]:
    """A step's time on the GPU under the watch, of the program's kernels and of the scans.

    By torch.profiler, and so last of all: it loads torch's compiler, and the watch then has hooks in the modules.
    """
    drained = Drained(model, 1)
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    drained.close()
    found = {"program_ms": 0.0, "scans_ms": 0.0}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = "scans_ms" if event.name.startswith("spikeprof_numerics") else "program_ms"
            found[name] += event.time_range.elapsed_us() / steps / 1e3
    return found


def graphs(model: Any, step: Step, every: int) -> dict[str, float]:
    """Replays of two graphs captured without the watch and two under it: where their memory lies plays a part."""
    plain = captured(step), captured(step)
    drained = Drained(model, every)
    watched = captured(step), captured(step)
    rounds = []
    for _ in range(ROUNDS):
        first, after, later, last = (step_ms(each, 4 * STEPS) for each in (plain[0], *watched, plain[1]))
        rounds.append(((first + last) / 2, (after + later) / 2))
    drained.close()
    return costs(rounds, "watch")


def scan_rates(name: str) -> dict[str, float]:
    """Scan of a large tensor against a copy of it, GB/s of each; the copy's are bytes read and written."""
    dtype = getattr(torch, name)
    drawn = torch.randn(
        SCAN_BYTES // dtype.itemsize, device="cuda", dtype=torch.float32 if dtype.itemsize == 4 else torch.half
    )
    tensor = drawn.clamp_(1e-3, 100).to(dtype)
    other = torch.empty_like(tensor)
    scanner = scanner_for(tensor.device, Clock, print)
    scanner.begin()
    copy = 2 * SCAN_BYTES / device_ms(lambda: other.copy_(tensor)) / 1e6
    scan = SCAN_BYTES / device_ms(lambda: scanner.add(tensor, FORMATS[name], 0)) / 1e6
    return {"copy_gb_per_s": copy, "scan_gb_per_s": scan, "scan_ratio": scan / copy}


def copy_bytes_per_s() -> float:
    """Bytes that a copy reads and writes."""
    tensor = torch.empty(SCAN_BYTES, dtype=torch.int8, device="cuda")
    other = torch.empty_like(tensor)
    return 2 * SCAN_BYTES / device_ms(lambda: other.copy_(tensor)) * 1e3


def device_ms(act: Callable[[], object]) -> float:
    """Median of the GPU's time."""
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        act()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return statistics.median(times[1:])


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="7b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt (2048)")
    parser.add_argument("--dtypes", default="float16,bfloat16,float32,float8_e4m3fn,int8")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of these are measured (all)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts, dtypes = options.parts.split(","), options.dtypes.split(",")
    for option, given, known in (
        ("--parts", parts, PARTS),
        ("--dtypes", dtypes, [name for name in FORMATS if name != "int4"]),
    ):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{option} {unknown[0]}: it can be {', '.join(known)}")
    if not torch.cuda.is_available():
        print("benchmarks/numerics.py needs a GPU", file=sys.stderr)
        return 1
    figures: dict[str, Any] = {}

    def tell(name: str, value: Any) -> None:
        figures[name] = value
        if not options.json:
            shown = {key: round(number, 4) for key, number in value.items()} if isinstance(value, dict) else value
            print(f"{name}: {shown}", flush=True)

    tell("device", torch.cuda.get_device_name())
    tell("torch", torch.__version__)
    for name in dtypes if "scans" in parts else ():
        tell(f"scan_{name}", scan_rates(name))
        torch.cuda.empty_cache()
    engine = Engine(options.preset, max_seq_len=options.prefill + 64, max_batch=options.batch)
    network = engine.runner.decoder.network
    prompt = list(range(1, options.prefill + 1))
    with engine.scope():
        step = decode_step(engine, options.batch)
        for _ in range(5):
            step()
        tell("decode", scans(network, step))
        if "graph" in parts:
            for every in (1, EVERY):
                tell(f"graph_decode_every_{every}", graphs(network, step, every))
        if "eager" in parts:
            tell("eager_decode_every_1", eager(network, step))
            tell(f"eager_decode_every_{EVERY}", sampled(network, step))
        if "prefill" in parts:
            prefills(network, lambda: engine.generate(prompt, 1), tell)
    if options.json:
        print(json.dumps(figures))
    return 0


def prefills(model: Any, step: Step, tell: Callable[[str, Any], None]) -> None:
    """What a prefill is made of, and what watching it costs."""
    found = scans(model, step)
    tell("prefill", {**found, "bytes_ms_at_copy_rate": found["bytes"] / copy_bytes_per_s() * 1e3})
    tell("prefill_every_1", eager(model, step))
    tell(f"prefill_every_{EVERY}", sampled(model, step))
    tell("prefill_gpu", gpu_ms(model, step))


if __name__ == "__main__":
    sys.exit(main())
