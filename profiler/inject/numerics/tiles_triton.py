"""Tiles of a tensor as the scan's kernels read them: what is loaded, and the fast pass over it."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="misc,name-defined"

import sys

from . import formats

triton = sys.modules["triton"]
tl = sys.modules["triton.language"]

#: Dimensions of a view that is not contiguous, after neighbours that lie as one were merged.
DIMENSIONS = 4

#: Elements that are looked at one by one, with few registers.
PIECE = tl.constexpr(512)

#: No number, as a minimum begins.
NONE = tl.constexpr((1 << 63) - 1)

FLOAT, SIGNED, UNSIGNED, NIBBLES = (
    tl.constexpr(kind) for kind in (formats.FLOAT, formats.SIGNED, formats.UNSIGNED, formats.NIBBLES)
)
_DIMENSIONS = tl.constexpr(DIMENSIONS)


@triton.jit
def load(address, shape, at, left, BYTES: tl.constexpr, KIND: tl.constexpr, STRIDED: tl.constexpr,
         TILE: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    """``TILE`` items from ``at`` on, as int32 or int64: a float's bits, a code's value; 0 past ``left`` where CUT."""
    if BYTES == 8:
        base = address.to(tl.pointer_type(tl.int64))
    elif BYTES == 4:
        base = address.to(tl.pointer_type(tl.int32))
    elif BYTES == 2:
        base = address.to(tl.pointer_type(tl.int16))
    elif KIND == SIGNED:
        base = address.to(tl.pointer_type(tl.int8))
    else:
        base = address.to(tl.pointer_type(tl.uint8))
    within = tl.arange(0, TILE)
    if STRIDED:
        index = within.to(tl.int64) + at
        offset = tl.zeros_like(index)
        for dimension in tl.static_range(_DIMENSIONS):
            size = tl.load(shape + dimension)
            stride = tl.load(shape + _DIMENSIONS + dimension)
            offset += index % size * stride
            index = index // size
        place = base + offset
    else:
        place = tl.multiple_of(base, 16) + at + within
    bits = tl.load(place, mask=within < left, other=0) if CUT else tl.load(place)
    return bits if BYTES == 8 else bits.to(tl.int32)


@triton.jit
def extremes(address, shape, items, part, sharing, BYTES: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr,
             NORMAL: tl.constexpr, STRIDED: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
             PAIRS: tl.constexpr):  # fmt: skip
    """Largest magnitude (-1 of nothing), smallest but zero, zeros, and those below normal with the zeros."""
    WIDE: tl.constexpr = tl.uint64 if BYTES == 8 else tl.uint32
    OWN: tl.constexpr = PIECE if PAIRS > 0 else TILE
    big = tl.zeros((OWN,), WIDE)
    small = big - 1
    zero = tl.zeros((OWN,), WIDE)
    below = tl.zeros((OWN,), WIDE)
    beyond = tl.zeros((), tl.int64)  # places past the end, which are read as zeros
    first, step = part * (TILE * STEPS), sharing * (TILE * STEPS)
    if PAIRS > 0:
        whole = items // (TILE * STEPS) * (TILE * STEPS)
        largest, least, zeros, belows = _extremes_of_pairs(
            address, first, whole, step, BYTES, KIND, MASK, NORMAL, TILE, STEPS, PAIRS
        )
        # What is left is less than a part, and the program's whose turn it would be.
        rest = tl.where(whole // (TILE * STEPS) % sharing == part, whole, items)
        for at in range(rest, items, OWN):
            bits = load(address, shape, at, items - at, BYTES, KIND, STRIDED, OWN, True)
            big, small, zero, below = _gather(bits, big, small, zero, below, KIND, MASK, NORMAL)
            beyond += tl.maximum(OWN - (items - at), 0)
    else:
        for at in range(first, items, step):
            left = items - at
            if left >= TILE * STEPS:
                for i in tl.static_range(STEPS):
                    bits = load(address, shape, at + i * TILE, left, BYTES, KIND, STRIDED, TILE, False)
                    big, small, zero, below = _gather(bits, big, small, zero, below, KIND, MASK, NORMAL)
            else:
                for i in tl.static_range(STEPS):
                    if left > i * TILE:
                        bits = load(address, shape, at + i * TILE, left - i * TILE, BYTES, KIND, STRIDED, TILE, True)
                        big, small, zero, below = _gather(bits, big, small, zero, below, KIND, MASK, NORMAL)
                        beyond += tl.maximum(TILE - (left - i * TILE), 0)
    if KIND == NIBBLES:
        beyond *= 2
    own_largest = tl.max(big, axis=0).to(tl.int64 if BYTES == 8 else tl.int32)
    own_least = tl.min(small, axis=0).to(tl.int64)
    own_zeros = tl.sum(zero.to(tl.int64), axis=0) - beyond
    own_belows = tl.sum(below.to(tl.int64), axis=0) - beyond
    NOTHING: tl.constexpr = -1 if BYTES == 8 else 0xFFFFFFFF
    own_least = tl.where(own_least == NOTHING, NONE, own_least + 1)
    if PAIRS > 0:
        own_largest = tl.maximum(own_largest, largest)
        own_least = tl.minimum(own_least, least)
        own_zeros += zeros
        own_belows += belows
    if items == 0:
        own_largest = own_largest - 1
    return own_largest, own_least, own_zeros, own_belows


@triton.jit
def _extremes_of_pairs(address, first, whole, step, BYTES: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr,
                       NORMAL: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    """The same of whole parts of 8 and 16 bit items, two magnitudes in a word: half the instructions."""
    WORDS: tl.constexpr = TILE * BYTES // 4
    base = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    big = tl.zeros((WORDS,), tl.uint32)
    small = big - 1
    some = tl.zeros((WORDS,), tl.uint32)  # in each half, those that are not zero
    normal = tl.zeros((WORDS,), tl.uint32)
    count = tl.zeros((), tl.int64)
    for at in range(first, whole, step):
        place = base + at // (4 // BYTES) + tl.arange(0, WORDS)
        for i in tl.static_range(STEPS):
            words = tl.load(place + i * WORDS).to(tl.uint32, bitcast=True)
            if BYTES == 2:
                big, small, some, normal = _add_pairs(words & MASK * 0x10001, big, small, some, normal, NORMAL, PAIRS)
            else:
                if KIND == FLOAT:
                    words &= MASK * 0x01010101
                elif KIND == SIGNED:  # each byte: its complement and one, where it is negative
                    sign = (words >> 7) & 0x01010101
                    words = (words ^ (sign * 255)) + sign
                low, high = words & 0x00FF00FF, (words >> 8) & 0x00FF00FF
                big, small, some, normal = _add_pairs(low, big, small, some, normal, NORMAL, PAIRS)
                big, small, some, normal = _add_pairs(high, big, small, some, normal, NORMAL, PAIRS)
        count += TILE * STEPS
    largest = tl.maximum(tl.max(big >> 16, axis=0), tl.max(big & 0xFFFF, axis=0)).to(tl.int32)
    least = tl.minimum(tl.min(small >> 16, axis=0), tl.min(small & 0xFFFF, axis=0)).to(tl.int64)
    zeros = count - tl.sum(((some >> 16) + (some & 0xFFFF)).to(tl.int64), axis=0)
    belows = count - tl.sum(((normal >> 16) + (normal & 0xFFFF)).to(tl.int64), axis=0)
    return largest, tl.where(least == 0xFFFF, NONE, least + 1), zeros, belows


@triton.jit
def _add_pairs(sizes, big, small, some, normal, NORMAL: tl.constexpr, PAIRS: tl.constexpr):
    """As ``_add``, of two magnitudes below 2**15 in a word; counts stay below 2**16 up to tensors of 70 GB."""
    if PAIRS == 2:  # instructions for pairs, from compute capability 9.0 on
        ones = tl.full(sizes.shape, 0x00010001, tl.uint32)
        minus_one = tl.full(sizes.shape, 0xFFFFFFFF, tl.uint32)
        big = tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [big, sizes], tl.uint32, True, 1)
        small = tl.inline_asm_elementwise(
            "{ .reg .b32 t; add.u16x2 t, $2, $3; min.u16x2 $0, $1, t; }", "=r,r,r,r",
            [small, sizes, minus_one], tl.uint32, True, 1,
        )  # fmt: skip
        some += tl.inline_asm_elementwise("min.u16x2 $0, $1, $2;", "=r,r,r", [sizes, ones], tl.uint32, True, 1)
        if NORMAL > 1:
            less = tl.full(sizes.shape, (0x10001 - NORMAL) * 0x10001 & 0xFFFFFFFF, tl.uint32)
            normal += tl.inline_asm_elementwise(
                "{ .reg .b32 t; add.s16x2 t, $1, $2; min.relu.s16x2 $0, t, $3; }", "=r,r,r,r",
                [sizes, less, ones], tl.uint32, True, 1,
            )  # fmt: skip
    else:
        less = (sizes + 0x7FFF7FFF) ^ 0x80008000
        big = tl.maximum(big & 0xFFFF0000, sizes & 0xFFFF0000) | tl.maximum(big & 0xFFFF, sizes & 0xFFFF)
        small = tl.minimum(small & 0xFFFF0000, less & 0xFFFF0000) | tl.minimum(small & 0xFFFF, less & 0xFFFF)
        some += ((sizes + 0x7FFF7FFF) >> 15) & 0x00010001
        if NORMAL > 1:
            normal += ((sizes + (0x8000 - NORMAL) * 0x10001) >> 15) & 0x00010001
    if NORMAL == 1:
        normal = some
    return big, small, some, normal


@triton.jit
def _gather(bits, big, small, zero, below, KIND: tl.constexpr, MASK: tl.constexpr, NORMAL: tl.constexpr):
    if KIND == NIBBLES:
        big, small, zero, below = _add(bits & 15, big, small, zero, below, NORMAL)
        big, small, zero, below = _add(bits >> 4, big, small, zero, below, NORMAL)
    elif KIND == FLOAT:
        big, small, zero, below = _add(bits & MASK, big, small, zero, below, NORMAL)
    else:
        big, small, zero, below = _add(tl.abs(bits), big, small, zero, below, NORMAL)
    return big, small, zero, below


@triton.jit
def _add(size, big, small, zero, below, NORMAL: tl.constexpr):
    """Without a comparison: of unsigned numbers zero less one is the largest, and the top bit tells a borrow."""
    TOP: tl.constexpr = 63 if big.dtype == tl.uint64 else 31  # ``primitive_bitwidth`` is no number in Triton 3.2
    size = size.to(big.dtype)
    less = size - 1
    big = tl.maximum(big, size)
    small = tl.minimum(small, less)
    zero += less >> TOP
    below += (size - NORMAL) >> TOP
    return big, small, zero, below
