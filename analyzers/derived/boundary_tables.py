"""The tables and metrics of the analyzer ``fusion-boundary``: columns of plain values, None = not measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from spikeprof.analyzers.base import Metric
from spikeprof.analyzers.derived.cells import numbers
from spikeprof.analyzers.derived.counters import BOUNDS, SHAPE, Estimate, Floats
from spikeprof.analyzers.derived.intervals import Bools, Integers, Ints
from spikeprof.analyzers.derived.launch_shapes import Activity, HeldWarps, Launches
from spikeprof.analyzers.derived.neighbours import VERDICTS, Fused, Pairs
from spikeprof.analyzers.derived.occupancy import REASONS, Occupancy, Waves

Columns = dict[str, list[Any]]

#: What names of kernels that move data between GPUs hold, without underscores: of libraries, and of engines' own.
_COMMUNICATION = ("nccl", "rccl", "nvshmem", "allreduce", "allgather", "reducescatter", "alltoall", "crossdevicereduce")

_FITS_NOWHERE = "no SM of this architecture could hold such a block: the record or the limits are wrong"


@dataclass(frozen=True, slots=True)
class Study:
    """All that is known of the classes of launches and of their neighbours."""

    of: Launches
    occupied: Occupancy
    waves: Waves
    activity: Activity
    pairs: Pairs
    fused: Fused

    @property
    def time_shares(self) -> Floats:
        """Of each class, its share of the kernels' time."""
        return np.asarray(self.of.total_ns / max(int(self.of.total_ns.sum()), 1), np.float64)

    @property
    def communicates(self) -> Bools:
        """The classes whose kernels move data between GPUs, by their names."""
        names = (name.casefold().replace("_", "") for name in self.of.names)
        return np.array([any(word in name for word in _COMMUNICATION) for name in names], bool)

    @property
    def pair_shares(self) -> Floats:
        """Of each pair, its share of the kernels' time. A kernel between two others belongs to two pairs."""
        return np.asarray(self.pairs.total_ns / max(int(self.of.total_ns.sum()), 1), np.float64)

    @property
    def occupancy_share(self) -> Floats:
        """Theoretical occupancy of each class; NaN = unknown, also of a launch whose blocks fit nowhere."""
        return np.where(self.occupied.blocks > 0, self.occupied.share, np.nan)

    @property
    def held_share(self) -> Floats:
        """Of each class, warps on the GPU over the slots for them, on average while it runs; NaN = unknown."""
        slots = np.maximum(self.occupied.max_warps, 1)
        return np.asarray(self.waves.warps * self.waves.active_sms_share / slots, np.float64)

    @property
    def utilisation(self) -> Estimate:
        """U of each class: see the analyzer's docstring."""
        slots = np.maximum(self.occupied.max_warps, 1)
        room = 1 - np.minimum(self.occupied.registers_share, 1)
        return self.activity.per_cycle.times(self.waves.warps / slots * room**2)


def class_table(study: Study, most: int) -> Columns:
    """One row per class, the longest-running first."""
    of, occupied, waves = study.of, study.occupied, study.waves
    rows = np.argsort(-of.total_ns, kind="stable")[:most]
    known = occupied.known[rows]

    def whole(values: Integers) -> list[int | None]:
        return [int(v) if k else None for v, k in zip(values[rows].tolist(), known.tolist(), strict=True)]

    return {
        "kernel": [of.names[i] for i in rows],
        **{name: of.shape[name][rows].tolist() for name in SHAPE},
        "device": of.device[rows].tolist(),
        "launches_count": of.launches[rows].tolist(),
        "total_ns": of.total_ns[rows].tolist(),
        "gpu_time_share": study.time_shares[rows].tolist(),
        "registers_count": [n or None for n in of.shapes.registers[rows].tolist()],
        "shared_bytes": of.shapes.shared_bytes[rows].tolist(),
        "block_warps_count": whole(occupied.block_warps),
        "active_blocks_count": whole(occupied.blocks),
        "active_warps_count": whole(occupied.warps),
        "occupancy_share": numbers(study.occupancy_share[rows]),
        "limiter": ["+".join(occupied.limiters(i)) for i in rows.tolist()],
        "carve_out_bytes": whole(occupied.carve_out_bytes),
        "waves_ratio": numbers(waves.waves[rows]),
        "tail_share": numbers(waves.tail_share[rows]),
        "expected_sm_active_share": numbers(waves.active_sms_share[rows]),
        **_estimated("sm_active_share", study.activity.sm_active, rows),
        "warps_per_sm_count": numbers(waves.warps[rows]),
        **_estimated("instructions_per_cycle_ratio", study.activity.per_cycle, rows),
        **_estimated("utilisation_ratio", study.utilisation, rows),
        "unknown": [_why(occupied, i) for i in rows.tolist()],
    }


