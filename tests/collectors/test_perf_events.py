from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.profiler.collectors import perf_events
from spikeprof.profiler.collectors.perf_events import (
    EVENTS,
    Event,
    PerfEventAttr,
    PerfEventsCollector,
    cache_config,
    cpu_cache_table,
    open_events,
)
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote

T0 = 1_700_000_000_000_000_000
NAN = float("nan")


def machine(root: Path, paranoid: str = "2", seccomp: str = "0", source: str = "") -> Path:
    files = {"proc/sys/kernel/perf_event_paranoid": paranoid, "proc/self/status": f"Name:\tx\nSeccomp:\t{seccomp}\n"}
    if source:
        files[f"sys/bus/event_source/devices/{source}/type"] = "4"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def refusing(code: int) -> Callable[[PerfEventAttr], int]:
    def system_call(attr: PerfEventAttr) -> int:
        raise OSError(code, os.strerror(code))

    return system_call


@pytest.mark.parametrize(
    ("cache", "operation", "result", "config"),
    [
        ("l1d", "read", "access", 0x00000),
        ("l1d", "read", "miss", 0x10000),
        ("l1i", "read", "miss", 0x10001),
        ("llc", "read", "access", 0x00002),
        ("llc", "read", "miss", 0x10002),
        ("dtlb", "write", "miss", 0x10103),
        ("itlb", "read", "access", 0x00004),
        ("bpu", "read", "miss", 0x10005),
        ("node", "prefetch", "miss", 0x10206),
    ],
)
def test_cache_events_are_encoded_as_the_kernel_wants(cache: str, operation: str, result: str, config: int) -> None:
    assert cache_config(cache, operation, result) == config


def test_the_events_are_those_of_the_table() -> None:
    assert [(e.metric, e.type, e.config) for e in EVENTS] == [
        ("l1d_read_count", 3, 0x00000),
        ("l1d_read_miss_count", 3, 0x10000),
        ("llc_read_count", 3, 0x00002),
        ("llc_read_miss_count", 3, 0x10002),
    ]


_C = r"""
#include <linux/perf_event.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#define AT(field) (unsigned)offsetof(struct perf_event_attr, field)
int main(void) {
    struct perf_event_attr a;
    unsigned long long flags;
    memset(&a, 0, sizeof a);
    a.disabled = a.inherit = a.enable_on_exec = 1;
    memcpy(&flags, (char *)&a + offsetof(struct perf_event_attr, read_format) + 8, 8);
    printf("%d %d %d %d %d\n", PERF_ATTR_SIZE_VER0, PERF_TYPE_HW_CACHE,
           (int)__NR_perf_event_open, PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING,
           PERF_FLAG_FD_CLOEXEC);
    printf("%u %u %u %u %u %u %u %u %u\n", AT(type), AT(size), AT(config), AT(sample_period), AT(sample_type),
           AT(read_format), AT(wakeup_events), AT(bp_type), AT(config1));
    printf("%llu", flags);
    a.exclude_kernel = 1;
    memcpy(&flags, (char *)&a + offsetof(struct perf_event_attr, read_format) + 8, 8);
    printf(" %llu\n", flags);
    return 0;
}
"""


