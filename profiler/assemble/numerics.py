"""Scans of tensors: the records that GPUs wrote into a process's ring, to rows of ``tensor_stats``.

A record counts when its seal fits (``inject/numerics/records.py``): one that was read while it was written, or written
over, does not. Tickets are given out one by one, so that a number that is missing is a record that was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler import store
from spikeprof.profiler.assemble.bad_operators import operator_row, write_operators
from spikeprof.profiler.assemble.numerics_columns import columns
from spikeprof.profiler.assemble.numerics_scales import Scale, scale_of
from spikeprof.profiler.inject.numerics import records as layout
from spikeprof.profiler.inject.numerics.formats import BY_NUMBER
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote

Ints = npt.NDArray[np.int64]

#: A GPU's clock that is further from the host's than this counts from elsewhere.
_CLOCKS_APART_NS = 5_000_000_000

#: Records that become rows at once.
_ROWS_AT_A_TIME = 1 << 18

#: Modules and reasons that the note names.
_NAMED_MAX = 3
_REASONS_MAX = 8


@dataclass(frozen=True, slots=True)
class Point:
    """What is scanned at one place of the model."""

    module: str
    class_name: str
    role: str


@dataclass
class NumericsEvents:
    """What a process's event file says of its scans."""

    asked: bool = False
    points: dict[int, Point] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)  # points that hand on another one's tensor, and that one
    tokens_first: set[int] = field(default_factory=set)  # models whose leading dimension is not the batch
    rows_unknown: set[int] = field(default_factory=set)  # points in these
    scales: dict[int, Scale] = field(default_factory=dict)  # by point of the codes
    unchecked: list[tuple[str, str]] = field(default_factory=list)  # module, why
    losses: Counter[str] = field(default_factory=Counter)
    operators: list[dict[str, Any]] = field(default_factory=list)  # the first bad one, or why it is not known

    def begun(self, _event: dict[str, Any]) -> None:
        """The watch began."""
        self.asked = True

    def add_points(self, event: dict[str, Any]) -> None:
        """Places that are scanned."""
        for number, root, path, class_name, role, _index, same_as in event["points"]:
            if int(root) in self.tokens_first:
                self.rows_unknown.add(int(number))
            if int(same_as) >= 0:
                self.shared[int(number)] = int(same_as)
            else:
                self.points[int(number)] = Point(str(path), str(class_name), str(role))

    def has_tokens_first(self, event: dict[str, Any]) -> None:
        """A model with modules that were made with ``batch_first=False``."""
        self.tokens_first.add(int(event["root"]))

    def add_scales(self, event: dict[str, Any]) -> None:
        """Scales of quantised tensors."""
        self.scales.update(scale_of(row) for row in event["scales"])

    def add_unchecked(self, event: dict[str, Any]) -> None:
        """Places that are not."""
        self.unchecked += [(str(path), str(why)) for path, why in event["places"]]

    def ended(self, event: dict[str, Any]) -> None:
        """What could not be scanned."""
        self.losses.update({str(why): int(count) for why, count in event["losses"].items()})

    def add_operator(self, event: dict[str, Any]) -> None:
        """The operator that gave the first bad value."""
        self.operators.append(operator_row(event))


#: Of each kind of event, what to do with it.
HANDLERS = {
    "numerics": NumericsEvents.begun,
    "numerics_tokens_first": NumericsEvents.has_tokens_first,
    "numerics_points": NumericsEvents.add_points,
    "numerics_scales": NumericsEvents.add_scales,
    "numerics_unchecked": NumericsEvents.add_unchecked,
    "numerics_ended": NumericsEvents.ended,
    "numerics_operator": NumericsEvents.add_operator,
}


def write_stats(
    folder: Path, processes: Sequence[tuple[int, Path, NumericsEvents]], t0_unix_ns: int
) -> CollectorNote | None:
    """Write ``tensor_stats`` of (rank, stem of the spool, events) of each process; None where none was asked for.

    Raises OutputError.
    """
    asked = [process for process in processes if process[2].asked]
    if not asked:
        return None
    batches, broken, lost = [], 0, 0
    for rank, stem, told in asked:
        for device in _devices(stem.with_name(stem.name + layout.SUFFIX)):
            broken += device.damaged
            lost += device.missing
            batches += [columns(rank, rows, told, t0_unix_ns) for rows in device.rows()]
    spec = TABLES["tensor_stats"].arrow
    table = pa.concat_tables(batches).unify_dictionaries().sort_by("t_ns") if batches else spec.empty_table()
    store.write_table(folder, "tensor_stats", table)
    write_operators(folder, [{"rank": rank, **row} for rank, _, told in asked for row in told.operators])
    losses: Counter[str] = Counter()
    for _, _, told in asked:
        losses.update(told.losses)
    if lost:
        losses["written over before they were read"] += lost
    reason = "; ".join(_reasons([told for _, _, told in asked], losses))
    return CollectorNote(
        state="degraded" if losses or broken else "ok",
        reason=reason,
        records_count=table.num_rows,
        dropped_count=sum(losses.values()),
        set_aside_count=broken,
        set_aside_reasons={"a record that is not whole": broken} if broken else {},
    )