def _why(occupied: Occupancy, row: int) -> str:
    """Why the occupancy of a class is not known; empty where it is."""
    return REASONS[occupied.unknown[row]] or ("" if occupied.blocks[row] else _FITS_NOWHERE)


def pair_table(study: Study, often: Bools, most: int) -> Columns:
    """One row per pair of neighbours that met often, those that took most time first."""
    of, pairs, made = study.of, study.pairs, study.fused
    order = np.argsort(-pairs.total_ns, kind="stable")
    rows = order[often[order]][:most]
    known = made.verdict[rows] != VERDICTS.index("unknown")
    return {
        "kernel": [of.names[i] for i in pairs.first[rows]],
        **{name: of.shape[name][pairs.first[rows]].tolist() for name in SHAPE},
        "device": of.device[pairs.first[rows]].tolist(),
        "next_kernel": [of.names[i] for i in pairs.second[rows]],
        "met_count": pairs.met_count[rows].tolist(),
        "total_ns": pairs.total_ns[rows].tolist(),
        "pair_time_share": study.pair_shares[rows].tolist(),
        "gap_ns": pairs.gap_ns[rows].tolist(),
        "verdict": [VERDICTS[i] for i in made.verdict[rows].tolist()],
        "lacking": ["+".join(made.lacks(i)) for i in rows.tolist()],
        "thread_registers_share": numbers(made.occupied.thread_registers_share[rows]),
        "block_registers_share": numbers(made.occupied.registers_share[rows]),
        "shared_sum_bytes": made.shared_sum_bytes[rows].tolist(),
        "shared_max_bytes": made.shared_max_bytes[rows].tolist(),
        "alone_occupancy_share": numbers(made.alone_share[rows]),
        "fused_occupancy_share": numbers(np.where(known, made.occupied.share[rows], np.nan)),
    }


def _estimated(name: str, of: Estimate, rows: Ints) -> Columns:
    """Three columns: the value, and ``low_`` and ``high_`` before its name; none where no row has it."""
    if not np.isfinite(of.value[rows]).any():
        return {}
    return {
        name if bound == "value" else f"{bound}_{name}": numbers(part[rows])
        for bound, part in zip(BOUNDS, of, strict=True)
    }


# ---------------------------------------------------------------- metrics


def metrics(study: Study, often: Bools, held: HeldWarps | None) -> tuple[Metric, ...]:
    """The numbers of the whole recording: means over the kernels' time."""
    return tuple(_metrics(study, often, held))


def _metrics(study: Study, often: Bools, held: HeldWarps | None) -> Iterator[Metric]:
    time_ns = study.of.total_ns
    yield Metric("kernel_classes_count", len(study.of.names))
    yield Metric("known_time_share", _share(time_ns, study.occupied.blocks > 0))
    yield _mean("occupancy_share", study.occupancy_share, time_ns, "no kernel of known occupancy took any time")
    few = "the number of SMs, or blocks of the grids, is not known"
    yield _mean("expected_sm_active_share", study.waves.active_sms_share, time_ns, few)
    counted = "SMs at work were not counted"
    yield _mean("sm_active_share", study.activity.sm_active.value, time_ns, counted)
    if np.isfinite(study.activity.sm_active.value).any():
        why = "instructions or the SM clock were not sampled, or too few of them to be known well"
        yield _mean("utilisation_ratio", study.utilisation.value, time_ns, why)
    else:
        yield Metric("utilisation_ratio", None, counted)
    if held is not None:
        yield Metric("held_warps_share", held.measured)
        yield Metric("expected_held_warps_share", held.modelled)
        yield Metric("held_warps_ns", held.time_ns)
    yield Metric("one_wave_time_share", _share(time_ns, study.waves.waves <= 1))
    for verdict in VERDICTS[1:]:
        chosen = often & (study.fused.verdict == VERDICTS.index(verdict))
        yield Metric(f"pairs_{verdict}_count", int(study.pairs.met_count[chosen].sum()))


def _share(time_ns: Ints, which: Bools) -> float:
    return float(time_ns[which].sum() / max(int(time_ns.sum()), 1))


def _mean(name: str, values: Floats, time_ns: Ints, why: str) -> Metric:
    """The mean over the time of the classes whose value is known."""
    known = np.isfinite(values) & (time_ns > 0)
    if not known.any():
        return Metric(name, None, why)
    return Metric(name, float(np.average(values[known], weights=time_ns[known])))
