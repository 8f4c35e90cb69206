"""GPM: what the units of a GPU did, as averages of the driver's own performance monitors, from Hopper on.

NVML computes each metric from two samples, which must lie more than 100 ms apart: the driver refreshes its counters
no faster (NVIDIA's NVML reference, "GPM Functions"). A reading is the average since the reading before. It needs no
privilege and no CUDA context, and concerns the whole GPU, whoever uses it; where MIG splits it, one instance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spikeprof.profiler.collectors import nvml as adapter
from spikeprof.profiler.collectors.nvml import Gpu
from spikeprof.profiler.collectors.sampling import SamplingCollector, Series, Unavailable, samples_table, together
from spikeprof.profiler.units import NS_PER_MS

#: The shortest time between two samples, and the interval that keeps to it although no thread wakes on time.
_REFRESH_MS = 100
SHORTEST_INTERVAL_MS = 120

_PERCENT, _MIB = 0.01, 2.0**20


@dataclass(frozen=True, slots=True)
class GpmMetric:
    """One metric: its number in ``nvmlGpmMetricId_t``, and what NVML's value is multiplied by."""

    name: str
    number: int
    scale: float


_METRICS = (
    GpmMetric("gpm_graphics_active_share", 1, _PERCENT),  # time in which any context was at work
    GpmMetric("gpm_sm_active_share", 2, _PERCENT),
    GpmMetric("gpm_occupancy_share", 3, _PERCENT),  # active warps of those that the SMs can hold
    GpmMetric("gpm_integer_active_share", 4, _PERCENT),  # time in which the SMs' integer pipes worked, and so on
    GpmMetric("gpm_tensor_active_share", 5, _PERCENT),
    GpmMetric("gpm_tensor_hmma_active_share", 7, _PERCENT),
    GpmMetric("gpm_tensor_imma_active_share", 9, _PERCENT),
    GpmMetric("gpm_dram_share", 10, _PERCENT),  # of the theoretical bandwidth
    GpmMetric("gpm_fp64_active_share", 11, _PERCENT),  # without the tensor pipes
    GpmMetric("gpm_fp32_active_share", 12, _PERCENT),
    GpmMetric("gpm_fp16_active_share", 13, _PERCENT),
    GpmMetric("gpm_pcie_written_bytes_per_s", 20, _MIB),  # what left the GPU
    GpmMetric("gpm_pcie_read_bytes_per_s", 21, _MIB),  # what came to it
)
_NVLINK_TOTALS = (
    GpmMetric("gpm_nvlink_received_bytes_per_s", 60, _MIB),
    GpmMetric("gpm_nvlink_sent_bytes_per_s", 61, _MIB),
)


def link_metrics(link: int) -> tuple[GpmMetric, GpmMetric]:
    """The metrics of one NVLink. NVML numbers links 0 to 17 and 18 to 35 in two runs, received before sent."""
    first = 62 + 2 * link if link < 18 else 212 + 2 * (link - 18)
    return (
        GpmMetric(f"gpm_nvlink_{link}_received_bytes_per_s", first, _MIB),
        GpmMetric(f"gpm_nvlink_{link}_sent_bytes_per_s", first + 1, _MIB),
    )


