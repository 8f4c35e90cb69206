"""Patterns of keys."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.analyzers.cache_pierce.patterns import fold, fold_one, prefix_of, prefixes_of

FOLDED = {
    "user:42": "user:{n}",
    "user:42:cart:7": "user:{n}:cart:{n}",
    "sess:3f2504e0-4f89-11d3-9a0c-0305e82c3301": "sess:{uuid}",
    "3F2504E0-4F89-11D3-9A0C-0305E82C3301": "{uuid}",
    "blk:deadbeef12": "blk:{hex}",
    "blk:12345678": "blk:{n}",
    "blk:abcdef1": "blk:abcdef{n}",  # seven characters: too short for an id
    "feed:face": "feed:face",
    "decade:facade": "decade:facade",
    "v2:item_33": "v{n}:item_{n}",
    "product2024": "product{n}",
    "t:aB3xK9fLq0P:x": "t:{token}:x",
    "a" * 31: "a" * 31,
    "a" * 32: "{token}",
    "ключ:42й": "ключ:{n}й",
    "7": "{n}",
    "": "",
}


def test_each_form() -> None:
    assert fold(pa.array(list(FOLDED))).to_pylist() == list(FOLDED.values())


@pytest.mark.parametrize("key", FOLDED)
def test_a_single_key_folds_the_same_way(key: str) -> None:
    assert fold_one(key) == FOLDED[key]


def test_each_pattern_is_in_the_dictionary_once() -> None:
    folded = fold(pa.array(["user:1", "user:22", "cart:1", "user:333"]))
    assert folded.dictionary.to_pylist() == ["user:{n}", "cart:{n}"]
    assert folded.indices.to_pylist() == [0, 0, 1, 0]


def test_nulls_and_nothing() -> None:
    assert fold(pa.array([], pa.string())).to_pylist() == []
    assert fold(pa.array([None, "a1"], pa.string())).to_pylist() == ["", "a{n}"]


def test_what_is_behind_the_limit_does_not_count() -> None:
    assert fold(pa.array(["key:" + "x1" * 500, "b"]), 6).to_pylist() == ["key:x{n}", "b"]


@given(st.lists(st.text(max_size=60)), st.integers(0, 5))
def test_columns_and_single_keys_agree(keys: list[str], skip: int) -> None:
    column = pa.array(keys, pa.string())[skip:]  # also of a part of an array
    assert fold(column).to_pylist() == [fold_one(key) for key in keys[skip:]]


@given(st.lists(st.text("ab0F1:-_", max_size=45)))
def test_columns_and_single_keys_agree_about_words(keys: list[str]) -> None:
    assert fold(pa.array(keys, pa.string())).to_pylist() == [fold_one(key) for key in keys]


PREFIXES = {
    "user:{n}:cart": "user:",
    "/api/{n}": "/",
    "item_{n}:x": "item_",
    "{n}:x": "",
    "abc": "",
    "": "",
    "a\nb:c": "a\nb:",
}


def test_first_parts() -> None:
    assert [prefix_of(pattern) for pattern in PREFIXES] == list(PREFIXES.values())
    assert prefixes_of(pa.array(list(PREFIXES))).to_pylist() == list(PREFIXES.values())


@given(st.lists(st.text("ab:/{}.\n", max_size=12), min_size=1))
def test_first_parts_agree(patterns: list[str]) -> None:
    assert prefixes_of(pa.array(patterns)).to_pylist() == [prefix_of(pattern) for pattern in patterns]
