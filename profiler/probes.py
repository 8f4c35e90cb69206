"""What works on this machine, for this user, in this container: one small function per question.

Nothing here initialises CUDA. Functions that read the system take its ``root`` so that tests can build one.
``probes_target.py`` asks the same of the Python that the program under test would use.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "degraded", "no"]

ROOT = Path("/")

#: Bits of CapEff in /proc/self/status (linux/capability.h).
CAP_SYS_ADMIN, CAP_PERFMON = 21, 38

#: Between samples when it is only tried which counters there are.
_PROBE_INTERVAL_NS = 10_000

#: Below this much free disk a recording may end early.
FREE_BYTES_WANTED = 1_000_000_000

_CONTAINER_WORDS = re.compile(r"docker|kubepods|containerd|libpod|lxc|garden")


@dataclass(frozen=True, slots=True)
class Probe:
    """One answer. ``needed``: recording GPU work cannot work while this is ``no``."""

    name: str
    state: State
    detail: str
    fix: str = ""
    needed: bool = False


def can_record(probes: list[Probe]) -> bool:
    """Whether ``spikeprof run`` can record GPU work here."""
    return not any(p.needed and p.state == "no" for p in probes)


def machine_probes(folder: Path) -> list[Probe]:
    """All probes of this machine; ``folder`` is where traces would be written. Never raises."""
    questions: tuple[tuple[str, Callable[[], Probe]], ...] = (
        ("spikeprof's Python", own_python),
        ("NVIDIA driver", driver_nodes),
        ("libcuda", libcuda),
        ("GPUs", gpus),
        ("counters", counters),
        ("GPM", gpm),
        ("container", container),
        ("trace folder", lambda: trace_folder(folder)),
        ("cupti-python", cupti_python),
        ("PM sampling", pm_sampling),
        ("CPU counters", cpu_counters),
    )
    return [_safely(name, ask) for name, ask in questions]


def _safely(name: str, ask: Callable[[], Probe]) -> Probe:
    """A probe that breaks is an answer too: it must not take the others with it."""
    try:
        return ask()
    except Exception as error:
        return Probe(name, "degraded", f"could not be checked: {type(error).__name__}: {error}")


def own_python() -> Probe:
    """The Python that runs spikeprof itself."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Probe("spikeprof's Python", "ok", f"{version} ({sys.executable})")


def driver_nodes(root: Path = ROOT) -> Probe:
    """Whether the driver's device files are there and this user may open them."""
    name = "NVIDIA driver"
    control = root / "dev/nvidiactl"
    if not control.exists():
        if (root / "dev/dxg").exists():
            return Probe(name, "degraded", "WSL: the driver is Windows' own (/dev/dxg); spikeprof was not tried on it")
        fix = "start the container with its GPUs (docker run --gpus all)" if _container(root) else "install the driver"
        return Probe(name, "no", "there is no /dev/nvidiactl", fix, needed=True)
    nodes = [control, *sorted((root / "dev").glob("nvidia[0-9]*"))]
    locked = [f"/{n.relative_to(root)}" for n in nodes if not os.access(n, os.R_OK | os.W_OK)]
    if locked:
        who = "the group of those files" if hasattr(os, "getuid") and os.getuid() else "its device cgroup"
        detail = f"this user may not open {', '.join(locked)}"
        return Probe(name, "no", detail, f"give the user access ({who})", needed=True)
    if not (root / "dev/nvidia-uvm").exists():
        return Probe(
            name, "degraded", "there is no /dev/nvidia-uvm, without which CUDA may not start", "nvidia-modprobe -u -c=0"
        )
    return Probe(name, "ok", f"device files of {len(nodes) - 1} GPU(s) are open to this user", needed=True)


def libcuda(load: Callable[[str], Any] = ctypes.CDLL) -> Probe:
    """Whether the driver's user-space library can be loaded (it is not initialised)."""
    try:
        load("libcuda.so.1")
    except OSError as error:
        return Probe(
            "libcuda",
            "no",
            f"libcuda.so.1 cannot be loaded ({error})",
            "install the driver's compute libraries; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            needed=True,
        )
    return Probe("libcuda", "ok", "libcuda.so.1 can be loaded", needed=True)


def gpus(nvml: Any = None) -> Probe:
    """Driver version and GPUs as NVML tells them."""
    from spikeprof.profiler.collectors import nvml as adapter

    try:
        with adapter.opened(nvml) as module:
            found = adapter.devices(module)
            version = adapter.driver_version(module)
    except adapter.NvmlUnavailable as error:
        return Probe("GPUs", "degraded", f"{error}: no power, clock and load samples", "install the driver's NVML")
    if not found:
        return Probe("GPUs", "no", f"driver {version} shows no GPU", "make a GPU visible to this machine", needed=True)
    names = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in found)
    return Probe("GPUs", "ok", f"driver {version}; {names}", needed=True)


