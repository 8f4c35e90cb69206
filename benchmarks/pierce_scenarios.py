"""How well the penetration detector tells attacks from everything else: a table over labelled, simulated traffic.

``python benchmarks/pierce_scenarios.py [--seeds N] [--processes N] [--only NAME …]``. Traffic and labels are made by
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

from analyzers.cache_pierce.scenarios import SCENARIOS, T0_S, Scenario, weak_attack
from analyzers.cache_pierce.score import Score, alerts_of, score

SEEN = (range(1, 100), (60.0, 300.0))
WEAK_TIMES = (2.2, 2.5, 2.6, 2.8, 3.0, 4.0)
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


def table(title: str, seeds: Sequence[int], rates: Sequence[float], processes_count: int, only: Sequence[str]) -> None:
    """Run scenarios and print their table."""
    chosen = [number for number, make in enumerate(SCENARIOS) if not only or make.__name__ in only]
    jobs = [(number, seed, per_s) for number in chosen for seed in seeds for per_s in rates]
    totals = [Score() for _ in SCENARIOS]
    with multiprocessing.get_context("spawn").Pool(processes_count) as pool:
        for number, result in pool.imap_unordered(one, jobs):
            totals[number] += result
    print(f"\n{title}: {len(seeds)} seeds, {', '.join(f'{per_s:g}' for per_s in rates)} look-ups/s\n")
    print("| scenario | runs | incidents | found | missed | false alarms | repeated | median delay (s) | longest (s) |")
    print("|--|--:|--:|--:|--:|--:|--:|--:|--:|")
    for number in chosen:
        name = SCENARIOS[number].__name__.replace("_", " ")
        print(row(name, len(seeds) * len(rates), totals[number]))
    whole = sum(totals, Score())
    print(row("**all**", len(jobs), whole))
    precision = whole.found_count / max(whole.found_count + whole.false_count, 1)
    recall = whole.found_count / max(whole.found_count + whole.missed_count, 1)
    print(f"\nPrecision {precision:.3f}, recall {recall:.3f}.", flush=True)


def weak(job: tuple[float, int, float]) -> tuple[float, Score, float]:
    """One attack near the limit: how strong, its score, and how long until its alert (infinite: none)."""
    times, seed, per_s = job
    made = weak_attack(np.random.default_rng([seed, int(per_s), int(times * 100)]), per_s, times)
    alerts = alerts_of(made)
    start_s = made.expected[0].start_s
    delays_s = [alert.ts_s - T0_S - start_s for alert in alerts if alert.kind == "raised"]
    return times, score(made, alerts), min(delays_s, default=np.inf)


def limits_table(seeds: Sequence[int], rates: Sequence[float], processes_count: int) -> None:
    """How soon attacks near the limit of 2.5 times the usual look-ups are found."""
    jobs = [(times, seed, per_s) for times in WEAK_TIMES for seed in seeds for per_s in rates]
    delays_s: dict[float, list[float]] = {times: [] for times in WEAK_TIMES}
    with multiprocessing.get_context("spawn").Pool(processes_count) as pool:
        for times, _, delay_s in pool.imap_unordered(weak, jobs):
            delays_s[times].append(delay_s)
    print(f"\nNear the limit of 2.5 times the usual look-ups: {len(seeds)} seeds, rates as held out\n")
    print("| look-ups over usual | runs | found within 2 s | found within 30 s | median delay (s) |")
    print("|--:|--:|--:|--:|--:|")
    for times, some in delays_s.items():
        within = [sum(delay_s <= limit_s for delay_s in some) for limit_s in (2.0, 30.0)]
        print(f"| {times:g} | {len(some)} | {within[0]} | {within[1]} | {np.median(some):.2f} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6, help="for each scenario and rate")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names of scenarios (default: all, and attacks near the limit)")
    given = parser.parse_args()
    for title, (seeds, rates) in (("Seen while it was made", SEEN), ("Held out", HELD_OUT)):
        table(title, seeds[: given.seeds], rates, given.processes, given.only or ())
    if not given.only:
        limits_table(HELD_OUT[0][: given.seeds], HELD_OUT[1], given.processes)


if __name__ == "__main__":
    main()
