"""Rows of a batch that turn bad although another row's values were bad, not theirs: what one request does to another.

A row is what lies at one index of a tensor's leading dimension; here that is the batch, which nothing in the numbers
says. It is assumed of tensors with enough dimensions (``[batch, tokens, hidden]``, also in decode with one token) and
as many rows as most such tensors of the step have: of flat ``[tokens, hidden]`` the rows are tokens, which attention
mixes by design. Of more than 64 rows a bit of the mask is a range of rows, and counts as one.

In the scans of a step, in order, a *leak* is the first one in which rows are bad that were fine in all before it,
while rows that had been bad before are bad there, too. Where the step's first bad scan already holds rows that were bad
in the step before (they came back from a cache), others that are bad in it, and more rows than before, are its victims.
Rows that were bad in the step before are no new victims. It is inferred: a row that overflows by itself in a later
module than another one did looks alike, unless what it was made from was far from the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.base import Evidence
from spikeprof.analyzers.derived.cells import finite
from spikeprof.analyzers.derived.intervals import Bools, Ints, ints
from spikeprof.analyzers.derived.numerics_heat import MODEL
from spikeprof.analyzers.derived.numerics_scans import Scans

Masks = npt.NDArray[np.uint64]

_BITS = 64
_RUNS_MAX = 4  # of rows that are named

#: Modules of torch whose rows cannot reach each other: what a row gives follows from what it takes.
_ROW_BY_ROW = ("Linear", "LayerNorm", "RMSNorm", "GroupNorm", "Embedding", "Conv1d", "Conv2d", "Conv3d", "Dropout",
               "Identity", "ReLU", "GELU", "SiLU", "Sigmoid", "Tanh", "LeakyReLU", "ELU", "Softplus", "Hardswish",
               "Mish")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Leak:
    """Rows that turned bad in a scan, and those that were bad before; masks as in ``Scans.bad_rows``.

    ``before`` is the last scan of the step before it with as many rows, -1 where there is none.
    """

    scan: int
    before: int
    victims: int
    sources: int
    rows_count: int
    keeps_apart: bool  # the module by itself cannot mix rows: something before it may, or its weight is bad

    def is_clear(self, scans: Scans, least_headroom: float) -> bool:
        """Whether the victims cannot well have turned bad by themselves."""
        return not self.keeps_apart and self.headroom(scans) >= least_headroom

    def headroom(self, scans: Scans) -> float:
        """Bits that the scan before left: what the victims' magnitudes were at most. NaN where that is not known."""
        if self.before < 0 or not scans.unscaled[scans.tensor[self.before]]:
            return np.nan
        return float(scans.headroom[self.before])


def leaks(scans: Scans, least_dimensions: int) -> list[Leak]:
    """All leaks in order of process, step and execution."""
    outputs = scans.which(lambda one: one.role in ("output", "input"))
    usable = outputs[scans.tensor] & ~scans.changed & (scans.dimensions >= least_dimensions) & (scans.rows >= 2)
    bad = np.flatnonzero(usable & (scans.bad_rows != 0))
    if not len(bad):
        return []
    usable &= np.isin(scans.step_group, np.unique(scans.step_group[bad]))
    usable &= scans.rows == _batches(scans, usable)
    bad = bad[usable[bad]]
    group, mask = scans.step_group[bad], scans.bad_rows[bad]
    new = _first_in_group(mask, group)
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    length = np.diff(np.append(begins, len(group)))
    # Within a step the new bits are disjoint: their sum is what is bad so far.
    until = np.cumsum(new, dtype=np.uint64)
    seen = until - new - np.repeat(until[begins] - new[begins], length)
    brought = np.repeat(_of_step_before(scans, bad, begins, (seen + new)[begins + length - 1]), length)
    first = np.zeros(len(bad), np.bool_)
    first[begins] = True
    sources = np.where(first, brought, seen) & mask
    victims = new & ~brought
    more = ~first | (_counts(mask) > _counts(brought))
    apart = scans.which(lambda one: one.role == "output" and one.class_name in _ROW_BY_ROW)[scans.tensor[bad]]
    found = np.flatnonzero((sources != 0) & (victims != 0) & more & ~(apart & _took(scans, bad)))
    at = bad[found]
    columns = (at, _before(scans, np.flatnonzero(usable), at), victims[found], sources[found], scans.rows[at])
    return [Leak(*each) for each in zip(*(column.tolist() for column in (*columns, apart[found])), strict=True)]


def _batches(scans: Scans, usable: Bools) -> Ints:
    """Of each scan the number of rows that most of the usable tensors of its step have; 0 in steps without any."""
    picked = np.flatnonzero(usable)
    rows, code = np.unique(scans.rows[picked], return_inverse=True)
    key, count = np.unique(scans.step_group[picked] * len(rows) + code, return_counts=True)
    group = key // len(rows)
    order = np.lexsort((key, count, group))
    last = order[np.flatnonzero(np.diff(group[order], append=-1))]
    batch = np.zeros(int(scans.step_group[-1]) + 1, np.int64)
    batch[group[last]] = rows[key[last] % len(rows)]
    return ints(batch[scans.step_group])


