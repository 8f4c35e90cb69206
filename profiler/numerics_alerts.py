"""Alerts on numerics while a program runs: reads what the targets have scanned so far, and tells of what is new.

An alert is made once for each module, role and rule: of bad values only for the first module of a step that had any,
so that those which merely took them over, also from a step before, do not hide it. The rules are those of the analyzer
``overflow``, by its defaults; of the whole recording it says more. Alerts go to a callback and, one JSON object a line,
into a file of the trace folder that only its owner can read. Losing this reader costs alerts, never a record: it takes
nothing away.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from spikeprof.profiler.assemble.numerics import NumericsEvents, Point, are_whole
from spikeprof.profiler.inject.numerics import records as layout
from spikeprof.profiler.inject.numerics.formats import BY_NUMBER, FLOAT, NIBBLES

Ints = npt.NDArray[np.int64]

#: In the trace folder.
ALERTS_FILE = "alerts.jsonl"

#: Of elements at the end codes, or at the largest number of FP8, from which on they are told: of 8 bits, of KV pages in
#: 8 bits, of 4 bits.
SATURATED_SHARE, SATURATED_SHARE_KV, SATURATED_SHARE_4_BITS = 0.01, 0.05, 0.25

_POLL_SECONDS = 0.5
_READ_BYTES = 8 << 20  # of a file at a time
_STEPS_KEPT = 4096  # with bad values, of a process and device
_ALERTS_MAX = 10_000
_COLUMN = {name: layout.FIRST_STATISTIC + at for at, name in enumerate(layout.STATISTICS)}
_POINT_AND_FORM = (1 << 32) - 1
_UNNAMED = Point("", "", "")


@dataclass(frozen=True, slots=True)
class NumericsAlert:
    """One alert. ``value`` is what was seen, held against ``limit``.

    overflow: Inf and NaN elements, none expected. near-overflow: the largest magnitude against the largest number of
    the format, or, of FP8, the share of elements at that number. int8-saturation: the share of those at the end codes.
    """

    rule: str
    severity: str
    module: str
    class_name: str
    role: str
    dtype: str
    step: int
    pid: int
    device: int  # as the process numbers it; -1 = the CPU
    value: float
    limit: float
    elements_count: int
    seen_unix_ns: int  # when it was read from the device


@dataclass
class _Process:
    """One target's files, read up to somewhere."""

    stem: Path
    told: NumericsEvents = field(default_factory=NumericsEvents)
    events_read: int = 0
    records_read: int = 0
    bad_steps: dict[tuple[int, int], None] = field(default_factory=dict)  # device, step

    def is_first(self, device: int, step: int, order: int) -> bool:
        """Whether no bad value of the step was seen before, nor was brought in by its first scan from one before."""
        if (device, step) in self.bad_steps:
            return False
        brought_in = order == 0 and any(other == device for other, _ in self.bad_steps)
        self.bad_steps[device, step] = None
        if len(self.bad_steps) > _STEPS_KEPT:
            del self.bad_steps[next(iter(self.bad_steps))]
        return not brought_in

    @property
    def pid(self) -> int:
        """From the name of the spool."""
        number = self.stem.name.partition("-")[0]
        return int(number) if number.isdecimal() else 0


