"""Numbering of groups of rows, and order within them, without a loop over rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from spikeprof.analyzers.derived.intervals import Integers, Ints, ints


def encoded(values: Integers) -> Ints:
    """Equal values numbered alike from 0, in order of appearance. By hashing: cheaper than a sort."""
    return ints(pa.array(values).dictionary_encode().indices.to_numpy())


def group_codes(*columns: Integers) -> tuple[Ints, int]:
    """Number the distinct combinations of the columns from 0: (number per row, how many)."""
    codes = encoded(columns[0])
    for column in columns[1:]:
        more = encoded(column)
        codes = encoded(codes * (int(more.max(initial=0)) + 1) + more)
    return codes, int(codes.max(initial=-1)) + 1


def first_of_groups(codes: Ints, count: int) -> Ints:
    """The first row of each group (numbered from 0, none empty)."""
    first = np.empty(count, np.int64)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    return first


def sorted_in_groups(codes: Integers, values: Ints, count: int) -> tuple[Ints, Ints]:
    """Values ascending within each group, group behind group; and ``count + 1`` offsets of the groups.

    ``values`` must not be negative.
    """
    stride = int(values.max(initial=0)) + 1
    if stride * max(count, 1) < 2**62:  # one sort of one number is several times faster than a lexsort
        keys = codes.astype(np.int64) * stride + values
        keys.sort()
        ordered = keys % stride
    else:
        ordered = values[np.lexsort((values, codes))]
    return ordered, np.append(0, np.cumsum(np.bincount(codes, minlength=count)))


def group_percentile(ordered: Ints, offsets: Ints, percent: int) -> Ints:
    """The nearest-rank percentile of each group: the smallest value that ``percent`` % of the values do not exceed.

    It is always a value that occurred: element ``ceil(percent / 100 * n)`` of the n values in order. Groups
    must not be empty.
    """
    counts = np.diff(offsets)
    return ints(ordered[offsets[:-1] + (counts * percent + 99) // 100 - 1])
