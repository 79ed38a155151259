"""The skeleton parse gives the answer of the full parse, whatever the body; and what a bad body is told."""

from __future__ import annotations

import base64
import json
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullhit.http import skeleton
from fullhit.http.encoder import media
from fullhit.http.encoder.imagecheck import inspect_image
from fullhit.http.encoder.media import (
    BadBody,
    EncodeInfo,
    parse_encode,
    parse_follow_up,
    parse_registration,
)
from fullhit.http.encoder.rewrite import CannotRewrite
from fullhit.http.encoder.substitute import substitute_items, unreadable_png, unreadable_uri
from fullhit_publisher.keys import item_key, text_key

FILLER = base64.b64encode(random.Random(7).randbytes(9_000)).decode()
DATA = "data:image/png;base64," + FILLER


def body_of(**fields: object) -> bytes:
    base: dict[str, object] = {
        "encoder_idx": 0,
        "mm_items": [DATA],
        "num_parts": 1,
        "part_idx": 0,
        "req_id": "r_local_part_0",
        "modality": "IMAGE",
        "prefill_host": "10.0.0.1",
        "embedding_port": None,
        "time_stats_json": None,
    }
    base.update(fields)
    return json.dumps({name: value for name, value in base.items() if value is not ...}).encode()


def full_parse(body: bytes) -> EncodeInfo | tuple[str, str]:
    try:
        return media._interpret(media._load(body), None, "")
    except BadBody as error:
        return error.field, error.req_id


def answer(body: bytes) -> EncodeInfo | tuple[str, str]:
    try:
        info = parse_encode(body)
    except BadBody as error:
        return error.field, error.req_id
    return EncodeInfo(**{**{name: getattr(info, name) for name in info.__slots__}, "parsed": ""})


def test_a_big_body_is_read_by_its_skeleton_with_the_keys_of_the_full_parse() -> None:
    url = "http://host/cat.png"
    body = body_of(mm_items=[DATA, url, {"url": DATA, "detail": "high"}, {"url": FILLER}, FILLER])
    info = parse_encode(body)
    assert info.parsed == "skeleton"
    assert info.keys == (
        text_key(DATA),
        text_key(url),
        item_key({"url": DATA, "detail": "high"}),
        text_key(FILLER),
    )
    assert info.items == 5
    assert info.unkeyed == 0
    assert dict(info.sizes)[text_key(url)] == 0
    assert abs(dict(info.sizes)[text_key(FILLER)] - 9_000) < 40
    assert answer(body) == full_parse(body)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_can_be_read_and_is_not_held(kind: type) -> None:
    raw = bytearray(body_of())
    assert parse_encode(kind(raw)).keys == (text_key(DATA),)
    raw.extend(b"x")  # Would raise BufferError if a view were still open.


@pytest.mark.parametrize(
    ("what", "body", "parsed"),
    [
        ("escaped slashes", body_of(mm_items=["data:image/png;base64," + "ab/+" * 3000]).replace(b"/", b"\\/"), "full"),
        ("an escaped d", body_of().replace(b'"data:', b'"\\u0064ata:'), "full"),
        ("a backslash at the end", body_of(mm_items=[DATA + "\\"]), "full"),
        ("a quote inside", body_of(mm_items=[DATA + '"data:' + FILLER]), "full"),
        ("data text in another field", body_of(note=DATA), "full"),
        ("data text as a name", body_of(**{DATA: 1}), "full"),
        ("data text in an option", body_of(mm_items=[{"url": DATA, "mask": DATA}]), "full"),
        ("data text deep down", body_of(mm_items=[[DATA]]), "full"),
        ("a content hash", body_of(mm_items=[{"url": DATA, "content_hash": "sha256:00"}]), "skeleton"),
        ("a uuid of the wrong type", body_of(mm_items=[{"url": DATA, "uuid": 5}]), "skeleton"),
        ("non-ASCII elsewhere", body_of(note="ä例"), "skeleton"),
        ("escaped ASCII elsewhere", body_of(note="<a>").replace(b"<", b"\\u003c"), "full"),
        ("a video", body_of(modality="VIDEO", mm_items=[{"url": DATA, "fps": 2}]), "skeleton"),
        ("escapes beside the data", body_of(time_stats_json=json.dumps({"a": {"b": "c\\"}})), "skeleton"),
        ("many short data strings", body_of(mm_items=["data:,x"] * 1_500), "full"),
        ("very many short strings", body_of(mm_items=["data:,x"] * 9_000), "full"),
        ("long run of backslashes", body_of(note="\\" * 500), "full"),
        ("duplicate members", body_of()[:-1] + b',"mm_items":["http://h/x"]}', "full"),
    ],
)  # fmt: skip
def test_nasty_bodies_get_the_answer_of_the_full_parse(what: str, body: bytes, parsed: str) -> None:
    assert len(body) > 8_192
    assert answer(body) == full_parse(body)
    assert isinstance(full_parse(body), EncodeInfo), full_parse(body)
    assert parse_encode(body).parsed == parsed, what


