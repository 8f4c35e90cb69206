"""Columns of ``tensor_stats`` from records of scans: magnitudes are bits, names are points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spikeprof.profiler.assemble.numerics_scales import real_magnitudes
from spikeprof.profiler.inject.numerics import records as layout
from spikeprof.profiler.inject.numerics.formats import BY_NUMBER, FLOAT, NIBBLES, Format
from spikeprof.profiler.schema import TABLES

if TYPE_CHECKING:
    from spikeprof.profiler.assemble.numerics import NumericsEvents

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def columns(rank: int, rows: Ints, told: NumericsEvents, t0_unix_ns: int) -> pa.Table:
    """Rows of ``tensor_stats`` from records [n, words] of one process."""
    tag, laid_out = rows[:, layout.TAG], rows[:, layout.LAID_OUT]
    forms, points = layout.format_of(tag), layout.point_of(tag)
    statistics = dict(zip(layout.STATISTICS, rows[:, layout.FIRST_STATISTIC : layout.LAID_OUT].T, strict=True))
    has_rows = ~np.isin(points, list(told.rows_unknown))
    distinct, place = np.unique(points, return_inverse=True)
    known = [told.points.get(int(point)) for point in distinct]
    names = [one.module if one else f"point {point}" for one, point in zip(known, distinct, strict=True)]
    numbers, form = np.unique(forms, return_inverse=True)
    amax = _values(statistics["amax"], forms)
    codes = told.scales
    real = real_magnitudes(rows, amax, codes, told.shared)
    dtypes = [codes[int(point)].dtype if int(point) in codes else "" for point in distinct]
    values = {
        "rank": np.full(len(rows), rank, np.int32),
        "step": rows[:, layout.STEP],
        "order": layout.order_of(tag),
        "module": _texts(place, names),
        "class_name": _texts(place, [one.class_name if one else "" for one in known]),
        "role": _texts(place, [one.role if one else "" for one in known]),
        "dtype": _texts(form, [BY_NUMBER[int(number)].name for number in numbers]),
        "elements_count": rows[:, layout.ELEMENTS],
        "amax_value": amax,
        "smallest_value": _values(statistics["smallest"], forms),
        **{f"{name}_count": statistics[name] for name in ("nan", "inf", "subnormal", "zero", "saturated")},
        "first_bad_index": statistics["first_bad"],
        "real_amax_value": real,
        "real_dtype": _texts(place, dtypes),
        "dimensions_count": layout.dimensions_of(laid_out),
        "rows_count": np.where(has_rows, _rows_count(rows[:, layout.ELEMENTS], laid_out, forms), 0),
        "bad_rows": np.where(has_rows, statistics["bad_rows"].astype(np.int64).view(np.uint64), np.uint64(0)),
        "scanned": _texts(np.minimum(laid_out & layout.WHEN, layout.CHANGED), list(layout.SCANNED)),
        "t_ns": rows[:, layout.TIME] - t0_unix_ns,
    }
    spec = TABLES["tensor_stats"].arrow
    return pa.table([pa.array(values[name]).cast(spec.field(name).type) for name in spec.names], schema=spec)


def _rows_count(elements: Ints, laid_out: Ints, forms: Ints) -> Ints:
    """Rows of each tensor, 0 where they are not told apart."""
    packed = np.isin(forms, [number for number, form in BY_NUMBER.items() if form.kind == NIBBLES])
    row = np.maximum(laid_out >> layout.ROW_SHIFT, 0) * np.where(packed, 2, 1)
    return np.where(row > 0, elements // np.maximum(row, 1), 0)


def _texts(codes: npt.NDArray[Any], texts: list[str]) -> pa.Array:
    unique = list(dict.fromkeys(texts))
    renumbered = np.array([unique.index(text) for text in texts], np.int32)
    chosen = renumbered[codes] if len(texts) else np.empty(0, np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(chosen.astype(np.int32)), pa.array(unique, pa.string()))


def _values(magnitudes: Ints, forms: Ints) -> Floats:
    """Magnitudes as numbers; NaN for those that stand for none."""
    out = np.full(len(magnitudes), np.nan)
    for number in np.unique(forms):
        own = (forms == number) & (magnitudes >= 0)
        out[own] = _numbers(magnitudes[own], BY_NUMBER[int(number)])
    return out


def _numbers(bits: Ints, form: Format) -> Floats:
    if form.kind != FLOAT:
        return bits.astype(np.float64)
    if form.item_bytes == 8:
        return bits.view(np.float64).copy()
    exponent, fraction = bits >> form.mantissa_bits, bits & ((1 << form.mantissa_bits) - 1)
    bias = (1 << (form.exponent_bits - 1)) - 1
    scaled = fraction + np.where(exponent > 0, 1 << form.mantissa_bits, 0)
    power = (np.maximum(exponent, 1) - bias - form.mantissa_bits).astype(np.int32)
    return np.asarray(np.ldexp(scaled.astype(np.float64), power), np.float64)
