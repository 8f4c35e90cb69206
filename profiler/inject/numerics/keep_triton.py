"""The kernel that keeps a module's inputs: those of the first bad output of a step, the first time that there is one.

It runs behind the scans of a launch, in CUDA graphs with every replay. In the good case its programs read two words.
Loaded only where a program that is watched has torch and Triton.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="misc,name-defined"

import sys

from .graph_store import ALIGNED, TENSORS_MAX

triton = sys.modules["triton"]
tl = sys.modules["triton.language"]

#: Words of a row, for each scan: the calls of its module and of the one around it, -1 = none.
ROW_WORDS = 2

#: Words of a call's row: how many tensors, and address and bytes of each.
CALL_WORDS = 1 + 2 * TENSORS_MAX

#: Words about what was kept: row + 1, programs that are done, the word of the bad scan.
KEPT_WORDS = 4

#: The word of the scanner's state that tells of the last bad step and the first bad scan in it, see ``note_bad``.
BAD_WORD = 3
LAST_ORDER = (1 << 32) - 1

PROGRAMS = 64
WARPS = 4

_ROW = tl.constexpr(ROW_WORDS)
_CALL = tl.constexpr(CALL_WORDS)
_BAD = tl.constexpr(BAD_WORD)
_LAST = tl.constexpr(LAST_ORDER)
_ALIGNED = tl.constexpr(ALIGNED)
_BLOCK = tl.constexpr(512)


@triton.jit
def note_bad(state, step, tag):
    """A scan saw a bad value: the later step wins, in it the earlier scan."""
    word = ((step + 1) << 32) | (_LAST - (tag >> 32))
    tl.atomic_max(state + _BAD, word, sem="relaxed")


@triton.jit(do_not_specialize=["row", "order", "count"])
def spikeprof_numerics_keep(state, rows, calls, kept, buffer, row, order, count):
    """Copy the inputs of the first bad scan of this step into ``buffer``, if it is one of ``count`` from ``order`` on.

    Rows of the table belong to the scans in their order, from ``row`` on. Once something was kept nothing is any more.
    """
    step = tl.load(state)
    word = tl.load(state + _BAD)
    if (word >> 32) == step + 1:
        place = _LAST - (word & _LAST) - order
        if (place >= 0) & (place < count) & (tl.load(kept) == 0):
            own = row + place
            end = _copy(calls, tl.load(rows + own * _ROW), buffer, tl.zeros((), tl.int64))
            _copy(calls, tl.load(rows + own * _ROW + 1), buffer, end)
            tl.debug_barrier()  # all of this program's
            done = tl.atomic_add(kept + 1, tl.full((), 1, tl.int64), sem="acq_rel")
            if done == tl.num_programs(0) - 1:
                tl.store(kept + 1, tl.zeros((), tl.int64))
                tl.store(kept + 2, word)
                tl.store(kept, own + 1)


@triton.jit
def _copy(calls, call, buffer, end):
    """The tensors of a call, from ``end`` on: this program's share of each. Where the next may begin."""
    own = calls + tl.maximum(call, 0) * _CALL
    number = tl.where(call >= 0, tl.load(own), 0)
    for i in range(0, number):
        address = tl.load(own + 1 + 2 * i)
        size = tl.load(own + 2 + 2 * i)
        words = tl.where(address % 8 == 0, size // 8, 0)
        lane = tl.arange(0, _BLOCK)
        source, target = address.to(tl.pointer_type(tl.int64)), (buffer + end).to(tl.pointer_type(tl.int64))
        for at in range(tl.program_id(0) * _BLOCK, words, tl.num_programs(0) * _BLOCK):
            inside = at + lane < words
            tl.store(target + at + lane, tl.load(source + at + lane, mask=inside, other=0), mask=inside)
        source, target = address.to(tl.pointer_type(tl.int8)), buffer + end
        for at in range(words * 8 + tl.program_id(0) * _BLOCK, size, tl.num_programs(0) * _BLOCK):
            inside = at + lane < size
            tl.store(target + at + lane, tl.load(source + at + lane, mask=inside, other=0), mask=inside)
        end += tl.cdiv(size, _ALIGNED) * _ALIGNED
    return end
