"""The tables and metrics of the analyzer ``fusion-coverage``: columns of plain values, None = not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from spikeprof.analyzers.base import Metric
from spikeprof.analyzers.derived.cells import finite, numbers
from spikeprof.analyzers.derived.counters import Floats
from spikeprof.analyzers.derived.fusion_bytes import SOURCES, Traffic, traffic
from spikeprof.analyzers.derived.fusion_chains import Chain, spared_bytes
from spikeprof.analyzers.derived.intervals import Bools, Ints, ints
from spikeprof.analyzers.derived.kernel_families import VERDICTS, Work, of_operator, work_of
from spikeprof.analyzers.derived.kernel_origins import kernel_origins, operators
from spikeprof.analyzers.derived.launch_shapes import Launches, launches
from spikeprof.profiler.trace import Trace

Columns = dict[str, list[Any]]

NO_BYTES = "neither DRAM counters nor operators with the shapes of their inputs were recorded"
FEW_BYTES = "bytes are known of too small a part of these kernels' time"
NOTHING = "no kernel is of a kind that fusing is about"


@dataclass(frozen=True, slots=True)
class Kernels:
    """All classes of launches with their work and traffic; ``owners``: the row of ``origins`` of each kernel, or -1."""

    of: Launches
    work: list[Work]
    moved: Traffic
    owners: Ints

    @property
    def fused(self) -> Bools:
        """The classes that do the work of several nodes."""
        return np.array([one.is_fused for one in self.work], bool)

    @property
    def fusible(self) -> Bools:
        """Those, and the classes of a kind that fusing is about."""
        return np.array([one.is_fusible for one in self.work], bool)

    @property
    def moved_bytes(self) -> Floats:
        """Read and written by all launches of each class; NaN = unknown."""
        return np.asarray(self.moved.both * self.of.launches, np.float64)


def kernels(trace: Trace) -> Kernels:
    """Needs ``kernels``; uses counters, ``origins`` and ``kernel_owners`` where present."""
    of = launches(trace)
    owners, _ = kernel_origins(trace)
    work = _work(trace, of, owners)
    return Kernels(of, work, traffic(trace, of, owners, work), owners)


def _work(trace: Trace, of: Launches, owners: Ints) -> list[Work]:
    """By the kernel's name; where that says nothing, by the operator that launched it."""
    work = [work_of(name) for name in of.names]
    rows = np.flatnonzero((owners >= 0) & (of.of_kernel >= 0))
    if not len(rows):
        return work
    names = operators(trace)
    known = np.array([bool(name) for name in names], bool)
    rows = rows[known[owners[rows]]]
    for one, row in zip(*(part.tolist() for part in np.unique(of.of_kernel[rows], return_index=True)), strict=True):
        name = names[owners[rows[row]]]
        if work[one].verdict == "unknown":
            work[one] = of_operator(name)
        elif not work[one].is_fused and name.startswith("aten::"):
            work[one] = replace(work[one], operators=(name.removeprefix("aten::"),))
    return work


# ---------------------------------------------------------------- coverage


class Amounts(NamedTuple):
    """Sums over some kernels: time, launches, bytes (None = not known), the time of those whose bytes are known."""

    time_ns: int
    launches: int
    moved_bytes: float | None
    known_ns: int


def amounts(of: Kernels, which: Bools) -> Amounts:
    """Of the classes that are chosen."""
    known = which & of.moved.known
    return Amounts(
        int(of.of.total_ns[which].sum()),
        int(of.of.launches[which].sum()),
        float(of.moved_bytes[known].sum()) if known.any() else None,
        int(of.of.total_ns[known].sum()),
    )


def metrics(of: Kernels, chains_count: int, chained_ns: int, min_known_share: float) -> tuple[Metric, ...]:
    """Coverage over the kernels that fusing is about, which is the headline, and over all."""
    return tuple(_metrics(of, chains_count, chained_ns, min_known_share))


def _metrics(of: Kernels, chains_count: int, chained_ns: int, min_known_share: float) -> Iterator[Metric]:
    everything = np.ones(len(of.work), bool)
    whole = amounts(of, everything)
    for name, base in (("fused", of.fusible), ("fused_of_all", everything)):
        part, total = amounts(of, of.fused & base), amounts(of, base)
        yield _share(f"{name}_time_share", part.time_ns, total.time_ns)
        yield _share(f"{name}_launches_share", part.launches, total.launches)
        yield _bytes_share(f"{name}_bytes_share", part, total, min_known_share)
    yield _share("fusible_time_share", amounts(of, of.fusible).time_ns, whole.time_ns)
    unknown = np.array([one.verdict == "unknown" for one in of.work], bool)
    yield _share("unknown_time_share", amounts(of, unknown).time_ns, whole.time_ns)
    yield _share("known_bytes_time_share", whole.known_ns, whole.time_ns)
    yield _share("chained_time_share", chained_ns, whole.time_ns)
    yield Metric("chains_count", chains_count)


def _share(name: str, part: float, total: float) -> Metric:
    return Metric(name, part / total) if total else Metric(name, None, NOTHING)


def _bytes_share(name: str, part: Amounts, total: Amounts, min_known_share: float) -> Metric:
    if not total.time_ns:
        return Metric(name, None, NOTHING)
    if not total.moved_bytes:
        return Metric(name, None, NO_BYTES)
    if total.known_ns < min_known_share * total.time_ns:
        return Metric(name, None, FEW_BYTES)
    return Metric(name, (part.moved_bytes or 0.0) / total.moved_bytes)


