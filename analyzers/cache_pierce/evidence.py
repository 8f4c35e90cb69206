"""What tells penetration from caches that fill: for every miss, whether its key is known, was hit, or is never filled.

A key that hit lately and misses now was flushed or has expired: it will be filled. A key whose misses end in a hit was
filled. What is left, ``unfilled``, is what nothing speaks for: random keys, ids that do not exist. Hits of keys that
were new a moment ago (``young_hit``) say that new keys are filled: where they are not far fewer than what is unfilled,
there is new traffic, or a deploy with new keys, and no penetration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.analyzers.cache_pierce.known import KnownKeys
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.analyzers.cache_pierce.sketch import FIRST_FILLED, Flags, Hashes, HitMemory, MissMemory
from spikeprof.profiler.lookups import Lookups

Kind = TypeVar("Kind", bound=np.generic)

_CANDIDATE_MISSES_COUNT = 10  # in a row: a key that is looked at as a hot missing one


@dataclass(frozen=True, slots=True)
class Facts:
    """What each of n look-ups says: bool [n], all False for hits, except ``filled``.

    ``existing``: the key is known, or hit before and missing for at most ``refill_s``; ``first_seen``: never seen
    before; ``repeated``: its last look-up missed, too; ``nowhere``: KnownKeys rules it out; ``filled`` int32 [n]: so
    many misses in a row of a key never hit before end with this hit. ``young_hit``: its key was first
    filled at most ``refill_s`` ago. ``candidates``: one look-up (its index) of each key missed often in a row by now,
    with how often, and since when.
    """

    existing: Flags
    first_seen: Flags
    repeated: Flags
    young_hit: Flags
    nowhere: Flags
    filled: npt.NDArray[np.int32]
    candidates: npt.NDArray[np.int64]
    candidate_misses_count: npt.NDArray[np.int32]
    candidate_since_s: npt.NDArray[np.float64]


class KeyHistory:
    """What is remembered of keys from block to block."""

    def __init__(self, options: Options) -> None:
        self._refill_s = options.refill_s
        self.hits = HitMemory(options.hit_memory_count)
        self.misses = MissMemory(options.key_memory_count)

    def classify(self, batch: Lookups, hashes: Hashes, known: KnownKeys | None) -> Facts:
        """What each of n look-ups, sorted by time, says about its key, given all before; remembers them."""
        order = np.argsort(hashes, kind="stable")
        key, hit, ts_s = hashes[order], batch.hits[order], batch.ts_s[order]
        count = len(key)
        at = np.arange(count)
        is_first = np.ones(count, np.bool_)
        is_first[1:] = key[1:] != key[:-1]
        starts = np.flatnonzero(is_first)
        of = np.cumsum(is_first) - 1  # which key each look-up is of
        start = starts[of]
        keys = key[starts]
        past, was_hit = self.misses.past(keys), self.hits.contains(keys)

        newest_hit = np.maximum.accumulate(np.where(hit, at, -1))
        hit_before = np.concatenate([[-1], newest_hit[:-1]])
        has_hit = hit_before >= start  # within this block
        run_start = np.where(has_hit, hit_before + 1, start)
        carried = np.where(has_hit, 0, np.maximum(past.misses_count[of], 0))
        earlier = (at - run_start + carried).astype(np.int32)  # misses in a row right before
        since_s = np.where(carried > 0, past.missing_since_s[of], ts_s[run_start])
        ever_hit = has_hit | was_hit[of]
        is_fresh = ts_s - since_s <= self._refill_s

        existing = ~hit & ever_hit & is_fresh
        fills = hit & ~ever_hit & (earlier > 0)
        fills_count = np.cumsum(fills)
        was_filled = past.misses_count == FIRST_FILLED
        has_filled = fills_count > np.concatenate([[0], fills_count])[start]
        first_s = np.where(past.misses_count != 0, past.missing_since_s, ts_s[starts])  # of the misses before the fill
        young_hit = hit & (has_filled | was_filled[of]) & (ts_s - first_s[of] <= self._refill_s)
        nowhere = np.zeros(count, np.bool_)
        is_hit_key = np.logical_or.reduceat(hit, starts) if count else np.zeros(0, np.bool_)
        texts = order[starts]  # one look-up of each key
        if known is not None:
            exists, rules_out = _ask(known, batch.keys, texts, np.logical_or.reduceat(~hit, starts), was_hit)
            existing |= ~hit & exists[of]
            nowhere = ~hit & rules_out[of] & ~has_hit
            known.learn(batch.keys.take(pa.array(texts[is_hit_key & ~was_hit])).to_pylist())
        self.hits.add(keys[is_hit_key])
        ends = np.append(starts[1:], count) - 1
        trailing = np.where(hit[ends], 0, earlier[ends] + 1).astype(np.int32)
        is_young = young_hit[ends]
        self.misses.store(
            keys, np.where(is_young, FIRST_FILLED, trailing), np.where(is_young, first_s, since_s[ends]), ts_s[ends]
        )
        hot = np.flatnonzero(trailing >= _CANDIDATE_MISSES_COUNT)

        def back(values: npt.NDArray[Kind]) -> npt.NDArray[Kind]:
            out = np.empty_like(values)
            out[order] = values
            return out

        return Facts(
            existing=back(existing),
            first_seen=back(~hit & ~ever_hit & (earlier == 0)),
            repeated=back(~hit & (earlier > 0)),
            nowhere=back(nowhere),
            young_hit=back(young_hit),
            filled=back(np.where(fills & is_fresh, earlier, 0).astype(np.int32)),
            candidates=texts[hot],
            candidate_misses_count=trailing[hot],
            candidate_since_s=since_s[ends][hot],
        )


def _ask(
    known: KnownKeys, texts: pa.StringArray, index: npt.NDArray[np.int64], missed: Flags, was_hit: Flags
) -> tuple[Flags, Flags]:
    """Which keys exist, and which exist nowhere, as far as ``known`` can tell; only those missed are asked for."""
    exists = np.zeros(len(index), np.bool_)
    asked = np.flatnonzero(missed)
    exists[asked] = known.contains(texts.take(pa.array(index[asked])))
    return exists, missed & ~exists & ~was_hit
