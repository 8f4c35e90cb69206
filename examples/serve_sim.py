"""A server under load: Poisson arrivals, mixed lengths, continuous batching.

    python examples/serve_sim.py --rate 20 --requests 60
    spikeprof run -- python examples/serve_sim.py --preset 1b --cuda-graph

Nothing is downloaded; weights are random. Requests arrive at exponentially
distributed intervals, with prompt and output lengths drawn log-uniformly from
their ranges; the same seed gives the same requests. Latencies are those of the
tokens at the asyncio client: TTFT from a request's arrival, waiting included.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

import spikeprof
from spikeprof.kernels.cache import KINDS
from spikeprof.kernels.engine import marks
from spikeprof.kernels.engine.batching import Server
from spikeprof.kernels.engine.config import PRESETS
from spikeprof.kernels.engine.engine import Engine
from spikeprof.kernels.engine.sampling import Sampling
from spikeprof.kernels.engine.scheduler import Request
from spikeprof.kernels.engine.weights import PRECISIONS


@dataclass(slots=True)
class Arrival:
    """A request: when it comes, seconds after the start, and what it asks for; then when its tokens came."""

    at_s: float
    prompt: list[int]
    most: int
    token_times_s: list[float] = field(default_factory=list)


def arrivals(options: argparse.Namespace, vocabulary: int) -> list[Arrival]:
    """The requests of a run, by its seed."""
    source = random.Random(options.seed)
    at_s = 0.0
    made = []
    for _ in range(options.requests):
        at_s += source.expovariate(options.rate)
        prompt = [source.randrange(vocabulary) for _ in range(drawn(source, options.prompt))]
        made.append(Arrival(at_s, prompt, drawn(source, options.output)))
    return made


def drawn(source: random.Random, limits: tuple[int, int]) -> int:
    """A length from the range, log-uniformly: short ones are frequent, long ones happen."""
    low, high = limits
    return min(high, int(math.exp(source.uniform(math.log(low), math.log(high + 1)))))


async def client(server: Server, arrival: Arrival, start_s: float, options: argparse.Namespace) -> None:
    """Send a request when it is due, and note when each token is there."""
    await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.perf_counter()))
    tokens = server.submit(arrival.prompt, arrival.most, temperature=options.temperature, top_p=options.top_p)
    async for _ in tokens:
        arrival.token_times_s.append(time.perf_counter() - start_s)


class Watched(Engine):
    """An engine that notes how much of its cache is used after each step."""

    def __init__(self, preset: str, **options: object) -> None:
        super().__init__(preset, **options)
        self.shares: list[float] = []

    def step(self) -> list[Request]:
        """As ``Engine.step``."""
        served = super().step()
        self.shares.append(self.runner.cache.usage().utilisation_share)
        return served


async def serve(engine: Engine, requests: list[Arrival], options: argparse.Namespace) -> None:
    """Serve all requests."""
    async with Server(engine) as server:
        start_s = time.perf_counter()
        await asyncio.gather(*(client(server, arrival, start_s, options) for arrival in requests))


def marked(name: str, **ids: int) -> AbstractContextManager[None]:
    """What the engine does, as ranges of the trace; nothing where nobody records."""
    return spikeprof.step(name, **ids) if name in ("prefill", "decode") else spikeprof.stage(name, **ids)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not pass (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def figures(engine: Watched, requests: list[Arrival], options: argparse.Namespace) -> dict[str, object]:
    """What the run reached."""
    ttft_ms = [(arrival.token_times_s[0] - arrival.at_s) * 1e3 for arrival in requests]
    itl_ms = [
        (after - before) * 1e3 for arrival in requests for before, after in itertools.pairwise(arrival.token_times_s)
    ]
    tokens_count = sum(len(arrival.token_times_s) for arrival in requests)
    duration_s = max(arrival.token_times_s[-1] for arrival in requests)
    device = engine.runner.decoder.weights.device
    return {
        "preset": options.preset,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "requests": len(requests),
        "rate_per_s": options.rate,
        "prompt_tokens": sum(len(arrival.prompt) for arrival in requests),
        "output_tokens": tokens_count,
        "duration_s": duration_s,
        "tokens_per_s": tokens_count / duration_s,
        "ttft_p50_ms": percentile(ttft_ms, 0.5),
        "ttft_p99_ms": percentile(ttft_ms, 0.99),
        "itl_p50_ms": percentile(itl_ms, 0.5) if itl_ms else None,
        "itl_p99_ms": percentile(itl_ms, 0.99) if itl_ms else None,
        "cache_utilisation_mean": sum(engine.shares) / len(engine.shares),
        "cache_utilisation_max": max(engine.shares),
        "preemptions": engine.scheduler.preemptions_count,
        "paths": {name: list(paths) for name, paths in engine.paths.items()},
    }


def summary(found: dict[str, object]) -> str:
    """The figures for people."""

    def pair(name: str, scale: float, unit: str, *keys: str) -> str:
        values = [found[key] for key in keys]
        return f"{name:<18}" + " / ".join("-" if v is None else f"{float(v) * scale:.1f} {unit}" for v in values)

    return "\n".join(
        [
            f"{found['requests']} requests at {found['rate_per_s']:g}/s on {found['device']}: "
            f"{found['prompt_tokens']} prompt tokens, {found['output_tokens']} output tokens "
            f"in {found['duration_s']:.2f} s, {found['preemptions']} preemptions",
            pair("output", 1, "tokens/s", "tokens_per_s"),
            pair("TTFT P50 / P99", 1, "ms", "ttft_p50_ms", "ttft_p99_ms"),
            pair("ITL P50 / P99", 1, "ms", "itl_p50_ms", "itl_p99_ms"),
            pair("cache mean / max", 100, "%", "cache_utilisation_mean", "cache_utilisation_max"),
        ]
    )


def lengths(text: str) -> tuple[int, int]:
    """``LOW-HIGH``, or one number."""
    low, _, high = text.partition("-")
    high = high or low
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"{text!r}: it must be LOW-HIGH, with 1 <= LOW <= HIGH, or one number")
    return int(low), int(high)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="sizes of the model (tiny)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--weights", choices=PRECISIONS, help="fp16 on a GPU, fp32 on a CPU unless given")
    parser.add_argument(
        "--kv-cache", choices=KINDS, default="fp16", metavar="KIND",
        help=f"{', '.join(KINDS)} (fp16: pages, in the weights' dtype)",
    )  # fmt: skip
    parser.add_argument("--cache-tokens", type=int, help="room of the cache; small ones show preemption")
    parser.add_argument("--max-batch", type=int, default=16, help="requests that run at a time (16)")
    parser.add_argument("--max-delay-ms", type=float, default=0.0, help="how long requests may wait for others (0)")
    parser.add_argument("--max-size", type=int, help="so many requests do not wait (max batch)")
    parser.add_argument("--cuda-graph", action="store_true", help="replay decode as a CUDA graph")
    parser.add_argument("--rate", type=float, default=20.0, help="mean arrivals a second (20)")
    parser.add_argument("--requests", type=int, default=40, help="how many arrive (40)")
    parser.add_argument("--prompt", type=lengths, default=(8, 128), metavar="LOW-HIGH", help="tokens (8-128)")
    parser.add_argument("--output", type=lengths, default=(4, 48), metavar="LOW-HIGH", help="tokens (4-48)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="above 0, at most 1 (1)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and weights (0)")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    options = parser.parse_args(arguments)
    if options.requests < 1:
        parser.error("--requests must be at least 1")
    if not 0 < options.rate < math.inf:
        parser.error("--rate must be above 0")
    try:
        Sampling(options.temperature, options.top_p)
        options.engine = made(options)
        options.made = arrivals(options, options.engine.config.vocabulary)
        for arrival in options.made:
            options.engine.scheduler.check_request(arrival.prompt, arrival.most)
    except ValueError as error:
        parser.error(str(error))
    return options


def made(options: argparse.Namespace) -> Watched:
    """The engine of these options."""
    has_gpu = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
    return Watched(
        options.preset,
        weights=options.weights or ("fp16" if has_gpu else "fp32"),
        kv_cache=options.kv_cache,
        max_seq_len=options.prompt[1] + options.output[1],
        max_batch=options.max_batch,
        device=options.device,
        cuda_graph=options.cuda_graph,
        seed=options.seed,
        cache_tokens=options.cache_tokens,
        max_delay_s=options.max_delay_ms / 1e3,
        max_size=options.max_size,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns the exit code."""
    options = parsed(arguments)
    marks.replace(marked)
    options.engine.generate(options.made[0].prompt, 2)  # kernels are compiled before the clock runs
    options.engine.shares.clear()
    asyncio.run(serve(options.engine, options.made, options))
    found = figures(options.engine, options.made, options)
    print(json.dumps(found) if options.json else summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