def counters(root: Path = ROOT) -> Probe:
    """Whether this user may read GPU performance counters. Tracing of kernels does not depend on it."""
    name, params = "counters", root / "proc/driver/nvidia/params"
    if not params.exists():
        return Probe(name, "degraded", "unknown: there is no /proc/driver/nvidia/params")
    restricted = re.search(r"^RmProfilingAdminOnly:\s*([1-9])", params.read_text(), re.MULTILINE)
    if not restricted:
        return Probe(name, "ok", "open to every user (RmProfilingAdminOnly 0)")
    held = _capabilities(root)
    for bit, word in ((CAP_SYS_ADMIN, "CAP_SYS_ADMIN"), (CAP_PERFMON, "CAP_PERFMON")):
        if held >> bit & 1:
            return Probe(name, "ok", f"open to this process ({word}; others are refused: RmProfilingAdminOnly 1)")
    fix = (
        "start the container with --cap-add SYS_ADMIN"
        if _container(root)
        else "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    )
    return Probe(name, "degraded", "the driver gives them to administrators only; kernels are traced all the same", fix)


def pm_sampling() -> Probe:
    """Which hardware counters can be sampled, found out by sampling for a moment: sets of ``--counters``."""
    from spikeprof.profiler.collectors import pm_files
    from spikeprof.profiler.collectors.pm_sampling import PmSamplingCollector, visible_gpus
    from spikeprof.profiler.counter_metrics import SETS

    name = "PM sampling"
    everything = tuple(dict.fromkeys(metric for metrics in SETS.values() for metric in metrics))
    with tempfile.TemporaryDirectory(prefix="spikeprof-") as folder:
        collector = PmSamplingCollector(visible_gpus(), everything, _PROBE_INTERVAL_NS, Path(folder), max_samples=0)
        collector.start(0)
        note, _ = collector.stop()
        by_gpu = [{m for one in files.sets for m in one.metrics} for files in pm_files.read(Path(folder))]
    sampled = set.intersection(*by_gpu) if by_gpu else set()
    if not sampled:
        what = "not on every GPU" if any(by_gpu) else "no counter can be sampled"
        return Probe(name, "degraded", f"{what}: {note.reason}")
    works = [key for key, metrics in SETS.items() if set(metrics) <= sampled]
    lacks = [
        f"{key} without {', '.join(sorted({*metrics} - sampled))}" for key, metrics in SETS.items() if key not in works
    ]
    told = f"--counters={','.join(works)}" if works else "no whole set"
    return Probe(name, "degraded" if lacks else "ok", "; ".join([told, *lacks]))


def gpm(nvml: Any = None) -> Probe:
    """Whether the driver averages what the units of each GPU do: the fall-back where counters are refused."""
    from spikeprof.profiler.collectors import gpm as collector
    from spikeprof.profiler.collectors import nvml as adapter

    name = "GPM"
    try:
        with adapter.opened(nvml) as module:
            reasons = {gpu.index: collector.why_not(module, gpu) for gpu in adapter.devices(module)}
    except adapter.NvmlUnavailable as error:
        return Probe(name, "degraded", str(error), "install the driver's NVML")
    works = [f"GPU {index}" for index, why in reasons.items() if not why]
    lacks = [f"GPU {index}: {why}" for index, why in reasons.items() if why]
    told = [f"SM, tensor, DRAM, PCIe and NVLink rates of {', '.join(works)}, for every user"] if works else []
    return Probe(name, "degraded" if lacks or not works else "ok", "; ".join(told + lacks) or "NVML shows no GPU")


def container(root: Path = ROOT) -> Probe:
    """Whether this is a container: most missing pieces are then options of its start."""
    return Probe("container", "ok", _container(root) or "none seen")


def trace_folder(folder: Path) -> Probe:
    """Whether traces can be written, by writing."""
    name = "trace folder"
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        detail = f"{folder} cannot be written ({error.strerror})"
        return Probe(name, "no", detail, "change to a folder that can, or name one with -o", needed=True)
    free_bytes = shutil.disk_usage(folder).free
    detail = f"{folder} can be written, {free_bytes / 1e9:.1f} GB free"
    if free_bytes < FREE_BYTES_WANTED:
        return Probe(name, "degraded", detail, "make room, or bound the recording with --max-bytes", needed=True)
    return Probe(name, "ok", detail, needed=True)


def cupti_python() -> Probe:
    """The cupti-python beside spikeprof; from 13.4 on it can sample counters. Recording kernels does not need it."""
    name = "cupti-python"
    try:
        version = metadata.version("cupti-python")
    except metadata.PackageNotFoundError:
        detail = "not installed: kernels are recorded all the same, counters (PM sampling) cannot be"
        return Probe(name, "degraded", detail, "pip install cupti-python")
    spec = importlib.util.find_spec("cupti")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    sampling = any((Path(folder) / "pm_sampling.py").exists() for folder in folders)
    if not sampling:
        return Probe(name, "degraded", f"{version}, without PM sampling", "pip install -U 'cupti-python>=13.4'")
    return Probe(name, "ok", f"{version}, with PM sampling")


def cpu_counters(system_call: Callable[[Any], int] | None = None, root: Path = ROOT) -> Probe:
    """Whether the cache events of the CPU can be counted for programs of this user, by opening them."""
    from spikeprof.profiler.collectors import perf_events

    name = "CPU counters"
    opened = perf_events.open_events(system_call or perf_events.perf_event_open, root)
    opened.close()
    lacks = [f"not {metric} ({refusal.why})" for metric, refusal in opened.refused.items()]
    if not opened.descriptors:
        first = next(iter(opened.refused.values()))
        return Probe(name, "degraded", first.why, first.fix)
    told = [*opened.descriptors, *lacks]
    if opened.is_user_only:
        told.append(f"without the kernel's own code (kernel.perf_event_paranoid is {perf_events.paranoid_level(root)})")
    return Probe(name, "degraded" if lacks else "ok", ", ".join(told))


def _capabilities(root: Path) -> int:
    """CapEff of this process; 0 when it cannot be read."""
    try:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", (root / "proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1), 16) if found else 0


def _container(root: Path) -> str:
    """What says that this is a container, or empty."""
    for mark in (".dockerenv", "run/.containerenv"):
        if (root / mark).exists():
            return f"yes (/{mark})"
    cgroup = root / "proc/1/cgroup"
    try:
        found = _CONTAINER_WORDS.search(cgroup.read_text())
    except OSError:
        return ""
    return f"yes ({found.group(0)} in /proc/1/cgroup)" if found else ""