def test_duplicate_urls_in_an_item_take_the_last_one() -> None:
    body = b'{"req_id":"r","mm_items":[{"url":"' + DATA.encode() + b'","url":"http://h/x"}]}'
    assert parse_encode(body).keys == (text_key("http://h/x"),)


def test_the_placeholders_own_text_in_a_body_changes_nothing() -> None:
    mark = f"@{skeleton._NONCE}:0@"
    for body in (
        body_of(mm_items=[mark, DATA]),
        body_of(mm_items=[DATA, {"url": mark}]),
        body_of(note=mark),
        body_of(mm_items=[DATA, "@@"]).replace(b"@@", b"\\u0040" + mark[1:].encode()),
    ):
        assert answer(body) == full_parse(body)
        assert parse_encode(body).parsed == "full"


JSON_BITS = st.sampled_from(
    ['"', "\\", '\\"', "\\\\", "\\/", "\\u0064ata:", "data:", '"data:', "{", "}", "[", "]", ",", ":", " ",
     "null", "1", '"url"', '"mm_items"', '"req_id"', "x" * 3000, DATA, '"' + DATA + '"', "\\u0022", "ä"]
)  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from([DATA, FILLER, "http://h/a.png", "", "data:,short", DATA[:3000], DATA + "\\", DATA + '"']),
    st.text(max_size=8),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["url", "uuid", "content_hash", "detail", DATA]), inner, max_size=3),
    ),
    max_leaves=6,
)  # fmt: skip
NAMES = st.sampled_from(
    ["req_id", "mm_items", "modality", "num_parts", "part_idx", "prefill_host", "embedding_port", "note", DATA]
)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=8), st.lists(VALUES, max_size=4), st.booleans())
@settings(max_examples=250, deadline=None)
def test_skeleton_and_full_parse_agree_on_any_object(
    members: list[tuple[str, object]], items: list[object], ascii_only: bool
) -> None:
    everything = [("req_id", "r"), ("mm_items", [*items, DATA]), *members]
    text = "{" + ",".join(f"{json.dumps(n)}:{json.dumps(v, ensure_ascii=ascii_only)}" for n, v in everything) + "}"
    body = text.encode("utf-8", "surrogatepass")
    assert answer(body) == full_parse(body)


