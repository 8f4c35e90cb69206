"""The scan as Triton kernels: any number of tensors of one format in one launch, results straight to host memory.

A program takes some tiles of one tensor at a time. Its fast pass gathers the largest and smallest magnitudes and
counts zeros and what is below normal; only where the largest magnitude reaches the format's limit are the same tiles
read again for the rest. Programs of one tensor meet in integer atomics, so that the order does not matter; the last
one writes the record. Nothing is allocated, nothing waits: the kernels can be captured into CUDA graphs.

Loaded only where a program that is watched has torch and Triton: this file, and the others named ``*_triton.py``.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="misc,name-defined"

import sys

from . import formats, records
from .bad_triton import bad
from .keep_triton import note_bad
from .scanner import ROW_WORDS
from .tiles_triton import DIMENSIONS, NIBBLES, NONE, UNSIGNED, extremes

triton = sys.modules["triton"]
tl = sys.modules["triton.language"]

#: Words of a row of the scratch memory: the first eight statistics, programs that are done, bad rows.
SCRATCH_WORDS = 16

#: Bytes of a program's load, 16 of each of its threads; loads in flight; registers of a thread, 0 for as many as it
#: likes. What is best differs for elements of one byte: there is more to be computed, and threads hide it.
_USUAL, _OF_BYTES = (2048, 8, 0), (4096, 4, 64)
_BYTES_OF_A_WARP = 512

_WORDS = tl.constexpr(records.RECORD_WORDS)
_SEALED = tl.constexpr(records.SEALED)
_LAID_OUT = tl.constexpr(records.LAID_OUT)
_ROW_SHIFT = tl.constexpr(records.ROW_SHIFT)
_FIRST = tl.constexpr(records.FIRST_STATISTIC)
_SEAL = tl.constexpr(records.SEAL)
_TABLE = tl.constexpr(ROW_WORDS)
_SCRATCH = tl.constexpr(SCRATCH_WORDS)
_DIMENSIONS = tl.constexpr(DIMENSIONS)


def constants(form, strided, pairs):
    """The compile-time arguments of ``spikeprof_numerics_scan`` for a format.

    ``pairs``: 0 = one magnitude at a time, 1 = two in a word where that goes, 2 = by instructions made for it.
    """
    in_pairs = not strided and form.item_bytes <= 2 and form.kind != formats.NIBBLES
    size, steps, registers = _loads(form, strided)
    return {
        "PAIRS": pairs if in_pairs else 0,
        "BYTES": form.item_bytes, "KIND": form.kind, "MASK": form.sign_mask, "SPECIAL": form.special,
        "INFINITE": form.infinity, "LARGEST": form.largest, "NORMAL": form.normal, "STRIDED": strided,
        "TILE": size // form.item_bytes, "STEPS": steps, "num_warps": size // _BYTES_OF_A_WARP,
        **({"maxnreg": registers} if registers and in_pairs and pairs == 2 else {}),
    }  # fmt: skip


def part_items(form, strided):
    """Items that a program loads at a time."""
    size, steps, _ = _loads(form, strided)
    return size * steps // form.item_bytes


def _loads(form, strided):
    if strided:
        return _USUAL[0], 1, 0
    return _OF_BYTES if form.item_bytes == 1 else _USUAL


_NUMBERS = ["row", "count0", "share0", "count1", "share1", "count2", "share2", "count3", "share3", "steps", "every",
            "when_ns"]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def spikeprof_numerics_scan(table, shapes, finished, ring, state, scratch,
                            row, count0, share0, count1, share1, count2, share2, count3, share3, steps, every, when_ns,
                            RING: tl.constexpr, BYTES: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr,
                            SPECIAL: tl.constexpr, INFINITE: tl.constexpr, LARGEST: tl.constexpr, NORMAL: tl.constexpr,
                            STRIDED: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr,
                            CLOCK: tl.constexpr):  # fmt: skip
    """The tensors in the table from ``row`` on: ``share0`` programs for each of the first ``count0``, and so on.

    Those that are left have one program each. ``state`` is [step, tickets, programs that are done, first bad scan (see
    keep_triton.py)] int64. ``steps`` more steps have begun with this launch: its last program counts them. Nothing else
    is done in steps that are no multiple of ``every``.
    """
    step = tl.load(state) + steps
    looked_at = every == 1
    if every > 1:  # only then wait for the step
        looked_at = step % every == 0
    if looked_at:
        first, program, share = _whose(tl.program_id(0), count0, share0, count1, share1, count2, share2, count3, share3)
        part = (program % share).to(tl.int64)
        own_row = (row + first + program // share).to(tl.int64)
        # The table lies in host memory: four words for the wait of one.
        address = tl.load(table + own_row * _TABLE)
        items = tl.load(table + own_row * _TABLE + 1)
        tag = tl.load(table + own_row * _TABLE + 2)
        scanned = tl.load(table + own_row * _TABLE + 3)
        parts = tl.cdiv(items, TILE * STEPS)
        sharing = tl.minimum(tl.maximum(parts, 1), share)
        if part < sharing:
            _share(shapes, finished, ring, state, scratch, own_row, step, address, items, tag, scanned, part, sharing,
                   when_ns, RING, BYTES, KIND, MASK, SPECIAL, INFINITE, LARGEST, NORMAL, STRIDED, TILE, STEPS, PAIRS,
                   CLOCK)  # fmt: skip
    if steps > 0:
        tl.debug_barrier()  # all threads of all programs have read the step
        if tl.atomic_add(state + 2, tl.full((), 1, tl.int64), sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(state + 2, tl.zeros((), tl.int64))
            tl.store(state, step)


@triton.jit
def _whose(program, count0, share0, count1, share1, count2, share2, count3, share3):
    """First of the tensors that have as many programs as this one's, which program of theirs it is, and how many."""
    end0 = count0 * share0
    end1 = end0 + count1 * share1
    end2 = end1 + count2 * share2
    end3 = end2 + count3 * share3
    first = tl.where(program < end0, 0, count0)
    first += tl.where(program < end1, 0, count1)
    first += tl.where(program < end2, 0, count2)
    first += tl.where(program < end3, 0, count3)
    begin = tl.where(program < end1, end0, tl.where(program < end2, end1, tl.where(program < end3, end2, end3)))
    begin = tl.where(program < end0, 0, begin)
    share = tl.where(program < end1, share1, tl.where(program < end2, share2, tl.where(program < end3, share3, 1)))
    return first, program - begin, tl.where(program < end0, share0, share)


