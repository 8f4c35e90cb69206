"""How well the penetration detector tells attacks from everything else: a table over labelled, simulated traffic.

``python benchmarks/pierce_scenarios.py [--seeds N] [--processes N]``. Traffic and labels are made by
``tests/analyzers/cache_pierce/scenarios.py``; ``score.py`` there holds them against alerts. The detector runs with its
default options. The first table is over seeds and rates that it was made with, the second over others.

An incident is found if its alert comes in time: within 2 s of event time (clock skew: plus the skew; slow ramp: 30 s
after look-ups pass the limit; one hot missing key: 40 s, of which the rule itself takes 30). A raised alert that
belongs to no incident is false; a late one of an incident counts as missed. Delays are of incidents found.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from analyzers.cache_pierce.scenarios import SCENARIOS, Scenario
from analyzers.cache_pierce.score import Score, alerts_of, score

SEEN = (range(1, 100), (60.0, 300.0))
HELD_OUT = (range(2001, 2100), (45.0, 130.0, 500.0))


def one(job: tuple[int, int, float]) -> tuple[int, Score]:
    """One scenario with one seed and rate."""
    number, seed, per_s = job
    make: Callable[[np.random.Generator, float], Scenario] = SCENARIOS[number]
    made = make(np.random.default_rng([seed, int(per_s), zlib.crc32(make.__name__.encode())]), per_s)
    return number, score(made, alerts_of(made))


def row(name: str, runs_count: int, total: Score) -> str:
    """A line of the table."""
    delays_s = sorted(total.delays_s)
    middle = f"{np.median(delays_s):.2f}" if delays_s else ""
    most = f"{delays_s[-1]:.2f}" if delays_s else ""
    incidents_count = total.found_count + total.missed_count
    return (
        f"| {name} | {runs_count} | {incidents_count} | {total.found_count} | {total.missed_count} | "
        f"{total.false_count} | {total.repeated_count} | {middle} | {most} |"
    )


def table(title: str, seeds: Sequence[int], rates: Sequence[float], processes_count: int) -> None:
    """Run all scenarios and print their table."""
    jobs = [(number, seed, per_s) for number in range(len(SCENARIOS)) for seed in seeds for per_s in rates]
    totals = [Score() for _ in SCENARIOS]
    with multiprocessing.get_context("spawn").Pool(processes_count) as pool:
        for number, result in pool.imap_unordered(one, jobs):
            totals[number] += result
    print(f"\n{title}: {len(seeds)} seeds, {', '.join(f'{per_s:g}' for per_s in rates)} look-ups/s\n")
    print("| scenario | runs | incidents | found | missed | false alarms | repeated | median delay (s) | longest (s) |")
    print("|--|--:|--:|--:|--:|--:|--:|--:|--:|")
    for make, total in zip(SCENARIOS, totals, strict=True):
        print(row(make.__name__.replace("_", " "), len(seeds) * len(rates), total))
    whole = sum(totals, Score())
    print(row("**all**", len(jobs), whole))
    precision = whole.found_count / max(whole.found_count + whole.false_count, 1)
    recall = whole.found_count / max(whole.found_count + whole.missed_count, 1)
    print(f"\nPrecision {precision:.3f}, recall {recall:.3f}.", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6, help="for each scenario and rate")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    for title, (seeds, rates) in (("Seen while it was made", SEEN), ("Held out", HELD_OUT)):
        table(title, seeds[: given.seeds], rates, given.processes)


if __name__ == "__main__":
    main()
