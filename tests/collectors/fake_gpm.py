"""The GPM part of a pynvml stand-in. Every metric has the value of its number: 10 % of DRAM bandwidth, 61 MiB/s, …"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pynvml
from collectors.fake_nvml import FakeNvml, NVMLError


class FakeGpm(FakeNvml):
    """``gpm`` numbers the GPUs that have it. ``instances`` are the MIG instances of each, None = MIG is off."""

    c_nvmlGpmMetricsGet_t = pynvml.c_nvmlGpmMetricsGet_t
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_NVLINK_MAX_LINKS = 36

    def __init__(
        self, gpus: int = 2, gpm: tuple[int, ...] = (0, 1), instances: tuple[int, ...] | None = None, **options: Any
    ) -> None:
        super().__init__(gpus, **options)
        self.gpm, self.instances = gpm, instances
        self.links_count = 2
        self.samples: dict[int, tuple[int, int | None, int] | None] = {}  # address -> (GPU, instance, when)
        self.clock = 0

    def nvmlGpmQueryDeviceSupport(self, handle: int) -> Any:
        self._call("nvmlGpmQueryDeviceSupport")
        return SimpleNamespace(isSupportedDevice=int(handle in self.gpm))

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [int(self.instances is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> int:
        if index >= len(self.instances or ()):
            raise NVMLError(6)
        return index

    def nvmlDeviceGetGpuInstanceId(self, handle: int) -> int:
        return (self.instances or ())[handle]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.links_count:
            raise NVMLError(3)
        return 1

    def nvmlGpmSampleAlloc(self) -> Any:
        address = 4096 * (len(self.samples) + 1)
        self.samples[address] = None
        return ctypes.cast(address, pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        del self.samples[_address(sample)]

    def nvmlGpmSampleGet(self, handle: int, sample: Any) -> None:
        self._call("nvmlGpmSampleGet")
        self._fill(sample, handle, None)

    def nvmlGpmMigSampleGet(self, handle: int, instance: int, sample: Any) -> None:
        self._call("nvmlGpmMigSampleGet")
        self._fill(sample, handle, instance)

    def _fill(self, sample: Any, handle: int, instance: int | None) -> None:
        self.clock += 1
        self.samples[_address(sample)] = (handle, instance, self.clock)

    def nvmlGpmMetricsGet(self, request: Any) -> None:
        self._call("nvmlGpmMetricsGet")
        assert request.version == self.NVML_GPM_METRICS_GET_VERSION
        first, second = self.samples[_address(request.sample1)], self.samples[_address(request.sample2)]
        assert first
        assert second
        assert first[:2] == second[:2]
        assert first[2] < second[2]
        for entry in request.metrics[: request.numMetrics]:
            entry.nvmlReturn = 3 if entry.metricId in self.unsupported else 0
            entry.value = 0.0 if entry.nvmlReturn else float(entry.metricId)


def _address(sample: Any) -> int:
    return ctypes.cast(sample, ctypes.c_void_p).value or 0
