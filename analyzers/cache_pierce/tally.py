"""From look-ups to counts: one entry per row and cell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.cache_pierce.evidence import Facts
from spikeprof.analyzers.cache_pierce.series import NO_ROW, Places
from spikeprof.analyzers.cache_pierce.windows import Column
from spikeprof.profiler.lookups import Lookups

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_LONGEST_TTL_S = 1e12  # a time to live beyond is none: its square would leave the range of numbers


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts to be added: ``rows`` int64 [n], ``cells`` int64 [n] ascending, ``counts`` float64 [columns, n]."""

    rows: Ints
    cells: Ints
    counts: Floats

    def by_cell(self) -> Iterator[tuple[int, Tally]]:
        """The entries of each cell."""
        starts = np.flatnonzero(np.diff(self.cells, prepend=self.cells[:1] - 1)).tolist()
        for first, last in zip(starts, [*starts[1:], len(self.cells)], strict=True):
            part = slice(first, last)
            yield int(self.cells[first]), Tally(self.rows[part], self.cells[part], self.counts[:, part])


def targets(places: Places, is_young: Flags) -> tuple[Ints, Ints]:
    """Pairs of row and look-up, int64 [m] each: a look-up counts for its pattern, for wider rows, and for row 0.

    Where ``is_young`` [n], its pattern is still being learned: it does not count for its tenant, nor for the first part
    of its key, which new traffic would otherwise make look odd.
    """
    count = len(is_young)
    rows = np.concatenate(
        [
            places.patterns,
            np.where(is_young, NO_ROW, places.prefixes),
            np.where(is_young, NO_ROW, places.tenants),
            np.zeros(count, np.int64),
        ]
    )
    fits = rows != NO_ROW
    return rows[fits], np.tile(np.arange(count), 4)[fits]


def tally(batch: Lookups, facts: Facts, cells: Ints, rows: Ints, look_ups: Ints) -> Tally:
    """Counts of n look-ups by row and cell, for m pairs of row and look-up."""
    most, oldest = int(rows.max()) + 1, int(cells.min())
    codes = (cells[look_ups] - oldest) * most + rows  # few: cells are those of a few seconds
    every = np.bincount(codes)
    pairs = np.flatnonzero(every)
    has_ttl = batch.hits & (batch.ttls_s >= 0) & (batch.ttls_s < _LONGEST_TTL_S)
    ttl_s = np.where(has_ttl, batch.ttls_s, 0.0)
    values = {
        Column.MISSES: ~batch.hits,
        Column.EXISTING: facts.existing,
        Column.FILLED: facts.filled,
        Column.FIRST_SEEN: facts.first_seen,
        Column.REPEATED: facts.repeated,
        Column.YOUNG_HITS: facts.young_hit,
        Column.NOWHERE: facts.nowhere,
        Column.TTLS: has_ttl,
        Column.TTL_S: ttl_s,
        Column.TTL_SQUARE_S2: ttl_s**2,
    }
    counts = np.zeros((len(Column), len(pairs)))
    counts[Column.LOOKUPS] = every[pairs]
    for column, of_look_up in values.items():
        if of_look_up.any():
            counts[column] = np.bincount(codes, weights=of_look_up[look_ups])[pairs]
    return Tally(pairs % most, pairs // most + oldest, counts)


def spread(starts: Ints, ends: Ints, rows: Ints, counted: tuple[Floats, Floats], oldest: int) -> Tally:
    """Look-ups and misses ``counted`` in n intervals of cells [start, end), spread evenly from ``oldest`` on."""
    lengths = np.maximum(ends - starts, 1)
    of = np.repeat(np.arange(len(starts)), lengths)
    cells = starts[of] + np.arange(len(of)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    kept = cells >= oldest
    of, cells = of[kept], cells[kept]
    most = int(rows.max()) + 1
    pairs, inverse = np.unique(cells * most + rows[of], return_inverse=True)
    counts = np.zeros((len(Column), len(pairs)))
    for column, values in zip((Column.LOOKUPS, Column.MISSES), counted, strict=True):
        counts[column] = np.bincount(inverse, weights=(values / lengths)[of], minlength=len(pairs))
    return Tally(pairs % most, pairs // most, counts)
