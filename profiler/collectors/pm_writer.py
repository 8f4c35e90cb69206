"""From CUPTI's metrics to ours, sample by sample, and into a file: the second half of the sampler's work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.collectors.pm_library import Image, PmSampler
from spikeprof.profiler.counter_metrics import METRICS, CounterMetric

#: A sample so many times as long as it should be is none: the first one of a stretch reaches back to the one before.
_LENGTH_MAX = 2

#: One is being decoded into while the other is evaluated.
_IMAGES = 2


def resolved(names: Sequence[str]) -> list[CounterMetric]:
    """Our metrics by name; any other name is taken for one of CUPTI's."""
    return [METRICS.get(name) or CounterMetric(name, name, "", additive=name.endswith(".sum")) for name in names]


def sources(metrics: Sequence[CounterMetric]) -> list[str]:
    """CUPTI's metrics that these take, each once."""
    return list(dict.fromkeys(source for metric in metrics for source in metric.sources))


def computed(
    metrics: Sequence[CounterMetric], names: Sequence[str], raw: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Values [samples, metrics] from CUPTI's ``raw`` [samples, names]."""
    column = {name: raw[:, i] for i, name in enumerate(names)}
    values = [column[m.source] * m.scale * (column[m.times] if m.times else 1.0) for m in metrics]
    return np.stack(values, axis=1) if values else np.empty((len(raw), 0))


def packed(metrics: Sequence[CounterMetric], passes: Callable[[list[str]], int]) -> list[list[CounterMetric]]:
    """Few lists, by a greedy search, each of which one pass can take; a single metric is a list whatever it takes."""
    lists: list[list[CounterMetric]] = []
    for metric in metrics:
        for together in lists:
            if passes(sources([*together, metric])) == 1:
                together.append(metric)
                break
        else:
            lists.append([metric])
    return lists


class Writer(threading.Thread):
    """Evaluates decoded images and appends their rows to a file, while the next image is being decoded."""

    def __init__(self, sampler: PmSampler, metrics: Sequence[CounterMetric], interval_ns: int, out: BinaryIO) -> None:
        super().__init__(name="spikeprof-pm-writer", daemon=True)
        self._sampler, self._metrics, self._interval_ns, self._out = sampler, metrics, interval_ns, out
        self._todo: queue.Queue[tuple[Image, int] | None] = queue.Queue()
        self._idle: queue.Queue[Image] = queue.Queue()
        for _ in range(_IMAGES):
            self._idle.put(sampler.image())
        self.samples_count = 0
        self.error: Exception | None = None

    def image(self) -> Image:
        """An image to decode into; waits until one is free."""
        return self._idle.get()

    def take(self, image: Image, count: int) -> None:
        """Hand an image with so many samples over."""
        self._todo.put((image, count))

    def finish(self) -> None:
        """Write all that was handed over."""
        self._todo.put(None)
        self.join()

    def run(self) -> None:
        """Until ``finish``."""
        while (work := self._todo.get()) is not None:
            image, count = work
            try:
                if count and self.error is None:
                    self._write(image, count)
            except Exception as error:  # a full disk: told once, and the queue must go on moving
                self.error = error
            self._idle.put(image)

    def _write(self, image: Image, count: int) -> None:
        times, raw = self._sampler.read(image, count)
        whole = times[:, 1] - times[:, 0] <= _LENGTH_MAX * self._interval_ns
        values = computed(self._metrics, self._sampler.metrics, raw)
        rows = np.concatenate([times.view(np.float64), values], axis=1)[whole]
        self._out.write(rows.tobytes())
        self._out.flush()
        self.samples_count += len(rows)
