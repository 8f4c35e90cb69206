"""A pynvml stand-in for the links of GPUs: machines as they were seen, or as data sheets have them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from collectors.fake_cuda import UUIDS
from collectors.fake_nvml import FakeNvml

SWITCH, GPU, UNKNOWN = 2, 0, 255
HIDDEN = "FFFFFFFF:FF:FF.0"
SPEED_OF_LINK, SPEED_COMMON = 164, 90


class NVMLError(Exception):
    """As pynvml's: a code in ``value``, words in ``str``."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.value = {"Invalid Argument": 2, "Not Supported": 3}.get(words, 999)


class FakeLinks(FakeNvml):
    """``nvlinks`` holds, per GPU, (state, remote type, remote bus) of each link the driver knows; empty = none.

    ``p2p`` is the status of capabilities 0 to 4 for every pair, or by pair. ``broken`` maps a call to what it
    raises or returns instead.
    """

    def __init__(
        self,
        nvlinks: tuple[tuple[tuple[int, int, str], ...], ...],
        version: int = 0,
        mb_per_s: Mapping[int, int] | None = None,
        pcie: tuple[tuple[int, int, int, int], ...] | None = None,
        p2p: tuple[int, ...] | Mapping[tuple[int, int], tuple[int, ...]] = (5, 5, 5, 5, 5),
        ancestor: int = 40,
        affinity: tuple[int, ...] = (1, 0, 0, 0),
        broken: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(gpus=len(nvlinks), **options)
        self.nvlinks, self.version, self.mb_per_s = nvlinks, version, mb_per_s or {}
        self.pcie = list(pcie or ((5, 5, 16, 16),) * len(nvlinks))
        self.p2p, self.ancestor, self.affinity = p2p, ancestor, affinity
        self.broken = broken or {}

    def __getattribute__(self, name: str) -> Any:
        broken = object.__getattribute__(self, "__dict__").get("broken", {})
        if name not in broken:
            return object.__getattribute__(self, name)
        if broken[name] is AttributeError:  # a pynvml that lacks it
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            if isinstance(broken[name], Exception):
                raise broken[name]
            return broken[name]

        return answer

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def _link(self, handle: int, link: int) -> tuple[int, int, str]:
        if not self.nvlinks[handle]:
            raise NVMLError("Not Supported")
        if link >= len(self.nvlinks[handle]):
            raise NVMLError("Invalid Argument")
        return self.nvlinks[handle][link]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return self._link(handle, link)[0]

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return self._link(handle, link)[1]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId=self._link(handle, link)[2].encode())

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        self._link(handle, link)
        return self.version

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[Any]) -> Any:
        number = fields[0][0] if isinstance(fields[0], tuple) else fields[0]
        known = number in self.mb_per_s
        value = SimpleNamespace(uiVal=self.mb_per_s.get(number, 0))
        return [SimpleNamespace(nvmlReturn=0 if known else 3, value=value)]

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return self.pcie[handle][0]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self.pcie[handle][1]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return self.pcie[handle][2]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return self.pcie[handle][3]

    def nvmlDeviceGetMemoryAffinity(self, handle: int, size: int, scope: int) -> tuple[int, ...]:
        assert (size, scope) == (4, 0)
        return self.affinity

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, capability: int) -> int:
        status = self.p2p[a, b] if isinstance(self.p2p, Mapping) else self.p2p
        return status[capability]

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return self.ancestor


def h200_pair(**options: Any) -> FakeLinks:
    """Two H200s of a virtual machine: 18 links each to a switch, remote addresses hidden."""
    links = ((1, SWITCH, HIDDEN),) * 18
    return FakeLinks((links, links), 6, {SPEED_OF_LINK: 26562}, p2p=(0, 0, 0, 0, 5), **options)


def h200_alone(**options: Any) -> FakeLinks:
    """One H200 of a virtual machine: every question about NVLink answers Not Supported."""
    return FakeLinks(((),), **options)


def pcie_only(**options: Any) -> FakeLinks:
    """Two GPUs on PCIe 4 in slots of unlike width, no peer access."""
    return FakeLinks(((), ()), pcie=((4, 4, 16, 16), (1, 4, 8, 16)), p2p=(1, 1, 5, 5, 1), ancestor=50, **options)


def three_v100(**options: Any) -> FakeLinks:
    """Three V100s joined directly: two links between 0 and 1, one between 1 and 2, one of GPU 2's is down."""
    links = (
        ((1, GPU, "00000000:01:00.0"), (1, GPU, "00000000:01:00.0")),
        ((1, GPU, "00000000:00:00.0"), (1, GPU, "00000000:00:00.0"), (1, GPU, "00000000:02:00.0")),
        ((1, GPU, "00000000:01:00.0"), (0, UNKNOWN, HIDDEN)),
    )
    near, far = (0, 0, 0, 0, 0), (0, 0, 5, 5, 0)
    p2p = {(0, 1): near, (1, 0): near, (1, 2): near, (2, 1): near, (0, 2): far, (2, 0): far}
    return FakeLinks(links, 3, {SPEED_COMMON: 25781}, pcie=((3, 3, 16, 16),) * 3, p2p=p2p, ancestor=30, **options)