def why_not(nvml: Any, gpu: Gpu) -> str:
    """Why GPM cannot be read of this GPU, or empty. Takes an initialised module. Never raises."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return f"no GPM on {gpu.name} (it exists from Hopper, sm_90, on)"
        _mig_instance(nvml, handle)
    except Exception as error:  # NVMLError, or a function that an old driver or pynvml lacks
        return f"no GPM ({error})"
    return ""


def _mig_instance(nvml: Any, handle: Any) -> int | None:
    """The GPU instance to sample where MIG splits the GPU, None for a whole one. Raises Unavailable."""
    try:
        is_split = nvml.nvmlDeviceGetMigMode(handle)[0]
    except Exception:  # a GPU that knows no MIG
        return None
    if not is_split:
        return None
    seen = set()
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            seen.add(nvml.nvmlDeviceGetGpuInstanceId(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)))
        except Exception:  # an empty slot
            continue
    if len(seen) != 1:
        raise Unavailable(f"MIG shows {len(seen)} instances, and which of them the program uses is not known")
    return int(seen.pop())


def _active_links(nvml: Any, handle: Any) -> list[int]:
    links = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                links.append(link)
        except Exception:  # there are no links, or no more
            break
    return links


class _GpuSeries(Series):
    """GPM of one GPU. Which metrics there are shows at the first pair of samples: each is then asked alone, once."""

    def __init__(self, nvml: Any, gpu: Gpu, cleanup: ExitStack) -> None:
        super().__init__(f"GPU {gpu.index}", gpu.index)
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        self._instance = _mig_instance(nvml, self._handle)
        if self._instance is not None:
            self.remarks.append(f"counted in its MIG instance {self._instance} alone")
        self._asked: tuple[GpmMetric, ...] = ()
        self.is_asked = False
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._samples = []
        for _ in range(2):
            self._samples.append(nvml.nvmlGpmSampleAlloc())
            cleanup.callback(nvml.nvmlGpmSampleFree, self._samples[-1])
        self._take(0)

    def read(self) -> list[float] | None:
        if time.monotonic_ns() - self._taken_ns < _REFRESH_MS * NS_PER_MS:
            return None
        try:
            self._take(1)
        except Exception:
            self.failed_count += max(len(self.metrics), 1)
            return None
        if not self.is_asked:
            self._ask()
        try:
            row = self._values(self._asked)
        except Exception:
            row = [math.nan] * len(self._asked)
        self._samples.reverse()
        self.failed_count += sum(map(math.isnan, row))
        return row

    def _take(self, which: int) -> None:
        sample = self._samples[which]
        if self._instance is None:
            self._nvml.nvmlGpmSampleGet(self._handle, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._handle, self._instance, sample)
        self._taken_ns = time.monotonic_ns()

    def _ask(self) -> None:
        links = [metric for link in _active_links(self._nvml, self._handle) for metric in link_metrics(link)]
        offered, lacking = [], []
        for metric in (*_METRICS, *_NVLINK_TOTALS, *links):
            try:
                self._values((metric,), strict=True)
                offered.append(metric)
            except Exception as error:
                if not adapter.is_not_supported(self._nvml, error):
                    self.missing[metric.name] = str(error)
                else:
                    lacking.append("NVLink" if metric in _NVLINK_TOTALS else metric.name)
        if lacking:
            self.remarks.append(f"no {', '.join(dict.fromkeys(lacking))} in GPM (Not Supported)")
        self._asked = tuple(offered)
        self.metrics = tuple(metric.name for metric in offered)
        self.is_asked = True

    def _values(self, metrics: Sequence[GpmMetric], *, strict: bool = False) -> list[float]:
        """The averages between the two samples, NaN for one that NVML refuses; ``strict`` raises its NVMLError."""
        request = self._request
        request.sample1, request.sample2 = self._samples
        request.numMetrics = len(metrics)
        for entry, metric in zip(request.metrics, metrics, strict=False):
            entry.metricId = metric.number
        self._nvml.nvmlGpmMetricsGet(request)
        row = []
        for entry, metric in zip(request.metrics, metrics, strict=False):
            if entry.nvmlReturn and strict:
                raise self._nvml.NVMLError(entry.nvmlReturn)
            row.append(math.nan if entry.nvmlReturn else entry.value * metric.scale)
        return row


class GpmCollector(SamplingCollector[_GpuSeries]):
    """Samples GPM of every GPU that has it on a thread, into bounded memory: see SamplingCollector.

    ``interval_ms`` is the time between samples; one below ``SHORTEST_INTERVAL_MS`` is raised to that. ``nvml`` replaces
    the pynvml module in tests. ``gpus`` lists the devices once started; the ``device`` column holds ``Gpu.index``.
    """

    name = "gpm"

    def __init__(
        self, interval_ms: int = SHORTEST_INTERVAL_MS, max_samples_count: int = 2_000_000, nvml: Any = None
    ) -> None:
        super().__init__(max(interval_ms, SHORTEST_INTERVAL_MS), max_samples_count)
        self.gpus: tuple[Gpu, ...] = ()
        self._nvml = nvml
        self._refused: list[tuple[str, str]] = []

    def _open(self, cleanup: ExitStack) -> list[_GpuSeries]:
        nvml = adapter.initialised(self._nvml)
        cleanup.callback(adapter.shutdown, nvml)
        self.gpus = adapter.devices(nvml)
        series = []
        for gpu in self.gpus:
            reason = why_not(nvml, gpu)
            try:
                series += [] if reason else [_GpuSeries(nvml, gpu, cleanup)]
            except Exception as error:
                reason = f"no GPM ({error})"
            self._refused += [(reason, f"GPU {gpu.index}")] if reason else []
        if not series:
            raise Unavailable("; ".join(together(self._refused)) or "NVML shows no GPU")
        return series

    def _problems(self) -> list[str]:
        short = f"no GPM, since the run was shorter than the {_REFRESH_MS} ms between two samples"
        unread = [(short, s.label) for s in self._series if not (s.is_asked or s.failed_count)]
        return together([*self._refused, *unread])

    def _tables(self) -> dict[str, pa.Table]:
        return {"samples": samples_table(self._series)}
