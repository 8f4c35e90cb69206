"""Linux perf events: how often the program's CPU code read the first- and last-level cache, and missed.

The one adapter for ``perf_event_open(2)``, through ctypes. The counters are opened on the thread that starts the
program, switched off, to be inherited by what that thread starts and to be switched on by ``exec``. So the program is
counted from its first instruction with all its threads and children, however short it runs, and we are not. Not
counted: what something else starts for it (a container, a service), and set-user-id programs.

There is no portable event of the second-level cache: the kernel's list goes from L1 to the last level.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler.collectors.sampling import SamplingCollector, Series, Unavailable
from spikeprof.profiler.schema import TABLES

ROOT = Path("/")

#: ``__NR_perf_event_open`` by machine.
SYSCALL_NUMBERS = {"x86_64": 298, "aarch64": 241}

#: ``linux/perf_event.h``: the type of cache events, and the three parts of their ``config``.
TYPE_HW_CACHE = 3
CACHES = {"l1d": 0, "l1i": 1, "llc": 2, "dtlb": 3, "itlb": 4, "bpu": 5, "node": 6}
OPERATIONS = {"read": 0, "write": 1, "prefetch": 2}
RESULTS = {"access": 0, "miss": 1}

#: Bits of ``perf_event_attr``'s flags, of its ``read_format``, and of the system call's own flags.
DISABLED, INHERIT, EXCLUDE_KERNEL, ENABLE_ON_EXEC = 1 << 0, 1 << 1, 1 << 5, 1 << 12
TIME_ENABLED, TIME_RUNNING = 1 << 0, 1 << 1
_CLOSE_ON_EXEC = 1 << 3

#: How the kernel names the sources of hardware events of CPUs: cpu, cpu_core, armv8_pmuv3_0.
_CPU_SOURCES = ("cpu", "armv8")

_READING = struct.Struct("=QQQ")  # value, time enabled, time running


class PerfEventAttr(ctypes.Structure):
    """``struct perf_event_attr`` as first published (PERF_ATTR_SIZE_VER0, 64 bytes): every kernel takes it."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup_events", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32),
        ("config1", ctypes.c_uint64),
    )


def cache_config(cache: str, operation: str, result: str) -> int:
    """The ``config`` of a cache event: cache in bits 0-7, operation in 8-15, result in 16-23."""
    return CACHES[cache] | OPERATIONS[operation] << 8 | RESULTS[result] << 16


@dataclass(frozen=True, slots=True)
class Event:
    """One counter: its name in the table ``cpu_cache`` and the kernel's type and config."""

    metric: str
    type: int
    config: int


