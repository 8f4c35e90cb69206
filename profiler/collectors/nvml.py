"""NVML: which GPUs there are, and their power, clocks, load, memory, links and throttle reasons over time.

The one adapter for ``pynvml`` (nvidia-ml-py), which is imported when first used. NVML needs no privilege and
no CUDA context. Its readings are the driver's own: ``power_w`` is a one-second average from Ampere on,
``gpu_busy_share`` the share of the driver's last sampling period in which any kernel ran. ``energy_j`` and
whatever has ``_total_`` in its name are counters since the driver was loaded: take differences.
``pcie_read_bytes_per_s`` is what came to the GPU during 20 ms before the reading, protocol included; written is
what left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa

from spikeprof.profiler.collectors.sampling import SamplingCollector, Series, Unavailable, samples_table

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

#: NVLink counters (``NVML_FI_DEV_NVLINK_THROUGHPUT_*``) by metric: of the payload, and of everything on the wire.
_NVLINK_PAYLOAD = {"nvlink_sent_total_bytes": 138, "nvlink_received_total_bytes": 139}
_NVLINK_RAW = {"nvlink_sent_raw_total_bytes": 140, "nvlink_received_raw_total_bytes": 141}
_ALL_LINKS = 0xFFFFFFFF

#: The member of ``nvmlValue_t`` that holds a field's value, by ``nvmlValueType_t``.
_MEMBER_OF_TYPE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class NvmlUnavailable(Unavailable):
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
    unit: str = ""  # what only some GPUs have, so that its absence is no fault
    is_slow: bool = False  # takes tens of milliseconds: one GPU's turn at a time


def _busy(nvml: Any, handle: Any) -> tuple[float, ...]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)  # percent
    return rates.gpu / 100, rates.memory / 100


def _throttle(nvml: Any, handle: Any) -> tuple[float, ...]:
    # "Throttle" became "event" with driver 535; older pynvml modules know the old name only.
    call = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    bits = (call or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle)
    return tuple(float(bool(bits & bit)) for bit in THROTTLE_BITS.values())


def _pcie(nvml: Any, handle: Any) -> tuple[float, ...]:
    # Kilobytes per second over 20 ms, during which the call does not return.
    directions = (nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES)
    return tuple(nvml.nvmlDeviceGetPcieThroughput(handle, direction) * 1e3 for direction in directions)


def _nvlink(fields: Iterable[int], nvml: Any, handle: Any) -> tuple[float, ...]:
    answers = nvml.nvmlDeviceGetFieldValues(handle, [(field, _ALL_LINKS) for field in fields])
    for answer in answers:
        if answer.nvmlReturn:
            raise nvml.NVMLError(answer.nvmlReturn)
    return tuple(getattr(a.value, _MEMBER_OF_TYPE[a.valueType]) * 1024.0 for a in answers)  # KiB


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
    Gauge(tuple(_NVLINK_PAYLOAD), partial(_nvlink, tuple(_NVLINK_PAYLOAD.values())), unit="NVLink"),
    Gauge(tuple(_NVLINK_RAW), partial(_nvlink, tuple(_NVLINK_RAW.values())), unit="NVLink"),
    Gauge(("pcie_read_bytes_per_s", "pcie_written_bytes_per_s"), _pcie, is_slow=True),
)


@contextmanager
def opened(nvml: Any = None) -> Iterator[Any]:
    """The initialised ``pynvml`` module, shut down at the end. Raises NvmlUnavailable."""
    module = initialised(nvml)
    try:
        yield module
    finally:
        shutdown(module)


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


def is_not_supported(nvml: Any, error: Exception) -> bool:
    """Whether NVML says that this GPU has no such thing, rather than that something went wrong."""
    return bool(getattr(error, "value", None) == nvml.NVML_ERROR_NOT_SUPPORTED)


def initialised(nvml: Any = None) -> Any:
    """The initialised ``pynvml`` module, for whoever calls ``shutdown`` himself. Raises NvmlUnavailable."""
    try:
        module = nvml or import_module("pynvml")
        module.nvmlInit()
    except ImportError as error:
        raise NvmlUnavailable("pynvml is not installed (pip install nvidia-ml-py)") from error
    except Exception as error:
        raise NvmlUnavailable(f"NVML does not start: {error}") from error
    return module


def shutdown(nvml: Any) -> None:
    """Undo one ``initialised``. Never raises."""
    try:
        nvml.nvmlShutdown()
    except Exception:  # nothing depends on it, and a lost GPU makes it fail
        return


def _text(value: Any) -> str:
    """Old pynvml versions answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _has_gpm(nvml: Any, handle: Any) -> bool:
    """Whether GPM tells the PCIe rates of this GPU (``gpm.py``), without a call that takes 20 ms."""
    try:
        return bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    except Exception:  # NVMLError, or a function that an old driver or pynvml lacks
        return False