def _reasons(told: Sequence[NumericsEvents], losses: Counter[str]) -> Iterator[str]:
    for why, count in losses.most_common():
        yield f"{count} not scanned: {why}"
    places: dict[str, list[str]] = {}
    for one in told:
        for path, why in one.unchecked:
            paths = places.setdefault(why, [])
            if path not in paths:
                paths.append(path)
    for why, paths in list(places.items())[:_REASONS_MAX]:
        named = ", ".join(path or "the model itself" for path in paths[:_NAMED_MAX])
        more = f" and {len(paths) - _NAMED_MAX} more" if len(paths) > _NAMED_MAX else ""
        yield f"not checked: {named}{more} ({why})"
    if len(places) > _REASONS_MAX:
        yield f"and {len(places) - _REASONS_MAX} more reasons"


@dataclass(frozen=True)
class _Device:
    """What one device wrote: pieces of the file, which records of them count, and how far its clock is ahead."""

    pieces: list[Ints]
    kept: list[npt.NDArray[np.bool_]]
    ahead_ns: int
    damaged: int
    missing: int

    def rows(self) -> Iterator[Ints]:
        """Records that count, times as on the host, many at a time but not all: the file may be large."""
        waiting: list[Ints] = []
        for words, kept in zip(self.pieces, self.kept, strict=True):
            waiting.append(words[kept])
            if sum(map(len, waiting)) >= _ROWS_AT_A_TIME:
                yield self._shifted(waiting)
                waiting = []
        if waiting:
            yield self._shifted(waiting)

    def _shifted(self, pieces: list[Ints]) -> Ints:
        rows = np.concatenate(pieces)
        rows[:, layout.TIME] -= self.ahead_ns
        return rows


def _devices(path: Path) -> Iterator[_Device]:
    """What each device wrote into a file."""
    frames: dict[int, list[tuple[int, Ints]]] = {}
    for device, unix_ns, words in _frames(path):
        frames.setdefault(device, []).append((unix_ns, words))
    for found in frames.values():
        pieces = [words for _, words in found]
        good = [are_whole(words) for words in pieces]
        tickets = np.concatenate([words[fine, layout.TICKET] for words, fine in zip(pieces, good, strict=True)])
        damaged = sum(len(fine) - int(np.count_nonzero(fine)) for fine in good)
        _, first = np.unique(tickets, return_index=True)  # one may have been read twice
        missing = int(tickets.max()) - len(first) - damaged if len(first) else 0
        once = np.zeros(len(tickets), np.bool_)
        once[first] = True
        ahead = _ahead([at for at, _ in found], pieces, good)
        begin = 0
        for fine in good:
            count = int(np.count_nonzero(fine))
            fine[fine] = once[begin : begin + count]
            begin += count
        yield _Device(pieces, good, ahead, damaged, max(missing, 0))


def are_whole(words: Ints) -> npt.NDArray[np.bool_]:
    """Which records [n, words] are whole, and of a format that is known."""
    known = np.isin(layout.format_of(words[:, layout.TAG]), list(BY_NUMBER))
    return np.asarray((np.bitwise_xor.reduce(words, axis=1) == layout.SEAL) & (words[:, layout.TICKET] > 0) & known)


def _ahead(read_ns: list[int], pieces: list[Ints], good: list[npt.NDArray[np.bool_]]) -> int:
    """How far the device's clock is ahead of the host's; 0 where they show the same time."""
    newest = [
        int(words[fine, layout.TIME].max()) - at
        for at, words, fine in zip(read_ns, pieces, good, strict=True)
        if fine.any()
    ]
    ahead = max(newest, default=0)
    return ahead if abs(ahead) > _CLOCKS_APART_NS else 0


def _frames(path: Path) -> Iterator[tuple[int, int, Ints]]:
    """(device, when it was read, records) of each frame; what was cut short ends where it ends."""
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError):  # there is none, or it is empty
        return
    at, header = 0, layout.FRAME_HEADER
    while at + header.size <= len(data):
        magic, size, unix_ns, device = header.unpack(data[at : at + header.size].tobytes())
        at += header.size
        if magic != layout.FRAME_MAGIC:
            return
        whole = min(size, len(data) - at) // layout.RECORD_BYTES * layout.RECORD_BYTES
        words = data[at : at + whole].view("<i8")
        yield int(device), int(unix_ns), words.reshape(-1, layout.RECORD_WORDS)
        at += size
