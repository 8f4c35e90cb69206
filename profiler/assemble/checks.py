"""Which records can be true. The others are set aside and counted by what is wrong with them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from spikeprof.profiler.assemble.columns import Records
from spikeprof.profiler.assemble.spool import ProcessSpool
from spikeprof.profiler.trace import IN_FLIGHT_AT_PAUSE, RECORDED_WHILE_OFF
from spikeprof.profiler.units import NS_PER_S

#: A record may lie this far outside its process's recorded life before it is set aside as broken.
SLACK_NS = 2 * NS_PER_S


@dataclass
class Tally:
    """Records seen, those set aside by reason, names not known, and the end of each rank's last record."""

    records: int = 0
    set_aside: Counter[str] = field(default_factory=Counter)
    unnamed: set[tuple[int, int]] = field(default_factory=set)  # (rank, name pointer)
    end_ns: dict[int, int] = field(default_factory=dict)  # rank -> trace time


def sound(records: Records, process: ProcessSpool, handed_over_ns: int, tally: Tally) -> Records:
    """The records that can be true; the others are counted by what is wrong with them.

    ``handed_over_ns`` is when CUPTI handed over the last buffer that they came in (Unix time).
    """
    wanted = _began_while_traced(records["start"], process)
    if "registers" not in (records.dtype.names or ()):
        # The agent lets calls and copies be recorded while kernels are not: nobody asked for those.
        records, wanted = records[wanted], wanted[wanted]
    start, end = records["start"], records["end"]
    untimed = (start == 0) | (end == 0)
    backwards = ~untimed & (end < start)
    earliest = _unix(process.hello_ns - SLACK_NS)
    latest = _unix(max(process.last_ns, handed_over_ns) + SLACK_NS)
    outside = ~untimed & ~backwards & ((start < earliest) | (end > latest))
    on_gpu = "device" in (records.dtype.names or ())
    candidates = ~untimed & ~backwards & ~outside & on_gpu
    unwanted = candidates & ~wanted
    torn = candidates & ~unwanted & _crosses_a_pause(start, end, process)
    if on_gpu and process.clock_held and len(process.windows) > 1:
        torn |= candidates & ~unwanted & ~torn & torn_replays(records)
    bad: npt.NDArray[np.bool_] = untimed | backwards | outside | unwanted | torn
    if not bad.any():
        return records
    reasons = {
        "no time": untimed,
        "ends before it starts": backwards,
        "outside the run": outside,
        RECORDED_WHILE_OFF: unwanted,
        IN_FLIGHT_AT_PAUSE: torn,
    }
    for reason, which in reasons.items():
        if which.any():
            tally.set_aside[reason] += int(which.sum())
    return records[~bad]


def _began_while_traced(start: npt.NDArray[np.uint64], process: ProcessSpool) -> npt.NDArray[np.bool_]:
    """False for work that began while recording was off.

    libcupti 13.0 goes on recording a graph that it has prepared, under one wrong correlation id, after the first
    time it is switched off; and work launched while it was on may begin later.
    """
    if not process.clock_held:
        return np.ones(len(start), bool)
    window = np.searchsorted(np.array([at for at, _, _ in process.windows], np.uint64), start, side="right") - 1
    traced = np.array([state == "traced" for _, state, _ in process.windows])
    return np.asarray((window < 0) | traced[window])


def _crosses_a_pause(
    start: npt.NDArray[np.uint64], end: npt.NDArray[np.uint64], process: ProcessSpool
) -> npt.NDArray[np.bool_]:
    """Work that began while recording and ended after it was switched off: its end time is not its own.

    libcupti 13.0 gives such work, all kernels of a graph replay at once, the time at which recording resumed.
    """
    pauses = [
        at
        for (_, state, _), (at, following, _) in itertools.pairwise(process.windows)
        if state == "traced" and following in ("clean", "off", "yielded")
    ]
    if not pauses or not process.clock_held:
        return np.zeros(len(start), bool)
    limits = np.array([*pauses, np.iinfo(np.int64).max], np.uint64)
    return np.asarray(end > limits[np.searchsorted(limits[:-1], start, side="right")])


#: A torn replay lasts so many times as long as the same graph usually does, kernels added up, ...
_TORN_TIMES_USUAL = 20
#: ... and its kernels so many times as long as the replay: all of them seem to run at once.
_TORN_TIMES_SPAN = 2


def torn_replays(records: Records) -> npt.NDArray[np.bool_]:
    """Work of graph replays that got its begin from one replay and its end from a later one.

    libcupti 13.0 reads a replay's times late: of the last one launched before recording was switched off, the ends
    may be those of the first one launched after it was on again, whenever the GPU got to either. All kernels of such
    a replay seem to overlap, for far longer than the graph takes. Told only where the records hold other replays of
    the graph to compare with.
    """
    if not (records["graph"] > 0).any():
        return np.zeros(len(records), bool)
    replays, of = np.unique(records["graph"].astype(np.uint64) << 32 | records["correlation"], return_inverse=True)
    # Seconds of a process's clock fit into a double to the nanosecond once its begin is taken off.
    start, end = ((records[name] - records["start"].min()).astype(np.int64) for name in ("start", "end"))
    total = np.bincount(of, (end - start).clip(0), len(replays))
    first, last = np.full(len(replays), np.iinfo(np.int64).max), np.zeros(len(replays), np.int64)
    np.minimum.at(first, of, start)
    np.maximum.at(last, of, end)
    usual = np.zeros(len(replays))
    graphs = replays >> 32
    for graph in np.unique(graphs).tolist():
        same = np.flatnonzero(graphs == graph)
        middle = (len(same) - 1) // 2  # the lower one of two: of those, the shorter is the sound one
        usual[same] = np.partition(total[same], middle)[middle] if graph and len(same) > 1 else np.inf
    torn = (total > _TORN_TIMES_USUAL * usual) & (total > _TORN_TIMES_SPAN * (last - first))
    return np.asarray(torn[of])


def _unix(ns: int) -> np.uint64:
    return np.uint64(min(max(ns, 0), np.iinfo(np.int64).max))
