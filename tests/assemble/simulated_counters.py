"""A GPU that counts, and a sampler of its counters, without either: every launch's true count is known.

Launches of a class count the same but for noise. Their counts come while the SMs work: some time after the
recorded start, until some time before the recorded end, more of them early or late, and a little in a last flush
just before the end, as recordings on an H200 show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from paths import ROOT

from spikeprof.profiler.assemble.counter_overlap import Floats, Ints, Samples
from spikeprof.profiler.assemble.counter_pieces import Work

NOTHING = np.zeros(0, np.int64)
METRICS = ("l2_sectors_count", "dram_read_bytes", "instructions_count")


@dataclass(frozen=True)
class Habits:
    """How launches count within their time, by class: each drawn evenly from its range."""

    lead_ns: tuple[float, float] = (0, 500)
    tail_ns: tuple[float, float] = (700, 1200)
    slope: float = 0.6  # at most: the rate at the begin and the end, above or below the mean
    flushed: float = 0.03
    noise: float = 0.02  # from launch to launch, as a share


#: Counts spread evenly over the recorded time, the same for every launch.
EVEN = Habits(lead_ns=(0, 0), tail_ns=(0, 0), slope=0, flushed=0, noise=0)


class Simulated(NamedTuple):
    samples: Samples
    work: Work
    counts: Floats  # (launches, metrics)

    @property
    def classes_count(self) -> int:
        return int(self.work.kernel_class.max()) + 1

    def class_means(self) -> Floats:
        """(classes, metrics)"""
        number = np.bincount(self.work.kernel_class)
        sums = [np.bincount(self.work.kernel_class, column) for column in self.counts.T]
        return np.stack(sums, axis=1) / np.maximum(number, 1)[:, None]


def work_of(begin: Ints, end: Ints, class_id: Ints) -> Work:
    """Kernels and nothing else."""
    return Work(begin, end, class_id, *[NOTHING] * 5, np.zeros(len(begin), bool))


def sample_times(first: int, last: int, interval_ns: int, random: np.random.Generator) -> tuple[Ints, Ints]:
    """Begins and ends of samples around a stretch of time, as irregular as an H200 takes them."""
    count = (last - first) // interval_ns + 8
    edges = first - 3 * interval_ns - int(random.integers(0, interval_ns)) + np.arange(count + 1) * interval_ns
    edges += np.where(np.arange(count + 1) % 2, 16, 0) + random.integers(-1, 2, count + 1)
    return edges[:-1], edges[1:]


def simulate(
    begin: Ints, end: Ints, class_id: Ints, interval_ns: int, random: np.random.Generator, habits: Habits | None = None
) -> Simulated:
    """Samples of these launches, whose classes count at rates that differ a hundredfold."""
    habits = habits or Habits()
    start, stop = sample_times(int(begin.min()), int(end.max()), interval_ns, random)
    classes, duration = int(class_id.max()) + 1, end - begin
    lead, tail = (random.uniform(*ends, classes)[class_id] for ends in (habits.lead_ns, habits.tail_ns))
    active = np.maximum(duration - lead - tail, 0.15 * duration)
    first = np.minimum(begin + lead, end - active)
    shares = _met(first, first + active, start, stop)
    flushed = _met(end - np.minimum(200, duration), end - np.minimum(100, duration / 2), start, stop)
    values, counts = np.zeros((len(start), len(METRICS))), np.zeros((len(begin), len(METRICS)))
    mean_ns = np.bincount(class_id, active) / np.maximum(np.bincount(class_id), 1)
    for m in range(len(METRICS)):
        rate = np.exp(random.normal(5, 1.2, classes)) * (random.random(classes) > 0.1)
        slope = random.uniform(-habits.slope, habits.slope, classes)
        counts[:, m] = (rate * mean_ns)[class_id] * np.exp(random.normal(0, habits.noise, len(begin)))
        sample, launch, u0, u1 = shares
        bend = slope[class_id[launch]]
        part = (u1 + bend * (u1 * u1 - u1)) - (u0 + bend * (u0 * u0 - u0))
        values[:, m] = np.bincount(sample, (1 - habits.flushed) * counts[launch, m] * part, minlength=len(start))
        sample, launch, u0, u1 = flushed
        values[:, m] += np.bincount(sample, habits.flushed * counts[launch, m] * (u1 - u0), minlength=len(start))
    return Simulated(Samples(start, stop, values, METRICS), work_of(begin, end, class_id), counts)


def _met(first: Floats, last: Floats, start: Ints, stop: Ints) -> tuple[Ints, Ints, Floats, Floats]:
    """Pairs of a sample and a stretch: both, and which part of the stretch lies in the sample, from 0 to 1."""
    low, high = np.searchsorted(stop, first, "right"), np.searchsorted(start, last, "left")
    number = np.maximum(high - low, 0)
    launch = np.repeat(np.arange(len(first)), number)
    sample = low[launch] + np.arange(len(launch)) - np.repeat(np.cumsum(number) - number, number)
    length = (last - first)[launch]
    return (
        sample,
        launch,
        np.clip((start[sample] - first[launch]) / length, 0, 1),
        np.clip((stop[sample] - first[launch]) / length, 0, 1),
    )


def recorded_launches(name: str, count: int, skip: int = 0) -> tuple[Ints, Ints, Ints]:
    """Begins, ends and classes of launches of a sample trace: LLM decoding on an H200, as it was recorded."""
    columns = ["name", "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "start_ns", "end_ns"]
    table = pq.read_table(ROOT / "sample_traces" / name / "kernels.parquet", columns=columns).slice(skip, count)
    frame = table.to_pandas()
    class_id = frame.groupby(columns[:7], observed=True, sort=False).ngroup().to_numpy(np.int64)
    return frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy(), class_id


def steps(
    random: np.random.Generator, count: int, interval_ns: int, *, locked_layers: bool = False, jitter_ns: int = 0
) -> tuple[Ints, Ints, Ints]:
    """Steps of 16 layers of 24 launches and one more, without gaps, each step a whole number of sampling intervals.

    ``locked_layers``: each layer is, so that samples cut all layers of all steps at the same places.
    """
    kinds = (832 + 32 * (random.gamma(1.2, 1400, 28) / 32)).astype(np.int64)
    layer = random.integers(0, 27, 24)
    order = np.append(np.tile(layer, 16), 27)
    duration, gap = kinds[order], np.full(len(order), 416)
    if locked_layers:
        gap[23::24] += -(kinds[layer] + 416).sum() % interval_ns
    gap[-1] += -(duration + gap).sum() % interval_ns + interval_ns
    duration, gap = np.tile(duration, count), np.tile(gap, count)
    if jitter_ns:
        duration = duration + 32 * random.integers(-1, 2, len(duration))
        gap = gap + random.integers(-jitter_ns, jitter_ns + 1, len(gap))
    begin = 1_000_000 + np.append(0, np.cumsum(duration + gap)[:-1])
    _, class_id = np.unique(np.tile(order, count), return_inverse=True)
    return begin, begin + duration, class_id
