"""Hardware counters of whole GPUs, sampled from outside: one sampler process for each GPU, nothing in the program.

What the samplers write (``pm_files.py``) lies in the trace's spool; ``assemble/`` makes tables of it, and attributes
the samples to kernels. See ``pm_sampler.py`` for how a GPU is sampled.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler.collectors import pm_files
from spikeprof.profiler.collectors.nvml import Gpu, NvmlUnavailable, devices, opened
from spikeprof.profiler.counter_metrics import check_interval
from spikeprof.profiler.trace import CollectorNote
from spikeprof.profiler.units import NS_PER_S

_SAMPLER = "spikeprof.profiler.collectors.pm_sampler"
_READY_SECONDS = 20.0
_END_SECONDS = 20.0
_UNREADY_END_SECONDS = 1.0
_KILLED_SECONDS = 5.0
_LENGTH_MAX = 100


def machine_gpus(nvml: Any = None) -> tuple[Gpu, ...]:
    """The GPUs of this machine; none where NVML cannot be asked."""
    try:
        with opened(nvml) as module:
            return devices(module)
    except NvmlUnavailable:
        return ()


def visible_gpus(gpus: Sequence[Gpu] | None = None) -> tuple[int, ...]:
    """NVML's numbers of the GPUs that a program started from here can use; the first one where none is known.

    ``gpus`` are those of the machine, which is asked unless they are given. CUDA_VISIBLE_DEVICES holds numbers or the
    beginnings of UUIDs; anything else (MIG) means all of them, and so do numbers on a machine with GPUs of several
    kinds, which CUDA numbers by speed.
    """
    gpus = machine_gpus() if gpus is None else gpus
    numbered = len({gpu.name for gpu in gpus}) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    words = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]

    def is_meant(gpu: Gpu, word: str) -> bool:
        return (numbered and word == str(gpu.index)) or (word != "" and gpu.uuid.startswith(word))

    named = [gpu.index for word in words for gpu in gpus if is_meant(gpu, word)]
    return tuple(dict.fromkeys(named)) or tuple(gpu.index for gpu in gpus) or (0,)


class PmSamplingCollector:
    """Samplers of some GPUs. ``start`` waits until they sample or have refused; ``stop`` hands over no tables.

    ``devices`` are NVML's numbers; ``folder`` is where the samples go. ``max_samples`` is for each GPU; 0 = no limit.
    """

    name = "pm_sampling"

    def __init__(
        self,
        devices: Sequence[int],
        metrics: Sequence[str],
        interval_ns: int,
        folder: Path,
        max_samples: int,
    ) -> None:
        check_interval(interval_ns)
        self._devices, self._metrics = tuple(devices), tuple(metrics)
        self._interval_ns, self._folder, self._max_samples = interval_ns, folder, max_samples
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._problems: list[str] = []
        self._started = False
        self._began_unix_ns = 0  # when the program could begin

    def start(self, t0_unix_ns: int) -> None:
        """Start the samplers and wait for them, so that the program's first kernels are sampled. Never raises."""
        del t0_unix_ns  # samples carry Unix times
        self._started = True
        for device in self._devices:
            try:
                self._children[device] = self._spawned(device)
            except OSError as error:
                self._problems.append(f"GPU {device}: the sampler could not be started: {error.strerror}")
        limit = time.monotonic() + _READY_SECONDS
        for device, child in self._children.items():
            if not _has_spoken(child, limit - time.monotonic()):
                self._problems.append(f"GPU {device}: the sampler was not ready after {_READY_SECONDS:g} s")
        self._began_unix_ns = time.time_ns()

    def _spawned(self, device: int) -> subprocess.Popen[bytes]:
        order = {
            "device": device,
            "metrics": self._metrics,
            "interval_ns": self._interval_ns,
            "folder": str(self._folder.resolve()),
            "max_samples": self._max_samples,
        }
        # NVML counts the GPUs of the machine in the order of their PCI addresses: so shall CUDA.
        environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        errors = os.open(self._errors_path(device), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        try:
            return subprocess.Popen(
                # -P: the folder that the program is started in is no place to import from.
                [sys.executable, "-P", "-m", _SAMPLER, json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the program; the sampler goes on until we stop it
            )
        finally:
            os.close(errors)

    def stop(self) -> tuple[CollectorNote, dict[str, pa.Table]]:
        """End sampling. Never raises."""
        if not self._started:
            return CollectorNote("off", "not started"), {}
        self._started = False
        span = (self._began_unix_ns, time.time_ns()) if self._began_unix_ns else None
        for child in self._children.values():
            assert child.stdin is not None
            with suppress(OSError):
                child.stdin.close()
        limit = time.monotonic() + _END_SECONDS
        codes = {device: self._ended(device, child, limit) for device, child in self._children.items()}
        samplers = pm_files.read(self._folder)
        told = {files.device for files in samplers if files.finished or files.refused or files.problems}
        for device, code in codes.items():
            if code is not None and code < 0:
                self._problems.append(f"GPU {device}: the sampler crashed ({_signal(-code)})")
            elif code is not None and device not in told:
                self._problems.append(f"GPU {device}: the sampler ended by itself ({self._last_words(device, code)})")
        return note_of(samplers, self._problems, span), {}

    def _ended(self, device: int, child: subprocess.Popen[bytes], limit: float) -> int | None:
        """The exit code of a sampler that was told to end; None for one that had to be killed."""
        # One that is not ready yet has no samples to lose.
        is_ready = _has_spoken(child, 0)
        assert child.stdout is not None
        child.stdout.close()
        try:
            return child.wait(max(limit - time.monotonic(), 0) if is_ready else _UNREADY_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
        kept = "; its samples are kept" if is_ready else ""
        self._problems.append(f"GPU {device}: the sampler did not end and was killed{kept}")
        with suppress(subprocess.TimeoutExpired):  # stuck in the driver: left behind
            child.wait(_KILLED_SECONDS)
        return None

    def _last_words(self, device: int, code: int) -> str:
        """Why a sampler ended that could not write it down: what it printed last."""
        if code == pm_files.EXIT_DISK_FULL:
            return "the disk is full"
        with suppress(OSError):
            lines = self._errors_path(device).read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                return lines[-1].strip()
        return f"exit code {code}, no reason given"

    def _errors_path(self, device: int) -> Path:
        return self._folder / f"pm-{device}.err"


def _has_spoken(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a sampler says within so many seconds that it is ready or refuses, or ends."""
    assert child.stdout is not None
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    return bool(poll.poll(max(seconds, 0) * 1000))


def note_of(
    samplers: Sequence[pm_files.SamplerFiles], problems: Sequence[str] = (), span: tuple[int, int] | None = None
) -> CollectorNote:
    """What became of sampling: refused where no GPU was sampled, degraded where anything that was asked for lacks.

    ``span`` is when there was something to sample, in Unix ns; unless given, it is that of the samples themselves.
    """
    reasons = list(problems)
    remarks = []
    samples_count = 0
    for files in samplers:
        gpu = f"GPU {files.device}: "
        reasons += [gpu + text for text in (files.refused, *files.problems) if text]
        reasons += [f"{gpu}no {', '.join(metrics)} ({why})" for why, metrics in _by_reason(files.missing).items()]
        if files.overflows_count:
            reasons.append(
                f"{gpu}samples ran over {files.overflows_count} time(s): try a longer --counters-interval-us"
            )
        counts = [len(sampled.rows) for sampled in files.sets]
        samples_count += sum(counts)
        if sum(counts):
            remarks.append(gpu + _coverage(files, span))
            late = [
                metric for one, count in zip(files.sets, counts, strict=True) for metric in one.metrics if not count
            ]
            reasons += (
                [f"{gpu}no {', '.join(late)} (it ended before their turn: one pass cannot take all)"] if late else []
            )
    state = "refused" if not samples_count else "degraded" if reasons else "ok"
    if not samples_count and not reasons:
        reasons.append("no samples came")
    return CollectorNote(state, "; ".join([*reasons, *remarks]), records_count=samples_count)


def _by_reason(missing: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for metric, why in missing.items():
        found.setdefault(why, []).append(metric)
    return found


def _coverage(files: pm_files.SamplerFiles, span: tuple[int, int] | None) -> str:
    """How much of the time each list of metrics was sampled."""
    sampled = [(one, _sound_times(one)) for one in files.sets if len(one.rows)]
    begin = min((int(times[0, 0]) for _, times in sampled if len(times)), default=0)
    end = max((int(times[-1, 1]) for _, times in sampled if len(times)), default=0)
    if span:
        begin, end = min(begin, span[0]), max(end, span[1])
    parts = []
    for one, times in sampled:
        share = int((times[:, 1] - times[:, 0]).sum()) / max(end - begin, 1)
        names = "all metrics" if len(files.sets) == 1 else ", ".join(one.metrics)
        parts.append(f"{names} sampled {np.round(share * 100):.0f} % of the time")
    every = files.sets[0].interval_ns
    return f"{'; '.join(parts)}, every {every / 1000:g} µs" if every < NS_PER_S else "; ".join(parts)


def _sound_times(one: pm_files.SampledSet) -> npt.NDArray[np.int64]:
    """Begin and end of the samples that can be: files that were cut off may hold others."""
    times = one.times()
    length = times[:, 1] - times[:, 0]
    return times[(length > 0) & (length <= _LENGTH_MAX * one.interval_ns)]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