def test_layout_and_numbers_are_those_of_the_kernel_header(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or not Path("/usr/include/linux/perf_event.h").exists():
        pytest.skip("no C compiler or no linux/perf_event.h here")
    (tmp_path / "layout.c").write_text(_C)
    subprocess.run([compiler, "-o", str(tmp_path / "layout"), str(tmp_path / "layout.c")], check=True)
    told = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout
    numbers, offsets, flags = ([int(word) for word in line.split()] for line in told.splitlines())
    ours = perf_events
    assert numbers == [
        struct.calcsize("IIQQQQQIIQ"),
        ours.TYPE_HW_CACHE,
        ours.SYSCALL_NUMBERS[platform.machine()],
        ours.TIME_ENABLED | ours.TIME_RUNNING,
        ours._CLOSE_ON_EXEC,
    ]
    names = [name for name, *_ in PerfEventAttr._fields_ if name != "flags"]
    assert offsets == [getattr(PerfEventAttr, name).offset for name in names]
    switched = ours.DISABLED | ours.INHERIT | ours.ENABLE_ON_EXEC
    assert flags == [switched, switched | ours.EXCLUDE_KERNEL]


def test_what_the_kernel_is_asked() -> None:
    asked: list[tuple[int, ...]] = []

    def system_call(attr: PerfEventAttr) -> int:
        asked.append((attr.type, attr.size, attr.config, attr.sample_period, attr.sample_type, attr.read_format))
        assert attr.flags == 0b1000000000011  # disabled, inherit, enable_on_exec
        return 7

    opened = open_events(system_call)
    assert asked == [(3, 64, config, 0, 0, 3) for config in (0x00000, 0x10000, 0x00002, 0x10002)]
    assert (list(opened.descriptors), opened.refused, opened.is_user_only) == ([e.metric for e in EVENTS], {}, False)


def test_a_user_who_may_not_count_the_kernel_counts_his_own_code(tmp_path: Path) -> None:
    asked: list[int] = []

    def system_call(attr: PerfEventAttr) -> int:
        asked.append(attr.flags & perf_events.EXCLUDE_KERNEL)
        if not asked[-1]:
            raise OSError(errno.EACCES, "Permission denied")
        return os.open(os.devnull, os.O_RDONLY)

    collector = PerfEventsCollector(system_call=system_call, root=machine(tmp_path))
    collector.start(T0)
    note, _ = collector.stop()
    assert asked == [0, 32, 32, 32, 32]
    assert "CPU caches: the kernel's code not counted (kernel.perf_event_paranoid is 2)" in note.reason


@pytest.mark.parametrize(
    ("code", "paranoid", "seccomp", "source", "why"),
    [
        (
            errno.EACCES,
            "3",
            "0",
            "cpu",
            "kernel.perf_event_paranoid is 3, which refuses them to this user; to unlock: sysc",
        ),
        (
            errno.EPERM,
            "4",
            "2",
            "cpu",
            "kernel.perf_event_paranoid is 4, which refuses them to this user; to unlock: sysc",
        ),
        (
            errno.EPERM,
            "2",
            "2",
            "cpu",
            "a seccomp filter, as containers have, refuses perf_event_open; to unlock: start",
        ),
        (
            errno.EPERM,
            "1",
            "0",
            "cpu",
            "refused to this user although kernel.perf_event_paranoid is 1; to unlock: a rule",
        ),
        (errno.ENOENT, "2", "0", "", "this machine shows no hardware events of its CPUs, as is usual in a virtual mac"),
        (errno.EOPNOTSUPP, "2", "0", "software", "this machine shows no hardware events of its CPUs, as is usual"),
        (errno.ENOENT, "2", "0", "cpu_core", "this CPU counts no such event"),
        (errno.EINVAL, "2", "0", "armv8_pmuv3_0", "this CPU counts no such event"),
        (
            errno.ENOSYS,
            "2",
            "2",
            "cpu",
            "the container or sandbox has no perf_event_open; to unlock: start the program",
        ),
        (errno.ENOSYS, "", "0", "cpu", "this kernel has no perf events; to unlock: a kernel with CONFIG_PERF_EVENTS"),
        (errno.EMFILE, "2", "0", "cpu", "Too many open files"),
    ],
)
def test_a_refusal_says_why_and_what_would_unlock_it(
    tmp_path: Path, code: int, paranoid: str, seccomp: str, source: str, why: str
) -> None:
    collector = PerfEventsCollector(system_call=refusing(code), root=machine(tmp_path, paranoid, seccomp, source))
    collector.start(T0)
    note, tables = collector.stop()
    assert (note.state, tables) == ("refused", {})
    assert note.reason.startswith(why)


def test_another_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    collector = PerfEventsCollector()
    collector.start(T0)
    assert collector.stop() == (
        CollectorNote("refused", "spikeprof counts them on Linux on x86_64 and aarch64 only"),
        {},
    )


class Recorded:
    """Counters whose readings are known: of the i-th, value 100 i, enabled 1000 i, running 500 i."""

    def __init__(self, folder: Path, refused: tuple[int, ...] = ()) -> None:
        self.path = folder / "readings"
        self.path.write_bytes(b"".join(struct.pack("=QQQ", 100 * i, 1000 * i, 500 * i) for i in range(20_000)))
        self.refused = refused
        self.opened: list[int] = []

    def __call__(self, attr: PerfEventAttr) -> int:
        if attr.config in self.refused:
            raise OSError(errno.ENOENT, "No such file or directory")
        self.opened.append(os.open(self.path, os.O_RDONLY))
        return self.opened[-1]


def read_until(collector: PerfEventsCollector, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(collector._series[0].times) < count and time.monotonic() < deadline:
        time.sleep(0.001)


def test_differences_between_readings_are_scaled_and_rows_sorted(tmp_path: Path) -> None:
    kernel = Recorded(tmp_path)
    collector = PerfEventsCollector(interval_ms=1, system_call=kernel)
    began_ns = time.time_ns()
    collector.start(began_ns)
    read_until(collector, 4)
    note, tables = collector.stop()
    rows = tables["cpu_cache"].to_pylist()
    assert tables["cpu_cache"].schema == TABLES["cpu_cache"].arrow
    assert {r["value_count"] for r in rows} == {200.0}  # 100 in half of the time
    assert {r["counted_share"] for r in rows} == {0.5}
    assert [r["start_ns"] for r in rows] == sorted(r["start_ns"] for r in rows)
    one = [r for r in rows if r["metric"] == "llc_read_miss_count"]
    assert len(one) >= 4  # three between four readings, and a last one
    assert [r["end_ns"] for r in one[:-1]] == [r["start_ns"] for r in one[1:]]
    assert 0 <= one[0]["start_ns"] < one[-1]["end_ns"] <= time.time_ns() - began_ns
    assert (note.state, note.reason, note.records_count) == ("ok", "", len(rows))
    for descriptor in kernel.opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_events_that_the_cpu_lacks_do_not_take_the_others_with_them(tmp_path: Path) -> None:
    kernel = Recorded(tmp_path, refused=(0x00002, 0x10002))
    collector = PerfEventsCollector(interval_ms=1, system_call=kernel, root=machine(tmp_path / "root", source="cpu"))
    collector.start(T0)
    read_until(collector, 2)
    note, tables = collector.stop()
    assert note.state == "degraded"
    assert note.reason == "CPU caches: no llc_read_count, llc_read_miss_count (this CPU counts no such event)"
    assert set(tables["cpu_cache"]["metric"].to_pylist()) == {"l1d_read_count", "l1d_read_miss_count"}


def test_memory_is_bounded_and_thinning_loses_no_count(tmp_path: Path) -> None:
    collector = PerfEventsCollector(interval_ms=1, max_samples_count=12 * 8, system_call=Recorded(tmp_path))
    collector.start(T0)
    deadline = time.monotonic() + 30
    while collector.interval_ms < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    note, tables = collector.stop()
    assert "thinned to one sample in 4 ms" in note.reason
    last = int(collector._series[0].rows()[-1, 0])
    counted = [r["value_count"] for r in tables["cpu_cache"].to_pylist() if r["metric"] == "l1d_read_count"]
    assert len(counted) <= 9
    assert sum(counted) == 2 * last


def test_a_reading_that_fails_leaves_a_longer_interval() -> None:
    t_ns = np.array([0, 10, 20, 30])
    totals = np.array([[0, 0, 0], [5, 4, 4], [NAN] * 3, [11, 10, 10]], float)
    table, unseen_count = cpu_cache_table(t_ns, totals[:, None], ("l1d_read_count",))
    assert [(r["start_ns"], r["end_ns"], r["value_count"]) for r in table.to_pylist()] == [(0, 10, 5.0), (10, 30, 6.0)]
    assert unseen_count == 0


def test_an_interval_without_a_turn_is_not_measured_and_one_without_work_is_zero() -> None:
    t_ns = np.array([0, 10, 20, 30])
    totals = np.array([[0, 0, 0], [8, 8, 2], [8, 16, 2], [8, 16, 2]], float)
    table, unseen_count = cpu_cache_table(t_ns, totals[:, None], ("llc_read_count",))
    assert [tuple(r.values()) for r in table.to_pylist()] == [
        (0, 10, "llc_read_count", 32.0, 0.25),
        (20, 30, "llc_read_count", 0.0, 1.0),
    ]
    assert unseen_count == 1


def test_a_clock_that_was_set_back_makes_no_interval() -> None:
    t_ns = np.array([0, 100, 50, 110])
    totals = np.array([[0, 0, 0], [1, 1, 1], [2, 2, 2], [4, 4, 4]], float)
    table, _ = cpu_cache_table(t_ns, totals[:, None], ("llc_read_count",))
    assert [(r["start_ns"], r["end_ns"], r["value_count"]) for r in table.to_pylist()] == [
        (0, 100, 1.0),
        (100, 110, 3.0),
    ]


def test_no_readings_make_an_empty_table() -> None:
    table, unseen_count = cpu_cache_table(np.empty(0, np.int64), np.empty((0, 2, 3)), ("a_count", "b_count"))
    assert (table.num_rows, table.schema, unseen_count) == (0, TABLES["cpu_cache"].arrow, 0)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**9), st.integers(1, 4)), min_size=1, max_size=40))