EVENTS = (
    Event("l1d_read_count", TYPE_HW_CACHE, cache_config("l1d", "read", "access")),
    Event("l1d_read_miss_count", TYPE_HW_CACHE, cache_config("l1d", "read", "miss")),
    Event("llc_read_count", TYPE_HW_CACHE, cache_config("llc", "read", "access")),
    Event("llc_read_miss_count", TYPE_HW_CACHE, cache_config("llc", "read", "miss")),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an event cannot be counted, and what would unlock it (empty: nothing that is known)."""

    why: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.why}; to unlock: {self.fix}" if self.fix else self.why


@dataclass(frozen=True, slots=True)
class Opened:
    """The file descriptors of the events that can be counted, by metric, and why the others cannot."""

    descriptors: dict[str, int]
    refused: dict[str, Refusal]
    is_user_only: bool  # the kernel's own code is not counted

    def close(self) -> None:
        """Stop counting."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)


SystemCall = Callable[[PerfEventAttr], int]


def perf_event_open(attr: PerfEventAttr) -> int:
    """The system call, for the calling thread on any CPU; returns a file descriptor. Raises OSError."""
    number = SYSCALL_NUMBERS.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    libc = ctypes.CDLL(None, use_errno=True)
    this_thread, any_cpu, no_group = ctypes.c_int(0), ctypes.c_int(-1), ctypes.c_int(-1)
    descriptor: int = libc.syscall(
        ctypes.c_long(number), ctypes.byref(attr), this_thread, any_cpu, no_group, ctypes.c_ulong(_CLOSE_ON_EXEC)
    )
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor


def open_events(system_call: SystemCall = perf_event_open, root: Path = ROOT) -> Opened:
    """Open every event for what the calling thread starts, with the kernel's code where this user may. Never raises."""
    descriptors: dict[str, int] = {}
    refused: dict[str, Refusal] = {}
    excluded = 0
    for event in EVENTS:
        try:
            try:
                descriptors[event.metric] = system_call(_attr(event, excluded))
            except PermissionError:
                excluded = EXCLUDE_KERNEL
                descriptors[event.metric] = system_call(_attr(event, excluded))
        except OSError as error:
            refused[event.metric] = refusal(error.errno or 0, root)
    return Opened(descriptors, refused, bool(excluded))


def _attr(event: Event, excluded: int) -> PerfEventAttr:
    return PerfEventAttr(
        type=event.type,
        size=ctypes.sizeof(PerfEventAttr),
        config=event.config,
        read_format=TIME_ENABLED | TIME_RUNNING,
        flags=DISABLED | INHERIT | ENABLE_ON_EXEC | excluded,
    )


def paranoid_level(root: Path = ROOT) -> int | None:
    """``kernel.perf_event_paranoid``, None where the kernel has no perf events."""
    try:
        return int((root / "proc/sys/kernel/perf_event_paranoid").read_text())
    except (OSError, ValueError):
        return None


def refusal(code: int, root: Path = ROOT) -> Refusal:
    """What an error of ``perf_event_open`` means here (``man 2 perf_event_open``, ERRORS)."""
    if code in (errno.EACCES, errno.EPERM):
        return _forbidden(root)
    if code == errno.ENOSYS:
        return _absent(root)
    if code not in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL):
        return Refusal(os.strerror(code))
    sources = root / "sys/bus/event_source/devices"
    if any(path.name.startswith(_CPU_SOURCES) for path in (sources.iterdir() if sources.is_dir() else ())):
        return Refusal("this CPU counts no such event")
    return Refusal(
        "this machine shows no hardware events of its CPUs, as is usual in a virtual machine",
        "record on the host, or let the hypervisor pass the CPU's counters through",
    )


def _forbidden(root: Path) -> Refusal:
    level = paranoid_level(root)
    if level is not None and level > 2:
        fix = "sysctl kernel.perf_event_paranoid=2, or the capability CAP_PERFMON"
        return Refusal(f"kernel.perf_event_paranoid is {level}, which refuses them to this user", fix)
    if _is_filtered(root):
        fix = "start the container with --cap-add PERFMON, or with a seccomp profile that allows perf_event_open"
        return Refusal("a seccomp filter, as containers have, refuses perf_event_open", fix)
    fix = "a rule of the security module (SELinux, AppArmor) that allows perf_event_open, or CAP_PERFMON"
    return Refusal(f"refused to this user although kernel.perf_event_paranoid is {level}", fix)


def _absent(root: Path) -> Refusal:
    if platform.machine() not in SYSCALL_NUMBERS or not sys.platform.startswith("linux"):
        return Refusal(f"spikeprof counts them on Linux on {' and '.join(SYSCALL_NUMBERS)} only")
    if paranoid_level(root) is None:
        return Refusal("this kernel has no perf events", "a kernel with CONFIG_PERF_EVENTS")
    return Refusal("the container or sandbox has no perf_event_open", "start the program outside of it")


def _is_filtered(root: Path) -> bool:
    """Whether a seccomp filter stands between this process and the kernel."""
    try:
        return re.search(r"^Seccomp:\s*2", (root / "proc/self/status").read_text(), re.MULTILINE) is not None
    except OSError:
        return False