class _GpuSeries(Series):
    """The gauges of one GPU: each is asked once, and no more if the GPU does not have it."""

    def __init__(self, nvml: Any, gpu: Gpu, number: int, gpus_count: int) -> None:
        super().__init__(f"GPU {gpu.index}", gpu.index)
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        self._turns_count, self._turn = gpus_count, number
        self._gauges = self._answered()
        self.metrics = tuple(m for gauge in self._gauges for m in gauge.metrics)

    def read(self) -> list[float]:
        row: list[float] = []
        self._turn = (self._turn + 1) % self._turns_count
        for gauge in self._gauges:
            if gauge.is_slow and self._turn:
                row.extend([np.nan] * len(gauge.metrics))
                continue
            try:
                row.extend(gauge.read(self._nvml, self._handle))
            except Exception:
                row.extend([np.nan] * len(gauge.metrics))
                self.failed_count += len(gauge.metrics)
        return row

    def _answered(self) -> tuple[Gauge, ...]:
        works: list[Gauge] = []
        refused: list[tuple[Gauge, Exception]] = []
        gauges = [g for g in GAUGES if not (g.is_slow and _has_gpm(self._nvml, self._handle))]
        for gauge in gauges:
            try:
                gauge.read(self._nvml, self._handle)
                works.append(gauge)
            except Exception as error:  # NVMLError, or a function that an old pynvml lacks
                refused.append((gauge, error))
        units = {gauge.unit for gauge in works}
        for gauge, why in refused:
            if gauge.unit and gauge.unit not in units and is_not_supported(self._nvml, why):
                self.remarks.append(f"no {gauge.unit} ({why})")
            else:
                self.missing.update(dict.fromkeys(gauge.metrics, str(why)))
        return tuple(works)


class NvmlCollector(SamplingCollector[_GpuSeries]):
    """Samples every gauge of every GPU on a thread, into bounded memory: see SamplingCollector.

    ``interval_ms`` is the time between samples. PCIe rates are read of one GPU after another, one in each interval.
    ``nvml`` replaces the pynvml module in tests. ``gpus`` lists the devices once started: the ``device`` column
    holds ``Gpu.index``, which the session maps to the trace's ordinals by UUID.
    """

    name = "nvml"

    def __init__(self, interval_ms: int = 100, max_samples_count: int = 2_000_000, nvml: Any = None) -> None:
        super().__init__(interval_ms, max_samples_count)
        self.gpus: tuple[Gpu, ...] = ()
        self.driver_version = ""
        self._nvml = nvml

    def _open(self, cleanup: ExitStack) -> list[_GpuSeries]:
        nvml = initialised(self._nvml)
        cleanup.callback(shutdown, nvml)
        self.driver_version = driver_version(nvml)
        self.gpus = devices(nvml)
        if not self.gpus:
            raise NvmlUnavailable("NVML shows no GPU")
        series = [_GpuSeries(nvml, gpu, i, len(self.gpus)) for i, gpu in enumerate(self.gpus)]
        if not any(s.metrics for s in series):
            raise NvmlUnavailable("NVML answers no gauge on any GPU")
        return series

    def _tables(self) -> dict[str, pa.Table]:
        return {"samples": samples_table(self._series)}
