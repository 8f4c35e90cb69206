"""What NVML says of the links of each GPU: NVLinks, PCIe, NUMA node, and P2P status of each pair.

Every question may be refused: the answer is then None or "unknown", and the reason is kept where it means more
than "this GPU has no such thing".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spikeprof.profiler.collectors.link_rates import nvlink_generation
from spikeprof.profiler.collectors.nvml import Gpu, devices

#: More than any GPU has: links are asked for by number until the driver knows no more.
_MOST_LINKS = 36

#: NVML_NVLINK_DEVICE_TYPE_*.
_REMOTES = {0: "gpu", 1: "npu", 2: "switch"}

#: NVML_P2P_CAPS_INDEX_* by number: pynvml's own constant for reads is a tuple.
_P2P_READ, _P2P_NVLINK = 0, 2

#: NVML_P2P_STATUS_*.
_P2P_STATUS = {
    0: "ok",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the PCIe topology does not support it",
    4: "disabled in the driver's settings",
    5: "not supported",
}

#: NVML_TOPOLOGY_* as the words of ``nvidia-smi topo``: one switch or board, several switches, a host bridge, the
#: bridges of one NUMA node, the link between CPUs.
_PCIE_PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

_FI_NVLINK_SPEED_COMMON, _FI_NVLINK_SPEED = 90, 164  # NVML_FI_DEV_NVLINK_…, MB/s; the latter by link
_NOTHING_THERE = (2, 3)  # NVML_ERROR_INVALID_ARGUMENT: no such link, NVML_ERROR_NOT_SUPPORTED: no such thing
_SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class NvLink:
    """One active NVLink. ``remote``: gpu, npu, switch or unknown; ``remote_bus`` None when hidden."""

    remote: str
    remote_bus: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Pcie:
    """Generation (0 = unknown) and lanes of one GPU's PCIe link: as it runs, and the most both ends can."""

    generation: int
    max_generation: int
    lanes_count: int | None
    max_lanes_count: int | None


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """All that NVML says of one GPU's links. ``line_bytes_per_s`` is of one NVLink in one direction."""

    gpu: Gpu
    nvlinks: tuple[NvLink, ...]  # the active ones
    nvlinks_count: int  # all that the driver lists
    nvlink_generation: int  # 0 = unknown
    line_bytes_per_s: float | None
    pcie: Pcie
    numa_node: int  # -1 = unknown

    @property
    def bus(self) -> tuple[int, ...] | None:
        """Where it sits on PCIe."""
        return bus_address(self.gpu.pci_bus_id)


@dataclass(frozen=True, slots=True)
class Pair:
    """From one GPU to another: P2P status over any link and over NVLink, and where they meet on PCIe."""

    access: str  # ok, or why not; empty = unknown
    nvlink: str
    pcie_path: str  # PIX, PXB, PHB, NODE, SYS; empty = unknown


@dataclass(frozen=True)
class Machine:
    """The GPUs of this machine, and every ordered pair of them by place in ``gpus``."""

    gpus: tuple[GpuLinks, ...]
    pairs: dict[tuple[int, int], Pair]
    reasons: tuple[str, ...] = ()  # what could not be read, and why


@dataclass
class _Asker:
    """Asks NVML and keeps the reasons of refusals, one for each kind of question."""

    nvml: Any
    reasons: dict[str, str] = field(default_factory=dict)

    def __call__(self, call: str, *arguments: Any, what: str = "") -> Any:
        """The answer, or None; the reason is kept under ``what``, where a refusal is news."""
        try:
            return getattr(self.nvml, call)(*arguments)
        except Exception as error:  # NVMLError, or a function that an old driver or pynvml lacks
            if what and getattr(error, "value", None) not in _NOTHING_THERE:
                self.reasons.setdefault(what, str(error))
            return None


def read_machine(nvml: Any, sysfs: Path = _SYSFS) -> Machine:
    """Ask an initialised pynvml module for everything. Raises NvmlUnavailable when it cannot list the GPUs."""
    ask = _Asker(nvml)
    gpus = devices(nvml)
    handles = [nvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus]
    read = tuple(_gpu_links(ask, handle, gpu, sysfs) for handle, gpu in zip(handles, gpus, strict=True))
    pairs = {(i, j): _pair(ask, a, b) for i, a in enumerate(handles) for j, b in enumerate(handles) if i != j}
    reasons = [f"{what} could not be read ({why})" for what, why in ask.reasons.items()]
    for what, lacking in (
        ("PCIe generation and width", [g for g in read if not g.pcie.max_generation or not g.pcie.lanes_count]),
        ("the speed of NVLink", [g for g in read if g.nvlinks and not g.nvlink_generation and not g.line_bytes_per_s]),
    ):
        if lacking and what not in ask.reasons:
            reasons.append(f"the driver does not give {what} of GPU {', '.join(str(g.gpu.index) for g in lacking)}")
    return Machine(read, pairs, tuple(reasons))


