"""Topology: what joins the GPUs of this machine to one another and to the host, with theoretical rates.

NVML is asked once, on a thread, so that neither its start nor a driver that does not answer delays the program.
Where the driver hides which GPU an NVLink leads to (virtual machines), the peer follows from the P2P status.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from spikeprof.profiler.collectors.link_rates import Rate, nvlink_rate, pcie_rate
from spikeprof.profiler.collectors.nvml import Gpu, NvmlUnavailable, opened
from spikeprof.profiler.collectors.nvml_links import GpuLinks, Machine, Pair, Pcie, read_machine, refreshed
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote

HOST = -1

#: How long ``stop`` waits for NVML: without a persistent driver, its start alone takes seconds.
_JOIN_SECONDS = 10.0

_NOT_ASKED = "not asked for: `spikeprof topology --measure` copies over every link"


class TopologyCollector:
    """Reads the topology when started and once more at the end: idle GPUs lower PCIe, and NVLinks may not be up yet.

    ``nvml`` and ``sysfs`` replace the pynvml module and ``/sys`` in tests. ``gpus`` lists the devices once
    stopped: the columns ``src_device`` and ``dst_device`` hold ``Gpu.index``.
    """

    name = "topology"

    def __init__(self, nvml: Any = None, sysfs: Path = Path("/sys")) -> None:
        self.gpus: tuple[Gpu, ...] = ()
        self._nvml = nvml
        self._sysfs = sysfs
        self._machine: Machine | None = None
        self._problem = ""
        self._reason_off = "not started"
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, t0_unix_ns: int) -> None:
        """Begin to read. Topology has no time: ``t0_unix_ns`` is not used. Never raises."""
        self._thread = threading.Thread(target=self._run, name="spikeprof-topology", daemon=True)
        self._thread.start()

    def stop(self) -> tuple[CollectorNote, dict[str, pa.Table]]:
        """The note and the table ``topology``. Never raises."""
        thread, self._thread = self._thread, None
        if thread is None:
            return CollectorNote("off", self._reason_off), {}
        self._reason_off = "stopped"
        self._stopping.set()
        thread.join(_JOIN_SECONDS)
        machine, problem = self._machine, self._problem
        if thread.is_alive():
            problem = "NVML stopped answering"
        if machine is None or not machine.gpus:
            return CollectorNote("refused", problem or "NVML shows no GPU"), {}
        self.gpus = tuple(links.gpu for links in machine.gpus)
        table = topology_table(machine)
        reasons = [*machine.reasons, *([problem] if problem else [])]
        return CollectorNote("degraded" if reasons else "ok", "; ".join(reasons), table.num_rows), {"topology": table}

    def _run(self) -> None:
        try:
            with opened(self._nvml) as module:
                machine = read_machine(module, self._sysfs)
                topology_table(machine)  # nonsense from the driver shows here, not in stop
                self._machine = machine
                self._stopping.wait()
                self._machine = refreshed(machine, module, self._sysfs)
        except NvmlUnavailable as error:
            self._problem = str(error)
        except Exception as error:
            self._problem = f"NVML's answers make no sense ({type(error).__name__}: {error})"


def topology_table(machine: Machine) -> pa.Table:
    """The table ``topology``: a row per ordered pair of GPUs, and two per GPU for the host."""
    return pa.Table.from_pylist(list(_rows(machine)), schema=TABLES["topology"].arrow)


def _rows(machine: Machine) -> Iterator[dict[str, Any]]:
    linked_count = sum(bool(links.nvlinks) for links in machine.gpus)
    for (i, j), pair in machine.pairs.items():
        a, b = machine.gpus[i], machine.gpus[j]
        joined = _nvlink(a, b, pair, linked_count) or _pcie(a.pcie, b.pcie)
        yield {
            "src_device": a.gpu.index,
            "dst_device": b.gpu.index,
            "pcie_path": pair.pcie_path,
            "peer_access": pair.access or pair.nvlink,
            "numa_node": -1,
            "measured_reason": _NOT_ASKED,
            **joined,
        }
    for links in machine.gpus:
        for src, dst in ((HOST, links.gpu.index), (links.gpu.index, HOST)):
            yield {
                "src_device": src,
                "dst_device": dst,
                "pcie_path": "",
                "peer_access": "",
                "numa_node": links.numa_node,
                "measured_reason": _NOT_ASKED,
                **_pcie(links.pcie, links.pcie),
            }


def _nvlink(a: GpuLinks, b: GpuLinks, pair: Pair, linked_count: int) -> dict[str, Any] | None:
    """The NVLink columns of a pair, None when NVLink does not join the two."""
    direct_count = sum(link.remote_bus is not None and link.remote_bus == b.bus for link in a.nvlinks)
    if pair.nvlink != "ok" and not (pair.nvlink == "" and direct_count):
        return None
    kind, links_count = _way(a, b, direct_count, linked_count)
    generation = min(a.nvlink_generation, b.nvlink_generation)
    if links_count is None and not (a.nvlinks and b.nvlinks):
        down = ", ".join(str(end.gpu.index) for end in (a, b) if not end.nvlinks)
        rate = Rate(None, f"the driver shows no NVLink of GPU {down} as active, though it grants access over NVLink")
    elif links_count is None:
        rate = Rate(None, "the driver does not tell which GPU each NVLink leads to")
    else:
        line = min((v for v in (a.line_bytes_per_s, b.line_bytes_per_s) if v), default=None)
        rate = nvlink_rate(generation, links_count, line)
    return {
        "kind": kind,
        "generation": generation,
        "max_generation": generation,
        "links_count": links_count,
        "max_links_count": None if links_count is None else links_count + a.nvlinks_count - len(a.nvlinks),
        "peak_bytes_per_s": rate.bytes_per_s,
        "peak_source": rate.source,
    }


def _way(a: GpuLinks, b: GpuLinks, direct_count: int, linked_count: int) -> tuple[str, int | None]:
    """(kind, NVLinks that serve the pair): through a switch all links of a GPU serve every peer."""
    fewest = min(len(a.nvlinks), len(b.nvlinks))
    if direct_count:
        return "nvlink", direct_count
    if all(any(link.remote == "switch" for link in links.nvlinks) for links in (a, b)):
        return "nvswitch", fewest
    # The driver says that NVLink joins them, but not by which links: with two GPUs it can only be all.
    return "nvlink", fewest if linked_count == 2 and fewest else None


def _pcie(a: Pcie, b: Pcie) -> dict[str, Any]:
    """The PCIe columns of a pair, or of a GPU and the host (twice the same): the slower end decides.

    The rate is that of the highest possible generation, which the link returns to under load, and of the lanes in
    use, of which it gets no more.
    """
    lanes = [p.lanes_count for p in (a, b)]
    max_lanes = [p.max_lanes_count for p in (a, b)]
    rate = min((pcie_rate(p.max_generation, p.lanes_count) for p in (a, b)), key=lambda r: r.bytes_per_s or 0)
    return {
        "kind": "pcie" if rate.bytes_per_s else "unknown",
        "generation": min(a.generation, b.generation),
        "max_generation": min(a.max_generation, b.max_generation),
        "links_count": min((n for n in lanes if n), default=None) if all(lanes) else None,
        "max_links_count": min((n for n in max_lanes if n), default=None) if all(max_lanes) else None,
        "peak_bytes_per_s": rate.bytes_per_s,
        "peak_source": rate.source,
    }
