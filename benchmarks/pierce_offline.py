"""How many look-ups per second the penetration detector takes in, and in how much memory.

``python benchmarks/pierce_offline.py [--events N]``: N look-ups (default 10 million) in blocks of 65,536, of everyday
keys with folded ids, and then of random keys that are all different. Blocks are made between timings. Each kind runs
in a process of its own; memory is the highest resident set of that process, with libraries and the making of blocks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time

import numpy as np
import pyarrow as pa

from spikeprof.analyzers.cache_pierce.detector import Detector
from spikeprof.analyzers.cache_pierce.known import KnownKeys
from spikeprof.profiler.lookups import Lookups, lookups

BLOCK_COUNT = 65_536


def everyday(rng: np.random.Generator, first_s: float, per_s: float) -> Lookups:
    """A block of popular and rare keys of five forms, 5 % misses."""
    ids = rng.zipf(1.2, BLOCK_COUNT) % 1_000_000
    forms = rng.integers(0, 5, BLOCK_COUNT)
    keys = [
        (f"user:{i}", f"user:{i}:cart", f"sess:{i * 2654435761 % 2**64:016x}", f"feat:item_{i}:v2", f"/api/{i}/detail")[
            form
        ]
        for i, form in zip(ids.tolist(), forms.tolist(), strict=True)
    ]
    ttls_s = np.where(rng.random(BLOCK_COUNT) < 0.5, rng.uniform(1, 600, BLOCK_COUNT), np.nan)
    return lookups(first_s + np.arange(BLOCK_COUNT) / per_s, keys, rng.random(BLOCK_COUNT) > 0.05, ttls_s)


def random_keys(rng: np.random.Generator, first_s: float, per_s: float) -> Lookups:
    """A block of keys that are all different and all missed: ids, words and hexadecimal digits."""
    ids = rng.integers(0, 2**63, BLOCK_COUNT)
    letters = rng.integers(97, 123, (BLOCK_COUNT, 12), dtype=np.uint8)
    words = letters.tobytes().decode()
    forms = rng.integers(0, 3, BLOCK_COUNT).tolist()
    keys = [
        (f"user:{i}", f"user:{words[12 * at : 12 * at + 12]}", f"kv:{i:016x}")[form]
        for at, (i, form) in enumerate(zip(ids.tolist(), forms, strict=True))
    ]
    return lookups(first_s + np.arange(BLOCK_COUNT) / per_s, keys, np.zeros(BLOCK_COUNT, bool))


def measure(make_name: str, events_count: int, per_s: float, with_known: bool, pipe) -> None:  # type: ignore[no-untyped-def]
    """Feed blocks and send back look-ups per second (of time, of CPU), alerts, and resident sets, MB."""
    make = {"everyday": everyday, "random": random_keys}[make_name]
    known = KnownKeys((f"user:{i}" for i in range(1_000_000)), 2_000_000) if with_known else None
    detector, rng = Detector(known=known), np.random.default_rng(1)
    start_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took_s, cpu_s, raised = 0.0, 0.0, 0
    blocks = max(events_count // BLOCK_COUNT, 1)
    for at in range(blocks):
        block = make(rng, 1e9 + at * BLOCK_COUNT / per_s, per_s)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        raised += sum(alert.kind == "raised" for alert in detector.feed(block))
        took_s += time.perf_counter() - start_s
        cpu_s += time.process_time() - start_cpu_s
        del block
    pa.default_memory_pool().release_unused()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    events_count = blocks * BLOCK_COUNT
    pipe.send((events_count / took_s, events_count / cpu_s, raised, start_mb, peak_mb))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    events_count = parser.parse_args().events
    columns = ("look-ups", "in event time", "look-ups/s", "per CPU second", "highest memory (MB)", "at the start (MB)")
    print(f"| keys | {' | '.join(columns)} |")
    print("|--|--:|--:|--:|--:|--:|--:|")
    context = multiprocessing.get_context("spawn")
    for name, per_s, with_known in (
        ("everyday", 20_000.0, False),
        ("everyday", 500.0, False),
        ("random", 20_000.0, False),
        ("random", 20_000.0, True),
    ):
        count = events_count if per_s > 1000 else events_count // 10
        here, there = context.Pipe()
        child = context.Process(target=measure, args=(name, count, per_s, with_known, there))
        child.start()
        rate, cpu_rate, _, start_mb, peak_mb = here.recv()
        child.join()
        label = f"{name}{', with 1 million known keys' if with_known else ''}"
        numbers = f"{count:,} | {count / per_s:,.0f} s | {rate:,.0f} | {cpu_rate:,.0f} | {peak_mb:.0f} | {start_mb:.0f}"
        print(f"| {label} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
