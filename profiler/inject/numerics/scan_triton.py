"""The scan as Triton kernels: any number of tensors of one format in one launch, results straight to host memory.

A program takes some tiles of one tensor at a time. Its fast pass gathers the largest and smallest magnitudes and
counts zeros and what is below normal; only where the largest magnitude reaches the format's limit are the same tiles
read again for the rest. Programs of one tensor meet in integer atomics, so that the order does not matter; the last
one writes the record. Nothing is allocated, nothing waits: the kernels can be captured into CUDA graphs.

Loaded only where a program that is watched has torch and Triton; this is the one file here that needs them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="misc,name-defined"

import sys

from . import formats, records

triton = sys.modules["triton"]
tl = sys.modules["triton.language"]

#: Words of a row of the table: address, elements, order << 32 | point, how it lies and when it is scanned.
TABLE_WORDS = 4

#: Words of a row of the scratch memory: the first eight statistics, programs that are done, bad rows.
SCRATCH_WORDS = 16

#: Dimensions of a view that is not contiguous, after neighbours that lie as one were merged.
DIMENSIONS = 4

TILE_BYTES = 2048  # of a program's load: 16 bytes of each of its threads
WARPS = 4
STEPS = 4  # loads of a program in flight

_FLOAT, _SIGNED, _UNSIGNED, _NIBBLES = (
    tl.constexpr(kind) for kind in (formats.FLOAT, formats.SIGNED, formats.UNSIGNED, formats.NIBBLES)
)
_WORDS = tl.constexpr(records.RECORD_WORDS)
_SEALED = tl.constexpr(records.SEALED)
_LAID_OUT = tl.constexpr(records.LAID_OUT)
_ROW_SHIFT = tl.constexpr(records.ROW_SHIFT)
_ROWS = tl.constexpr(records.ROWS_MAX)
_FIRST = tl.constexpr(records.FIRST_STATISTIC)
_SEAL = tl.constexpr(records.SEAL)
_NONE = tl.constexpr((1 << 63) - 1)
_TABLE = tl.constexpr(TABLE_WORDS)
_SCRATCH = tl.constexpr(SCRATCH_WORDS)
_DIMENSIONS = tl.constexpr(DIMENSIONS)
_PIECE = tl.constexpr(512)  # elements that are looked at one by one, with few registers


def constants(form, strided, pairs):
    """The compile-time arguments of ``spikeprof_numerics_scan`` for a format.

    ``pairs``: 0 = one magnitude at a time, 1 = two in a word where that goes, 2 = by instructions made for it.
    """
    in_pairs = not strided and form.item_bytes <= 2 and form.kind != formats.NIBBLES
    return {
        "PAIRS": pairs if in_pairs else 0,
        "BYTES": form.item_bytes, "KIND": form.kind, "MASK": form.sign_mask, "SPECIAL": form.special,
        "INFINITE": form.infinity, "LARGEST": form.largest, "NORMAL": form.normal, "STRIDED": strided,
        "TILE": TILE_BYTES // form.item_bytes, "STEPS": 1 if strided else STEPS,
    }  # fmt: skip


def part_items(form, strided):
    """Items that a program loads at a time."""
    return (1 if strided else STEPS) * TILE_BYTES // form.item_bytes


@triton.jit(do_not_specialize=["steps"])
def spikeprof_numerics_step(state, steps):
    """``steps`` more steps have begun."""
    tl.store(state, tl.load(state) + steps)


@triton.jit(do_not_specialize=["row", "every", "when_ns"])
def spikeprof_numerics_scan(table, shapes, finished, ring, state, scratch, row, every, when_ns, RING: tl.constexpr,
                BYTES: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr, SPECIAL: tl.constexpr,
                INFINITE: tl.constexpr, LARGEST: tl.constexpr, NORMAL: tl.constexpr, STRIDED: tl.constexpr,
                TILE: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr, CLOCK: tl.constexpr):  # fmt: skip
    """Program (i, j) takes every ``num_programs(1)``-th part from ``j`` on of the tensor in row ``row + i``.

    ``state`` is [step, tickets] int64. Nothing is done in steps that are no multiple of ``every``.
    """
    step = tl.load(state)
    if step % every == 0:
        own_row = (row + tl.program_id(0)).to(tl.int64)
        # The table lies in host memory: four words for the wait of one.
        address = tl.load(table + own_row * _TABLE)
        items = tl.load(table + own_row * _TABLE + 1)
        tag = tl.load(table + own_row * _TABLE + 2)
        scanned = tl.load(table + own_row * _TABLE + 3)
        parts = tl.cdiv(items, TILE * STEPS)
        sharing = tl.minimum(tl.maximum(parts, 1), tl.num_programs(1))
        if tl.program_id(1) < sharing:
            _share(shapes, finished, ring, state, scratch, own_row, step, address, items, tag, scanned, sharing,
                   when_ns, RING, BYTES, KIND, MASK, SPECIAL, INFINITE, LARGEST, NORMAL, STRIDED, TILE, STEPS, PAIRS,
                   CLOCK)  # fmt: skip


@triton.jit
def _share(shapes, finished, ring, state, scratch, row, step, address, items, tag, scanned, sharing, when_ns,
           RING: tl.constexpr, BYTES: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr, SPECIAL: tl.constexpr,
           INFINITE: tl.constexpr, LARGEST: tl.constexpr, NORMAL: tl.constexpr, STRIDED: tl.constexpr,
           TILE: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr, CLOCK: tl.constexpr):  # fmt: skip
    """One program's share of a tensor, and the record if it is the last."""
    shape = shapes + row * (2 * _DIMENSIONS)
    part = tl.program_id(1).to(tl.int64)
    largest, small, zero, below = _extremes(
        address, shape, items, part, sharing, BYTES, KIND, MASK, NORMAL, STRIDED, TILE, STEPS, PAIRS
    )
    nan = tl.zeros_like(zero)
    inf = tl.zeros_like(zero)
    saturated = tl.zeros_like(zero)
    first = tl.zeros_like(items) + _NONE
    rows = tl.zeros_like(items)
    if largest >= LARGEST:
        largest, nan, inf, saturated, first, rows = _bad(
            address, shape, items, scanned >> _ROW_SHIFT, part, sharing,
            BYTES, KIND, MASK, SPECIAL, INFINITE, LARGEST, STRIDED, TILE, STEPS
        )  # fmt: skip
    small = tl.where(small >= SPECIAL, _NONE, small)  # where no finite element is smaller
    amax = largest.to(tl.int64)
    nan, inf, saturated = nan.to(tl.int64), inf.to(tl.int64), saturated.to(tl.int64)
    zero = zero.to(tl.int64)
    subnormal = below.to(tl.int64) - zero
    if KIND >= _UNSIGNED:
        saturated += zero
    if sharing == 1:
        _write(finished, ring, state, row, step, items, tag, scanned, when_ns, RING, KIND, CLOCK,
               amax, small, nan, inf, subnormal, zero, saturated, first, rows)  # fmt: skip
    else:
        own = scratch + row * _SCRATCH
        tl.atomic_max(own, amax, sem="relaxed")
        tl.atomic_min(own + 1, small, sem="relaxed")
        if nan + inf > 0:
            tl.atomic_add(own + 2, nan, sem="relaxed")
            tl.atomic_add(own + 3, inf, sem="relaxed")
            tl.atomic_min(own + 7, first, sem="relaxed")
            tl.atomic_or(own + 9, rows, sem="relaxed")
        if subnormal > 0:
            tl.atomic_add(own + 4, subnormal, sem="relaxed")
        if zero > 0:
            tl.atomic_add(own + 5, zero, sem="relaxed")
        if saturated > 0:
            tl.atomic_add(own + 6, saturated, sem="relaxed")
        # Releases what this program added, and sees what all before it have.
        if tl.atomic_add(own + 8, tl.full((), 1, tl.int64), sem="acq_rel") == sharing - 1:
            nothing = tl.zeros_like(amax)
            _write(finished, ring, state, row, step, items, tag, scanned, when_ns, RING, KIND, CLOCK,
                   _taken(own, nothing - 1), _taken(own + 1, nothing + _NONE), _taken(own + 2, nothing),
                   _taken(own + 3, nothing), _taken(own + 4, nothing), _taken(own + 5, nothing),
                   _taken(own + 6, nothing), _taken(own + 7, nothing + _NONE), _taken(own + 9, nothing))  # fmt: skip
            tl.atomic_xchg(own + 8, nothing, sem="relaxed")


