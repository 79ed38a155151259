"""Keys: fixed values that other programs rely on, and what must and must not share a key."""

from __future__ import annotations

import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fullhit_publisher import fold, item_key, key_text, text_key
from fullhit_publisher.keys import digest, fold_many, item_key_from_base, key_hash

URL = "https://pictures.invalid/cat.png"
texts = st.text(st.characters(), max_size=80)
published = st.one_of(
    texts,
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
    st.text("0123456789abcdefABCDEF ", min_size=32, max_size=32),
    st.text("0123456789abcdef ", min_size=64, max_size=64),
)


def test_values_on_which_other_programs_rely() -> None:
    assert key_text(text_key(URL)) == xxhash.xxh3_128_hexdigest(URL.encode())
    assert text_key("").hex() == "99aa06d3014798d86001c324468d497f"
    assert text_key(b"abc") == text_key("abc") == bytes.fromhex("06b05ab6733a618578af5f94892f3950")
    assert key_hash(b"\0" * 16) == xxhash.xxh3_64_intdigest(b"\0" * 16)
    assert digest([]) == 0


def test_a_lone_surrogate_from_json_has_a_key() -> None:
    assert item_key(json.loads('"\\ud800"')) == text_key("\ud800")


def test_hex_digests_are_taken_as_they_are() -> None:
    md5 = "00112233445566778899aabbccddeeff"
    blake3 = md5 + "0123456789abcdef0123456789abcdef"
    assert fold(md5) == fold(blake3) == bytes.fromhex(md5)


@pytest.mark.parametrize(
    "text",
    ["00112233445566778899AABBCCDDEEFF", " 0112233445566778899aabbccddeeff", "x" * 32, "é" * 32, "ab", ""],
)
def test_anything_but_a_lower_case_digest_is_hashed(text: str) -> None:
    assert fold(text) == text_key(text)


@given(st.lists(published, max_size=8))
def test_folding_many_is_folding_each(keys: list[str]) -> None:
    assert fold_many(keys) == [fold(key) for key in keys]


@given(st.lists(st.binary(min_size=16, max_size=16).map(bytes.hex), max_size=8))
def test_folding_many_digests_is_folding_each(keys: list[str]) -> None:
    assert fold_many(keys) == [fold(key) for key in keys] == [bytes.fromhex(key) for key in keys]


@given(st.binary(min_size=16, max_size=16))
def test_the_text_of_a_key_folds_back(key: bytes) -> None:
    assert fold(key_text(key)) == key


@given(st.lists(st.binary(min_size=16, max_size=16), unique=True), st.randoms())
def test_a_digest_does_not_depend_on_order_and_undoes_itself(keys: list[bytes], rng: object) -> None:
    assert digest(keys) == digest(reversed(keys))
    assert digest(keys + keys) == 0


def test_a_plain_picture_has_the_key_of_its_url() -> None:
    assert item_key(URL) == item_key({"url": URL}) == item_key({"url": URL, "detail": None}) == text_key(URL)


def test_options_and_modality_make_other_keys() -> None:
    keys = [
        item_key(URL),
        item_key(URL, "VIDEO"),
        item_key({"url": URL, "detail": "high"}),
        item_key({"url": URL, "detail": "low"}),
        item_key({"url": URL, "detail": "low"}, "VIDEO"),
        item_key({"url": URL, "fps": 2}),
        item_key({"url": URL, "fps": {"a": [1, 2]}}),
        item_key({"url": URL + "?"}),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_options_are_folded_in_as_sorted_compact_json() -> None:
    expected = xxhash.xxh3_128_digest(text_key(URL) + '\0{"a":"ü","b":1}'.encode())
    assert item_key({"b": 1, "url": URL, "a": "ü", "c": None}) == expected
    assert item_key_from_base(text_key(URL), {"b": 1, "a": "ü"}, "IMAGE") == expected


def test_an_identity_the_client_vouches_for_wins_over_the_url() -> None:
    by_hash = item_key({"url": URL, "content_hash": "sha256:ab", "uuid": "u"})
    assert by_hash == item_key({"url": "other", "content_hash": "sha256:ab"})
    assert by_hash == xxhash.xxh3_128_digest(b"content_hash\0sha256:ab")
    assert item_key({"uuid": "u"}) == xxhash.xxh3_128_digest(b"uuid\0u")
    assert item_key({"uuid": "u", "detail": "high"}) != item_key({"uuid": "u"})


@pytest.mark.parametrize(
    "item",
    [
        None,
        7,
        "",
        [],
        b"x",
        {},
        {"url": None},
        {"url": 5},
        {"url": ""},
        {"detail": "high"},
        {"url": URL, "uuid": 5},
        {"content_hash": 1},
        {"url": URL, "x": object()},
    ],
)
def test_an_item_that_names_nothing_has_no_key(item: object) -> None:
    assert item_key(item) is None


def test_options_that_nest_too_deep_for_json_have_no_key() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    assert item_key({"url": URL, "x": deep}) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_any_json_has_a_key_or_none(item: object) -> None:
    key = item_key(item)
    assert key is None or len(key) == 16
