"""Scans of watched tensors in execution order, and what they add up to for each tensor of the model.

A *watched tensor* is what a module hands on or takes (path, role, dtype), in all steps and processes together: several
outputs of one module are one. A scan is *bad* when it saw Inf or NaN. Steps are numbered by process from 0; within a
step scans are in the order in which the device ran them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.derived.groups import first_of_groups, group_codes
from spikeprof.analyzers.derived.intervals import Bools, Integers, Ints, ints
from spikeprof.analyzers.derived.numerics_formats import Floats, Format, format_of, headroom_bits, limits
from spikeprof.profiler.trace import Trace


@dataclass(frozen=True, slots=True)
class Tensor:
    """One watched tensor; ``path`` is empty for the model itself."""

    path: str
    class_name: str
    role: str
    dtype: str

    @property
    def format(self) -> Format | None:
        """Its number format, None where that is not known."""
        return format_of(self.dtype)


@dataclass(frozen=True)
class Scans:
    """Arrays of one element per scan, sorted by process, step and order; ``tensor`` numbers ``tensors``.

    ``amax`` is the largest finite magnitude, ``smallest`` the smallest above zero; NaN where there is none. ``changed``
    is true where the tensor had been written to again before it was scanned.
    """

    rank: Ints
    step: Ints
    order: Ints
    tensor: Ints
    elements: Ints
    nan: Ints
    inf: Ints
    subnormal: Ints
    zero: Ints
    saturated: Ints
    first_bad: Ints
    real_amax: Floats  # what codes stand for at most, NaN where no scale is known
    real_limit: Floats
    real_dtype: tuple[str, ...]  # of each watched tensor; empty where no scale is known
    dimensions: Ints
    rows: Ints  # of the leading dimension; 0 where they are not told apart
    bad_rows: npt.NDArray[np.uint64]  # a bit for each; of more than 64 rows bit r * 64 // rows
    amax: Floats
    smallest: Floats
    limit: Floats
    changed: Bools
    tensors: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def bad(self) -> Bools:
        """Scans that saw Inf or NaN."""
        return np.asarray(self.nan + self.inf > 0, np.bool_)

    @cached_property
    def headroom(self) -> Floats:
        """log2(limit / amax) of each scan, in bits; infinite where all is zero, NaN where it is not known."""
        return headroom_bits(self.amax, self.limit)

    @cached_property
    def step_group(self) -> Ints:
        """Number of the (process, step) of each scan, ascending."""
        new = (np.diff(self.rank) != 0) | (np.diff(self.step) != 0)
        return ints(np.append(0, np.cumsum(new))) if len(self) else ints([])

    @cached_property
    def subnormal_share(self) -> Floats:
        """Subnormal elements of those that are finite and not zero, of each scan."""
        return _shares(self.subnormal, self.elements - self.nan - self.inf - self.zero)

    @cached_property
    def zero_share(self) -> Floats:
        """Zeros of all elements, of each scan."""
        return _shares(self.zero, self.elements)

    @property
    def two_of_a_row_share(self) -> Floats:
        """What two elements of each row are of all, in each scan; 0 where rows are not told apart."""
        return _shares(np.minimum(2 * self.rows, self.elements), self.elements)

    @cached_property
    def saturated_share(self) -> Floats:
        """Elements at the largest number or the end codes, of each scan."""
        return _shares(self.saturated, self.elements)

    def which(self, of: Callable[[Tensor], bool]) -> Bools:
        """Of which watched tensors something is true: one element per tensor."""
        return np.array([of(one) for one in self.tensors], np.bool_)

    @cached_property
    def unscaled(self) -> Bools:
        """Watched tensors whose headroom says something: floats but scales, and what is scaled to fill its format."""
        return self.which(lambda one: one.format is not None and not one.format.scaled and one.role != "scale")


def scans_of(trace: Trace, fp16_limit: float) -> Scans:
    """The table ``tensor_stats`` in execution order; ``fp16_limit`` is the largest number that fp16 is to hold."""

    def column(name: str) -> Any:
        values = trace.column("tensor_stats", name)
        return values if sort is None else values[sort]

    sort = _execution_order(*(trace.column("tensor_stats", name) for name in ("rank", "step", "order")))
    texts = [trace.codes("tensor_stats", name) for name in ("module", "class_name", "role", "dtype")]
    (path, paths), (class_name, classes), (role, roles), (dtype, dtypes) = (
        (codes if sort is None else codes[sort], labels) for codes, labels in texts
    )
    scanned, how = trace.codes("tensor_stats", "scanned")
    changed = _are(scanned, how, "changed")
    real, real_dtypes = trace.codes("tensor_stats", "real_dtype")
    real = real if sort is None else real[sort]
    tensor, count = group_codes(path, role, dtype)
    tensors = tuple(
        Tensor(paths[path[row]], classes[class_name[row]], roles[role[row]], dtypes[dtype[row]])
        for row in first_of_groups(tensor, count)
    )
    return Scans(
        rank=ints(column("rank")),
        step=ints(column("step")),
        order=ints(column("order")),
        tensor=tensor,
        elements=column("elements_count"),
        nan=column("nan_count"),
        inf=column("inf_count"),
        subnormal=column("subnormal_count"),
        zero=column("zero_count"),
        saturated=column("saturated_count"),
        first_bad=column("first_bad_index"),
        real_amax=np.where(_are(real, real_dtypes, ""), np.nan, _magnitudes(column("real_amax_value"))),
        real_limit=limits(real_dtypes, fp16_limit)[real],
        real_dtype=tuple(real_dtypes[code] for code in real[first_of_groups(tensor, count)].tolist()),
        dimensions=column("dimensions_count"),
        rows=column("rows_count"),
        bad_rows=column("bad_rows"),
        amax=_magnitudes(column("amax_value")),
        smallest=_magnitudes(column("smallest_value")),
        limit=limits([one.dtype for one in tensors], fp16_limit)[tensor],
        changed=changed if sort is None else changed[sort],
        tensors=tensors,
    )


def _are(codes: Integers, labels: list[str], text: str) -> Bools:
    return np.isin(codes, [at for at, label in enumerate(labels) if label == text])


def _execution_order(rank: Integers, step: Integers, order: Integers) -> Ints | None:
    """The order by process, step and order; None where the rows are in it already, so that nothing need be copied."""
    later = np.diff(order) >= 0
    for key in (step, rank):
        change = np.diff(key)
        later = (change > 0) | ((change == 0) & later)
    return None if later.all() else np.lexsort((order, step, rank))


def _magnitudes(values: Floats) -> Floats:
    """As they are, NaN for what is none."""
    wrong = ~((values >= 0) & np.isfinite(values))
    return np.where(wrong, np.nan, values) if wrong.any() else values


@dataclass(frozen=True, slots=True)
class Totals:
    """Arrays of one element per watched tensor, over all its scans.

    Shares are the largest of any one scan: of all elements, subnormal ones of those that are finite and not zero.
    ``real_amax`` is what codes stood for at most. ``least_headroom`` is NaN where no scan has a finite one. ``steps``
    are those of all processes together.
    """

    scans: Ints
    steps: Ints
    bad_steps: Ints
    nan: Ints
    inf: Ints
    amax: Floats
    smallest: Floats
    real_amax: Floats
    least_headroom: Floats
    limit: Floats
    subnormal_share: Floats
    zero_share: Floats
    saturated_share: Floats


def totals(scans: Scans) -> Totals:
    """Add up the scans of each watched tensor."""
    number, of = len(scans.tensors), scans.tensor
    headroom = np.where(np.isfinite(scans.headroom), scans.headroom, np.nan)
    limit = np.full(number, np.nan)
    limit[of] = scans.limit
    return Totals(
        ints(np.bincount(of, minlength=number)),
        steps_by_tensor(scans, np.ones(len(scans), np.bool_)),
        steps_by_tensor(scans, scans.bad),
        _sums(of, scans.nan, number),
        _sums(of, scans.inf, number),
        _most(of, scans.amax, number),
        -_most(of, -scans.smallest, number),
        _most(of, scans.real_amax, number),
        -_most(of, -headroom, number),
        limit,
        *(_most(of, share, number) for share in (scans.subnormal_share, scans.zero_share, scans.saturated_share)),
    )


def steps_by_tensor(scans: Scans, which: Bools) -> Ints:
    """In how many steps each watched tensor has a scan of those chosen."""
    picked = np.flatnonzero(which)
    pairs = np.unique(scans.tensor[picked] * (int(scans.step_group.max(initial=0)) + 1) + scans.step_group[picked])
    return ints(np.bincount(pairs // (int(scans.step_group.max(initial=0)) + 1), minlength=len(scans.tensors)))


def first_by_tensor(scans: Scans, which: Bools) -> Ints:
    """The first scan, in execution order by step, of those chosen, of each watched tensor; -1 where there is none."""
    picked = np.flatnonzero(which)
    picked = picked[np.lexsort((scans.order[picked], scans.step[picked]))]
    found = np.full(len(scans.tensors), -1, np.int64)
    found[scans.tensor[picked[::-1]]] = picked[::-1]
    return found


def in_order(scans: Scans, chosen: Ints) -> Floats:
    """Where in execution order, by step, the chosen scan of each watched tensor is; infinite where it is -1, none."""
    known = np.flatnonzero(chosen >= 0)
    place = np.full(len(chosen), np.inf)
    place[known[np.lexsort((scans.order[chosen[known]], scans.step[chosen[known]]))]] = np.arange(len(known))
    return place


def _shares(part: Ints, whole: Ints) -> Floats:
    """``part / whole``, 0 where there is no whole."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


def _sums(of: Integers, values: Ints, number: int) -> Ints:
    # Exact below 2^53 elements.
    return ints(np.bincount(of, values.astype(np.float64), minlength=number))


def _most(of: Integers, values: Floats, number: int) -> Floats:
    """The largest value of each group, NaN where it has none."""
    found = np.full(number, -np.inf)
    np.maximum.at(found, of, np.where(np.isnan(values), -np.inf, values))
    return np.where(np.isneginf(found), np.nan, found)