def _first_in_group(mask: Masks, group: Ints) -> Masks:
    """The bits of each mask that no earlier one of its group has."""
    new = np.zeros(len(mask), np.uint64)
    for bit in range(_BITS):
        has = np.flatnonzero(mask >> np.uint64(bit) & np.uint64(1))
        new[has[np.diff(group[has], prepend=-1) != 0]] |= np.uint64(1 << bit)
    return new


def _of_step_before(scans: Scans, bad: Ints, begins: Ints, total: Masks) -> Masks:
    """What was bad in the scanned step before each one with bad rows, where it had as many rows; else nothing."""
    group, rank, rows = (each[bad[begins]] for each in (scans.step_group, scans.rank, scans.rows))
    follows = (np.diff(group, prepend=-2) == 1) & (np.diff(rank, prepend=-1) == 0) & (np.diff(rows, prepend=-1) == 0)
    return np.where(follows, np.roll(total, 1), np.uint64(0))


def _counts(mask: Masks) -> Ints:
    """Bits that are set."""
    return ints(np.unpackbits(np.ascontiguousarray(mask).view(np.uint8)).reshape(-1, _BITS).sum(axis=1))


def _before(scans: Scans, usable: Ints, chosen: Ints) -> Ints:
    """The usable scan before each chosen one in its step, -1 where there is none."""
    at = np.searchsorted(usable, chosen) - 1
    before = usable[np.maximum(at, 0)]
    return ints(np.where((at >= 0) & (scans.step_group[before] == scans.step_group[chosen]), before, -1))


def _took(scans: Scans, chosen: Ints) -> Bools:
    """Scans of modules whose inputs were scanned in the step: rows that are bad now first were fine in these."""
    paths = {path: at for at, path in enumerate(dict.fromkeys(one.path for one in scans.tensors))}
    path = np.array([paths[one.path] for one in scans.tensors], np.int64)
    inputs = np.flatnonzero(scans.which(lambda one: one.role == "input")[scans.tensor])
    key = scans.step_group * len(paths) + path[scans.tensor]
    return np.asarray(np.isin(key[chosen], key[inputs]), np.bool_)


def rows_text(mask: int, rows: int) -> str:
    """``1 to 3, 7``; of more than 64 rows ``some of 0 to 15``."""
    bits = [bit for bit in range(_BITS) if mask >> bit & 1]
    runs: list[list[int]] = []
    for bit in bits:
        if runs and runs[-1][1] == bit - 1:
            runs[-1][1] = bit
        else:
            runs.append([bit, bit])
    bounds = [(_first_row(low, rows), _first_row(high + 1, rows) - 1) for low, high in runs]
    shown = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in bounds[:_RUNS_MAX])
    more = f" and {len(bounds) - _RUNS_MAX} more" if len(bounds) > _RUNS_MAX else ""
    return f"{'some of ' if rows > _BITS else ''}{shown}{more}"


def _first_row(bit: int, rows: int) -> int:
    """The first row that a bit stands for."""
    return bit if rows <= _BITS else -(-bit * rows // _BITS)


def leak_evidence(scans: Scans, same: Sequence[Leak], least_headroom: float) -> Iterator[Evidence]:
    """What speaks for leaks in one module, the first of which is told in full."""
    first = same[0]
    ranges = first.rows_count > _BITS
    if not ranges:
        yield Evidence("victim_rows_count", first.victims.bit_count(), 0, "none expected", "inferred")
        yield Evidence("poisoning_rows_count", first.sources.bit_count())
    yield Evidence("batch_rows_count", first.rows_count)
    headroom = first.headroom(scans)
    if np.isfinite(headroom):
        yield Evidence("headroom_before_bits", headroom, least_headroom, "min_leak_headroom_bits")
    yield Evidence("leak_steps_count", len({int(scans.step_group[one.scan]) for one in same}))


def leak_action(scans: Scans, leak: Leak, least_headroom: float) -> str:
    """What to do, in one sentence: how sure it is depends on how far the victims were from the limit."""
    headroom = leak.headroom(scans)
    if leak.is_clear(scans, least_headroom):
        return (
            "Look for what mixes rows before or in this module: a mean, scale or softmax over the batch, a shared slot "
            "of a cache."
        )
    if headroom < least_headroom:
        return (
            "Look at the victims' own magnitudes first: so close to the limit they may have overflowed by themselves."
        )
    return "Scan inputs, too, to see whether the victims' own were fine: --numerics-roles output,input."


def leak_table(scans: Scans, found: Sequence[Leak], most: int) -> Mapping[str, list[Any]]:
    """Leaks in order of steps."""
    chosen = sorted(found, key=lambda one: (int(scans.step[one.scan]), int(scans.rank[one.scan]), one.scan))[:most]
    tensors = [scans.tensors[scans.tensor[one.scan]] for one in chosen]
    return {
        "rank": [int(scans.rank[one.scan]) for one in chosen],
        "step": [int(scans.step[one.scan]) for one in chosen],
        "module": [one.path or MODEL for one in tensors],
        "class_name": [one.class_name for one in tensors],
        "role": [one.role for one in tensors],
        "batch_rows_count": [one.rows_count for one in chosen],
        "victim_rows": [rows_text(one.victims, one.rows_count) for one in chosen],
        "poisoning_rows": [rows_text(one.sources, one.rows_count) for one in chosen],
        "headroom_before_bits": [finite(one.headroom(scans)) for one in chosen],
    }