@triton.jit
def _share(shapes, finished, ring, state, scratch, row, step, address, items, tag, scanned, part, sharing, when_ns,
           RING: tl.constexpr, BYTES: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr, SPECIAL: tl.constexpr,
           INFINITE: tl.constexpr, LARGEST: tl.constexpr, NORMAL: tl.constexpr, STRIDED: tl.constexpr,
           TILE: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr, CLOCK: tl.constexpr):  # fmt: skip
    """One program's share of a tensor, and the record if it is the last."""
    shape = shapes + row * (2 * _DIMENSIONS)
    largest, small, zero, below = extremes(
        address, shape, items, part, sharing, BYTES, KIND, MASK, NORMAL, STRIDED, TILE, STEPS, PAIRS
    )
    nan = tl.zeros_like(zero)
    inf = tl.zeros_like(zero)
    saturated = tl.zeros_like(zero)
    first = tl.zeros_like(items) + NONE
    rows = tl.zeros_like(items)
    if largest >= LARGEST:
        largest, nan, inf, saturated, first, rows = bad(
            address, shape, items, scanned >> _ROW_SHIFT, part, sharing,
            BYTES, KIND, MASK, SPECIAL, INFINITE, LARGEST, STRIDED, TILE, STEPS
        )  # fmt: skip
    small = tl.where(small >= SPECIAL, NONE, small)  # where no finite element is smaller
    amax = largest.to(tl.int64)
    nan, inf, saturated = nan.to(tl.int64), inf.to(tl.int64), saturated.to(tl.int64)
    zero = zero.to(tl.int64)
    subnormal = below.to(tl.int64) - zero
    if KIND >= UNSIGNED:
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
                   _taken(own, nothing - 1), _taken(own + 1, nothing + NONE), _taken(own + 2, nothing),
                   _taken(own + 3, nothing), _taken(own + 4, nothing), _taken(own + 5, nothing),
                   _taken(own + 6, nothing), _taken(own + 7, nothing + NONE), _taken(own + 9, nothing))  # fmt: skip
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
    if KIND == NIBBLES:
        elements = items * 2
    if nan + inf > 0:
        note_bad(state, step, tag)
    none = tl.zeros_like(items) - 1
    small = tl.where(small == NONE, none, small)
    first = tl.where(first == NONE, none, first)
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
