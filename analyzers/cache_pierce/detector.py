"""The detector: look-ups in, alerts out. Event time only; no I/O, no threads, no clock of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.analyzers.cache_pierce.baseline import BaselineRow
from spikeprof.analyzers.cache_pierce.evidence import KeyHistory
from spikeprof.analyzers.cache_pierce.judge import Judge
from spikeprof.analyzers.cache_pierce.known import KnownKeys
from spikeprof.analyzers.cache_pierce.model import Alert, Snapshot
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.analyzers.cache_pierce.patterns import fold
from spikeprof.analyzers.cache_pierce.series import NO_ROW, Places, SeriesBook
from spikeprof.analyzers.cache_pierce.sketch import Hashes, KeyHash
from spikeprof.analyzers.cache_pierce.snapshot import take_snapshot
from spikeprof.analyzers.cache_pierce.tally import spread, tally, targets
from spikeprof.analyzers.cache_pierce.windows import EventClock
from spikeprof.profiler.lookups import Lookups

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SLICE_S = 5.0  # of event time that is taken in at once: what is learned of keys counts from the next one on
_PART_COUNT = 16_384  # look-ups, as many as are held in several forms at once


class Detector:
    """Finds penetration in a stream of look-ups. Not safe to use from several threads at once.

    ``known`` may be replaced (``detector.known = …``) between any two calls; None = illegal keys are not measured.
    ``baselines`` are rows of ``baseline_rows()`` of an earlier run.
    """

    def __init__(
        self, options: Options | None = None, known: KnownKeys | None = None, baselines: Iterable[BaselineRow] = ()
    ) -> None:
        self.options = options or Options()
        self.known = known
        self._clock = EventClock(self.options)
        self._book = SeriesBook(self.options)
        self._judge = Judge(self.options, self._book, baselines)
        self._hash = KeyHash()
        self._history = KeyHistory(self.options)
        self._counted_late_count = 0  # of counts without keys

    def feed(self, lookups: Lookups) -> list[Alert]:
        """Take look-ups in, in any order of time; alerts in the order in which they were decided."""
        return self._take_in(self._clock.sift(lookups))

    def feed_counts(
        self,
        starts_s: Floats,
        ends_s: Floats,
        tenants: Sequence[str],
        patterns: Sequence[str],
        lookups: Floats,
        misses: Floats,
    ) -> list[Alert]:
        """Take counts in where keys are not known: scraped counters, hardware counters.

        All have one length n; counts are spread evenly over the cells of [start, end), Unix seconds. Nothing then tells
        penetration from a cache that fills: all misses count as unfilled. Counts come in order of time; those more than
        ``lateness_s`` behind are left out and counted as late.
        """
        if not len(starts_s):
            return []
        cell_s = self.options.cell_s
        first, last = np.rint(starts_s / cell_s).astype(np.int64), np.rint(ends_s / cell_s).astype(np.int64)
        if self._judge.at is None:
            self._judge.restart(int(first.min()))
        oldest = (self._judge.at or 0) - self.options.lateness_cells_count
        last = np.maximum(last, first + 1)
        kept = last > oldest
        self._counted_late_count += round(float(np.sum(lookups[~kept])))
        chosen = np.flatnonzero(kept).tolist()
        if not chosen:
            return []
        names = [(tenants[i], patterns[i]) for i in chosen]
        places = {name: self._book.chain(*name, float(starts_s[i])) for name, i in zip(names, chosen, strict=True)}
        chains = [places[name] for name in names]
        self._judge.grow()
        is_young = self._judge.is_young(np.array([chain[0] for chain in chains]))
        chains = [(chain[0], 0) if young else chain for chain, young in zip(chains, is_young.tolist(), strict=True)]
        of = np.repeat(chosen, [len(chain) for chain in chains])
        rows = np.concatenate([np.array(chain, np.int64) for chain in chains])
        new = spread(first[of], last[of], rows, (lookups[of], misses[of]), oldest)
        self._clock.reach(int(new.cells[-1]))
        return self._judge.add(new) + self._judge.move_to(int(new.cells[-1]) + 1)

    def advance(self, now_s: float) -> list[Alert]:
        """Say that event time has come to ``now_s``, although no look-up tells (live sources: twice a second or so)."""
        due = self._clock.follow(now_s)
        alerts: list[Alert] = []
        assert self._clock.cell is not None
        if self._clock.is_set_back and self._judge.at is not None:
            self._judge.restart(self._clock.cell)
        if due is not None:
            alerts += self._take_in(due)
        return alerts if self._judge.at is None else alerts + self._judge.move_to(self._clock.cell)

    def finish(self) -> list[Alert]:
        """Take in what was held back, and decide about the last cell: at the end of a file."""
        held = self._clock.finish()
        alerts = self._take_in(held) if held is not None else []
        return alerts if self._judge.at is None else alerts + self._judge.move_to(self._judge.at + 1)

    def snapshot(self) -> Snapshot:
        """How things stand now."""
        return take_snapshot(self._judge, self._book, self._clock, self.known, self._counted_late_count)

    def baseline_rows(self) -> list[BaselineRow]:
        """Baselines to keep for the next run."""
        return self._judge.baseline_rows()

    def _take_in(self, batch: Lookups) -> list[Alert]:
        """Take in look-ups that are sorted by time."""
        if not len(batch):
            return []
        if self._judge.at is None or self._clock.is_set_back:
            self._judge.restart(int(self._clock.cells_of(batch.ts_s[:1])[0]))
        starts = range(0, len(batch), _PART_COUNT)
        return [alert for at in starts for alert in self._take_part(_part(batch, at, at + _PART_COUNT))]

    def _take_part(self, batch: Lookups) -> list[Alert]:
        """Take in no more look-ups than fit into little memory."""
        cells = self._clock.cells_of(batch.ts_s)
        hashes = self._hash(batch.keys) ^ self._tenant_hashes(batch.tenants)
        patterns = fold(batch.keys, self.options.max_key_chars_count)
        places = self._book.resolve(batch.tenants, patterns, batch.ts_s, self._judge.busy())
        self._judge.grow()
        slices = np.floor((batch.ts_s - batch.ts_s[0]) / _SLICE_S)
        bounds = [0, *(np.flatnonzero(np.diff(slices)) + 1).tolist(), len(batch)]
        alerts: list[Alert] = []
        for first, last in pairwise(bounds):
            part = slice(first, last)
            spots = Places(places.patterns[part], places.prefixes[part], places.tenants[part])
            alerts += self._take_slice(_part(batch, first, last), cells[part], hashes[part], spots)
        return alerts

    def _take_slice(self, batch: Lookups, cells: Ints, hashes: Hashes, places: Places) -> list[Alert]:
        """Take in look-ups of a few seconds."""
        judge = self._judge
        facts = self._history.classify(batch, hashes, self.known)
        rows, look_ups = targets(places, judge.is_young(places.patterns))
        judge.samples.take(batch, facts, rows, look_ups)
        alerts = []
        for cell, part in tally(batch, facts, cells, rows, look_ups).by_cell():
            alerts += judge.add(part)
            low, high = np.searchsorted(cells, [cell, cell + 1]).tolist()
            judge.hot_keys.count(hashes[low:high], batch.hits[low:high], batch.ts_s[low:high])
        judge.distinct.add(rows, hashes[look_ups])
        for at, misses_count, since_s in zip(
            facts.candidates.tolist(),
            facts.candidate_misses_count.tolist(),
            facts.candidate_since_s.tolist(),
            strict=True,
        ):
            if not judge.hot_keys.may_follow(int(hashes[at]), misses_count):
                continue
            named = next(
                row for row in (places.patterns[at], places.prefixes[at], places.tenants[at], 0) if row != NO_ROW
            )
            row = self._book.rows[int(named)]
            key = batch.keys[at].as_py()[: self.options.sample_key_chars_count]
            followed = judge.hot_keys.new(key, row.tenant, row.pattern, since_s)
            judge.hot_keys.follow(int(hashes[at]), followed, misses_count, float(batch.ts_s[-1]))
        return alerts

    def _tenant_hashes(self, tenants: pa.DictionaryArray) -> Hashes:
        """A hash of each look-up's tenant: a key of two tenants is two keys."""
        codes: Ints = np.asarray(tenants.indices).astype(np.int64, copy=False)
        return np.asarray(self._hash(tenants.dictionary)[codes])


def _part(batch: Lookups, first: int, last: int) -> Lookups:
    part = slice(first, last)
    return Lookups(batch.ts_s[part], batch.keys[part], batch.hits[part], batch.ttls_s[part], batch.tenants[part])
