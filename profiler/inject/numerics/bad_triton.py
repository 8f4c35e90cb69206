"""The slow pass over tiles in which something is at the end of its format: what exactly, and in which rows."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="misc,name-defined"

import sys

from . import records
from .tiles_triton import FLOAT, NIBBLES, NONE, PIECE, load

triton = sys.modules["triton"]
tl = sys.modules["triton.language"]

_ROWS = tl.constexpr(records.ROWS_MAX)


@triton.jit
def bad(address, shape, items, row, part, sharing, BYTES: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr,
        SPECIAL: tl.constexpr, INFINITE: tl.constexpr, LARGEST: tl.constexpr, STRIDED: tl.constexpr,
        TILE: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Largest finite magnitude (-1 of none), NaN, infinite, saturated, the first that is NaN or infinite, their rows.

    ``row``: items of a row, 0 where rows are not told apart.
    """
    zero = tl.zeros((), tl.int64)
    big = zero - 1 if BYTES == 8 else tl.zeros((), tl.int32) - 1
    nan, inf, saturated, first, rows = zero, zero, zero, zero + NONE, zero
    OWN: tl.constexpr = TILE if TILE < PIECE else PIECE
    for begin in range(part * (TILE * STEPS), items, sharing * (TILE * STEPS)):
        for i in range(TILE * STEPS // OWN):
            at = begin + i * OWN
            left = items - at
            if left > 0:
                bits = load(address, shape, at, left, BYTES, KIND, STRIDED, OWN, True)
                place = tl.arange(0, OWN).to(tl.int64) + at
                inside = place < items
                if KIND == NIBBLES:
                    big, nan, inf, saturated, first = _judge(
                        bits & 15, place, inside, big, nan, inf, saturated, first, SPECIAL, INFINITE, LARGEST
                    )
                    size = bits >> 4
                elif KIND == FLOAT:
                    size = bits & MASK
                else:
                    size = tl.abs(bits)
                before = nan + inf
                big, nan, inf, saturated, first = _judge(
                    size, place, inside, big, nan, inf, saturated, first, SPECIAL, INFINITE, LARGEST
                )
                if KIND == FLOAT:  # noqa: SIM102 (known when it is compiled, the other is not)
                    if nan + inf > before:
                        rows |= _rows_with(inside & (size >= SPECIAL), place, items, row)
    return big, nan, inf, saturated, first, rows


@triton.jit
def _rows_with(special, place, items, row):
    """A bit for each row with such an element, see records.py. Divides: only where there is one."""
    width = tl.maximum(row, 1)
    rows = tl.maximum(items // width, 1)
    own = place // width
    bit = tl.minimum(tl.where(rows > _ROWS, own * _ROWS // rows, own), _ROWS - 1)
    bits = tl.where(special & (row > 0), tl.full(place.shape, 1, tl.int64) << bit, tl.zeros_like(place))
    return tl.reduce(bits, 0, _either)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _judge(size, place, inside, big, nan, inf, saturated, first,
           SPECIAL: tl.constexpr, INFINITE: tl.constexpr, LARGEST: tl.constexpr):  # fmt: skip
    special = inside & (size >= SPECIAL)
    infinite = special & (size == INFINITE)
    big = tl.maximum(big, tl.max(tl.where(inside & (size < SPECIAL), size, -1), axis=0))
    nan += tl.sum((special & (size != INFINITE)).to(tl.int64), axis=0)
    inf += tl.sum(infinite.to(tl.int64), axis=0)
    saturated += tl.sum((inside & (size >= LARGEST) & (size < SPECIAL)).to(tl.int64), axis=0)
    first = tl.minimum(first, tl.min(tl.where(special, place, NONE), axis=0))
    return big, nan, inf, saturated, first