@triton.jit
def _taken(place, start):
    """The sum so far, which begins anew: the next replay finds the row as this one did."""
    return tl.atomic_xchg(place, start, sem="relaxed")


@triton.jit
def _write(finished, ring, state, row, step, items, tag, scanned, when_ns, RING: tl.constexpr,
           KIND: tl.constexpr, CLOCK: tl.constexpr,
           amax, small, nan, inf, subnormal, zero, saturated, first, rows):  # fmt: skip
    """The record, in one store of sixteen words; see records.py."""
    now = tl.extra.cuda.globaltimer().to(tl.int64) if CLOCK else when_ns.to(tl.int64)
    elements = items
    if KIND == _NIBBLES:
        elements = items * 2
    none = tl.zeros_like(items) - 1
    small = tl.where(small == _NONE, none, small)
    first = tl.where(first == _NONE, none, first)
    ticket = tl.atomic_add(state + 1, tl.full((), 1, tl.int64), sem="relaxed")
    seal = (_SEAL ^ (ticket + 1) ^ step ^ tag ^ now ^ elements ^ scanned ^ amax ^ small ^ nan ^ inf ^ subnormal ^ zero
            ^ saturated ^ first ^ rows)  # fmt: skip
    lane = tl.arange(0, _WORDS)
    words = tl.zeros((_WORDS,), tl.int64)
    words = tl.where(lane == 0, ticket + 1, words)
    words = tl.where(lane == 1, step, words)
    words = tl.where(lane == 2, tag, words)
    words = tl.where(lane == 3, now, words)
    words = tl.where(lane == 4, elements, words)
    words = tl.where(lane == _FIRST, amax, words)
    words = tl.where(lane == _FIRST + 1, small, words)
    words = tl.where(lane == _FIRST + 2, nan, words)
    words = tl.where(lane == _FIRST + 3, inf, words)
    words = tl.where(lane == _FIRST + 4, subnormal, words)
    words = tl.where(lane == _FIRST + 5, zero, words)
    words = tl.where(lane == _FIRST + 6, saturated, words)
    words = tl.where(lane == _FIRST + 7, first, words)
    words = tl.where(lane == _FIRST + 8, rows, words)
    words = tl.where(lane == _LAID_OUT, scanned, words)
    words = tl.where(lane == _SEALED, seal, words)
    tl.store(ring + ticket % RING * _WORDS + lane, words)
    tl.store(finished + row, ticket + 1)


