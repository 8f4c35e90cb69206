"""NVML: which GPUs there are, and their power, clocks, load, memory and throttle reasons over time.

The one adapter for ``pynvml`` (nvidia-ml-py), which is imported when first used. NVML needs no privilege and
no CUDA context. Its readings are the driver's own: ``power_w`` is a one-second average from Ampere on,
``gpu_busy_share`` the share of the driver's last sampling period in which any kernel ran, ``energy_j`` a
counter since the driver was loaded (take differences).
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa

from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote
from spikeprof.profiler.units import NS_PER_MS, NS_PER_S

#: Bits of the clocks event (throttle) reasons, as ``nvml.h`` numbers them.
THROTTLE_BITS: dict[str, int] = {
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "display_clock": 0x100,
}

#: How long ``stop`` waits for a reading in progress: a driver in recovery may not answer.
_JOIN_SECONDS = 2.0


class NvmlUnavailable(Exception):
    """NVML cannot be used here; the message says why. Never leaves this package's callers."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML names it. ``index`` is NVML's (PCI order), not CUDA's."""

    index: int
    uuid: str
    name: str
    mem_bytes: int
    pci_bus_id: str
    sm_arch: str  # e.g. sm_90; empty when unknown


@dataclass(frozen=True, slots=True)
class Gauge:
    """One NVML call and the metrics that it yields."""

    metrics: tuple[str, ...]
    read: Callable[[Any, Any], tuple[float, ...]]  # (pynvml module, device handle) -> one value per metric


def _busy(nvml: Any, handle: Any) -> tuple[float, ...]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)  # percent
    return rates.gpu / 100, rates.memory / 100


def _throttle(nvml: Any, handle: Any) -> tuple[float, ...]:
    # "Throttle" became "event" with driver 535; older pynvml modules know the old name only.
    call = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    bits = (call or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle)
    return tuple(float(bool(bits & bit)) for bit in THROTTLE_BITS.values())


#: Everything that is sampled. NVML speaks milliwatts, millijoules and percent; we do not.
GAUGES: tuple[Gauge, ...] = (
    Gauge(("power_w",), lambda n, h: (n.nvmlDeviceGetPowerUsage(h) / 1e3,)),
    Gauge(("sm_clock_mhz",), lambda n, h: (n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),)),
    Gauge(("mem_clock_mhz",), lambda n, h: (n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM),)),
    Gauge(("gpu_busy_share", "mem_busy_share"), _busy),
    Gauge(("mem_used_bytes",), lambda n, h: (n.nvmlDeviceGetMemoryInfo(h).used,)),
    Gauge(("temperature_celsius",), lambda n, h: (n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),)),
    Gauge(("energy_j",), lambda n, h: (n.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3,)),
    Gauge(tuple(f"throttle_{reason}_share" for reason in THROTTLE_BITS), _throttle),
)


@contextmanager
def opened(nvml: Any = None) -> Iterator[Any]:
    """The initialised ``pynvml`` module, shut down at the end. Raises NvmlUnavailable."""
    module = _initialised(nvml)
    try:
        yield module
    finally:
        _shutdown(module)


def driver_version(nvml: Any) -> str:
    """The driver's version, e.g. ``580.159.04``; empty when NVML does not say."""
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except Exception:
        return ""


def devices(nvml: Any) -> tuple[Gpu, ...]:
    """All GPUs that NVML shows to this process, in its order. Takes an initialised module.

    ``CUDA_VISIBLE_DEVICES`` has no say here; a container's choice of GPUs has. Raises NvmlUnavailable.
    """
    try:
        return tuple(_gpu(nvml, i) for i in range(nvml.nvmlDeviceGetCount()))
    except Exception as error:
        raise NvmlUnavailable(f"NVML cannot list the GPUs: {error}") from error


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        arch = f"sm_{major}{minor}"
    except Exception:
        arch = ""
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        mem_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        pci_bus_id=_text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        sm_arch=arch,
    )