def test_counts_are_conserved_when_the_share_is_known(steps: list[tuple[int, int, int]]) -> None:
    # Each interval: the true count, its CPU time, and one turn of ``every`` (the counter saw that part of both).
    seen = np.array([(count, every * time_ns, time_ns) for count, time_ns, every in steps], float)
    totals = np.concatenate([np.zeros((1, 3)), seen.cumsum(axis=0)])
    table, unseen_count = cpu_cache_table(np.arange(len(totals)), totals[:, None], ("l1d_read_count",))
    rows = table.to_pylist()
    assert unseen_count == 0
    for row, (count, _, every) in zip(rows, steps, strict=True):
        assert row["value_count"] == pytest.approx(count * every)
        assert row["counted_share"] == pytest.approx(1 / every)


_BUSY = """
import subprocess, sys, threading
def work():
    for _ in range(1_000_000): pass
thread = threading.Thread(target=work)
thread.start(); work(); thread.join()
subprocess.run([sys.executable, "-c", "for _ in range(1_000_000): pass"])
"""


@pytest.mark.parametrize("program", [_BUSY, "pass"])
def test_the_kernel_counts_a_program_with_its_threads_and_children(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    # The CPU's own counters may not exist here; the kernel's clock of CPU time goes the same way.
    software, task_clock = 1, 1
    monkeypatch.setattr(perf_events, "EVENTS", (Event("l1d_read_count", software, task_clock),))
    collector = PerfEventsCollector(interval_ms=5)
    collector.start(time.time_ns())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(200_000):  # our own work must not be counted
        pass
    note, tables = collector.stop()
    if note.state == "refused":
        pytest.skip(f"no perf events at all here: {note.reason}")
    used_ns = 1e9 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    table = tables["cpu_cache"]
    counted_ns = sum(table["value_count"].to_pylist())
    # What the child did between fork and exec is its own CPU time, but not the program's.
    assert counted_ns == pytest.approx(used_ns, rel=0.05, abs=5e6)
    assert set(table["counted_share"].to_pylist()) == {1.0}


def test_here_it_counts_or_says_why_not() -> None:
    collector = PerfEventsCollector(interval_ms=5)
    collector.start(time.time_ns())
    subprocess.run([sys.executable, "-c", "sum(range(10**5))"], check=True)
    note, tables = collector.stop()
    if note.state == "refused":
        assert note.reason
        assert tables == {}
        return
    counts: dict[str, float] = {}
    for row in tables["cpu_cache"].to_pylist():
        counts[row["metric"]] = counts.get(row["metric"], 0.0) + row["value_count"]
        assert 0 < row["counted_share"] <= 1
    if {"l1d_read_count", "l1d_read_miss_count"} <= counts.keys():
        assert 0 < counts["l1d_read_miss_count"] < counts["l1d_read_count"]
