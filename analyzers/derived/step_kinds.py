"""What a step is made of, how far it is like the usual one, and whether it is prefill or decode.

Steps are compared by their kernels' names: grids grow with the context. The kind is told from attention kernels
named for one of the two; else from the grids: where some steps run the usual kernels in grids that are many times
larger, those work on more tokens at once (prefill) and the others are decode. Where neither says it, the kind is not
known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from spikeprof.analyzers.derived.counters import Floats
from spikeprof.analyzers.derived.intervals import Bools, Ints, ints

#: Kinds of steps; any other kind is one that the program gave.
UNKNOWN, PREFILL, DECODE = "unknown", "prefill", "decode"

# ``_decode_part`` and ``_tiled`` are those of spikeprof.kernels.
_ATTENTION = re.compile(
    r"attention|attn|fmha|flash_fwd|flash::|pagedkv|raggedkv|mmha|_mla_|sdpa|^_decode_part$|^_tiled$", re.IGNORECASE
)
_DECODING = re.compile(r"split_?kv|decode|paged_?attention|masked_multihead|mmha|xqa", re.IGNORECASE)
_PREFILLING = re.compile(r"prefill|context_attention|context_fmha|^_tiled$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Makeup:
    """How often each kernel name occurs in each step: one element per pair that occurs, step by step."""

    step: Ints
    name: Ints
    count: Ints
    blocks: Floats  # per launch, mean

    def usual(self, values: Floats, steps_count: int, names_count: int) -> Floats:
        """Per name the median over all steps of values of the pairs; pairs that do not occur count as 0."""
        order = np.lexsort((values, self.name))
        held = np.bincount(self.name, minlength=names_count)
        offset = np.cumsum(held) - held
        place = (steps_count - 1) // 2 - (steps_count - held)
        found = np.zeros(names_count)
        some = place >= 0
        found[some] = values[order][(offset + place)[some]]
        return found


def makeup(step: Ints, name: Ints, blocks: Ints, names_count: int) -> Makeup:
    """From one element per kernel: its step (from 0), its name's number, and its blocks."""
    if not len(step):
        return Makeup(ints([]), ints([]), ints([]), np.zeros(0))
    key = step.astype(np.int64) * names_count + name
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    count = np.diff(np.append(first, len(key)))
    sums = np.add.reduceat(blocks[order].astype(np.float64), first)
    return Makeup(key[first] // names_count, key[first] % names_count, ints(count), sums / count)


def alike(of: Makeup, usual: Floats, steps_count: int) -> Floats:
    """Per step how many of its kernels the usual step has too (as a multiset of names)."""
    same = np.minimum(of.count, usual[of.name])
    return np.asarray(np.bincount(of.step, same, minlength=steps_count), np.float64)


def larger_share(of: Makeup, usual_blocks: Floats, steps_count: int, large_ratio: float) -> Floats:
    """Per step the share of its kernels, of those with a usual grid, whose grids are many times larger than that.

    Negative, by the share of smaller ones, where there are more of these.
    """
    known = usual_blocks[of.name] > 0
    ratio = np.where(known, of.blocks / np.where(known, usual_blocks[of.name], 1), 1.0)
    signed = (ratio >= large_ratio) * 1.0 - (ratio <= 1 / large_ratio) * 1.0
    weight = of.count * known
    sums = np.bincount(of.step, signed * weight, minlength=steps_count)
    return sums / np.maximum(np.bincount(of.step, weight, minlength=steps_count), 1)


def kinds(of: Makeup, names: list[str], larger: Floats, steps_count: int, min_larger_share: float) -> list[str]:
    """The kind of each step. ``larger`` is from ``larger_share``."""
    attention = _which(of, names, _ATTENTION, steps_count)
    decoding = _which(of, names, _DECODING, steps_count) & attention
    prefilling = _which(of, names, _PREFILLING, steps_count) & attention
    long = attention & (larger >= min_larger_share)
    short = attention & (np.abs(larger) < min_larger_share / 3)
    by_size = bool(long.any()) and int(long.sum()) < int(short.sum())
    prefill = np.where(prefilling | decoding, prefilling & ~decoding, long & by_size)
    decode = np.where(prefilling | decoding, decoding & ~prefilling, short & by_size)
    return [PREFILL if p else DECODE if d else UNKNOWN for p, d in zip(prefill.tolist(), decode.tolist(), strict=True)]


def is_layer(of: Makeup, names: list[str], steps_count: int) -> bool:
    """Whether most units have attention kernels, and none of them twice: models have more layers than one."""
    attention = np.array([bool(_ATTENTION.search(name)) for name in names], bool)[of.name]
    most = np.zeros(steps_count, np.int64)
    np.maximum.at(most, of.step[attention], of.count[attention])
    return 2 * int((most == 1).sum()) > steps_count


def _which(of: Makeup, names: list[str], pattern: re.Pattern[str], steps_count: int) -> Bools:
    """Steps with a kernel of such a name."""
    named = np.array([bool(pattern.search(name)) for name in names], bool)
    return np.bincount(of.step, named[of.name] if len(names) else 0, minlength=steps_count) > 0
