"""Dynamo's keys: the cases seen on its real front end, and requests of every shape."""

from __future__ import annotations

import hashlib
import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullhit_publisher import dynamo_keys
from fullhit_publisher.dynamo_keys import (
    KeyRules,
    MediaKeys,
    content_key,
    from_chat,
    from_encode,
    from_preprocessed,
    normalized_url,
    scoped_key,
    url_key,
    video_key,
)

URL = "https://example.com/Q.png?a=1"
DATA = "data:image/png;base64,iVBORw0KGgo="


def chat(*parts: object) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, *parts]}]}


def image(url: object, **more: object) -> dict:
    return {"type": "image_url", "image_url": {"url": url}, **more}


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ("https://EXAMPLE.com/Q.png?a=1", "https://example.com/Q.png?a=1"),
        ("https://example.com", "https://example.com/"),
        ("HTTP://exämple.com:80/a b/../c", "http://xn--exmple-cua.com/c"),
        ("https://example.com/Q.png#x", "https://example.com/Q.png#x"),
        (" https://example.com/\n", "https://example.com/"),
        (DATA, DATA),
        ("DATA:image/png;base64,AA==", "data:image/png;base64,AA=="),
        ("not a url", "not a url"),
        ("", ""),
    ],
)
def test_urls_are_written_as_the_front_end_writes_them(sent: str, seen: str) -> None:
    assert normalized_url(sent) == seen
    assert normalized_url(seen) == seen


@given(st.text("abcABC019+/=", max_size=40), st.sampled_from(["image/png", "image/jpeg", "", "application/x-y.z"]))
@settings(deadline=None)
def test_the_short_way_of_data_uris_gives_what_the_parser_gives(data: str, kind: str) -> None:
    from ada_url import URL as Parser

    text = f"data:{kind};base64,{data}"
    assert normalized_url(text) == Parser(text).href


@pytest.mark.parametrize("place", [0, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, (512 << 10) - 1, 600_000])
@pytest.mark.parametrize("odd", ["\n", "é"])
def test_an_odd_character_anywhere_in_a_large_data_uri_takes_the_long_way(place: int, odd: str) -> None:
    from ada_url import URL as Parser

    text = "data:image/png;base64," + "A" * place + odd + "A" * (600_000 - place)
    assert normalized_url(text) == Parser(text).href != text
    assert normalized_url(text.replace(odd, "A")) == text.replace(odd, "A")


def test_a_picture_by_url_is_the_blake3_digest_of_the_normalised_text() -> None:
    # BLAKE3 of nothing, from its published test vectors.
    assert url_key("") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert from_chat(chat(image("https://EXAMPLE.com/Q.png?a=1"))).items == ((url_key(URL),),)
    assert from_chat(chat(image(DATA))).items == ((url_key(DATA),),)
    assert from_chat(chat({"type": "image_url", "image_url": URL})).items == ((url_key(URL),),)
    assert from_chat(chat({"type": "input_image", "input_image": {"url": URL}})).items == ((url_key(URL),),)


def test_detail_takes_no_part_and_query_and_fragment_do() -> None:
    with_detail = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    assert from_chat(chat(with_detail)) == from_chat(chat(image(URL)))
    assert len({from_chat(chat(image(URL + more))) for more in ("", "#x", "&b")}) == 3


def test_items_are_kept_in_order_and_counted_once_where_distinct() -> None:
    keys = from_chat(chat(image(URL), image(DATA), image(URL)))
    assert keys.items == ((url_key(URL),), (url_key(DATA),), (url_key(URL),))
    assert keys.distinct == ((url_key(URL),), (url_key(DATA),)) and keys.unkeyed == 0


@pytest.mark.parametrize(
    "part",
    [
        image(None, uuid="cat-7"),
        {"type": "image_url", "image_url": None, "uuid": "cat-7"},
        {"type": "image_url"},
        image(7),
        image(""),
        {"type": "video_url", "video_url": {"url": URL}},
        {"type": "input_audio", "input_audio": {"data": "AA=="}},
    ],
)
def test_items_without_key_are_counted(part: dict) -> None:
    keys = from_chat(chat(image(URL), part))
    assert keys.items == ((url_key(URL),), ()) and keys.unkeyed == 1


