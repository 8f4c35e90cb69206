"""Which page is whose: free list, reference counts, page tables, shared prefixes. On the host alone; stores no key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from spikeprof.kernels.cache.protocol import CacheFull
from spikeprof.kernels.paths import check

_START = -1  # what the first page of a prompt follows
_Key = tuple[int, tuple[int, ...]]


@dataclass(slots=True)
class _Held:
    row: int  # of the table
    length: int
    prompt: tuple[int, ...]  # as far as its pages may be shared
    offered: int  # leading pages that are in the index of prefixes, or came from it


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A plan's arrays on the host, and the pages to copy, (from, to), before anything is written."""

    slots: NDArray[np.int64]
    block_table: NDArray[np.int32]
    lengths: NDArray[np.int32]
    copies: list[tuple[int, int]]


class PageTable:
    """Pages of ``page_size`` tokens, given to sequences one at a time.

    Prefixes: a page that a prompt filled is found by the page before it and its own tokens. Both are compared, not only
    their hash, and the page before stands for all tokens before it, so that equal keys mean equal prefixes. Whoever
    holds a page also holds the one before it, therefore no page outlives its key.
    """

    def __init__(self, *, pages: int, page_size: int, max_sequences: int, max_tokens: int) -> None:
        self.pages, self.page_size, self.max_tokens = pages, page_size, max_tokens
        self.most_pages = -(-max_tokens // page_size)
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages
        self._table = np.zeros((max_sequences, self.most_pages), dtype=np.int32)
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._sequences: dict[int, _Held] = {}
        self._prefixes: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}

    def begin(self, sequence: int, tokens: Sequence[int]) -> int:
        """Take up a sequence; returns its leading tokens that are there already."""
        check(
            len(tokens) <= self.max_tokens,
            f"tokens of sequence {sequence} are {len(tokens)}, max_tokens is {self.max_tokens}",
        )
        held = self._new(sequence, tuple(int(token) for token in tokens))
        before = _START
        for at in range((len(tokens) - 1) // self.page_size):
            page = self._prefixes.get(self._key(held, before, at))
            if page is None:
                break
            self._references[page] += 1
            self._table[held.row, at] = before = page
            held.offered = at + 1
        held.length = held.offered * self.page_size
        return held.length

    def fork(self, parent: int, child: int) -> None:
        """Let ``child`` have all pages of ``parent``."""
        source = self._of(parent)
        held = self._new(child, ())
        held.length = source.length
        self._table[held.row] = self._table[source.row]
        for page in self.pages_of(child):
            self._references[page] += 1

    def plan(self, new: Sequence[tuple[int, int]]) -> HostPlan:
        """Give pages to new tokens. Changes nothing where it raises."""
        helds = self._checked(new)
        counts = np.array([count for _, count in new], dtype=np.int64)
        starts = np.array([held.length for held in helds], dtype=np.int64)
        copies = []
        for held, (_, count) in zip(helds, new, strict=True):
            if held.length % self.page_size:
                copies += self._make_writable(held)
            have, held.length = self._pages_for(held.length), held.length + count
            for at in range(have, self._pages_for(held.length)):
                self._table[held.row, at] = self._take()
            if held.offered < len(held.prompt) // self.page_size:
                self._offer(held)
        rows = np.array([held.row for held in helds])
        lengths = starts + counts
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        position = np.repeat(starts, counts) + within
        page = self._table[np.repeat(rows, counts), position // self.page_size].astype(np.int64)
        most = self._pages_for(int(lengths.max()))
        return HostPlan(
            slots=page * self.page_size + position % self.page_size,
            block_table=self._table[rows, :most],
            lengths=lengths.astype(np.int32),
            copies=copies,
        )

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` tokens alone."""
        held = self._of(sequence)
        check(0 <= length <= held.length, f"length is {length}, sequence {sequence} has {held.length}: 0 to that many")
        for at in range(self._pages_for(held.length) - 1, self._pages_for(length) - 1, -1):
            self._release(int(self._table[held.row, at]))
            self._table[held.row, at] = 0
        held.length = length
        held.prompt = held.prompt[:length]  # what follows may be other tokens than the prompt's
        held.offered = min(held.offered, length // self.page_size)

    def evict(self, sequence: int) -> None:
        """Forget a sequence."""
        self.truncate(sequence, 0)
        self._free_rows.append(self._sequences.pop(sequence).row)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._of(sequence).length

    def pages_of(self, sequence: int) -> list[int]:
        """Pages of a sequence, in order."""
        held = self._of(sequence)
        pages: list[int] = self._table[held.row, : self._pages_for(held.length)].tolist()
        return pages

    @property
    def sequences(self) -> tuple[int, ...]:
        """Sequences that are there."""
        return tuple(self._sequences)

    @property
    def free_pages_count(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def stored_tokens_count(self) -> int:
        """Tokens in pages, those of a shared page once."""
        filled = np.zeros(self.pages, dtype=np.int64)
        for sequence, held in self._sequences.items():
            pages = np.array(self.pages_of(sequence), dtype=np.int64)
            own = np.minimum(held.length - np.arange(len(pages)) * self.page_size, self.page_size)
            filled[pages] = np.maximum(filled[pages], own)
        return int(filled.sum())

    def _checked(self, new: Sequence[tuple[int, int]]) -> list[_Held]:
        check(len(new) > 0, "new is empty: a plan needs a sequence")
        check(len({sequence for sequence, _ in new}) == len(new), f"new names a sequence twice: {list(new)}")
        helds: list[_Held] = []
        for sequence, count in new:  # of every step: a text is made only where it is raised
            held = self._of(sequence)
            if not isinstance(count, Integral) or count < 1:
                raise ValueError(f"new tokens of sequence {sequence} are {count}: a whole number, 1 at least")
            if held.length + count > self.max_tokens:
                raise ValueError(
                    f"sequence {sequence} would have {held.length} + {count} tokens, max_tokens is {self.max_tokens}"
                )
            helds.append(held)
        needed = self._needed(helds, [count for _, count in new])
        if needed > len(self._free):
            raise CacheFull(
                f"{sum(count for _, count in new)} new tokens of {len(new)} sequences need {needed} pages of "
                f"{self.page_size} tokens: {len(self._free)} of {self.pages} are free, "
                f"{needed - len(self._free)} are missing"
            )
        return helds

    def _needed(self, helds: list[_Held], counts: list[int]) -> int:
        needed = 0
        left: dict[int, int] = {}  # holders of a page that is written, less those that get a copy
        for held, count in zip(helds, counts, strict=True):
            needed += self._pages_for(held.length + count) - self._pages_for(held.length)
            if held.length % self.page_size:
                page = int(self._table[held.row, held.length // self.page_size])
                holders = left.setdefault(page, self._references[page])
                if holders > 1:
                    needed += 1
                    left[page] -= 1
        return needed

    def _make_writable(self, held: _Held) -> list[tuple[int, int]]:
        """Own the page that the next token goes to, which has tokens already; returns what to copy for it."""
        at = held.length // self.page_size
        page = int(self._table[held.row, at])
        if self._references[page] == 1:
            self._withdraw(page)  # another prompt may have filled it, up to where this one was cut
            return []
        copy = self._take()
        self._references[page] -= 1
        self._table[held.row, at] = copy
        return [(page, copy)]

    def _offer(self, held: _Held) -> None:
        """Let other prompts find the pages that this one's has filled."""
        full = min(held.length, len(held.prompt)) // self.page_size
        for at in range(held.offered, full):
            before = int(self._table[held.row, at - 1]) if at else _START
            key, page = self._key(held, before, at), int(self._table[held.row, at])
            if key in self._prefixes:  # the same prompt ran beside this one: one of them is enough
                held.prompt = held.prompt[: at * self.page_size]
                return
            self._prefixes[key] = page
            self._keys[page] = key
            held.offered = at + 1

    def _withdraw(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            del self._prefixes[key]

    def _key(self, held: _Held, before: int, at: int) -> _Key:
        return before, held.prompt[at * self.page_size : (at + 1) * self.page_size]

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if not self._references[page]:
            self._withdraw(page)
            self._free.append(page)

    def _new(self, sequence: int, prompt: tuple[int, ...]) -> _Held:
        check(sequence not in self._sequences, f"sequence {sequence} is there already: evict it first")
        if not self._free_rows:
            raise CacheFull(f"sequence {sequence} finds {len(self._sequences)} others: max_sequences is as many")
        held = _Held(self._free_rows.pop(), 0, prompt, 0)
        self._sequences[sequence] = held
        return held

    def _of(self, sequence: int) -> _Held:
        if sequence not in self._sequences:
            raise IndexError(f"sequence {sequence} is not there: begin it first")
        return self._sequences[sequence]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