class AlertReader:
    """Follows a spool folder. Not for several threads at once."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._processes: dict[str, _Process] = {}
        self._seen: set[tuple[str, str, str]] = set()

    def poll(self) -> list[NumericsAlert]:
        """What is new since the last time, in the order in which it was found."""
        found = []
        for path in sorted(self._spool.glob(f"*{layout.SUFFIX}")):
            process = self._processes.setdefault(path.name, _Process(path.with_suffix("")))
            for device, unix_ns, words in self._frames(process, path):
                for alert in self._alerts(process, device, unix_ns, words):
                    key = (alert.module, alert.role, alert.rule)
                    if key not in self._seen and len(self._seen) < _ALERTS_MAX:
                        self._seen.add(key)
                        found.append(alert)
        return found

    def _frames(self, process: _Process, path: Path) -> Iterator[tuple[int, int, Ints]]:
        """(device, when it was read, records [n, words]) of the whole frames that are new; points are read before."""
        header = layout.FRAME_HEADER
        while data := _read(path, process.records_read):
            self._read_points(process)
            at = 0
            while at + header.size <= len(data):
                magic, size, unix_ns, device = header.unpack_from(data, at)
                end = at + header.size + size
                if magic != layout.FRAME_MAGIC or end > len(data):
                    break
                count = size // layout.RECORD_BYTES * layout.RECORD_WORDS
                words = np.frombuffer(data, "<i8", count, at + header.size).astype(np.int64)
                yield int(device), int(unix_ns), words.reshape(-1, layout.RECORD_WORDS)
                at = end
            process.records_read += at
            if not at:
                return

    def _read_points(self, process: _Process) -> None:
        path = process.stem.with_suffix(".jsonl")
        while data := _read(path, process.events_read):
            whole = data.rfind(b"\n") + 1
            for line in data[:whole].splitlines():
                if b'"numerics_points"' in line:
                    try:
                        process.told.add_points(json.loads(line))
                    except (ValueError, KeyError, TypeError):
                        continue  # a damaged line: its points have no names
            process.events_read += whole
            if not whole:
                return

    def _alerts(self, process: _Process, device: int, unix_ns: int, words: Ints) -> Iterator[NumericsAlert]:
        words = words[are_whole(words)]
        words = words[np.lexsort((layout.order_of(words[:, layout.TAG]), words[:, layout.STEP]))]
        tag, step = words[:, layout.TAG], words[:, layout.STEP]
        forms = layout.format_of(tag)
        bad = words[:, _COLUMN["nan"]] + words[:, _COLUMN["inf"]]
        spoilt = np.flatnonzero(bad > 0)
        firsts = spoilt[np.unique(step[spoilt], return_index=True)[1]]
        pages = [number for number, point in process.told.points.items() if point.role == "kv"]
        limits = np.maximum(_SHARES[forms], np.where(np.isin(layout.point_of(tag), pages), SATURATED_SHARE_KV, 0.0))
        shares = words[:, _COLUMN["saturated"]] / np.maximum(words[:, layout.ELEMENTS], 1)
        near = np.flatnonzero((words[:, _COLUMN["amax"]] > _NEAR_BITS[forms]) | (shares >= limits))
        nears = near[np.unique(tag[near] & _POINT_AND_FORM, return_index=True)[1]]
        for row in np.sort(np.concatenate([firsts, nears])).tolist():
            form = BY_NUMBER[int(forms[row])]
            point = process.told.points.get(layout.point_of(int(tag[row])), _UNNAMED)
            if not bad[row]:
                severity = "warning"
                rule = "near-overflow" if form.kind == FLOAT else "int8-saturation"
                value, limit = float(shares[row]), float(limits[row])
                if form.item_bytes > 1:
                    value, limit = form.value(int(words[row, _COLUMN["amax"]])) or 0.0, form.limit
            elif process.is_first(device, int(step[row]), int(layout.order_of(tag[row]))):
                rule, severity, value, limit = "overflow", "critical", float(bad[row]), 0.0
            else:
                continue
            yield NumericsAlert(
                rule, severity, point.module, point.class_name, point.role, form.name, int(step[row]), process.pid,
                device, value, limit, int(words[row, layout.ELEMENTS]), unix_ns,
            )  # fmt: skip


def _limits() -> tuple[Ints, npt.NDArray[np.float64]]:
    """By number of format: the bits of the magnitude that can double once, and the limit of the share."""
    bits, shares = np.full(256, np.iinfo(np.int64).max), np.full(256, np.inf)
    for number, form in BY_NUMBER.items():
        if form.item_bytes > 1:  # 8 bits and less are scaled to fill the format
            bits[number] = form.largest - (1 << form.mantissa_bits)
        else:
            shares[number] = SATURATED_SHARE_4_BITS if form.kind == NIBBLES else SATURATED_SHARE
    return bits, shares


_NEAR_BITS, _SHARES = _limits()


def _read(path: Path, offset: int) -> bytes:
    """Some bytes of a file from an offset on; nothing where there are none, or no file."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_READ_BYTES)
    except OSError:
        return b""


class Alerting:
    """Polls a reader in a thread of its own from ``start`` to ``stop``, tells ``alerted``, and writes the file."""

    def __init__(self, spool: Path, file: Path, alerted: Callable[[NumericsAlert], None]) -> None:
        self._reader, self._file, self._alerted = AlertReader(spool), file, alerted
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="numerics-alerts", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Read the rest: call it when the targets have ended. Nothing where it was not started."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_POLL_SECONDS)
            try:
                found = self._reader.poll()
                self._write(found)
                for alert in found:
                    self._alerted(alert)
            except Exception:  # whatever is wrong with the files: the recording goes on, and the trace will tell
                return

    def _write(self, found: list[NumericsAlert]) -> None:
        if found:
            lines = b"".join(msgspec.json.encode(alert) + b"\n" for alert in found)
            with os.fdopen(
                os.open(self._file, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab"
            ) as file:
                file.write(lines)