@given(st.lists(JSON_BITS, max_size=12), st.integers(0, 200), st.integers(0, 200))
@settings(max_examples=250, deadline=None)
def test_skeleton_and_full_parse_agree_on_broken_text(bits: list[str], where: int, cut: int) -> None:
    body = body_of(mm_items=[DATA, {"url": DATA, "detail": "low"}]).decode()
    at = len(body) * where // 200
    body = body[:at] + "".join(bits) + body[at:]
    raw = body[: len(body) - (cut if cut > 100 else 0)].encode()
    assert answer(raw) == full_parse(raw)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"\xff\xfe", "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (b"[" * 100_000, "body"),
        (body_of(mm_items=[DATA])[:-3], "body"),
        (body_of(req_id=...), "req_id"),
        (body_of(req_id=5), "req_id"),
        (body_of(req_id=""), "req_id"),
        (body_of(req_id="x" * 5_000), "req_id"),
        (body_of(mm_items=...), "mm_items"),
        (body_of(mm_items="http://h/x"), "mm_items"),
        (body_of(mm_items={"url": "x"}), "mm_items"),
        (body_of(modality="SMELL"), "modality"),
        (body_of(modality=3), "modality"),
        (body_of(modality=["IMAGE"]), "modality"),
        (body_of(num_parts="1"), "num_parts"),
        (body_of(num_parts=True), "num_parts"),
        (body_of(num_parts=0), "num_parts"),
        (body_of(num_parts=1.5), "num_parts"),
        (body_of(part_idx=-1), "part_idx"),
        (body_of(prefill_host=["h"]), "prefill_host"),
        (body_of(embedding_port="80"), "embedding_port"),
        (body_of(embedding_port=[1, "2"]), "embedding_port"),
    ],
)
def test_a_bad_encode_body_is_told_which_field_is_wrong(body: bytes, field: str) -> None:
    with pytest.raises(BadBody) as caught:
        parse_encode(body)
    assert caught.value.field == field
    assert str(caught.value).startswith(field + ": ")
    if field not in ("body", "req_id"):
        assert caught.value.req_id == "r_local_part_0"
    assert len(str(caught.value)) < 300


def test_a_body_of_the_first_generation_has_no_modality_and_counts_as_images() -> None:
    body = b'{"req_id":"r","mm_items":["http://h/a"],"num_parts":2,"part_idx":1,"encoder_idx":1}'
    info = parse_encode(body)
    assert (info.modality, info.num_parts, info.part_idx, info.prefill_host) == ("IMAGE", 2, 1, "")


def test_items_without_a_key_are_counted() -> None:
    info = parse_encode(b'{"req_id":"r","mm_items":[{"pixel_values": [1]}, 5, null, "http://h/a", "http://h/a"]}')
    assert (info.items, info.unkeyed, len(info.keys)) == (5, 3, 1)


def test_embedding_ports_of_all_backends_are_read() -> None:
    assert parse_encode(body_of(embedding_port=5000)).embedding_port == 5000
    assert parse_encode(body_of(embedding_port=[5000, 5001])).embedding_port == (5000, 5001)
    assert parse_encode(body_of(embedding_port=None)).embedding_port is None


def test_registrations_and_follow_ups_are_read_and_refused() -> None:
    reg = parse_registration(b'{"req_id":"r","receive_url":"10.0.0.1:5","receive_count":2,"modality":"IMAGE"}')
    assert (reg.receive_url, reg.receive_count, reg.host) == ("10.0.0.1:5", 2, "10.0.0.1")
    assert parse_registration(b'{"req_id":"r","receive_url":"tcp://[::1]:5","receive_count":1}').host == "::1"
    send = parse_follow_up(b'{"req_id":"r","prefill_host":"h","embedding_port":7,"receive_count":2}')
    assert (send.host, send.destination, send.receive_count) == ("h", "h:7", 2)
    for body, field in (
        (b"nope", "body"),
        (b'{"receive_url":"h:1","receive_count":1}', "req_id"),
        (b'{"req_id":"r","receive_count":1}', "receive_url"),
        (b'{"req_id":"r","receive_url":"h:1"}', "receive_count"),
        (b'{"req_id":"r","receive_url":"h:1","receive_count":0}', "receive_count"),
    ):
        with pytest.raises(BadBody) as caught:
            parse_registration(body)
        assert caught.value.field == field


def test_of_six_megabytes_only_the_kilobyte_around_the_picture_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    uri = "data:image/jpeg;base64," + base64.b64encode(os.urandom(4_500_000)).decode()
    parsed: list[int] = []
    load = media._load

    def counting(body: bytes) -> object:
        parsed.append(len(body))
        return load(body)

    monkeypatch.setattr(media, "_load", counting)
    assert parse_encode(body_of(mm_items=[uri])).keys == (text_key(uri),)
    assert sum(parsed) < 2_000