def refreshed(machine: Machine, nvml: Any, sysfs: Path = _SYSFS) -> Machine:
    """The same after a second reading, from each GPU the one that tells more.

    An idle GPU lowers its PCIe generation to save power; and where no program holds the driver, its NVLinks were seen
    not to be up yet when the first one came.
    """
    again = read_machine(nvml, sysfs)
    if [links.gpu.uuid for links in again.gpus] != [links.gpu.uuid for links in machine.gpus]:
        return machine
    gpus = tuple(_fuller(*both) for both in zip(machine.gpus, again.gpus, strict=True))
    return replace(again if gpus == again.gpus else machine, gpus=gpus)


def _fuller(first: GpuLinks, second: GpuLinks) -> GpuLinks:
    told_more = second if len(second.nvlinks) >= len(first.nvlinks) else first
    generation = max(first.pcie.generation, second.pcie.generation)
    return replace(told_more, pcie=replace(told_more.pcie, generation=generation))


def bus_address(text: Any) -> tuple[int, ...] | None:
    """``00000000:3B:00.0`` as (domain, bus, device); None for what hides the address (all F) or is none."""
    shown = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    try:
        domain, bus, rest = shown.strip("\x00").split(":")
        address = int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16)
    except ValueError:
        return None
    return address if address[0] < 0xFFFFFFFF and address[1] <= 0xFF and address[2] <= 0x1F else None


def _gpu_links(ask: _Asker, handle: Any, gpu: Gpu, sysfs: Path) -> GpuLinks:
    states = _nvlink_states(ask, handle)
    active = [link for link, state in states.items() if state == 1]  # 3: up, but barred from carrying anything
    version = ask("nvmlDeviceGetNvLinkVersion", handle, active[0], what="the version of NVLink") if active else None
    return GpuLinks(
        gpu=gpu,
        nvlinks=tuple(_nvlink(ask, handle, link) for link in active),
        nvlinks_count=len(states),
        nvlink_generation=nvlink_generation(int(version or 0)),
        line_bytes_per_s=_line_rate(ask, handle, active),
        pcie=_pcie(ask, handle),
        numa_node=_numa_node(ask, handle, gpu, sysfs),
    )


def _nvlink_states(ask: _Asker, handle: Any) -> dict[int, int]:
    """NVML_NVLINK_STATE_* of each link that the driver knows."""
    states = {n: ask("nvmlDeviceGetNvLinkState", handle, n, what="the NVLinks") for n in range(_MOST_LINKS)}
    return {link: int(state) for link, state in states.items() if state is not None}


def _nvlink(ask: _Asker, handle: Any, link: int) -> NvLink:
    kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
    remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
    return NvLink(_REMOTES.get(kind, "unknown"), bus_address(remote.busId) if remote else None)


def _line_rate(ask: _Asker, handle: Any, active: Sequence[int]) -> float | None:
    """What the driver says that one link's wires carry, in bytes per second; None when it does not say."""
    for wanted in ([(_FI_NVLINK_SPEED, active[0])], [_FI_NVLINK_SPEED_COMMON]) if active else ():
        answer = ask("nvmlDeviceGetFieldValues", handle, wanted)
        # The value is a union. Speeds are small and not negative: the low 32 bits hold them in any integer type.
        if answer is not None and answer[0].nvmlReturn == 0 and answer[0].value.uiVal:
            return float(answer[0].value.uiVal) * 1e6
    return None


def _pcie(ask: _Asker, handle: Any) -> Pcie:
    now, most, lanes, max_lanes = (
        ask(f"nvmlDeviceGet{name}", handle, what="PCIe generation and width")
        for name in ("CurrPcieLinkGeneration", "MaxPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkWidth")
    )
    return Pcie(int(now or 0), int(most or 0), lanes or None, max_lanes or None)


def _numa_node(ask: _Asker, handle: Any, gpu: Gpu, sysfs: Path) -> int:
    """The kernel's word; where it has none (-1), the driver's, if that names one node.

    ``nvmlDeviceGetNumaNodeId`` is something else: the node that the GPU's own memory is on coherent machines.
    """
    address = bus_address(gpu.pci_bus_id)
    if address:
        domain, bus, device = address
        try:
            node = int((sysfs / f"bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        if node >= 0:
            return node
    masks = ask("nvmlDeviceGetMemoryAffinity", handle, 4, 0)  # 4 x 64 nodes, scope node
    nodes = [64 * word + bit for word, mask in enumerate(masks or ()) for bit in range(64) if mask >> bit & 1]
    return nodes[0] if len(nodes) == 1 else -1


def _pair(ask: _Asker, a: Any, b: Any) -> Pair:
    access = ask("nvmlDeviceGetP2PStatus", a, b, _P2P_READ, what="P2P status")
    nvlink = ask("nvmlDeviceGetP2PStatus", a, b, _P2P_NVLINK, what="P2P status")
    level = ask("nvmlDeviceGetTopologyCommonAncestor", a, b, what="where GPUs meet on PCIe")
    return Pair(_status(access), _status(nvlink), _PCIE_PATHS.get(level, ""))


def _status(answer: int | None) -> str:
    """In words; empty when the driver gave none, or says itself that it does not know."""
    return "" if answer is None else _P2P_STATUS.get(answer, "")