# ---------------------------------------------------------------- tables


def verdict_table(of: Kernels) -> Columns:
    """One row per verdict that occurs."""
    found: list[tuple[str, Amounts]] = []
    verdicts = np.array([VERDICTS.index(one.verdict) for one in of.work])
    for number, verdict in enumerate(VERDICTS):
        if (verdicts == number).any():
            found.append((verdict, amounts(of, verdicts == number)))
    total = max(sum(one.time_ns for _, one in found), 1)
    return {
        "verdict": [verdict for verdict, _ in found],
        "launches_count": [one.launches for _, one in found],
        "total_ns": [one.time_ns for _, one in found],
        "gpu_time_share": [one.time_ns / total for _, one in found],
        "moved_bytes": [one.moved_bytes for _, one in found],
    }


def kernel_table(of: Kernels, most: int) -> Columns:
    """One row per name, the longest-running first."""
    number = {name: i for i, name in enumerate(dict.fromkeys(of.of.names))}
    code = ints([number[name] for name in of.of.names])
    count = len(number)
    total, launched = (np.bincount(code, part, minlength=count) for part in (of.of.total_ns, of.of.launches))
    moved = np.bincount(code, of.moved_bytes, minlength=count)  # NaN where it is of any class
    least = np.full(count, len(SOURCES) - 1)
    np.minimum.at(least, code, of.moved.source)
    names, work = list(number), dict(zip(of.of.names, of.work, strict=True))
    rows = np.argsort(-total, kind="stable")[:most].tolist()
    return {
        "kernel": [names[i] for i in rows],
        "verdict": [work[names[i]].verdict for i in rows],
        "kind": [work[names[i]].kind for i in rows],
        "does": [work[names[i]].does for i in rows],
        "why": [work[names[i]].reason for i in rows],
        "fusible": [work[names[i]].is_fusible for i in rows],
        "launches_count": [int(launched[i]) for i in rows],
        "total_ns": [int(total[i]) for i in rows],
        "gpu_time_share": [float(total[i] / max(float(total.sum()), 1.0)) for i in rows],
        "moved_bytes": numbers(moved[rows]),
        "bytes_from": [SOURCES[least[i]] for i in rows],
    }


class Saves(NamedTuple):
    """The most that fusing a chain saves of one run's time, and why: by ``traffic``, or by ``time`` of short kernels.

    ``told``: whether its traffic is enough to say what of it fusing saves. None = not known.
    """

    told: bool
    bound_ns: float | None
    why: str


def chain_table(of: Kernels, found: Sequence[Chain], saves: Sequence[Saves]) -> Columns:
    """One row per chain, numbered from 1 as in ``member_table``. Bytes are those of one run, ``saving_ns`` of all."""
    told = [one.saved_bytes if save.told else None for one, save in zip(found, saves, strict=True)]
    total = max(int(of.of.total_ns.sum()), 1)
    return {
        "chain_id": list(range(1, len(found) + 1)),
        "kernel": [of.of.names[one.members[0]] for one in found],
        "next_kernel": [of.of.names[one.members[1]] for one in found],
        "members_count": [len(one.members) for one in found],
        "runs_count": [one.runs_count for one in found],
        "total_ns": [one.total_ns for one in found],
        "gpu_time_share": [one.total_ns / total for one in found],
        "traffic_bytes": [one.traffic_bytes for one in found],
        "fused_traffic_bytes": [
            None if saved_bytes is None else (one.traffic_bytes or 0.0) - saved_bytes
            for one, saved_bytes in zip(found, told, strict=True)
        ],
        "saved_bytes": told,
        "saved_share": [one.saved_share if save.told else None for one, save in zip(found, saves, strict=True)],
        "saving_ns": [
            None if save.bound_ns is None else int(save.bound_ns * one.runs_count)
            for one, save in zip(found, saves, strict=True)
        ],
        "saving_from": [save.why for save in saves],
        "bytes_from": [one.source for one in found],
        "read_by": [read_by(one) for one in found],
    }


def read_by(one: Chain) -> str:
    """Of ``READERS``, what holds for all results within a chain: not checked if that holds for any."""
    return next((a for a in ("not_checked", "others_too") if a in one.read_by), "chain_only")


_MEMBER_COLUMNS = ("chain_id", "place_count", "kernel", "does", "verdict", "mean_ns", "read_bytes", "written_bytes",
                   "saved_bytes")  # fmt: skip


def member_table(of: Kernels, found: Sequence[Chain], saves: Sequence[Saves], min_read_share: float) -> Columns:
    """One row per kernel of each chain: what it reads and writes, and what of it and its source fusing saves."""
    table: Columns = {name: [] for name in _MEMBER_COLUMNS}
    for number, (one, save) in enumerate(zip(found, saves, strict=True), 1):
        members = list(one.members)
        read, written = (part[members].tolist() for part in (of.moved.read, of.moved.written))
        spared = spared_bytes(one, of.moved, min_read_share) if save.told else None
        for place, member in enumerate(members):
            work = of.work[member]
            row = (number, place + 1, of.of.names[member], work.does, work.verdict, one.member_ns[place],
                   finite(read[place]), finite(written[place]), spared[place] if spared else None)  # fmt: skip
            for column, cell in zip(table, row, strict=True):
                table[column].append(cell)
    return table