# Substitution


def pictures(*texts: object) -> bytes:
    return body_of(mm_items=list(texts), note='a "quoted\\" [note] {x}', mm_items2=["mm_items"])


def inspected(body: bytes) -> EncodeInfo:
    return parse_encode(body, inspect_image)


def test_bad_pictures_are_reported_by_place_and_only_for_images() -> None:
    good, bad = unreadable_uri(), "data:image/png;base64,aGVsbG8gd29ybGQ="
    info = inspected(pictures("http://h/x", bad, good, {"url": bad, "detail": "low"}))
    assert [item.index for item in info.bad] == [1, 3]
    assert inspected(body_of(mm_items=[bad], modality="VIDEO")).bad == ()
    assert parse_encode(pictures(bad)).bad == ()


def test_only_the_bad_item_is_replaced_and_every_other_byte_stays() -> None:
    bad = "data:image/png;base64,aGVsbG8gd29ybGQ="
    for body in (
        pictures(bad, "http://h/x", {"url": bad, "detail": "high", "content_hash": "sha256:00"}),
        pictures(DATA, bad, [bad], {"a": {"b": [bad]}}),
        pictures('http://h/[{"', bad, "\\\\"),
        body_of(mm_items=[bad], note={"mm_items": ["x", "y"]}),
    ):
        info = inspected(body)
        assert info.bad
        new = substitute_items(body, [item.index for item in info.bad], info.items)
        after = inspected(new)
        assert after.bad == ()
        before_fields, after_fields = json.loads(body), json.loads(new)
        for index, (old, now) in enumerate(
            zip(before_fields.pop("mm_items"), after_fields.pop("mm_items"), strict=True)
        ):
            if index in [item.index for item in info.bad]:
                assert (now["url"] if isinstance(now, dict) else now) == unreadable_uri()
                if isinstance(now, dict):
                    assert now.get("detail") == old.get("detail")
                    assert "content_hash" not in now
            else:
                assert now == old
        assert before_fields == after_fields
        assert new.startswith(body[: body.index(b'"mm_items": [') + 13])
        assert new.endswith(body[body.rindex(b'"num_parts"') :])


@given(st.lists(VALUES, max_size=4), st.integers(0, 3), st.booleans())
@settings(max_examples=150, deadline=None)
def test_substitution_finds_the_right_element_or_refuses(items: list[object], where: int, indent: bool) -> None:
    bad = "data:image/png;base64,aGVsbG8gd29ybGQ="
    place = min(where, len(items))
    items = [*items[:place], bad, *items[place:]]
    fields = {"a": {"mm_items": [1]}, "req_id": "r", "mm_items": items, "z": ["mm_items", "]"]}
    body = json.dumps(fields, indent=1 if indent else None).encode()
    try:
        new = substitute_items(body, [place], len(items))
    except CannotRewrite:
        assert any(not isinstance(item, str | dict | list) for item in items)
        return
    fields["mm_items"] = [*items[:place], unreadable_uri(), *items[place + 1 :]]
    assert json.loads(new) == fields
    assert new.startswith(body[: body.index(b'"req_id"')])


def test_a_body_that_cannot_be_walked_is_not_substituted() -> None:
    bad = "data:image/png;base64,aGVsbG8gd29ybGQ="
    for body, items in (
        (body_of(mm_items=[None, bad]), 2),
        (body_of(note=[[1]] * 60_000, mm_items=[bad]), 1),
        (b'{"req_id":"r","mm_\\u0069tems":["' + bad.encode() + b'"]}', 1),
    ):
        with pytest.raises(CannotRewrite):
            substitute_items(body, [items - 1], items)


def test_the_substitute_is_a_valid_small_picture() -> None:
    import io

    from PIL import Image

    with Image.open(io.BytesIO(unreadable_png())) as image:
        image.load()
        assert (image.mode, image.size) == ("RGB", (224, 224))
        assert len(image.getcolors() or []) >= 3
    assert len(unreadable_png()) < 4_000
    assert inspect_image(unreadable_uri()) is None
