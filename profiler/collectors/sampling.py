"""Sampling on a thread into bounded memory: what the collectors of gauges and of counters have in common."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote
from spikeprof.profiler.units import NS_PER_MS, NS_PER_S

#: How long ``stop`` waits for a reading in progress: a driver in recovery may not answer.
_JOIN_SECONDS = 2.0


class Unavailable(Exception):
    """There is nothing to sample here; the message says why. Never leaves a collector."""


class Series(ABC):
    """One thing that is read again and again, such as a GPU, and its readings so far.

    ``label`` names it in sentences. ``metrics`` name the values of a reading, in order: fixed from the first
    reading on. ``missing`` maps each metric that should be there and is not to the reason; ``remarks`` tell what
    is rightly not there. ``failed_count`` counts values that a reading should have held.
    """

    def __init__(self, label: str, device: int = 0) -> None:
        self.label = label
        self.device = device
        self.metrics: tuple[str, ...] = ()
        self.missing: dict[str, str] = {}
        self.remarks: list[str] = []
        self.failed_count = 0
        self.times: array[int] = array("q")  # ns since the session's start
        self.values: array[float] = array("d")  # one row of len(metrics) for each of times

    @abstractmethod
    def read(self) -> Sequence[float] | None:
        """One value per metric, NaN where there is none; None when there is nothing to note. Must not raise."""

    def rows(self) -> npt.NDArray[np.float64]:
        """The readings, one row each."""
        width = len(self.metrics)
        count = len(self.times) if width else 0
        return np.array(self.values, np.float64)[: count * width].reshape(count, width)

    def thin(self) -> int:
        """Make one reading of every two; returns how many values went.

        It is the earlier one. What that does not hold is taken from the later one: not every metric is in every
        reading.
        """
        before = len(self.values)
        rows = self.rows()
        kept = rows[::2].copy()
        paired = kept[: len(rows) // 2]
        np.copyto(paired, rows[1::2], where=np.isnan(paired))
        self.times, self.values = self.times[::2], array("d", kept.tobytes())
        return before - len(self.values)


S = TypeVar("S", bound=Series)


class SamplingCollector(ABC, Generic[S]):
    """A collector that reads its series every ``interval_ms`` on a thread, and once more at the end.

    When more than ``max_samples_count`` values are held, every other reading is dropped and the interval doubles,
    so that a run of any length stays bounded (8 bytes a value).
    """

    name = ""

    def __init__(self, interval_ms: int, max_samples_count: int) -> None:
        self.interval_ms = interval_ms
        self.max_samples_count = max_samples_count
        self._series: list[S] = []
        self._dropped_count = 0
        self._set_aside: dict[str, int] = {}
        self._problem = "not started"
        self._state = "off"
        self._cleanup = ExitStack()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._t0_unix_ns = 0

    @abstractmethod
    def _open(self, cleanup: ExitStack) -> list[S]:
        """What to read. ``cleanup`` takes what must be undone at the end. Raises Unavailable."""

    @abstractmethod
    def _tables(self) -> dict[str, pa.Table]:
        """The readings as tables of the schema."""

    def _problems(self) -> list[str]:
        """What else was not measured, and why, one clause each."""
        return []

    def start(self, t0_unix_ns: int) -> None:
        """Find out what can be read, and begin to read it. Never raises."""
        self._t0_unix_ns = t0_unix_ns
        try:
            self._series = self._open(self._cleanup)
        except Exception as error:  # Unavailable, or whatever a library makes of a broken machine
            self._state, self._problem = "refused", str(error)
            self._undo()
            return
        self._state = "ok"
        self._thread = threading.Thread(target=self._run, name=f"spikeprof-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> tuple[CollectorNote, dict[str, pa.Table]]:
        """Read a last time and stop; the note and the tables. Never raises."""
        state, self._state = self._state, "off"
        if self._thread is None:
            return CollectorNote(state, self._problem), {}
        self._problem = "stopped"
        self._stopping.set()
        self._thread.join(_JOIN_SECONDS)
        hung = self._thread.is_alive()
        self._thread = None
        if not hung:  # closing a library under a call in progress can crash
            self._undo()
        try:
            tables = self._tables()
        except Exception as error:  # a hung thread may still append
            return CollectorNote("refused", f"the samples could not be put together: {error}"), {}
        failed_count = sum(s.failed_count for s in self._series)
        if failed_count:
            self._set_aside["reading failed"] = failed_count
        problems = [*self._missing(), *self._problems(), *self._faults(failed_count, hung)]
        note = CollectorNote(
            "degraded" if problems else "ok",
            "; ".join([*problems, *together((remark, s.label) for s in self._series for remark in s.remarks)]),
            records_count=sum(table.num_rows for table in tables.values()),
            dropped_count=self._dropped_count,
            set_aside_count=sum(self._set_aside.values()),
            set_aside_reasons=self._set_aside,
        )
        return note, tables

    def _undo(self) -> None:
        try:
            self._cleanup.close()
        except Exception:  # nothing depends on it, and a lost GPU makes it fail
            return

    def _run(self) -> None:
        due_ns = time.monotonic_ns()
        is_last = False
        while True:
            for series in self._series:
                self._sample(series)
            held_count = sum(len(s.values) for s in self._series)
            if held_count > self.max_samples_count:
                self._dropped_count += sum(s.thin() for s in self._series)
                self.interval_ms *= 2
            if is_last:
                return
            now_ns = time.monotonic_ns()
            # A reading that took longer than the interval skips ticks rather than bunching them.
            due_ns = max(due_ns + self.interval_ms * NS_PER_MS, now_ns)
            is_last = self._stopping.wait((due_ns - now_ns) / NS_PER_S)

    def _sample(self, series: S) -> None:
        t_ns = time.time_ns() - self._t0_unix_ns
        row = series.read()
        if row:
            series.values.extend(row)
            series.times.append(t_ns)

    def _missing(self) -> list[str]:
        """Which metrics are not there, those with the same reason together."""
        clauses = []
        for series in self._series:
            by_reason: dict[str, list[str]] = {}
            for metric, reason in series.missing.items():
                by_reason.setdefault(reason, []).append(metric)
            clauses += [(f"no {', '.join(names)} ({why})", series.label) for why, names in by_reason.items()]
        return together(clauses)

    def _faults(self, failed_count: int, hung: bool) -> list[str]:
        faults = []
        if failed_count:
            faults.append(f"{failed_count} readings failed")
        if self._dropped_count:
            faults.append(
                f"thinned to one sample in {self.interval_ms} ms to hold at most {self.max_samples_count} values"
            )
        if hung:
            faults.append("the driver stopped answering")
        return faults


def together(clauses: Iterable[tuple[str, str]]) -> list[str]:
    """``[("no a", "GPU 0"), ("no a", "GPU 1")]`` as ``["GPU 0, GPU 1: no a"]``."""
    labels: dict[str, list[str]] = {}
    for clause, label in clauses:
        labels.setdefault(clause, []).append(label)
    return [f"{', '.join(dict.fromkeys(of))}: {clause}" for clause, of in labels.items()]


def samples_table(series: Sequence[Series]) -> pa.Table:
    """The table ``samples``: one row per reading of a metric that succeeded, sorted by time."""
    metrics = list(dict.fromkeys(m for s in series for m in s.metrics))
    code_of = {metric: code for code, metric in enumerate(metrics)}
    device, t_ns, codes, values = [], [], [], []
    for s in series:
        rows = s.rows()
        count, width = rows.shape
        device.append(np.full(rows.size, s.device, np.int32))
        t_ns.append(np.repeat(np.array(s.times, np.int64)[:count], width))
        codes.append(np.tile(np.array([code_of[m] for m in s.metrics], np.int32), count))
        values.append(rows.ravel())
    value = np.concatenate(values)
    when = np.concatenate(t_ns)
    order = np.argsort(when, kind="stable")
    order = order[~np.isnan(value[order])]
    metric_codes = pa.array(np.concatenate(codes)[order], pa.int32())
    table = pa.table(
        {
            "device": np.concatenate(device)[order],
            "t_ns": when[order],
            "metric": pa.DictionaryArray.from_arrays(metric_codes, pa.array(metrics, pa.string())),
            "value": value[order],
        }
    )
    return table.cast(TABLES["samples"].arrow)


def joined_samples(tables: Sequence[pa.Table]) -> pa.Table:
    """One table ``samples`` of what several collectors read, sorted by time."""
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks().sort_by("t_ns")