class _CountSeries(Series):
    """The counters as the kernel keeps them: value, time enabled and time running since the start, for each event."""

    def __init__(self, opened: Opened, root: Path) -> None:
        super().__init__("CPU caches")
        self._descriptors = tuple(opened.descriptors.values())
        self.events = tuple(opened.descriptors)
        self.metrics = tuple(f"{event} {part}" for event in self.events for part in ("value", "enabled", "running"))
        self.missing = {metric: str(why) for metric, why in opened.refused.items()}
        if opened.is_user_only:
            self.remarks.append(f"the kernel's code not counted (kernel.perf_event_paranoid is {paranoid_level(root)})")

    def read(self) -> list[float]:
        row: list[float] = []
        for descriptor in self._descriptors:
            try:
                row.extend(_READING.unpack(os.read(descriptor, _READING.size)))
            except (OSError, struct.error):
                row.extend([np.nan] * 3)
                self.failed_count += 1
        return row


class PerfEventsCollector(SamplingCollector[_CountSeries]):
    """Counts CPU cache reads and misses of the program, all its processes and threads together.

    ``start`` must be called on the thread that will start the program, before it does; whatever else that thread
    starts until ``stop`` is counted, too. ``interval_ms`` is the time between readings (see SamplingCollector); each
    costs an interrupt per event on each CPU that runs one of the program's threads. ``system_call`` and ``root``
    replace the kernel in tests.
    """

    name = "perf_events"

    def __init__(
        self,
        interval_ms: int = 100,
        max_samples_count: int = 2_000_000,
        system_call: SystemCall = perf_event_open,
        root: Path = ROOT,
    ) -> None:
        super().__init__(interval_ms, max_samples_count)
        self._system_call = system_call
        self._root = root

    def _open(self, cleanup: ExitStack) -> list[_CountSeries]:
        opened = open_events(self._system_call, self._root)
        cleanup.callback(opened.close)
        if not opened.descriptors:
            raise Unavailable("; ".join(dict.fromkeys(map(str, opened.refused.values()))))
        return [_CountSeries(opened, self._root)]

    def _tables(self) -> dict[str, pa.Table]:
        series = self._series[0]
        rows = series.rows()
        table, unseen_count = cpu_cache_table(
            np.array(series.times, np.int64)[: len(rows)], rows.reshape(len(rows), len(series.events), 3), series.events
        )
        if unseen_count:
            self._set_aside["interval in which the counter had no turn"] = unseen_count
        return {"cpu_cache": table}


def cpu_cache_table(
    t_ns: npt.NDArray[np.int64], readings: npt.NDArray[np.float64], metrics: tuple[str, ...]
) -> tuple[pa.Table, int]:
    """The table ``cpu_cache`` from readings of running totals, and how many intervals were never counted.

    ``readings`` is (time, metric, [value, time enabled, time running]), with NaN where a reading failed. What was
    counted while an event had its turn is scaled to the whole of the program's CPU time: × enabled ÷ running, as
    ``man 2 perf_event_open`` has it. An interval in which the program ran, but not the counter, has no row.
    """
    parts: dict[str, list[npt.NDArray[np.generic]]] = {c.name: [] for c in TABLES["cpu_cache"].columns}
    # A clock that was set back gives no interval; what was counted meanwhile falls into the next one.
    ahead = np.ones(len(t_ns), bool)
    ahead[1:] = t_ns[1:] > np.maximum.accumulate(t_ns)[:-1]
    unseen_count = 0
    for code, totals in enumerate(np.moveaxis(readings, 1, 0)):
        sound = ahead & ~np.isnan(totals[:, 0])
        count, enabled, running = np.diff(totals[sound], axis=0).T
        seen = (running > 0) | (enabled == 0)
        unseen_count += int((~seen).sum())
        share = np.divide(running, enabled, out=np.ones_like(running), where=enabled > 0)[seen]
        parts["start_ns"].append(t_ns[sound][:-1][seen])
        parts["end_ns"].append(t_ns[sound][1:][seen])
        parts["metric"].append(np.full(int(seen.sum()), code, np.int32))
        parts["value_count"].append(count[seen] / share)
        parts["counted_share"].append(np.minimum(share, 1.0))
    columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    order = np.argsort(columns["start_ns"], kind="stable")
    arrays = {name: pa.array(column[order]) for name, column in columns.items()}
    arrays["metric"] = pa.DictionaryArray.from_arrays(arrays["metric"], pa.array(metrics, pa.string()))
    return pa.table(arrays).cast(TABLES["cpu_cache"].arrow), unseen_count