@triton.jit
def _extremes(address, shape, items, part, sharing, BYTES: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr,
              NORMAL: tl.constexpr, STRIDED: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
              PAIRS: tl.constexpr):  # fmt: skip
    """Largest magnitude (-1 of nothing), smallest but zero, zeros, and those below normal with the zeros."""
    UNSIGNED: tl.constexpr = tl.uint64 if BYTES == 8 else tl.uint32
    PIECE: tl.constexpr = _PIECE if PAIRS > 0 else TILE
    big = tl.zeros((PIECE,), UNSIGNED)
    small = big - 1
    zero = tl.zeros((PIECE,), UNSIGNED)
    below = tl.zeros((PIECE,), UNSIGNED)
    beyond = tl.zeros((), tl.int64)  # places past the end, which are read as zeros
    first, step = part * (TILE * STEPS), sharing * (TILE * STEPS)
    if PAIRS > 0:
        whole = items // (TILE * STEPS) * (TILE * STEPS)
        largest, least, zeros, belows = _extremes_of_pairs(
            address, first, whole, step, BYTES, KIND, MASK, NORMAL, TILE, STEPS, PAIRS
        )
        # What is left is less than a part, and the program's whose turn it would be.
        rest = tl.where(whole // (TILE * STEPS) % sharing == part, whole, items)
        for at in range(rest, items, PIECE):
            bits = _load(address, shape, at, items - at, BYTES, KIND, STRIDED, PIECE, True)
            big, small, zero, below = _gather(bits, big, small, zero, below, KIND, MASK, NORMAL)
            beyond += tl.maximum(PIECE - (items - at), 0)
    else:
        for at in range(first, items, step):
            left = items - at
            if left >= TILE * STEPS:
                for i in tl.static_range(STEPS):
                    bits = _load(address, shape, at + i * TILE, left, BYTES, KIND, STRIDED, TILE, False)
                    big, small, zero, below = _gather(bits, big, small, zero, below, KIND, MASK, NORMAL)
            else:
                for i in tl.static_range(STEPS):
                    if left > i * TILE:
                        bits = _load(address, shape, at + i * TILE, left - i * TILE, BYTES, KIND, STRIDED, TILE, True)
                        big, small, zero, below = _gather(bits, big, small, zero, below, KIND, MASK, NORMAL)
                        beyond += tl.maximum(TILE - (left - i * TILE), 0)
    if KIND == _NIBBLES:
        beyond *= 2
    own_largest = tl.max(big, axis=0).to(tl.int64 if BYTES == 8 else tl.int32)
    own_least = tl.min(small, axis=0).to(tl.int64)
    own_zeros = tl.sum(zero.to(tl.int64), axis=0) - beyond
    own_belows = tl.sum(below.to(tl.int64), axis=0) - beyond
    NOTHING: tl.constexpr = -1 if BYTES == 8 else 0xFFFFFFFF
    own_least = tl.where(own_least == NOTHING, _NONE, own_least + 1)
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
                if KIND == _FLOAT:
                    words &= MASK * 0x01010101
                elif KIND == _SIGNED:  # each byte: its complement and one, where it is negative
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
    return largest, tl.where(least == 0xFFFF, _NONE, least + 1), zeros, belows


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
    if KIND == _NIBBLES:
        big, small, zero, below = _add(bits & 15, big, small, zero, below, NORMAL)
        big, small, zero, below = _add(bits >> 4, big, small, zero, below, NORMAL)
    elif KIND == _FLOAT:
        big, small, zero, below = _add(bits & MASK, big, small, zero, below, NORMAL)
    else:
        big, small, zero, below = _add(tl.abs(bits), big, small, zero, below, NORMAL)
    return big, small, zero, below


@triton.jit
def _add(size, big, small, zero, below, NORMAL: tl.constexpr):
    """Without a comparison: of unsigned numbers zero less one is the largest, and the top bit tells a borrow."""
    TOP: tl.constexpr = big.dtype.primitive_bitwidth - 1
    size = size.to(big.dtype)
    less = size - 1
    big = tl.maximum(big, size)
    small = tl.minimum(small, less)
    zero += less >> TOP
    below += (size - NORMAL) >> TOP
    return big, small, zero, below


@triton.jit
def _bad(address, shape, items, row, part, sharing, BYTES: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr,
         SPECIAL: tl.constexpr, INFINITE: tl.constexpr, LARGEST: tl.constexpr, STRIDED: tl.constexpr,
         TILE: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Largest finite magnitude (-1 of none), NaN, infinite, saturated, the first that is NaN or infinite, their rows.

    ``row``: items of a row, 0 where rows are not told apart.
    """
    zero = tl.zeros((), tl.int64)
    big = zero - 1 if BYTES == 8 else tl.zeros((), tl.int32) - 1
    nan, inf, saturated, first, rows = zero, zero, zero, zero + _NONE, zero
    PIECE: tl.constexpr = TILE if TILE < _PIECE else _PIECE
    for begin in range(part * (TILE * STEPS), items, sharing * (TILE * STEPS)):
        for i in range(TILE * STEPS // PIECE):
            at = begin + i * PIECE
            left = items - at
            if left > 0:
                bits = _load(address, shape, at, left, BYTES, KIND, STRIDED, PIECE, True)
                place = tl.arange(0, PIECE).to(tl.int64) + at
                inside = place < items
                if KIND == _NIBBLES:
                    big, nan, inf, saturated, first = _judge(
                        bits & 15, place, inside, big, nan, inf, saturated, first, SPECIAL, INFINITE, LARGEST
                    )
                    size = bits >> 4
                elif KIND == _FLOAT:
                    size = bits & MASK
                else:
                    size = tl.abs(bits)
                before = nan + inf
                big, nan, inf, saturated, first = _judge(
                    size, place, inside, big, nan, inf, saturated, first, SPECIAL, INFINITE, LARGEST
                )
                if KIND == _FLOAT:  # noqa: SIM102 (known when it is compiled, the other is not)
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
    first = tl.minimum(first, tl.min(tl.where(special, place, _NONE), axis=0))
    return big, nan, inf, saturated, first


@triton.jit
def _load(address, shape, at, left, BYTES: tl.constexpr, KIND: tl.constexpr, STRIDED: tl.constexpr,
          TILE: tl.constexpr, CUT: tl.constexpr):  # fmt: skip
    """``TILE`` items from ``at`` on, as int32 or int64: a float's bits, a code's value; 0 past ``left`` where CUT."""
    if BYTES == 8:
        base = address.to(tl.pointer_type(tl.int64))
    elif BYTES == 4:
        base = address.to(tl.pointer_type(tl.int32))
    elif BYTES == 2:
        base = address.to(tl.pointer_type(tl.int16))
    elif KIND == _SIGNED:
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
