"""Patterns of keys: ids, hex, uuids and numbers folded away, `user:42` to `user:{n}`, for whole columns at once."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

#: Stands for all that has no room of its own: `user:{any}`, `{any}`.
ANY = "{any}"

_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_SEPARATORS = ":/|.#"  # what ends the first part of a key
_ID_CHARS_COUNT = 8  # a shorter word with digits in it keeps its letters: `v2` is `v{n}`
_LONG_CHARS_COUNT = 32  # a longer word without digits is no word
_TURNS_COUNT = 3  # changes between letters and digits in one word: more than names have

# While folding, one byte stands for what was folded away: none of them is part of any other character.
_KEEP, _NUMBER, _HEX, _TOKEN, _UUID_CODE, _MIXED = 0, 1, 2, 3, 4, 5
_NAMES = {_NUMBER: "{n}", _HEX: "{hex}", _TOKEN: "{token}", _UUID_CODE: "{uuid}"}

_SEPARATOR, _DIGIT, _HEX_LETTER, _LETTER = 0, 1, 2, 3


def _classes() -> npt.NDArray[np.uint8]:
    """What each byte is. Bytes of characters beyond ASCII are letters, so that none is cut in two."""
    table = np.zeros(256, np.uint8)
    table[0x80:] = _LETTER
    for first, last, kind in (
        ("a", "z", _LETTER),
        ("A", "Z", _LETTER),
        ("a", "f", _HEX_LETTER),
        ("A", "F", _HEX_LETTER),
    ):
        table[ord(first) : ord(last) + 1] = kind
    table[ord("0") : ord("9") + 1] = _DIGIT
    return table


_CLASS = _classes()
_DIGITS = frozenset("0123456789")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_UUID_IN, _NUMBER_IN = re.compile(_UUID), re.compile("[0-9]+")
_WORD_IN = re.compile("[0-9A-Za-z\x80-\U0010ffff]+")


def fold(keys: pa.StringArray, max_chars_count: int = 256) -> pa.DictionaryArray:
    """The pattern of each of n keys: dictionary of strings [n], each pattern once.

    A word (letters and digits between other characters) of digits alone becomes ``{n}``; one of at least 8 hexadecimal
    digits with both letters and digits ``{hex}``; another of at least 8 characters that turns between letters and
    digits three times or more, or that has at least 32 characters, ``{token}``; in any other word its numbers
    become ``{n}``. A UUID becomes ``{uuid}``. What is behind ``max_chars_count`` characters is left out.
    """
    if not len(keys):
        return pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), pa.array([], pa.string()))
    if keys.null_count:
        keys = pc.fill_null(keys, "")
    if pc.max(pc.binary_length(keys)).as_py() > max_chars_count:
        keys = pc.utf8_slice_codeunits(keys, 0, max_chars_count)
    if pc.any(pc.match_substring_regex(keys, _UUID)).as_py():
        keys = pc.replace_substring_regex(keys, _UUID, chr(_UUID_CODE))
    folded = _fold_words(keys).dictionary_encode()
    patterns = folded.dictionary
    for code, name in _NAMES.items():
        patterns = pc.replace_substring(patterns, chr(code), name)
    return pa.DictionaryArray.from_arrays(folded.indices, patterns)


def fold_one(key: str, max_chars_count: int = 256) -> str:
    """``fold`` for a single key: quicker there, as a proxy needs it."""
    folded = _UUID_IN.sub(chr(_UUID_CODE), key[:max_chars_count])
    folded = _WORD_IN.sub(_fold_word, folded)
    for code, name in _NAMES.items():
        folded = folded.replace(chr(code), name)
    return folded


def prefix_of(pattern: str) -> str:
    """The first part of a pattern, with what ends it: `user:` of `user:{n}:cart`; else what is before a folded part.

    Empty where nothing is.
    """
    ends = [at + 1 for at in (pattern.find(char) for char in _SEPARATORS) if at >= 0]
    folded_at = pattern.find("{")
    end = min(ends, default=0)
    if folded_at >= 0 and (not ends or folded_at < end):
        return pattern[:folded_at]
    return pattern[:end]


def prefixes_of(patterns: pa.StringArray) -> pa.StringArray:
    """``prefix_of`` for n patterns, [n]."""
    first = pc.replace_substring_regex(patterns, r"(?s)^([^:/|.#{]*[:/|.#]?).*$", r"\1")
    return pc.if_else(pc.match_substring_regex(patterns, "[:/|.#{]"), first, "")


def _fold_word(match: re.Match[str]) -> str:
    word = match.group()
    length = len(word.encode())
    digits = [char in _DIGITS for char in word]
    turns = sum(before != after for before, after in pairwise(digits))
    if all(digits):
        return chr(_NUMBER)
    is_id = length >= _ID_CHARS_COUNT and any(digits)
    if is_id and set(word) <= _HEX_DIGITS:
        return chr(_HEX)
    if length >= _LONG_CHARS_COUNT or (is_id and turns >= _TURNS_COUNT):
        return chr(_TOKEN)
    return _NUMBER_IN.sub(chr(_NUMBER), word)


def _fold_words(keys: pa.StringArray) -> pa.StringArray:
    """The keys with one byte in place of what is folded away."""
    _, offsets_buffer, data = keys.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[keys.offset : keys.offset + len(keys) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    if first == last:
        return keys
    text = np.frombuffer(data, np.uint8)[first:last].copy()
    keep = np.ones(len(text), np.bool_)
    kinds = _CLASS[text]
    places = np.flatnonzero(kinds)
    if len(places):
        starts_key = np.zeros(len(text) + 1, np.bool_)
        starts_key[offsets - first] = True
        _fold_places(text, keep, kinds[places], places, starts_key[places])
    moved = np.zeros(len(text) + 1, np.int32)
    np.cumsum(keep, out=moved[1:])
    ends = np.ascontiguousarray(moved[offsets - first])
    return pa.StringArray.from_buffers(len(keys), pa.py_buffer(ends), pa.py_buffer(text[keep]))


def _fold_places(
    text: npt.NDArray[np.uint8],
    keep: npt.NDArray[np.bool_],
    kinds: npt.NDArray[np.uint8],
    places: npt.NDArray[np.int64],
    starts_key: npt.NDArray[np.bool_],
) -> None:
    """Fold the words, whose m bytes are at ``places`` of ``text``; sets ``text`` and ``keep``."""
    is_start = starts_key.copy()
    is_start[0] = True
    is_start[1:] |= np.diff(places) > 1
    starts = np.flatnonzero(is_start)
    is_digit = kinds == _DIGIT
    turns = np.zeros(len(kinds), np.bool_)
    turns[1:] = (is_digit[1:] != is_digit[:-1]) & ~is_start[1:]
    lengths = np.diff(starts, append=len(kinds))
    digits, letters, turned = (
        np.add.reduceat(column.astype(np.int32), starts) for column in (is_digit, kinds == _LETTER, turns)
    )
    is_id = (lengths >= _ID_CHARS_COUNT) & (digits > 0)
    word = np.where(digits > 0, _MIXED, _KEEP).astype(np.uint8)
    word[(is_id & (turned >= _TURNS_COUNT)) | (lengths >= _LONG_CHARS_COUNT)] = _TOKEN
    word[is_id & (letters == 0) & (turned > 0)] = _HEX
    word[digits == lengths] = _NUMBER
    of_place = np.repeat(word, lengths)
    is_whole = (of_place == _NUMBER) | (of_place == _HEX) | (of_place == _TOKEN)
    number_starts = is_digit & (is_start | turns)
    is_number = (of_place == _MIXED) & is_digit
    keep[places] = np.where(is_whole, is_start, ~is_number | number_starts)
    whole_starts = is_whole & is_start
    text[places[whole_starts]] = of_place[whole_starts]
    text[places[is_number & number_starts]] = _NUMBER