def test_the_preprocessed_request_is_taken_as_it_is() -> None:
    body = {
        "token_ids": [1],
        "multi_modal_data": {
            "image_url": [
                {"Url": "https://EXAMPLE.com"},
                {"RawUrl": "no url"},
                {"Decoded": {"content_hash": "0123456789abcdef", "shape": [1]}},
                {"Decoded": {"content_hash": "0123456789ABCDEF"}},
                {"Decoded": {}},
                {"UuidOnly": "cat-7"},
                7,
            ],
            "video_url": [{"Url": URL}],
            "other": [{"Url": URL}],
        },
    }
    keys = from_preprocessed(body)
    assert keys.items[:3] == ((url_key("https://EXAMPLE.com"),), (url_key("no url"),), ("0123456789abcdef",))
    assert keys.unkeyed == 6 and len(keys.items) == 9


def test_a_session_gives_two_keys_of_which_either_is_good() -> None:
    scoped = hashlib.sha256(b"s1").hexdigest() + ":" + url_key(URL)
    assert len(scoped) == 129 and scoped_key(" s1\x1f\n", url_key(URL)) == scoped
    body = {"multi_modal_data": {"image_url": [{"Url": URL}]}, "image_cache_scope": "s1"}
    assert from_preprocessed(body).items == ((scoped, url_key(URL)),)
    assert from_chat(chat(image(URL)), scope="s1 ").items == ((scoped, url_key(URL)),)
    assert from_encode({"mm_items": [URL]}, scope="s1").items == ((scoped, url_key(URL)),)
    for none in ("", " \x1c ", None, 7):
        assert from_preprocessed({**body, "image_cache_scope": none}).items == ((url_key(URL),),)
    assert from_preprocessed(body, KeyRules(session_scoped=False)).items == ((url_key(URL),),)


def test_a_video_has_a_key_where_the_encoders_settings_are_known() -> None:
    rules = KeyRules(video_config={"fps": 2.0, "max_pixels": 100, "a": None})
    text = '{"url":"https://example.com/v.mp4","video_config":{"a":null,"fps":2.0,"max_pixels":100}}'
    key = url_key(text)
    assert video_key("https://example.com/v.mp4", {"max_pixels": 100, "fps": 2.0, "a": None}) == key
    part = {"type": "video_url", "video_url": {"url": "https://EXAMPLE.com/v.mp4"}}
    assert from_chat(chat(part), rules, scope="s").items == ((key,),)
    assert from_encode({"mm_items": ["https://example.com/v.mp4"], "modality": "VIDEO"}, rules).items == ((key,),)
    preprocessed = {"multi_modal_data": {"video_url": [{"Url": "https://example.com/v.mp4"}]}}
    assert from_preprocessed(preprocessed, rules).items == ((key,),)


def test_the_encode_body_takes_texts_and_mappings() -> None:
    body = {"mm_items": [URL, {"url": "https://EXAMPLE.com"}, {"content_hash": "00000000000000ff"}, {"uuid": "x"}, 4]}
    assert from_encode(body).items == (
        (url_key(URL),),
        (url_key("https://example.com/"),),
        ("00000000000000ff",),
        (),
        (),
    )
    assert from_encode({**body, "modality": "AUDIO"}).unkeyed == 5
    assert from_encode({**body, "modality": ["IMAGE"]}).unkeyed == 5


@pytest.mark.parametrize("value", [None, 1, "", "0123", "0123456789ABCDEF", "0" * 17, "0123456789abcdeg"])
def test_a_malformed_content_hash_is_no_key(value: object) -> None:
    assert content_key(value) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["messages", "content", "type", "image_url", "url", "multi_modal_data", "Url", "Decoded",
                         "content_hash", "mm_items", "modality", "image_cache_scope", "video_url"])
        | st.text(max_size=3),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_body_makes_an_extractor_raise(body: object) -> None:
    for extract in (from_chat, from_preprocessed, from_encode):
        assert isinstance(extract(body, KeyRules(video_config={})), MediaKeys)
    assert from_chat({"messages": [{"content": [{"type": "image_url", "image_url": body}]}]}) is not None
    assert from_encode({"mm_items": [body], "modality": "IMAGE"}).items != ()


def test_a_lone_surrogate_is_hashed_and_not_refused() -> None:
    assert from_encode(json.loads('{"mm_items": ["\\ud800"]}')).unkeyed == 0
    assert from_encode({"mm_items": ["x"]}, scope="\ud800").unkeyed == 0


@pytest.mark.parametrize(("module", "package"), [("blake3", "blake3"), ("ada_url", "ada-url")])
def test_without_its_packages_the_error_names_the_extra(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{package}: pip install 'fullhit\[dynamo\]'"):
        dynamo_keys.require()
