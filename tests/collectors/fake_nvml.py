"""A pynvml stand-in: numbers to check by hand, and faults on request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


class FakeNvml:
    """Two H200s by default. ``unsupported`` names calls that answer Not Supported; ``fail_after`` maps a call
    to how often it works before it raises."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(
        self,
        gpus: int = 2,
        unsupported: tuple[str, ...] = (),
        fail_after: dict[str, int] | None = None,
        init_error: Exception | None = None,
    ) -> None:
        self.gpus, self.unsupported, self.fail_after = gpus, unsupported, dict(fail_after or {})
        self.init_error = init_error
        self.inits_count = self.shutdowns_count = 0
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.unsupported:
            raise NVMLError("Not Supported")
        if name in self.fail_after:
            self.fail_after[name] -= 1
            if self.fail_after[name] < 0:
                raise NVMLError("GPU is lost")

    def nvmlInit(self) -> None:
        if self.init_error:
            raise self.init_error
        self.inits_count += 1

    def nvmlShutdown(self) -> None:
        self.shutdowns_count += 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        self._call("nvmlDeviceGetCount")
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:0{handle}:00.0".encode())

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._call("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=1024 * (handle + 1), total=4096, free=0)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._call("nvmlDeviceGetPowerUsage")
        return 700_500  # mW

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        self._call("nvmlDeviceGetClockInfo")
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[which]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._call("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=87, memory=43)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._call("nvmlDeviceGetTemperature")
        return 41

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._call("nvmlDeviceGetTotalEnergyConsumption")
        return 12_345  # mJ

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        self._call("nvmlDeviceGetCurrentClocksEventReasons")
        return 0x4 | 0x40  # software power cap, hardware thermal slowdown
