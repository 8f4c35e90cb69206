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
from spikeprof.analyzers.cache_pierce.patterns import ANY, prefix_of, prefixes_of
from spikeprof.analyzers.cache_pierce.sketch import RoughCounts

Ints = npt.NDArray[np.int64]

NO_ROW = -1
PATTERN, PREFIX, TENANT, ALL = 0, 1, 2, 3  # levels


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


@dataclass(frozen=True, slots=True)
class _Strangers:
    """m pairs of tenant and pattern that have no row: how many look-ups each, and the first one's time."""

    tenants: list[str]
    patterns: list[str]
    prefixes: list[str]
    counts: Ints
    first_s: list[float]


class SeriesBook:
    """All rows. Row 0 is everything."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.rows: list[Row] = [Row(EVERY, EVERY, ALL, NO_ROW, 0.0, 0.0)]
        self._index: dict[tuple[str, str], int] = {}
        self._free: list[int] = []
        self._placed: dict[tuple[str, str], tuple[int, ...]] = {}  # all rows of a pattern that has one
        self._candidates = RoughCounts()
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
        tenant_names, names = tenants.dictionary.to_pylist(), patterns.dictionary.to_pylist()
        codes = np.asarray(tenants.indices).astype(np.int64) * len(names) + np.asarray(patterns.indices)
        pairs, firsts, inverse, counts = _unique(codes, len(tenant_names) * len(names))
        of_tenant, of_pattern = pairs // len(names), pairs % len(names)
        nowhere = (NO_ROW, NO_ROW, NO_ROW)
        found = (
            self._placed.get((tenant_names[tenant], names[pattern]), nowhere)
            for tenant, pattern in zip(of_tenant.tolist(), of_pattern.tolist(), strict=True)
        )
        table = np.array(list(found), np.int64)
        newest_s = float(ts_s[-1])
        self._touch(table, newest_s)  # first: rows of these look-ups must not make room for others
        new = np.flatnonzero(table[:, 2] == NO_ROW)
        if len(new):
            prefixes = prefixes_of(patterns.dictionary).dictionary_encode()
            strangers = _Strangers(
                [tenant_names[at] for at in of_tenant[new].tolist()],
                [names[at] for at in of_pattern[new].tolist()],
                prefixes.take(pa.array(of_pattern[new])).to_pylist(),
                counts[new],
                ts_s[firsts[new]].tolist(),
            )
            table[new] = self._place_strangers(strangers)
            self._touch(table[new], newest_s)
        self.rows[0].born_s = self.rows[0].born_s or float(ts_s[0])
        self.rows[0].last_s = newest_s
        self.folded_away_count += int(counts[table[:, 0] == NO_ROW].sum())
        columns = table[inverse]
        return Places(columns[:, 0], columns[:, 1], columns[:, 2])

    def chain(self, tenant: str, pattern: str, now_s: float) -> tuple[int, ...]:
        """The rows of a pattern of which only counts are known, the narrowest first; it gets its own row at once."""
        rows = self._placed.get((tenant, pattern))
        if rows is None:
            enough = np.array([self._options.admit_lookups_count])
            table = self._place_strangers(_Strangers([tenant], [pattern], [prefix_of(pattern)], enough, [now_s]))
            rows = tuple(table[0].tolist())
        used = (*(row for row in rows if row != NO_ROW), 0)
        for row in used:
            self.rows[row].last_s = now_s
        return used

    def is_free(self, row: int) -> bool:
        """Whether the row is nobody's now."""
        return row in self._free

    def _touch(self, table: Ints, now_s: float) -> None:
        """These rows were looked up in."""
        for row in np.unique(table).tolist():
            if row != NO_ROW:
                self.rows[row].last_s = now_s

    def _place_strangers(self, new: _Strangers) -> Ints:
        """Rows of m pairs of tenant and pattern that have none of their own, int64 [m, 3]; new ones if it is time."""
        tenant_rows = {tenant: self._tenant(tenant, new.first_s[0]) for tenant in dict.fromkeys(new.tenants)}
        table = np.full((len(new.tenants), 3), NO_ROW)
        table[:, 2] = [tenant_rows[tenant] for tenant in new.tenants]
        groups: dict[tuple[int, str], list[int]] = {}
        for at, prefix in enumerate(new.prefixes):
            groups.setdefault((int(table[at, 2]), prefix), []).append(at)
        counts = np.array([new.counts[members].sum() for members in groups.values()])
        seen = self._candidates.add([f"{row} {prefix}{ANY}" for row, prefix in groups], counts)
        for ((tenant_row, prefix), members), seen_count in zip(groups.items(), seen.tolist(), strict=True):
            if prefix and tenant_row > 0:
                row = self._admit(tenant_row, prefix + ANY, PREFIX, seen_count, new.first_s[members[0]])
                table[members, 1] = row
        parents = np.where(table[:, 1] == NO_ROW, table[:, 2], table[:, 1])
        pairs = [f"{row} {pattern}" for row, pattern in zip(table[:, 2].tolist(), new.patterns, strict=True)]
        seen = self._candidates.add(pairs, new.counts)
        for at in np.flatnonzero((seen >= self._options.admit_lookups_count) & (parents > 0)).tolist():
            parent, pattern = int(parents[at]), new.patterns[at]
            is_full = self.rows[parent].children_count >= self._options.max_patterns_per_prefix_count
            if pattern and not is_full:
                table[at, 0] = self._admit(parent, pattern, PATTERN, int(seen[at]), new.first_s[at])
            if table[at, 0] != NO_ROW:
                self._placed[self.rows[parent].tenant, pattern] = tuple(table[at].tolist())
        return table

    def _tenant(self, tenant: str, now_s: float) -> int:
        row = self._index.get((tenant, ANY))
        if row is not None:
            return row
        if self._tenants_count >= self._options.max_tenants_count - 1 and tenant != ANY:
            return self._tenant(ANY, now_s)
        row = self._new(tenant, ANY, TENANT, 0, now_s)
        self._tenants_count += row != NO_ROW
        return max(row, 0)

    def _admit(self, parent: int, pattern: str, level: int, seen_count: int, now_s: float) -> int:
        """The row of a pattern, a new one once it was looked up often enough; else NO_ROW."""
        tenant = self.rows[parent].tenant
        row = self._index.get((tenant, pattern))
        if row is None and seen_count >= self._options.admit_lookups_count:
            row = self._new(tenant, pattern, level, parent, now_s)
        if row is None or row == NO_ROW:
            return NO_ROW
        self.rows[row].last_s = max(self.rows[row].last_s, now_s)
        return row

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
                self._placed.pop((row.tenant, row.pattern), None)
                self.rows[row.parent].children_count -= 1
                self.rows[at] = Row("", "", PATTERN, 0, now_s, now_s)
                self._free.append(at)


def _unique(codes: Ints, codes_count: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Different codes below ``codes_count``; where each comes first; which each code is; how often each comes."""
    if codes_count > 2 * len(codes):
        pairs, firsts, inverse, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
        return pairs, firsts, inverse, counts
    every = np.bincount(codes, minlength=codes_count)
    pairs = np.flatnonzero(every)
    first = np.zeros(codes_count, np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    number = np.cumsum(every > 0) - 1
    return pairs, first[pairs], number[codes], every[pairs]