def _initialised(nvml: Any) -> Any:
    try:
        module = nvml or import_module("pynvml")
        module.nvmlInit()
    except ImportError as error:
        raise NvmlUnavailable("pynvml is not installed (pip install nvidia-ml-py)") from error
    except Exception as error:
        raise NvmlUnavailable(f"NVML does not start: {error}") from error
    return module


def _shutdown(nvml: Any) -> None:
    try:
        nvml.nvmlShutdown()
    except Exception:  # nothing depends on it, and a lost GPU makes it fail
        return


def _text(value: Any) -> str:
    """Old pynvml versions answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


@dataclass
class _Series:
    """The readings of one GPU: ``values`` holds one row of ``len(metrics)`` numbers for each of ``times``."""

    gpu: Gpu
    handle: Any
    gauges: tuple[Gauge, ...]  # those this GPU answers
    not_available: dict[str, str]  # metric -> NVML's reason
    times: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(m for gauge in self.gauges for m in gauge.metrics)

    def thin(self) -> int:
        """Keep every other reading; returns how many values went."""
        before = len(self.values)
        rows = np.frombuffer(self.values, np.float64).reshape(len(self.times), -1)[::2].tobytes()
        self.times, self.values = self.times[::2], array("d", rows)
        return before - len(self.values)


class NvmlCollector:
    """Samples every gauge of every GPU on a thread, into bounded memory.

    ``interval_ms`` is the time between samples. When more than ``max_samples_count`` values are held, every
    other one is dropped and the interval doubles, so that a run of any length stays bounded (8 bytes a value).
    ``nvml`` replaces the pynvml module in tests. ``gpus`` lists the devices once started: the ``device`` column
    holds ``Gpu.index``, which the session maps to the trace's ordinals by UUID.
    """

    name = "nvml"

    def __init__(self, interval_ms: int = 100, max_samples_count: int = 2_000_000, nvml: Any = None) -> None:
        self.interval_ms = interval_ms
        self.max_samples_count = max_samples_count
        self.gpus: tuple[Gpu, ...] = ()
        self.driver_version = ""
        self._nvml = nvml
        self._series: list[_Series] = []
        self._dropped_count = 0
        self._failed_count = 0  # readings that a working gauge refused
        self._problem = "not started"
        self._state = "off"
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._t0_unix_ns = 0

    def start(self, t0_unix_ns: int) -> None:
        """Start NVML, ask each gauge once, begin to sample. Never raises."""
        self._t0_unix_ns = t0_unix_ns
        try:
            self._nvml = _initialised(self._nvml)
        except NvmlUnavailable as error:
            self._state, self._problem = "refused", str(error)
            return
        self._problem = self._prepare()
        if self._problem:
            self._state = "refused"
            _shutdown(self._nvml)
            return
        self._state = "ok"
        self._thread = threading.Thread(target=self._run, name="spikeprof-nvml", daemon=True)
        self._thread.start()

    def stop(self) -> tuple[CollectorNote, dict[str, pa.Table]]:
        """Stop sampling; the note and the table ``samples``. Never raises."""
        state, self._state = self._state, "off"
        if self._thread is None:
            return CollectorNote(state, self._problem), {}
        self._stopping.set()
        self._thread.join(_JOIN_SECONDS)
        hung = self._thread.is_alive()
        self._thread = None
        if not hung:  # shutting NVML down under a call in progress can crash
            _shutdown(self._nvml)
        try:
            table = _samples(self._series)
        except Exception as error:  # a hung thread may still append
            self._problem = "stopped"
            return CollectorNote("refused", f"the samples could not be put together: {error}"), {}
        reasons = self._reasons(hung)
        self._problem = "stopped"
        note = CollectorNote(
            "degraded" if reasons else "ok",
            "; ".join(reasons),
            records_count=table.num_rows,
            dropped_count=self._dropped_count,
            set_aside_count=self._failed_count,
            set_aside_reasons={"reading failed": self._failed_count} if self._failed_count else {},
        )
        return note, {"samples": table}

    def _prepare(self) -> str:
        """Find the GPUs and what each can tell; why there is nothing to sample, or empty."""
        self.driver_version = driver_version(self._nvml)
        try:
            self.gpus = devices(self._nvml)
            self._series = [self._probed(gpu) for gpu in self.gpus]
        except Exception as error:
            return str(error)
        if not self.gpus:
            return "NVML shows no GPU"
        return "" if any(s.gauges for s in self._series) else "NVML answers no gauge on any GPU"

    def _probed(self, gpu: Gpu) -> _Series:
        """Ask each gauge once: what a GPU does not support is asked no more."""
        handle = self._nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        works, refused = [], {}
        for gauge in GAUGES:
            try:
                gauge.read(self._nvml, handle)
                works.append(gauge)
            except Exception as error:  # NVMLError, or a function that an old pynvml lacks
                refused.update(dict.fromkeys(gauge.metrics, str(error)))
        return _Series(gpu, handle, tuple(works), refused)

    def _run(self) -> None:
        due_ns = time.monotonic_ns()
        while True:
            for series in self._series:
                self._sample(series)
            held_count = sum(len(s.values) for s in self._series)
            if held_count > self.max_samples_count:
                self._dropped_count += sum(s.thin() for s in self._series)
                self.interval_ms *= 2
            now_ns = time.monotonic_ns()
            # A reading that took longer than the interval skips ticks rather than bunching them.
            due_ns = max(due_ns + self.interval_ms * NS_PER_MS, now_ns)
            if self._stopping.wait((due_ns - now_ns) / NS_PER_S):
                return

    def _sample(self, series: _Series) -> None:
        t_ns = time.time_ns() - self._t0_unix_ns
        row: list[float] = []
        for gauge in series.gauges:
            try:
                row.extend(gauge.read(self._nvml, series.handle))
            except Exception:
                row.extend([np.nan] * len(gauge.metrics))
                self._failed_count += len(gauge.metrics)
        if row:
            series.values.extend(row)
            series.times.append(t_ns)

    def _reasons(self, hung: bool) -> list[str]:
        reasons = [
            f"GPU {s.gpu.index} does not give {', '.join(s.not_available)} ({next(iter(s.not_available.values()))})"
            for s in self._series
            if s.not_available
        ]
        if self._failed_count:
            reasons.append(f"{self._failed_count} readings failed")
        if self._dropped_count:
            reasons.append(
                f"thinned to one sample in {self.interval_ms} ms to hold at most {self.max_samples_count} values"
            )
        if hung:
            reasons.append("NVML stopped answering")
        return reasons


def _samples(series: list[_Series]) -> pa.Table:
    """The table ``samples``: one row per reading that succeeded, sorted by time."""
    metrics = list(dict.fromkeys(m for s in series for m in s.metrics))
    code_of = {metric: code for code, metric in enumerate(metrics)}
    parts = []
    for s in series:
        codes = np.array([code_of[m] for m in s.metrics], np.int32)
        count, width = len(s.times), len(codes)
        values = np.array(s.values, np.float64)[: count * width]
        device = np.full(count * width, s.gpu.index, np.int32)
        parts.append((device, np.repeat(np.array(s.times, np.int64), width), np.tile(codes, count), values))
    device, t_ns, codes, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(t_ns, kind="stable")
    order = order[~np.isnan(values[order])]
    table = pa.table(
        {
            "device": device[order],
            "t_ns": t_ns[order],
            "metric": pa.DictionaryArray.from_arrays(pa.array(codes[order], pa.int32()), pa.array(metrics)),
            "value": values[order],
        }
    )
    return table.cast(TABLES["samples"].arrow)
