"""What is remembered of keys in bounded memory. Keys come as 64-bit hashes under a secret of the process.

The secret (``secrets``) keeps anybody from choosing keys that collide. Two different keys have the same hash with a
chance of n/2**64 among n keys.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rbloom import Bloom

Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

#: Share of keys never seen that HitMemory takes for seen, while its filters are full (half of it otherwise).
HIT_FALSE_POSITIVE_SHARE = 0.002
_REGISTER_BITS = 10  # 1,024 registers: a standard error of 1.04/32 = 3.3 %
_REGISTERS_COUNT = 1 << _REGISTER_BITS
_GENERATIONS_COUNT = 2

#: Instead of misses in a row: the key was never hit before it was filled a moment ago.
FIRST_FILLED = -1

_ROUGH_BITS = 16
_HELD_MISSES_COUNT = 3  # a key missed so often in a row keeps its place …
_HELD_S = 10.0  # … for so long after its last miss


class KeyHash:
    """Hashes of keys (SipHash, by Python's own of strings), the same for the life of this object.

    Its secret is that of the process, which PYTHONHASHSEED may give away: keys are hashed behind one of our own.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_hex(8)

    def __call__(self, keys: pa.StringArray) -> Hashes:
        """Hashes uint64 [n] of n keys."""
        texts = keys.to_numpy(zero_copy_only=False)
        return np.fromiter(map(hash, map(self._secret.__add__, texts)), np.int64, len(texts)).view(np.uint64)


class RoughCounts:
    """How often texts came, never too few: a count-min sketch of 2 times 65,536 numbers (Cormode, Muthukrishnan, 2005).

    It is halved whenever the numbers reach 4 on average, so that what came long ago, and many texts that
    came once, do not add up.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((2, 1 << _ROUGH_BITS), np.int64)
        self._hash = KeyHash()
        self._total = 0

    def add(self, texts: list[str], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Add n different texts that came ``counts`` times; how often each has come by now, int64 [n]."""
        hashes = self._hash(pa.array(texts, pa.string()))
        places = [(hashes >> np.uint64(shift)) & np.uint64((1 << _ROUGH_BITS) - 1) for shift in (0, 32)]
        self._total += int(counts.sum())
        for row, place in enumerate(places):
            np.add.at(self._counts[row], place, counts)
        seen = np.minimum(self._counts[0][places[0]], self._counts[1][places[1]])
        if self._total > 4 << _ROUGH_BITS:
            self._counts //= 2
            self._total //= 2
        return np.asarray(seen)


class HitMemory:
    """Which keys have hit: two Bloom filters (``rbloom``), the older of which is dropped when the newer is full.

    So the last ``capacity_count`` to twice as many keys are remembered, in 1.8 MB per million keys and filter. At most
    ``HIT_FALSE_POSITIVE_SHARE`` of other keys are taken for one of them.
    """

    def __init__(self, capacity_count: int) -> None:
        self._capacity_count = capacity_count
        self._new, self._old = self._filter(), self._filter()
        self._added_count = 0

    def _filter(self) -> Bloom:
        return Bloom(self._capacity_count, HIT_FALSE_POSITIVE_SHARE / _GENERATIONS_COUNT)

    def contains(self, hashes: Hashes) -> Flags:
        """Whether each of n keys has hit, bool [n]."""
        new, old = self._new, self._old
        numbers = hashes.tolist()
        return np.fromiter((number in new or number in old for number in numbers), np.bool_, len(numbers))

    def add(self, hashes: Hashes) -> None:
        """Remember that these keys have hit."""
        fresh = [number for number in hashes.tolist() if number not in self._new]
        self._new.update(fresh)
        self._added_count += len(fresh)
        if self._added_count >= self._capacity_count:
            self._old, self._new, self._added_count = self._new, self._filter(), 0


@dataclass(frozen=True, slots=True)
class Past:
    """What is remembered of n keys: all [n]; ``is_there`` False = nothing, and the rest is 0."""

    is_there: Flags
    misses_count: npt.NDArray[np.int32]  # in a row, up to now; 0 after a hit; FIRST_FILLED after the first one ever
    missing_since_s: npt.NDArray[np.float64]  # when those began, or had begun


class MissMemory:
    """The misses in a row of keys that were missed lately: one place per hash, 24 bytes each; newer push out others.

    A key missed three times in a row or more is not pushed out for 10 s, so that single random keys do not
    drive out what shows that others are never filled.
    """

    def __init__(self, places_count: int) -> None:
        self._mask = np.uint64(places_count - 1)
        self._hashes = np.zeros(places_count, np.uint64)
        self._misses = np.zeros(places_count, np.int32)
        self._since_s = np.zeros(places_count, np.float64)
        self._last_s = np.zeros(places_count, np.float32)  # after _start_s
        self._start_s: float | None = None

    def past(self, hashes: Hashes) -> Past:
        """What is remembered of n keys."""
        places = hashes & self._mask
        is_there = self._hashes[places] == hashes
        return Past(
            is_there,
            np.where(is_there, self._misses[places], 0),
            np.where(is_there, self._since_s[places], 0.0),
        )

    def store(
        self,
        hashes: Hashes,
        misses: npt.NDArray[np.int32],
        since_s: npt.NDArray[np.float64],
        last_s: npt.NDArray[np.float64],
    ) -> None:
        """Remember n different keys: their misses in a row, when these began, when the key was last looked up."""
        if not len(hashes):
            return
        if self._start_s is None:
            self._start_s = float(last_s[0])
        last = (last_s - self._start_s).astype(np.float32)
        places = hashes & self._mask
        is_own = self._hashes[places] == hashes
        is_held = (self._misses[places] >= _HELD_MISSES_COUNT) & (self._last_s[places] > last - _HELD_S)
        take = is_own | (~is_held & (misses != 0))
        places = places[take]
        self._hashes[places] = hashes[take]
        # two keys of one place: the last one written stays, in each column
        self._misses[places] = misses[take]
        self._since_s[places] = since_s[take]
        self._last_s[places] = last[take]


class DistinctCounts:
    """How many different keys each of many rows saw: HyperLogLog with 1,024 registers (standard error 3.3 %).

    Two generations: ``turn`` starts a new one and drops the older. Formulas: Flajolet, Fusy, Gandouet, Meunier,
    "HyperLogLog" (2007), with linear counting below 2.5 times the registers.
    """

    def __init__(self) -> None:
        self._registers = np.zeros((0, _GENERATIONS_COUNT, _REGISTERS_COUNT), np.uint8)
        self._lookups = np.zeros((0, _GENERATIONS_COUNT), np.int64)
        self._now = 0

    def grow(self, rows_count: int) -> None:
        """Make room for so many rows."""
        more = rows_count - len(self._registers)
        if more > 0:
            empty = np.zeros((more, *self._registers.shape[1:]), np.uint8)
            self._registers = np.concatenate([self._registers, empty])
            self._lookups = np.concatenate([self._lookups, np.zeros((more, _GENERATIONS_COUNT), np.int64)])

    def clear(self, row: int) -> None:
        """Forget what one row saw."""
        self._registers[row] = 0
        self._lookups[row] = 0

    def turn(self) -> None:
        """Begin a new generation."""
        self._now = 1 - self._now
        self._registers[:, self._now] = 0
        self._lookups[:, self._now] = 0

    def add(self, rows: npt.NDArray[np.int64], hashes: Hashes) -> None:
        """Row ``rows[i]`` saw key ``hashes[i]``, for n look-ups."""
        self._lookups[:, self._now] += np.bincount(rows, minlength=len(self._lookups))
        index = (hashes >> np.uint64(64 - _REGISTER_BITS)).astype(np.int64)
        rest = (hashes << np.uint64(_REGISTER_BITS)) >> np.uint64(_REGISTER_BITS)
        bits = np.frexp(rest.astype(np.float64))[1]  # the position of the highest bit that is set
        ranks = (64 - _REGISTER_BITS - np.minimum(bits, 64 - _REGISTER_BITS) + 1).astype(np.uint8)
        flat = self._registers.reshape(-1)
        np.maximum.at(flat, (rows * _GENERATIONS_COUNT + self._now) * _REGISTERS_COUNT + index, ranks)

    @property
    def lookups_count(self) -> npt.NDArray[np.int64]:
        """Look-ups of each row that ``counts`` is about, int64 [rows]."""
        total: npt.NDArray[np.int64] = self._lookups.sum(axis=1)
        return total

    def count(self, row: int) -> float:
        """Different keys of one row."""
        return float(self.counts(slice(row, row + 1))[0])

    def counts(self, rows: slice = slice(None)) -> npt.NDArray[np.float64]:
        """Different keys of each row in this generation and the one before, float64 [rows]."""
        merged = self._registers[rows].max(axis=1)
        if not len(merged):
            return np.zeros(0)
        total = np.ldexp(1.0, -merged.astype(np.int32)).sum(axis=1)
        raw = 0.7213 / (1 + 1.079 / _REGISTERS_COUNT) * _REGISTERS_COUNT**2 / total
        empty = (merged == 0).sum(axis=1)
        linear = _REGISTERS_COUNT * np.log(_REGISTERS_COUNT / np.maximum(empty, 1))
        counts: npt.NDArray[np.float64] = np.where((raw <= 2.5 * _REGISTERS_COUNT) & (empty > 0), linear, raw)
        return counts
