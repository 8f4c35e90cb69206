"""Counters of whatever runs on the GPUs of this machine, for some seconds: no program is started or touched."""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import spikeprof
from spikeprof.profiler import store
from spikeprof.profiler.assemble.counter_samples import write_counter_samples
from spikeprof.profiler.collectors import pm_files
from spikeprof.profiler.collectors.pm_sampling import PmSamplingCollector
from spikeprof.profiler.counter_metrics import Reading, is_additive
from spikeprof.profiler.errors import OutputError
from spikeprof.profiler.trace import CollectorNote, Manifest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_BIN_NS = 1_000_000  # "highest" is that of a millisecond: single samples are dominated by noise


@dataclass(frozen=True, slots=True)
class Watched:
    """What was read, and the collector's note on what was not; ``trace`` is the folder that holds the samples."""

    note: CollectorNote
    readings: tuple[Reading, ...]
    trace: Path | None = None


def watch(
    devices: Sequence[int],
    metrics: Sequence[str],
    seconds: float,
    interval_ns: int,
    max_samples: int,
    output: Path | None = None,
    tick: Callable[[float], None] = lambda elapsed: None,
) -> Watched:
    """Sample for ``seconds``; KeyboardInterrupt ends it early, and what was sampled counts.

    Samples lie in a temporary folder, ``max_samples`` of each GPU at most (0 = no limit) of some 80 bytes.

    With ``output``, the samples become a trace folder (table ``counter_samples``). ``tick`` is told the time elapsed.
    Raises UsageError for an interval out of range, OutputError for a folder that cannot be made, KeyboardInterrupt when
    it comes before the sampling began or after it has ended.
    """
    with _temporary_folder() as spool:
        collector = PmSamplingCollector(devices, metrics, interval_ns, spool, max_samples)
        folder = store.create_folder(output) if output else None
        try:
            t0_unix_ns = _sample(collector, seconds, tick)
            note, _ = collector.stop()
            sets = [one for files in pm_files.read(spool) for one in files.sets]
            readings = tuple(reading for one in sets for reading in _readings(one))
            if folder and readings:
                _write(folder, sets, note, t0_unix_ns)
            elif folder:
                folder.rmdir()
        except KeyboardInterrupt:  # not an end of the sampling, but of us
            collector.stop()
            if folder:  # half a trace would stand in the way of the next one
                shutil.rmtree(folder, ignore_errors=True)
            raise
    return Watched(note, readings, folder if readings else None)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        temporary = tempfile.TemporaryDirectory(prefix="spikeprof-")
    except OSError as error:
        raise OutputError(f"no folder for temporary files can be written ({error.strerror}); set TMPDIR") from error
    with temporary as name:
        yield Path(name)


def _sample(collector: PmSamplingCollector, seconds: float, tick: Callable[[float], None]) -> int:
    """Sample for so long, or until KeyboardInterrupt once that has begun; when that was, in Unix ns."""
    collector.start(0)
    t0_unix_ns, began = time.time_ns(), time.monotonic()
    with suppress(KeyboardInterrupt):
        while (elapsed := time.monotonic() - began) < seconds:
            tick(elapsed)
            time.sleep(min(0.1, seconds - elapsed))
    return t0_unix_ns


def _readings(one: pm_files.SampledSet) -> list[Reading]:
    times, found = one.times(), []
    for number, metric in enumerate(one.metrics):
        values = np.asarray(one.rows[:, 2 + number])
        sound = (times[:, 1] > times[:, 0]) & np.isfinite(values)
        if sound.any():
            found.append(_reading(one.device, metric, (times[:, 1] - times[:, 0])[sound], values[sound]))
    return found


def _reading(device: int, metric: str, length: Ints, values: Floats) -> Reading:
    sampled_ns = int(length.sum())
    # Milliseconds of sampled time, gaps left out.
    bins = (np.cumsum(length) - length) // _BIN_NS
    in_bin = np.bincount(bins, length)
    whole = in_bin >= min(_BIN_NS // 2, in_bin.max())
    additive = is_additive(metric)
    amount = np.bincount(bins, values if additive else values * length)
    rate = amount[whole] / in_bin[whole] * (1e9 if additive else 1)
    mean = amount.sum() / sampled_ns * (1e9 if additive else 1)
    return Reading(
        device, metric, sampled_ns, float(values.sum()) if additive else None, float(mean), float(rate.max())
    )


def _write(folder: Path, sets: Sequence[pm_files.SampledSet], note: CollectorNote, t0_unix_ns: int) -> None:
    write_counter_samples(folder, sets, t0_unix_ns)
    last = max((int(one.times()[:, 1].max()) for one in sets if len(one.rows)), default=t0_unix_ns)
    manifest = Manifest(
        source="spikeprof",
        t0_unix_ns=t0_unix_ns,
        duration_ns=last - t0_unix_ns,
        command=("spikeprof", "counters"),
        host=platform.node(),
        versions={"spikeprof": spikeprof.__version__},
        collectors={PmSamplingCollector.name: note},
        notes=("Counters alone were sampled: no program was recorded.",),
    )
    store.write_manifest(folder, manifest)
