"""Rows: which tenants and patterns are counted one by one, within bounds.

Each look-up counts for its pattern, for the first part of its key (``user:{any}``), for its tenant (``{any}``) and for
everything. A pattern gets a row of its own once it was looked up often enough and while there is room; before, it
counts for the wider rows alone. So random keys that fold to ever new patterns fill no memory, and still are seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.analyzers.cache_pierce.model import EVERY
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.analyzers.cache_pierce.patterns import ANY, prefix_of

Ints = npt.NDArray[np.int64]

NO_ROW = -1
PATTERN, PREFIX, TENANT, ALL = 0, 1, 2, 3  # levels
_MAX_CANDIDATES_COUNT = 16_384


@dataclass(slots=True)
class Row:
    """One series."""

    tenant: str
    pattern: str
    level: int
    parent: int
    born_s: float  # event time of its first look-up
    last_s: float  # of its newest
    children_count: int = 0


@dataclass(frozen=True, slots=True)
class Places:
    """The rows that each of n look-ups counts for, int64 [n] each; NO_ROW = none."""

    patterns: Ints
    prefixes: Ints
    tenants: Ints


class SeriesBook:
    """All rows. Row 0 is everything."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.rows: list[Row] = [Row(EVERY, EVERY, ALL, NO_ROW, 0.0, 0.0)]
        self._index: dict[tuple[str, str], int] = {}
        self._free: list[int] = []
        self._candidates: dict[tuple[str, str], int] = {}
        self._tenants_count = 0
        self._evicted_s = -np.inf
        self._busy: frozenset[int] = frozenset()
        self.reused: list[int] = []  # rows whose past is another's: to be forgotten by the caller
        self.folded_away_count = 0

    def row_of(self, tenant: str, pattern: str) -> int:
        """The row of a pattern; NO_ROW where it has none."""
        return self._index.get((tenant, pattern), NO_ROW)

    def resolve(
        self,
        tenants: pa.DictionaryArray,
        patterns: pa.DictionaryArray,
        ts_s: npt.NDArray[np.float64],
        busy: frozenset[int],
    ) -> Places:
        """The rows of n look-ups, sorted by time. Rows in ``busy`` are not given to others."""
        self._busy = busy
        tenant_names, pattern_names = tenants.dictionary.to_pylist(), patterns.dictionary.to_pylist()
        codes = np.asarray(tenants.indices).astype(np.int64) * len(pattern_names) + np.asarray(patterns.indices)
        pairs, firsts, inverse, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
        table = np.empty((len(pairs), 3), np.int64)
        newest_s = float(ts_s[-1])
        rows = zip(pairs.tolist(), ts_s[firsts].tolist(), counts.tolist(), strict=True)
        for i, (pair, first_s, count) in enumerate(rows):
            tenant = tenant_names[pair // len(pattern_names)]
            table[i] = self._place(tenant, pattern_names[pair % len(pattern_names)], count, first_s, newest_s)
        self.rows[0].born_s = self.rows[0].born_s or float(ts_s[0])
        self.rows[0].last_s = newest_s
        self.folded_away_count += int(counts[table[:, 0] == NO_ROW].sum())
        columns = table[inverse]
        return Places(columns[:, 0], columns[:, 1], columns[:, 2])

    def chain(self, tenant: str, pattern: str, now_s: float) -> tuple[int, ...]:
        """The rows of a pattern of which only counts are known, the narrowest first; it gets its own row at once."""
        rows = self._place(tenant, pattern, self._options.admit_lookups_count, now_s, now_s)
        return (*(row for row in rows if row != NO_ROW), 0)

    def is_free(self, row: int) -> bool:
        """Whether the row is nobody's now."""
        return row in self._free

    def _place(self, tenant: str, pattern: str, count: int, first_s: float, newest_s: float) -> tuple[int, int, int]:
        row = self._index.get((tenant, pattern))
        if row is None:
            return self._place_new(tenant, pattern, count, first_s, newest_s)
        prefix = self.rows[row].parent
        parent = self.rows[prefix].parent if self.rows[prefix].level == PREFIX else prefix
        for used in (row, prefix, parent):
            self.rows[used].last_s = newest_s
        return row, (prefix if prefix != parent else NO_ROW), parent

    def _place_new(
        self, tenant: str, pattern: str, count: int, first_s: float, newest_s: float
    ) -> tuple[int, int, int]:
        tenant_row = self._tenant(tenant, first_s)
        if tenant_row == 0:
            return NO_ROW, NO_ROW, NO_ROW
        tenant = self.rows[tenant_row].tenant
        prefix = prefix_of(pattern)
        prefix_row = self._admit(tenant, prefix + ANY, PREFIX, tenant_row, count, first_s) if prefix else NO_ROW
        parent = tenant_row if prefix_row == NO_ROW else prefix_row
        row = NO_ROW
        if pattern and self.rows[parent].children_count < self._options.max_patterns_per_prefix_count:
            row = self._admit(tenant, pattern, PATTERN, parent, count, first_s)
        for used in (row, prefix_row, tenant_row):
            if used != NO_ROW:
                self.rows[used].last_s = newest_s
        return row, prefix_row, tenant_row

    def _tenant(self, tenant: str, now_s: float) -> int:
        row = self._index.get((tenant, ANY))
        if row is not None:
            return row
        if self._tenants_count >= self._options.max_tenants_count - 1 and tenant != ANY:
            return self._tenant(ANY, now_s)
        row = self._new(tenant, ANY, TENANT, 0, now_s)
        self._tenants_count += row != NO_ROW
        return max(row, 0)

    def _admit(self, tenant: str, pattern: str, level: int, parent: int, count: int, now_s: float) -> int:
        """The row of a pattern, a new one once it was looked up often enough; else NO_ROW."""
        pair = (tenant, pattern)
        row = self._index.get(pair)
        if row is not None:
            return row
        seen = self._candidates.get(pair, 0) + count
        if seen < self._options.admit_lookups_count:
            self._candidates[pair] = seen
            if len(self._candidates) > _MAX_CANDIDATES_COUNT:
                self._thin_out()
            return NO_ROW
        self._candidates.pop(pair, None)
        return self._new(tenant, pattern, level, parent, now_s)

    def _thin_out(self) -> None:
        """Forget the rarer half of the candidates: as lossy counting does, with what is left counting less."""
        middle = int(np.median(np.fromiter(self._candidates.values(), np.int64)))
        self._candidates = {pair: count - middle for pair, count in self._candidates.items() if count > middle}

    def _new(self, tenant: str, pattern: str, level: int, parent: int, now_s: float) -> int:
        row = Row(tenant, pattern, level, parent, now_s, now_s)
        if not self._free and len(self.rows) >= self._options.max_series_count:
            self._evict(now_s)
        if self._free:
            at = self._free.pop()
            self.rows[at] = row
            self.reused.append(at)
        elif len(self.rows) < self._options.max_series_count:
            at = len(self.rows)
            self.rows.append(row)
        else:
            return NO_ROW
        self._index[tenant, pattern] = at
        self.rows[parent].children_count += 1
        return at

    def _evict(self, now_s: float) -> None:
        """Free the rows that nothing was looked up in for as long as a baseline is."""
        if now_s - self._evicted_s < self._options.baseline_cell_s:
            return
        self._evicted_s = now_s
        for at, row in enumerate(self.rows):
            idle = now_s - row.last_s > self._options.baseline_s
            if idle and row.level in (PATTERN, PREFIX) and not row.children_count and at not in self._busy:
                del self._index[row.tenant, row.pattern]
                self.rows[row.parent].children_count -= 1
                self.rows[at] = Row("", "", PATTERN, 0, now_s, now_s)
                self._free.append(at)
