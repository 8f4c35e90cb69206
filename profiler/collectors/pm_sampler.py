"""The sampler process of one GPU: ``python -m spikeprof.profiler.collectors.pm_sampler '{"device": 0, …}'``.

A process of its own, because counters are read by native code that may crash, holds locks for long and wants a
processor to itself: neither the program nor the session may feel it. It ends when its standard input does.

Samples are taken faster than they can be decoded (10 µs against 35 µs, eight metrics on H200), and a decoding consumes
all that were taken, though it keeps no more than fit into one image. So sampling goes on until ``PAUSE_AT`` samples
wait, stands still until they are decoded, and goes on: stretches with gaps, spread over the whole run. At intervals
that decoding keeps up with there are no gaps.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spikeprof.profiler.collectors import pm_files
from spikeprof.profiler.collectors.pm_library import Decoded, PmSampler, PmUnavailable, load
from spikeprof.profiler.collectors.pm_writer import Writer, packed, resolved, sources
from spikeprof.profiler.counter_metrics import CounterMetric
from spikeprof.profiler.units import NS_PER_S

#: Samples in one image: about 35 kB each (memory set on H200). There are two, and an empty one.
CAPACITY = 3000

#: Samples that may wait for decoding before sampling stands still; what is taken until it does must fit in, too. Half
#: of it, and half of that, where the hardware's buffer ran over.
PAUSE_AT = 2200

#: Decoding keeps up where it takes at most this share of the time that the samples took.
_KEEPS_UP_SHARE = 0.5

#: How long each of several lists of metrics has its turn; changing over takes 0.5 to 1 s.
TURN_SECONDS = 3.0

#: How long sampling is tried for before it is called working, and how many samples tell that it does not.
_TRIAL_SECONDS = 0.005
_TRIAL_SAMPLES = 20
_POLL_SECONDS = 0.01
_TELLING_SAMPLES = 50  # a decoding of fewer does not tell how long it takes for one
_NICE = 5

#: How long after it was asked to end a process is given up that nobody else may be there to kill.
STUCK_SECONDS = 30.0
EXIT_STUCK = 3


@dataclass(frozen=True)
class Order:
    """What to sample, as it stands on the command line. ``max_samples`` bounds all lists together."""

    device: int
    metrics: tuple[str, ...]
    interval_ns: int
    folder: str
    max_samples: int


class Stop:
    """Whether to end: when standard input has. A process that is stuck in the driver then ends all the same, later."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="spikeprof-pm-stop", daemon=True).start()

    def _watch(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        self._ended.set()
        time.sleep(STUCK_SECONDS)
        os._exit(EXIT_STUCK)

    @property
    def asked(self) -> bool:
        """Whether to end now."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until it is asked, at most so long; whether it is."""
        return self._ended.wait(seconds)


class Journal:
    """The events file."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "w", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, ev: str, **fields: Any) -> None:
        """One event, at once; where the disk is full, with the next one that can be written."""
        with self._lock, suppress(OSError):
            self._file.write(json.dumps({"ev": ev, "t": time.time_ns(), **fields}) + "\n")
            self._file.flush()


class Device:
    """One GPU being sampled, list after list."""

    def __init__(self, order: Order, library: str, journal: Journal, stop: Stop) -> None:
        self._order, self._library, self._journal, self._stop = order, library, journal, stop
        self._samples_count = 0
        self._pause_at = PAUSE_AT
        self._keeps_up = False  # until a decoding has told
        self._sets: list[tuple[int, list[CounterMetric]]] = []
        self._sampler: PmSampler | None = None

    def prepare(self) -> None:
        """Find out what can be sampled, and have the first list ready. Raises PmUnavailable when there is nothing."""
        sampler: PmSampler | None = PmSampler(self._order.device, self._library)
        try:
            assert sampler is not None
            lists = packed(self._possible(resolved(self._order.metrics), sampler), sampler.passes)
            for metrics in lists:
                # The first list takes the sampler that is there: setting one up takes half a second.
                sampler, first = None, sampler
                # A GPU is set up for one list at a time, so that of several none can be kept ready.
                if working := self._working(metrics, first, keep=len(lists) == 1):
                    names = [metric.name for metric in working]
                    number = len(self._sets)
                    self._sets.append((number, working))
                    self._journal.write("set", number=number, metrics=names, interval_ns=self._order.interval_ns)
        finally:
            if sampler is not None:
                sampler.close()
        if not self._sets:
            raise PmUnavailable("this GPU delivers none of the metrics that were asked for")

    def _possible(self, metrics: list[CounterMetric], sampler: PmSampler) -> list[CounterMetric]:
        """The metrics that the chip knows and that one pass can take."""
        kept = []
        for metric in metrics:
            try:
                reason = "" if sampler.passes(list(metric.sources)) == 1 else "needs more than one pass"
            except PmUnavailable as error:
                reason = str(error)
            if reason:
                self._journal.write("missing", metric=metric.name, reason=reason)
            else:
                kept.append(metric)
        return kept

    def _working(self, metrics: list[CounterMetric], sampler: PmSampler | None, keep: bool) -> list[CounterMetric]:
        """The metrics that this GPU delivers: one of a unit that it lacks would leave every sample incomplete."""
        if self._delivers(metrics, sampler, keep):
            return metrics
        kept = []
        units: dict[str, list[CounterMetric]] = {}
        for metric in metrics:
            units.setdefault(metric.source.split("__")[0], []).append(metric)
        for unit, of_unit in units.items():
            if len(units) > 1 and self._delivers(of_unit, None):
                kept += of_unit
            else:
                for metric in of_unit:
                    self._journal.write("missing", metric=metric.name, reason=f"this GPU delivers no {unit} counters")
        return kept

    def _delivers(self, metrics: list[CounterMetric], sampler: PmSampler | None, keep: bool = False) -> bool:
        """Whether samples of these come whole. To ``keep`` the sampler is to have it ready for its turn."""
        sampler = sampler or PmSampler(self._order.device, self._library)
        whole = False
        try:
            self._configure(sampler, metrics)
            sampler.start()
            time.sleep(_TRIAL_SECONDS + _TRIAL_SAMPLES * self._order.interval_ns / NS_PER_S)
            sampler.stop()
            whole = sampler.decode(sampler.image()).count > 0
        finally:
            if whole and keep:
                self._sampler = sampler
            else:
                sampler.close()
        return whole

    def _configure(self, sampler: PmSampler, metrics: list[CounterMetric]) -> None:
        sampler.configure(sources(metrics), self._order.interval_ns, CAPACITY)

    def run(self) -> None:
        """Sample until told to stop, or until the budget is used up."""
        turn = 0
        while not self._stop.asked and not self._spent:
            number, metrics = self._sets[turn % len(self._sets)]
            ready, self._sampler = self._sampler, None
            sampler = ready or PmSampler(self._order.device, self._library)
            try:
                if ready is None:
                    self._configure(sampler, metrics)
                self._sample(sampler, number, metrics)
            finally:
                sampler.close()
            turn += 1
        if self._spent:
            self._journal.write("problem", text=f"stopped after {self._samples_count} samples (--counters-samples)")

    @property
    def _spent(self) -> bool:
        return self._samples_count >= self._order.max_samples > 0

    def _sample(self, sampler: PmSampler, number: int, metrics: list[CounterMetric]) -> None:
        """One list's turn: to the end, or for ``TURN_SECONDS`` where there are several."""
        path = pm_files.samples_path(Path(self._order.folder), self._order.device, number)
        until = time.monotonic() + TURN_SECONDS if len(self._sets) > 1 else float("inf")
        with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "wb") as out:
            writer = Writer(sampler, metrics, self._order.interval_ns, out)
            writer.start()
            try:
                while time.monotonic() < until and not self._stop.asked and not self._is_done(writer):
                    if not self._stretch(sampler, writer, until):
                        break
            finally:
                writer.finish()
                self._samples_count += writer.samples_count
        if writer.error is not None:
            raise writer.error

    def _is_done(self, writer: Writer) -> bool:
        """Whether no more samples are wanted, or can be written."""
        return writer.error is not None or self._samples_count + writer.samples_count >= self._order.max_samples > 0

    def _stretch(self, sampler: PmSampler, writer: Writer, until: float) -> bool:
        """Sample until too much waits for decoding, and decode it. False: set up anew, samples ran over."""
        sampler.start()
        began, decoded, got = time.monotonic(), 0, Decoded(0)
        while not got.overflow and time.monotonic() < until and not self._is_done(writer):
            waiting = (time.monotonic() - began) * NS_PER_S / self._order.interval_ns - decoded
            if waiting >= self._pause_at:
                break
            patience = (self._pause_at - waiting) * self._order.interval_ns / NS_PER_S
            if self._stop.wait(min(_POLL_SECONDS, patience)):
                break
            if self._keeps_up:
                got = self._decode(sampler, writer)
                decoded += got.count
        stopped = time.monotonic()
        sampler.stop()
        if not got.overflow:
            got = self._decode(sampler, writer)
        if got.overflow:
            self._pause_at = max(self._pause_at // 2, 1)
            self._journal.write("overflow")
        self._journal.write("paused", ns=round((time.monotonic() - stopped) * NS_PER_S))
        return not got.overflow

    def _decode(self, sampler: PmSampler, writer: Writer) -> Decoded:
        image = writer.image()
        got = Decoded(0)
        began = time.monotonic()
        try:
            got = sampler.decode(image)
            if got.count >= _TELLING_SAMPLES:
                took_ns = (time.monotonic() - began) * NS_PER_S / got.count
                self._keeps_up = took_ns <= _KEEPS_UP_SHARE * self._order.interval_ns
            return got
        finally:
            writer.take(image, got.count)


def main(text: str) -> int:
    """Sample one GPU as ordered; says ``ready`` or ``refused`` on standard output before it begins."""
    given = json.loads(text)
    order = Order(**{**given, "metrics": tuple(given["metrics"])})
    journal = Journal(pm_files.events_path(Path(order.folder), order.device))
    with suppress(OSError):
        os.nice(_NICE)  # decoding must not take a processor that the program wants
    stop = Stop()
    try:
        device = Device(order, load(), journal, stop)
        device.prepare()
        _say("ready")
        device.run()
    except PmUnavailable as error:
        journal.write("refused", reason=str(error))
        _say("refused")
        return 1
    except Exception as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        journal.write("problem", text="the disk is full" if full else f"{type(error).__name__}: {error}")
        _say("refused")
        return pm_files.EXIT_DISK_FULL if full else 1
    journal.write("end")
    return 0


def _say(word: str) -> None:
    with suppress(OSError):  # the session may have gone
        os.write(sys.stdout.fileno(), f"{word}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
