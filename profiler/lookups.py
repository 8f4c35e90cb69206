"""Key look-ups of a cache, column by column: what every source of them gives, and what the detector reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Lookups:
    """``n`` look-ups, in any order of time.

    ``ts_s`` float64 [n] Unix seconds at which each was made; ``keys`` string [n], bytes that are not UTF-8 written as
    ``\\xNN``; ``hits`` bool [n]; ``ttls_s`` float64 [n] what the entry still had to live, NaN where unknown or without
    end; ``tenants`` dictionary of strings [n], empty where there are none.
    """

    ts_s: npt.NDArray[np.float64]
    keys: pa.StringArray
    hits: npt.NDArray[np.bool_]
    ttls_s: npt.NDArray[np.float64]
    tenants: pa.DictionaryArray

    def __len__(self) -> int:
        return len(self.ts_s)


def lookups(
    ts_s: Sequence[float] | npt.NDArray[np.float64],
    keys: Sequence[str | bytes] | pa.StringArray,
    hits: Sequence[bool] | npt.NDArray[np.bool_],
    ttls_s: Sequence[float] | npt.NDArray[np.float64] | None = None,
    tenants: Sequence[str] | pa.DictionaryArray | None = None,
) -> Lookups:
    """Look-ups from sequences of one length. Raises ValueError where lengths differ."""
    if not isinstance(keys, pa.Array):
        keys = pa.array([key if isinstance(key, str) else text_of(key) for key in keys], pa.string())
    count = len(keys)
    if tenants is None:
        tenants = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([""], pa.string()))
    elif not isinstance(tenants, pa.Array):
        tenants = pa.array(tenants, pa.string()).dictionary_encode()
    times, found = np.asarray(ts_s, np.float64), np.asarray(hits, np.bool_)
    left = np.full(count, np.nan) if ttls_s is None else np.asarray(ttls_s, np.float64)
    lengths = {"ts_s": len(times), "keys": count, "hits": len(found), "ttls_s": len(left), "tenants": len(tenants)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of look-ups differ in length: {lengths}")
    return Lookups(times, keys, found, left, tenants)


def text_of(key: bytes) -> str:
    """A key as text."""
    return key.decode("utf-8", errors="backslashreplace")
