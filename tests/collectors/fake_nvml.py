"""A pynvml stand-in: numbers to check by hand, and faults on request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        return {3: "Not Supported", 4: "Insufficient Permissions", 15: "GPU is lost"}[self.value]


class FakeNvml:
    """Two H200s by default. ``unsupported`` names calls and numbers field values that answer Not Supported;
    ``fail_after`` maps a call to how often it works before it raises."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    def __init__(
        self,
        gpus: int = 2,
        unsupported: tuple[str | int, ...] = (),
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
            raise NVMLError(3)
        if name in self.fail_after:
            self.fail_after[name] -= 1
            if self.fail_after[name] < 0:
                raise NVMLError(15)

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

    def nvmlDeviceGetPcieThroughput(self, handle: int, counter: int) -> int:
        self._call("nvmlDeviceGetPcieThroughput")
        return {self.NVML_PCIE_UTIL_RX_BYTES: 2_000, self.NVML_PCIE_UTIL_TX_BYTES: 5}[counter]  # KB/s

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:
        self._call("nvmlDeviceGetFieldValues")
        return [self._field(number, scope) for number, scope in fields]

    def _field(self, number: int, scope: int) -> Any:
        """NVLink counters as the driver keeps them: KiB, per link, and summed up for scope 0xFFFFFFFF."""
        kib = {138: 1_000_000, 139: 2, 140: 1_060_000, 141: 3}[number] // (1 if scope == 0xFFFFFFFF else 18)
        value = SimpleNamespace(uiVal=kib % 2**16, ullVal=kib)  # the short member is not the one that counts
        return SimpleNamespace(nvmlReturn=3 if number in self.unsupported else 0, valueType=3, value=value)
